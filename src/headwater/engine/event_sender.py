"""The thread that sends KV events: a PUB socket for the stream, a ROUTER socket for what a reader asks for.

A request on the ROUTER is what a REQ socket sends, ``empty frame | request``:

    first number wanted, 8 bytes     every batch from there on that is still kept, in the stream's own framing
    "headwater.snapshot"             all that is held, as batches of BlockStored after one AllBlocksCleared
    anything else                    nothing

Each answer ends with a message whose number is -1. All messages of a snapshot carry the number of the batch to come.
"""

from __future__ import annotations

import ipaddress
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby, islice

import zmq

from headwater.cache.events import AllCleared, BlockRemoved, BlockStored
from headwater.cache.events import Event as CacheEvent
from headwater.cache.key import token_ids
from headwater.cache.prefix import PrefixCache
from headwater.config import EventsConfig
from headwater.engine.kv_events import Batch, KvEvents, Outbox, SenderCounts, Snapshot
from headwater.errors import ConfigError
from headwater.events import wire
from headwater.types import GroupSpec

logger = logging.getLogger(__name__)

KEPT_BYTES = 64 * 2**20
"""Most payload that is kept for replays, whatever the number of batches."""

CHUNK = 512
"""Blocks in one message of a snapshot."""

SNAPSHOT_EVERY_S = 0.2
"""A snapshot costs the engine time: who asks more often shares one."""

CLOSE_S = 1.0
"""How long the last batches may take."""


class ReplayBuffer:
    """The newest batches, at most ``capacity`` and at most ``max_bytes`` of payload."""

    def __init__(self, capacity: int, max_bytes: int = KEPT_BYTES) -> None:
        self._capacity = capacity
        self._max_bytes = max_bytes
        self._n_bytes = 0
        self._batches: deque[tuple[int, bytes]] = deque()

    def keep(self, sequence: int, payload: bytes) -> None:
        self._batches.append((sequence, payload))
        self._n_bytes += len(payload)
        while len(self._batches) > self._capacity or self._n_bytes > self._max_bytes:
            self._n_bytes -= len(self._batches.popleft()[1])

    def since(self, sequence: int) -> list[tuple[int, bytes]]:
        """Those from ``sequence`` on, oldest first."""
        return [kept for kept in self._batches if kept[0] >= sequence]


class WireWriter:
    """Turns the cache's events into payloads."""

    def __init__(self, groups: Sequence[GroupSpec], *, legacy: bool) -> None:
        self._groups = tuple(groups)
        self._legacy = legacy
        self.publisher = secrets.token_bytes(8)
        """Names this start of the engine."""

    def batch(self, batch: Batch) -> bytes:
        return self._encode(batch.time_s, batch.events)

    def snapshot(self, snapshot: Snapshot) -> Iterator[bytes]:
        """The payloads of a snapshot; the first begins with AllBlocksCleared."""
        events: list[CacheEvent] = [AllCleared(snapshot.sequence)]
        blocks = iter(snapshot.blocks)
        while events:
            events += islice(blocks, CHUNK)
            yield self._encode(snapshot.time_s, events)
            events = list(islice(blocks, CHUNK))

    def _encode(self, time_s: float, events: Sequence[CacheEvent]) -> bytes:
        return wire.encode(time_s, self.events(events), legacy=self._legacy)

    def events(self, events: Sequence[CacheEvent]) -> list[wire.Event]:
        """Blocks that follow each other in one chain and group are one event, and so are those removed together."""
        told: list[wire.Event] = []
        for _, group in groupby(events, key=type):
            alike = list(group)
            told += self._stored([event for event in alike if isinstance(event, BlockStored)])
            told += removals([event for event in alike if isinstance(event, BlockRemoved)])
            told += [wire.AllBlocksCleared() for event in alike if isinstance(event, AllCleared)]
        return [wire.with_publisher(told[0], self.publisher), *told[1:]]

    def _stored(self, blocks: Sequence[BlockStored]) -> list[wire.Event]:
        runs: list[list[BlockStored]] = []
        last: dict[int, list[BlockStored]] = {}
        """Per group the newest run; blocks of other groups may have come between its own."""
        for block in blocks:
            run = last.get(block.group)
            if run is not None and run[-1].key == block.parent and run[-1].root == block.root:
                run.append(block)
            else:
                last[block.group] = [block]
                runs.append(last[block.group])
        return [self._run(run) for run in runs]

    def _run(self, run: Sequence[BlockStored]) -> wire.Event:
        first = run[0]
        spec = self._groups[first.group]
        return wire.BlockStored(
            block_hashes=[block.key for block in run],
            parent_block_hash=None if first.parent == first.root else first.parent,
            token_ids=list(token_ids(b"".join([block.chunk for block in run]))),
            block_size=first.block_size,
            lora_id=None,
            medium=wire.MEDIUM,
            lora_name=None,
            extra_keys=[extra_keys(block) for block in run],
            group_idx=first.group,
            kv_cache_spec_kind="full_attention" if spec.window is None else "sliding_window",
            kv_cache_spec_sliding_window=spec.window,
            namespace=first.root,
        )


def removals(removed: Sequence[BlockRemoved]) -> list[wire.Event]:
    """One event for each group."""
    keys: dict[int, list[bytes]] = {}
    for event in removed:
        keys.setdefault(event.group, []).append(event.key)
    return [wire.BlockRemoved(of_group, wire.MEDIUM, group) for group, of_group in keys.items()]


def extra_keys(block: BlockStored) -> list[str] | None:
    """What sets a block apart besides its tokens, for readers that compute keys of their own from the tokens: at the
    beginning of a prompt with a salt or adapters, the digest of its namespace; with media, their encoded extras."""
    keys = []
    if block.apart and block.parent == block.root:
        keys.append(block.root.hex())
    if block.extras:
        keys.append(block.extras.hex())
    return keys or None


class EventSender:
    """Binds both sockets, then sends in a thread of its own until ``close``. ConfigError if an address cannot be bound.

    ``n_blocks`` is the most that a snapshot can hold.
    """

    def __init__(self, config: EventsConfig, groups: Sequence[GroupSpec], n_blocks: int, outbox: Outbox) -> None:
        self.counts = SenderCounts()
        self._outbox = outbox
        self._topic = config.topic.encode()
        self._writer = WireWriter(groups, legacy=config.layout == "legacy")
        self._kept = ReplayBuffer(config.buffer_batches)
        self._waiting: list[bytes] = []
        """Readers that want a snapshot, and those (``_asked``) for whom the engine was asked."""
        self._asked: list[bytes] = []
        self._next_snapshot_s = 0.0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._stream = self._bind(zmq.PUB, config.endpoint, "kv_events_endpoint", config.buffer_batches)
            # A whole answer fits: what does not is cut, and its reader asks again.
            answer = config.buffer_batches + n_blocks * len(groups) // CHUNK + 64
            self._replay = self._bind(zmq.ROUTER, config.replay_endpoint, "kv_events_replay_endpoint", answer)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self.endpoints = tuple(socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in (self._stream, self._replay))
        """Where the stream and the replays really are."""
        self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)  # to know that a reader takes no more, rather than lose parts
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send what is there, and end the thread, within CLOSE_S or so. Does nothing the second time."""
        if not self._thread.is_alive():
            return
        self._outbox.closing = True
        self._outbox.bell.ring()
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._outbox.close()

    def _bind(self, kind: int, endpoint: str, option: str, high_water: int) -> zmq.Socket[bytes]:
        check_endpoint(endpoint, option)
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, high_water)
        socket.setsockopt(zmq.LINGER, int(CLOSE_S * 500))
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"{option} {endpoint!r} cannot be used: {error}; choose another address") from error
        return socket

    # ---- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._outbox.bell.fileno(), zmq.POLLIN)
        poller.register(self._replay, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(self._patience_ms()))
            self._outbox.bell.hush()
            closing = self._outbox.closing
            while (item := self._outbox.take()) is not None:
                if isinstance(item, Batch):
                    self._send(item)
                else:
                    self._answer_snapshot(item)
            if self._replay in ready:
                self._hear()
            if closing:
                break
            self._ask()
        self._context.destroy(linger=int(CLOSE_S * 500))

    def _patience_ms(self) -> int | None:
        """How long to sleep if nothing happens; None: for ever."""
        if not self._waiting or self._asked:
            return None
        return max(0, int((self._next_snapshot_s - time.monotonic()) * 1000) + 1)

    def _send(self, batch: Batch) -> None:
        payload = self._writer.batch(batch)
        self._kept.keep(batch.sequence, payload)
        parts = wire.frames(self._topic, batch.sequence, payload)
        # First as if a reader at its limit should hold the message up: that is how to learn that there is one. It
        # loses the message then, the others get it.
        self._stream.setsockopt(zmq.XPUB_NODROP, 1)
        try:
            self._stream.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            self.counts.slow_readers += 1
            self._stream.setsockopt(zmq.XPUB_NODROP, 0)
            self._stream.send_multipart(parts, zmq.NOBLOCK)

    def _hear(self) -> None:
        """Answer the requests that are there."""
        while self._replay.poll(0):
            parts = self._replay.recv_multipart()
            if len(parts) != 3 or parts[1]:
                continue  # not from a REQ socket, nor like it: there is no way to answer it
            reader, _, request = parts
            if request == wire.SNAPSHOT:
                if reader not in self._waiting:
                    self._waiting.append(reader)
            elif len(request) == wire.SEQUENCE_BYTES:
                self.counts.replays += 1
                self._answer(reader, self._kept.since(int.from_bytes(request, "big")))
            else:
                self._answer(reader, [])

    def _ask(self) -> None:
        """Have the engine take a snapshot, if one is wanted and none is under way."""
        if self._waiting and not self._asked and time.monotonic() >= self._next_snapshot_s:
            self._asked, self._waiting = self._waiting, []
            self._outbox.ask_for_snapshot()

    def _answer_snapshot(self, snapshot: Snapshot) -> None:
        readers, self._asked = self._asked, []
        self._next_snapshot_s = time.monotonic() + SNAPSHOT_EVERY_S
        messages = [(snapshot.sequence, payload) for payload in self._writer.snapshot(snapshot)]
        for reader in readers:
            self.counts.snapshots += 1
            self._answer(reader, messages)

    def _answer(self, reader: bytes, messages: Sequence[tuple[int, bytes]]) -> None:
        """Send all of it and the end, unless the reader is gone or takes no more: it will miss the end."""
        try:
            for sequence, payload in messages:
                parts = [reader, b"", *wire.frames(self._topic, sequence, payload)]
                self._replay.send_multipart(parts, zmq.NOBLOCK)
            self._replay.send_multipart([reader, b"", b"", wire.END, b""], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # EAGAIN or EHOSTUNREACH
            logger.debug("a replay of KV events was cut: %s", error)


def check_endpoint(endpoint: str, option: str) -> None:
    """ConfigError for an address of a kind that cannot be bound for readers in other processes."""
    if not endpoint.startswith(("tcp://", "ipc://")):
        raise ConfigError(f"{option} must begin with tcp:// or ipc://, such as tcp://127.0.0.1:5557, got {endpoint!r}")


def is_local(endpoint: str) -> bool:
    """Whether only this machine reaches ``endpoint``."""
    if endpoint.startswith("ipc://"):
        return True
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, an interface or "*"
        return False


def publish_events(config: EventsConfig, cache: PrefixCache) -> tuple[KvEvents | None, list[str]]:
    """The events of ``cache`` on their way, and what to say of it at start; nothing if they are off."""
    if not config.enabled:
        return None, []
    outbox = Outbox(config.buffer_batches)
    sender = EventSender(config, cache.groups, cache.n_blocks, outbox)
    stream, replay = sender.endpoints
    notes = [f"KV events on {stream}, replays and snapshots on {replay} ({config.layout} layout)"]
    for endpoint in (stream, replay):
        if not is_local(endpoint):
            logger.warning("%s is open to the network: whoever reaches it can read the token ids of prompts", endpoint)
    return KvEvents(cache, outbox, sender), notes
