"""What a reader holds of the stream: pure, knows nothing of sockets.

Batches are applied in the order of their numbers only. One that cannot be next says why, and the reader heals that, by
a replay or a snapshot; until then nothing more is applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from headwater.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, Message


class Verdict(str, Enum):
    """What became of a batch."""

    APPLIED = "applied"
    OLD = "old"
    """Known already: it was on its way while a snapshot or a replay was taken over."""
    GAP = "gap"
    """Something before it is missing."""
    RESTARTED = "restarted"
    """It is from another start of the engine: nothing that is held here holds there."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block that the engine holds. ``parent``: the key before it, None at the beginning of a prompt."""

    parent: bytes | None
    token_ids: tuple[int, ...]
    namespace: bytes | None


class Follower:
    """The blocks that an engine holds, by (group, key), as far as it was told."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, bytes], Block] = {}
        self.next_sequence: int | None = None
        """The number of the batch to come; None before the first snapshot."""
        self.publisher: bytes | None = None
        self._former: set[bytes] = set()
        """Earlier publishers: what is still on its way from them is old."""
        self._last: Message | None = None
        """The batch before ``next_sequence``; None after a snapshot, which is not that batch itself."""
        self._time_s = 0.0

    @property
    def keys(self) -> set[tuple[int, bytes]]:
        return set(self.blocks)

    def push(self, message: Message) -> Verdict:
        """Apply a batch, if it is the next one."""
        if message.publisher in self._former:
            return Verdict.OLD
        if self.next_sequence is None:
            return Verdict.GAP
        if self._is_foreign(message):
            return Verdict.RESTARTED
        if message.sequence < self.next_sequence:
            return Verdict.OLD
        if message.sequence > self.next_sequence:
            return Verdict.GAP
        self._take(message)
        self._last = message
        self.next_sequence = message.sequence + 1
        return Verdict.APPLIED

    def continues(self, replayed: Message) -> bool:
        """Whether ``replayed`` is the very batch that was applied last: what follows it can be applied here.

        Equal numbers are not enough: an engine that was started anew counts from 0 again.
        """
        if self.next_sequence is None or replayed.sequence != self.next_sequence - 1:
            return False
        if self._last is not None:
            return replayed.payload == self._last.payload
        return self.publisher is not None and replayed.publisher == self.publisher

    def forget(self) -> None:
        """The engine was started anew: what was held is gone."""
        if self.publisher is not None:
            self._former.add(self.publisher)
        self.blocks.clear()
        self.publisher = self.next_sequence = self._last = None

    def restore(self, snapshot: Sequence[Message]) -> None:
        """Take over a snapshot, in place of what was held: batches that carry the number of the live one to come."""
        self.blocks.clear()
        for message in snapshot:
            self._take(message)
        self.publisher = snapshot[0].publisher
        self.next_sequence = snapshot[0].sequence
        self._last = None

    def _is_foreign(self, message: Message) -> bool:
        if message.publisher is not None and self.publisher is not None:
            return message.publisher != self.publisher
        # The legacy layout does not say who publishes: a number from the past that was sent just now does.
        before = self.next_sequence is not None and message.sequence < self.next_sequence
        return before and message.time_s > self._time_s

    def _take(self, message: Message) -> None:
        self._time_s = message.time_s
        for event in message.events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                for key in event.block_hashes:
                    self.blocks.pop((event.group_idx or 0, key), None)
            elif isinstance(event, AllBlocksCleared):
                self.blocks.clear()

    def _store(self, event: BlockStored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        for i, key in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[i * size : (i + 1) * size])
            self.blocks[event.group_idx or 0, key] = Block(parent, tokens, event.namespace)
            parent = key
