"""POST /v1/explain/diff: two request bodies, and where their prompts part."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headwater.explaining.diff import Comparison, Side
from headwater.serve.front import Front
from headwater.serve.limits import read_body
from headwater.serve.openai.fields import Fields, parse_fields
from headwater.serve.stream import until_client_leaves


class DiffRequest(Fields):
    """POST /v1/explain/diff: two bodies of completions or chat requests.

    What generation does not do yet (tools, tool calls, arguments of the template) is compared all the same; fields
    that do not change the prompt are left alone."""

    first: dict[str, Any]
    second: dict[str, Any]


async def explain_diff(front: Front, request: Request) -> Response:
    """The first difference of the two prompts, in a message, a character and a token. Nothing is run or looked up."""
    front.access.caller(request)
    asked = parse_fields(DiffRequest, await read_body(request))
    for body in (asked.first, asked.second):
        model = body.get("model")
        front.check_model(model if isinstance(model, str) else None)
    found = await until_client_leaves(request.receive, front.compare(asked.first, asked.second))
    return Response(msgspec.json.encode(tell(found)), media_type="application/json")


def tell(found: Comparison) -> dict[str, Any]:
    """A comparison as JSON."""
    return {
        "object": "explain.diff",
        "relation": found.relation.value,
        "cause": None if found.cause is None else found.cause.value,
        "sentence": found.sentence,
        "namespaces": found.namespaces or None,
        "block_size": found.block_size,
        "shared_tokens": found.n_shared_tokens,
        "shared_blocks": found.n_shared_blocks,
        "shared_characters": found.n_shared_chars,
        "first": _side(found.first),
        "second": _side(found.second),
    }


def _side(side: Side | None) -> dict[str, Any] | None:
    if side is None:
        return None
    message = None if side.message is None else {"index": side.message, "role": side.role}
    return {
        "tokens": side.n_tokens,
        "message": message,
        "field": side.field,
        "character": side.character,
        "part": side.part,
        "rendered_character": side.text_character,
        "token": None if side.token is None else asdict(side.token),
        "before": side.before,
        "after": side.after,
    }
