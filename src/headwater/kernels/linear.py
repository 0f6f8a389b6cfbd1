"""Packed linear layers whose results for a row do not depend on the rows beside it, as far as a rule can make it so.

oneDNN chooses its kernel, and with it the order of the sums over K, by the number of rows. Measured: a
single row may differ from the same row among others; on CPUs with AMX, 1 to 32 rows share one order and
larger counts take several others, at 1e-5 to 1e-4 of the elements. Calling it only with row counts of one
class keeps the bits; the start-up probe (``probe.py``) finds how far a class reaches on this machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowRule:
    """Row counts a product may be called with: ``least`` (fewer are padded) to ``most`` (more are split; None: any)."""

    least: int
    most: int | None

    def __str__(self) -> str:
        return f"at least {self.least} rows a call" + ("" if self.most is None else f", at most {self.most}")


STRICT = RowRule(least=2, most=32)
"""Holds on every CPU measured; the rule until a probe has shown that a freer one holds."""
RULES = (RowRule(1, None), RowRule(2, None), RowRule(4, None), RowRule(1, 32), STRICT)
"""Freest first."""


class PackedLinear:
    """``x [n, in_features] -> [n, out_features]`` in the dtype of the weight, which is packed once, or in
    ``out_dtype`` (rounded to the weight's first).

    ``rows`` says how the rows are cut into calls; only the probe changes it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> None:
        self.out_dtype = weight.dtype if out_dtype is None else out_dtype
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.has_bias = bias is not None
        self.rows = STRICT
        self._bias = bias
        self._packed: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self._packed else weight

    def raw(self, x: Tensor) -> Tensor:
        """One library call with exactly these rows."""
        if self._packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return out
        return F.linear(x, self._weight, self._bias)

    def apply(self, x: Tensor, rule: RowRule) -> Tensor:
        """The product under ``rule``."""
        n = x.shape[0]
        if n == 0:
            return x.new_empty((0, self.out_features))
        if n < rule.least:
            return self.raw(torch.cat([x] * -(-rule.least // n)))[:n]
        if rule.most is not None and n > rule.most:
            return torch.cat([self.apply(part, rule) for part in torch.split(x, rule.most)])
        return self.raw(x)

    def __call__(self, x: Tensor) -> Tensor:
        return self.apply(x, self.rows).to(self.out_dtype)
