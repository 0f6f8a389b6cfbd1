"""The canary: a share of the blocks that requests hit is computed again, in idle time, and compared bit for bit.

A hit is proven by comparing tokens; that the block still holds what was computed for them is not. A bit that flipped
in memory, a kernel that wrote where it should not, a result that depended on its batch after all: each shows here.

Chosen when a request is admitted, checked when nobody runs or waits, one block at a time: a request that arrives
meanwhile is delayed by one block's computation at most. The check takes no blocks and no references, moves nothing in
the order of eviction and counts as no look-up: it computes into pages of its own (*scratch*), which the pool does not
know. So it works with a full pool, can be dropped at any moment, and leaves nothing behind.

    0 ........... n_start ........... n_start + block_size
    | held, read  | computed into scratch; compared with the copies in the pool, in every layer of every group

A block that differs is withdrawn with all that follows it. The fault may lie in what it was computed from, or may have
been copied to its relatives: those are checked next.
"""

from __future__ import annotations

import logging
import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from headwater.cache.block import Node
from headwater.cache.lookup import Lookup
from headwater.cache.prefix import PrefixCache
from headwater.cache.recheck import Recheck, suspects
from headwater.engine.core import VerifyCounts
from headwater.errors import ConfigError, EngineError
from headwater.run.difference import Difference, differences
from headwater.run.runner import Runner
from headwater.run.store import KVStore
from headwater.sched.draft import Entry
from headwater.sched.parts import Part
from headwater.step import AddedRow, RowSampling, StepPlan, TableStart
from headwater.types import BlockId

logger = logging.getLogger(__name__)

MAX_QUEUED = 1024
"""Blocks that wait to be checked; the oldest give way."""
ROW = "the check of a hit block"
"""The runner's name for the row; requests have shorter ones."""


class HitVerifier(Part):
    """Chooses hit blocks, as a part of the scheduler, and checks them, as the engine's work for idle moments."""

    def __init__(
        self,
        share: float,
        *,
        cache: PrefixCache,
        runner: Runner,
        store: KVStore,
        rng: random.Random,
        max_queued: int = MAX_QUEUED,
    ) -> None:
        """``share``: the probability, 0 to 1, with which a hit block is chosen. ``store`` has pages after the cache's
        ``n_blocks``, one for each group: the scratch (``n_scratch_blocks``)."""
        if not 0.0 < share <= 1.0:
            raise ConfigError(f"the share of hits to verify must be more than 0 and at most 1, got {share}")
        n_needed = cache.n_blocks + n_scratch_blocks(len(cache.groups))
        if store.n_blocks < n_needed:
            raise ConfigError(f"the store has {store.n_blocks} pages; verifying hits needs {n_needed}")
        self.counts = VerifyCounts()
        self._share = share
        self._cache = cache
        self._runner = runner
        self._store = store
        self._rng = rng
        self._max_queued = max_queued
        self._scratch: Sequence[BlockId] = range(cache.n_blocks, n_needed)
        self._queue: OrderedDict[Node, None] = OrderedDict()
        """Oldest first."""

    @property
    def n_queued(self) -> int:
        return len(self._queue)

    # ---- choosing ---------------------------------------------------------------------------------

    def on_commit(self, admitted: Sequence[Entry]) -> None:
        for entry in admitted:
            self._choose(entry.admission())

    def _choose(self, lookup: Lookup) -> None:
        copied = {beginning.node: None for beginning in lookup.beginnings}
        for node in (*lookup.path, *copied):
            if node.copies and self._rng.random() < self._share:
                self._queue.setdefault(node)
        while len(self._queue) > self._max_queued:
            self._queue.popitem(last=False)
            self.counts.dropped += 1

    # ---- checking ---------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        return bool(self._queue)

    def work(self) -> None:
        """Check the next block. Call it only while no step is in flight. Raises nothing: a failure is counted and
        logged."""
        node, _ = self._queue.popitem(last=False)
        counts = self.counts
        try:
            block = self._cache.recheck(node)
            if block is None:
                counts.skipped += 1
                return
            self._compute(block)
        except Exception:
            counts.failed += 1
            logger.exception("a hit block could not be computed again; nothing was checked or changed")
            return
        counts.verified += 1
        found = self._compare(block)
        if found:
            counts.differing += 1
            self._withdraw(node, block, found)

    def _compute(self, block: Recheck) -> None:
        """The block's tokens alone, after its stored history, into scratch."""
        tables = [
            TableStart(hit.first, (*hit.blocks, page)) for hit, page in zip(block.tables, self._scratch, strict=True)
        ]
        row = AddedRow(
            ROW,
            (*block.tokens, block.tokens[-1]),  # a token more than is computed: nothing is sampled
            block.n_start,
            len(block.tokens) - block.n_start,
            tuple(tables),
            RowSampling(),
        )
        try:
            (result,) = self._runner.execute(StepPlan(0, added=(row,))).rows
        finally:
            self._runner.execute(StepPlan(0, removed=(ROW,)))
        if result.error is not None:
            raise EngineError(result.error)

    def _compare(self, block: Recheck) -> list[tuple[BlockId, list[Difference]]]:
        found = []
        for group, copies in enumerate(block.copies):
            for copy in copies:
                different = differences(self._store, group, copy, self._scratch[group])
                if different:
                    found.append((copy, different))
        return found

    def _withdraw(self, node: Node, block: Recheck, found: Iterable[tuple[BlockId, list[Difference]]]) -> None:
        next_ones = suspects(node)
        n_blocks = self._cache.withdraw(node)
        for copy, different in found:
            logger.error("%s", describe(block, copy, different))
        logger.error("%d cached blocks were withdrawn; %d others are checked next", n_blocks, len(next_ones))
        for other in reversed(next_ones):
            self._queue[other] = None
            self._queue.move_to_end(other, last=False)


def describe(block: Recheck, copy: BlockId, different: Sequence[Difference]) -> str:
    """One line: which block, and where and how much it differs."""
    worst = different[0]
    n_layers = len({one.layer for one in different})
    n_elements = sum(one.n_different for one in different)
    return (
        f"a cached block is not what its tokens give: block {copy}, tokens {block.n_start} to {len(block.tokens) - 1}; "
        f"{n_elements} elements differ in {n_layers} layers, first in layer {worst.layer}: {worst.n_different} of "
        f"{worst.n_elements} of {worst.part}, at positions {block.n_start + worst.first_slot} to "
        f"{block.n_start + worst.last_slot}"
    )


def n_scratch_blocks(n_groups: int) -> int:
    """Pages that the store has for checks, after those of the pool: a block for each group."""
    return n_groups
