"""Models that the end-to-end tests share, each loaded once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headwater.text.tokenizer import load_tokenizer
from tests.e2e.engine import Loaded, load
from tests.e2e.models import hybrid_model, plain_model, write_folder
from tests.model.tiny import tiny
from tests.text.toy import toy_tokenizer

F32, BF16 = torch.float32, torch.bfloat16

LoadTiny = Callable[..., Loaded]


@pytest.fixture(scope="session")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("plain"), plain_model())


@pytest.fixture(scope="session")
def hybrid_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("hybrid"), hybrid_model())


@pytest.fixture(scope="session")
def plain(plain_folder: Path) -> Loaded:
    """A tiny Llama, float32, vocabulary of 300, up to 4096 tokens."""
    return load(plain_folder, load_tokenizer(plain_folder), F32)


@pytest.fixture(scope="session")
def hybrid(hybrid_folder: Path) -> Loaded:
    """A tiny Gemma 3 with windows of 8: one full group, two sliding ones."""
    return load(hybrid_folder, load_tokenizer(hybrid_folder), F32)


@pytest.fixture(scope="session")
def load_tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadTiny:
    """(kind of tests/model/tiny.py, dtype, kernels) -> the model, with a vocabulary of 97 and up to 128 tokens."""
    loaded: dict[tuple[str, torch.dtype, str], Loaded] = {}

    def get(kind: str, dtype: torch.dtype = F32, kernels: str = "auto") -> Loaded:
        key = kind, dtype, kernels
        if key not in loaded:
            path = tmp_path_factory.mktemp(kind)
            tiny(kind).save_pretrained(path)
            loaded[key] = load(path, toy_tokenizer(), dtype, kernels=kernels)
        return loaded[key]

    return get
