"""The sockets of a reader: one that hears the stream, and one for each question to the replay endpoint."""

from __future__ import annotations

from collections.abc import Iterator

import zmq

from headwater.errors import EventsError
from headwater.events.wire import END, SEQUENCE_BYTES, SNAPSHOT, Message, decode

Context = zmq.Context[zmq.Socket[bytes]]


class LiveClient:
    """Hears the stream from soon after it is made; ``topic`` is the beginning of the topics to listen to."""

    def __init__(self, context: Context, endpoint: str, *, topic: str = "") -> None:
        self._socket = connect(context, zmq.SUB, endpoint)
        self._socket.setsockopt(zmq.SUBSCRIBE, topic.encode())

    def wait(self, timeout_s: float) -> bool:
        """Whether there is a message, after waiting for one at most so long."""
        return bool(self._socket.poll(int(timeout_s * 1000)))

    def receive(self) -> Message:
        """The next message. EventsError if it is none of KV events."""
        parts = self._socket.recv_multipart()
        if len(parts) != 3 or len(parts[1]) != SEQUENCE_BYTES:
            raise EventsError(f"{len(parts)} frames came, which is no batch of KV events (topic, number, payload)")
        return decode(int.from_bytes(parts[1], "big"), parts[2])

    def close(self) -> None:
        self._socket.close(linger=0)


class ReplayClient:
    """Asks a replay endpoint. ``timeout_s`` is how long an answer may take to begin, and each part of it to come."""

    def __init__(self, context: Context, endpoint: str, *, timeout_s: float = 10.0) -> None:
        self._context = context
        self._endpoint = endpoint
        self._timeout_s = timeout_s

    def since(self, sequence: int) -> list[Message]:
        """The batches from ``sequence`` on that the engine still has. EventsError if it does not answer."""
        return list(self._ask(sequence.to_bytes(SEQUENCE_BYTES, "big")))

    def snapshot(self) -> list[Message]:
        """All that is held now, parents first, beginning with AllBlocksCleared; each batch carries the number of the
        live one to come. EventsError if the engine does not answer, or knows no snapshots."""
        messages = list(self._ask(SNAPSHOT))
        if not messages:
            raise EventsError(f"{self._endpoint} answers, but gives no snapshot: is it Headwater's replay endpoint?")
        return messages

    def _ask(self, request: bytes) -> Iterator[Message]:
        socket = connect(self._context, zmq.DEALER, self._endpoint)  # its own: a late answer then meets nobody
        try:
            socket.send_multipart([b"", request])
            while (parts := self._answer(socket))[2] != END:
                yield decode(int.from_bytes(parts[2], "big"), parts[3])
        finally:
            socket.close(linger=0)

    def _answer(self, socket: zmq.Socket[bytes]) -> list[bytes]:
        if not socket.poll(int(self._timeout_s * 1000)):
            raise EventsError(
                f"{self._endpoint} did not answer within {self._timeout_s:g} s: is the server running with --kv-events "
                "and with this --kv-events-replay-endpoint?"
            )
        parts = socket.recv_multipart()
        if len(parts) != 4 or len(parts[2]) != SEQUENCE_BYTES:
            raise EventsError(f"{self._endpoint} sent {len(parts)} frames, which is no answer to a replay request")
        return parts


def connect(context: Context, kind: int, endpoint: str) -> zmq.Socket[bytes]:
    """A socket to ``endpoint`` that takes in without limit: what it dropped, nobody could count."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise EventsError(f"{endpoint!r} is no address to connect to, such as tcp://127.0.0.1:5557: {error}") from error
    return socket
