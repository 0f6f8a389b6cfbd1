"""The engine process dies, or one step fails, while the server answers (B98)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.serve.harness import Server, events_of, exists, fake_server, wait_until


@pytest.fixture
def mortal() -> Iterator[Server]:
    with fake_server("step_ms=20") as server:
        yield server


def read_stream(server: Server, into: list[str], **body: object) -> None:
    with httpx.stream("POST", server.url + "/v1/completions", json={"stream": True, **body}, timeout=30) as response:
        into.extend(response.iter_text())


def test_killed_mid_stream_is_an_error_event_without_done_b98(mortal: Server) -> None:
    received: list[str] = []
    reading = threading.Thread(target=read_stream, args=(mortal, received), kwargs={"prompt": "x", "max_tokens": 900})
    reading.start()
    wait_until(lambda: "".join(received).count("data: ") >= 3, 10)
    os.kill(mortal.engine_pid(), signal.SIGKILL)
    reading.join(5)
    assert not reading.is_alive()
    *tokens, last = events_of("".join(received))
    assert all("choices" in event for event in tokens)
    assert last["error"]["code"] == "engine_dead"
    assert "signal 9" in last["error"]["message"]

    health = httpx.get(mortal.url + "/health")
    assert health.status_code == 503
    assert "signal 9" in health.json()["error"]["message"]
    assert mortal.post("/v1/completions", {"prompt": "x"}).status_code == 503
    assert httpx.post(mortal.url + "/reset_prefix_cache").status_code == 503
    assert httpx.get(mortal.url + "/v1/models").status_code == 200
    assert mortal.metrics()["headwater_engine_up"] == 0


def test_the_official_client_raises_when_the_engine_is_killed_mid_stream_b98(mortal: Server) -> None:
    with openai.OpenAI(base_url=mortal.url + "/v1", api_key="none", max_retries=0) as client:
        messages = [{"role": "user", "content": "x" * 50}]
        stream = client.chat.completions.create(model="fake", messages=messages, stream=True)
        next(stream)
        os.kill(mortal.engine_pid(), signal.SIGKILL)
        with pytest.raises(openai.APIError, match="signal 9"):
            list(stream)


def test_killed_while_a_request_without_stream_and_a_queued_one_wait(mortal: Server) -> None:
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(mortal.post("/v1/completions", {"prompt": "x", "max_tokens": 900}))

    asking = [threading.Thread(target=ask) for _ in range(6)]  # four run, two wait
    for thread in asking:
        thread.start()
    wait_until(lambda: mortal.waiting() == 2, 10)
    os.kill(mortal.engine_pid(), signal.SIGKILL)
    for thread in asking:
        thread.join(5)
    assert [answer.status_code for answer in answers] == [503] * 6


def test_the_engine_crashing_by_itself_is_noticed(mortal: Server) -> None:
    assert mortal.post("/v1/completions", {"prompt": "#crash"}).status_code == 503
    assert httpx.get(mortal.url + "/health").status_code == 503


def test_a_step_that_raises_ends_the_engine_with_its_reason(mortal: Server) -> None:
    answer = mortal.post("/v1/completions", {"prompt": "#raise"})
    assert answer.status_code == 503
    assert "RuntimeError: the step raised" in answer.json()["error"]["message"]


def test_no_orphan_and_no_socket_when_the_server_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with fake_server() as server:
        engine = server.engine_pid()
        server.process.kill()
        wait_until(lambda: not exists(engine), 5)
    assert list(tmp_path.iterdir()) == []


def test_no_orphan_when_the_server_is_killed_while_the_engine_computes() -> None:
    with fake_server("step_ms=3000") as server:
        engine = server.engine_pid()

        def ask() -> None:
            with pytest.raises(httpx.HTTPError):
                server.complete()

        reading = threading.Thread(target=ask)
        reading.start()
        wait_until(lambda: server.metrics()["headwater_engine_up"] == 1, 5)
        server.process.kill()
        wait_until(lambda: not exists(engine), 2)
        reading.join(5)
