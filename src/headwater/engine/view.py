"""Pictures of the cache for the live page: made between two steps, when somebody asks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from headwater.cache.picture import TreeWalk, block_picture, pool_picture
from headwater.cache.prefix import PrefixCache
from headwater.engine.messages import BlockView, Call, PoolView, Reply, TreeView, ViewBlock, ViewPool, ViewTree

PIECE_S = 0.003
"""How long one piece of the tree may take: no step waits longer for it."""

MAX_BRANCHES = 50_000
"""The most branches in a picture of the tree; with more, its end is left out and counted."""


class View:
    """Answers the calls for pictures of one cache; ``answers`` says which."""

    def __init__(self, cache: PrefixCache, clock: Callable[[], float] = time.perf_counter) -> None:
        self._cache = cache
        self._clock = clock
        self._walk: TreeWalk | None = None
        """The picture of the tree that is being made; one at a time, whoever asks."""

    @property
    def answers(self) -> dict[type[Call], Callable[[Any], Reply]]:
        return {ViewPool: self.pool, ViewBlock: self.block, ViewTree: self.tree}

    def pool(self, message: ViewPool) -> PoolView:
        picture = pool_picture(self._cache, message.n_queue)
        return PoolView(message.call_id, picture.cells, picture.groups, picture.queue)

    def block(self, message: ViewBlock) -> BlockView:
        """Raises BadRequest for a block that does not exist."""
        picture = block_picture(self._cache, message.block)
        return BlockView(message.call_id, **{field.name: getattr(picture, field.name) for field in fields(picture)})

    def tree(self, message: ViewTree) -> TreeView:
        """One more piece of the picture; all of it when it is done."""
        if self._walk is None:
            self._walk = TreeWalk(self._cache, max_branches=MAX_BRANCHES)
        walk = self._walk
        walk.work(self._clock, self._clock() + PIECE_S)
        if not walk.done:
            return TreeView(message.call_id, done=False, unit=self._cache.unit)
        self._walk = None
        branches = walk.branches
        return TreeView(
            message.call_id,
            done=True,
            unit=self._cache.unit,
            parents=branches.parents.tobytes(),
            starts=branches.starts.tobytes(),
            units=branches.units.tobytes(),
            held=branches.held.tobytes(),
            blocks=branches.blocks.tobytes(),
            hits=branches.hits.tobytes(),
            keys=branches.keys,
            previews=branches.previews,
            salted=branches.salted,
            adapters=branches.adapters,
            n_left_out=walk.n_left_out,
        )
