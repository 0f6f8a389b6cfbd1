"""Fixtures for all tests."""

from __future__ import annotations

from tests.models_fixture import model_file

__all__ = ["model_file"]
