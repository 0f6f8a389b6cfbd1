"""The engine process: one synchronous loop around an engine core, behind a message socket.

    python -m headwater.engine.process ADDRESS FACTORY    (the configuration is the first line of stdin, as JSON)

Everything numeric happens in this process's main thread. The socket is a ZeroMQ PAIR to the one front that
started the process. stdin stays open for as long as that front lives: its end is how this process knows, at
once and on every platform, that nobody is left to serve, and exits rather than stay behind as an orphan.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from headwater.config import EngineConfig
from headwater.engine.messages import (
    Abort,
    Call,
    Delta,
    EngineInfo,
    EngineStats,
    Fatal,
    FromEngine,
    Loading,
    Outputs,
    Ready,
    Reply,
    Shutdown,
    Submit,
    ToEngine,
)
from headwater.errors import HeadwaterError
from headwater.types import Progress, RequestId

logger = logging.getLogger(__name__)

QUIET_MS = 20
"""So long nothing must come in before each piece of idle work: the next request of a client that has just got its
answer does not find the engine busy, and idle work leaves the machine some rest."""

LINGER_MS = 1000
"""How long the last messages may take to leave a process that ends."""


class Core(Protocol):
    """What the loop needs of an engine core; `engine/core.py` is the real one."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def busy(self) -> bool:
        """Whether ``step`` has anything to do."""
        ...

    def submit(self, message: Submit) -> list[Delta]: ...

    def abort(self, request_id: RequestId) -> bool: ...

    def call(self, message: Call) -> Reply:
        """Answer a question; one that cannot be answered, with Refused."""
        ...

    def step(self) -> Outputs: ...

    @property
    def idle_work(self) -> bool:
        """Whether ``work_idle`` has anything to do."""
        ...

    @property
    def hits_to_verify(self) -> bool:
        """Whether the next ``work_idle`` checks a hit block."""
        ...

    def work_idle(self) -> None:
        """A short piece of work for which no request should wait longer than it takes."""
        ...

    @property
    def doorbell(self) -> int | None:
        """A file descriptor that can be read when there is idle work that was not there before; None: there is none."""
        ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None:
        """Nothing more will be asked."""
        ...


CoreFactory = Callable[[EngineConfig, Progress], Core]


class EngineLoop:
    """Reads the inbox between steps; sleeps in the socket while there is nothing to compute. Idle work is done in
    pieces, with a look at the inbox before each."""

    def __init__(self, core: Core, socket: zmq.Socket[bytes]) -> None:
        self._core = core
        self._socket = socket
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._stopping = False
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        if core.doorbell is not None:
            self._poller.register(core.doorbell, zmq.POLLIN)

    def run(self) -> None:
        """Serve until Shutdown."""
        self.send(Ready(self._core.info))
        while not self._stopping:
            heard = self._read_inbox()
            if self._stopping:
                return
            if self._core.busy:
                self.send(self._core.step())
            elif heard:  # no step will carry the new counters (an abort of the last request, a refusal)
                self.send(Outputs([], self._core.stats()))
            elif self._core.idle_work:
                self._core.work_idle()
                self.send(Outputs([], self._core.stats()))

    def send(self, message: FromEngine | Reply) -> None:
        self._socket.send(self._encoder.encode(message))

    def _read_inbox(self) -> bool:
        """Handle every message that is there; wait for one, or for the core's doorbell, only while idle. True if there
        was any."""
        heard = False
        while not self._stopping and self._socket in dict(self._poller.poll(self._patience_ms(heard))):
            self._handle(self._decoder.decode(self._socket.recv()))
            heard = True
        return heard

    def _patience_ms(self, heard: bool) -> int | None:
        """How long to wait for a message; None: for ever."""
        if heard or self._core.busy:
            return 0
        return QUIET_MS if self._core.idle_work else None

    def _handle(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            refusals = self._core.submit(message)
            if refusals:
                self.send(Outputs(refusals, self._core.stats()))
        elif isinstance(message, Abort):
            self._core.abort(message.request_id)
        elif isinstance(message, Call):
            reply = self._core.call(message)
            self.send(Outputs([], self._core.stats()))  # first: whoever has the answer sees it in the metrics
            self.send(reply)
        elif isinstance(message, Shutdown):
            self._stopping = True


def resolve_factory(name: str) -> CoreFactory:
    """The core factory that ``name``, "module:function", names."""
    module, _, function = name.partition(":")
    factory: CoreFactory = getattr(importlib.import_module(module), function)
    return factory


def exit_with_parent(address: str) -> None:
    """End this process when stdin ends, that is, when the process that started this one is gone."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        remove_socket(Path(address.removeprefix("ipc://")))
        os._exit(0)  # nothing here outlives the process, and the main thread may be deep in a step

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def remove_socket(socket: Path) -> None:
    """Take the socket and its folder away, which a front that was killed left behind."""
    with contextlib.suppress(OSError):  # the front was faster, or there is more in the folder than ours
        socket.unlink(missing_ok=True)
        socket.parent.rmdir()


def read_config() -> EngineConfig:
    """The first line of stdin; read byte by byte, so that nothing of what follows is buffered away."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise SystemExit("headwater.engine.process: stdin ended before the configuration came")
        line += byte
    return msgspec.json.decode(bytes(line), type=EngineConfig)


def give_back_freed_memory() -> None:
    """What loading used and freed goes back to the system, where the C library has a call for that (glibc's
    ``malloc_trim``): it would count as the process's for ever."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def serve_engine(socket: zmq.Socket[bytes], factory: str, config: EngineConfig) -> int:
    """Load, then loop. Returns the exit status; every failure was told to the front before."""

    def tell(message: FromEngine) -> None:
        socket.send(msgspec.msgpack.encode(message))

    try:
        core = resolve_factory(factory)(config, lambda what, fraction: tell(Loading(what, fraction)))
        gc.collect()
        give_back_freed_memory()
        gc.freeze()  # what was loaded stays: a full collection need not walk it, in the middle of a step, ever again
        with contextlib.closing(core):
            EngineLoop(core, socket).run()
    except HeadwaterError as error:  # a known fault: its message says all
        tell(Fatal(str(error)))
        return 1
    except Exception as error:
        logger.exception("the engine failed")
        tell(Fatal(f"{type(error).__name__}: {error}"))
        return 1
    return 0


def main() -> int:
    address, factory = sys.argv[1:]
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s engine: %(message)s")
    config = read_config()
    exit_with_parent(address)
    context = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDHWM, 0)  # a slow reader delays nobody else: the step loop never blocks in send
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.connect(address)
    try:
        return serve_engine(socket, factory, config)
    finally:
        socket.close()
        context.term()


if __name__ == "__main__":
    sys.exit(main())
