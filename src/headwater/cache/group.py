"""Groups: which blocks each needs so that a sequence can go on at a given point, and the longest such point.

units    | 0 | 1 | 2 | 3 | 4 | 5 |     one key each (unit = gcd of the reusable groups' blocks)
ratio 1  | 0 | 1 | 2 | 3 | 4 | 5 |     a group's block i is keyed by the chain at its own end:
ratio 2  |   0   |   1   |   2   |     block i ends with unit (i + 1) * ratio - 1
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headwater.cache.block import Node
from headwater.cache.pool import BlockPool
from headwater.errors import AuditError
from headwater.types import BlockId, GroupKind, GroupSpec


def window_blocks(spec: GroupSpec, drop: int = 0) -> int:
    """Blocks before a block boundary that a sliding group needs to go on there: those that cover the
    ``window - 1`` positions before it, and ``drop`` more if that many matched blocks will be dropped."""
    if spec.window is None:
        raise ValueError("a full group needs every block, not a window")
    return -(-(spec.window - 1) // spec.block_size) + drop


def first_block(spec: GroupSpec, n_tokens: int) -> int:
    """First logical block that queries at positions >= ``n_tokens`` read."""
    return spec.first_needed(n_tokens) // spec.block_size


@dataclass(frozen=True, slots=True)
class GroupHit:
    """What a look-up found for one group: ``blocks[j]`` holds logical block ``first + j``."""

    first: int
    blocks: tuple[BlockId, ...]

    @property
    def end(self) -> int:
        return self.first + len(self.blocks)


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """A reusable group: its place among all groups and the number of units in one of its blocks."""

    index: int
    spec: GroupSpec
    ratio: int

    def node_of(self, path: Sequence[Node], block: int) -> Node:
        """The node at the end of logical block ``block``."""
        return path[(block + 1) * self.ratio - 1]


@dataclass(frozen=True, slots=True)
class Layout:
    """All groups, and the two units of length: of keys (gcd) and of hits (lcm), in tokens."""

    specs: tuple[GroupSpec, ...]
    reusable: tuple[GroupLayout, ...]
    unit: int
    hit_unit: int

    @classmethod
    def of(cls, specs: Sequence[GroupSpec], default_unit: int) -> Layout:
        """``default_unit`` is used when no group is reusable."""
        sizes = [spec.block_size for spec in specs if spec.reusable]
        unit = math.gcd(*sizes) if sizes else default_unit
        reusable = [GroupLayout(g, spec, spec.block_size // unit) for g, spec in enumerate(specs) if spec.reusable]
        return cls(tuple(specs), tuple(reusable), unit, math.lcm(*sizes) if sizes else default_unit)

    @property
    def period(self) -> int:
        """Units in a hit unit."""
        return self.hit_unit // self.unit

    def ending_at(self) -> tuple[tuple[GroupLayout, ...], ...]:
        """Per unit, modulo ``period``: the groups of which a block ends with that unit."""
        return tuple(tuple(g for g in self.reusable if (i + 1) % g.ratio == 0) for i in range(self.period))

    @property
    def every_unit_held(self) -> bool:
        """Whether a table always holds a block for every unit, so that no path in use has ghosts."""
        return any(g.spec.kind is GroupKind.FULL and g.ratio == 1 for g in self.reusable)


def copy_for(node: Node, group: int, pool: BlockPool) -> BlockId | None:
    """A copy of ``node`` in ``group``, one in use if there is one (that costs no evictable block)."""
    found: BlockId | None = None
    for block in node.copies:
        if pool.group[block] == group:
            if pool.refs[block]:
                return block
            found = block if found is None else found
    return found


def full_run(layout: GroupLayout, path: Sequence[Node], pool: BlockPool) -> list[BlockId]:
    """The longest run of held blocks from block 0 along ``path``, one copy of each."""
    run: list[BlockId] = []
    group, index = pool.group, layout.index
    for node in path[layout.ratio - 1 :: layout.ratio]:
        copies = node.copies
        if len(copies) == 1 and group[copies[0]] == index:
            run.append(copies[0])
            continue
        block = copy_for(node, index, pool)
        if block is None:
            break
        run.append(block)
    return run


def longest_hit(layout: Layout, path: Sequence[Node], pool: BlockPool, *, drop: int = 0) -> tuple[int, list[GroupHit]]:
    """The longest hit along a proven path: units, and per group what it takes to start there.

    A length counts only if every reusable group can start there. Groups that take no part get the block that
    holds the first token to compute. ``drop`` hit units are given up at the end of what matched (for a drafter
    that needs their hidden states): windows are tested so that they still stand behind the shorter hit.
    """
    period = layout.period
    n_units = len(path) // period * period
    runs: dict[int, list[BlockId]] = {}
    for g in layout.reusable:
        if g.spec.kind is GroupKind.FULL:
            run = runs[g.index] = full_run(g, path[:n_units], pool)
            n_units = min(n_units, len(run) * g.ratio) // period * period
    windows = [_Window(g, path, pool, drop * period // g.ratio) for g in layout.reusable if g.spec.window is not None]
    n_units = _all_windows(windows, n_units, period)
    n_units = max(0, n_units - drop * period)
    hits = []
    taking_part = {g.index: g for g in layout.reusable}
    for index, spec in enumerate(layout.specs):
        n_tokens = n_units * layout.unit
        if index in runs:
            hits.append(GroupHit(0, tuple(runs[index][: n_tokens // spec.block_size])))
        elif index in taking_part:
            hits.append(_window_hit(taking_part[index], path, n_tokens, pool))
        else:
            hits.append(GroupHit(n_tokens // spec.block_size, ()))
    return n_units, hits


def _window_hit(layout: GroupLayout, path: Sequence[Node], n_tokens: int, pool: BlockPool) -> GroupHit:
    first = first_block(layout.spec, n_tokens)
    blocks = []
    for j in range(first, n_tokens // layout.spec.block_size):
        block = copy_for(layout.node_of(path, j), layout.index, pool)
        if block is None:
            raise AuditError(f"group {layout.index}: block {j} of a window that was found whole is missing")
        blocks.append(block)
    return GroupHit(first, tuple(blocks))


def _all_windows(windows: Sequence[_Window], n_units: int, period: int) -> int:
    """Largest multiple of ``period`` <= ``n_units`` where every window stands."""
    settled = False
    while not settled and n_units > 0:
        settled = True
        for window in windows:
            fits = window.largest(n_units) // period * period
            if fits < n_units:
                n_units, settled = fits, False
    return max(0, n_units)


class _Window:
    """Where one sliding group can start, asked for ever smaller ends; each block is looked at once."""

    def __init__(self, layout: GroupLayout, path: Sequence[Node], pool: BlockPool, drop: int) -> None:
        self.layout = layout
        self.path = path
        self.pool = pool
        self.need = window_blocks(layout.spec, drop)
        self.lo: int | None = None
        """Blocks ``lo .. end - 1`` are held, for the last end asked for."""

    def largest(self, n_units: int) -> int:
        """Units up to the last end <= ``n_units`` that might stand: ``n_units`` itself if it does.

        0 ..... missing | lo ....... end
                        | held       |       stands if end - lo >= need, or lo = 0
        """
        end = n_units // self.layout.ratio
        lo = end if self.lo is None else min(self.lo, end)
        goal = max(0, end - self.need)
        while lo > goal:
            if copy_for(self.layout.node_of(self.path, lo - 1), self.layout.index, self.pool) is None:
                self.lo = None
                return (lo - 1) * self.layout.ratio
            lo -= 1
        self.lo = lo
        return n_units
