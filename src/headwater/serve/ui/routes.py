"""The live page, its stream of pictures, and the same pictures as JSON for tools."""

from __future__ import annotations

from functools import lru_cache
from http import HTTPStatus
from importlib.resources import files

import msgspec
from starlette.responses import Response

from headwater.serve.errors import ApiError
from headwater.serve.front import Front
from headwater.serve.stream import EventStream

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
"""Content types of what the page is made of."""

PAGE = "index.html"

SECURITY = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "connect-src 'self'",
            "img-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""Nothing but the page's own files is loaded or run, nothing can frame it, and no text can become markup."""


def page(front: Front) -> Response:
    """The page itself; it holds no data."""
    return asset(front, PAGE)


def asking_page(front: Front) -> Response:
    """The page for a browser that brings no key: it asks for the admin key before anything else."""
    whole = bytes(page(front).body)
    asking = whole.replace(b"<html", b'<html data-key="needed"', 1)
    return Response(asking, headers={"Content-Type": TYPES["html"], **SECURITY})


def asset(front: Front, name: str) -> Response:
    """One file of the page. Raises ApiError 404 for another name, or when the page is off."""
    if not front.ui.enabled:
        raise ApiError(HTTPStatus.NOT_FOUND, "the live page is switched off (--no-ui)")
    kind = TYPES.get(name.rpartition(".")[2])
    content = _assets().get(name)
    if kind is None or content is None:
        raise ApiError(HTTPStatus.NOT_FOUND, f"the live page has no file {name[:80]!r}")
    return Response(content, headers={"Content-Type": kind, **SECURITY})


@lru_cache(maxsize=1)
def _assets() -> dict[str, bytes]:
    """All files of the page: a name that is not among them leads nowhere."""
    folder = files("headwater.serve.ui") / "static"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def stream(front: Front) -> Response:
    """Pictures as they change, for as long as the client stays."""
    if not front.ui.enabled:
        raise ApiError(HTTPStatus.NOT_FOUND, "the live page is switched off (--no-ui)")
    return EventStream(front.watch.events())


async def view(front: Front) -> Response:
    """One picture: blocks by state, the queue's head, the tree, recent requests, counters and their history."""
    frame = await front.watch.frame()
    return _json(front.watch.about | frame.body())


async def view_block(front: Front, block: int) -> Response:
    """One block."""
    return _json(await front.watch.block(block))


async def view_branch(front: Front, branch: str) -> Response:
    """What is directly below one branch of the tree."""
    return _json({"rows": await front.watch.below(branch)})


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), headers={"Cache-Control": "no-store"}, media_type="application/json")
