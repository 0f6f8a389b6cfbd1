"""A completions server with known delays, a known prefix cache, and known faults:
``python -m tests.bench.fake_server --port N [options]``. It writes down when it sent every event.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK = 16
FAULTS = ("die", "stall", "broken", "cut", "error", "http500", "reset", "no_done", "close")
ROOT = Path(__file__).parent.parent.parent


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--log", help="JSON lines: each request with the monotonic times at which its events were sent")
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--num-blocks", type=int, default=100_000)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--base-ms", type=float, default=2.0, help="each request, before its first token")
    parser.add_argument("--token-ms", type=float, default=0.01, help="each computed prompt token")
    parser.add_argument("--itl-ms", type=float, default=2.0)
    parser.add_argument("--counters", choices=("headwater", "vllm", "none"), default="headwater")
    parser.add_argument("--counters-late-ms", type=float, default=0.0, help="counters move so long after the answer")
    parser.add_argument("--no-usage", action="store_true")
    parser.add_argument("--no-cached-usage", action="store_true")
    parser.add_argument("--no-counts", action="store_true", help="events do not tell the tokens so far")
    parser.add_argument("--text-only", action="store_true", help="prompts of token ids are refused")
    parser.add_argument("--long-words", default="", help="comma-separated words that are two tokens")
    parser.add_argument("--bos", type=int, default=0, help="tokens added to every prompt")
    parser.add_argument("--salt", choices=("kept", "ignored", "refused"), default="kept")
    parser.add_argument("--strict", action="store_true", help="refuses ignore_eos and stream_options")
    parser.add_argument("--tokens-per-event", type=int, default=1)
    parser.add_argument("--half-characters", action="store_true", help="chunks end inside a character, and an event")
    parser.add_argument("--warm", action="store_true", help="counters are those of a server that was used before")
    parser.add_argument("--all-hits", action="store_true", help="claims that every prompt was cached")
    parser.add_argument("--never-evicts", action="store_true")
    parser.add_argument("--fault", action="append", default=[], help="KIND@N: of the Nth request; N+: and all later")
    parser.add_argument("--fault-once", help="a file whose existence means that the fault has happened")
    return parser


@dataclass
class Cache:
    """Which full blocks are cached, the least recently used first, found by all tokens up to their end."""

    n_blocks: int
    blocks: OrderedDict[tuple[Any, ...], None] = field(default_factory=OrderedDict)
    evictions: int = 0

    def hit(self, key: tuple[Any, ...], tokens: list[Any]) -> int:
        """Cached tokens: whole blocks, at most all but the last token."""
        n = 0
        while n + BLOCK < len(tokens) and (*key, *tokens[: n + BLOCK]) in self.blocks:
            n += BLOCK
        return n

    def add(self, key: tuple[Any, ...], tokens: list[Any]) -> None:
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            block = (*key, *tokens[:end])
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > self.n_blocks:
            self.blocks.popitem(last=False)
            self.evictions += 1


class FakeServer:
    """Answers one completions request after the other, or several at once without making them slower."""

    def __init__(self, settings: argparse.Namespace) -> None:
        self.settings = settings
        blocks = 10**9 if settings.never_evicts else settings.num_blocks
        self.cache = Cache(blocks)
        self.n_requests = 0
        self.counters = dict.fromkeys(
            ("queries", "hits", "prompt", "generated", "requests", "timed", "queue_s", "prefill_s", "decode_s"), 0.0
        )
        if settings.warm:
            self.counters.update(queries=500.0, hits=100.0, prompt=500.0, generated=9.0, requests=3.0, timed=3.0)
        self.log = open(settings.log, "a") if settings.log else None  # noqa: SIM115 (kept for the process's life)

    async def serve(self) -> None:
        server = await asyncio.start_server(self.connection, "127.0.0.1", self.settings.port, limit=1 << 26)
        async with server:
            await server.serve_forever()

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                method, path, _ = line.decode().split()
                length = 0
                while (header := (await reader.readline()).strip()) != b"":
                    name, _, value = header.partition(b":")
                    if name.lower() == b"content-length":
                        length = int(value)
                body = await reader.readexactly(length)
                await self.answer(method, path, body, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def answer(self, method: str, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            card = {"id": "fake", "object": "model", "owned_by": "fake", "max_model_len": self.settings.max_model_len}
            await self.plain(writer, 200, {"object": "list", "data": [card]})
        elif path == "/version":
            await self.plain(writer, 200, {"version": "9.9"})
        elif path == "/metrics" and self.settings.counters != "none":
            await self.plain(writer, 200, self.metrics())
        elif path == "/v1/completions" and method == "POST":
            await self.complete(json.loads(body), writer)
        else:
            await self.plain(writer, 404, {"error": {"message": f"no {path}"}})

    async def plain(self, writer: asyncio.StreamWriter, status: int, body: Any) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        kind = "text/plain" if isinstance(body, str) else "application/json"
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()

    # ---- completions

    def tokens(self, prompt: Any) -> list[Any]:
        if isinstance(prompt, str):
            long = set(self.settings.long_words.split(","))
            given = [part for word in prompt.split(" ") for part in ([word, "##"] if word in long else [word])]
        else:
            given = list(prompt)
        return ["<s>"] * self.settings.bos + given

    def refusal(self, asked: dict[str, Any]) -> str | None:
        given = self.settings
        if given.text_only and not isinstance(asked["prompt"], str):
            return "prompt must be a text"
        if given.strict and ("ignore_eos" in asked or "stream_options" in asked):
            return "unknown field"
        if given.salt == "refused" and "cache_salt" in asked:
            return "unknown field cache_salt"
        if given.no_counts and "continuous_usage_stats" in asked.get("stream_options", {}):
            return "unknown field continuous_usage_stats"
        n_prompt = len(self.tokens(asked["prompt"]))
        if n_prompt + asked["max_tokens"] > given.max_model_len:
            return f"{n_prompt} tokens and {asked['max_tokens']} are too many"
        return None

    def fault(self, asked: dict[str, Any]) -> str | None:
        """What goes wrong with this request: as it asks itself, or as the options say."""
        if "fault" in asked:
            return str(asked["fault"])
        for given in self.settings.fault:
            kind, _, at = given.partition("@")
            if kind not in FAULTS:
                raise ValueError(f"no fault {kind}")
            first = int(at.rstrip("+"))
            if self.n_requests == first or (at.endswith("+") and self.n_requests > first):
                return self._once(kind)
        return None

    def _once(self, kind: str) -> str | None:
        if self.settings.fault_once is not None:
            if Path(self.settings.fault_once).exists():
                return None
            Path(self.settings.fault_once).touch()
        return kind

    async def complete(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        begun = time.monotonic()
        self.n_requests += 1
        fault = self.fault(asked)
        if fault == "close":  # as a server does whose kept connection has run out
            raise ConnectionResetError
        if fault == "http500":
            await self.plain(writer, 500, {"error": {"message": "it broke"}})
            return
        if (refused := self.refusal(asked)) is not None:
            await self.plain(writer, 400, {"error": {"message": refused}})
            return
        tokens = self.tokens(asked["prompt"])
        key = (asked.get("cache_salt") if self.settings.salt == "kept" else None,)
        cached = self.cache.hit(key, tokens) if self.settings.enable_prefix_caching else 0
        reported = len(tokens) - 1 if self.settings.all_hits else cached
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        times = await self.stream(asked, writer, begun, len(tokens), cached, reported, fault)
        if self.log is not None:
            record = {"begun": begun, "times": times, "prompt": len(tokens), "cached": cached}
            print(json.dumps(record), file=self.log, flush=True)

    async def stream(
        self,
        asked: dict[str, Any],
        writer: asyncio.StreamWriter,
        begun: float,
        n_prompt: int,
        cached: int,
        reported: int,
        fault: str | None,
    ) -> list[float]:
        given, times, n_sent = self.settings, [], 0
        due = begun + (given.base_ms + given.token_ms * (n_prompt - cached)) / 1e3
        self.cache.add((asked.get("cache_salt") if given.salt == "kept" else None,), self.tokens(asked["prompt"]))
        while n_sent < asked["max_tokens"]:
            n_now = min(given.tokens_per_event, asked["max_tokens"] - n_sent)
            await until(due + (n_now - 1) * given.itl_ms / 1e3)
            if n_sent and fault is not None and not await self.fails(fault, writer):
                return times
            n_sent += n_now
            event: dict[str, Any] = {"id": "x", "choices": [{"index": 0, "text": " è" * n_now, "finish_reason": None}]}
            if n_sent == asked["max_tokens"]:
                event["choices"][0]["finish_reason"] = "length"
            if asked.get("stream_options", {}).get("continuous_usage_stats"):
                event["usage"] = self.usage(n_prompt, n_sent, reported)
            times.append(time.monotonic())
            await self.event(writer, json.dumps(event, ensure_ascii=False).encode())
            due += n_now * given.itl_ms / 1e3
        if asked.get("stream_options", {}).get("include_usage") and not given.no_usage:
            usage = {"id": "x", "choices": [], "usage": self.usage(n_prompt, n_sent, reported)}
            await self.event(writer, json.dumps(usage).encode())
        counted = asyncio.create_task(self.count(n_prompt, reported, n_sent, begun, times))
        if given.counters_late_ms == 0:
            await counted
        if fault != "no_done":
            await self.event(writer, b"[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        await counted
        return times

    async def count(self, n_prompt: int, cached: int, n_sent: int, begun: float, times: list[float]) -> None:
        await asyncio.sleep(self.settings.counters_late_ms / 1e3)
        if self.settings.enable_prefix_caching or self.settings.all_hits:
            self.counters["queries"] += n_prompt
            self.counters["hits"] += cached
        moved = {"prompt": n_prompt, "generated": n_sent, "requests": 1, "timed": 1, "queue_s": 0.001}
        moved |= {"prefill_s": times[0] - begun - 0.001, "decode_s": times[-1] - times[0]}
        for name, by in moved.items():
            self.counters[name] += by

    def usage(self, n_prompt: int, n_sent: int, cached: int) -> dict[str, Any]:
        usage: dict[str, Any] = {"prompt_tokens": n_prompt, "completion_tokens": n_sent}
        if not self.settings.no_cached_usage:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return usage

    async def fails(self, fault: str, writer: asyncio.StreamWriter) -> bool:
        """Do the fault, after the first event; True: the stream goes on all the same."""
        if fault == "die":
            os._exit(17)
        if fault == "stall":
            await asyncio.sleep(3600)
        if fault == "broken":
            await self.event(writer, b'{"choices": [{"text": "\xff')
        if fault == "error":
            await self.event(writer, b'{"error": {"message": "the engine is on fire"}}')
        if fault == "cut":
            await self.chunk(writer, b'data: {"choices": [{"text": " \xc3')
            await self.chunk(writer, b"")
        if fault == "reset":
            writer.transport.abort()
            raise ConnectionResetError
        return fault == "no_done"

    async def event(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        whole = b"data: " + data + b"\n\n"
        cut = whole.find(b"\xc3") + 1 if self.settings.half_characters else 0
        for part in (whole[:cut], whole[cut:]):
            if part:
                await self.chunk(writer, part)
                if part is not whole and cut:
                    await asyncio.sleep(0.0005)

    async def chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await writer.drain()

    # ---- metrics

    def metrics(self) -> str:
        c = self.counters
        if self.settings.counters == "vllm":
            pool = f'vllm:cache_config_info{{block_size="{BLOCK}",num_gpu_blocks="{self.settings.num_blocks}"}} 1.0'
            rows = {
                "vllm:prefix_cache_queries_total": c["queries"],
                "vllm:prefix_cache_hits_total": c["hits"],
                "vllm:prompt_tokens_total": c["prompt"],
                "vllm:generation_tokens_total": c["generated"],
                "vllm:request_prefill_time_seconds_count": c["timed"],
                "vllm:request_queue_time_seconds_sum": c["queue_s"],
                "vllm:request_prefill_time_seconds_sum": c["prefill_s"],
                "vllm:request_decode_time_seconds_sum": c["decode_s"],
            }
            lines = [f'{name}{{engine="0",model_name="fake"}} {value!r}' for name, value in rows.items()]
            done = f'vllm:request_success_total{{finished_reason="length",model_name="fake"}} {c["requests"]!r}'
            return "\n".join(["# HELP something", *lines, done, pool, ""])
        rows = {
            "prefix_cache_queries_total": c["queries"],
            "prefix_cache_hits_total": c["hits"],
            "prefix_cache_copied_tokens_total": 0.0,
            "prefix_cache_evictions_total": float(self.cache.evictions),
            "prompt_tokens_total": c["prompt"],
            "prompt_tokens_computed_total": c["prompt"] - c["hits"],
            "generation_tokens_total": c["generated"],
            "request_prefill_time_seconds_count": c["timed"],
            "request_queue_time_seconds_sum": c["queue_s"],
            "request_prefill_time_seconds_sum": c["prefill_s"],
            "request_decode_time_seconds_sum": c["decode_s"],
            "kv_pool_blocks": float(self.settings.num_blocks),
            "min_reusable_tokens": float(BLOCK),
        }
        lines = [f'headwater_{name}{{model_name="fake"}} {value!r}' for name, value in rows.items()]
        evictable = 7.0 if self.settings.warm else float(len(self.cache.blocks))
        lines.append(f'headwater_kv_blocks{{model_name="fake",state="evictable"}} {evictable!r}')
        lines.append(f'headwater_requests_total{{finish_reason="length",model_name="fake"}} {c["requests"]!r}')
        lines.append('headwater_requests_total{finish_reason="stop",model_name="fake"} 0.0')
        return "\n".join([*lines, ""])


async def until(moment: float) -> None:
    """Sleep until ``moment`` on the monotonic clock, the last stretch awake: timers are late."""
    await asyncio.sleep(max(0.0, moment - time.monotonic() - 0.0015))
    while time.monotonic() < moment:
        await asyncio.sleep(0)


def command(*options: str, port: str = "{port}") -> list[str]:
    """The command of a fake server."""
    return [sys.executable, "-m", "tests.bench.fake_server", "--port", port, *options]


@contextmanager
def fake_server(*options: str) -> Iterator[str]:
    """A running fake server; yields its address."""
    import httpx  # here: the server itself starts sooner without

    from headwater.bench.server import free_port

    port = free_port()
    process = subprocess.Popen(
        command(*options, port=str(port)), cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    )
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 20
        while True:
            try:
                httpx.get(f"{url}/v1/models", timeout=1, trust_env=False)
                break
            except httpx.HTTPError:
                if time.monotonic() > end or process.poll() is not None:
                    raise
                time.sleep(0.02)
        yield url
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    asyncio.run(FakeServer(make_parser().parse_args()).serve())
