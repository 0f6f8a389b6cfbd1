"""A client that leaves: its request ends wherever it is, and what it held is free (B94)."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.serve.harness import Server, fake_server, wait_until

CHUNK = 64
PREFILL = "p" * (4 * CHUNK)


@pytest.fixture(scope="module")
def slow() -> Iterator[Server]:
    """One request at a time, 60 ms a step, prompts in chunks of 64 tokens."""
    with fake_server("step_ms=60&max_num_seqs=1&max_num_batched_tokens=64") as server:
        yield server
        assert server.stderr() == ""


def begin(server: Server, **body: object) -> socket.socket:
    """Send a request by hand; whoever has the socket can leave at any moment."""
    address = urlsplit(server.url)
    connection = socket.create_connection((address.hostname, address.port))
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    connection.sendall(head.encode() + b"\r\n\r\n" + content)
    return connection


def gone(server: Server) -> bool:
    metrics = server.metrics()
    return (
        metrics["headwater_requests_running"] == 0
        and metrics["headwater_requests_waiting"] == 0
        and metrics['headwater_kv_blocks{state="in_use"}'] == 0
    )


def aborted(server: Server) -> float:
    return server.metrics()['headwater_requests_total{finish_reason="abort"}']


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_the_queue_b94a(slow: Server, stream: bool) -> None:
    n_aborted = aborted(slow)
    runs = begin(slow, prompt="running", max_tokens=1000, stream=True)
    wait_until(lambda: slow.running() == 1, 5)
    waits = begin(slow, prompt="waiting", max_tokens=1000, stream=stream)
    wait_until(lambda: slow.waiting() == 1, 5)
    waits.close()
    wait_until(lambda: slow.waiting() == 0, 1)
    assert slow.running() == 1
    runs.close()
    wait_until(lambda: gone(slow), 1)
    assert aborted(slow) == n_aborted + 2


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_in_prefill_keeps_the_blocks_that_are_complete_b94b(slow: Server, stream: bool) -> None:
    prompt = f"{stream} " + PREFILL
    connection = begin(slow, prompt=prompt, max_tokens=1000, stream=stream)
    wait_until(lambda: slow.in_use() >= CHUNK / 16, 5)
    connection.close()
    wait_until(lambda: gone(slow), 1)
    cached = slow.complete(prompt, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached in (CHUNK, 2 * CHUNK, 3 * CHUNK)


def test_leaving_after_three_events_b94c(slow: Server) -> None:
    connection = begin(slow, prompt="decoding", max_tokens=1000, stream=True)
    received = b""
    while received.count(b"data: ") < 3:
        received += connection.recv(65536)
    assert slow.running() == 1
    connection.close()
    wait_until(lambda: gone(slow), 1)


def test_leaving_a_request_that_does_not_stream_b94d(slow: Server) -> None:
    connection = begin(slow, prompt="not streaming", max_tokens=1000)
    wait_until(lambda: slow.running() == 1, 5)
    connection.close()
    wait_until(lambda: gone(slow), 1)


def test_leaving_with_several_prompts_ends_them_all(slow: Server) -> None:
    connection = begin(slow, prompt=["one", "two", "three"], max_tokens=1000, stream=True)
    wait_until(lambda: slow.running() + slow.waiting() == 3, 5)
    connection.close()
    wait_until(lambda: gone(slow), 1)


def test_half_closing_is_leaving(slow: Server) -> None:
    connection = begin(slow, prompt="half closed", max_tokens=1000)
    wait_until(lambda: slow.running() == 1, 5)
    connection.shutdown(socket.SHUT_WR)
    wait_until(lambda: gone(slow), 1)
    connection.close()


def test_leaving_in_the_middle_of_the_body_harms_nobody(slow: Server) -> None:
    address = urlsplit(slow.url)
    connection = socket.create_connection((address.hostname, address.port))
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
    )
    connection.close()
    slow.check_alive()
