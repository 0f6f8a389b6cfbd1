"""The two real models, for tests that need them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from headwater.model.pull import pull


@pytest.fixture(scope="session")
def model_file() -> Callable[[str], Path]:
    """Name of a catalogue model -> its file: <name>.gguf in HEADWATER_TEST_MODELS, or else pulled into the
    user's cache."""

    def find(name: str) -> Path:
        folder = os.environ.get("HEADWATER_TEST_MODELS")
        return Path(folder) / f"{name}.gguf" if folder else pull(name)

    return find
