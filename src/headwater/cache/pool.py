"""The pool: every physical block, its references, the free ones and the queue of evictable ones.

    refs > 0                    in use (by tables, or by a fence: a step in flight that still names it)
    refs = 0 and published      evictable: still a hit, in the queue
    refs = 0 and not published  free: taken before any evictable block

"Published" means that ``node`` of the block is set. All loops here cost a step per block asked for; none
scans the pool.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from headwater.cache.block import Node
from headwater.errors import DoubleRelease, OutOfBlocks
from headwater.types import BlockId


class BlockPool:
    """``n_blocks`` pages of equal bytes, shared by all groups. ``clock`` (seconds) tells how long blocks are idle."""

    def __init__(self, n_blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.n_blocks = n_blocks
        self.clock = clock
        self.refs: list[int] = [0] * n_blocks
        self.node: list[Node | None] = [None] * n_blocks
        """Per block: the content it is published as."""
        self.single: list[tuple[BlockId, ...]] = [(block,) for block in range(n_blocks)]
        """Per block: the copies of content that only it holds (made once, so that publishing allocates less)."""
        self.group: list[int] = [0] * n_blocks
        """Per block: the group that it was last taken for."""
        self.free: list[BlockId] = list(range(n_blocks - 1, -1, -1))
        """A stack: the last is taken first."""
        self.n_used_ever = 0
        """No block numbered from here on was ever taken. (The stack gives the lowest first.)"""
        self.evictable: OrderedDict[BlockId, float] = OrderedDict()
        """The next to be evicted first, each with when it was given back. (Popping a plain dict from the left costs a
        scan of what was popped.)"""
        self.fences: dict[int, list[BlockId]] = {}
        """Per step in flight: references that it keeps, in the order in which they were given back."""
        self.fence_refs: dict[BlockId, int] = {}
        self.last_applied: int | None = None

    @property
    def available(self) -> int:
        return len(self.free) + len(self.evictable)

    @property
    def n_fenced(self) -> int:
        """Blocks that only fences hold."""
        refs = self.refs
        return sum(refs[block] == n for block, n in self.fence_refs.items())

    def take(self, n: int) -> tuple[list[BlockId], list[BlockId]]:
        """``n`` blocks, each with one reference: the free ones first, then the head of the queue.

        The second list names those that came from the queue and are still published: the caller withdraws
        them before it gives them new content. OutOfBlocks leaves the pool as it was.
        """
        if n > self.available:
            raise OutOfBlocks(n, self.available)
        n_free = min(n, len(self.free))
        taken = self.free[len(self.free) - n_free :]
        del self.free[len(self.free) - n_free :]
        taken.reverse()
        self.n_used_ever = max(self.n_used_ever, max(taken, default=-1) + 1)
        pop = self.evictable.popitem
        evicted = [pop(last=False)[0] for _ in range(n - n_free)]
        taken += evicted
        refs = self.refs
        for block in taken:
            refs[block] = 1
        return taken, evicted

    def claim(self, blocks: Iterable[BlockId]) -> None:
        """One more reference on each of these published blocks; the first takes it off the queue."""
        refs, evictable = self.refs, self.evictable
        for block in blocks:
            if not refs[block]:
                del evictable[block]
            refs[block] += 1

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Give back one reference on each, in this order; the last reference makes a block evictable or free.

        DoubleRelease, before anything is changed, if one of them has no reference.
        """
        refs, nodes, free, evictable = self.refs, self.node, self.free, self.evictable
        if 0 in [refs[block] for block in blocks]:
            without = [block for block in blocks if not refs[block]]
            raise DoubleRelease(f"blocks {without[:8]} have no reference to give back")
        now = self.clock()
        for block in blocks:
            left = refs[block] - 1
            refs[block] = left
            if not left:
                node = nodes[block]
                if node is None:
                    free.append(block)
                elif len(node.copies) == 1:
                    evictable[block] = now
                else:
                    self._queue_copy(block, node, now)

    def _queue_copy(self, block: BlockId, node: Node, now: float) -> None:
        """Queue one of several copies. Content needs one place in the LRU order, whatever its copies:

        - another copy is in use: that one will stand for the content; this one goes first;
        - others are evictable: this one, used last, takes the place at the end; the others go first.
        """
        group, refs, evictable = self.group, self.refs, self.evictable
        others = [copy for copy in node.copies if copy != block and group[copy] == group[block]]
        evictable[block] = now
        if any(refs[copy] for copy in others):
            evictable.move_to_end(block, last=False)
        else:
            for copy in others:
                evictable.move_to_end(copy, last=False)

    def unpublish(self, block: BlockId) -> None:
        """``block`` is no longer findable; if nobody uses it, it is free."""
        self.node[block] = None
        if not self.refs[block]:
            del self.evictable[block]
            self.free.append(block)

    def fence(self, blocks: Sequence[BlockId], step: int) -> None:
        """Hand references over to step ``step``, which gives them back, in this order, when it is applied."""
        if self.last_applied is not None and step <= self.last_applied:
            self.release(blocks)
            return
        without = [block for block in blocks if not self.refs[block]]
        if without:
            raise DoubleRelease(f"blocks {without[:8]} have no reference to give back")
        self.fences.setdefault(step, []).extend(blocks)
        for block in blocks:
            self.fence_refs[block] = self.fence_refs.get(block, 0) + 1

    def step_applied(self, step: int) -> None:
        """Steps up to ``step`` read and write nothing any more: give back what their fences keep."""
        self.last_applied = step if self.last_applied is None else max(step, self.last_applied)
        for fenced in sorted(number for number in self.fences if number <= step):
            blocks = self.fences.pop(fenced)
            for block in blocks:
                left = self.fence_refs.pop(block) - 1
                if left:
                    self.fence_refs[block] = left
            self.release(blocks)

    def clear(self) -> int:
        """Every block is free (the caller has made sure that none is in use); the number that were cached."""
        n_cached = len(self.evictable)
        for block in self.evictable:
            self.node[block] = None
        self.free.extend(reversed(self.evictable))
        self.evictable.clear()
        return n_cached
