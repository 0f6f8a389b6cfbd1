from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headwater.text.tokenizer import Tokenizer, load_tokenizer

ModelFile = Callable[[str], Path]


@pytest.fixture(scope="session")
def smollm_path(model_file: ModelFile) -> Path:
    return model_file("smollm2-135m")


@pytest.fixture(scope="session")
def gemma_path(model_file: ModelFile) -> Path:
    return model_file("gemma3-270m")


@pytest.fixture(scope="session")
def smollm(smollm_path: Path) -> Tokenizer:
    return load_tokenizer(smollm_path)


@pytest.fixture(scope="session")
def gemma(gemma_path: Path) -> Tokenizer:
    return load_tokenizer(gemma_path)
