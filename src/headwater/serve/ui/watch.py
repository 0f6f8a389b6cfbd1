"""One picture of the cache for all who look: taken at most twice a second, and not at all when nobody does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

import msgspec

from headwater.engine.client import EngineClient
from headwater.engine.messages import BlockView, PoolView, TreeView, ViewBlock, ViewPool, ViewTree
from headwater.errors import EngineDead
from headwater.serve.errors import ApiError
from headwater.serve.ui.frame import Frame, with_groups
from headwater.serve.ui.history import History
from headwater.serve.ui.tree import Tree
from headwater.serve.ui.wording import Wording

Json = dict[str, Any]
Figures = tuple[dict[str, float], dict[str, float]]
"""Counters and gauges of the engine."""

TOLD = (
    "family",
    "dtype",
    "quantization",
    "kv_dtype",
    "max_model_len",
    "n_blocks",
    "block_size",
    "n_groups",
    "min_reusable_tokens",
    "enable_prefix_caching",
    "hash_algo",
    "kv_cache_bytes",
)
"""What of EngineInfo is told."""

EVERY_S = 0.5
"""Between two pictures, however many look."""

TREE_EVERY_S = 2.0
STILL_S = 5.0
"""After so long a picture is taken although nothing seems to have changed: ages have."""

BEAT_S = 2.5
"""A viewer hears something at least this often."""

PAUSE_S = 0.02
"""Between two pieces of a picture of the tree, for the engine's steps."""

N_QUEUE = 64
N_TREE_ROWS = 24
N_BELOW = 200
N_REQUESTS = 100
MAX_VIEWERS = 64


class Watch:
    """Looks at one engine for everybody.

    ``recent`` gives the finished requests that are kept, as JSON: the newest n, newest first, each with its ``id``.
    """

    def __init__(
        self,
        client: EngineClient,
        wording: Wording,
        served_name: str,
        recent: Callable[[int], Sequence[Json]] = lambda n: (),
    ) -> None:
        self._wording = wording
        self._client = client
        self._served_name = served_name
        self._recent = recent
        self._history = History()
        client.add_stats_listener(self._history.observe)
        self._frame: Frame | None = None
        self._taken_s = float("-inf")
        self._figures: Figures | None = None
        """Of the newest picture: as long as they stay the same, hardly anything but ages can have changed."""
        self._tree_figures: Figures | None = None
        self._taking = asyncio.Lock()
        self._tree: Tree | None = None
        self._tree_rows: Json = {}
        self._tree_s = float("-inf")
        self._n_viewers = 0
        self._looking: asyncio.Task[None] | None = None
        self._published = asyncio.Event()

    @property
    def about(self) -> Json:
        """What does not change: the model, the pool, and whether text is told."""
        info = self._client.info
        told = {name: getattr(info, name) for name in TOLD}
        return {"model": self._served_name, "version": version("headwater"), **told, "redacted": self._wording.redact}

    # ---- those who stay -----------------------------------------------------------------------------

    async def events(self) -> AsyncGenerator[bytes, None]:
        """What a viewer is told, as JSON: about the server, a whole picture, then what changes. Ends when the engine
        is gone, and says so. Raises ApiError 503 when too many look already."""
        if self._n_viewers >= MAX_VIEWERS:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, f"{MAX_VIEWERS} pages are open already", code="overloaded")
        self._n_viewers += 1
        try:
            yield msgspec.json.encode({"about": self.about})
            seen: Frame | None = None
            while self._client.alive:
                frame = await self._fresh() if seen is None else await self._after(seen)
                if frame is None:
                    yield msgspec.json.encode({"beat": time.time()})
                else:
                    yield frame.whole() if seen is None else frame.after(seen)
                    seen = frame
            yield msgspec.json.encode({"gone": self._client.death})
        finally:
            self._n_viewers -= 1

    async def _fresh(self) -> Frame | None:
        """The picture of this moment, or nearly; None if the engine dies."""
        try:
            return await self.frame()
        except EngineDead:
            return None

    async def _after(self, seen: Frame) -> Frame | None:
        """The newest frame once there is one after ``seen``; None if none comes for a while."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        end = time.monotonic() + BEAT_S
        while self._frame is seen:
            published, looking = asyncio.ensure_future(self._published.wait()), self._looking
            await asyncio.wait(
                {published, looking}, timeout=end - time.monotonic(), return_when=asyncio.FIRST_COMPLETED
            )
            published.cancel()
            if looking.done() and (error := looking.exception()) is not None and self._client.alive:
                raise error
            if time.monotonic() >= end or not self._client.alive:
                return None
        return self._frame

    async def _look(self) -> None:
        """Take pictures for as long as somebody looks and the engine lives."""
        while self._n_viewers and self._client.alive:
            start = time.monotonic()
            try:
                await self.frame()
            except EngineDead:
                return  # every viewer is told why
            await asyncio.sleep(max(0.0, EVERY_S - (time.monotonic() - start)))

    # ---- the picture --------------------------------------------------------------------------------

    async def frame(self) -> Frame:
        """The newest picture; a new one if that is old. Raises EngineDead."""
        async with self._taking:
            now = time.monotonic()
            if self._frame is None or now - self._taken_s >= EVERY_S:
                await self._take(now)
            if self._frame is None:
                raise EngineDead(self._client.death)
            return self._frame

    async def block(self, block: int) -> Json:
        """One block. Raises BadRequest for one that does not exist, EngineDead."""
        view = await self._client.call(lambda call_id: ViewBlock(call_id, block), BlockView)
        return self._wording.block(view)

    async def below(self, branch: str) -> list[Json]:
        """What is directly below a branch, largest first. Raises ApiError 404 for one that is not (any more) there."""
        async with self._taking:
            tree = self._tree or await self._take_tree(time.monotonic())
        rows = tree.below(branch, N_BELOW)
        if rows is None:
            raise ApiError(HTTPStatus.NOT_FOUND, f"branch {branch[:64]!r} is not in the tree (any more)")
        return rows

    async def _take(self, now: float) -> None:
        """A new frame, if anything changed. What did is told by the engine's own counters, which come by unasked."""
        stats = self._client.stats
        before = self._frame
        newest = [request["id"] for request in self._recent(1)]
        figures = stats.counters, stats.gauges
        tree_due = now - self._tree_s >= TREE_EVERY_S and figures != self._tree_figures
        same = figures == self._figures and now - self._taken_s < STILL_S and not tree_due
        if before is not None and same and newest == [request["id"] for request in before.requests[:1]]:
            return
        told = [self._told(request) for request in self._recent(N_REQUESTS)]
        self._figures = figures
        view = await self._client.call(lambda call_id: ViewPool(call_id, N_QUEUE), PoolView)
        self._taken_s = time.monotonic()
        if tree_due or self._tree is None:
            await self._take_tree(now)
            self._tree_figures = figures
        known = {request["id"] for request in before.requests} if before is not None else set()
        self._history.observe(self._client.stats)
        self._frame = Frame(
            1 if before is None else before.number + 1,
            round(time.time(), 2),
            cells=with_groups(view.cells, view.groups),
            queue=list(view.queue),
            tree=self._tree_rows,
            counters=self._client.stats.counters | self._client.stats.gauges,
            samples=self._history.since(0.0),
            requests=told,
            n_new=sum(request["id"] not in known for request in told),
        )
        self._published.set()
        self._published = asyncio.Event()

    async def _take_tree(self, now: float) -> Tree:
        while not (view := await self._client.call(ViewTree, TreeView)).done:
            await asyncio.sleep(PAUSE_S)
        tree = Tree(view, self._wording)
        self._tree, self._tree_s = tree, now
        self._tree_rows = {
            "rows": tree.fold(N_TREE_ROWS),
            "n_branches": tree.n_branches,
            "n_left_out": tree.n_left_out,
        }
        return tree

    def _told(self, request: Json) -> Json:
        account = request.get("account")
        return request if account is None else request | {"account": self._wording.account(account)}
