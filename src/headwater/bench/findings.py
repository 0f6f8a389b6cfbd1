"""From readings to what a report states: comparisons, growth lines, counter-examples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, groupby

import numpy as np

from headwater.bench import stats
from headwater.bench.readings import CONTROL, COUNTER_EXAMPLES, HIT, OFF, PRIME, Reading, Run, values

METRICS = {"ttft": "time to first token", "itl": "time between tokens", "e2e": "whole request"}
PAIRS = ((HIT, CONTROL), (HIT, OFF), (CONTROL, OFF))
ACROSS = (HIT, CONTROL)
ROLES = (OFF, CONTROL, HIT)
CALM = "none"
"""The interference of a run without any."""


@dataclass(frozen=True)
class Cell:
    """One condition of the sweep: tokens of the shared prefix and of the output, and what ran in between."""

    label: str
    interference: str
    prefix: int
    output: int

    @property
    def rank(self) -> tuple[str, bool, str, int, int]:
        """The order in a report: calm before interference."""
        return self.label, self.interference != CALM, self.interference, self.prefix, self.output


SideKey = tuple[Cell, str, str]
"""Cell, role, metric."""


@dataclass(frozen=True)
class CellComparison:
    """``cell`` and ``other`` differ in nothing but the label, when engines are compared; else they are one cell."""

    cell: Cell
    other: Cell
    metric: str
    role: str
    other_role: str
    found: stats.Comparison


@dataclass(frozen=True)
class CounterExample:
    """Requests of a kind that must not hit."""

    label: str
    role: str
    told: tuple[Reading, ...]
    untold: int
    """Requests of which nobody told how much was cached."""

    @property
    def n_hit(self) -> int:
        return sum(1 for one in self.told if one.hit)

    @property
    def most_cached(self) -> int:
        return max((one.cached or 0 for one in self.told), default=0)


@dataclass
class Findings:
    """Everything that the report states about the sweeps of its runs."""

    runs: Sequence[Run]
    by_role: dict[tuple[Cell, str], list[Reading]] = field(default_factory=dict)
    sides: dict[SideKey, stats.Side] = field(default_factory=dict)
    comparisons: list[CellComparison] = field(default_factory=list)
    lines: dict[str, stats.Line] = field(default_factory=dict)
    examples: list[CounterExample] = field(default_factory=list)

    @property
    def cells(self) -> list[Cell]:
        return sorted({cell for cell, role in self.by_role if role in ROLES}, key=lambda cell: cell.rank)

    def by_role_sorted(self) -> list[tuple[tuple[Cell, str], list[Reading]]]:
        return sorted(self.by_role.items(), key=lambda item: (item[0][0].rank, item[0][1]))

    @property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(run.label for run in self.runs))

    @property
    def within(self) -> Iterator[CellComparison]:
        return (one for one in self.comparisons if one.cell == one.other)

    @property
    def across(self) -> Iterator[CellComparison]:
        return (one for one in self.comparisons if one.cell != one.other)

    def one(self, cell: Cell, metric: str, role: str, other_role: str) -> stats.Comparison | None:
        """The comparison of two roles in one cell."""
        key = (cell, metric, role, other_role)
        return next((c.found for c in self.within if (c.cell, c.metric, c.role, c.other_role) == key), None)


def find(runs: Sequence[Run]) -> Findings:
    """All that is to be said about the sweeps in ``runs``, with one correction over all of it."""
    found = Findings(runs)
    for run in runs:
        for one in run.readings:
            if one.kind == "prefix" and (cell := cell_of(one)) is not None:
                found.by_role.setdefault((cell, role_of(one)), []).append(one)
    for (cell, role), readings in found.by_role.items():
        for metric in METRICS:
            if role in ROLES and (measured := values(readings, metric)):
                found.sides[cell, role, metric] = stats.Side.of(metric, measured)
    found.comparisons = _compare(found)
    for label in found.labels:
        if (line := stats.growth(*grown(found, label))) is not None:
            found.lines[label] = line
    found.examples = list(_examples(runs))
    return found


def cell_of(one: Reading) -> Cell | None:
    """The cell that a reading belongs to; None for those of no cell, such as a warm-up."""
    prefix, output = one.cell.get("prefix"), one.cell.get("output")
    if not isinstance(prefix, int) or not isinstance(output, int):
        return None
    return Cell(one.label, str(one.cell.get("interference", CALM)), prefix, output)


def role_of(one: Reading) -> str:
    """Without caching each request computes everything, whatever part it plays."""
    return OFF if one.caching_off and one.role in (HIT, CONTROL) else one.role


def _compare(found: Findings) -> list[CellComparison]:
    asked = []
    for cell in found.cells:
        for metric in METRICS:
            asked += [(cell, cell, metric, role, other) for role, other in PAIRS]
    for cell, other in combinations(found.cells, 2):
        if cell.label != other.label and _apart_from_label(cell) == _apart_from_label(other):
            asked += [(cell, other, metric, role, role) for metric in METRICS for role in ACROSS]
    both = [
        (key, (a, b))
        for key in asked
        if (a := found.sides.get((key[0], key[3], key[2]))) is not None
        and (b := found.sides.get((key[1], key[4], key[2]))) is not None
    ]
    compared = stats.compare([pair for _, pair in both])
    return [CellComparison(*key, one) for (key, _), one in zip(both, compared, strict=True)]


def _apart_from_label(cell: Cell) -> tuple[str, int, int]:
    return cell.interference, cell.prefix, cell.output


def grown(found: Findings, label: str) -> tuple[list[float], list[float]]:
    """Computed tokens and time to first token of every request that nothing else ran beside."""
    points = [
        (float(one.computed), one.ttft_s)
        for (cell, role), readings in found.by_role.items()
        if cell.label == label and cell.interference == CALM and role in (*ROLES, PRIME)
        for one in readings
        if one.measured and one.computed is not None and one.ttft_s is not None
    ]
    return [x for x, _ in points], [y for _, y in points]


def _examples(runs: Sequence[Run]) -> Iterator[CounterExample]:
    for run in runs:
        for role in COUNTER_EXAMPLES:
            sent = [one for one in run.readings if one.role == role and one.error is None and not one.caching_off]
            if sent:
                told = tuple(one for one in sent if one.cached is not None)
                yield CounterExample(run.label, role, told, len(sent) - len(told))


def typical(numbers: Iterable[float | None]) -> float | None:
    """The median of those that are told."""
    told = [one for one in numbers if one is not None]
    return float(np.median(told)) if told else None


def labelled(cells: Sequence[Cell]) -> Iterator[tuple[tuple[str, str], list[Cell]]]:
    """Cells by label and interference."""
    for key, some in groupby(
        sorted(cells, key=lambda cell: cell.rank), key=lambda cell: (cell.label, cell.interference)
    ):
        yield key, list(some)
