"""The bytes of KV events: msgpack in the layout of vLLM 0.32's KV events, so that its readers understand ours.

A message on the stream has three frames; so has a replayed one, after the empty frame that REQ sockets want:

    topic | sequence number, 8 bytes, big-endian | payload: [time, [event, ...], 0]

An event is a map with its name under ``type``. In the older layout ("legacy", vLLM before June 2026) it is an array
that starts with its name: the same fields without names, in the order of the classes below.

Two keys are Headwater's own, and readers of vLLM's events skip them: ``namespace`` and ``publisher``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headwater.errors import EventsError

SEQUENCE_BYTES = 8

END = b"\xff" * SEQUENCE_BYTES
"""The sequence number (-1) of the message that ends a replay or a snapshot."""

SNAPSHOT = b"headwater.snapshot"
"""The request for everything that is held now, in place of the number to replay from."""

MEDIUM = "GPU"
"""vLLM's word, on CPUs too, for the memory that the engine computes from: what routers count as a full hit."""

RANK = 0


class StoredFields(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """``block_hashes`` are cache keys, one after the other in one chain; ``parent_block_hash`` is the key before the
    first of them, None at the beginning of a prompt. ``token_ids`` are those of all the blocks, ``block_size`` each.
    ``extra_keys`` has, per block, what sets it apart besides its tokens, or None."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class RemovedFields(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The last copies of these blocks are gone."""

    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None


class BlockStored(StoredFields, tag="BlockStored", frozen=True):
    """Blocks became findable. ``namespace``: digest of the chain's root, that is of weights, adapters and salt.
    ``publisher`` is in the first event of every batch, and another one after every start of the engine."""

    namespace: bytes | None = None
    publisher: bytes | None = None


class BlockRemoved(RemovedFields, tag="BlockRemoved", frozen=True):
    """Blocks can no longer be found."""

    publisher: bytes | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", frozen=True, omit_defaults=True, gc=False):
    """Everything is gone."""

    publisher: bytes | None = None


class LegacyStored(StoredFields, tag="BlockStored", array_like=True, frozen=True):
    """BlockStored as an array."""


class LegacyRemoved(RemovedFields, tag="BlockRemoved", array_like=True, frozen=True):
    """BlockRemoved as an array."""


class LegacyCleared(msgspec.Struct, tag="AllBlocksCleared", array_like=True, frozen=True, gc=False):
    """AllBlocksCleared as an array."""


Event = BlockStored | BlockRemoved | AllBlocksCleared
LegacyEvent = LegacyStored | LegacyRemoved | LegacyCleared


class _Batch(msgspec.Struct, array_like=True, frozen=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One batch as it came: its number and payload, and what the payload says. ``time_s`` is Unix time."""

    sequence: int
    payload: bytes
    time_s: float
    events: Sequence[Event]

    @property
    def publisher(self) -> bytes | None:
        """Which start of the engine it is from; None in the legacy layout, which does not say."""
        return self.events[0].publisher if self.events else None


_EVENTS = msgspec.msgpack.Decoder(Event)
_LEGACY_EVENTS = msgspec.msgpack.Decoder(LegacyEvent)
_BATCHES = msgspec.msgpack.Decoder(_Batch)


def encode(time_s: float, events: Iterable[Event], *, legacy: bool) -> bytes:
    """The payload of one batch."""
    listed: list[Any] = [as_legacy(event) if legacy else event for event in events]
    return msgspec.msgpack.encode((time_s, listed, RANK))


def as_legacy(event: Event) -> LegacyEvent:
    if isinstance(event, BlockStored):
        return LegacyStored(*(getattr(event, name) for name in StoredFields.__struct_fields__))
    if isinstance(event, BlockRemoved):
        return LegacyRemoved(*(getattr(event, name) for name in RemovedFields.__struct_fields__))
    return LegacyCleared()


def decode(sequence: int, payload: bytes) -> Message:
    """A batch of either layout. EventsError if it is none."""
    try:
        batch = _BATCHES.decode(payload)
        return Message(sequence, payload, batch.ts, [_event(bytes(raw)) for raw in batch.events])
    except msgspec.DecodeError as error:
        raise EventsError(f"batch {sequence} is not one of KV events: {error}") from error


def _event(raw: bytes) -> Event:
    if not _is_array(raw):
        return _EVENTS.decode(raw)
    event = _LEGACY_EVENTS.decode(raw)
    if isinstance(event, LegacyStored):
        return BlockStored(*(getattr(event, name) for name in StoredFields.__struct_fields__))
    if isinstance(event, LegacyRemoved):
        return BlockRemoved(*(getattr(event, name) for name in RemovedFields.__struct_fields__))
    return AllBlocksCleared()


def _is_array(raw: bytes) -> bool:
    """By msgpack's first byte: fixarray, array 16, array 32."""
    return 0x90 <= raw[0] <= 0x9F or raw[0] in (0xDC, 0xDD)


def frames(topic: bytes, sequence: int, payload: bytes) -> list[bytes]:
    """A message of the stream."""
    return [topic, sequence.to_bytes(SEQUENCE_BYTES, "big"), payload]


def with_publisher(event: Event, publisher: bytes) -> Event:
    return msgspec.structs.replace(event, publisher=publisher)
