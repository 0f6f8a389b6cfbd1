"""Who may ask what: every request passes here first, before its path, its method or its body mean anything.

A route that the table does not name is the operator's: forgetting one closes it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from headwater.serve.access import Access
from headwater.serve.errors import ApiError, error_response

MAX_DRAIN_BYTES = 2**20
DRAIN_S = 2.0
"""How much, and for how long, what a stranger goes on sending is thrown away after the answer. A connection that is
closed on unread bytes may take the answer with it."""


class Need(Enum):
    """What a request must bring, once there are keys."""

    NOTHING = "nothing"
    ANY_KEY = "any key"
    ADMIN_KEY = "the admin key"


NEEDS = {
    "/health": Need.NOTHING,
    "/v1/completions": Need.ANY_KEY,
    "/v1/chat/completions": Need.ANY_KEY,
    "/v1/explain": Need.ANY_KEY,
    "/v1/explain/diff": Need.ANY_KEY,
    "/v1/explain/{request_id}": Need.ANY_KEY,
    "/v1/models": Need.ANY_KEY,
    "/v1/models/{name:path}": Need.ANY_KEY,
    "/version": Need.ANY_KEY,
    "/openapi.json": Need.ANY_KEY,
    "/docs": Need.ANY_KEY,
    "/docs/oauth2-redirect": Need.ANY_KEY,
    "/redoc": Need.ANY_KEY,
    "/metrics": Need.ADMIN_KEY,
    "/reset_prefix_cache": Need.ADMIN_KEY,
    "/ui": Need.ADMIN_KEY,
    "/ui/stream": Need.ADMIN_KEY,
    "/ui/{name}": Need.NOTHING,  # files of the package, the same for everybody
    "/admin/view": Need.ADMIN_KEY,
    "/admin/view/blocks/{block}": Need.ADMIN_KEY,
    "/admin/view/branches/{branch}": Need.ADMIN_KEY,
}
"""By the path of a route."""


class Guard:
    """ASGI middleware: a request without the key that its route needs is answered with 401 or 403, unread.

    ``asking``: by path, pages without any data that ask for the key themselves; a browser that opens such a path
    without a key gets the page in place of its own dialogue.
    """

    def __init__(
        self, app: ASGIApp, *, access: Access, routes: Sequence[BaseRoute], asking: Mapping[str, Callable[[], Response]]
    ) -> None:
        self._asking = asking
        self._app = app
        self._access = access
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._access.guarded:
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        try:
            self._check(request)
        except ApiError as error:
            page = self._asking.get(scope["path"])
            if page is not None and error.status == HTTPStatus.UNAUTHORIZED and _is_opened(request):
                await page()(scope, receive, send)
            else:
                await _refuse(request, error, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check(self, request: Request) -> None:
        """Raises ApiError."""
        need = self._need(request.scope)
        if need is Need.ANY_KEY:
            self._access.caller(request, allow_basic=_allows_basic(request))
        elif need is Need.ADMIN_KEY:
            self._access.operator(request, allow_basic=_allows_basic(request))

    def _need(self, scope: Scope) -> Need:
        """Of the route that would answer; where none would (404, 405), any key."""
        for route in self._routes:
            match, _ = route.matches(scope)
            if match is Match.FULL:
                return NEEDS.get(getattr(route, "path", ""), Need.ADMIN_KEY)
        return Need.ANY_KEY


def _allows_basic(request: Request) -> bool:
    """Whether a key typed into the browser's dialogue counts. A browser sends it along with whatever form another
    site makes it post here; JSON it posts for another site only after asking, and is not answered."""
    if request.method == "GET":
        return True
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"


async def _refuse(request: Request, error: ApiError, receive: Receive, send: Send) -> None:
    """Answer, throw away a little of what still comes, and close the connection if there may be more."""
    response = error_response(error)
    if error.status == HTTPStatus.UNAUTHORIZED:
        response.headers["WWW-Authenticate"] = _challenge(request)
    has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
    if has_body:
        response.headers["Connection"] = "close"
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": bytes(response.body), "more_body": has_body})
    if has_body:
        # After that time: the answer is sent, and what comes later meets a closed connection.
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_drain(receive), DRAIN_S)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _drain(receive: Receive) -> None:
    n_bytes, more = 0, True
    while more and n_bytes < MAX_DRAIN_BYTES:
        message = await receive()
        n_bytes += len(message.get("body", b""))
        more = message.get("more_body", False)


def _is_opened(request: Request) -> bool:
    """Whether a browser opens this as a page."""
    return request.method == "GET" and "text/html" in request.headers.get("accept", "")


def _challenge(request: Request) -> str:
    """What WWW-Authenticate asks for: a page that is opened gets the browser's own dialogue (any name, the key as
    password), because a browser can send no key otherwise."""
    return 'Basic realm="headwater", charset="UTF-8"' if _is_opened(request) else 'Bearer realm="headwater"'
