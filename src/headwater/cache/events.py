"""What became findable and what stopped being so, for readers outside: routers, tiers, tools."""

from __future__ import annotations

from collections import deque

import msgspec

from headwater.cache.key import TOKEN_BYTES, ChainRoot, token_ids
from headwater.errors import ConfigError


class BlockStored(msgspec.Struct, frozen=True, gc=False):
    """The first copy of a block became findable. ``key`` is the cache key; ``parent`` that of the block before
    it (the chain's root for the first): a reader that knows the keys of a prompt needs no more. ``chunk`` has its
    tokens as little-endian uint32. The salt is in the keys and nowhere else: ``root`` is the digest of the namespace,
    and ``apart`` says that the namespace has a salt or adapters, so that the block is another one than that of the same
    tokens without. ``extras`` are the encoded ones of the block's units, one after the other; empty if it has none."""

    sequence: int
    key: bytes
    parent: bytes
    chunk: bytes
    group: int
    root: bytes
    apart: bool
    extras: bytes

    @property
    def tokens(self) -> tuple[int, ...]:
        return token_ids(self.chunk)

    @property
    def block_size(self) -> int:
        return len(self.chunk) // TOKEN_BYTES


class BlockRemoved(msgspec.Struct, frozen=True, gc=False):
    """The last copy of a block is gone."""

    sequence: int
    key: bytes
    group: int


class AllCleared(msgspec.Struct, frozen=True, gc=False):
    """Everything is gone."""

    sequence: int


Event = BlockStored | BlockRemoved | AllCleared


class EventLog:
    """A bounded buffer of events, off unless enabled. Sequence numbers have no gaps unless events were lost:
    when nobody drains, the oldest are dropped and counted, and the cache never waits."""

    def __init__(self, *, enabled: bool = False, capacity: int = 65_536) -> None:
        if capacity < 1:
            raise ConfigError(f"the event buffer needs room for at least 1 event, got {capacity}")
        self.enabled = enabled
        self.n_dropped = 0
        self.next_sequence = 0
        self._buffer: deque[Event] = deque(maxlen=capacity)
        self._announced: dict[tuple[int, bytes], int] = {}
        """(group, key) -> contents announced under it: more than one only if the hash function collides."""

    @property
    def announced(self) -> set[tuple[int, bytes]]:
        """What a reader of all events since the start holds now."""
        return set(self._announced)

    def stored(self, key: bytes, content: tuple[bytes, bytes, bytes], group: int, root: ChainRoot) -> None:
        """``content``: parent, chunk and extras, as in BlockStored."""
        n = self._announced.get((group, key), 0)
        self._announced[group, key] = n + 1
        if n == 0:
            parent, chunk, extras = content
            self._append(
                BlockStored(self.next_sequence, key, parent, chunk, group, root.digest, is_apart(root), extras)
            )

    def removed(self, key: bytes, group: int) -> None:
        n = self._announced.pop((group, key))
        if n > 1:
            self._announced[group, key] = n - 1
        else:
            self._append(BlockRemoved(self.next_sequence, key, group))

    def cleared(self) -> None:
        self._announced.clear()
        self._append(AllCleared(self.next_sequence))

    def drain(self) -> list[Event]:
        """The events since the last call, oldest first."""
        events = list(self._buffer)
        self._buffer.clear()
        return events

    def _append(self, event: Event) -> None:
        if len(self._buffer) == self._buffer.maxlen:
            self.n_dropped += 1
        self._buffer.append(event)
        self.next_sequence += 1


def is_apart(root: ChainRoot) -> bool:
    """Whether the blocks of this namespace are others than those of the same tokens without salt and adapters."""
    return root.namespace.salt is not None or bool(root.namespace.adapters)
