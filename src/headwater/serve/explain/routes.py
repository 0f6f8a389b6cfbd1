"""POST /v1/explain and GET /v1/explain/{request_id}"""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from headwater.engine.messages import Explain, Explained
from headwater.errors import BadRequest
from headwater.serve.access import Caller
from headwater.serve.errors import ApiError
from headwater.serve.explain.tell import Json
from headwater.serve.front import Front
from headwater.serve.limits import read_body
from headwater.serve.openai import chat, completions
from headwater.serve.openai.prepared import Prepared
from headwater.serve.stream import until_client_leaves


async def explain(front: Front, request: Request) -> Response:
    """What the request in the body would reuse now, and why no more. Nothing is run, and nothing is changed by it."""
    caller = front.access.caller(request)
    body = await read_body(request)
    prepare = chat.prepare if _is_chat(body) else completions.prepare
    prepared = await prepare(front, request, body)
    told = [await _explain(front, request, caller, prepared, token_ids) for token_ids in prepared.prompts]
    return _answer(told)


async def _explain(front: Front, request: Request, caller: Caller, prepared: Prepared, token_ids: list[int]) -> Json:
    asked = prepared.asked

    def call(call_id: int) -> Explain:
        return Explain(
            call_id,
            token_ids,
            caller.viewer,
            cache_salt=front.access.salt(caller, asked.cache_salt),
            skip_reading_prefix_cache=asked.skip_reading_prefix_cache,
        )

    explained = await until_client_leaves(request.receive, front.client.call(call, Explained))
    where = await front.where(prepared.chat, token_ids, explained.prefix)
    return front.teller.account(explained.prefix, caller, where)


def _is_chat(body: bytes) -> bool:
    """Whether this is the body of a chat request. Raises BadRequest when it is neither that nor a completion's."""
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise BadRequest("the body must be a JSON object: that of a chat or completion request")
    if ("messages" in data) == ("prompt" in data):
        raise BadRequest(
            "the body must be that of a request: with messages, as for /v1/chat/completions, or with prompt, as for "
            "/v1/completions",
            field="messages",
        )
    return "messages" in data


def explain_finished(front: Front, request: Request, request_id: str) -> Response:
    """The account of one of the last answers, by the answer's id, to whom it was sent or to the operator.

    Raises ApiError 404 for all others, as for an id that nobody has.
    """
    caller = front.access.caller(request)
    finished = front.accounts.get(request_id)
    if finished is None or not caller.viewer.may_see((finished[0].sender,)):
        kept = (
            f"the last {front.accounts.max_answers} are kept" if front.info.explain else "none is kept (--no-explain)"
        )
        raise ApiError(
            HTTPStatus.NOT_FOUND, f"no account of an answer {request_id[:80]!r}: {kept}", code="account_not_found"
        )
    return _answer([front.teller.account(one.account, caller, one.where) for one in finished])


def _answer(accounts: list[Json]) -> Response:
    """One account; with several prompts, a list of them in their order."""
    body = accounts[0] if len(accounts) == 1 else {"prompts": accounts}
    return Response(msgspec.json.encode(body), headers={"Cache-Control": "no-store"}, media_type="application/json")
