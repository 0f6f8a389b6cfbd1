"""What it takes to compute a recorded block again, and what to suspect when the result is not what is stored."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from headwater.cache.block import Node, Root
from headwater.cache.group import GroupHit, longest_hit
from headwater.cache.index import PrefixIndex
from headwater.cache.key import token_ids
from headwater.errors import CacheError
from headwater.types import BlockId

MAX_RELATIVES = 64
"""So many of the blocks that begin with the same tokens are suspected at most."""


@dataclass(frozen=True, slots=True)
class Recheck:
    """A recorded block, and what its tokens are computed from. Blocks are not claimed: good until the cache changes.

    0 ............... n_start ............... len(tokens)
    | in ``tables``   | to compute; stored in each of ``copies``
    """

    tokens: tuple[int, ...]
    n_start: int
    tables: tuple[GroupHit, ...]
    """Per group, the held blocks with which a sequence can start at ``n_start``."""
    copies: tuple[tuple[BlockId, ...], ...]
    """Per group, the blocks that are published as holding the KV of the tokens from ``n_start`` on."""


def recheck(index: PrefixIndex, node: Node) -> Recheck | None:
    """How to compute ``node``'s unit again. None if that cannot be: its record was dropped, no block holds it any
    more, a group lacks what it takes to start there, or its history is more than tokens (media, embeddings).

    CacheError where groups have blocks of several sizes: a unit is no block of each then.
    """
    layout = index.layout
    if any(spec.block_size != layout.unit for spec in layout.specs):
        raise CacheError("a block can be checked only where all groups have blocks of one size")
    path = _path_to(node)
    if path is None or not node.copies or any(step.extras is not None for step in path):
        return None
    n_units, tables = longest_hit(layout, path[:-1], index.pool)
    if n_units != len(path) - 1:
        return None
    copies = tuple(tuple(b for b in node.copies if index.pool.group[b] == g) for g in range(len(layout.specs)))
    return Recheck(token_ids(b"".join(step.tokens for step in path)), n_units * layout.unit, tuple(tables), copies)


def suspects(node: Node) -> list[Node]:
    """Where else a fault may lie if ``node`` is not what its history gives: in that history, from its beginning on,
    and in the blocks that begin with the same tokens, which may have been copied from it or it from them."""
    path = _path_to(node)
    if path is None or node.parent is None:
        return []
    relatives = (other for other, _ in node.parent.nearest(node.tokens) if other is not node)
    return [*_held(path[:-1]), *_held(islice(relatives, MAX_RELATIVES))]


def _held(nodes: Iterable[Node]) -> list[Node]:
    return [node for node in nodes if node.copies]


def _path_to(node: Node) -> list[Node] | None:
    """From the first unit to ``node``; None if it is no longer in the tree."""
    path, at = [], node
    while not isinstance(at, Root):
        if at.parent is None:
            return None
        path.append(at)
        at = at.parent
    path.reverse()
    return path
