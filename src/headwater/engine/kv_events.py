"""The engine's half of the stream of KV events: numbers the batches, and hands them over without ever waiting.

cache -> EventLog -> KvEvents.flush -> Outbox (bounded) -> EventSender -> sockets
         `---------- engine's thread ----------'           `-- its own thread --'
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from headwater.cache.events import BlockStored, Event, EventLog


@dataclass(frozen=True, slots=True)
class Batch:
    """What became of the cache between two flushes. ``time_s`` is Unix time."""

    sequence: int
    time_s: float
    events: list[Event]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that is held at one moment, parents first; ``sequence`` is the number of the batch to come."""

    sequence: int
    time_s: float
    blocks: list[BlockStored]


class Bell:
    """Wakes a thread that sleeps in a poll of ``fileno``. Ringing never blocks."""

    def __init__(self) -> None:
        self._here, self._there = socket.socketpair()
        self._here.setblocking(False)
        self._there.setblocking(False)

    def fileno(self) -> int:
        return self._here.fileno()

    def ring(self) -> None:
        try:
            self._there.send(b"!")
        except BlockingIOError:
            return  # it is ringing already, thousands of times

    def hush(self) -> None:
        """Before looking at what it rang for."""
        try:
            while self._here.recv(4096):
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        self._here.close()
        self._there.close()


class Outbox:
    """From the engine's thread to the sender's, at most ``capacity`` at a time; and the sender's one wish, back."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.bell = Bell()
        """Rings for the sender: there is something in it, or ``closing`` is set."""
        self.wish = Bell()
        """Rings for the engine: ``snapshot_wanted`` is set."""
        self.snapshot_wanted = False
        self.closing = False
        self._items: deque[Batch | Snapshot] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def offer(self, item: Batch | Snapshot) -> bool:
        """Put ``item`` in, unless it is full. Only the engine's thread does, so that there is room when it says so."""
        if len(self._items) >= self.capacity:
            return False
        self._items.append(item)
        self.bell.ring()
        return True

    def take(self) -> Batch | Snapshot | None:
        """The oldest; None if it is empty."""
        return self._items.popleft() if self._items else None

    def ask_for_snapshot(self) -> None:
        self.wish.ring()  # before: a ring that comes after the answer would be hushed by nobody
        self.snapshot_wanted = True

    def close(self) -> None:
        self.bell.close()
        self.wish.close()


@dataclass(slots=True)
class SenderCounts:
    """Since the start."""

    slow_readers: int = 0
    """Times that a reader was so far behind that it began to lose batches."""
    replays: int = 0
    snapshots: int = 0


class Sender(Protocol):
    """The thread that sends; `engine/event_sender.py` has the real one."""

    counts: SenderCounts

    def close(self) -> None: ...


class SnapshotSource(Protocol):
    """A PrefixCache, as far as it is needed here."""

    events: EventLog

    def snapshot(self) -> list[BlockStored]: ...


class EventSink(Protocol):
    """Takes the cache's events away after everything that may have changed it; never waits."""

    @property
    def doorbell(self) -> int | None:
        """A file descriptor that can be read when ``pending`` has become true; None: it never does."""
        ...

    @property
    def pending(self) -> bool:
        """Is a call of ``flush`` wanted, although nothing happened?"""
        ...

    def flush(self) -> None: ...

    def counters(self) -> dict[str, float]:
        """For EngineStats, since the start."""
        ...

    def close(self) -> None: ...


class NoEvents:
    """An EventSink for a cache whose events nobody wants."""

    doorbell = None
    pending = False

    def flush(self) -> None: ...

    def counters(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


class KvEvents:
    """Sends the events of ``cache`` on. All methods are for the engine's thread."""

    def __init__(
        self, cache: SnapshotSource, outbox: Outbox, sender: Sender, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._cache = cache
        self._log = cache.events
        self._outbox = outbox
        self._sender = sender
        self._clock = clock
        self._next = 0
        self._n_lost = 0
        self._n_events = 0
        self._n_batches = 0
        self._n_dropped = 0
        self._log.cleared()  # the first that anybody hears: nothing of an earlier start is left
        self.flush()

    @property
    def doorbell(self) -> int:
        """A file descriptor that can be read when a snapshot is wanted."""
        return self._outbox.wish.fileno()

    @property
    def pending(self) -> bool:
        """Is a snapshot wanted?"""
        return self._outbox.snapshot_wanted

    def flush(self) -> None:
        """Send what happened since the last call as one batch, if anything did. Never waits.

        A batch that finds the outbox full is dropped; its number is not used again, which is how readers learn that
        something is missing.
        """
        events = self._log.drain()
        if self._log.n_dropped > self._n_lost:  # more in one step than the log holds: the oldest are missing
            self._n_lost = self._log.n_dropped
            self._n_dropped += 1
            self._next += 1
        if events:
            if self._outbox.offer(Batch(self._next, self._clock(), events)):
                self._n_batches += 1
                self._n_events += len(events)
            else:
                self._n_dropped += 1
            self._next += 1
        if self._outbox.snapshot_wanted:
            self._answer()

    def _answer(self) -> None:
        self._outbox.wish.hush()
        if len(self._outbox) < self._outbox.capacity:  # else: at the next flush
            self._outbox.snapshot_wanted = False
            self._outbox.offer(Snapshot(self._next, self._clock(), self._cache.snapshot()))

    def counters(self) -> dict[str, float]:
        """For EngineStats, since the start."""
        sent = self._sender.counts
        return {
            "kv_events": self._n_events,
            "kv_event_batches": self._n_batches,
            "kv_event_batches_dropped": self._n_dropped,
            "kv_event_slow_readers": sent.slow_readers,
            "kv_event_replays": sent.replays,
            "kv_event_snapshots": sent.snapshots,
        }

    def close(self) -> None:
        """Let the sender send what is there, in bounded time, and end it."""
        self._sender.close()
