"""One request at a time against a server that writes down when it sent what."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headwater.bench.client import Answer, Ask, Lag
from headwater.bench.clients import Clients
from headwater.bench.server import free_port
from headwater.bench.sse import EventReader
from tests.bench.fake_server import fake_server

WITHIN_S = 0.002


@contextmanager
def asking(*options: str) -> Iterator[Clients]:
    with fake_server(*options) as url, Clients(f"{url}/v1") as clients:
        yield clients


@pytest.fixture(scope="module")
def clients() -> Iterator[Clients]:
    with asking() as clients:
        yield clients


def ask(n_prompt: int = 20, max_tokens: int = 12, stall_s: float = 30.0, **more: Any) -> Ask:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "fake", "prompt": list(range(n_prompt)), "max_tokens": max_tokens, "stream": True}
    return Ask(body={**body, "stream_options": options, **more}, stall_s=stall_s)


@pytest.mark.parametrize(
    "options",
    [(), ("--half-characters",), ("--tokens-per-event", "4"), ("--no-usage",)],
    ids=["plain", "half characters", "four tokens an event", "no usage"],
)
def test_recovers_when_every_event_was_sent(tmp_path: Path, options: tuple[str, ...]) -> None:
    """On a busy machine either process may be late by more, so most requests must agree; and if they do not, those of
    a second or a third try. A clock that is wrong is wrong every time."""
    log = tmp_path / "log"
    with asking("--itl-ms", "3", "--base-ms", "8", "--log", str(log), *options) as clients:
        for _ in range(3):
            log.write_text("")
            answers = [clients.ask(ask(20 + i)) for i in range(9)]
            told = [json.loads(line) for line in log.read_text().splitlines()]
            good = [agrees(answer, record["times"]) for answer, record in zip(answers, told, strict=True)]
            if sum(good) >= 7:
                return
    raise AssertionError(f"only {sum(good)} of {len(good)} requests agree to {WITHIN_S} s")


def agrees(answer: Answer, times: list[float]) -> bool:
    """The first event and the median gap to within 2 ms of what the server wrote down."""
    assert answer.error is None
    assert len(answer.events_s) == len(times)
    assert (answer.ttft_s, answer.e2e_s) == (answer.events_s[0], answer.events_s[-1])
    sent = [moment - answer.sent_s for moment in times]
    gaps = [abs((b - a) - (d - c)) for (a, b), (c, d) in zip(pairs(answer.events_s), pairs(sent), strict=True)]
    return abs(answer.events_s[0] - sent[0]) < WITHIN_S and sorted(gaps)[len(gaps) // 2] < WITHIN_S


def pairs(times: list[float]) -> list[tuple[float, float]]:
    return list(itertools.pairwise(times))


@pytest.mark.parametrize(
    ("options", "tokens"),
    [((), [1] * 12), (("--tokens-per-event", "5"), [5, 5, 2]), (("--no-usage",), [1] * 12)],
    ids=["one", "five", "told by the events only"],
)
def test_tokens_of_each_event_where_the_server_tells_them(options: tuple[str, ...], tokens: list[int]) -> None:
    with asking(*options) as clients:
        assert clients.ask(ask()).tokens_per_event == tokens


def test_tokens_of_events_by_the_usage_alone(clients: Clients) -> None:
    plain = {"stream_options": {"include_usage": True}}
    assert clients.ask(ask(**plain)).tokens_per_event == [1] * 12
    with asking("--tokens-per-event", "5") as clients:
        answer = clients.ask(ask(**plain))
    assert answer.tokens_per_event is None  # 3 events, 12 tokens: nobody says how they lie
    assert len(answer.events_s) == 3


def test_usage_and_text(clients: Clients) -> None:
    clients.ask(ask(40))
    answer = clients.ask(ask(40, 3))
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.cached_tokens) == (40, 3, 32)
    assert answer.text == " è è è"
    assert answer.status == 200


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("reset", "the connection broke after 1 events"),
        ("broken", "an event is no JSON"),
        ("cut", "the stream ended inside an event"),
        ("error", "the server failed: the engine is on fire"),
        ("http500", "HTTP 500: it broke"),
    ],
)
def test_a_failure_is_told_and_what_came_before_is_kept(clients: Clients, kind: str, says: str) -> None:
    answer = clients.ask(ask(fault=kind))
    assert answer.error is not None and says in answer.error
    assert len(answer.events_s) == (0 if kind == "http500" else 1)
    assert not answer.unreachable
    assert clients.ask(ask()).error is None  # the measuring process goes on, and so does the server


def test_a_server_that_dies_in_the_middle() -> None:
    with asking() as clients:
        answer = clients.ask(ask(fault="die"))
        assert not answer.unreachable
        assert answer.error is not None and "the connection broke after 1 events" in answer.error
        assert clients.ask(ask()).unreachable


def test_a_stalled_stream_ends_after_its_limit(clients: Clients) -> None:
    answer = clients.ask(ask(fault="stall", stall_s=0.5))
    assert answer.error == "the server was silent for 0.5 s"
    assert len(answer.events_s) == 1


def test_a_kept_connection_that_was_closed_costs_no_request() -> None:
    with asking("--fault", "close@2", "--fault", "close@4+") as clients:
        assert [clients.ask(ask()).error for _ in range(2)] == [None, None]
        answer = clients.ask(ask())  # the second time in a row it is no coincidence
        assert answer.error is not None and "the connection broke after 0 events" in answer.error


def test_a_finish_reason_is_enough_of_an_end(clients: Clients) -> None:
    assert clients.ask(ask(fault="no_done")).error is None


def test_nobody_there() -> None:
    with Clients(f"http://127.0.0.1:{free_port()}/v1") as clients:
        answer = clients.ask(ask())
    assert answer.unreachable
    assert answer.error is not None and "no connection to http://127.0.0.1" in answer.error


def test_requests_run_at_once_and_at_their_time() -> None:
    with asking("--base-ms", "200") as clients:
        start = time.monotonic() + 0.3
        futures = [clients.submit(Ask(body=ask().body, at_s=start + 0.01 * i)) for i in range(5)]
        answers = [future.result() for future in futures]
    assert [answer.error for answer in answers] == [None] * 5
    late = [answer.sent_s - (start + 0.01 * i) for i, answer in enumerate(answers)]
    assert min(late) >= 0
    assert sorted(late)[2] < 0.02
    assert max(answer.sent_s for answer in answers) < min(answer.sent_s + answer.events_s[0] for answer in answers)


def test_the_lag_of_the_measuring_loop_is_seen() -> None:
    async def scene() -> tuple[float, float]:
        lag = Lag()
        beating = asyncio.create_task(lag.beat())
        before, during = lag.watch(), lag.watch()
        await asyncio.sleep(0.05)
        calm = before.worst_s()
        time.sleep(0.1)  # the very thing that must not happen in an event loop
        await asyncio.sleep(0.02)
        beating.cancel()
        return calm, during.worst_s()

    calm, blocked = asyncio.run(scene())
    assert calm < 0.05
    assert 0.09 < blocked < 0.2


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_survive_any_cut(size: int) -> None:
    raw = 'data: {"text": "è€𝄞"}\n\n: ping\n\ndata:no space\r\n\r\nevent: x\ndata: two\ndata: lines\n\n'.encode()
    reader = EventReader()
    events = [event for i in range(0, len(raw), size) for event in reader.feed(raw[i : i + size])]
    assert events == ['{"text": "è€𝄞"}'.encode(), b"no space", b"two\nlines"]
    assert reader.close() == b""
    assert EventReader().feed(b"data: half") == []
