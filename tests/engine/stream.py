"""A cache with its events on real sockets, and readers of it, for tests."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import zmq

from headwater.cache.block import Node
from headwater.cache.events import EventLog
from headwater.cache.key import token_ids
from headwater.cache.prefix import PrefixCache
from headwater.config import EventsConfig
from headwater.engine.event_sender import EventSender
from headwater.engine.kv_events import KvEvents, Outbox
from headwater.events.client import LiveClient, ReplayClient
from headwater.events.follow import Block
from headwater.events.reader import Reader, ReaderCounts
from headwater.events.wire import Message
from headwater.types import GroupSpec
from tests.cache.cache_model import make_cache, serve

HERE = EventsConfig(enabled=True, endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")


@dataclass
class Engine:
    """``cache``'s events are on ``stream`` and ``replay`` after every ``flush``."""

    cache: PrefixCache
    sender: EventSender
    events: KvEvents
    outbox: Outbox

    @property
    def stream(self) -> str:
        return self.sender.endpoints[0]

    @property
    def replay(self) -> str:
        return self.sender.endpoints[1]

    @property
    def next_sequence(self) -> int:
        return self.events._next

    def flush(self) -> None:
        self.events.flush()

    @property
    def index(self) -> set[tuple[int, bytes]]:
        """(group, key) of all that is published, read off the pool."""
        pool = self.cache.pool
        return {(pool.group[b], node.key) for b, node in enumerate(pool.node) if node}

    @property
    def blocks(self) -> dict[tuple[int, bytes], Block]:
        """The same, with what is in them. Not for hash functions that collide."""
        pool, held = self.cache.pool, {}
        for b, node in enumerate(pool.node):
            if node is not None:
                tokens, at = b"", node
                while len(tokens) < 4 * self.cache.groups[pool.group[b]].block_size:
                    assert at.parent is not None
                    tokens, at = at.tokens + tokens, at.parent
                root: Node = at
                while root.parent is not None:
                    root = root.parent
                parent = None if at is root else at.key
                held[pool.group[b], node.key] = Block(parent, token_ids(tokens), root.key)
        return held


@contextmanager
def engine(
    *groups: GroupSpec, config: EventsConfig = HERE, capacity: int = 65_536, **kwargs: object
) -> Iterator[Engine]:
    cache = make_cache(*groups, events=EventLog(enabled=True, capacity=capacity), **kwargs)  # type: ignore[arg-type]
    outbox = Outbox(config.buffer_batches)
    sender = EventSender(config, cache.groups, cache.n_blocks, outbox)
    try:
        yield Engine(cache, sender, KvEvents(cache, outbox, sender), outbox)
    finally:
        sender.close()


def at(engine: Engine) -> EventsConfig:
    """The same addresses again, for another start of the engine."""
    return replace(HERE, endpoint=engine.stream, replay_endpoint=engine.replay)


@dataclass
class LossyLive:
    """A stream that loses messages on the way, each with ``probability``, or those that are named."""

    inner: LiveClient
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    probability: float = 0.0
    lose: set[int] = field(default_factory=set)
    n_lost: int = 0
    heard: int = -1
    """The highest number that came this far, lost ones included."""
    _next: Message | None = None

    def wait(self, timeout_s: float) -> bool:
        while self._next is None and self.inner.wait(timeout_s):
            message = self.inner.receive()
            self.heard = max(self.heard, message.sequence)
            if message.sequence in self.lose or self.rng.random() < self.probability:
                self.n_lost += 1
                timeout_s = 0
            else:
                self._next = message
        return self._next is not None

    def receive(self) -> Message:
        assert self._next is not None
        message, self._next = self._next, None
        return message


@dataclass
class PumpedReplay:
    """A replay client in the engine's own thread: while it waits, the engine goes on flushing."""

    inner: ReplayClient
    engine: Engine

    def since(self, sequence: int) -> list[Message]:
        return self.inner.since(sequence)

    def snapshot(self) -> list[Message]:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self.inner.snapshot)
            poller = zmq.Poller()
            poller.register(self.engine.events.doorbell, zmq.POLLIN)
            while not answer.done():
                if poller.poll(1):
                    self.engine.flush()
            return answer.result()


@contextmanager
def reading(engine: Engine, **losses: object) -> Iterator[tuple[Reader, LossyLive]]:
    """A reader that hears the stream for sure: its subscription has arrived."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inner = LiveClient(context, engine.stream)
    live = LossyLive(inner)
    reader = Reader(live, PumpedReplay(ReplayClient(context, engine.replay), engine))
    try:
        reader.start()
        for marker in itertools.count(10**6):
            serve(engine.cache, [marker] * engine.cache.min_reusable_tokens)
            engine.flush()
            if live.wait(0.05):
                break
        for name, value in losses.items():
            setattr(live, name, value)
        reader.poll()
        reader.counts = ReaderCounts()  # what was before the subscription arrived may have been a gap
        yield reader, live
    finally:
        inner.close()
        context.term()


def catch_up(engine: Engine, reader: Reader) -> None:
    while reader.held.next_sequence != engine.next_sequence:
        assert reader.poll(5.0)
