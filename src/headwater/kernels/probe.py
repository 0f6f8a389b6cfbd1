"""Does a row's product keep its bits whatever rows share the call? Asked at start, of the products that will be used.

The rates at which products break this are small (1e-5 of the elements), so few rows or few columns miss it:
every row count is compared on so many outputs of the layer's real shape that such a rate shows.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.kernels.linear import RULES, STRICT, PackedLinear, RowRule
from headwater.kernels.ops import Linear

REFERENCE_ROWS = 512
ROW_COUNTS = (1, 2, 3, 256, 33, 5, 7, 8, 9, 16, 17, 31, 32, 48, 64, 65, 100, 128, 200, 384)
"""Those most likely to differ come first."""
MIN_ELEMENTS = 250_000
"""Of the library's products, per row count; what breaks there shows at several counts."""
WIDE = 8192
"""Layers with so many outputs (the vocabulary) are probed with the rows of a decode batch only: they get no more."""
WIDE_ROWS = 64

FIRST_COUNTS = (1, 2, 17, 512, 33, 3, 16, 64, 100, 7, 32, 8, 31)
OWN_COUNTS = (*FIRST_COUNTS, *(n for n in range(1, 34) if n not in FIRST_COUNTS))
OWN_ELEMENTS = 500_000
"""Of any other product, per row count: at a rate of 1e-5 all of them are equal once in 150 times."""
FEW = 4
"""Windows of a row count that are compared however late it is."""


@dataclass(frozen=True, slots=True)
class ShapeReport:
    """What was found for one kind of product and shape."""

    kind: str
    in_features: int
    out_features: int
    row_invariant: bool
    n_different: int
    """Elements that differed (0 when invariant)."""
    n_compared: int
    rule: RowRule | None = None
    """The rule chosen for a product of the library's."""
    n_unchecked: int = 0
    """Row counts for which there was no time."""


@dataclass(frozen=True, slots=True)
class ProbeReport:
    row_invariant: bool
    shapes: tuple[ShapeReport, ...]
    seconds: float

    def line(self) -> str:
        """One line to print at start."""
        if self.row_invariant:
            mosts = [shape.rule.most for shape in self.shapes if shape.rule is not None and shape.rule.most is not None]
            price = f", with calls of at most {min(mosts)} rows" if mosts else ""
            unchecked = sum(shape.n_unchecked for shape in self.shapes)
            left = f" (no time for {unchecked} of {len(self.shapes) * len(OWN_COUNTS)} row counts)" if unchecked else ""
            return f"equal bits with and without the cache: checked on this CPU{price}{left}"
        bad = [shape for shape in self.shapes if not shape.row_invariant]
        worst = max(bad, key=lambda shape: shape.n_different / max(1, shape.n_compared))
        return (
            f"the matrix products are not row-invariant here: {len(bad)} of {len(self.shapes)} shapes, at worst "
            f"{worst.n_different / max(1, worst.n_compared):.0e} of the elements "
            f"({worst.in_features} x {worst.out_features}); logits may differ in the last bits with the batch"
        )


def probe_row_invariance(linears: Iterable[Linear], *, budget_s: float = 1.2) -> ProbeReport:
    """Compare rows alone and in company, for every kind and shape of product once.

    For each ``PackedLinear`` the freest row rule that keeps the bits is chosen; after ``budget_s`` seconds no freer
    rule is tried (the strict one is checked). Of other products, row counts are compared until the time is over, and
    a few single rows of each shape always.
    """
    began = time.perf_counter()
    deadline = began + budget_s
    packed: dict[tuple[int, int, torch.dtype, bool], list[PackedLinear]] = {}
    others: dict[tuple[str, int, int, torch.dtype], Linear] = {}
    for linear in linears:
        if isinstance(linear, PackedLinear):
            key = (linear.in_features, linear.out_features, linear.dtype, linear.has_bias)
            packed.setdefault(key, []).append(linear)
        else:
            others.setdefault((_kind(linear), linear.in_features, linear.out_features, linear.dtype), linear)
    shapes = []
    for layers in packed.values():
        report = _probe_shape(layers[0], deadline)
        for layer in layers:
            layer.rows = report.rule or STRICT
        shapes.append(report)
    shapes += _probe_own(list(others.values()), deadline)
    return ProbeReport(all(shape.row_invariant for shape in shapes), tuple(shapes), time.perf_counter() - began)


def _kind(linear: Linear) -> str:
    """What tells products of one shape apart."""
    return f"{type(linear).__name__} {getattr(linear, 'kind', '')}".strip()


# ---- the library's products -----------------------------------------------------------------------------


def _probe_shape(linear: PackedLinear, deadline: float) -> ShapeReport:
    """The first rule that holds; if none does, the strict one with what was wrong."""
    n_rows = WIDE_ROWS if linear.out_features >= WIDE else REFERENCE_ROWS
    x = _rows(linear, n_rows)
    for rule in RULES:
        if rule == STRICT or time.perf_counter() < deadline:
            n_different, n_compared = _compare(linear, x, rule, deadline)
            if n_different == 0 and (rule == STRICT or time.perf_counter() < deadline):
                return _report(linear, rule, 0, n_compared)
    return _report(linear, STRICT, n_different, n_compared)


def _report(linear: PackedLinear, rule: RowRule, n_different: int, n_compared: int) -> ShapeReport:
    return ShapeReport(
        _kind(linear), linear.in_features, linear.out_features, n_different == 0, n_different, n_compared, rule
    )


def _compare(linear: PackedLinear, x: Tensor, rule: RowRule, deadline: float) -> tuple[int, int]:
    """(elements that differ, elements compared). Stops at the first row count that differs."""
    reference = linear.apply(x, rule)
    different = compared = 0
    for count in ROW_COUNTS:
        if count >= len(x):
            continue
        for at in _windows(len(x), count, -(-MIN_ELEMENTS // linear.out_features)):
            part = linear.apply(x[at : at + count], rule)
            different += int((part != reference[at : at + count]).sum())
            compared += part.numel()
            if time.perf_counter() > deadline:
                break
        if different:
            break
    return different, compared


# ---- any others -----------------------------------------------------------------------------------------


class _Own:
    """One product under test: calls of every size against one call with all rows."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear
        self._n_rows = -(-OWN_ELEMENTS // linear.out_features)
        n = WIDE_ROWS + 1 if linear.out_features >= WIDE else max(self._n_rows, max(OWN_COUNTS) + 1)
        self._x = _rows(linear, n)
        self._reference = linear(self._x)
        self._n_different = self._n_compared = 0
        self.todo = [count for count in OWN_COUNTS if count < n]

    def compare(self, count: int, deadline: float) -> None:
        """Until time is over; the count then stays to be done, though a few windows of it were compared."""
        for i, at in enumerate(_windows(len(self._x), count, self._n_rows)):
            if i >= FEW and time.perf_counter() > deadline:
                return
            part = self._linear(self._x[at : at + count])
            self._n_different += int((part != self._reference[at : at + count]).sum())
            self._n_compared += part.numel()
        self.todo.remove(count)

    def report(self) -> ShapeReport:
        linear = self._linear
        return ShapeReport(
            _kind(linear),
            linear.in_features,
            linear.out_features,
            self._n_different == 0,
            self._n_different,
            self._n_compared,
            n_unchecked=len(self.todo),
        )


def _probe_own(linears: list[Linear], deadline: float) -> list[ShapeReport]:
    """Count after count for all shapes in turn: when time is over, each has had its likeliest."""
    tested = [_Own(linear) for linear in linears]
    for count in OWN_COUNTS:
        for one in tested:
            if count in one.todo and (count == OWN_COUNTS[0] or time.perf_counter() < deadline):
                one.compare(count, deadline)
    return [one.report() for one in tested]


def _rows(linear: Linear, n: int) -> Tensor:
    return torch.randn((n, linear.in_features), generator=torch.Generator().manual_seed(0)).to(linear.dtype)


def _windows(n_rows: int, count: int, n_wanted: int) -> Iterator[int]:
    """Where windows of ``count`` rows begin, spread over ``n_rows``, together at least ``n_wanted`` rows of them if
    there are so many."""
    enough = max(1, -(-n_wanted // count))
    step = max(count, (n_rows - count) // enough)
    yield from range(0, min(n_rows - count + 1, step * enough), step)
