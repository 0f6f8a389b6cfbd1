"""The matrix on the real models: workloads, and one kind of numbers at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from headwater.text.tokenizer import load_tokenizer
from tests.bits.matrix import Cell, Matrix, Tally, Workload, digest
from tests.bits.numbers import Numbers

VOCAB = 40_000
"""Ids up to this are ordinary tokens in both models."""


def workload(n_shared: int, n_cold: int) -> Workload:
    """Hits of nothing, of a block, of blocks and some slots, of the half, and of all but the last token."""
    half = n_shared // 32 * 16
    hits = [0, 16, 21, half, n_shared - 1]
    return Workload.make(block_size=16, hits=hits, n_shared=n_shared, n_own=5, n_cold=n_cold, vocab=VOCAB)


class RealMatrix:
    """``long`` prompts; for chunks of one token the cold one is a short one, it would be most of the work."""

    def __init__(self, path: Path, numbers: Numbers, *, n_shared: int, n_cold: int) -> None:
        loaded = numbers.load(path, load_tokenizer(path), max_positions=1024)
        self.promised = loaded.row_invariant
        keep = {"keep": digest} if self.promised else {}
        self._long = Matrix(loaded, workload(n_shared, n_cold), **keep)  # type: ignore[arg-type]
        self._short = Matrix(loaded, workload(n_shared, 6), **keep)  # type: ignore[arg-type]

    def run(self, cells: Sequence[Cell], told: Callable[[Cell], None] = lambda cell: None) -> Tally:
        total = Tally()
        for cell in cells:
            told(cell)
            total += (self._short if cell.chunk == 1 else self._long).run(cell)
        return total
