"""What a load consists of: made-up conversations, herds, chat requests from a file, a trace."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from headwater.bench.dialect import Dialect
from headwater.bench.prompts import Drawer, Piece, Vocabulary, as_prompt
from headwater.bench.trace import TraceLine, TraceScale, TraceTokens
from headwater.errors import ConfigError

HERD_LEAD_S = 0.05
"""A herd's requests are handed over so long before they are sent, all at one moment."""


@dataclass(frozen=True)
class Item:
    """One request to come. ``body`` makes it when it is needed: a trace's prompts together may fill the memory.

    ``prompt_tokens`` None: only the server will tell. It is sent when the requests ``after`` (by index) have been
    answered and, in a trace, ``at_s`` has come.
    """

    body: Callable[[], dict[str, Any]]
    prompt_tokens: int | None
    max_tokens: int
    after: tuple[int, ...] = ()
    at_s: float | None = None
    lead_s: float = 0.0
    path: str = "/completions"
    group: int = 0
    """Which conversation, herd or request of a trace it is."""


@dataclass(frozen=True)
class Shape:
    """Sizes of made-up conversations, in tokens."""

    users: int
    systems: int
    turns: int
    system_tokens: int
    turn_tokens: int
    output_tokens: int


def conversations(shape: Shape, drawer: Drawer, dialect: Dialect) -> list[Item]:
    """Users who talk for some turns, each over one of a few system prompts; all first turns before all second ones.

    An answer enters the next prompt as fresh tokens of its length, not as the model's own: the work is then the same
    for every engine. So the answers' KV is not reused, and a real chat would hit a little more.

        turn 1   system | question
        turn 2   system | question | stand-in for the answer | question
    """
    systems = [drawer.prefix(shape.system_tokens) for _ in range(shape.systems)]
    histories = [systems[user % shape.systems] for user in range(shape.users)]
    items: list[Item] = []
    for turn in range(shape.turns):
        for user in range(shape.users):
            prompt = (*histories[user], *drawer.question(shape.turn_tokens))
            after = (len(items) - shape.users,) if turn else ()
            items.append(_item(prompt, shape.output_tokens, dialect, after=after, group=user))
            histories[user] = (*prompt, *drawer.question(shape.output_tokens))
    return items


def herds(
    n_herds: int, clients: int, prefix_tokens: int, question_tokens: int, output: int, drawer: Drawer, dialect: Dialect
) -> list[Item]:
    """``clients`` requests at one moment, over one prefix that nobody has sent, each with a question of its own; then,
    when all are answered, the next herd over another prefix."""
    items: list[Item] = []
    before: tuple[int, ...] = ()
    for herd in range(n_herds):
        prefix = drawer.prefix(prefix_tokens)
        for _ in range(clients):
            prompt = (*prefix, *drawer.question(question_tokens))
            items.append(_item(prompt, output, dialect, after=before, group=herd, lead_s=HERD_LEAD_S))
        before = tuple(range(len(items) - clients, len(items)))
    return items


def _item(prompt: tuple[Piece, ...], output: int, dialect: Dialect, **more: Any) -> Item:
    body = partial(dialect.body, as_prompt(prompt), output)
    return Item(body, len(prompt) + dialect.extra_tokens, output, **more)


def trace_items(
    lines: Sequence[TraceLine],
    scale: TraceScale,
    time_scale: float,
    seed: int,
    vocabulary: Vocabulary,
    dialect: Dialect,
) -> list[Item]:
    """The requests of a trace, at its times."""
    tokens = TraceTokens(len(vocabulary.others), seed, scale)
    return [
        Item(
            body=partial(_trace_body, tokens, line, i, scale, vocabulary, dialect),
            prompt_tokens=scale.input(line.input_length) + dialect.extra_tokens,
            max_tokens=scale.output(line.output_length),
            at_s=(line.timestamp - lines[0].timestamp) / 1e3 * time_scale,
            group=i,
        )
        for i, line in enumerate(lines)
    ]


def _trace_body(
    tokens: TraceTokens, line: TraceLine, index: int, scale: TraceScale, vocabulary: Vocabulary, dialect: Dialect
) -> dict[str, Any]:
    pieces = [vocabulary.others[token] for token in tokens.of_request(line, index)]
    return dialect.body(as_prompt(pieces), scale.output(line.output_length))


# ---- requests from a file ----------------------------------------------------------------------------

STREAMING = ("stream", "stream_options", "model")
"""Fields that the measurement sets itself."""


def read_requests(path: Path, output: int, dialect: Dialect, n_requests: int | None = None) -> list[Item]:
    """A JSONL of chat (``messages``) or completion (``prompt``) requests, plain or as lines of OpenAI's batch files
    (``body``). Their own fields are sent as they are, but that the answer is streamed and the model is the server's.

    Raises ConfigError, naming the line, for what is no request.
    """
    try:
        lines = path.read_bytes().removeprefix(BOM_UTF8).splitlines()
    except OSError as error:
        raise ConfigError(f"the requests in {path} cannot be read: {error.strerror or error}") from None
    items = [_request(path, n, line, output, dialect) for n, line in enumerate(lines, 1) if line.strip()]
    if not items:
        raise ConfigError(f"{path} holds no request")
    return items[:n_requests]


def _request(path: Path, number: int, line: bytes, output: int, dialect: Dialect) -> Item:
    try:
        read = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}, line {number} is no JSON: {error}") from None
    asked = read.get("body", read) if isinstance(read, Mapping) else None
    if not isinstance(asked, Mapping) or not ("messages" in asked or "prompt" in asked):
        raise ConfigError(f"{path}, line {number} is no request: it has neither messages nor prompt")
    limits = [asked[name] for name in ("max_completion_tokens", "max_tokens") if asked.get(name) is not None]
    if limits and not (isinstance(limits[0], int) and limits[0] > 0):
        raise ConfigError(f"{path}, line {number}: max_tokens must be a whole number above 0, got {limits[0]!r}")
    n_output = limits[0] if limits else output
    body = {name: value for name, value in asked.items() if name not in STREAMING}
    if not limits:
        body["max_tokens"] = n_output
    body.update(model=dialect.model, stream=True)
    if dialect.usage:
        body["stream_options"] = {"include_usage": True}
        if dialect.counts_by_event:
            body["stream_options"]["continuous_usage_stats"] = True
    route = "/chat/completions" if "messages" in asked else "/completions"
    return Item(partial(dict, body), None, n_output, path=route, group=number - 1)
