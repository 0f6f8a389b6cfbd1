"""Builds one step: who computes how many tokens."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from headwater.cache.lookup import Lookup
from headwater.cache.prefix import PrefixCache
from headwater.sched.draft import Draft, Entry
from headwater.sched.parts import Part
from headwater.sched.preempt import Places
from headwater.sched.sequence import Sequence, Status


class Planner:
    """Running sequences first (decodes, then prefills that are not done), then the queue, within the budgets:
    ``max_tokens`` for a step; ``max_mixed_tokens`` if that is less and sequences generate, whose next tokens wait for
    the step to end. (All of those get one, so far as ``max_tokens`` goes, even if that leaves nothing for others.)

    The queue is served strictly in its order (priority, then arrival): where one does not fit, nobody behind it is
    tried. Only one that a part holds back (``NotYet``) is passed over. It keeps its place in the queue, and what it
    will need when it is let go is kept for it: a seat, and the blocks of its whole prompt beyond those that it is
    going to hit. Those behind it start only with seats and blocks beyond that. So it is overtaken only by those that
    do not keep it from starting, only until it is let go (``NotYet.until_s`` at the latest), and at most
    ``max_seqs - 1`` are held back at a time. (A running sequence that grows may take the blocks that were kept: it
    goes first, as ever.)
    """

    def __init__(
        self,
        cache: PrefixCache,
        places: Places,
        parts: Seq[Part],
        *,
        max_seqs: int,
        max_tokens: int,
        max_mixed_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._clock = clock
        self._places = places
        self._parts = parts
        self._max_seqs = max_seqs
        self._max_tokens = max_tokens
        self._max_mixed_tokens = max_mixed_tokens
        self._block_sizes = tuple(group.block_size for group in cache.groups)

    def draft(self) -> Draft:
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        running = self._places.running
        for seq in running:
            n_left = len(seq.chain) - seq.n_scheduled
            if n_left > 1:
                prefills.append(seq)
            elif n_left == 1:
                decodes.append(seq)
            # n_left == 0: its next token is being sampled by a step in flight
        budget = self._max_tokens
        if len(running) > len(prefills):  # somebody generates
            budget = min(budget, max(self._max_mixed_tokens, len(decodes)))
        draft = Draft(budget)
        self._go_on(decodes + prefills, draft)
        # While running sequences lack blocks there are none for newcomers. (With steps in flight a newcomer, it may
        # be the very sequence that has just yielded, would take for ever what the other waits for.)
        if not draft.short or not (draft.entries or len(self._places.in_flight)):
            self._admit(draft)
        return draft

    def _go_on(self, running: list[Sequence], draft: Draft) -> None:
        for seq in running:
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
        n_held_back, n_kept = 0, 0  # sequences passed over: a seat each, and their blocks
        while (
            draft.budget > 0
            and n_held_back < len(places.waiting)
            and len(places.running) + n_held_back < self._max_seqs
        ):
            seq = places.waiting[n_held_back]
            now = (places.n_published, self._cache.available)
            if seq.blocked_at is not None and seq.blocked_at[0] == now[0] and seq.blocked_at[1] >= now[1]:
                return  # nothing that could help has happened since the last try
            lookup = self._look_up(seq)
            if lookup is None:
                n_kept += self._own_blocks(seq)
                n_held_back += 1
                continue
            lookup = self._that_fits(seq, lookup, draft.budget, n_kept)
            if lookup is None:
                if not n_kept:
                    seq.blocked_at = now
                return  # strict order: nobody overtakes
            n_new = min(len(seq.chain) - lookup.n_start, draft.budget)
            self._start(seq, lookup, lookup.n_start + n_new)
            draft.place(Entry(seq, lookup.n_start, n_new, lookup))

    def _look_up(self, seq: Sequence) -> Lookup | None:
        """The hit with which ``seq`` may start now; None if a part holds it back."""
        if seq.not_yet is not None and seq.not_yet.stands() and self._clock() < seq.not_yet.until_s:
            return None
        lookup = self._cache.lookup(seq.chain, bypass=seq.bypass)  # the whole of it; the chunk is cut afterwards
        answers = (part.hold_back(seq, lookup) for part in self._parts)
        seq.not_yet = next((answer for answer in answers if answer is not None), None)
        seq.blocked_at = None
        return lookup if seq.not_yet is None else None

    def _own_blocks(self, seq: Sequence) -> int:
        """Blocks that ``seq``, which is held back, will need beside those of the hit that it waits for."""
        n_hit = 0 if seq.not_yet is None else seq.not_yet.n_hit
        groups = [group for group in self._cache.groups if group.reusable]
        n_shared = sum(n_hit // g.block_size - g.first_needed(n_hit) // g.block_size for g in groups)
        return max(0, self._cache.peak_blocks(len(seq.chain), self._max_tokens) - n_shared)

    def _that_fits(self, seq: Sequence, lookup: Lookup, budget: int, n_kept: int) -> Lookup | None:
        """``lookup``; or its whole blocks alone, if there is room for those but not for the sources of a copy beside
        them (they are kept until the copy is made); None if nothing fits."""
        for found in (lookup, lookup.whole):
            if found is not None and self._fits(seq, found, min(len(seq.chain), found.n_start + budget), n_kept):
                return found
        return None

    def _fits(self, seq: Sequence, lookup: Lookup, n_tokens: int, n_kept: int) -> bool:
        """Is there room for the first chunk, and, as things stand, for the whole prompt after it, beside the
        ``n_kept`` blocks that are kept for others?

        The second is an estimate that only avoids admitting what would be preempted soon; blocks of the
        hit count as available here even where another sequence holds them.
        """
        n_hit_blocks = sum(len(table.blocks) for table in lookup.tables)
        n_whole = self._cache.peak_blocks(len(seq.chain), self._max_tokens)
        return n_whole - n_hit_blocks + n_kept <= self._cache.available and self._cache.can_admit(lookup, n_tokens)

    def _start(self, seq: Sequence, lookup: Lookup, n_tokens: int) -> None:
        for part in self._parts:
            part.before_start(seq, lookup)
        holding = self._cache.claim(seq.chain, lookup, seq.request_id, seq.sender)
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
        seq.n_cached = seq.n_computed = seq.n_scheduled = lookup.n_start
