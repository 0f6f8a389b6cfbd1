"""`headwater top`, on a server whose cache is real."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from headwater.cli import main
from headwater.cli.top import sparkline
from tests.serve.harness import PYTHON_PATH, Server, launched

PROMPT = "A headwater is where a river begins, far from its mouth. "


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with launched([sys.executable, "-m", "tests.serve.ui.real_cache", "fake?blocks=64", "0"]) as server:
        for end in ("A", "B"):
            server.complete(PROMPT + end, max_tokens=3)
        server.complete("\x1b[31m\x1b]0;owned\x07 and a long enough rest \x9b31m", max_tokens=1)
        yield server


def once(server: Server, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    assert main(["top", "--url", server.url, "--once", *more]) == 0
    return capsys.readouterr().out


def test_once_shows_the_essentials(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    shown = once(server, capsys)
    n_hit = len(PROMPT) // 16 * 16
    n_all = 2 * len(PROMPT + "A") + len("\x1b[31m\x1b]0;owned\x07 and a long enough rest \x9b31m".encode())
    assert f"{n_hit} of {n_all} prompt tokens" in shown
    assert "fake at http://127.0.0.1" in shown
    blocks = re.search(r"(\d+) in use .* (\d+) cached .* (\d+) free", shown)
    assert blocks is not None and sum(map(int, blocks.groups())) == 64 and int(blocks[2]) > 3
    assert "A headwater is where a river beg" in shown
    assert "namespace" in shown and f"{n_hit * 100 // len(PROMPT + 'B')} %" in shown
    assert "differs" in shown or "fills no block" in shown


def test_what_prompts_hold_is_nothing_that_a_terminal_obeys(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    shown = once(server, capsys)
    assert "owned" in shown
    assert not [c for c in shown if not c.isprintable() and c != "\n"]


def test_no_server_and_a_wrong_address_are_errors_that_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", "http://127.0.0.1:9", "--once"]) == 1
    assert "no Headwater server answers at http://127.0.0.1:9" in capsys.readouterr().err
    assert main(["top", "--url", "file:///etc/passwd", "--once"]) == 1
    assert "must begin with http://" in capsys.readouterr().err


def test_it_needs_the_admin_key_and_takes_it_from_the_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-m", "tests.serve.ui.real_cache", "fake", "0", "--api-key", "tenant"]
    with launched([*command, "--admin-key", "boss"]) as server:
        assert main(["top", "--url", server.url, "--once"]) == 1
        assert "--admin-key" in capsys.readouterr().err
        monkeypatch.setenv("HEADWATER_ADMIN_KEY", "boss")
        assert "256 free" in once(server, capsys)


def test_in_a_terminal_it_lives_until_q(server: Server) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "headwater", "top", "--url", server.url, "--interval", "0.5"]
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment, close_fds=True)
    os.close(slave)
    try:
        shown, end = b"", time.monotonic() + 30
        while shown.count(b"prompt tokens") < 3:  # drawn three times
            assert time.monotonic() < end, shown
            if select.select([master], [], [], 0.1)[0]:
                shown += os.read(master, 65536)
        os.write(master, b"xq")
        end = time.monotonic() + 10
        while process.poll() is None:
            assert time.monotonic() < end
            if select.select([master], [], [], 0.1)[0]:
                try:
                    shown += os.read(master, 65536)
                except OSError:  # its side is closed
                    break
        assert process.wait(10) == 0
        assert shown.count(b"\x1b[?1049h") == shown.count(b"\x1b[?1049l") == 1  # the screen is given back
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_a_sparkline_fills_its_highest_cell() -> None:
    assert sparkline([0, 1, 4, 8]) == " ▁▄█"
    assert sparkline([0.0, 0.0]) == "  " and sparkline([]) == ""
