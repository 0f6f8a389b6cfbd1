"""Pictures of the cache for people: the pool cell by cell, one block, the tree folded to its branches.

Each is made between two steps, so what it says holds together. Nothing is changed to make one, and none costs more
than a short step per block or node that it shows.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from headwater.cache.block import Holding, Node, Root
from headwater.cache.key import token_ids
from headwater.cache.pool import BlockPool
from headwater.cache.prefix import PrefixCache
from headwater.errors import BadRequest
from headwater.types import BlockId, BlockTable, RequestId

FREE, IN_USE, SHARED, FENCED, CACHED = range(5)
"""Cells of a pool picture: nobody's; held by one, by several, only until a step in flight is over; CACHED and above:
evictable, CACHED + k for one whose age is in the k-th class of AGES_S."""

AGES_S = (1.0, 10.0, 60.0, 600.0, 3600.0)
"""Upper ends, in seconds, of the classes of time since a block was last given back; the last class has no end."""

MAX_PATH = 8192
"""Blocks before one that a picture of it names at most."""

PREVIEW_UNITS = 2
"""Units at the beginning of a branch whose tokens are its preview."""

UNITS_A_PIECE = 2048
"""Nodes, about, that are visited between two looks at the clock."""


@dataclass(frozen=True, slots=True)
class PoolPicture:
    """``cells`` has one byte per block, ``groups`` too (none if there is one group); ``queue`` is the head of the
    eviction queue, the next to go first."""

    cells: bytes
    groups: bytes
    queue: tuple[BlockId, ...]


def pool_picture(cache: PrefixCache, n_queue: int) -> PoolPicture:
    """The whole pool, with the ``n_queue`` blocks that would be evicted next."""
    pool = cache.pool
    cells = bytearray((IN_USE,)) * pool.n_blocks
    for block in pool.free:
        cells[block] = FREE
    _draw_queue(pool, cells)
    refs = pool.refs
    for block, n_refs in enumerate(refs):
        if n_refs > 1:
            cells[block] = SHARED
    for block, n_fences in pool.fence_refs.items():
        if n_fences == refs[block]:
            cells[block] = FENCED
    groups = bytes(pool.group) if len(cache.groups) > 1 else b""
    return PoolPicture(bytes(cells), groups, tuple(islice(pool.evictable, n_queue)))


def _draw_queue(pool: BlockPool, cells: bytearray) -> None:
    """Evictable blocks by age. The queue is in order of time but for surplus copies, so the class rarely changes:

    edges       now-3600      now-600   ...     now-1
    class    5      |     4      |     3 ... 1     |    0
    """
    now = pool.clock()
    edges = [now - age for age in reversed(AGES_S)]
    low = high = math.inf  # no class yet
    code = CACHED
    for block, when in pool.evictable.items():
        if not low <= when < high:
            k = bisect_right(edges, when)
            low = edges[k - 1] if k else -math.inf
            high = edges[k] if k < len(edges) else math.inf
            code = CACHED + len(AGES_S) - k
        cells[block] = code


# ---- one block --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlockPicture:
    """What is known of one block.

    ``first_token`` is the position of the first of ``tokens``; a block that is being filled has fewer than it takes.
    ``namespace`` is the digest at the root of its chain (a salt is in it, never shown). ``idle_s`` and ``queue_place``
    (0: evicted next) are of evictable blocks. ``path`` names the blocks before it, first to last, as far as they are
    held. ``hits`` counts the requests whose hit ended exactly here.
    """

    block: BlockId
    state: str
    group: int
    refs: int
    holders: tuple[RequestId, ...] = ()
    key: bytes | None = None
    namespace: bytes | None = None
    first_token: int | None = None
    tokens: tuple[int, ...] = ()
    n_children: int = 0
    n_copies: int = 0
    hits: int = 0
    idle_s: float | None = None
    queue_place: int | None = None
    path: tuple[BlockId, ...] = ()


def block_picture(cache: PrefixCache, block: BlockId) -> BlockPicture:
    """One block. BadRequest for a number that the pool does not have."""
    pool = cache.pool
    if not 0 <= block < pool.n_blocks:
        raise BadRequest(f"block {block} does not exist: they are 0 to {pool.n_blocks - 1}", field="block")
    refs, node, group = pool.refs[block], pool.node[block], pool.group[block]
    holders = list(_holders(cache, block, group))
    names = tuple(holding.owner for holding, _ in holders)
    state = _state(pool, block)
    if node is not None:
        return _published(cache, block, node, names, state)
    if not holders:
        return BlockPicture(block, state, group, refs)
    holding, table = holders[0]
    at = table.blocks.index(block)
    size = cache.groups[group].block_size
    first_token = (table.first + at) * size
    tokens = tuple(holding.chain.tokens[first_token : first_token + size])
    root = holding.chain.root.digest
    path = tuple(table.blocks[max(0, at - MAX_PATH) : at])
    return BlockPicture(block, state, group, refs, names, None, root, first_token, tokens, path=path)


def _state(pool: BlockPool, block: BlockId) -> str:
    refs = pool.refs[block]
    if refs:
        return "fenced" if pool.fence_refs.get(block) == refs else "in use"
    return "free" if pool.node[block] is None else "evictable"


def _holders(cache: PrefixCache, block: BlockId, group: int) -> Iterator[tuple[Holding, BlockTable]]:
    if cache.pool.refs[block]:
        for holding in cache.live:
            table = holding.tables[group]
            if block in table.blocks:
                yield holding, table


def _published(
    cache: PrefixCache, block: BlockId, node: Node, holders: tuple[RequestId, ...], state: str
) -> BlockPicture:
    pool = cache.pool
    group = pool.group[block]
    n_units = cache.groups[group].block_size // cache.unit
    root, path = _way_up(pool, node, group)
    tokens, at = b"", node
    for _ in range(n_units):
        tokens = at.tokens + tokens
        if at.parent is not None:
            at = at.parent
    when = pool.evictable.get(block)
    place = None if when is None else next(i for i, queued in enumerate(pool.evictable) if queued == block)
    return BlockPicture(
        block,
        state,
        group,
        pool.refs[block],
        holders,
        node.key,
        root,
        (node.depth - n_units) * cache.unit,
        token_ids(tokens),
        n_children=len(node.children()),
        n_copies=sum(pool.group[copy] == group for copy in node.copies),
        hits=node.hits,
        idle_s=None if when is None else max(0.0, pool.clock() - when),
        queue_place=place,
        path=path,
    )


def _way_up(pool: BlockPool, node: Node, group: int) -> tuple[bytes, tuple[BlockId, ...]]:
    """The root's digest, and a block of ``group`` for each step from there to ``node`` that is held."""
    path: list[BlockId] = []
    at = node
    while at.parent is not None:
        at = at.parent
        if at.copies and len(path) < MAX_PATH:
            copy = next((copy for copy in at.copies if pool.group[copy] == group), None)
            if copy is not None:
                path.append(copy)
    return at.key, tuple(reversed(path))


# ---- the tree ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Branches:
    """The tree, a run of nodes between two forks folded to one branch; a root is a branch without nodes.

    Every list has one entry per branch, parents before children. ``parents`` has their places (a root's is its own).
    ``units`` counts nodes, ``held`` those with a copy, ``blocks`` the copies, ``hits`` the requests whose hit ended in
    the branch: all without what is below it.
    """

    parents: array[int] = field(default_factory=lambda: array("i"))
    starts: array[int] = field(default_factory=lambda: array("i"))
    """The depth of a branch's first node: units before it."""
    units: array[int] = field(default_factory=lambda: array("i"))
    held: array[int] = field(default_factory=lambda: array("i"))
    blocks: array[int] = field(default_factory=lambda: array("i"))
    hits: array[int] = field(default_factory=lambda: array("i"))
    keys: list[bytes] = field(default_factory=list)
    """Of a branch's first node."""
    previews: list[bytes] = field(default_factory=list)
    """The first tokens of a branch, little-endian uint32."""
    salted: dict[int, bool] = field(default_factory=dict)
    """Per root: whether its namespace has a salt."""
    adapters: dict[int, int] = field(default_factory=dict)
    """Per root: how many adapters."""

    def __len__(self) -> int:
        return len(self.parents)


class TreeWalk:
    """Folds the tree piece by piece, so that no piece takes long. In between the tree may change: what is dropped
    before its turn is missing, what is added after it too; sums are then those of different moments."""

    def __init__(self, cache: PrefixCache, *, max_branches: int) -> None:
        self.branches = Branches()
        self.n_left_out = 0
        """Branches that did not fit, each with all below it."""
        self._max = max_branches
        self._stack: list[tuple[int, Node]] = [(0, root) for root in reversed(cache.index.roots.values())]

    @property
    def done(self) -> bool:
        return not self._stack

    def work(self, clock: Callable[[], float], until_s: float) -> None:
        """Go on until it is done or ``clock`` says ``until_s``."""
        n_visited = 0
        while self._stack:
            if n_visited > UNITS_A_PIECE:
                n_visited = 0
                if clock() >= until_s:
                    return
            parent, first = self._stack.pop()
            if isinstance(first, Root):
                self._add_root(first)
            elif len(self.branches) >= self._max:
                self.n_left_out += 1
            else:
                n_visited += 4 + self._add(parent, first)

    def _add_root(self, root: Root) -> None:
        branches, place = self.branches, len(self.branches)
        namespace = root.identity.namespace
        branches.salted[place] = namespace.salt is not None
        branches.adapters[place] = len(namespace.adapters)
        self._append(place, 0, 0, 0, 0, 0, root.key, b"")
        self._stack += [(place, child) for child in reversed(root.children())]

    def _add(self, parent: int, first: Node) -> int:
        """Add the branch that begins at ``first``; the number of its nodes."""
        node, n_units, n_held, n_blocks, n_hits = first, 0, 0, 0, 0
        while True:
            n_units += 1
            n_hits += node.hits
            if node.copies:
                n_held += 1
                n_blocks += len(node.copies)
            child = node.child
            if child is None:
                break
            node = child
        preview, at = first.tokens, first.child
        for _ in range(1, min(PREVIEW_UNITS, n_units)):
            if at is not None:
                preview, at = preview + at.tokens, at.child
        place = len(self.branches)
        self._append(parent, first.depth - 1, n_units, n_held, n_blocks, n_hits, first.key, preview)
        if node.siblings is not None:
            self._stack += [(place, child) for child in reversed(node.siblings)]
        return n_units

    def _append(
        self, parent: int, start: int, units: int, held: int, blocks: int, hits: int, key: bytes, preview: bytes
    ) -> None:
        branches = self.branches
        branches.parents.append(parent)
        branches.starts.append(start)
        branches.units.append(units)
        branches.held.append(held)
        branches.blocks.append(blocks)
        branches.hits.append(hits)
        branches.keys.append(key)
        branches.previews.append(preview)
