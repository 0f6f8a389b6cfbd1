"""What every endpoint works with: one engine's client, its tokenizer, and its metrics."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

from headwater.config import ServerConfig, UiConfig
from headwater.engine.checks import check_length, check_prompt
from headwater.engine.client import EngineClient
from headwater.engine.messages import Delta, PrefixAccount, Submit
from headwater.errors import BadRequest, NeverFits
from headwater.explaining.diff import Comparison, compare_bodies
from headwater.serve.access import Access
from headwater.serve.errors import ApiError, request_failed
from headwater.serve.explain.ring import AccountRing, Where
from headwater.serve.explain.tell import Teller
from headwater.serve.metrics import Metrics, RequestClock
from headwater.serve.ui.watch import Watch
from headwater.serve.ui.wording import Wording
from headwater.text.locate import Messages, locate, token_start
from headwater.text.tokenizer import Tokenizer
from headwater.types import FinishReason

T = TypeVar("T")

NICENESS = 10
"""Of the threads that work on text. They compete for cores with the engine, which has as many threads as there are, and
one of its threads that is put aside holds up all the others (docs/performance.md)."""

MAX_TEXT_JOBS = 1024
"""Requests that may wait for the tokenizer's thread; one more is refused with 503."""


@dataclass(frozen=True)
class ChatText:
    """A conversation, and what the chat template made of it; ``render`` gives what it makes of others."""

    rendered: str
    messages: list[dict[str, str]]
    render: Callable[[Messages], str]


class Front:
    """The HTTP side of one engine.

    Text work runs in one thread, so that a long prompt never holds up the event loop; whatever cannot possibly
    fit is refused by its length in bytes before it gets there.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        served_name: str,
        *,
        access: Access | None = None,
        ui: UiConfig = UiConfig(),
        explain_usage: bool = False,
    ) -> None:
        """``explain_usage``: every answer's usage holds its account, asked for or not."""
        self.client = client
        self.explain_usage = explain_usage
        self.accounts = AccountRing()
        self.teller = Teller(tokenizer.token_bytes, client.info.block_size)
        self.access = access or Access(ServerConfig())
        self.info = client.info
        self.served_name = served_name
        self.can_chat = tokenizer.chat_template is not None
        self.metrics = Metrics(served_name, client)
        client.add_stats_listener(self.metrics.observe_steps)
        self.started = int(time.time())
        self._tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(1, "text", give_way)
        self._places = ThreadPoolExecutor(1, "place", give_way)
        self._n_text_jobs = 0
        self._longest_token_bytes = max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
        self.ui = ui
        redact = self.access.guarded if ui.redact is None else ui.redact
        self.watch = Watch(client, Wording(self.text_of, redact), served_name, self.recent)

    def recent(self, n: int) -> list[dict[str, Any]]:
        """The last ``n`` prompts that were answered, newest first, with their accounts, for the operator."""
        return [self.teller.finished(one) for one in self.accounts.recent(n)]

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included; what is not UTF-8 is replaced by U+FFFD."""
        joined = b"".join([self._tokenizer.token_bytes(token) for token in token_ids])
        return joined.decode("utf-8", errors="replace")

    def close(self) -> None:
        for pool in (self._pool, self._places):
            pool.shutdown(wait=False, cancel_futures=True)

    # ---- prompts --------------------------------------------------------------------------------

    async def encode(self, text: str, *, add_special_tokens: bool, field: str) -> list[int]:
        """The tokens of ``text``. Raises NeverFits when even its length rules it out."""
        self._check_text(text, field)

        def work() -> list[int]:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens, parse_special=True)

        token_ids = await self._in_thread(work)
        self.check_ids(token_ids, field)
        return token_ids

    async def encode_chat(
        self,
        messages: list[dict[str, str]],
        *,
        add_generation_prompt: bool,
        add_special_tokens: bool,
        template_kwargs: dict[str, Any],
    ) -> tuple[list[int], ChatText]:
        """The tokens of a conversation under the model's chat template, and what they were made of. Raises
        NoChatTemplate without one."""

        def render(others: Messages) -> str:
            return self._tokenizer.render_chat(others, add_generation_prompt=add_generation_prompt, **template_kwargs)

        def work() -> tuple[list[int], ChatText]:
            text = render(messages)
            self._check_text(text, "messages")
            token_ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens, parse_special=True)
            return token_ids, ChatText(text, messages, render)

        token_ids, chat = await self._in_thread(work)
        self.check_ids(token_ids, "messages")
        return token_ids, chat

    async def where(self, chat: ChatText | None, token_ids: Sequence[int], prefix: PrefixAccount) -> Where | None:
        """Where in ``chat`` the difference of its account lies; None if there is none, or if the tokens cannot be
        traced back to the text: that takes nothing from an answer but this place.

        A chat of thousands of messages takes tens of milliseconds. An answer waits for this at its end, so it has
        another thread than prompts, of which there may be many.
        """
        difference = prefix.account.difference
        if chat is None or difference is None:
            return None

        def work() -> Where | None:
            try:
                first = token_start(self._tokenizer, chat.rendered, token_ids, difference.at_token)
            except ValueError:
                return None
            place = locate(chat.rendered, chat.messages, first, render=chat.render)
            return Where(place.message, place.role, place.character, place.part)

        return await asyncio.get_running_loop().run_in_executor(self._places, work)

    async def compare(self, first: object, second: object) -> Comparison:
        """The first difference of the prompts of two request bodies. Raises BadRequest, naming the field."""

        def work() -> Comparison:
            return compare_bodies(
                first, second, self._tokenizer, block_size=self.info.block_size, check_text=self._check_text
            )

        return await self._in_thread(work)

    def check_ids(self, token_ids: Sequence[object], field: str) -> None:
        """Refuse ids or a length that this engine cannot take."""
        check_prompt(token_ids, vocab_size=self.info.vocab_size, max_model_len=self.info.max_model_len, field=field)

    def _check_text(self, text: str, field: str) -> None:
        """Refuse, by its size alone, a text that must have too many tokens."""
        n_bytes = len(text.encode())
        fewest_tokens = n_bytes // self._longest_token_bytes
        try:
            check_length(fewest_tokens, max_model_len=self.info.max_model_len, field=field)
        except NeverFits:
            raise NeverFits(
                f"{field} has {n_bytes} bytes, that is at least {fewest_tokens} tokens, but prompt and output "
                f"together may have at most {self.info.max_model_len} tokens (max_model_len)",
                field=field,
            ) from None

    async def _in_thread(self, work: Callable[[], T]) -> T:
        if self._n_text_jobs >= MAX_TEXT_JOBS:
            raise ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{self._n_text_jobs} requests are waiting to be tokenised, the limit",
                code="overloaded",
            )
        self._n_text_jobs += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._n_text_jobs -= 1

    # ---- requests -------------------------------------------------------------------------------

    def check_model(self, name: str | None) -> None:
        """Refuse a model that this server does not serve. Raises ApiError 404."""
        if name is not None and name != self.served_name:
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"the model {name[:80]!r} is not served here: {self.served_name!r} is",
                param="model",
                code="model_not_found",
            )

    def check_account(self, wanted: bool) -> None:
        """Refuse to give an account if none is kept. Raises BadRequest."""
        if wanted and not self.info.explain:
            raise BadRequest("headwater.explain: this server keeps no accounts (--no-explain)", field="headwater")

    async def generate(self, submits: Sequence[Submit], arrival: float) -> AsyncGenerator[Delta, None]:
        """The deltas of all ``submits`` as they come; ``arrival`` is when the request came (monotonic seconds).

        Leaving early aborts what is not finished. Raises ApiError when one of them fails: then all are aborted.
        """
        clocks = {submit.request_id: RequestClock(self.metrics, arrival) for submit in submits}
        try:
            async with aclosing(self.client.stream(submits)) as deltas:
                async for delta in deltas:
                    clocks[delta.request_id].observe(delta)
                    if delta.finish_reason is FinishReason.ERROR:
                        raise request_failed(delta.error or "the request failed", delta.error_kind)
                    if delta.finish_reason is FinishReason.ABORT:
                        raise request_failed("the request was aborted", "aborted")
                    yield delta
        except (asyncio.CancelledError, GeneratorExit):
            self.metrics.count_disconnect()
            raise


def give_way() -> None:
    """Let the calling thread take only what the engine's leave over, where a thread can have a priority of its own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
