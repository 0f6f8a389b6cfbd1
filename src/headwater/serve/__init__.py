"""The HTTP server over one engine."""
