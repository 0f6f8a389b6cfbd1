"""One streaming request to an OpenAI-compatible server, with the time of every event."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from headwater.bench.results import Usage
from headwater.bench.sse import EventReader

CONNECT_S = 10.0

SHOWN_CHARS = 300
"""How much of a server's error is kept."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What to send. ``body`` is the whole request, its ``stream`` included."""

    body: dict[str, Any]
    path: str = "/completions"
    """After the API's base address."""
    at_s: float | None = None
    """When to send it, by ``time.monotonic``; None: at once."""
    stall_s: float = 300.0
    """A stream that is silent for so long has failed."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came, with the times of a Sample; ``error`` where it failed, beside all that had come until then."""

    sent_s: float
    """By ``time.monotonic``, which all processes of a machine share."""
    events_s: list[float]
    tokens_per_event: list[int] | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None
    usage: Usage | None = None
    server_timing: dict[str, float] | None = None
    lag_s: float = 0.0
    status: int | None = None
    error: str | None = None
    unreachable: bool = False
    """No connection could be made: the request did not reach the server."""
    unanswered: bool = False
    """The connection broke before anything came back."""
    text: str = ""


class StreamFailed(Exception):
    """The server ended, broke or stalled the stream; the text says how."""


@dataclass
class _Stream:
    """What a stream has told so far."""

    started: float
    events_s: list[float] = field(default_factory=list)
    told: list[int] = field(default_factory=list)
    """Tokens by event, as far as every event so far told its count."""
    n_told: int = 0
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    last_s: float = 0.0
    """The last event with choices, tokens or not."""
    finished: bool = False
    """A finish reason came, or [DONE]."""

    def add(self, data: bytes, now: float) -> None:
        """Take in one event. Raises StreamFailed when it is none, or tells of an error."""
        if data.strip() == b"[DONE]":
            self.finished = True
            return
        event = _decoded(data)
        if event.get("error") is not None:
            raise StreamFailed(f"the server failed: {_error_text(event)}")
        usage = event.get("usage")
        if isinstance(usage, dict):
            self.usage = usage
        if isinstance(event.get("timings"), dict):
            self.timings = event["timings"]
        choices = event.get("choices")
        if isinstance(choices, list) and choices:
            self._add_choices(choices, usage if isinstance(usage, dict) else None, now - self.started)

    def _add_choices(self, choices: list[Any], usage: dict[str, Any] | None, at_s: float) -> None:
        first: dict[str, Any] = choices[0] if isinstance(choices[0], dict) else {}
        text = _text_of(first)
        self.texts.append(text)
        self.last_s = at_s
        self.finished = self.finished or first.get("finish_reason") is not None
        n_so_far = _whole(usage.get("completion_tokens")) if usage is not None else None
        if n_so_far is not None and n_so_far > self.n_told:
            self.events_s.append(at_s)
            self.told.append(n_so_far - self.n_told)
            self.n_told = n_so_far
        elif n_so_far is None and text:
            self.events_s.append(at_s)

    def answer(self, lag_s: float, status: int | None, error: str | None) -> Answer:
        usage = _usage(self.usage, self.timings)
        events = self.events_s
        if not events and self.finished and self.last_s:
            events = [self.last_s]  # its tokens have no text: the end of the answer is all that was seen of them
        return Answer(
            sent_s=self.started,
            events_s=events,
            tokens_per_event=self._tokens_per_event(events, usage),
            ttft_s=events[0] if events else None,
            e2e_s=events[-1] if events else None,
            usage=usage,
            server_timing=_timing(self.timings),
            lag_s=lag_s,
            status=status,
            error=error,
            text="".join(self.texts),
        )

    def _tokens_per_event(self, events: list[float], usage: Usage | None) -> list[int] | None:
        if len(self.told) == len(events) and events:
            return self.told
        # Each event had a text, so at least one token: as many events as tokens means one in each.
        if usage is not None and usage.completion_tokens == len(events):
            return [1] * len(events)
        return None


async def send(client: httpx.AsyncClient, ask: Ask, lag: Lag) -> Answer:
    """Send ``ask``, now or at its time, and read its stream to the end. Every failure is told in the Answer.

    A server may close a kept connection just when it is used again. A request that got no byte of an answer is sent
    once more, over a new one, and counts from then.
    """
    content = msgspec.json.encode(ask.body)
    timeout = httpx.Timeout(ask.stall_s, connect=CONNECT_S)
    request = client.build_request("POST", ask.path.lstrip("/"), content=content, timeout=timeout)
    if ask.at_s is not None:
        await asyncio.sleep(max(0.0, ask.at_s - time.monotonic()))
    answer = await _send_once(client, request, ask.stall_s, lag)
    return await _send_once(client, request, ask.stall_s, lag) if answer.unanswered else answer


async def _send_once(client: httpx.AsyncClient, request: httpx.Request, stall_s: float, lag: Lag) -> Answer:
    stream, status = _Stream(time.monotonic()), None
    watch = lag.watch()
    try:
        response = await client.send(request, stream=True)
        status = response.status_code
        try:
            await _read(response, stream)
        finally:
            await response.aclose()
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        text = f"no connection to {request.url}: {error or type(error).__name__}"
        return msgspec.structs.replace(stream.answer(watch.worst_s(), status, text), unreachable=True)
    except httpx.TimeoutException:
        return stream.answer(watch.worst_s(), status, f"the server was silent for {stall_s:g} s")
    except httpx.HTTPError as error:
        text = f"the connection broke after {len(stream.events_s)} events: {error or type(error).__name__}"
        return msgspec.structs.replace(stream.answer(watch.worst_s(), status, text), unanswered=status is None)
    except StreamFailed as error:
        return stream.answer(watch.worst_s(), status, str(error))
    return stream.answer(watch.worst_s(), status, None)


async def _read(response: httpx.Response, stream: _Stream) -> None:
    if response.status_code != 200:
        raise StreamFailed(f"HTTP {response.status_code}: {_body_text(await response.aread())}")
    if "text/event-stream" not in response.headers.get("content-type", ""):
        kind = response.headers.get("content-type", "nothing")
        raise StreamFailed(f"the answer is {kind}, not a stream of events: does the server support stream: true?")
    reader = EventReader()
    async for chunk in response.aiter_raw():
        now = time.monotonic()
        for data in reader.feed(chunk):
            stream.add(data, now)
    if rest := reader.close():
        raise StreamFailed(f"the stream ended inside an event: {rest[:80]!r}")
    if not stream.finished:
        raise StreamFailed("the stream ended without a finish reason or [DONE]")


class Lag:
    """How late the event loop is: a heartbeat that should come every ``beat_s`` and comes when the loop lets it."""

    beat_s = 0.005

    def __init__(self) -> None:
        self._watches: set[LagWatch] = set()

    def watch(self) -> LagWatch:
        """Follows the lag from now until it is asked for the worst."""
        watch = LagWatch(self._watches)
        self._watches.add(watch)
        return watch

    async def beat(self) -> None:
        """Run beside the requests, until cancelled."""
        while True:
            due = time.monotonic() + self.beat_s
            await asyncio.sleep(self.beat_s)
            late = time.monotonic() - due
            for watch in self._watches:
                watch.see(late)


class LagWatch:
    """The worst lag during one request."""

    def __init__(self, watches: set[LagWatch]) -> None:
        self._watches = watches
        self._worst_s = 0.0

    def see(self, late_s: float) -> None:
        self._worst_s = max(self._worst_s, late_s)

    def worst_s(self) -> float:
        """The worst seen; ends the watch."""
        self._watches.discard(self)
        return self._worst_s


def make_client(base_url: str, headers: dict[str, str]) -> httpx.AsyncClient:
    """A client for many requests at once; each Ask brings its time limit. Uses no proxy from the environment."""
    return httpx.AsyncClient(
        base_url=base_url,
        headers={"content-type": "application/json", "accept-encoding": "identity", **headers},
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,
    )


# ---- reading what servers write ----------------------------------------------------------------------


def _decoded(data: bytes) -> dict[str, Any]:
    try:
        event = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StreamFailed(f"an event is no JSON ({error}): {data[:80]!r}") from None
    if not isinstance(event, dict):
        raise StreamFailed(f"an event is no JSON object: {data[:80]!r}")
    return event


def _text_of(choice: dict[str, Any]) -> str:
    delta = choice.get("delta")
    if isinstance(delta, dict):
        parts = [delta.get(name) for name in ("reasoning_content", "reasoning", "content")]
        return "".join(part for part in parts if isinstance(part, str))
    text = choice.get("text")
    return text if isinstance(text, str) else ""


def _usage(usage: dict[str, Any], timings: dict[str, Any]) -> Usage | None:
    details = usage.get("prompt_tokens_details")
    cached = _whole(details.get("cached_tokens")) if isinstance(details, dict) else None
    if cached is None:
        cached = _whole(timings.get("cache_n"))  # llama.cpp
    read = Usage(_whole(usage.get("prompt_tokens")), _whole(usage.get("completion_tokens")), cached)
    return None if read == Usage() else read


def _timing(timings: dict[str, Any]) -> dict[str, float] | None:
    """llama.cpp tells its own times in the last event, in milliseconds."""
    names = {"prefill_s": "prompt_ms", "decode_s": "predicted_ms"}
    found = {
        ours: timings[theirs] / 1e3 for ours, theirs in names.items() if isinstance(timings.get(theirs), int | float)
    }
    return found or None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _body_text(body: bytes) -> str:
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body[:SHOWN_CHARS].decode(errors="replace")
    return _error_text(decoded)


def _error_text(event: Any) -> str:
    """What an error object says, in OpenAI's form or another."""
    error = event.get("error", event) if isinstance(event, dict) else event
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:SHOWN_CHARS]
