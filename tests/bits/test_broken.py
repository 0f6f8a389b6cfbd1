"""Would the matrix notice? In each of these ways bits get lost; the cell that has it must fail, and others must not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headwater.cache.prefix import PrefixCache
from headwater.kernels.linear import PackedLinear
from headwater.kernels.torch_ref import TorchOps
from headwater.run.difference import bits
from headwater.sched.preempt import Places
from tests.bits.matrix import WHOLE, Cell, Matrix, Workload
from tests.e2e.engine import Loaded, load
from tests.model.tiny import VOCAB, tiny
from tests.text.toy import toy_tokenizer

WORK = Workload.make(block_size=4, hits=[4, 8, 19, 23], n_shared=24, n_own=5, n_cold=20, vocab=VOCAB)
QUIET = Cell(WHOLE, 0, 1, preempted=False, scattered=False)


@pytest.fixture(scope="module", params=["smollm", "gemma3"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder: Path = tmp_path_factory.mktemp(request.param)
    tiny(request.param).save_pretrained(folder)
    return load(folder, toy_tokenizer(), torch.float32, None, "torch")


def nudged(x: Tensor) -> Tensor:
    """The last bit of every number flipped."""
    x = x.clone()
    bits(x).bitwise_xor_(1)
    return x


def a_product_with_7_rows(matrix: Matrix, patch: pytest.MonkeyPatch) -> None:
    call = PackedLinear.__call__
    patch.setattr(PackedLinear, "__call__", lambda self, x: nudged(call(self, x)) if len(x) == 7 else call(self, x))


def a_row_that_is_not_the_first(matrix: Matrix, patch: pytest.MonkeyPatch) -> None:
    attention = TorchOps.attention

    def wrong(self: TorchOps, q: Tensor, batch: Any, *rest: Any, **more: Any) -> Tensor:
        out = attention(self, q, batch, *rest, **more)
        for begin in batch.query_start[1:-1]:
            out[begin:] = nudged(out[begin:])
        return out

    patch.setattr(TorchOps, "attention", wrong)


def a_norm_by_four_threads(matrix: Matrix, patch: pytest.MonkeyPatch) -> None:
    norm = TorchOps.rms_norm

    def wrong(self: TorchOps, *rest: Any) -> Tensor:
        out = norm(self, *rest)
        return nudged(out) if torch.get_num_threads() == 4 else out

    patch.setattr(TorchOps, "rms_norm", wrong)


def a_bit_of_v_in_the_last_layer_of_a_hit(matrix: Matrix, patch: pytest.MonkeyPatch) -> None:
    # It reaches no other token's KV, and these logits hardly.
    flip(matrix, scattered=False)


def a_bit_of_a_scattered_block(matrix: Matrix, patch: pytest.MonkeyPatch) -> None:
    flip(matrix, scattered=True)


def flip(matrix: Matrix, *, scattered: bool) -> None:
    home = matrix._homes[scattered]
    layer = home.store.layers[-1]
    held = [b for b in home.cache.pool.evictable if home.cache.pool.group[b] == layer.group]
    node_of = home.cache.pool.node
    block = max(held, key=lambda b: -1 if (node := node_of[b]) is None else node.depth)
    bits(layer.pages.v[block, 0, 0])[1] ^= 1  # contiguous: a view


def a_block_of_the_preempted(matrix: Matrix, patch: pytest.MonkeyPatch) -> None:
    preempt, store = Places.preempt, matrix._homes[False].store

    def wrong(self: Places, seq: Any) -> None:
        for table in seq.held().tables:
            for block in table.blocks:
                for layer in store.layers:
                    bits(layer.pages.k[block])[1, 0, 3] ^= 1
        preempt(self, seq)

    patch.setattr(Places, "preempt", wrong)


def no_hits(matrix: Matrix, patch: pytest.MonkeyPatch) -> None:
    lookup = PrefixCache.lookup
    patch.setattr(PrefixCache, "lookup", lambda self, chain, **kw: lookup(self, chain, bypass="broken"))


Break = Callable[[Matrix, pytest.MonkeyPatch], None]
BREAKS: list[tuple[Break, Cell, str]] = [
    (a_product_with_7_rows, replace(QUIET, chunk=7), "logits at|of layer|tokens"),
    (a_row_that_is_not_the_first, replace(QUIET, n_strangers=3), "logits at|of layer|tokens"),
    (a_norm_by_four_threads, replace(QUIET, threads=4), "logits at|of layer|tokens"),
    (a_bit_of_v_in_the_last_layer_of_a_hit, QUIET, "V of layer|logits at"),
    (a_bit_of_a_scattered_block, replace(QUIET, scattered=True), "V of layer|logits at"),
    (a_block_of_the_preempted, replace(QUIET, preempted=True), "logits at|of layer|tokens"),
    (no_hits, QUIET, "a hit of 0 tokens"),
]


@pytest.mark.parametrize(("break_it", "cell", "told"), BREAKS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_matrix_notices(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, break_it: Break, cell: Cell, told: str
) -> None:
    assert loaded.row_invariant
    matrix = Matrix(loaded, WORK)
    matrix.run(cell)
    break_it(matrix, monkeypatch)
    with pytest.raises(AssertionError, match=told) as caught:
        matrix.run(cell)
    assert str(caught.value).startswith(f"[{cell}] ")


@pytest.mark.parametrize("break_it", [a_product_with_7_rows, a_row_that_is_not_the_first, a_norm_by_four_threads])
def test_what_is_broken_elsewhere_is_not_noticed_here(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, break_it: Break
) -> None:
    # So that a failure says which cell it is.
    matrix = Matrix(loaded, WORK)
    break_it(matrix, monkeypatch)
    matrix.run(replace(QUIET, chunk=1))
