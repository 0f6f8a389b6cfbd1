"""Models: what they are (spec), their layers, their files, and a small catalogue."""
