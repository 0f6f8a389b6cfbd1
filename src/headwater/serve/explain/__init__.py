"""Accounts of what requests reuse: told in answers, kept for a while, and made on demand."""
