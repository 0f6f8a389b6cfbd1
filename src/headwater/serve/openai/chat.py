"""POST /v1/chat/completions"""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from headwater.engine.checks import check_sampling
from headwater.serve.front import Front, new_id
from headwater.serve.limits import read_body
from headwater.serve.openai.fields import parse_fields
from headwater.serve.openai.prepared import Prepared
from headwater.serve.openai.protocol import ChatRequest
from headwater.serve.openai.reply import Json, Reply, answer
from headwater.serve.stream import until_client_leaves


class ChatShape:
    """A choice holds a message, or the difference to it. The role comes with the first token's event, so that
    there is exactly one event for every token."""

    whole_object = "chat.completion"
    event_object = "chat.completion.chunk"

    def whole(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def event(self, text: str, *, first: bool) -> Json:
        return {"delta": {"role": "assistant", "content": text} if first else {"content": text}}

    def prompt_ids(self, reply: Json, choice: Json, token_ids: list[int]) -> None:
        reply["prompt_token_ids"] = token_ids  # where vLLM has them for chat
        choice["prompt_token_ids"] = token_ids


async def create_chat_completion(front: Front, request: Request) -> Response:
    """Answer one chat request."""
    arrival = time.monotonic()
    caller = front.access.caller(request)
    prepared = await prepare(front, request, await read_body(request))
    reply_id = new_id("chatcmpl")
    return await answer(request, Reply(front, ChatShape(), prepared, caller, reply_id), arrival)


async def prepare(front: Front, request: Request, body: bytes) -> Prepared:
    """A chat request read, checked and tokenised. Raises BadRequest and ApiError."""
    asked = parse_fields(ChatRequest, body)
    front.check_model(asked.model)
    asked.check()
    front.check_account(asked.headwater.explain)
    sampling = asked.sampling(asked.output_limit)
    check_sampling(sampling, vocab_size=front.info.vocab_size)
    encoding = front.encode_chat(
        [message.for_template() for message in asked.messages],
        add_generation_prompt=asked.add_generation_prompt,
        add_special_tokens=asked.add_special_tokens,
        template_kwargs=asked.chat_template_kwargs,
    )
    token_ids, chat = await until_client_leaves(request.receive, encoding)
    return Prepared(asked, sampling, [token_ids], chat)
