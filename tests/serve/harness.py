"""Real server processes for tests, and plain HTTP to them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parent.parent.parent

PYTHON_PATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
"""For processes that import from `tests`."""

PROMPT = "The quick brown fox jumps over the lazy dog, again and again. "


@dataclass
class Server:
    """A server process; ``log`` is where its stderr goes."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        content = json.dumps(body)  # ASCII: a lone surrogate travels as an escape
        headers = {"content-type": "application/json"}
        return httpx.post(self.url + path, content=content, headers=headers, timeout=120, **more)

    def complete(self, prompt: Any = PROMPT, **fields: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", {"prompt": prompt, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    def refused(self, body: Any, path: str = "/v1/completions", status: int = 400) -> dict[str, Any]:
        """The error object of a request that must be refused, while the server goes on answering."""
        response = self.post(path, body)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert set(error) >= {"message", "type", "param", "code"}
        self.check_alive()
        return error

    def check_alive(self) -> None:
        assert self.complete("good", max_tokens=1)["usage"]["completion_tokens"] == 1

    def metrics(self) -> dict[str, float]:
        """Every sample by its name and labels, the model's left out."""
        text = httpx.get(self.url + "/metrics", timeout=30).text
        samples = {}
        for line in text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = re.sub(r'model_name="[^"]*",?', "", name).replace(",}", "}").replace("{}", "")
                samples[name] = float(value)
        return samples

    def in_use(self) -> float:
        return self.metrics()['headwater_kv_blocks{state="in_use"}']

    def running(self) -> float:
        return self.metrics()["headwater_requests_running"]

    def waiting(self) -> float:
        return self.metrics()["headwater_requests_waiting"]

    def engine_pid(self) -> int:
        """The one child process."""
        return children(self.process.pid)[0]

    def stderr(self) -> str:
        return self.log.read_text()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def exists(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], within_s: float) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, f"not within {within_s} s"
        time.sleep(0.01)


@contextmanager
def launched(command: list[str], ready: str = r"^ready (http\S+)", within_s: float = 120) -> Iterator[Server]:
    """Run ``command`` until the block ends; the server's URL is in the first line that matches ``ready``."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "stderr"
        with log.open("w") as stderr:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHON_PATH},
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        try:
            yield Server(process, _url(process, ready, log), log)
        finally:
            process.terminate()
            try:
                process.wait(20)
            finally:
                process.kill()
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()


def _url(process: subprocess.Popen[str], ready: str, log: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if (found := re.search(ready, line)) is not None:
            return found[1]
    raise AssertionError(f"the server did not start: {log.read_text()}")


def fake_command(settings: str = "", port: int = 0) -> list[str]:
    return [sys.executable, "-m", "tests.serve.fake_server", f"fake?{settings}", str(port)]


@contextmanager
def fake_server(settings: str = "") -> Iterator[Server]:
    with launched(fake_command(settings)) as server:
        yield server


def events_of(raw: str) -> list[Any]:
    """The events of a whole stream, strictly: each is one line of data and a blank one. "[DONE]" stays text."""
    assert raw.endswith("\n\n")
    events: list[Any] = []
    for block in raw[:-2].split("\n\n"):
        assert block.startswith("data: ")
        assert "\n" not in block
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events
