"""A plain model of the cache to test it against, and the fakes that tests share.

The model writes down what each physical block really holds, as (group, namespace, all tokens up to the
block's end), when a fake step writes it. A hit is right if its blocks hold the prompt's own beginning; it is
complete if no longer one could be found by trying every length against what is published.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headwater.cache.block import Holding
from headwater.cache.key import Hasher, TokenChain
from headwater.cache.lookup import Lookup
from headwater.cache.prefix import PrefixCache
from headwater.config import CacheConfig
from headwater.types import GroupKind, GroupSpec, Namespace

BASE = Namespace(weights=b"weights")
CONSTANT = Hasher("constant", lambda message: b"\x07")
TRUNCATED = Hasher("truncated", lambda message: bytes([hashlib.sha256(message).digest()[0] & 3]))


def full(block_size: int, **kwargs: bool) -> GroupSpec:
    return GroupSpec(GroupKind.FULL, block_size, **kwargs)


def sliding(block_size: int, window: int) -> GroupSpec:
    return GroupSpec(GroupKind.SLIDING, block_size, window=window)


def make_cache(
    *groups: GroupSpec,
    n_blocks: int = 64,
    hasher: Hasher | None = None,
    max_ghosts: int = 65_536,
    partial: bool = True,
    **kwargs: object,
) -> PrefixCache:
    specs = groups or (full(4),)
    config = CacheConfig(block_size=specs[0].block_size, max_ghosts=max_ghosts, partial_reuse=partial)
    return PrefixCache(specs, n_blocks, config=config, hasher=hasher, **kwargs)  # type: ignore[arg-type]


def span(first: int, last: int) -> list[int]:
    """Token ids ``first .. last``, both inclusive."""
    return list(range(first, last + 1))


def admit(cache: PrefixCache, chain: TokenChain, owner: str = "r") -> tuple[Lookup, Holding]:
    """Look up, claim, count and allocate for all known tokens."""
    lookup = cache.lookup(chain)
    holding = cache.claim(chain, lookup, owner)
    cache.record(lookup, resumed=False)
    cache.allocate(holding, len(chain))
    return lookup, holding


def serve(
    cache: PrefixCache, tokens: Sequence[int], owner: str = "r", namespace: Namespace = BASE, **kwargs: object
) -> Lookup:
    """A whole request: all tokens computed in one step, published, released."""
    chain = cache.chain(namespace, tokens, **kwargs)  # type: ignore[arg-type]
    lookup, holding = admit(cache, chain, owner)
    cache.copied(holding)
    cache.publish(chain, holding, len(chain))
    cache.slide(holding, len(chain))
    cache.release(holding)
    cache.audit()
    return lookup


def hit(cache: PrefixCache, tokens: Sequence[int], namespace: Namespace = BASE, **kwargs: object) -> int:
    return cache.lookup(cache.chain(namespace, tokens, **kwargs)).n_hit  # type: ignore[arg-type]


Content = tuple[int, Namespace, tuple[int, ...]]


@dataclass
class Blocks:
    """The plain model: physical contents and what has been published."""

    groups: Sequence[GroupSpec]
    unit: int
    hit_unit: int
    written: dict[int, Content] = field(default_factory=dict)
    """By block: what the fake model really wrote there."""
    published: dict[int, Content] = field(default_factory=dict)

    def taken(self, blocks: Sequence[int]) -> None:
        """Blocks get a new owner: what they were published as is gone."""
        for block in blocks:
            self.published.pop(block, None)

    def publish(self, namespace: Namespace, tokens: Sequence[int], holding: Holding, start: int, end: int) -> None:
        """Every full block that ends in tokens ``start + 1 .. end`` (``end`` rounded down to whole units)."""
        end = end // self.unit * self.unit
        for g, (spec, table) in enumerate(zip(self.groups, holding.tables, strict=True)):
            for j, block in enumerate(table.blocks, table.first):
                block_end = (j + 1) * spec.block_size
                if spec.reusable and start < block_end <= end:
                    self.published[block] = (g, namespace, tuple(tokens[:block_end]))

    def withdrawn(self, blocks: Iterable[int]) -> None:
        """What these blocks are published as is wrong; they keep their bytes, and their owners."""
        self.taken(list(blocks))

    def longest_hit(self, namespace: Namespace, tokens: Sequence[int]) -> int:
        """By trying every length, longest first."""
        held = set(self.published.values())
        longest = max(0, len(tokens) - 1) // self.hit_unit * self.hit_unit
        for length in range(longest, 0, -self.hit_unit):
            if all(self._can_start(held, g, namespace, tokens, length) for g in range(len(self.groups))):
                return length
        return 0

    def longest_start(self, namespace: Namespace, tokens: Sequence[int]) -> int:
        """The same with copies: every point at which each group can go on, furthest first; a block may be copied
        from any that is published and begins with the tokens up to there."""
        held = set(self.published.values())
        for length in range(max(0, len(tokens) - 1), 0, -1):
            if all(self._can_go_on(held, g, namespace, tokens, length) for g in range(len(self.groups))):
                return length
        return 0

    def _can_go_on(self, held: set[Content], g: int, namespace: Namespace, tokens: Sequence[int], length: int) -> bool:
        spec = self.groups[g]
        whole = length // spec.block_size * spec.block_size
        first = spec.first_needed(length) // spec.block_size * spec.block_size
        if not spec.reusable:
            return True
        ends = range(first + spec.block_size, whole + 1, spec.block_size)
        if not all((g, namespace, tuple(tokens[:end])) in held for end in ends):
            return False
        n_end = whole + spec.block_size
        return length == whole or any(
            (group, other) == (g, namespace) and len(t) == n_end and t[:length] == tuple(tokens[:length])
            for group, other, t in held
        )

    def copy(self, group: int, source: int, target: int, n_slots: int) -> None:
        """The target holds the source's tokens as far as they were copied."""
        spec = self.groups[group]
        of, namespace, tokens = self.written[source]
        assert of == group
        end = (len(tokens) - 1) // spec.block_size * spec.block_size + n_slots
        assert end <= len(tokens), "slots are copied that were never written"
        self.written[target] = (group, namespace, tokens[:end])

    def _can_start(self, held: set[Content], g: int, namespace: Namespace, tokens: Sequence[int], length: int) -> bool:
        spec = self.groups[g]
        if not spec.reusable:
            return True
        first = spec.first_needed(length)
        ends = [e for e in range(spec.block_size, length + 1, spec.block_size) if e > first]
        return all((g, namespace, tuple(tokens[:e])) in held for e in ends)

    def check_hit(self, namespace: Namespace, tokens: Sequence[int], lookup: Lookup) -> None:
        """The blocks of the hit hold, physically, the prompt's own beginning."""
        for g, (spec, table) in enumerate(zip(self.groups, lookup.tables, strict=True)):
            for j, block in enumerate(table.blocks, table.first):
                want = (g, namespace, tuple(tokens[: (j + 1) * spec.block_size]))
                assert self.written[block] == want, f"block {block} holds {self.written[block]}, the hit needs {want}"
            if spec.reusable:
                n_whole = lookup.n_hit // spec.block_size
                assert table.first == min(spec.first_needed(lookup.n_start) // spec.block_size, n_whole)
                assert table.end == n_whole
        for b in lookup.beginnings:
            spec = self.groups[b.group]
            start = b.block * spec.block_size
            group, other, held = self.written[b.source]
            assert (group, other, len(held)) == (b.group, namespace, start + spec.block_size)
            assert held[: start + b.n_slots] == tuple(tokens[: start + b.n_slots])
