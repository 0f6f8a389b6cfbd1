"""The rounds of one server start: what is sent, in which order."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headwater.bench.measure import Measurer
from headwater.bench.plan import Cell, Costs, Plan, Start, floods
from headwater.bench.prompts import Drawer, Piece
from headwater.bench.results import Sample

OTHER_SALT = "another-salt"

WARM_UP_TOKENS = 4


@dataclass
class Sweep:
    """Runs the rounds of ``start`` on the server that ``measurer`` asks. ``done``: trials that need no more, added to
    as trials end. ``advance`` is told the seconds of work done, as ``costs`` reckon them."""

    plan: Plan
    start: Start
    measurer: Measurer
    drawer: Drawer
    costs: Costs
    pool_tokens: float
    done: set[tuple[Cell, int]]
    advance: Callable[[float], None]

    def run(self, until_s: float | None) -> int:
        """All rounds, or those that begin early enough to end by ``until_s`` (monotonic), but at least the first.
        Returns how many."""
        a_round = self.costs.round(self.plan, self.start, self.pool_tokens)
        for repeat in range(self.plan.repeats):
            if repeat and until_s is not None and time.monotonic() + a_round > until_s:
                return repeat
            todo = [cell for cell in self.plan.cells(self.start, repeat) if (cell, repeat) not in self.done]
            order = self.plan.order(self.start, repeat)
            if floods(self.start) and todo:
                self._flooded_round(todo, repeat, order)
            else:
                for cell in todo:
                    self._trial(cell, repeat, order)
        return self.plan.repeats

    def _trial(self, cell: Cell, repeat: int, order: random.Random) -> None:
        """A fresh prefix: prime, and right after it the hit; the counter-examples while it is known to be cached; the
        control before or after all that."""
        roles = self.plan.roles(cell, salts=self.measurer.dialect.cache_salt)
        control_first = order.random() < 0.5
        samples: list[Sample] = []
        if "control" in roles and control_first:
            samples.append(self._ask(cell, "control", repeat, self._fresh(cell)))
        prefix = self._fresh(cell)
        prime = self._ask(cell, "prime", repeat, prefix)
        samples.append(prime)
        if prime.error is None:  # without it there is nothing to hit, or to miss
            samples.append(self._ask(cell, "off" if cell.caching == "off" else "hit", repeat, prefix))
            examples = [role for role in roles if role in ("first_differs", "other_salt")]
            order.shuffle(examples)
            samples += [self._example(cell, role, repeat, prefix) for role in examples]
        if "control" in roles and not control_first:
            samples.append(self._ask(cell, "control", repeat, self._fresh(cell)))
        self._finish(cell, repeat, roles, samples)

    def _flooded_round(self, todo: list[Cell], repeat: int, order: random.Random) -> None:
        """All primes; then enough other prefixes to fill the pool anew; then all second questions, and controls."""
        primed: list[tuple[Cell, str, tuple[Piece, ...]]] = []
        samples: dict[Cell, list[Sample]] = {cell: [] for cell in todo}
        for cell in todo:
            for role in ("hit", "evicted"):
                if role in self.plan.roles(cell, salts=False):
                    prefix = self._fresh(cell)
                    prime = self._ask(cell, "prime", repeat, prefix)
                    samples[cell].append(prime)
                    if prime.error is None:
                        primed.append((cell, role, prefix))
        self._flood(repeat)
        after = [*primed, *((cell, "control", self._fresh(cell)) for cell in todo)]
        order.shuffle(after)
        for cell, role, prefix in after:
            samples[cell].append(self._ask(cell, role, repeat, prefix))
        for cell in todo:
            self._finish(cell, repeat, self.plan.roles(cell, salts=False), samples[cell])

    def _flood(self, repeat: int) -> None:
        longest = max(self.plan.prefixes)
        for _ in range(self.plan.n_flood(self.pool_tokens)):
            pieces = (*self.drawer.prefix(longest), *self.drawer.question(self.plan.question_tokens))
            self.measurer.measure(self._start_cell(), "interference", repeat, pieces, 1)
        self.advance(self.pool_tokens * self.costs.prompt_token_s)

    def warm_up(self) -> None:
        """Unrelated prompts of the greatest length and of the least, so that no measured request is the first of its
        kind."""
        for n_tokens in (max(self.plan.prefixes), min(self.plan.prefixes)):
            pieces = (*self.drawer.prefix(n_tokens), *self.drawer.question(self.plan.question_tokens))
            self.measurer.measure(self._start_cell(), "warm_up", 0, pieces, WARM_UP_TOKENS)

    def _start_cell(self) -> dict[str, str]:
        return {"caching": self.start.caching, "interference": self.start.interference}

    def _fresh(self, cell: Cell) -> tuple[Piece, ...]:
        return self.drawer.prefix(cell.prefix)

    def _example(self, cell: Cell, role: str, repeat: int, prefix: tuple[Piece, ...]) -> Sample:
        if role == "other_salt":
            return self._ask(cell, role, repeat, prefix, OTHER_SALT)
        return self._ask(cell, role, repeat, self.drawer.with_other_first(prefix))

    def _ask(self, cell: Cell, role: str, repeat: int, prefix: Sequence[Piece], salt: str | None = None) -> Sample:
        """The prefix with a question of its own."""
        pieces = (*prefix, *self.drawer.question(self.plan.question_tokens))
        return self.measurer.measure(cell.as_dict(), role, repeat, pieces, cell.output, salt)

    def _finish(self, cell: Cell, repeat: int, roles: Sequence[str], samples: Sequence[Sample]) -> None:
        if {sample.role for sample in samples} >= set(roles) and all(sample.error is None for sample in samples):
            self.done.add((cell, repeat))
        self.advance(self.costs.trial(self.plan, cell))


def probe(plan: Plan, measurer: Measurer, drawer: Drawer, start: Start, start_s: float) -> Costs:
    """What requests cost on this server: a short and a long prompt that nobody has sent, timed once each."""
    n_output = min(32, max(plan.outputs))
    long = max(plan.prefixes)
    short = min(min(plan.prefixes), max(1, long // 4))
    cell = {"caching": start.caching, "interference": start.interference}
    seen = [
        measurer.measure(cell, "warm_up", 0, (*drawer.prefix(n), *drawer.question(plan.question_tokens)), n_output)
        for n in (short, long)
    ]
    first_s = [sample.ttft_s or 0.0 for sample in seen]
    prompt_token_s = max(0.0, (first_s[1] - first_s[0]) / (long - short)) if long > short else 0.0
    request_s = max(1e-3, first_s[0] - prompt_token_s * (short + plan.question_tokens))
    decoded = [(s.e2e_s or 0.0) - (s.ttft_s or 0.0) for s in seen]
    return Costs(start_s, request_s, prompt_token_s, max(decoded) / max(1, n_output - 1))
