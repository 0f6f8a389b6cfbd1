"""Nothing is computed twice at the same time: who waits for blocks that another request is computing now.

A sequence (the *follower*) whose turn has come, but whose next block, the one after its longest hit, is being computed
by a running one (the *leader*), stays in the queue until the leader has published all that the two have in common. Then
it starts, with a hit on all of it.

    leader    |..published..|computing now|................|
    follower  |..... in common, waited for .....|its own...|
              |.. hit ......|             ^ n_hit, in whole hit units

So with chunked prefill each follower may start after the chunk that brings its last common block: one that differs
early after the leader's first chunks, one that is equal to the end after the last. It would gain nothing by starting
before: it could only catch up with the leader and then stand still, with a place and blocks in its hands. (It still
needs its share of the token budget, and running prefills come before the queue.)

- **No deadlock.** A follower holds nothing, and only running sequences are waited for, which wait for nobody. So as
  long as somebody waits, somebody runs, and a plan is never empty because of a wait.
- **Bounded.** ``wait_s`` from the first time that a sequence is held back to its start, over all the leaders that it
  follows. After that it computes for itself, from the hit it has then.
- **Handing over.** When the leader ends, fails or is preempted, its holding is released: the first follower in the
  queue is looked up again, starts with what was published, and is the leader of the others. A follower that differs
  early may be the leader of those that are more like it.
- **Priority.** A follower waits for a less urgent leader too: running prefills get their share of a step before
  anything in the queue, so it would not get there sooner. The leader may still be preempted, by its own priority,
  for want of blocks; then a more urgent follower takes over, and the old leader follows it.
- **Who takes no part.** A request that does not read the cache never waits (others may wait for the blocks that it
  computes), and requests of different namespaces have no blocks in common.

What is shared by less than a whole hit unit is computed by each (or copied, once it is published), and so are tokens
that the leader has yet to sample.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from headwater.cache.block import Holding
from headwater.cache.lookup import Lookup, StopReason
from headwater.sched.draft import Entry
from headwater.sched.parts import NotYet, Part
from headwater.sched.sequence import Sequence, Status
from headwater.types import RequestId


@dataclass(frozen=True, slots=True)
class Follows(NotYet):
    """Waits for ``leader`` to publish ``n_hit`` tokens with ``holding``."""

    leader: Sequence
    holding: Holding
    """The leader's, of its admission at that time."""

    def stands(self) -> bool:
        holding = self.holding
        return not holding.released and holding.cursor is not None and holding.n_published < self.n_hit


@dataclass(slots=True)
class _Wait:
    """All waiting of one sequence for one admission, be it for several leaders in turn."""

    n_start: int
    """Where it would have started, had it not waited."""
    until_s: float
    since_s: float
    """Since when it has been following someone without a break."""
    follows: Follows | None = None
    """None: there is nobody to wait for now, only for its turn."""


class InFlightWait(Part):
    """The part, and its counters: ``waits`` (admissions that were held back), ``waited_s`` (seconds, of waits that are
    over) and ``tokens_saved`` (what was reused at the start beyond what would have been without the wait)."""

    def __init__(
        self,
        wait_s: float,
        *,
        hit_unit: int,
        find: Callable[[RequestId], Sequence | None],
        clock: Callable[[], float],
    ) -> None:
        """``wait_s`` 0 lets nobody wait. ``hit_unit``: every hit is a multiple of so many tokens. ``find`` gives a
        live sequence by its id."""
        self._wait_s = wait_s
        self._hit_unit = hit_unit
        self._find = find
        self._clock = clock
        self._waits: dict[RequestId, _Wait] = {}
        self.waits = 0
        self.waited_s = 0.0
        self.tokens_saved = 0

    def hold_back(self, seq: Sequence, lookup: Lookup) -> NotYet | None:
        leader = self._leader(lookup)
        n_shared = 0 if leader is None else common_hit(seq, leader, lookup.n_hit, self._hit_unit)
        wait = self._waits.get(seq.request_id)
        if leader is None or n_shared <= lookup.n_start:
            self._pause(wait)
            return None
        now = self._clock()
        if wait is None:
            wait = self._waits[seq.request_id] = _Wait(lookup.n_start, now + self._wait_s, now)
            self.waits += 1
        if now >= wait.until_s:
            self._pause(wait)
            return None
        if wait.follows is None:
            wait.since_s = now
        because = f"request {leader.request_id} is computing what follows token {lookup.n_hit}"
        wait.follows = Follows(because, wait.until_s, n_shared, leader, leader.held())
        return wait.follows

    def _leader(self, lookup: Lookup) -> Sequence | None:
        stop = lookup.stop
        if not self._wait_s or stop.reason is not StopReason.COMPUTING or stop.request is None:
            return None
        leader = self._find(stop.request)
        return leader if leader is not None and leader.status is Status.RUNNING else None

    def on_commit(self, admitted: Seq[Entry]) -> None:
        for entry in admitted:
            wait = self._waits.pop(entry.seq.request_id, None)
            self._pause(wait)
            if wait is not None:
                self.tokens_saved += max(0, entry.admission().n_start - wait.n_start)

    def on_apply(self, entry: Entry, n_sampled: int) -> None:
        self._let_go(entry.seq)

    def on_release(self, seq: Sequence) -> None:
        self._pause(self._waits.pop(seq.request_id, None))
        self._let_go(seq)

    def _let_go(self, leader: Sequence) -> None:
        """Those who need not wait for ``leader`` any more wait only for their turn, and that is not counted."""
        for wait in self._waits.values():
            if wait.follows is not None and wait.follows.leader is leader and not wait.follows.stands():
                self._pause(wait)

    def _pause(self, wait: _Wait | None) -> None:
        """It follows nobody now: the seconds count."""
        if wait is not None and wait.follows is not None:
            self.waited_s += min(self._clock(), wait.until_s) - wait.since_s
            wait.follows = None


def common_hit(seq: Sequence, leader: Sequence, n_hit: int, hit_unit: int) -> int:
    """The longest hit that ``seq`` can have on what ``leader`` computes, as far as its tokens are known now: at least
    ``n_hit``, which they are known to have in common. One comparison for each unit beyond it."""
    mine, other = seq.chain, leader.chain
    n_limit = (len(mine) - 1) // hit_unit * hit_unit
    n_units = min(n_limit // mine.unit, other.n_units)
    i = n_hit // mine.unit
    while i < n_units and mine.same_unit(other, i):
        i += 1
    return i * mine.unit // hit_unit * hit_unit
