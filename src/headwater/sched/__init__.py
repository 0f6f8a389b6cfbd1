"""Scheduling: which sequences compute how many tokens in the next step. Pure Python."""
