"""Health, version, reset (B84) and metrics."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from importlib.metadata import version

import httpx
import pytest

from tests.serve.harness import PROMPT, Server, fake_server, wait_until


@pytest.fixture(scope="module")
def own() -> Iterator[Server]:
    with fake_server("step_ms=5") as server:
        yield server


def test_health_and_version(own: Server) -> None:
    assert httpx.get(own.url + "/health").json() == {"status": "ok"}
    assert httpx.get(own.url + "/version").json() == {"version": version("headwater")}


def cached(server: Server, prompt: str) -> int:
    return server.complete(prompt, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_reset_forgets_what_is_cached_b84(own: Server) -> None:
    prompt = "reset: " + PROMPT
    assert (cached(own, prompt), cached(own, prompt)) == (0, 64)
    answer = httpx.post(own.url + "/reset_prefix_cache")
    assert answer.status_code == 200
    assert answer.json()["status"] == "ok"
    assert answer.json()["cleared_blocks"] >= 4
    assert cached(own, prompt) == 0


def test_a_misspelt_force_is_refused_by_name(own: Server) -> None:
    answer = httpx.post(own.url + "/reset_prefix_cache?forces=true")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "forces")


def test_reset_while_a_request_runs_is_a_409_and_force_preempts_b84(own: Server) -> None:
    prompt = "busy: " + PROMPT
    answers: list[dict[str, object]] = []
    running = threading.Thread(target=lambda: answers.append(own.complete(prompt, max_tokens=400)))
    running.start()
    wait_until(lambda: own.in_use() > 0, 5)
    refused = httpx.post(own.url + "/reset_prefix_cache")
    assert refused.status_code == 409
    error = refused.json()["error"]
    assert error["busy_blocks"] > 0
    assert f"{error['busy_blocks']} blocks are in use" in error["message"]

    forced = httpx.post(own.url + "/reset_prefix_cache?force=true")
    assert forced.status_code == 200
    assert forced.json()["preempted_requests"] == 1
    running.join(20)
    assert answers[0]["usage"]["completion_tokens"] == 400


def test_counters_are_there_when_the_answer_is(own: Server) -> None:
    prompt = "counted: " + PROMPT
    n = len(prompt)
    for n_cached in (0, n // 16 * 16):
        before = own.metrics()
        answer = own.complete(prompt, max_tokens=3)
        after = own.metrics()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == n_cached

        def grown(name: str, before: dict[str, float] = before, after: dict[str, float] = after) -> float:
            return after[name] - before[name]

        assert grown("headwater_prefix_cache_queries_total") == n
        assert grown("headwater_prefix_cache_hits_total") == n_cached
        assert grown('headwater_requests_total{finish_reason="length"}') == 1
        assert grown("headwater_time_to_first_token_seconds_count") == 1
        assert grown("headwater_inter_token_latency_seconds_count") == 2
        for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
            assert grown(f"headwater_{name}_seconds_count") == 1
        assert grown("headwater_step_seconds_count") >= 3
        assert grown("headwater_step_model_seconds_count") == grown("headwater_step_seconds_count")


def test_every_metric_has_the_models_label_and_a_help(own: Server) -> None:
    text = httpx.get(own.url + "/metrics").text
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert all('model_name="fake"' in line and line.startswith("headwater_") for line in samples)
    for name in ("headwater_kv_blocks", "headwater_preemptions_total", "headwater_min_reusable_tokens"):
        assert f"# HELP {name} " in text
    states = {name for name in own.metrics() if name.startswith("headwater_kv_blocks{")}
    assert states == {f'headwater_kv_blocks{{state="{state}"}}' for state in ("in_use", "evictable", "free")}


def test_a_full_queue_is_a_503_and_harms_nobody() -> None:
    with fake_server("step_ms=20&max_num_seqs=1") as server:
        asking = [
            threading.Thread(target=lambda: server.complete("x", max_tokens=100)),
            threading.Thread(target=lambda: server.complete(["x"] * 8, max_tokens=10)),
        ]
        asking[0].start()
        wait_until(lambda: server.running() == 1, 5)
        asking[1].start()
        wait_until(lambda: server.waiting() == 8, 5)
        answer = server.post("/v1/completions", {"prompt": "y", "max_tokens": 1})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "overloaded"
        assert answer.headers["retry-after"] == "1"
        for thread in asking:
            thread.join(30)
        server.check_alive()


def test_a_model_without_a_template_refuses_chat_only() -> None:
    with fake_server("no_template=1") as server:
        body = {"messages": [{"role": "user", "content": "x"}]}
        error = server.refused(body, "/v1/chat/completions")
        assert error["code"] == "no_chat_template"
        assert "no chat template" in error["message"]
