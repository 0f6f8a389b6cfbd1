"""All layers in one native call against the same operations one by one: equal bits, in the logits and in the store."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headwater.kernels import make_ops
from headwater.kernels.layout import LayerKV
from headwater.kernels.native_stack import NativeStack
from headwater.model.decoder import Model
from headwater.model.load import load_model
from tests.bits.matrix import threads
from tests.model.dense import empty_store, whole_batch
from tests.model.tiny import tiny

CHANGES: dict[str, dict[str, int]] = {
    "llama-biases": {"head_dim": 32},
    "qwen2": {"hidden_size": 192},
    "qwen3": {"head_dim": 32, "intermediate_size": 96},
    "gemma3": {"head_dim": 32, "intermediate_size": 96},
}
"""Heads of 32, which the native attention takes; gates of whole panels, which are one operation with their product, and
others (80)."""


def load(kind: str, dtype: torch.dtype, quantization: str, folder: Path) -> Model:
    tiny(kind, **CHANGES[kind]).save_pretrained(folder)
    return load_model(folder, make_ops(dtype), cache_dir=folder / "cache", quantization=quantization)


def forward(model: Model, sequences: list[list[int]], at: Tensor | None) -> tuple[Tensor, list[LayerKV]]:
    batch, n_pages = whole_batch(sequences, 16)
    if at is not None:
        object.__setattr__(batch, "logits_at", at)
    kv = empty_store(model, n_pages, 16)
    return model.forward(batch, kv), kv


@pytest.mark.parametrize("n_times", [1, 4])
@pytest.mark.parametrize("quantization", ["none", "w8a8", "w8a16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CHANGES)
def test_one_call_has_the_bits_of_many(
    kind: str, dtype: torch.dtype, quantization: str, n_times: int, tmp_path: Path
) -> None:
    """With 128 rows the threads share every operation; with 515 each of two takes rows of its own."""
    model = load(kind, dtype, quantization, tmp_path)
    stack = model.stack
    assert isinstance(stack, NativeStack)
    rng = random.Random(0)
    sequences = [[rng.randrange(90) for _ in range(n)] for n in (1, 40, 17, 70) * n_times + (3,) * (n_times > 1)]
    n_rows = sum(map(len, sequences))
    for at in (None, torch.tensor([0, 40, 57, 127]), torch.tensor([63]), torch.tensor([], dtype=torch.int64)):
        with threads(2):
            model.stack = stack
            whole, kv = forward(model, sequences, at)
            model.stack = None
            single, kv_single = forward(model, sequences, at)
        assert whole.shape == single.shape == (n_rows if at is None else len(at), 97)
        assert torch.equal(whole, single) and torch.isfinite(whole).all()
        for a, b in zip(kv, kv_single, strict=True):
            for block in range(2 * n_times):
                one, other = a.layout.read(a.pages, block, 1), b.layout.read(b.pages, block, 1)
                assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
