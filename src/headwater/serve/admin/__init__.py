"""What operators ask of a server."""
