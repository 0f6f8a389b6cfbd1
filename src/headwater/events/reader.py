"""A reader that keeps up with an engine's KV events: notices what it lost, and heals it.

    live     --- 4 --- 5 --- x --- 7 --- 8 --- 9 ---        6 was lost, which 7 tells
    replay                   5 6 7 8 END                    from the last one applied on: it must be the same batch
    applied  --- 4 --- 5 ------------- 6 7 8 -- 9 ---       7, 8 and 9 were held back meanwhile; 7 and 8 are old now

Where the replay does not reach back to the last one applied, or that is not the same batch (the engine was started
anew), everything is taken over from a snapshot.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import zmq

from headwater.events.client import Context, LiveClient, ReplayClient
from headwater.events.follow import Follower, Verdict
from headwater.events.wire import Message


@dataclass(slots=True)
class ReaderCounts:
    """What a reader had to do to keep up."""

    applied: int = 0
    """Batches, the replayed ones included."""
    gaps: int = 0
    restarts: int = 0
    replays: int = 0
    snapshots: int = 0


class Live(Protocol):
    """The stream; a LiveClient."""

    def wait(self, timeout_s: float) -> bool: ...

    def receive(self) -> Message: ...


class Replay(Protocol):
    """Who has what was lost; a ReplayClient."""

    def since(self, sequence: int) -> list[Message]: ...

    def snapshot(self) -> list[Message]: ...


class Reader:
    """Follows the events of one engine. Not for several threads at once."""

    def __init__(self, live: Live, replay: Replay) -> None:
        self.held = Follower()
        self.counts = ReaderCounts()
        self._live = live
        self._replay = replay
        self._waiting: deque[Message] = deque()

    @property
    def keys(self) -> set[tuple[int, bytes]]:
        """(group, key) of all that the engine holds, as far as this reader was told."""
        return self.held.keys

    def start(self) -> None:
        """Take over all that is held now. Without it, the first batch does that. EventsError as in ``poll``."""
        self._take_snapshot()

    def poll(self, timeout_s: float = 0.0) -> int:
        """Apply what has come, after waiting for it at most ``timeout_s``; the number of batches applied.

        EventsError when something was lost and the engine does not answer: call again when it does.
        """
        before = self.counts.applied
        if not self._waiting and self._live.wait(timeout_s):
            self._listen()
        while self._waiting:
            self._push(self._waiting[0])
            self._waiting.popleft()
            self._listen()
        return self.counts.applied - before

    def check(self) -> None:
        """Ask whether anything was lost that nothing has told since: the last batch, or a start anew. EventsError as
        in ``poll``."""
        self._heal()

    def _listen(self) -> None:
        """Take in what has come, without waiting."""
        while self._live.wait(0):
            self._waiting.append(self._live.receive())

    def _push(self, message: Message) -> None:
        verdict = self._apply(message)
        if verdict is Verdict.RESTARTED:
            self._begin_anew()
        elif verdict is Verdict.GAP:
            if self.held.next_sequence is not None:
                self.counts.gaps += 1
            self._heal()
            if self._apply(message) is Verdict.GAP:  # the replay ended before it
                self._take_snapshot()

    def _apply(self, message: Message) -> Verdict:
        verdict = self.held.push(message)
        self.counts.applied += verdict is Verdict.APPLIED
        return verdict

    def _heal(self) -> None:
        """Catch up with the engine; live batches wait until that is done."""
        at = self.held.next_sequence
        if at is None:
            self._take_snapshot()
            return
        replayed = self._replay.since(max(0, at - 1))
        if not replayed or not self.held.continues(replayed[0]):
            self._take_snapshot()
            return
        self.counts.replays += 1
        if any(self._apply(message) is not Verdict.APPLIED for message in replayed[1:]):
            self._take_snapshot()  # the replay has a hole: a batch that the engine could not send to anybody

    def _begin_anew(self) -> None:
        self.counts.restarts += 1
        self.held.forget()
        self._take_snapshot()

    def _take_snapshot(self) -> None:
        snapshot = self._replay.snapshot()
        if self.held.publisher not in (None, snapshot[0].publisher):
            self.counts.restarts += 1
            self.held.forget()
        self.held.restore(snapshot)
        self.counts.snapshots += 1


class ConnectedReader(Reader):
    """A reader with sockets of its own: ``endpoint`` and ``replay_endpoint`` are the engine's."""

    def __init__(self, endpoint: str, replay_endpoint: str, *, topic: str = "", timeout_s: float = 10.0) -> None:
        self._context: Context = zmq.Context()
        self._stream = LiveClient(self._context, endpoint, topic=topic)
        super().__init__(self._stream, ReplayClient(self._context, replay_endpoint, timeout_s=timeout_s))

    def close(self) -> None:
        self._stream.close()
        self._context.term()

    def __enter__(self) -> ConnectedReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
