"""Work that ends when its client leaves, and server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headwater.errors import HeadwaterError
from headwater.serve.errors import as_api_error, envelope, error_response

logger = logging.getLogger(__name__)

T = TypeVar("T")

Headers = list[tuple[bytes, bytes]]

FIRST_EVENT_WAIT_S = 5.0
"""How long the headers of a stream wait for its first event: an early refusal is then a plain HTTP error, and what was
reused, which is known once the first step of the request was run, is told in a header."""

DONE = b"data: [DONE]\n\n"

HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientLeft(HeadwaterError):
    """The client closed the connection before its answer was ready."""


async def until_client_leaves(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work``; cancel it, and raise ClientLeft, when the client closes the connection first.

    The request's body must have been read: what ``receive`` gives next is the disconnect.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft("the client closed the connection")
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A stream of events, each ``data: <JSON>``; after the last one ``data: [DONE]``, on success only.

    An error before the first event is a plain HTTP error; later it is an event of its own and the stream ends
    without the terminal marker. A client that leaves closes ``events``.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Callable[[], Headers] = list) -> None:
        """``headers``: further ones, as they are known when the first event is there or was waited for long enough."""
        super().__init__()
        self._events = events
        self._more_headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_client_leaves(receive, self._answer(scope, receive, send))
        except ClientLeft:
            return  # nobody is there to be told

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            first = asyncio.ensure_future(anext(self._events))
            try:
                await asyncio.wait({first}, timeout=FIRST_EVENT_WAIT_S)
                if first.done() and isinstance(error := first.exception(), Exception):
                    await error_response(_logged(error))(scope, receive, send)
                    return
                headers = [*HEADERS, *self._more_headers()]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await self._send_events(first, send)
            finally:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)

    async def _send_events(self, first: asyncio.Future[bytes], send: Send) -> None:
        async def write(event: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": event, "more_body": more})

        try:
            await write(b"data: " + await first + b"\n\n")
            async for event in self._events:
                await write(b"data: " + event + b"\n\n")
        except Exception as error:
            await write(b"data: " + envelope(as_api_error(_logged(error))) + b"\n\n", more=False)
        else:
            await write(DONE, more=False)


def _logged(error: Exception) -> Exception:
    """``error`` itself; the log has it when nobody foresaw it."""
    if not isinstance(error, HeadwaterError):
        logger.error("a stream failed", exc_info=error)
    return error
