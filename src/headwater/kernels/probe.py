"""Does a row's product keep its bits whatever rows share the call? Asked at start, of the products that will be used.

The rates at which library products break this are small (1e-5 of the elements), so few rows or few columns
miss it: every row count is compared on at least ``MIN_ELEMENTS`` outputs of the layer's real shape.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.kernels.linear import RULES, STRICT, PackedLinear, RowRule

REFERENCE_ROWS = 512
ROW_COUNTS = (1, 2, 3, 256, 33, 5, 7, 8, 9, 16, 17, 31, 32, 48, 64, 65, 100, 128, 200, 384)
"""Those most likely to differ come first."""
MIN_ELEMENTS = 250_000
WIDE = 8192
"""Layers with so many outputs (the vocabulary) are probed with the rows of a decode batch only: they get no more."""
WIDE_ROWS = 64


@dataclass(frozen=True, slots=True)
class ShapeReport:
    """What was found for one shape: the rule chosen, and whether results kept their bits under it."""

    in_features: int
    out_features: int
    rule: RowRule
    row_invariant: bool
    n_different: int
    """Elements that differed under the chosen rule (0 when invariant)."""
    n_compared: int


@dataclass(frozen=True, slots=True)
class ProbeReport:
    row_invariant: bool
    shapes: tuple[ShapeReport, ...]
    seconds: float

    def line(self) -> str:
        """One line to print at start."""
        if self.row_invariant:
            mosts = [shape.rule.most for shape in self.shapes if shape.rule.most is not None]
            price = f", with calls of at most {min(mosts)} rows" if mosts else ""
            return f"equal bits with and without the cache: checked on this CPU{price}"
        bad = [shape for shape in self.shapes if not shape.row_invariant]
        worst = max(bad, key=lambda shape: shape.n_different / max(1, shape.n_compared))
        return (
            f"the matrix products are not row-invariant here: {len(bad)} of {len(self.shapes)} shapes, at worst "
            f"{worst.n_different / max(1, worst.n_compared):.0e} of the elements "
            f"({worst.in_features} x {worst.out_features}); logits may differ in the last bits with the batch"
        )


def probe_row_invariance(linears: Iterable[object], *, budget_s: float = 1.2) -> ProbeReport:
    """Choose for each ``PackedLinear`` the freest row rule that keeps the bits, and report what holds.

    Other kinds of layers are not looked at. Layers of one shape, dtype and bias are probed once. After ``budget_s``
    seconds no freer rule is tried (the strict one is checked), and one window of rows per count is compared.
    """
    began = time.perf_counter()
    deadline = began + budget_s
    same_shape: dict[tuple[int, int, torch.dtype, bool], list[PackedLinear]] = {}
    for linear in linears:
        if isinstance(linear, PackedLinear):
            key = (linear.in_features, linear.out_features, linear.dtype, linear.has_bias)
            same_shape.setdefault(key, []).append(linear)
    shapes = []
    for layers in same_shape.values():
        report = _probe_shape(layers[0], deadline)
        for layer in layers:
            layer.rows = report.rule
        shapes.append(report)
    return ProbeReport(all(shape.row_invariant for shape in shapes), tuple(shapes), time.perf_counter() - began)


def _probe_shape(linear: PackedLinear, deadline: float) -> ShapeReport:
    """The first rule that holds; if none does, the strict one with what was wrong."""
    n_rows = WIDE_ROWS if linear.out_features >= WIDE else REFERENCE_ROWS
    x = torch.randn((n_rows, linear.in_features), generator=torch.Generator().manual_seed(0)).to(linear.dtype)
    for rule in RULES:
        if rule == STRICT or time.perf_counter() < deadline:
            n_different, n_compared = _compare(linear, x, rule, deadline)
            if n_different == 0 and (rule == STRICT or time.perf_counter() < deadline):
                return _report(linear, rule, 0, n_compared)
    return _report(linear, STRICT, n_different, n_compared)


def _report(linear: PackedLinear, rule: RowRule, n_different: int, n_compared: int) -> ShapeReport:
    return ShapeReport(linear.in_features, linear.out_features, rule, n_different == 0, n_different, n_compared)


def _compare(linear: PackedLinear, x: Tensor, rule: RowRule, deadline: float) -> tuple[int, int]:
    """(elements that differ, elements compared). Stops at the first row count that differs."""
    reference = linear.apply(x, rule)
    different = compared = 0
    for count in ROW_COUNTS:
        if count >= len(x):
            continue
        enough = max(1, -(-MIN_ELEMENTS // (count * linear.out_features)))
        step = max(count, (len(x) - count) // enough)  # windows spread over the rows
        for at in range(0, min(len(x) - count + 1, step * enough), step):
            part = linear.apply(x[at : at + count], rule)
            different += int((part != reference[at : at + count]).sum())
            compared += part.numel()
            if time.perf_counter() > deadline:
                break
        if different:
            break
    return different, compared
