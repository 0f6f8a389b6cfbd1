"""The answer to "how much of this prompt is in memory, and why not more?"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from headwater.cache.block import Node
from headwater.cache.evict import Eviction
from headwater.cache.extras import shared_extras
from headwater.cache.group import GroupHit, GroupLayout, Layout, copy_for, first_block
from headwater.cache.key import TOKEN_BYTES
from headwater.types import RequestId

if TYPE_CHECKING:
    from headwater.cache.index import PrefixIndex
    from headwater.cache.key import TokenChain
    from headwater.cache.partial import Beginning, PartialHit


class StopReason(str, Enum):
    """Why a hit ended where it did."""

    NO_RECORD = "no_record"
    DIFFERS = "differs"
    EVICTED = "evicted"
    OTHER_IDENTITY = "other_identity"
    COMPUTING = "computing"
    PARTIAL_BLOCK = "partial_block"
    LAST_TOKEN = "last_token"
    BYPASSED = "bypassed"
    GROUP_CANNOT_START = "group_cannot_start"


@dataclass(frozen=True, slots=True)
class Stop:
    """The reason, and what belongs to it.

    ``at_token``: position of the first token that is not reused for this reason. If nothing was copied, it is for
    DIFFERS the first that is not equal, which may lie inside a block.
    """

    reason: StopReason
    at_token: int
    evicted_at: float | None = None
    """EVICTED, and GROUP_CANNOT_START if that group's block was evicted: clock of the cache, seconds."""
    request: RequestId | None = None
    """With ``evicted_at``: the request that needed the block. COMPUTING: the request that computes it now."""
    sender: str = field(default="", repr=False)
    """Who sent that request; empty where callers are not told apart."""
    option: str | None = None
    """BYPASSED: by which option."""
    group: int | None = None
    """GROUP_CANNOT_START: which group."""

    def describe(self) -> str:
        """One sentence that anybody may read: it names no other request. ``Account.sentence`` knows its reader."""
        at = f"at token {self.at_token}"
        evicted = "" if self.evicted_at is None else f" (evicted at {self.evicted_at} s)"
        return {
            StopReason.NO_RECORD: f"no record of what follows {at}",
            StopReason.DIFFERS: f"differs from what is recorded {at}",
            StopReason.EVICTED: f"no longer held {at}{evicted}",
            StopReason.OTHER_IDENTITY: f"the same tokens are recorded with another adapter or media {at}",
            StopReason.COMPUTING: f"being computed now by another request {at}",
            StopReason.PARTIAL_BLOCK: f"every full block hit; the rest {at} fills no block",
            StopReason.LAST_TOKEN: f"all that can be reused is; the last token must be computed ({at})",
            StopReason.BYPASSED: f"not looked up: bypassed by {self.option}",
            StopReason.GROUP_CANNOT_START: f"group {self.group} holds too little to start {at}{evicted}",
        }[self.reason]


@dataclass(frozen=True, slots=True)
class Lookup:
    """The longest usable hit for a chain, at one moment. Pure: nothing was changed to find it.

        0 ........ n_hit ........ n_start ........ n_tokens
        | whole    | n_copy       | computed, at least one
          blocks     slots copied

    ``n_hit`` is a multiple of the smallest reusable length; ``tables`` has per group the shared blocks that it takes
    to go on at ``n_start``, and ``beginnings`` what is copied to blocks of the sequence's own.
    """

    n_tokens: int
    n_hit: int
    tables: tuple[GroupHit, ...]
    stop: Stop
    chain: TokenChain = field(repr=False)
    path: Sequence[Node] = field(repr=False)
    """Nodes of the hit's units."""
    epoch: int = field(repr=False)
    """The index's count of withdrawals at that moment."""
    n_copy: int = 0
    beginnings: tuple[Beginning, ...] = ()
    whole: Lookup | None = None
    """The hit by whole blocks alone, if there is something to copy: for when there is no room to keep the sources."""

    @property
    def n_start(self) -> int:
        """The first token to compute."""
        return self.n_hit + self.n_copy

    @property
    def bypassed(self) -> bool:
        return self.stop.reason is StopReason.BYPASSED


def explain(index: PrefixIndex, chain: TokenChain, path: Sequence[Node], n_hit: int, n_limit: int) -> Stop:
    """Why the hit ended after ``n_hit`` units, with ``path`` proven and ``n_limit`` units asked for."""
    layout = index.layout
    if n_hit == n_limit:
        aligned = len(chain) % layout.hit_unit == 0 and len(chain) > 0
        reason = StopReason.LAST_TOKEN if aligned else StopReason.PARTIAL_BLOCK
        return Stop(reason, n_hit * layout.unit)
    missing = _missing_copy(index, path, n_hit)
    if missing is None:
        return _end_of_path(index, chain, path)
    group, block = missing
    at_token = block * group.spec.block_size
    node = group.node_of(path, block)
    for i in range(block * group.ratio, (block + 1) * group.ratio):
        now = index.computing_now(path[i - 1] if i else index.root_of(chain), chain, i)
        if now is not None:
            return Stop(StopReason.COMPUTING, at_token, request=now.owner, sender=now.sender)
    eviction = index.ghosts.nodes.get(node)
    if eviction is not None:
        return _evicted(at_token, eviction)
    partly = index.partly.get(node, {}).get(group.index)
    if partly is None:
        return Stop(StopReason.GROUP_CANNOT_START, at_token, group=group.index)
    return Stop(
        StopReason.GROUP_CANNOT_START,
        at_token,
        evicted_at=partly.when,
        request=partly.wanted_by,
        sender=partly.sender,
        group=group.index,
    )


def explain_copy(index: PrefixIndex, stop: Stop, chain: TokenChain, path: Sequence[Node], found: PartialHit) -> Stop:
    """Why the copy of ``found`` goes no further. ``stop``: why its whole blocks, those of ``path``, ended."""
    n_start = found.n_units * chain.unit + found.n_copy
    if n_start == len(chain) - 1:
        return Stop(StopReason.LAST_TOKEN, n_start)
    if found.n_copy >= chain.unit and stop.at_token != n_start:  # beyond the unit for which the whole blocks ended
        return Stop(StopReason.GROUP_CANNOT_START, n_start, group=found.shortest)
    if stop.reason in (StopReason.LAST_TOKEN, StopReason.PARTIAL_BLOCK):
        return _not_held(index, chain, path, n_start, found) or Stop(StopReason.DIFFERS, n_start)
    return replace(stop, at_token=n_start)


def _not_held(
    index: PrefixIndex, chain: TokenChain, path: Sequence[Node], n_start: int, found: PartialHit
) -> Stop | None:
    """All that is left after ``path`` is recorded, but no block (of a group) holds it; None if it differs."""
    tail, extras = chain.beginning(len(path))
    parent = path[-1] if path else index.root_of(chain)
    node, n_shared = next(parent.nearest(tail), (None, 0)) if parent is not None else (None, 0)
    if node is None or n_shared * TOKEN_BYTES < len(tail) or shared_extras(node.extras, extras, chain.unit) < n_shared:
        return None
    eviction = index.ghosts.nodes.get(node)
    if eviction is not None:
        return _evicted(n_start, eviction)
    return (
        Stop(StopReason.GROUP_CANNOT_START, n_start, group=found.shortest) if len(index.layout.reusable) > 1 else None
    )


def _evicted(at_token: int, eviction: Eviction) -> Stop:
    return Stop(
        StopReason.EVICTED,
        at_token,
        evicted_at=eviction.when,
        request=eviction.wanted_by,
        sender=eviction.sender,
    )


def _missing_copy(index: PrefixIndex, path: Sequence[Node], n_hit: int) -> tuple[GroupLayout, int] | None:
    """The first block on the path that is missing for the next longer hit; None if only the path is too short."""
    layout: Layout = index.layout
    n_next = n_hit + layout.period
    for group in layout.reusable:
        if group.spec.window is None:
            first, last = n_hit // group.ratio, min(n_next, len(path)) // group.ratio
        elif n_next <= len(path):
            first, last = first_block(group.spec, n_next * layout.unit), n_next // group.ratio
        else:
            continue
        for block in range(first, last):
            if copy_for(group.node_of(path, block), group.index, index.pool) is None:
                return group, block
    return None


def _end_of_path(index: PrefixIndex, chain: TokenChain, path: Sequence[Node]) -> Stop:
    """Why there is no node for the unit after the path."""
    i = len(path)
    at_token = i * index.layout.unit
    parent = path[-1] if path else index.root_of(chain)
    tokens = chain.chunk(i)
    now = index.computing_now(parent, chain, i)
    if now is not None:
        return Stop(StopReason.COMPUTING, at_token, request=now.owner, sender=now.sender)
    if parent is not None and any(True for _ in parent.with_tokens(tokens)):
        return Stop(StopReason.OTHER_IDENTITY, at_token)
    if not path and index.known_elsewhere(chain):
        return Stop(StopReason.OTHER_IDENTITY, at_token)
    if parent is None or not parent.has_children:
        return Stop(StopReason.NO_RECORD, at_token)
    return Stop(StopReason.DIFFERS, at_token + parent.longest_shared(tokens))
