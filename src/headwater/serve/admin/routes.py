"""What operators ask: is it alive, what does it count, forget all cached prefixes."""

from __future__ import annotations

from http import HTTPStatus
from importlib.metadata import version

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from headwater.errors import EngineDead
from headwater.serve.errors import ApiError
from headwater.serve.front import Front


def health(front: Front) -> Response:
    """200 while the engine process lives, 503 after. Open to all: where there are keys, it says nothing else."""
    if not front.client.alive:
        raise EngineDead("the server's log says why" if front.access.guarded else front.client.death)
    return _json({"status": "ok"})


def metrics(front: Front) -> Response:
    """Prometheus' text format; still answered when the engine is gone, with its last counters."""
    return Response(front.metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})


def show_version() -> Response:
    return _json({"version": version("headwater")})


async def reset_prefix_cache(front: Front, *, force: bool) -> Response:
    """Forget all cached prefixes. 409, with the number of busy blocks, while requests run; with ``force`` they are
    preempted first and go on from their tokens afterwards."""
    done = await front.client.reset_cache(force=force)
    if not done.done:
        raise ApiError(
            HTTPStatus.CONFLICT,
            f"{done.n_busy} blocks are in use by running requests, nothing was cleared: "
            "try again later, or with ?force=true, which preempts them",
            code="cache_busy",
            busy_blocks=done.n_busy,
        )
    return _json({"status": "ok", "cleared_blocks": done.n_cleared, "preempted_requests": done.n_preempted})


def _json(body: dict[str, object]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
