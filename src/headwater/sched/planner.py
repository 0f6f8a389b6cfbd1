"""Builds one step: who computes how many tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from headwater.cache.lookup import Lookup
from headwater.cache.prefix import PrefixCache
from headwater.sched.draft import Draft, Entry
from headwater.sched.parts import Part
from headwater.sched.preempt import Places
from headwater.sched.sequence import Sequence, Status


class Planner:
    """Running sequences first (decodes, then prefills that are not done), then the queue, within the budgets."""

    def __init__(self, cache: PrefixCache, places: Places, parts: Seq[Part], *, max_seqs: int, max_tokens: int) -> None:
        self._cache = cache
        self._places = places
        self._parts = parts
        self._max_seqs = max_seqs
        self._max_tokens = max_tokens
        self._block_sizes = tuple(group.block_size for group in cache.groups)

    def draft(self) -> Draft:
        draft = Draft(self._max_tokens)
        self._go_on(draft)
        # While running sequences lack blocks there are none for newcomers. (With steps in flight a newcomer, it may
        # be the very sequence that has just yielded, would take for ever what the other waits for.)
        if not draft.short or not (draft.entries or len(self._places.in_flight)):
            self._admit(draft)
        return draft

    def _go_on(self, draft: Draft) -> None:
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for seq in self._places.running:
            n_left = len(seq.chain) - seq.n_scheduled
            if n_left == 1:
                decodes.append(seq)
            elif n_left > 1:
                prefills.append(seq)
            # n_left == 0: its next token is being sampled by a step in flight
        for seq in decodes + prefills:
            if draft.budget == 0:
                return
            if seq.status is not Status.RUNNING:
                continue  # preempted a moment ago, in this plan
            n_new = min(len(seq.chain) - seq.n_scheduled, draft.budget)
            if self._cover(seq, seq.n_scheduled + n_new, draft):
                draft.place(Entry(seq, seq.n_scheduled, n_new))

    def _cover(self, seq: Sequence, n_tokens: int, draft: Draft) -> bool:
        """Make the tables of ``seq`` cover ``n_tokens``; False if that cannot be in this plan."""
        if n_tokens <= seq.n_slots:
            return True
        if not self._places.make_room(seq, n_tokens, draft):
            return False
        self._allocate(seq, n_tokens)
        return True

    def _allocate(self, seq: Sequence, n_tokens: int) -> None:
        holding = seq.held()
        self._cache.allocate(holding, n_tokens)
        seq.grew = True
        seq.n_slots = min(table.end * size for table, size in zip(holding.tables, self._block_sizes, strict=True))

    def _admit(self, draft: Draft) -> None:
        places = self._places
        while draft.budget > 0 and len(places.waiting) and len(places.running) < self._max_seqs:
            seq = places.waiting.first
            now = (places.n_published, self._cache.available)
            if seq.blocked_at is not None and seq.blocked_at[0] == now[0] and seq.blocked_at[1] >= now[1]:
                return  # nothing that could help has happened since the last try
            lookup = self._cache.lookup(seq.chain, bypass=seq.bypass)  # the whole of it; the chunk is cut afterwards
            n_new = min(len(seq.chain) - lookup.n_hit, draft.budget)
            if not self._fits(seq, lookup, lookup.n_hit + n_new):
                seq.blocked_at = now
                return  # strict order: nobody overtakes
            if not all(part.may_start(seq, lookup) for part in self._parts):
                return
            self._start(seq, lookup, lookup.n_hit + n_new)
            draft.place(Entry(seq, lookup.n_hit, n_new, lookup))

    def _fits(self, seq: Sequence, lookup: Lookup, n_tokens: int) -> bool:
        """Is there room for the first chunk, and, as things stand, for the whole prompt after it?

        The second is an estimate that only avoids admitting what would be preempted soon; blocks of the
        hit count as available here even where another sequence holds them.
        """
        n_hit_blocks = sum(len(table.blocks) for table in lookup.tables)
        n_whole = self._cache.peak_blocks(len(seq.chain), self._max_tokens)
        return n_whole - n_hit_blocks <= self._cache.available and self._cache.can_admit(lookup, n_tokens)

    def _start(self, seq: Sequence, lookup: Lookup, n_tokens: int) -> None:
        holding = self._cache.claim(seq.chain, lookup, seq.request_id)
        seq.holding = holding
        try:
            self._allocate(seq, n_tokens)
        except BaseException:
            seq.holding = None
            self._cache.release(holding)
            raise
        self._places.waiting.remove(seq)
        self._places.running.add(seq)
        seq.status = Status.RUNNING
        seq.n_cached = seq.n_computed = seq.n_scheduled = lookup.n_hit
