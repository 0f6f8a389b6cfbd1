"""``headwater demo``: a server of its own, real HTTP, and what the prefix cache saved."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from headwater.cli.key_arguments import VARIABLES
from headwater.engine.options import OPTIONS
from headwater.errors import EngineError

RULES = (
    "You are the guide of a small museum about rivers. Answer in one short sentence. Be friendly and exact. "
    "Never invent a number. If you do not know, say so. Explain rare words. Do not use lists. Do not use headings. "
    "The museum opens at nine and closes at five. The map room is on the first floor, the models are in the cellar. "
    "A spring is where water leaves the ground. A headwater is where a river begins, far from its mouth. "
    "A tributary flows into a larger river. A confluence is where two rivers meet. A delta is built by what a river "
    "carries to the sea. A watershed parts the rain of one river from the rain of another. "
)
SYSTEM = RULES * 6
"""One long system prompt, the same in every request: what a real assistant's instructions look like to a cache."""

QUESTIONS = (
    "What is a headwater?",
    "Where are the models?",
    "What is a delta?",
    "When do you close?",
    "What is a confluence?",
    "What is a watershed?",
)

STOP_S = 15.0


@dataclass(frozen=True)
class Seen:
    """What one request reported."""

    prompt_tokens: int
    cached_tokens: int
    first_token_s: float
    text: str


def run(arguments: argparse.Namespace) -> int:
    """Start a server, send the requests one after another, print a table, stop the server."""
    out = Console(highlight=False)
    with _server(arguments) as url:
        table = Table("request", "prompt tokens", "cached", "computed", "first token", "relative to first")
        for column in table.columns:
            column.justify = "right"
        first_s = 0.0
        for i in range(arguments.requests):
            question = QUESTIONS[i % len(QUESTIONS)]
            out.print(f"request {i + 1}: {question}")
            seen = ask(url, question)
            out.print(f"  {' '.join(seen.text.split())}", style="dim", markup=False)
            first_s = first_s or seen.first_token_s
            table.add_row(
                str(i + 1),
                str(seen.prompt_tokens),
                str(seen.cached_tokens),
                str(seen.prompt_tokens - seen.cached_tokens),
                f"{seen.first_token_s * 1000:.0f} ms",
                f"{seen.first_token_s / first_s:.2f}",
            )
        out.print(table)
        said = "Every request begins with the same system prompt. "
        if arguments.enable_prefix_caching is False:
            said += "Prefix caching is off: each one computes all of it."
        else:
            said += "The first one computes its KV; the others point at the same blocks and compute only what is new."
        out.print(said)
    return 0


@contextmanager
def _server(arguments: argparse.Namespace) -> Iterator[str]:
    """A server process on a free port, stopped at the end; yields its URL. It has no keys, for this machine only."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    process = subprocess.Popen(serve_command(arguments), stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield _url_of(process)
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def serve_command(arguments: argparse.Namespace) -> list[str]:
    """The command of a server with the same engine options."""
    command = [sys.executable, "-m", "headwater", "serve", "--port", "0"]
    for name in ("model_given", "model"):
        if getattr(arguments, name) is not None:
            command += ["--model", getattr(arguments, name)]
    for option in OPTIONS:
        value = getattr(arguments, option.name)
        if option.kind is bool and value is not None:
            command.append(option.flag if value else option.flag.replace("--", "--no-", 1))
        elif value is not None:
            command += [option.flag, str(value)]
    return command


def _url_of(process: subprocess.Popen[str]) -> str:
    if process.stdout is None:
        raise EngineError("the server's output cannot be read")
    for line in process.stdout:
        print(line, end="")
        if (found := re.search(r"^Serving on (http://\S+)", line)) is not None:
            return found[1]
    raise EngineError("the server did not start")


def ask(url: str, question: str) -> Seen:
    """One streamed chat request over plain HTTP."""
    body = {
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 32,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
    try:
        start = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise EngineError(f"the server refused the demo's request: {_message(response.read())}")
        return _read_stream(response, start)
    finally:
        connection.close()


def _message(body: bytes) -> str:
    """What an error answer says."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):  # not this server's own words
        return body[:500].decode(errors="replace")


def _read_stream(response: http.client.HTTPResponse, start: float) -> Seen:
    first_token_s, text = 0.0, ""
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            raise EngineError(f"the server failed: {event['error']['message']}")
        first_token_s = first_token_s or time.perf_counter() - start
        for choice in event["choices"]:
            text += choice["delta"].get("content", "")
        if (usage := event.get("usage")) is not None:
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            return Seen(usage["prompt_tokens"], cached, first_token_s, text)
    raise EngineError("the server ended the stream without its usage")
