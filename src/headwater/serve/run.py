"""Runs the whole server: bind, start the engine, answer, and stop in order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from headwater.config import EngineConfig, UiConfig
from headwater.engine.client import BUILD_CORE, EngineClient
from headwater.engine.messages import Loading
from headwater.errors import ConfigError
from headwater.serve.access import Access
from headwater.serve.app import create_app
from headwater.serve.front import Front
from headwater.serve.limits import MAX_HEADER_BYTES
from headwater.text.tokenizer import Tokenizer

BACKLOG = 2048

DRAIN_S = 3
"""How long the last answers may take to leave once the server was told to stop."""


def _no_loading(loading: Loading) -> None:
    pass


def _no_ready(front: Front, url: str) -> None:
    pass


@dataclass(frozen=True)
class Announce:
    """Who is told how the start goes."""

    loading: Callable[[Loading], None] = field(default=_no_loading)
    ready: Callable[[Front, str], None] = field(default=_no_ready)
    """Called with what is served and the server's address, once requests are answered."""


class Stopped(Exception):
    """The server was told to stop before it was ready."""


def serve(
    config: EngineConfig,
    listening: socket.socket,
    load_tokenizer: Callable[[], Tokenizer],
    *,
    served_name: str,
    access: Access | None = None,
    ui: UiConfig = UiConfig(),
    explain_usage: bool = False,
    core: str = BUILD_CORE,
    announce: Announce | None = None,
) -> None:
    """Serve on ``listening``, which ``bind`` made, until SIGINT or SIGTERM. Without ``access`` everybody is the
    operator. ``explain_usage``: every answer's usage holds the account of what was reused.

    Raises ConfigError when nobody can connect there, ModelError or EngineError when the engine cannot start.
    """
    with contextlib.closing(listening), contextlib.suppress(Stopped):

        def front(client: EngineClient, tokenizer: Tokenizer) -> Front:
            return Front(client, tokenizer, served_name, access=access, ui=ui, explain_usage=explain_usage)

        asyncio.run(_serve(config, listening, load_tokenizer, front, core, announce or Announce()))


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, before anything slow begins; nobody can connect yet. Port 0 takes a free one.

    Raises ConfigError when the address cannot be used.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # The protocol by name: asyncio turns Nagle's algorithm off only where it reads it; answers would wait for it.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except (OSError, OverflowError, UnicodeError) as error:  # UnicodeError: a host with a label of 64 characters
        raise _cannot_listen(error, host, port) from None
    try:
        if os.name == "posix":
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except (OSError, OverflowError) as error:
        listening.close()
        raise _cannot_listen(error, host, port) from None
    return listening


def _cannot_listen(error: Exception, host: str, port: int) -> ConfigError:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return ConfigError(f"port {port} on {host} is in use: choose another with --port, 0 for any")
    return ConfigError(f"cannot listen on {host}:{port}: {error}")


def _listen(listening: socket.socket) -> None:
    """Let clients connect. Another server may have won a race for the port since it was bound."""
    try:
        listening.listen(BACKLOG)
    except OSError as error:
        raise _cannot_listen(error, *listening.getsockname()[:2]) from None


def url_of(listening: socket.socket) -> str:
    """Where the server is reached from this machine."""
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """uvicorn without its signal handling (`_serve` has its own, which also covers the loading)."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()


async def _serve(
    config: EngineConfig,
    listening: socket.socket,
    load_tokenizer: Callable[[], Tokenizer],
    make_front: Callable[[EngineClient, Tokenizer], Front],
    core: str,
    announce: Announce,
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signal_number, stop.set)
    client = await _unless_stopped(stop, EngineClient.start(config, core=core, on_loading=announce.loading))
    try:
        front = make_front(client, await asyncio.to_thread(load_tokenizer))
        with contextlib.closing(front):
            _listen(listening)
            web = _Server(_web_config(front), lambda: announce.ready(front, url_of(listening)))
            stopping = asyncio.create_task(_stop_when(stop, client, web))
            await web.serve(sockets=[listening])
            stopping.cancel()
    finally:
        await client.close()


async def _unless_stopped(stop: asyncio.Event, starting: Coroutine[Any, Any, EngineClient]) -> EngineClient:
    """The started engine; gives up, and raises Stopped, when ``stop`` is set first."""
    start = asyncio.create_task(starting)
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({start, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if start.done():
        return start.result()
    start.cancel()
    await asyncio.gather(start, return_exceptions=True)
    raise Stopped


async def _stop_when(stop: asyncio.Event, client: EngineClient, web: _Server) -> None:
    """On ``stop``: end all streams with an error that says why, then let uvicorn drain."""
    await stop.wait()
    client.stop("the server is shutting down")
    web.should_exit = True


def _web_config(front: Front) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(front),
        loop="asyncio",
        http="h11",  # the one parser whose limits are known, whatever else is installed
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,  # prompts and salts stay out of logs
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_graceful_shutdown=DRAIN_S,
        backlog=BACKLOG,
    )
