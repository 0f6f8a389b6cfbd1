"""An engine core without a model: bytes are tokens, answers are known beforehand, time is what the test says.

The model's name carries the settings: ``fake?step_ms=5&max_model_len=256``. A prompt is answered with its own
bytes, from the start and around; the letters below make it misbehave.
"""

from __future__ import annotations

import codecs
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

from headwater.config import EngineConfig
from headwater.engine.messages import (
    Call,
    Delta,
    EngineInfo,
    EngineStats,
    Outputs,
    Refused,
    Reply,
    ResetCache,
    ResetDone,
    Submit,
    Timing,
    Usage,
)
from headwater.errors import ModelError, NoChatTemplate
from headwater.types import FinishReason, Progress

BLOCK = 16
EOS = 256
VOCAB = 260

CRASH = b"#crash"
"""A prompt that holds this kills the engine process at its third token."""
FAIL = b"#fail"
"""A prompt that holds this fails, alone, at its third token."""
IDLE = b"#idle"
"""A prompt that holds this leaves 1000 pieces of idle work behind, of ``idle_ms`` each."""
RAISE = b"#raise"
"""A prompt that holds this makes the whole step raise."""


class ByteTokenizer:
    """One token per byte; 256 is end of text."""

    vocab_size = VOCAB

    def __init__(self, *, has_template: bool = True) -> None:
        self.chat_template = "the frame below" if has_template else None

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
        return list(text.encode())

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        if self.chat_template is None:
            raise NoChatTemplate("the fake has no chat template", field="messages")
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return "".join(lines) + ("assistant: " if add_generation_prompt else "")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < EOS else b"<special>"


@dataclass
class Row:
    submit: Submit
    n_cached: int
    arrival: float
    n_computed: int
    admitted: float | None = None
    first_token: float | None = None
    out: list[int] = field(default_factory=list)
    text: str = ""
    n_sent: int = 0
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )

    @property
    def prompt(self) -> bytes:
        return bytes(token % 256 for token in self.submit.prompt_token_ids)


class FakeCore:
    doorbell = None

    def __init__(self, info: EngineInfo, step_s: float, idle_s: float = 0.0) -> None:
        self.info = info
        self._step_s = step_s
        self._idle_s = idle_s
        self._n_idle = 0
        self._waiting: list[Row] = []
        self._running: list[Row] = []
        self._cached: set[tuple[str | None, bytes]] = set()
        self._counters: dict[str, float] = {}
        self._steps: list[tuple[float, float, float]] = []

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def idle_work(self) -> bool:
        return self._n_idle > 0

    @property
    def hits_to_verify(self) -> bool:
        return self.idle_work

    def close(self) -> None: ...

    def work_idle(self) -> None:
        time.sleep(self._idle_s)
        self._n_idle -= 1
        self._count("hits_verified", 1)

    def submit(self, message: Submit) -> list[Delta]:
        if len(self._waiting) >= 8 * self.info.max_num_seqs:
            return [
                Delta(
                    message.request_id,
                    [],
                    "",
                    finish_reason=FinishReason.ERROR,
                    error="the queue is full",
                    error_kind="overloaded",
                )
            ]
        n_cached = self._hit(message)
        self._waiting.append(Row(message, n_cached, time.monotonic(), n_cached))
        return []

    def abort(self, request_id: str) -> bool:
        for rows in (self._waiting, self._running):
            for row in rows:
                if row.submit.request_id == request_id:
                    rows.remove(row)
                    self._publish(row)
                    self._count("requests_finished_abort", 1)
                    return True
        return False

    def call(self, message: Call) -> Reply:
        if isinstance(message, ResetCache):
            return self.reset(message)
        return Refused(message.call_id, f"the fake knows no {type(message).__name__}", "bad_request")

    def reset(self, message: ResetCache) -> ResetDone:
        n_busy = sum(self._n_blocks(row) for row in self._running)
        if n_busy and not message.force:
            return ResetDone(message.call_id, done=False, n_busy=n_busy)
        n_cleared, self._cached = len(self._cached), set()
        return ResetDone(message.call_id, done=True, n_busy=0, n_cleared=n_cleared, n_preempted=len(self._running))

    def step(self) -> Outputs:
        start = time.monotonic()
        while self._waiting and len(self._running) < self.info.max_num_seqs:
            row = min(self._waiting, key=lambda row: row.submit.priority)
            self._waiting.remove(row)
            row.admitted = start
            self._running.append(row)
            self._count("prefix_queries", len(row.submit.prompt_token_ids))
            self._count("prefix_hits", row.n_cached)
        time.sleep(self._step_s)
        budget = self.info.max_num_batched_tokens
        deltas = []
        for row in list(self._running):
            left = len(row.submit.prompt_token_ids) - row.n_computed
            n_new = min(budget, max(left, 1))
            budget -= n_new
            row.n_computed += n_new
            if n_new and left <= n_new:
                deltas.append(self._next_token(row))
        self._steps.append((time.monotonic() - start, self._step_s, self.info.max_num_batched_tokens - budget))
        return Outputs(deltas, self.stats())

    def stats(self) -> EngineStats:
        in_use = float(sum(self._n_blocks(row) for row in self._running))
        gauges = {
            "running": float(len(self._running)),
            "waiting": float(len(self._waiting)),
            "blocks_in_use": in_use,
            "blocks_evictable": float(len(self._cached)),
            "blocks_free": float(self.info.n_blocks) - in_use - len(self._cached),
        }
        steps, self._steps = self._steps, []
        return EngineStats(dict(self._counters), gauges, steps)

    def _next_token(self, row: Row) -> Delta:
        now = time.monotonic()
        prompt, n = row.prompt, len(row.out)
        if n == 2:
            if CRASH in prompt:
                os.kill(os.getpid(), 9)
            if RAISE in prompt:
                raise RuntimeError("the step raised")
            if FAIL in prompt:
                return self._finish(row, "", FinishReason.ERROR, error="this row failed")
        row.first_token = row.first_token or now
        token = row.submit.prompt_token_ids[n % len(prompt)]
        row.out.append(token)
        self._count("generation_tokens", 1)
        sampling = row.submit.sampling
        if token == EOS and not sampling.ignore_eos:
            return self._finish(row, row.text[row.n_sent :], FinishReason.STOP)
        row.text += row.decoder.decode(bytes([token % 256]))
        for stop in sampling.stop:
            if (at := row.text.find(stop)) >= 0:
                end = at + len(stop) if sampling.include_stop_str_in_output else at
                return self._finish(row, row.text[row.n_sent : end], FinishReason.STOP, stop)
        if token in sampling.stop_token_ids:
            return self._finish(row, row.text[row.n_sent :], FinishReason.STOP, token)
        length = len(row.submit.prompt_token_ids) + len(row.out)
        if len(row.out) == sampling.max_tokens or length >= self.info.max_model_len:
            return self._finish(row, row.text[row.n_sent :] + row.decoder.decode(b"", True), FinishReason.LENGTH)
        held = max((k for stop in sampling.stop for k in range(len(stop)) if row.text.endswith(stop[:k])), default=0)
        text = row.text[row.n_sent : max(row.n_sent, len(row.text) - held)]
        row.n_sent += len(text)
        return Delta(row.submit.request_id, [token], text, usage=self._usage(row))

    def _finish(
        self, row: Row, text: str, reason: FinishReason, stop: str | int | None = None, error: str | None = None
    ) -> Delta:
        self._running.remove(row)
        self._publish(row)
        if IDLE in row.prompt:
            self._n_idle += 1000
        self._count(f"requests_finished_{reason.value}", 1)
        now = time.monotonic()
        admitted, first = row.admitted or now, row.first_token or now
        return Delta(
            row.submit.request_id,
            [] if error else row.out[-1:],
            text,
            usage=self._usage(row),
            finish_reason=reason,
            stop_reason=stop,
            error=error,
            error_kind="internal" if error else None,
            timing=Timing(admitted - row.arrival, first - admitted, now - first, now - row.arrival),
        )

    def _usage(self, row: Row) -> Usage:
        n_prompt = len(row.submit.prompt_token_ids)
        return Usage(n_prompt, row.n_cached, n_prompt - row.n_cached, len(row.out))

    def _hit(self, message: Submit) -> int:
        if message.skip_reading_prefix_cache:
            self._count("bypassed_requests", 1)
            return 0
        prompt = bytes(token % 256 for token in message.prompt_token_ids)
        hit = 0
        while hit + BLOCK < len(prompt) and (message.cache_salt, prompt[: hit + BLOCK]) in self._cached:
            hit += BLOCK
        return hit

    def _publish(self, row: Row) -> None:
        known = row.prompt[: row.n_computed]
        for end in range(BLOCK, len(known) + 1, BLOCK):
            self._cached.add((row.submit.cache_salt, known[:end]))

    def _n_blocks(self, row: Row) -> int:
        return -(-row.n_computed // BLOCK)

    def _count(self, name: str, n: int) -> None:
        self._counters[name] = self._counters.get(name, 0) + n


def settings(model: str) -> dict[str, str]:
    """The settings in a model's name."""
    return {name: values[0] for name, values in parse_qs(model.partition("?")[2]).items()}


def build_core(config: EngineConfig, report: Progress) -> FakeCore:
    asked = settings(config.model.model)
    report("loading weights", 0.5)
    if "load_s" in asked:
        time.sleep(float(asked["load_s"]))
    if "missing" in asked:
        raise ModelError("no such model: fake")
    if "broken" in asked:
        raise KeyError("broken")
    info = EngineInfo(
        model="fake",
        family="fake",
        max_model_len=int(asked.get("max_model_len", 4096)),
        vocab_size=VOCAB,
        block_size=BLOCK,
        n_blocks=1024,
        n_groups=1,
        min_reusable_tokens=BLOCK,
        dtype="float32",
        kv_cache_bytes=0,
        threads=1,
        enable_prefix_caching=True,
        hash_algo="sha256",
        max_num_seqs=int(asked.get("max_num_seqs", 4)),
        max_num_batched_tokens=int(asked.get("max_num_batched_tokens", 64)),
        row_invariant=True,
        notes=["this is a fake"],
    )
    return FakeCore(info, float(asked.get("step_ms", 1)) / 1000, float(asked.get("idle_ms", 0)) / 1000)
