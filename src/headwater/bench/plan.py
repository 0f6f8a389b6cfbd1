"""What a sweep measures, and in which order."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from headwater.bench.results import Sample

PREFIXES, OUTPUTS = (128, 512, 2048), (1, 32, 256)
QUICK_OUTPUTS = (1, 32)
CACHING, INTERFERENCE = ("on", "off"), ("none", "evicting")
QUESTION_TOKENS = 17
REPEATS, QUICK_REPEATS = 20, 10

POOL_SHARE = 1.5
"""The pool that is to be flooded, in the longest sequences."""
FLOOD_SHARE = 1.2
"""What is sent to flood it, in pools."""

LEAST_REPEATS = 5
"""Fewer samples of a condition decide nothing."""
SAFE_SHARE = 0.9
"""How much of its time a plan is cut to: an estimate is one."""


class Start(msgspec.Struct, frozen=True):
    """A server's conditions; each has a start of its own."""

    caching: str
    interference: str

    @property
    def name(self) -> str:
        return f"caching {self.caching}, interference {self.interference}"


class Cell(msgspec.Struct, frozen=True):
    """One condition. ``prefix`` and ``output`` in tokens."""

    prefix: int
    output: int
    caching: str
    interference: str

    def as_dict(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep. Each repeat is a round through all cells of a start, in an order of its own: what drifts with time
    meets all of them alike, and a sweep that is stopped has about as many repeats of each."""

    prefixes: tuple[int, ...]
    outputs: tuple[int, ...]
    starts: tuple[Start, ...]
    repeats: int
    seed: int
    question_tokens: int = QUESTION_TOKENS

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and its output."""
        return max(self.prefixes) + self.question_tokens + max(self.outputs)

    @property
    def example(self) -> tuple[int, int]:
        """Prefix and output of the cell that the counter-examples belong to."""
        return sorted(self.prefixes)[len(self.prefixes) // 2], min(self.outputs)

    def cells(self, start: Start, repeat: int) -> list[Cell]:
        """The round of one repeat, shuffled."""
        cells = [
            Cell(prefix, output, start.caching, start.interference)
            for prefix in self.prefixes
            for output in self.outputs
        ]
        self.order(start, repeat).shuffle(cells)
        return cells

    def order(self, start: Start, repeat: int) -> random.Random:
        """Decides the order within one repeat, always alike."""
        return random.Random(f"{self.seed}/{start.caching}/{start.interference}/{repeat}")

    def roles(self, cell: Cell, *, salts: bool) -> tuple[str, ...]:
        """The requests of one trial. ``salts``: the server takes a cache salt."""
        if cell.caching == "off":
            return ("prime", "off")
        roles: tuple[str, ...] = ("prime", "hit", "control")
        if (cell.prefix, cell.output) == self.example:
            if cell.interference == "evicting":
                return (*roles, "evicted")
            return (*roles, "first_differs", *(("other_salt",) if salts else ()))
        return roles

    def pool_blocks(self, block_size: int) -> int:
        """Blocks of a pool that is soon flooded, and holds the longest sequence."""
        return math.ceil(POOL_SHARE * self.longest / block_size)

    def n_flood(self, pool_tokens: float) -> int:
        """How many of the longest prompts fill a pool of ``pool_tokens`` anew."""
        return max(1, math.ceil(FLOOD_SHARE * pool_tokens / (max(self.prefixes) + self.question_tokens)))


class Costs(msgspec.Struct, frozen=True):
    """What things take on this server, in seconds, as a probe measured them: for estimates only."""

    start_s: float
    request_s: float
    prompt_token_s: float
    output_token_s: float

    def request(self, n_computed: int, n_output: int) -> float:
        return self.request_s + n_computed * self.prompt_token_s + max(0, n_output - 1) * self.output_token_s

    def trial(self, plan: Plan, cell: Cell) -> float:
        """All requests of a trial."""
        whole = cell.prefix + plan.question_tokens
        total = 0.0
        for role in plan.roles(cell, salts=True):
            hits = role == "hit" and cell.interference == "none"
            total += self.request(plan.question_tokens if hits else whole, cell.output)
        if "evicted" in plan.roles(cell, salts=True):
            total += self.request(whole, cell.output)  # its own prime
        return total

    def round(self, plan: Plan, start: Start, flood_tokens: float) -> float:
        """One repeat of all cells of a start."""
        cells = plan.cells(start, 0)
        flood = flood_tokens * self.prompt_token_s if floods(start) else 0.0
        return sum(self.trial(plan, cell) for cell in cells) + flood

    def sweep(self, plan: Plan, flood_tokens: float) -> float:
        """All of it, starts included."""
        rounds = sum(self.round(plan, start, flood_tokens) for start in plan.starts)
        return plan.repeats * rounds + len(plan.starts) * self.start_s


def floods(start: Start) -> bool:
    """With caching off there is nothing to evict: no flood."""
    return start.interference == "evicting" and start.caching == "on"


def fit(plan: Plan, costs: Costs, flood_tokens: Callable[[Plan], float], budget_s: float) -> Plan:
    """The plan cut down to ``budget_s``, which begins when the first server is up: fewer repeats. Where those would be
    too few to say anything, the longest prefixes go first, then the longest outputs. ``flood_tokens`` tells a plan's
    pool."""
    left = SAFE_SHARE * budget_s - (len(plan.starts) - 1) * costs.start_s
    while True:
        flood = flood_tokens(plan)
        a_round = sum(costs.round(plan, start, flood) for start in plan.starts)
        repeats = min(plan.repeats, int(left / a_round)) if a_round else plan.repeats
        if repeats >= min(LEAST_REPEATS, plan.repeats):
            return msgspec.structs.replace(plan, repeats=repeats)
        if len(plan.prefixes) > 1:
            plan = msgspec.structs.replace(plan, prefixes=tuple(sorted(plan.prefixes)[:-1]))
        elif len(plan.outputs) > 1:
            plan = msgspec.structs.replace(plan, outputs=tuple(sorted(plan.outputs)[:-1]))
        else:
            return msgspec.structs.replace(plan, repeats=max(1, repeats))


def done_trials(samples: Collection[Sample], plan: Plan, *, salts: bool) -> set[tuple[Cell, int]]:
    """(cell, repeat) of the trials that an earlier session completed without an error."""
    roles: dict[tuple[Cell, int, int], set[str]] = {}
    failed: set[tuple[Cell, int, int]] = set()
    for sample in samples:
        cell = _cell(sample.cell)
        if sample.kind != "prefix" or cell is None:
            continue
        trial = (cell, sample.repeat, sample.attempt)
        roles.setdefault(trial, set()).add(sample.role)
        if sample.error is not None:
            failed.add(trial)
    return {
        (cell, repeat)
        for (cell, repeat, attempt), seen in roles.items()
        if seen >= set(plan.roles(cell, salts=salts)) and (cell, repeat, attempt) not in failed
    }


def _cell(cell: dict[str, Any]) -> Cell | None:
    try:
        return msgspec.convert(cell, Cell)
    except msgspec.ValidationError:
        return None  # a warm-up or an interfering request belongs to a start, not to a cell
