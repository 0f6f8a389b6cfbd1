"""From the engine's deltas to an answer, whole or as events; the same for both endpoints."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headwater.engine.messages import Delta, Submit, Usage
from headwater.serve.front import Front
from headwater.serve.openai.protocol import GenerationFields, StreamOptions
from headwater.serve.stream import EventStream, until_client_leaves
from headwater.types import SamplingParams

Json = dict[str, Any]


class Shape(Protocol):
    """How one endpoint writes a choice."""

    @property
    def whole_object(self) -> str: ...

    @property
    def event_object(self) -> str: ...

    def whole(self, text: str) -> Json:
        """The members of a choice that hold its whole text."""
        ...

    def event(self, text: str, *, first: bool) -> Json:
        """The members of a choice that hold the text of one event."""
        ...

    def prompt_ids(self, reply: Json, choice: Json, token_ids: list[int]) -> None:
        """Put the prompt's token ids where this endpoint tells them."""
        ...


@dataclass(slots=True)
class Choice:
    """One prompt's answer so far."""

    index: int
    submit: Submit
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    usage: Usage | None = None
    last: Delta | None = None
    n_deltas: int = 0

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.usage = delta.usage or self.usage
        self.last = delta
        self.n_deltas += 1


class Reply:
    """One request's answer: a choice for each of ``submits``."""

    def __init__(
        self, front: Front, shape: Shape, asked: GenerationFields, submits: list[Submit], reply_id: str
    ) -> None:
        self._front = front
        self._shape = shape
        self._asked = asked
        self._choices = {submit.request_id: Choice(i, submit) for i, submit in enumerate(submits)}
        self._id = reply_id
        self._created = int(time.time())

    async def whole(self, arrival: float) -> bytes:
        """The answer in one piece, as JSON."""
        async with aclosing(self._deltas(arrival)) as deltas:
            async for choice, delta in deltas:
                choice.add(delta)
        reply = self._head(self._shape.whole_object)
        reply["choices"] = [self._whole_choice(reply, choice) for choice in self._choices.values()]
        reply["usage"] = self._usage()
        return msgspec.json.encode(reply)

    async def events(self, arrival: float) -> AsyncGenerator[bytes, None]:
        """The answer as JSON events: one for every delta, then the usage if that was asked for."""
        options = self._asked.stream_options or StreamOptions()
        async with aclosing(self._deltas(arrival)) as deltas:
            async for choice, delta in deltas:
                choice.add(delta)
                event = self._head(self._shape.event_object)
                event["choices"] = [self._event_choice(event, choice, delta)]
                if options.continuous_usage_stats:
                    event["usage"] = self._usage()
                yield msgspec.json.encode(event)
        if options.include_usage:
            yield msgspec.json.encode({**self._head(self._shape.event_object), "choices": [], "usage": self._usage()})

    async def _deltas(self, arrival: float) -> AsyncGenerator[tuple[Choice, Delta], None]:
        submits = [choice.submit for choice in self._choices.values()]
        async with aclosing(self._front.generate(submits, arrival)) as deltas:
            async for delta in deltas:
                yield self._choices[delta.request_id], delta

    def _head(self, kind: str) -> Json:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._front.served_name}

    def _whole_choice(self, reply: Json, choice: Choice) -> Json:
        written = {"index": choice.index, **self._shape.whole("".join(choice.texts)), "logprobs": None}
        _write_end(written, choice.last)
        if self._asked.return_token_ids:
            self._shape.prompt_ids(reply, written, choice.submit.prompt_token_ids)
            written["token_ids"] = choice.token_ids
        return written

    def _event_choice(self, event: Json, choice: Choice, delta: Delta) -> Json:
        first = choice.n_deltas == 1
        written = {"index": choice.index, **self._shape.event(delta.text, first=first), "logprobs": None}
        _write_end(written, delta)
        if self._asked.return_token_ids:
            if first:
                self._shape.prompt_ids(event, written, choice.submit.prompt_token_ids)
            written["token_ids"] = delta.token_ids
        return written

    def _usage(self) -> Json:
        """Summed over the choices; a choice that has not begun counts its prompt only."""
        n_prompt = sum(len(choice.submit.prompt_token_ids) for choice in self._choices.values())
        known = [choice.usage for choice in self._choices.values() if choice.usage is not None]
        n_generated = sum(usage.n_generated for usage in known)
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_generated,
            "total_tokens": n_prompt + n_generated,
            "prompt_tokens_details": {"cached_tokens": sum(usage.n_cached for usage in known)},
        }


def _write_end(written: Json, delta: Delta | None) -> None:
    ended = delta is not None and delta.finish_reason is not None
    written["finish_reason"] = delta.finish_reason.value if delta is not None and delta.finish_reason else None
    written["stop_reason"] = delta.stop_reason if delta is not None and ended else None


def make_submit(request_id: str, token_ids: list[int], sampling: SamplingParams, asked: GenerationFields) -> Submit:
    return Submit(
        request_id,
        token_ids,
        sampling,
        cache_salt=asked.cache_salt,
        priority=asked.priority,
        skip_reading_prefix_cache=asked.skip_reading_prefix_cache,
    )


async def answer(request: Request, reply: Reply, asked: GenerationFields, arrival: float) -> Response:
    """The reply as a stream or in one piece, as was asked; given up when the client leaves."""
    if asked.stream:
        return EventStream(reply.events(arrival))
    whole = await until_client_leaves(request.receive, reply.whole(arrival))
    return Response(whole, media_type="application/json")
