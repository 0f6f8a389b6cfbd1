"""A plan in the making, and the plans in flight."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from headwater.cache.lookup import Lookup
from headwater.errors import EngineError
from headwater.sched.sequence import Sequence
from headwater.types import RequestId


@dataclass(slots=True, eq=False)
class Entry:
    """One sequence's part in a step: tokens n_start .. n_start + n_new - 1 are computed."""

    seq: Sequence
    n_start: int
    n_new: int
    lookup: Lookup | None = None
    """The look-up with which the sequence starts or resumes in this step; None for one that goes on."""
    epoch: int = 0
    """``seq.epoch`` at commit; if it moved since, the row's result is ignored."""
    samples: bool = False
    """Does the row reach the last known token, so that a token is sampled?"""

    def admission(self) -> Lookup:
        if self.lookup is None:
            raise RuntimeError(f"sequence {self.seq.request_id!r} was not admitted in this step")
        return self.lookup

    @property
    def current(self) -> bool:
        return self.epoch == self.seq.epoch


class Draft:
    """The plan as it is built: one entry per sequence, in the order they were placed. Nothing else
    knows of an entry before commit, so dropping it is all that dropping a sequence from a plan takes;
    its blocks are in its holding."""

    __slots__ = ("budget", "entries", "short")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        """Tokens that may still be placed."""
        self.entries: dict[RequestId, Entry] = {}
        self.short = False
        """Did blocks run out for a running sequence in this plan?"""

    def place(self, entry: Entry) -> None:
        self.entries[entry.seq.request_id] = entry
        self.budget -= entry.n_new

    def drop(self, seq: Sequence) -> None:
        """Forget ``seq``'s entry, if it has one, and give its tokens back to the budget."""
        entry = self.entries.pop(seq.request_id, None)
        if entry is not None:
            self.budget += entry.n_new


@dataclass(slots=True, eq=False)
class Flight:
    """A committed step whose result is not known yet."""

    step: int
    entries: tuple[Entry, ...]
    removed: tuple[RequestId, ...]


class InFlight:
    """The steps in flight, oldest first; they land in that order."""

    __slots__ = ("_flights",)

    def __init__(self) -> None:
        self._flights: deque[Flight] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    def start(self, flight: Flight) -> None:
        self._flights.append(flight)

    def oldest(self, step: int) -> Flight:
        """The oldest step, which must be ``step``: results out of order would confirm what is not yet true."""
        if not self._flights:
            raise EngineError(f"a result for step {step} arrived, but no step is in flight")
        oldest = self._flights[0]
        if oldest.step != step:
            raise EngineError(f"a result for step {step} arrived before that of step {oldest.step}")
        return oldest

    def land(self, flight: Flight) -> None:
        """``flight``, the oldest, is over."""
        self._flights.remove(flight)

    def fence(self, seq: Sequence) -> int | None:
        """The last step in flight that names ``seq``: its blocks may not be handed out before that landed."""
        if self._flights and seq.last_step >= self._flights[0].step:
            return seq.last_step
        return None
