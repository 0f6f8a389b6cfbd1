"""``--numerics fast``: per shape and number of rows, whichever product is quicker, the own one or the library's.

The library's (oneDNN through ``PackedLinear``, without a rule for its rows) may order a row's sum by the rows that
share the call: the promise of equal bits is not given.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

from headwater.kernels.linear import PackedLinear, RowRule
from headwater.kernels.ops import Linear, Ops
from headwater.kernels.torch_ref import TorchOps

ANY_ROWS = RowRule(1, None)
ROWS = (1, 4, 16, 64, 256)
"""Row counts that are timed; a call takes what won at the next larger one (or the largest)."""
REPEATS = 5
SHAPE_S = 0.4
"""No more than so long is spent on one shape."""
WASH_BYTES = 16 << 20
"""So much other memory is touched before a timed call: in a model, the weight was last read a whole step ago."""


class MixedLinear:
    """One product in both forms. ``library_wins[i]`` says which is called with up to ROWS[i] rows."""

    def __init__(self, own: Linear, library: Linear, library_wins: Sequence[bool]) -> None:
        self.in_features, self.out_features, self.dtype = own.in_features, own.out_features, own.dtype
        self._choice = [library if wins else own for wins in library_wins]

    def __call__(self, x: Tensor) -> Tensor:
        return self._choice[min(bisect_left(ROWS, len(x)), len(ROWS) - 1)](x)


class FastOps:
    """Another ``Ops`` but for its products."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.dtype = ops.dtype
        self.kv_layout = ops.kv_layout
        self.pack_int8 = ops.pack_int8
        self.rms_norm = ops.rms_norm
        self.add_rms_norm = ops.add_rms_norm
        self.rope_and_write = ops.rope_and_write
        self.attention = ops.attention
        self.gated_act = ops.gated_act
        self.stack = ops.stack
        self.embedding = ops.embedding
        self._library_wins: dict[tuple[int, int, torch.dtype], tuple[bool, ...]] = {}

    @property
    def notes(self) -> list[str]:
        n_shapes = len(self._library_wins)
        used = sum(any(wins) for wins in self._library_wins.values())
        which = f": the library's in {used} of {n_shapes} shapes, own ones else" if n_shapes else ""
        return [
            *self._ops.notes,
            f"numerics fast: the quicker product of each shape{which}; equal bits are not promised",
        ]

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> Linear:
        """The first of each shape is packed in both forms and timed; others in the forms that won."""
        own = self._ops.pack_linear(weight, bias, out_dtype=out_dtype)
        if isinstance(own, PackedLinear):
            own.rows = ANY_ROWS
            return own
        out = self.dtype if out_dtype is None else out_dtype
        key = (*weight.shape, out)
        wins = self._library_wins.get(key)
        if wins is not None and not any(wins):
            return own
        library = TorchOps(self.dtype).pack_linear(weight, bias, out_dtype=out)
        library.rows = ANY_ROWS
        if wins is None:
            wins = self._library_wins[key] = which_wins(own, library, self.dtype)
        return MixedLinear(own, library, wins) if any(wins) else own


def which_wins(own: Linear, library: Linear, dtype: torch.dtype) -> tuple[bool, ...]:
    """For each of ROWS, whether the library's product is the quicker one. The own one keeps what was not timed."""
    deadline = time.perf_counter() + SHAPE_S
    wash = torch.zeros(WASH_BYTES // 4)
    wins = []
    for n in ROWS:
        x = torch.randn((n, own.in_features), generator=torch.Generator().manual_seed(0)).to(dtype)
        best = {id(own): float("inf"), id(library): float("inf")}
        for _ in range(REPEATS):
            if time.perf_counter() > deadline:
                break
            for linear in (own, library):
                wash.add_(1.0)
                began = time.perf_counter()
                linear(x)
                best[id(linear)] = min(best[id(linear)], time.perf_counter() - began)
        wins.append(best[id(library)] < best[id(own)])
    return tuple(wins)
