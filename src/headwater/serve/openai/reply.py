"""From the engine's deltas to an answer, whole or as events; the same for both endpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headwater.engine.messages import Delta, PrefixAccount, Submit, Usage
from headwater.serve.access import Caller
from headwater.serve.explain.ring import Finished, Where
from headwater.serve.explain.tell import PREFIX_HEADER, prefix_header
from headwater.serve.front import ChatText, Front
from headwater.serve.openai.prepared import Prepared
from headwater.serve.openai.protocol import StreamOptions
from headwater.serve.stream import EventStream, until_client_leaves

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
    prefix: PrefixAccount | None = None
    locating: asyncio.Task[Where | None] | None = None
    where: Where | None = None
    """In a chat: where the difference in its account lies; known at the end."""
    last: Delta | None = None
    n_deltas: int = 0
    first_token_s: float | None = None
    """When the first token came, by the monotonic clock."""

    def add(self, delta: Delta) -> None:
        if self.first_token_s is None and delta.token_ids:
            self.first_token_s = time.monotonic()
        self.prefix = self.prefix or delta.prefix
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.usage = delta.usage or self.usage
        self.last = delta
        if delta.token_ids or delta.finish_reason:
            self.n_deltas += 1

    def locate(self, front: Front, chat: ChatText, prefix: PrefixAccount) -> None:
        """Begin to look for ``where``: it is found while the answer is generated."""
        self.locating = asyncio.create_task(front.where(chat, self.submit.prompt_token_ids, prefix))

    def finished(self, caller: Caller, arrived_s: float, arrival: float, prefix: PrefixAccount) -> Finished:
        """``arrived_s`` by the wall clock, ``arrival`` by the monotonic one."""
        return Finished(
            request_id=self.submit.request_id,
            sender=caller.sender,
            arrived_s=arrived_s,
            n_prompt=prefix.account.n_tokens,
            n_cached=prefix.account.n_hit + prefix.account.n_copy,
            n_generated=len(self.token_ids),
            ttft_s=None if self.first_token_s is None else self.first_token_s - arrival,
            account=prefix,
            where=self.where,
        )


class Reply:
    """One request's answer: a choice for each of ``submits``."""

    def __init__(self, front: Front, shape: Shape, prepared: Prepared, caller: Caller, reply_id: str) -> None:
        self._front = front
        self._shape = shape
        self.asked = prepared.asked
        self._chat = prepared.chat
        self._caller = caller
        submits = make_submits(front, caller, reply_id, prepared)
        self._choices = {submit.request_id: Choice(i, submit) for i, submit in enumerate(submits)}
        self._id = reply_id
        self._created_s = time.time()

    async def whole(self, arrival: float) -> bytes:
        """The answer in one piece, as JSON."""
        async with aclosing(self._deltas(arrival)) as deltas:
            async for choice, delta in deltas:
                choice.add(delta)
        reply = self._head(self._shape.whole_object)
        reply["choices"] = [self._whole_choice(reply, choice) for choice in self._choices.values()]
        reply["usage"] = self._usage() | self._told()
        return msgspec.json.encode(reply)

    async def events(self, arrival: float) -> AsyncGenerator[bytes, None]:
        """The answer as JSON events: one for every delta, then the usage if that was asked for."""
        options = self.asked.stream_options or StreamOptions()
        async with aclosing(self._deltas(arrival)) as deltas:
            async for choice, delta in deltas:
                choice.add(delta)
                if not (delta.token_ids or delta.finish_reason):
                    continue  # it has only begun
                event = self._head(self._shape.event_object)
                event["choices"] = [self._event_choice(event, choice, delta)]
                if options.continuous_usage_stats:
                    event["usage"] = self._usage()
                yield msgspec.json.encode(event)
        if options.include_usage:
            usage = self._usage() | self._told()
            yield msgspec.json.encode({**self._head(self._shape.event_object), "choices": [], "usage": usage})

    async def _deltas(self, arrival: float) -> AsyncGenerator[tuple[Choice, Delta], None]:
        submits = [choice.submit for choice in self._choices.values()]
        try:
            async with aclosing(self._front.generate(submits, arrival)) as deltas:
                async for delta in deltas:
                    choice = self._choices[delta.request_id]
                    if self._chat is not None and delta.prefix is not None:
                        choice.locate(self._front, self._chat, delta.prefix)
                    yield choice, delta
        finally:
            await self._keep_accounts(arrival)

    # ---- the account ----------------------------------------------------------------------------

    def headers(self) -> dict[str, str]:
        """What the whole request reused, and why no more; nothing as long as that is not known of all prompts."""
        accounts = [choice.prefix.account for choice in self._choices.values() if choice.prefix is not None]
        return {PREFIX_HEADER: prefix_header(accounts)} if len(accounts) == len(self._choices) else {}

    def _told(self) -> Json:
        """The account as a member of the usage, if it is wanted there; with several prompts, a list."""
        if not (self.asked.headwater.explain or self._front.explain_usage):
            return {}
        told = [
            None if choice.prefix is None else self._front.teller.account(choice.prefix, self._caller, choice.where)
            for choice in self._choices.values()
        ]
        return {"headwater": {"prefix": told[0] if len(told) == 1 else told}}

    async def _keep_accounts(self, arrival: float) -> None:
        """For those who ask later: of all prompts that were begun, finished or not."""
        finished = []
        for choice in self._choices.values():
            if choice.prefix is not None:
                if choice.locating is not None:
                    choice.where = await choice.locating
                finished.append(choice.finished(self._caller, self._created_s, arrival, choice.prefix))
        if finished:
            self._front.accounts.add(self._id, finished)

    # ---- JSON -----------------------------------------------------------------------------------

    def _head(self, kind: str) -> Json:
        return {"id": self._id, "object": kind, "created": int(self._created_s), "model": self._front.served_name}

    def _whole_choice(self, reply: Json, choice: Choice) -> Json:
        written = {"index": choice.index, **self._shape.whole("".join(choice.texts)), "logprobs": None}
        _write_end(written, choice.last)
        if self.asked.return_token_ids:
            self._shape.prompt_ids(reply, written, choice.submit.prompt_token_ids)
            written["token_ids"] = choice.token_ids
        return written

    def _event_choice(self, event: Json, choice: Choice, delta: Delta) -> Json:
        first = choice.n_deltas == 1
        written = {"index": choice.index, **self._shape.event(delta.text, first=first), "logprobs": None}
        _write_end(written, delta)
        if self.asked.return_token_ids:
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


def make_submits(front: Front, caller: Caller, reply_id: str, prepared: Prepared) -> list[Submit]:
    """A request to the engine for each prompt; the only one has the answer's id."""
    asked, prompts = prepared.asked, prepared.prompts
    salt = front.access.salt(caller, asked.cache_salt)
    return [
        Submit(
            reply_id if len(prompts) == 1 else f"{reply_id}-{i}",
            token_ids,
            prepared.sampling,
            cache_salt=salt,
            priority=asked.priority,
            skip_reading_prefix_cache=asked.skip_reading_prefix_cache,
            sender=caller.sender,
        )
        for i, token_ids in enumerate(prompts)
    ]


async def answer(request: Request, reply: Reply, arrival: float) -> Response:
    """The reply as a stream or in one piece, as was asked; given up when the client leaves."""
    if reply.asked.stream:
        return EventStream(
            reply.events(arrival), lambda: [(name.encode(), value.encode()) for name, value in reply.headers().items()]
        )
    whole = await until_client_leaves(request.receive, reply.whole(arrival))
    return Response(whole, headers=reply.headers(), media_type="application/json")
