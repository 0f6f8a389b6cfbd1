"""Same bits, everywhere: the matrix. ``make bits`` runs all of it on the real models."""
