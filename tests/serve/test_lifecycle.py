"""Starting and stopping a server process: in order, in bounded time, without tracebacks or leftovers."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import httpx
import pytest

from headwater.serve.run import bind
from tests.serve.harness import ROOT, children, events_of, exists, fake_command, fake_server, launched, wait_until


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_an_idle_server_cleanly(
    signal_number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with fake_server() as server:
        engine = server.engine_pid()
        assert [folder.name[:10] for folder in tmp_path.iterdir()] == ["headwater-"]
        server.process.send_signal(signal_number)
        assert server.process.wait(5) == 0
        assert server.stderr() == ""
        assert not exists(engine)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_process_group_is_clean(signal_number: int) -> None:
    """Ctrl-C in a terminal, or a service manager."""
    process = subprocess.Popen(
        fake_command("step_ms=5"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready")
        (engine,) = children(process.pid)
        os.killpg(process.pid, signal_number)
        _, stderr = process.communicate(timeout=8)
        assert (process.returncode, stderr) == (0, "")
        assert not exists(engine)
    finally:
        process.kill()


def test_a_signal_ends_streams_with_an_error_event() -> None:
    with fake_server("step_ms=20") as server:
        received: list[str] = []

        def read() -> None:
            body = {"prompt": "x", "max_tokens": 4000, "stream": True}
            with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=30) as response:
                received.extend(response.iter_text())

        reading = threading.Thread(target=read)
        reading.start()
        wait_until(lambda: len(received) > 2, 5)
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(8) == 0
        assert time.monotonic() - start < 5
        reading.join(5)
        assert "shutting down" in events_of("".join(received))[-1]["error"]["message"]
        assert server.stderr() == ""


def test_a_signal_in_the_middle_of_a_long_step_stops_in_bounded_time() -> None:
    with fake_server("step_ms=60000") as server:
        engine = server.engine_pid()
        with pytest.raises(httpx.TimeoutException):
            httpx.post(server.url + "/v1/completions", json={"prompt": "x"}, timeout=0.5)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(8) == 0
        assert not exists(engine)
        assert server.stderr() == ""


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_loading_stops_cleanly(signal_number: signal.Signals) -> None:
    process = subprocess.Popen(fake_command("load_s=60"), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: len(children(process.pid)) == 1, 10)
        (engine,) = children(process.pid)
        process.send_signal(signal_number)
        _, stderr = process.communicate(timeout=8)
        assert (process.returncode, stderr) == (0, "")
        assert not exists(engine)
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("settings", "message"), [("missing=1", "error: no such model: fake\n"), ("max_model_len=x", "ValueError")]
)
def test_an_engine_that_cannot_start_is_told_and_nothing_stays(settings: str, message: str) -> None:
    done = subprocess.run(fake_command(settings), cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert message in done.stderr
    if settings == "missing=1":  # a known fault is one line
        assert done.stderr == message


def test_a_port_in_use_is_one_clear_line_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        start = time.monotonic()
        command = fake_command("load_s=60", port)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert done.stderr == f"error: port {port} on 127.0.0.1 is in use: choose another with --port, 0 for any\n"
    assert time.monotonic() - start < 20


def test_nobody_connects_before_the_engine_is_ready() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(fake_command("load_s=60", port), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: len(children(process.pid)) == 1, 10)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{port}/health", timeout=5)
    finally:
        process.terminate()
        process.communicate(timeout=10)


def test_a_restart_on_the_same_port_works_at_once() -> None:
    with fake_server() as server:
        server.check_alive()
        port = int(server.url.rsplit(":", 1)[1])
    with launched(fake_command("", port)) as again:
        again.check_alive()


def test_a_long_temporary_folder_does_not_break_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:
        deep = f"{folder}/{'x' * 120}"
        subprocess.run(["mkdir", deep], check=True)
        monkeypatch.setenv("TMPDIR", deep)
        with fake_server() as server:
            server.check_alive()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_answers_do_not_wait_for_the_clients_acknowledgement(host: str) -> None:
    """With Nagle's algorithm each later answer on a connection, and each event of a stream, comes some 40 ms late.

    asyncio turns it off only for sockets that say that they are TCP.
    """

    async def nodelay_of_what_is_accepted() -> int:
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listening = bind(host, 0)
        server = await asyncio.start_server(connected, sock=listening)
        _, writer = await asyncio.open_connection(host, listening.getsockname()[1])
        nodelay = await asyncio.wait_for(accepted, 10)
        writer.close()
        server.close()
        return nodelay

    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        pytest.skip(f"this machine has no {host}")
    assert asyncio.run(nodelay_of_what_is_accepted()) != 0
