"""POST /v1/completions"""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from headwater.engine.checks import check_sampling
from headwater.serve.front import Front, new_id
from headwater.serve.limits import read_body
from headwater.serve.openai.fields import parse_fields
from headwater.serve.openai.prepared import Prepared
from headwater.serve.openai.protocol import CompletionRequest
from headwater.serve.openai.reply import Json, Reply, answer
from headwater.serve.stream import until_client_leaves


class CompletionShape:
    """A choice holds its text directly."""

    whole_object = "text_completion"
    event_object = "text_completion"

    def whole(self, text: str) -> Json:
        return {"text": text}

    def event(self, text: str, *, first: bool) -> Json:
        return {"text": text}

    def prompt_ids(self, reply: Json, choice: Json, token_ids: list[int]) -> None:
        choice["prompt_token_ids"] = token_ids


async def create_completion(front: Front, request: Request) -> Response:
    """Answer one completion request."""
    arrival = time.monotonic()
    caller = front.access.caller(request)
    prepared = await prepare(front, request, await read_body(request))
    reply_id = new_id("cmpl")
    return await answer(request, Reply(front, CompletionShape(), prepared, caller, reply_id), arrival)


async def prepare(front: Front, request: Request, body: bytes) -> Prepared:
    """A completion request read, checked and tokenised. Raises BadRequest and ApiError."""
    asked = parse_fields(CompletionRequest, body)
    front.check_model(asked.model)
    asked.check()
    front.check_account(asked.headwater.explain)
    sampling = asked.sampling(asked.max_tokens)
    check_sampling(sampling, vocab_size=front.info.vocab_size)
    return Prepared(asked, sampling, await until_client_leaves(request.receive, prompt_ids(front, asked)))


async def prompt_ids(front: Front, asked: CompletionRequest) -> list[list[int]]:
    """The token ids of every prompt, checked."""
    prompts = asked.prompts()
    encoded = []
    for i, prompt in enumerate(prompts):
        field = "prompt" if len(prompts) == 1 else f"prompt[{i}]"
        if isinstance(prompt, str):
            encoded.append(await front.encode(prompt, add_special_tokens=asked.add_special_tokens, field=field))
        else:
            front.check_ids(prompt, field)
            encoded.append(prompt)
    return encoded
