"""Places and blocks: who runs, and who must yield when blocks run out."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from headwater.cache.prefix import PrefixCache
from headwater.sched.draft import Draft, InFlight
from headwater.sched.parts import Part
from headwater.sched.queue import SequenceQueue
from headwater.sched.sequence import Sequence, Status
from headwater.types import FinishReason, RequestId


class Places:
    """The sequences by status, and every way out of one: preempted, finished, or shaken by a failed step.

    Each way out gives back exactly what was claimed, with a fence while a step in flight names the blocks.
    """

    def __init__(self, cache: PrefixCache, parts: Seq[Part]) -> None:
        self._cache = cache
        self._parts = parts
        self.waiting = SequenceQueue()
        self.running = SequenceQueue()
        self.in_flight = InFlight()
        self.to_remove: dict[RequestId, None] = {}
        """Rows that the runner still knows and must forget, told with the next plan; in order."""
        self.n_published = 0
        """Times that blocks of a prompt were published: a look-up may reach further than before."""

    def take_off(self, seq: Sequence) -> None:
        """Release a running sequence's blocks and its place; results of steps in flight no longer count for it."""
        self.running.remove(seq)
        self._cache.release(seq.held(), fence=self.in_flight.fence(seq))
        seq.holding = None
        seq.n_cached = seq.n_computed = seq.n_scheduled = seq.n_slots = 0
        self.forget_row(seq)

    def forget_row(self, seq: Sequence) -> None:
        """The runner's row of ``seq``, and what steps in flight bring for it, are void from now on."""
        seq.epoch += 1
        if seq.told is not None:
            self.to_remove[seq.request_id] = None
            seq.told = None

    def preempt(self, seq: Sequence) -> None:
        """Back to the queue, at its old place by priority and arrival. Published blocks stay findable."""
        self.take_off(seq)
        seq.status = Status.WAITING
        seq.n_preemptions += 1
        seq.blocked_at = None
        self.waiting.add(seq)
        self._released(seq)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        if seq.status is Status.RUNNING:
            self.take_off(seq)
        else:
            self.waiting.remove(seq)
        seq.status = Status.FINISHED
        seq.finish_reason = reason
        self._released(seq)

    def _released(self, seq: Sequence) -> None:
        for part in self._parts:
            part.on_release(seq)

    def make_room(self, seq: Sequence, n_tokens: int, draft: Draft) -> bool:
        """Can ``seq``'s tables grow to ``n_tokens`` now? Preempts, newest of the lowest priority first, until
        they can. False: not in this plan, because the one to yield was ``seq`` itself, or because blocks
        that are enough come back when steps in flight land.
        """
        cache = self._cache
        while (missing := cache.blocks_missing(seq.held(), n_tokens)) > cache.available:
            draft.short = True
            if len(self.in_flight) and missing <= cache.available + cache.stats().fenced:
                return False
            victim = self.running.last
            if victim is seq and len(self.in_flight):
                return False  # its own steps may still slide blocks out; yielding now would undo them for nothing
            draft.drop(victim)
            self.preempt(victim)
            if victim is seq:
                return False
        return True
