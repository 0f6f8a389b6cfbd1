"""Content nodes: what is recorded about one unit's content, and which blocks hold it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import TYPE_CHECKING

from headwater.cache.key import TOKEN_BYTES
from headwater.types import BlockId, BlockTable, RequestId

if TYPE_CHECKING:
    from headwater.cache.key import ChainRoot, TokenChain
    from headwater.cache.partial import Beginning

NOBODY: frozenset[str] = frozenset()
"""The senders of a node where callers are not told apart."""


class Node:
    """Content of one unit after one history: node = (parent node, tokens, extras).

    ``copies`` are the physical blocks that hold it, of all groups (the pool knows each block's group).
    ``depth`` counts units from the root: the node covers tokens ``(depth - 1) * unit .. depth * unit - 1``.
    ``child`` is the only child; with two or more, ``siblings`` holds them, sorted by (tokens, extras).
    ``alias`` is the next node with the same key: with an honest hash function there is none.
    ``hits`` counts the requests whose hit ended with this unit.
    ``senders`` are those who sent this content (cache/senders.py); empty where callers are not told apart.
    A node that was dropped has no parent.
    """

    __slots__ = (
        "alias", "child", "copies", "depth", "extras", "hits", "key", "parent", "senders", "siblings", "tokens",
    )  # fmt: skip

    def __init__(self, parent: Node | None, key: bytes, tokens: bytes, extras: bytes | None, depth: int) -> None:
        self.parent = parent
        self.key = key
        self.tokens = tokens
        self.extras = extras
        self.depth = depth
        self.copies: tuple[BlockId, ...] = ()
        self.child: Node | None = None
        self.siblings: list[Node] | None = None
        self.alias: Node | None = None
        self.hits = 0
        self.senders = NOBODY

    @property
    def has_children(self) -> bool:
        return self.child is not None or self.siblings is not None

    def children(self) -> list[Node]:
        if self.siblings is not None:
            return list(self.siblings)
        return [] if self.child is None else [self.child]

    def add_child(self, node: Node) -> None:
        if self.siblings is not None:
            insort(self.siblings, node, key=_order)
        elif self.child is not None:
            self.siblings = sorted((self.child, node), key=_order)
            self.child = None
        else:
            self.child = node

    def remove_child(self, node: Node) -> None:
        if self.siblings is None:
            self.child = None
            return
        del self.siblings[bisect_left(self.siblings, _order(node), key=_order)]
        if len(self.siblings) == 1:
            self.child, self.siblings = self.siblings[0], None

    def with_tokens(self, tokens: bytes) -> Iterator[Node]:
        """Children with exactly these tokens, whatever their extras."""
        nodes = self.siblings if self.siblings is not None else self.children()
        for i in range(bisect_left(nodes, tokens, key=_tokens), len(nodes)):
            if nodes[i].tokens != tokens:
                return
            yield nodes[i]

    def longest_shared(self, tokens: bytes) -> int:
        """Number of leading tokens that ``tokens`` shares with the child that shares most (0 without children)."""
        return next((n_tokens for _, n_tokens in self.nearest(tokens)), 0)

    def nearest(self, tokens: bytes) -> Iterator[tuple[Node, int]]:
        """Children that share a beginning with ``tokens``, with the number of tokens that it has, longest first.

        In lexicographic order they lie next to where ``tokens`` would stand, and the further away the less they
        share; little-endian bytes order single ids oddly, but any order of ids will do.
        """
        nodes = self.siblings if self.siblings is not None else self.children()
        above = bisect_left(nodes, tokens, key=_tokens)
        below = above - 1
        while True:
            n_below = _shared(nodes[below].tokens, tokens) if below >= 0 else 0
            n_above = _shared(nodes[above].tokens, tokens) if above < len(nodes) else 0
            if n_above > n_below:
                yield nodes[above], n_above
                above += 1
            elif n_below:
                yield nodes[below], n_below
                below -= 1
            else:
                return


class Root(Node):
    """The node before the first unit of a namespace."""

    __slots__ = ("identity",)

    def __init__(self, identity: ChainRoot) -> None:
        super().__init__(None, identity.digest, b"", None, 0)
        self.identity = identity


def _order(node: Node) -> tuple[bytes, bytes]:
    return node.tokens, node.extras or b""  # encoded extras are never empty


def _tokens(node: Node) -> bytes:
    return node.tokens


def _shared(a: bytes, b: bytes) -> int:
    n = min(len(a), len(b)) // TOKEN_BYTES
    for i in range(n):
        at = i * TOKEN_BYTES
        if a[at : at + TOKEN_BYTES] != b[at : at + TOKEN_BYTES]:
            return i
    return n


class Holding:
    """What one sequence holds: a block table per group, and how far its content is published.

    ``cursor`` is the node of the last published unit; the units after it, as far as the chain knows their
    tokens, are being computed by ``owner``. It is None when nothing of this sequence can be published:
    caching is off, or the record of its history was dropped. ``beginnings`` are the copies of slots that the
    sequence starts with and that no applied step has made yet; each holds a reference on its source.
    """

    __slots__ = ("barred", "beginnings", "chain", "cursor", "n_published", "owner", "released", "sender", "tables")

    def __init__(
        self, chain: TokenChain, owner: RequestId, tables: tuple[BlockTable, ...], n_published: int, sender: str = ""
    ) -> None:
        self.chain = chain
        self.owner = owner
        self.sender = sender
        """Who sent the request; empty where callers are not told apart."""
        self.tables = tables
        self.n_published = n_published
        """Tokens, from the start, whose full units are published (or were found published)."""
        self.cursor: Node | None = None
        self.beginnings: tuple[Beginning, ...] = ()
        self.barred = False
        """Nothing more may be published: it may have been computed from content that was withdrawn as wrong."""
        self.released = False

    @property
    def n_blocks(self) -> int:
        return sum(len(table.blocks) for table in self.tables)

    def __repr__(self) -> str:
        return f"Holding({self.owner!r}, {self.n_blocks} blocks, {self.n_published} tokens published)"
