"""Fixtures for all tests."""

from __future__ import annotations

import os

# As in the engine process, and before anything loads OpenMP: more threads than cores would do little but spin.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from tests.models_fixture import model_file

__all__ = ["model_file"]
