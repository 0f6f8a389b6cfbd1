"""The asynchronous client of an engine process: starts it, streams from it, notices when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq
import zmq.asyncio

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
    Refused,
    Reply,
    ResetCache,
    ResetDone,
    Shutdown,
    Submit,
    ToEngine,
)
from headwater.engine.threads import ENGINE_THREADS
from headwater.errors import BadRequest, EngineDead, EngineError
from headwater.types import RequestId

Answer = TypeVar("Answer", bound=Reply)

BUILD_CORE = "headwater.engine.build:build_core"
"""The factory of the real engine core, as the engine process resolves it."""

LAST_WORDS_S = 0.5
"""How long a dead process's last messages may take to arrive before its requests are failed."""

EXIT_S = 5.0
"""How long a process that was told to stop may take before it is killed."""


def leave_signals_to_the_front() -> None:
    """In the new process, before the engine begins: Ctrl-C in a terminal and a service manager's SIGTERM reach every
    process of the server; the front alone heeds them, and then stops the engine in order."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)


SOCKET_PATH_BYTES = 100
"""Unix limits the path of a socket to 104 (macOS) or 108 bytes, the closing zero included."""


class EngineClient:
    """Talks to one engine process. Use ``await EngineClient.start(config)``; ``close`` when done.

    ``info`` is what the engine said when it was ready; ``stats`` the newest snapshot of its counters, always
    taken before the deltas that came with it are handed out.
    """

    info: EngineInfo

    def __init__(self, process: asyncio.subprocess.Process, socket: zmq.asyncio.Socket, folder: Path) -> None:
        self.stats = EngineStats()
        self._process = process
        self._socket = socket
        self._folder = folder
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._streams: dict[RequestId, asyncio.Queue[Delta | EngineDead]] = {}
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._call_ids = itertools.count()
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._death: EngineDead | None = None
        self._on_loading: Callable[[Loading], None] = lambda _: None
        self._stats_listeners: list[Callable[[EngineStats], None]] = []
        self._reader = asyncio.create_task(self._read())
        self._reader.add_done_callback(self._reader_ended)
        self._watcher = asyncio.create_task(self._watch())

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        core: str = BUILD_CORE,
        on_loading: Callable[[Loading], None] | None = None,
    ) -> EngineClient:
        """Start an engine process and wait until it is ready.

        Raises EngineError, with the engine's own one-line reason, when it cannot start.
        """
        folder = socket_folder()
        address = f"ipc://{folder / 'engine'}"
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(address)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "headwater.engine.process", address, core),
            stdin=asyncio.subprocess.PIPE,
            preexec_fn=leave_signals_to_the_front,
            env={**ENGINE_THREADS, **os.environ},
        )
        client = cls(process, socket, folder)
        if on_loading is not None:
            client._on_loading = on_loading
        try:
            if process.stdin is not None:
                process.stdin.write(msgspec.json.encode(config) + b"\n")
            client.info = await client._ready
        except BaseException:
            await client.close()
            raise
        return client

    # ---- requests -------------------------------------------------------------------------------

    async def stream(self, submits: Sequence[Submit]) -> AsyncGenerator[Delta, None]:
        """Submit requests and yield their deltas as they come; each one's last has a finish reason.

        Leaving early (``aclose``, cancellation) aborts those that are not finished. Raises EngineDead when the
        engine dies.
        """
        self._check_alive()
        queue: asyncio.Queue[Delta | EngineDead] = asyncio.Queue()
        running = {submit.request_id for submit in submits}
        if len(running) < len(submits) or running & self._streams.keys():
            raise EngineError("a request id is used twice")
        self._streams.update(dict.fromkeys(running, queue))
        try:
            for submit in submits:
                self._send(submit)
            while running:
                item = await queue.get()
                if isinstance(item, EngineDead):
                    raise item
                if item.finish_reason is not None:
                    del self._streams[item.request_id]
                    running.remove(item.request_id)
                yield item
        finally:
            for request_id in running:
                del self._streams[request_id]
                if self._death is None:
                    self._send(Abort(request_id))

    async def reset_cache(self, *, force: bool = False) -> ResetDone:
        """Forget all cached prefixes. Raises EngineDead when the engine dies."""
        return await self.call(lambda call_id: ResetCache(call_id, force), ResetDone)

    async def call(self, make: Callable[[int], Call], expected: type[Answer]) -> Answer:
        """Ask the engine what ``make`` builds with the id that it is given. Raises EngineDead when the engine dies,
        BadRequest or EngineError when it says that it cannot answer."""
        self._check_alive()
        call_id = next(self._call_ids)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._send(make(call_id))
            reply = await future
        finally:
            del self._calls[call_id]
        if isinstance(reply, expected):
            return reply
        if isinstance(reply, Refused):
            raise (
                BadRequest(reply.error)
                if reply.error_kind in ("bad_request", "never_fits")
                else EngineError(reply.error)
            )
        raise EngineError(f"the engine answered {type(reply).__name__} instead of {expected.__name__}")

    # ---- life -----------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._death is None

    @property
    def death(self) -> str:
        """Why the engine is gone; empty while it is alive."""
        return "" if self._death is None else str(self._death)

    @property
    def pid(self) -> int:
        return self._process.pid

    def add_stats_listener(self, listener: Callable[[EngineStats], None]) -> None:
        """Call ``listener`` with every snapshot from now on, before the deltas that came with it go out."""
        self._stats_listeners.append(listener)

    def stop(self, reason: str) -> None:
        """End every stream now, with EngineDead(reason), and tell the engine to stop."""
        if self._death is None:
            self._send(Shutdown())
            self._die(reason)

    async def close(self) -> None:
        """Stop the engine process, in bounded time, and give back all that the client holds."""
        self.stop("the engine was stopped")
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):  # already gone: nothing to close
                self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), EXIT_S)
        except asyncio.TimeoutError:
            self._process.kill()
            await self._process.wait()
        self._reader.cancel()
        await asyncio.gather(self._reader, self._watcher, return_exceptions=True)
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDead(str(self._death))

    def _send(self, message: ToEngine | Call) -> None:
        # Without a high-water mark a PAIR socket takes the message at once; the future matters only when the
        # peer is gone, which _watch reports better.
        sending = asyncio.ensure_future(self._socket.send(self._encoder.encode(message)))
        sending.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _read(self) -> None:
        """The one reader of the socket; ends with the engine's last message."""
        while self._death is None:
            message = self._decoder.decode(await self._socket.recv())
            if isinstance(message, Outputs):
                self._take_outputs(message)
            elif isinstance(message, Reply):
                if (answer := self._calls.get(message.call_id)) is not None and not answer.done():
                    answer.set_result(message)
            elif isinstance(message, Loading):
                self._on_loading(message)
            elif isinstance(message, Ready):
                self._ready.set_result(message.info)
            elif isinstance(message, Fatal):
                self._die(message.message)

    def _reader_ended(self, reader: asyncio.Task[None]) -> None:
        if not reader.cancelled() and (error := reader.exception()) is not None:
            self._die(f"a message of the engine cannot be read: {error}")

    def _take_outputs(self, outputs: Outputs) -> None:
        self.stats = outputs.stats
        for listener in self._stats_listeners:
            listener(outputs.stats)
        for delta in outputs.deltas:
            if (queue := self._streams.get(delta.request_id)) is not None:  # else: aborted, and the news is under way
                queue.put_nowait(delta)

    async def _watch(self) -> None:
        status = await self._process.wait()
        if status > 0:  # it exited by itself: why is on its way here, or nobody knows
            await asyncio.wait([self._reader], timeout=LAST_WORDS_S)
        how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
        self._die(f"the engine process is gone ({how})")

    def _die(self, reason: str) -> None:
        if self._death is not None:
            return
        self._death = EngineDead(reason)
        for queue in set(self._streams.values()):
            queue.put_nowait(EngineDead(reason))
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(EngineDead(reason))
        if not self._ready.done():
            self._ready.set_exception(EngineError(reason))


def socket_folder() -> Path:
    """A new folder that only this user can enter, with a path short enough for a socket in it."""
    folder = Path(tempfile.mkdtemp(prefix="headwater-"))  # mode 0700
    if len(os.fsencode(folder)) + len("/engine") < SOCKET_PATH_BYTES:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="headwater-", dir="/tmp"))
