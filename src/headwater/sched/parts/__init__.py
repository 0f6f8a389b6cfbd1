"""Features beside the planner: a part sees what happens through a few hooks, instead of an ``if`` in the loop."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headwater.cache.lookup import Lookup
    from headwater.sched.draft import Entry
    from headwater.sched.sequence import Sequence


class Part:
    """Override what the feature needs. Hooks run inside the scheduler's calls and must not call it back."""

    def may_start(self, seq: Sequence, lookup: Lookup) -> bool:
        """May ``seq``, first in the queue, start with this hit now? Asked again at later plans; has no effect."""
        return True

    def on_commit(self, admitted: Seq[Entry]) -> None:
        """A plan was committed; ``admitted`` are the sequences that start, or resume, with it."""

    def on_apply(self, entry: Entry, n_sampled: int) -> None:
        """A row of a step was confirmed. ``entry.seq`` has its new counts."""

    def on_release(self, seq: Sequence) -> None:
        """``seq`` gave its place and its blocks back: preempted (WAITING again) or FINISHED."""
