"""Ghosts: content that was evicted and is remembered, to explain a miss; bounded in number."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from headwater.cache.block import Node
from headwater.types import RequestId


@dataclass(frozen=True, slots=True)
class Eviction:
    """When content lost its last copy (clock of the cache, seconds), and which request needed the block."""

    when: float
    wanted_by: RequestId
    sender: str = ""
    """Who sent that request; empty where callers are not told apart."""


class Ghosts:
    """Nodes without a copy, longest untouched first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nodes: OrderedDict[Node, Eviction | None] = OrderedDict()
        """None: its block was given back before it was ever published (it slid out of the window)."""

    def __len__(self) -> int:
        return len(self.nodes)

    def touch(self, path: Iterable[Node]) -> None:
        """Ghosts on a path in use (a window needs no blocks before it, but needs their record) are dropped last."""
        nodes = self.nodes
        for node in path:
            if not node.copies and node in nodes:
                nodes.move_to_end(node)

    @property
    def oldest(self) -> Node:
        return next(iter(self.nodes))
