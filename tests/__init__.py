"""Tests, laid out like the package."""

import os

# Read once, when PyTorch loads OpenMP. Its threads otherwise spin for milliseconds at every operation while the one
# they wait for is not scheduled, and tests run servers beside themselves.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
