from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headwater.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def smollm_path(model_file: Callable[[str], Path]) -> Path:
    return model_file("smollm2-135m")


@pytest.fixture(scope="session")
def smollm(smollm_path: Path) -> Tokenizer:
    return load_tokenizer(smollm_path)
