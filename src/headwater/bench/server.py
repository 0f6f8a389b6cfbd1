"""The server under test: started by command and stopped, or already running; and what it says of itself."""

from __future__ import annotations

import contextlib
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from headwater.errors import BenchError, ConfigError

PLACEHOLDER = re.compile(r"\{(\w+)\}")
PLACEHOLDERS = ("port", "caching_flags", "pool_flags", "num_blocks", "pool_tokens", "caching", "interference")
START_S = 600.0
STOP_S = 30.0
SHOWN_LINES = 15
"""How much of a failed server's output an error shows."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a running server says of itself; None where it does not."""

    model: str
    max_model_len: int | None
    version: str | None
    owned_by: str | None


def api_base(url: str) -> str:
    """The address under which /completions and /models are: ``url``, with /v1 unless it has a path already.

    Raises ConfigError for what is no address.
    """
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        port_is_fine = parts.port is None or parts.port > 0
    except ValueError:
        port_is_fine = False
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_fine:
        raise ConfigError(f"--url {url!r} is no address: write it like http://127.0.0.1:8000")
    path = parts.path.rstrip("/") or "/v1"
    return f"{parts.scheme}://{parts.netloc}{path}"


def fill(template: str, values: Mapping[str, str]) -> list[str]:
    """The command with its placeholders filled in. Raises ConfigError for an unknown one, or a quote left open."""
    for name in PLACEHOLDER.findall(template):
        if name not in PLACEHOLDERS:
            known = ", ".join(f"{{{known}}}" for known in PLACEHOLDERS)
            raise ConfigError(f"--start-command has an unknown placeholder {{{name}}}; there are {known}")
    try:
        words = shlex.split(template)
    except ValueError as error:
        raise ConfigError(f"--start-command cannot be read: {error}") from None
    if not words:
        raise ConfigError("--start-command is empty")
    filled: list[str] = []
    for word in words:
        text = PLACEHOLDER.sub(lambda found: values.get(found[1], ""), word)
        # A placeholder that is a word of its own may become several words, or none.
        filled += shlex.split(text) if PLACEHOLDER.fullmatch(word) else [text]
    return filled


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class StartedServer:
    """A server process. ``alive`` is False once it ended by itself."""

    def __init__(self, process: subprocess.Popen[bytes], base_url: str, log: Path, start_s: float) -> None:
        self._process = process
        self.base_url = base_url
        self.log = log
        self.start_s = start_s
        """From the command to the first answer."""

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def last_words(self) -> str:
        """The end of its output, for an error."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(f"  | {line[:300]}" for line in lines[-SHOWN_LINES:] if line.strip())


@contextlib.contextmanager
def started(command: list[str], base_url: str, log: Path, start_limit_s: float = START_S) -> Iterator[StartedServer]:
    """Run ``command`` until the block ends; its output is added to ``log``. Yields once its API answers.

    It is run by a guard, and so ends also when this process is killed. Raises BenchError, with the end of its output,
    when it does not start.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with log.open("ab") as output:
        output.write(f"$ {shlex.join(command)}\n".encode())
        output.flush()
        process = subprocess.Popen(
            [sys.executable, "-m", "headwater.bench.guard", *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = StartedServer(process, base_url, log, 0.0)
    try:
        _wait_for_answer(server, command, start_limit_s)
        server.start_s = time.monotonic() - begun
        yield server
    finally:
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_answer(server: StartedServer, command: list[str], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    with httpx.Client(timeout=5.0, trust_env=False) as client:
        while True:
            if not server.alive:
                raise BenchError(
                    f"the server ended before it answered: {shlex.join(command)}\n{server.last_words()}\n"
                    f"its whole output is in {server.log}"
                )
            # Not there yet, or not ready yet: asked again.
            with contextlib.suppress(httpx.HTTPError):
                if client.get(f"{server.base_url}/models").status_code < 500:
                    return
            if time.monotonic() > end:
                raise BenchError(
                    f"no answer from {server.base_url}/models {limit_s:.0f} s after starting {shlex.join(command)}: "
                    f"does it listen on the {{port}} that it was given? Its output is in {server.log}"
                )
            time.sleep(0.1)


def facts(base_url: str, headers: dict[str, str], model: str | None) -> ServerFacts:
    """Ask the server what it serves. Raises BenchError when it cannot be reached, or has no such model."""
    with httpx.Client(headers=headers, timeout=10.0, trust_env=False) as client:
        try:
            response = client.get(f"{base_url}/models")
        except httpx.HTTPError as error:
            raise BenchError(
                f"no server answers at {base_url} ({error or type(error).__name__}): start one there, or correct --url"
            ) from None
        if response.status_code in (401, 403):
            raise BenchError(f"{base_url} refuses without a key (HTTP {response.status_code}): give it with --api-key")
        cards = _cards(response)
        if not cards and model is None:
            raise BenchError(
                f"{base_url}/models lists no model (HTTP {response.status_code}): is this the API's base address? "
                "Name the model with --served-model if the server has no such list"
            )
        names = [str(card.get("id")) for card in cards]
        if model is not None and names and model not in names:
            raise BenchError(f"{base_url} serves no model {model!r}; it lists {', '.join(names)}")
        chosen = model if model is not None else names[0]
        card = next((card for card in cards if card.get("id") == chosen), {})
        root = f"{urlsplit(base_url).scheme}://{urlsplit(base_url).netloc}"
        limit = _limit(card) or _llamacpp_limit(_json(client, f"{root}/props"))
        version = _json(client, f"{root}/version").get("version")
    owner = card.get("owned_by")
    return ServerFacts(chosen, limit, str(version) if version else None, str(owner) if owner else None)


def _cards(response: httpx.Response) -> list[dict[str, Any]]:
    try:
        body = response.json()
    except ValueError:
        return []
    data = body.get("data") if isinstance(body, dict) else None
    return [card for card in data if isinstance(card, dict) and card.get("id")] if isinstance(data, list) else []


def _json(client: httpx.Client, url: str) -> dict[str, Any]:
    """A JSON object that not every server has; {} from those."""
    try:
        response = client.get(url)
        body = response.json() if response.status_code == 200 else {}
    except (httpx.HTTPError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}


def _limit(card: Mapping[str, Any]) -> int | None:
    """The context limit in a model's card, by the name that vLLM and Headwater use."""
    limit = card.get("max_model_len")
    return limit if isinstance(limit, int) else None


def _llamacpp_limit(props: Mapping[str, Any]) -> int | None:
    """llama.cpp tells the context of one slot."""
    settings = props.get("default_generation_settings")
    limit = settings.get("n_ctx") if isinstance(settings, dict) else None
    return limit if isinstance(limit, int) else None
