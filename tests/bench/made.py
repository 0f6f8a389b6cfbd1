"""Results that nobody measured: what a sweep of a server with given times would have left behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from headwater.bench.results import ResultsWriter, Sample, Usage, write_run

QUESTION = 17


@dataclass(frozen=True)
class Made:
    """A server: seconds of a request, of a computed prompt token, of an output token; noise is a share of each."""

    label: str = "engine"
    request_s: float = 0.010
    prompt_token_s: float = 300e-6
    output_token_s: float = 0.012
    noise: float = 0.08
    caches: bool = True
    hit_saves: bool = True
    warm: bool = False
    counters: bool = True
    usage: bool = True
    tokens_per_event: int = 1
    lag_s: float = 0.0001
    evicts: bool = True
    false_hits: bool = False
    salts: bool = True
    prefixes: tuple[int, ...] = (128, 512, 2048)
    outputs: tuple[int, ...] = (1, 32)
    repeats: int = 10
    interference: tuple[str, ...] = ("none",)
    caching: tuple[str, ...] = ("on", "off")
    seed: int = 0

    def but(self, **changes: Any) -> Made:
        return replace(self, **changes)


def samples(made: Made) -> list[Sample]:
    random = np.random.default_rng(made.seed)
    one = _Maker(made, random)
    done: list[Sample] = []
    for interference in made.interference:
        for caching in made.caching:
            for repeat in range(made.repeats):
                for prefix in made.prefixes:
                    for output in made.outputs:
                        cell = {"prefix": prefix, "output": output, "caching": caching, "interference": interference}
                        roles = ["prime", "off"] if caching == "off" else ["prime", "hit", "control"]
                        if caching == "on" and (prefix, output) == (made.prefixes[len(made.prefixes) // 2], 1):
                            roles += ["first_differs", "other_salt"] if interference == "none" else ["evicted"]
                        done += [one.sample(cell, role, repeat) for role in roles]
    return done


@dataclass
class _Maker:
    made: Made
    random: np.random.Generator
    queries: int = 0
    hits: int = 0
    now_s: float = 0.0

    def cached(self, cell: dict[str, Any], role: str) -> int:
        whole = cell["prefix"] // 16 * 16
        if cell["caching"] == "off" or not self.made.caches:
            return 0
        if role == "hit":
            return whole if cell["interference"] == "none" or not self.made.evicts else 0
        if role == "evicted":
            return 0 if self.made.evicts else whole
        if role in ("first_differs", "other_salt"):
            ignored = role == "other_salt" and not self.made.salts
            return whole if self.made.false_hits or ignored else 0
        return whole if self.made.warm else 0

    def sample(self, cell: dict[str, Any], role: str, repeat: int) -> Sample:
        made = self.made
        n_prompt, n_output = cell["prefix"] + QUESTION, cell["output"]
        cached = self.cached(cell, role)
        saved = cached if made.hit_saves else 0
        ttft = (made.request_s + made.prompt_token_s * (n_prompt - saved)) * self._noise()
        events, at = [ttft], ttft
        for _ in range(1, n_output, made.tokens_per_event):
            at += made.output_token_s * made.tokens_per_event * self._noise()
            events.append(at)
        before = {"queries": float(self.queries), "hits": float(self.hits)}
        if cell["caching"] == "on":
            self.queries += n_prompt
            self.hits += cached
        after = {"queries": float(self.queries), "hits": float(self.hits)}
        self.now_s += at + 0.01
        return Sample(
            kind="prefix",
            cell=cell,
            role=role,
            repeat=repeat,
            request={"prompt_tokens": n_prompt, "max_tokens": n_output},
            started_s=self.now_s,
            events_s=events,
            tokens_per_event=[1] * len(events) if made.tokens_per_event == 1 else None,
            ttft_s=events[0],
            e2e_s=events[-1],
            usage=Usage(n_prompt, n_output, cached) if made.usage else None,
            counters_before=before if made.counters else None,
            counters_after=after if made.counters else None,
            server_timing={"queue_s": 0.001, "prefill_s": ttft - 0.002, "decode_s": at - ttft}
            if made.counters
            else None,
            lag_s=made.lag_s,
            server=f"{made.label} 1.0",
            label=made.label,
        )

    def _noise(self) -> float:
        return float(np.exp(self.random.normal(0, self.made.noise)))


def folder(path: Path, made: Made, change: Callable[[Sample], Sample] = lambda one: one, **about: Any) -> Path:
    """A folder of results, each sample passed through ``change``."""
    run = {
        "format": 1,
        "kind": "prefix",
        "label": made.label,
        "command": ["headwater", "bench", "prefix"],
        "machine": {"cpu": "Some CPU", "cores": 2},
        "server": {"model": "some-model"},
        "arguments": {"block_size": 16},
        "flags": [],
        "finished": True,
        **about,
    }
    write_run(path, run)
    with ResultsWriter(path) as writer:
        for one in samples(made):
            writer.write(change(one))
    return path
