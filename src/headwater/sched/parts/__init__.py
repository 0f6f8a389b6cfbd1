"""Features beside the planner: a part sees what happens through a few hooks, instead of an ``if`` in the loop."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headwater.cache.lookup import Lookup
    from headwater.sched.draft import Entry
    from headwater.sched.sequence import Sequence


@dataclass(frozen=True, slots=True)
class NotYet:
    """Why a sequence in the queue does not start now, although its turn has come, and when it will at the latest.

    It keeps its place; what that means for those behind it, ``Planner`` says.
    """

    because: str
    """For people."""
    until_s: float
    """On the scheduler's clock, in seconds: from then on the part that said "not yet" lets it start."""
    n_hit: int
    """Tokens that it will find computed when it starts, as far as can be told: room is kept for the others only."""

    def stands(self) -> bool:
        """Does the reason still hold? While it does, and before ``until_s``, the sequence is not looked up again, so
        this must be quick. False: it is looked up, and all parts are asked, at the next plan."""
        return False


class Part:
    """Override what the feature needs. Hooks run inside the scheduler's calls and must not call it back."""

    def hold_back(self, seq: Sequence, lookup: Lookup) -> NotYet | None:
        """Must ``seq``, whose turn it is, not start with this hit now? None: it may, as far as this part goes.

        Asked at several plans until it starts, which it may fail to do for other reasons. A part that can say "not
        yet" while nothing runs makes plans that are None: whoever drives the scheduler then has to wait.
        """
        return None

    def before_start(self, seq: Sequence, lookup: Lookup) -> None:
        """``seq`` starts, or resumes, with this hit; nothing was claimed or evicted for it yet."""

    def on_commit(self, admitted: Seq[Entry]) -> None:
        """A plan was committed; ``admitted`` are the sequences that start, or resume, with it."""

    def on_apply(self, entry: Entry, n_sampled: int) -> None:
        """A row of a step was confirmed. ``entry.seq`` has its new counts."""

    def on_release(self, seq: Sequence) -> None:
        """``seq`` is no longer what it was: preempted (WAITING again), or FINISHED from the queue or a place. What it
        held is given back."""
