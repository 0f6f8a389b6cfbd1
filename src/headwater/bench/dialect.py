"""What a server understands beyond the least that all OpenAI-compatible ones do, found by asking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headwater.bench.client import Answer, Ask
from headwater.errors import BenchError

AskOne = Callable[[Ask], Answer]

PROBE_TEXT = "The river runs"
PROBE_IDS = (100, 101, 102, 103, 104, 105, 106, 107)
"""Ids that every vocabulary has."""

ID_RANGES = ((1000, 30_000), (1000, 5_000), (300, 900), (33, 126))
"""Where token ids are drawn from: the first range whose last id the server takes. Above a thousand there are hardly
any special tokens."""


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """How to ask this server. What it does not take is left out of every request."""

    model: str
    token_ids: bool = False
    """Prompts may be token ids."""
    ids_from: int = 0
    ids_to: int = 0
    extra_tokens: int = 0
    """What the server adds to a prompt of ids, such as a token for the beginning."""
    ignore_eos: bool = False
    """Without it, answers may end before ``max_tokens``."""
    usage: bool = False
    counts_by_event: bool = False
    """Each event tells the tokens so far."""
    cache_salt: bool = False
    """The field is accepted; whether it separates, the counter-example shows."""

    def body(self, prompt: Sequence[int] | str, max_tokens: int, salt: str | None = None) -> dict[str, Any]:
        """A greedy, streaming completion request."""
        given = prompt if isinstance(prompt, str) else list(prompt)
        body = _least(self.model, given, max_tokens)
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.usage:
            body["stream_options"] = {"include_usage": True}
            if self.counts_by_event:
                body["stream_options"]["continuous_usage_stats"] = True
        if salt is not None:
            body["cache_salt"] = salt
        return body


def _least(model: str, prompt: list[int] | str, max_tokens: int) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}


def learn(ask: AskOne, model: str) -> Dialect:
    """Ask short requests until it is known what the server takes. Raises BenchError when it takes none."""
    answer = ask(Ask(body=_least(model, PROBE_TEXT, 2)))
    if answer.error is not None:
        raise BenchError(f"the server does not answer a plain completion request: {answer.error}")

    def takes(more: dict[str, Any], prompt: list[int] | str = PROBE_TEXT) -> Answer | None:
        tried = ask(Ask(body={**_least(model, prompt, 2), **more}))
        if tried.unreachable:
            raise BenchError(f"the server is gone: {tried.error}")
        return tried if tried.error is None else None

    include_usage = {"stream_options": {"include_usage": True}}
    with_usage = takes(include_usage)
    usage = with_usage is not None and with_usage.usage is not None
    continuous = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    with_counts = takes(continuous) if usage else None
    counts = with_counts is not None and _told_by_event(with_counts)
    dialect = Dialect(
        model=model,
        ignore_eos=takes({"ignore_eos": True}) is not None,
        usage=usage or answer.usage is not None,
        counts_by_event=counts,
        cache_salt=takes({"cache_salt": "probe"}) is not None,
    )
    if not usage and answer.usage is not None:
        include_usage = {}  # it tells its usage unasked
    return _with_ids(dialect, lambda prompt: takes(include_usage if dialect.usage else {}, prompt))


def _told_by_event(answer: Answer) -> bool:
    """Whether the events themselves told their counts: their sum is then that of the usage."""
    told, usage = answer.tokens_per_event, answer.usage
    return told is not None and usage is not None and sum(told) == usage.completion_tokens


def _with_ids(dialect: Dialect, ask: Callable[[list[int]], Answer | None]) -> Dialect:
    answer = ask(list(PROBE_IDS))
    if answer is None:
        return dialect
    extra = 0
    if answer.usage is not None and answer.usage.prompt_tokens is not None:
        extra = answer.usage.prompt_tokens - len(PROBE_IDS)
        if not 0 <= extra <= 2:
            return dialect  # it read them as something else, such as several prompts or a text
    for low, high in ID_RANGES:
        if ask([low, high - 1]) is not None:
            return msgspec.structs.replace(dialect, token_ids=True, ids_from=low, ids_to=high, extra_tokens=extra)
    return dialect
