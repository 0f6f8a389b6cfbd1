"""Bounds on what a client may send, checked before anything is parsed."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from headwater.serve.errors import ApiError, error_response

MAX_HEADERS = 100
MAX_HEADER_BYTES = 64 * 1024
"""Of the request line and all headers together; the HTTP parser refuses more."""

MAX_BODY_BYTES = 8 * 2**20
"""JSON is parsed in the event loop, where other streams wait for it; a long context is below 1 MiB."""

MAX_DRAIN_BYTES = 16 * MAX_BODY_BYTES
"""How much of a too large body is read and thrown away, so that the client gets to read why it was refused."""

BODY_TIMEOUT_S = 60.0


class HeaderLimit:
    """ASGI middleware: a request with too many headers is answered with 431."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and len(scope["headers"]) > MAX_HEADERS:
            message = f"{len(scope['headers'])} headers; at most {MAX_HEADERS} are read"
            too_many = ApiError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message)
            await error_response(too_many)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


async def read_body(request: Request) -> bytes:
    """The body of ``request``, which must be JSON by its content type.

    Raises ApiError: 413 over MAX_BODY_BYTES, 408 after BODY_TIMEOUT_S, 415 for another content type.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"the body must be JSON: send the header Content-Type: application/json, not {content_type[:80]!r}",
        )
    try:
        return await asyncio.wait_for(_read_bounded(request), BODY_TIMEOUT_S)
    except asyncio.TimeoutError:
        raise ApiError(HTTPStatus.REQUEST_TIMEOUT, f"the body did not come within {BODY_TIMEOUT_S:g} s") from None


async def _read_bounded(request: Request) -> bytes:
    body = bytearray()
    n_bytes = 0
    async for chunk in request.stream():
        n_bytes += len(chunk)
        if n_bytes <= MAX_BODY_BYTES:
            body += chunk
        else:
            body.clear()
        if n_bytes > MAX_DRAIN_BYTES:
            break
    if n_bytes > MAX_BODY_BYTES:
        raise ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is larger than {MAX_BODY_BYTES} bytes, the limit"
        )
    return bytes(body)
