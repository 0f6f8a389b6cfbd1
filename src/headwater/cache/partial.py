"""Finer than a block: where whole blocks end, the slots of an equal beginning are copied.

    0 .................. n_hit ............ n_hit + n_copy ........ n_tokens
    | whole blocks,      | slots copied to  | computed
    | shared             | the own block    |

A source is a published block that follows the very same tokens and begins with the very same ones, extras included,
as far as it is copied. It is found from the node at which the whole blocks end, by comparison: proven like a hit. A
block holds the KV of its tokens whoever uses it, so each group may have another source.

Groups with blocks of several sizes: whole blocks end at a multiple of all sizes, so a smaller group may have whole
blocks to copy before the one that is copied in part.

    group of 8   |  whole   |    copy 6     |        n_copy = 6
    group of 4   |  w  | w  | copy 4 | copy 2 |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from headwater.cache.block import Node
from headwater.cache.extras import shared_extras
from headwater.cache.group import GroupHit, GroupLayout, Layout, copy_for, first_block, full_run
from headwater.types import BlockId, BlockTable

if TYPE_CHECKING:
    from headwater.cache.index import PrefixIndex
    from headwater.cache.key import TokenChain

MAX_COMPARED = 64
"""Nodes that one group's search compares at most: among more than this that share the longest beginning and are held
no more, a source may be missed."""
MAX_ENDS = 8
"""Places at which one look-up tries to leave the whole blocks, beside the end of the longest whole hit."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """The first ``n_slots`` slots of logical block ``block`` in group ``group`` are those of ``source``."""

    group: int
    block: int
    source: BlockId
    n_slots: int
    node: Node = field(repr=False)
    """What ``source`` is published as."""


@dataclass(frozen=True, slots=True)
class SlotRun:
    """Copy the first ``n_slots`` slots of block ``source`` to block ``target``, in group ``group``."""

    group: int
    source: BlockId
    target: BlockId
    n_slots: int


@dataclass(frozen=True, slots=True)
class PartialHit:
    """``n_units`` by whole blocks (``tables``: per group, what it takes to go on ``n_copy`` tokens later), then
    ``n_copy`` tokens by copy."""

    n_units: int
    n_copy: int
    tables: tuple[GroupHit, ...]
    beginnings: tuple[Beginning, ...]
    shortest: int
    """The group that holds no more than that."""


def targets(beginnings: Sequence[Beginning], tables: Sequence[BlockTable]) -> tuple[SlotRun, ...]:
    """Where the slots go: the blocks that were allocated for them."""
    return tuple(
        SlotRun(b.group, b.source, tables[b.group].blocks[b.block - tables[b.group].first], b.n_slots)
        for b in beginnings
    )


def partial_hit(
    index: PrefixIndex, chain: TokenChain, path: Sequence[Node], n_hit: int, tables: Sequence[GroupHit]
) -> PartialHit | None:
    """The furthest point after the whole hit (``n_hit`` units, ``tables``) from which every group can go on; None
    if there is none. ``path`` has the proven nodes of all full units before the last token.

    A window that lacks its first block at the end of the whole blocks may be complete a few tokens later:

        window of 8, n = end of whole blocks | n - 7 .. n - 1 lies in blocks a, b | 3 tokens later: in b and the copy
    """
    layout, search = index.layout, _Search(index, chain, path)
    for n_units in _ends(layout, path, n_hit, index):
        least = 1 if n_units == n_hit else _first_complete(index, path, n_units)
        n_whole = n_units * layout.unit
        n_copy = min(layout.hit_unit, len(chain) - n_whole) - 1
        found: list[Beginning] = []
        shortest = layout.reusable[0].index
        for group in layout.reusable:
            if n_copy < least:
                break
            more = search.after(group, n_units, n_copy)
            n_held = sum(beginning.n_slots for beginning in more)
            if n_held < n_copy:
                n_copy, shortest = n_held, group.index
            found += more
        if n_copy >= least:
            ends = tables if n_units == n_hit else _whole_blocks(index, path, n_units)
            n_start = n_whole + n_copy
            kept = _cut(layout, found, n_start)
            return PartialHit(n_units, n_copy, _trimmed(layout, ends, n_start), kept, shortest)
    return None


def _ends(layout: Layout, path: Sequence[Node], n_hit: int, index: PrefixIndex) -> Iterator[int]:
    """Units after which the whole blocks may end, the furthest first; the last is ``n_hit``."""
    top = len(path) // layout.period * layout.period
    if top > n_hit and any(group.spec.window is not None for group in layout.reusable):
        for group in layout.reusable:
            if group.spec.window is None:
                top = min(
                    top, len(full_run(group, path[:top], index.pool)) * group.ratio // layout.period * layout.period
                )
        yield from range(top, max(n_hit, top - MAX_ENDS * layout.period), -layout.period)
    yield n_hit


def _first_complete(index: PrefixIndex, path: Sequence[Node], n_units: int) -> int:
    """Least number of tokens after unit ``n_units`` at which every window needs only blocks that are held.

    ...... missing | lo ..... end                 start - window + 1 >= lo * size
                   | held     | copied
    """
    least, n_tokens = 1, n_units * index.layout.unit
    for group in index.layout.reusable:
        spec = group.spec
        if spec.window is None:
            continue
        lo, goal = n_tokens // spec.block_size, first_block(spec, n_tokens)
        while lo > goal and copy_for(group.node_of(path, lo - 1), group.index, index.pool) is not None:
            lo -= 1
        if lo > goal:
            least = max(least, lo * spec.block_size + spec.window - 1 - n_tokens)
    return least


def _whole_blocks(index: PrefixIndex, path: Sequence[Node], n_units: int) -> tuple[GroupHit, ...]:
    """Per group, its held blocks that end at unit ``n_units``, as far back as they go without a gap."""
    layout = index.layout
    hits = [GroupHit(n_units * layout.unit // spec.block_size, ()) for spec in layout.specs]
    for group in layout.reusable:
        end = n_units // group.ratio
        first, blocks = end, list[BlockId]()
        while first > first_block(group.spec, n_units * layout.unit):
            block = copy_for(group.node_of(path, first - 1), group.index, index.pool)
            if block is None:
                break
            blocks.append(block)
            first -= 1
        hits[group.index] = GroupHit(first, tuple(reversed(blocks)))
    return tuple(hits)


def _trimmed(layout: Layout, tables: Sequence[GroupHit], n_start: int) -> tuple[GroupHit, ...]:
    """Without the blocks that no query from ``n_start`` on reads."""
    reusable = {group.index for group in layout.reusable}
    hits = []
    for index, (spec, table) in enumerate(zip(layout.specs, tables, strict=True)):
        if index in reusable:
            first = min(max(table.first, first_block(spec, n_start)), table.end)
            hits.append(GroupHit(first, table.blocks[first - table.first :]))
        else:
            hits.append(GroupHit(n_start // spec.block_size, ()))
    return tuple(hits)


def _cut(layout: Layout, found: Sequence[Beginning], n_start: int) -> tuple[Beginning, ...]:
    """As far as ``n_start`` only: a group may hold more than the others."""
    kept = []
    for b in found:
        n_slots = min(b.n_slots, n_start - b.block * layout.specs[b.group].block_size)
        if n_slots > 0:
            kept.append(Beginning(b.group, b.block, b.source, n_slots, b.node))
    return tuple(kept)


class _Held(NamedTuple):
    n_tokens: int
    source: BlockId
    node: Node


class _Search:
    """Looks for what is held of a chain's tokens after a proven unit."""

    def __init__(self, index: PrefixIndex, chain: TokenChain, path: Sequence[Node]) -> None:
        self._index = index
        self._chain = chain
        self._path = path
        self._n_left = MAX_COMPARED

    def after(self, group: GroupLayout, n_units: int, most: int) -> list[Beginning]:
        """Of the ``most`` tokens after the first ``n_units`` units, those that ``group`` holds from the first on:
        whole blocks, and then the beginning of one."""
        self._n_left = MAX_COMPARED
        found: list[Beginning] = []
        while most > 0 and n_units <= len(self._path):
            held = self._block(group, n_units)
            if held is None:
                break
            found.append(
                Beginning(group.index, n_units // group.ratio, held.source, min(held.n_tokens, most), held.node)
            )
            if held.n_tokens < group.spec.block_size:
                break
            most -= held.n_tokens
            n_units += group.ratio
        return found

    def _block(self, group: GroupLayout, n_units: int) -> _Held | None:
        """The group's block that shares the longest beginning with the tokens after unit ``n_units``."""
        end = n_units + group.ratio
        if end <= len(self._path):
            block = copy_for(self._path[end - 1], group.index, self._index.pool)
            if block is not None:
                return _Held(group.spec.block_size, block, self._path[end - 1])
        parent = self._path[n_units - 1] if n_units else self._index.root_of(self._chain)
        return None if parent is None else self._longest(group, parent, n_units, group.ratio)

    def _longest(self, group: GroupLayout, parent: Node, n_units: int, n_down: int) -> _Held | None:
        """Of the group's blocks that end ``n_down`` units below ``parent``, which is proven to be the chain's unit
        ``n_units - 1``: the one that shares most of the tokens after it."""
        unit = self._index.layout.unit
        tokens, extras = self._chain.beginning(n_units)
        best: _Held | None = None
        for node, n_tokens in parent.nearest(tokens):
            if self._n_left == 0 or (best is not None and n_tokens <= min(best.n_tokens, unit - 1)):
                break
            self._n_left -= 1
            n_tokens = min(n_tokens, shared_extras(node.extras, extras, unit))
            held = None
            if n_tokens == unit and n_down > 1:
                below = self._longest(group, node, n_units + 1, n_down - 1)
                held = None if below is None else _Held(unit + below.n_tokens, below.source, below.node)
            if held is None and n_tokens > 0:
                held = self._any(group, node, n_down - 1, n_tokens)
            if held is not None and (best is None or held.n_tokens > best.n_tokens):
                best = held
        return best

    def _any(self, group: GroupLayout, node: Node, n_down: int, n_tokens: int) -> _Held | None:
        """Any block of the group that ends ``n_down`` units below ``node``: it shares ``n_tokens``."""
        if n_down == 0:
            block = copy_for(node, group.index, self._index.pool)
            return None if block is None else _Held(n_tokens, block, node)
        for child in node.children():
            if self._n_left == 0:
                return None
            self._n_left -= 1
            held = self._any(group, child, n_down - 1, n_tokens)
            if held is not None:
                return held
        return None
