"""GET /v1/models"""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from headwater.serve.front import Front


def list_models(front: Front) -> Response:
    return Response(msgspec.json.encode({"object": "list", "data": [_card(front)]}), media_type="application/json")


def get_model(front: Front, name: str) -> Response:
    front.check_model(name)
    return Response(msgspec.json.encode(_card(front)), media_type="application/json")


def _card(front: Front) -> dict[str, object]:
    """``max_model_len`` is the limit that is enforced: prompt and output together, as fitted to this machine."""
    return {
        "id": front.served_name,
        "object": "model",
        "created": front.started,
        "owned_by": "headwater",
        "root": front.info.model,
        "parent": None,
        "max_model_len": front.info.max_model_len,
    }
