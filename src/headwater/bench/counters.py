"""A server's own counters, under one set of names whoever exports them, and what they say of one request.

The counters are cumulative: a request's share is a difference, and is this request's only if nobody else was served
in between.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from headwater.bench.results import Sample

COUNTERS: Mapping[str, Mapping[str, str]] = {
    "headwater": {
        "queries": "headwater_prefix_cache_queries_total",
        "hits": "headwater_prefix_cache_hits_total",
        "copied": "headwater_prefix_cache_copied_tokens_total",
        "evictions": "headwater_prefix_cache_evictions_total",
        "prompt_tokens": "headwater_prompt_tokens_total",
        "computed": "headwater_prompt_tokens_computed_total",
        "generation_tokens": "headwater_generation_tokens_total",
        "requests": "headwater_requests_total",
        "preemptions": "headwater_preemptions_total",
        "timed_requests": "headwater_request_prefill_time_seconds_count",
        "queue_s": "headwater_request_queue_time_seconds_sum",
        "prefill_s": "headwater_request_prefill_time_seconds_sum",
        "decode_s": "headwater_request_decode_time_seconds_sum",
    },
    "vllm": {
        "queries": "vllm:prefix_cache_queries_total",
        "hits": "vllm:prefix_cache_hits_total",
        "prompt_tokens": "vllm:prompt_tokens_total",
        "generation_tokens": "vllm:generation_tokens_total",
        "requests": "vllm:request_success_total",
        "preemptions": "vllm:num_preemptions_total",
        "timed_requests": "vllm:request_prefill_time_seconds_count",
        "queue_s": "vllm:request_queue_time_seconds_sum",
        "prefill_s": "vllm:request_prefill_time_seconds_sum",
        "decode_s": "vllm:request_decode_time_seconds_sum",
    },
    "sglang": {
        "queries": "sglang:prompt_tokens_total",
        "hits": "sglang:cached_tokens_total",
        "prompt_tokens": "sglang:prompt_tokens_total",
        "generation_tokens": "sglang:generation_tokens_total",
        "requests": "sglang:num_requests_total",
        "timed_requests": "sglang:queue_time_seconds_count",
        "queue_s": "sglang:queue_time_seconds_sum",
    },
    "llamacpp": {
        "computed": "llamacpp:prompt_tokens_total",
        "generation_tokens": "llamacpp:tokens_predicted_total",
    },
}
"""Exporter -> our name -> its name. llama.cpp counts the prompt tokens that it computes, not those that it was sent."""

GAUGES: Mapping[str, Mapping[str, str]] = {
    "headwater": {
        "pool_blocks": "headwater_kv_pool_blocks",
        "block_size": "headwater_min_reusable_tokens",
        "blocks_in_use": 'headwater_kv_blocks{state="in_use"}',
        "blocks_evictable": 'headwater_kv_blocks{state="evictable"}',
        "logical_blocks": "headwater_kv_logical_blocks",
        "physical_blocks": "headwater_kv_physical_blocks",
        "running": "headwater_requests_running",
        "waiting": "headwater_requests_waiting",
    },
    "vllm": {
        "kv_usage": "vllm:kv_cache_usage_perc",
        "running": "vllm:num_requests_running",
        "waiting": "vllm:num_requests_waiting",
    },
    "sglang": {
        "kv_usage": "sglang:token_usage",
        "running": "sglang:num_running_reqs",
        "waiting": "sglang:num_queue_reqs",
    },
    "llamacpp": {
        "running": "llamacpp:requests_processing",
        "waiting": "llamacpp:requests_deferred",
    },
}

CACHE_INFO = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
SERIES = re.compile(r'([a-zA-Z_:][\w:]*)(\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})?\s+(\S+)')
SETTLE_S = 1.0
"""How long a server may take to count a request whose answer it has sent."""

CALM_S, MOST_SETTLE_S = 0.25, 3.0
"""Counters that stand still for so long have settled; for how long that is waited for."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """One reading of /metrics. ``exporter`` None: none of the known counters is there."""

    exporter: str | None
    counters: dict[str, float]
    gauges: dict[str, float]


@dataclass(frozen=True, slots=True)
class Share:
    """What counters say between two readings, in tokens; None where they do not say."""

    queries: float | None
    hits: float | None
    copied: float
    computed: float | None
    evictions: float | None
    requests: float | None

    @property
    def cached(self) -> float | None:
        """Tokens that were not computed: by whole blocks, and copied from the beginning of one."""
        return None if self.hits is None else self.hits + self.copied

    @property
    def hit_rate(self) -> float | None:
        """Hits of queries, 0 to 1; None when nothing was looked up."""
        return None if self.hits is None or not self.queries else self.hits / self.queries


class Metrics:
    """The /metrics of the server at ``url``. Use as a context."""

    def __init__(self, url: str, headers: dict[str, str] | None = None) -> None:
        parts = urlsplit(url)
        self._url = f"{parts.scheme}://{parts.netloc}/metrics"
        self._client = httpx.Client(headers=headers or {}, timeout=10.0, trust_env=False)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def scrape(self) -> Scrape | None:
        """A reading; None from a server that has no metrics, or is gone."""
        try:
            response = self._client.get(self._url)
        except httpx.HTTPError:
            return None
        return parse(response.text) if response.status_code == 200 else None

    def settle(self) -> Scrape | None:
        """A reading once nothing moves any more: what a server counts late must not be taken for the next request's."""
        end, last = time.monotonic() + MOST_SETTLE_S, self.scrape()
        while last is not None and time.monotonic() < end:
            time.sleep(CALM_S)
            now = self.scrape()
            if now is None or now.counters == last.counters:
                return now
            last = now
        return last

    def scrape_after(self, before: Scrape) -> Scrape | None:
        """A reading in which the request that followed ``before`` is counted, or the last one after ``SETTLE_S``."""
        end = time.monotonic() + SETTLE_S
        while True:
            after = self.scrape()
            if after is None or _counted(before.counters, after.counters) or time.monotonic() > end:
                return after
            time.sleep(0.02)


def _counted(before: Mapping[str, float], after: Mapping[str, float]) -> bool:
    """Every count of requests and tokens that a request ends with has moved."""
    watched = [name for name in ("requests", "timed_requests", "generation_tokens") if name in before]
    return all(after.get(name, 0.0) > before[name] for name in watched)


def parse(text: str) -> Scrape:
    """Prometheus' text format, as far as it is known here; samples of one name are summed over their labels."""
    values = _values(text)
    for exporter, names in COUNTERS.items():
        counters = {ours: values[theirs] for ours, theirs in names.items() if theirs in values}
        if not counters and not any(name.startswith((f"{exporter}:", f"{exporter}_")) for name in values):
            continue
        # A counter with labels may be missing until it first counts.
        counters.update({ours: 0.0 for ours, theirs in names.items() if ours in ("requests",) and theirs not in values})
        gauges = {ours: values[theirs] for ours, theirs in GAUGES[exporter].items() if theirs in values}
        return Scrape(exporter, counters, {**gauges, **_vllm_pool(text)})
    return Scrape(None, {}, {})


def _values(text: str) -> dict[str, float]:
    """Samples by name, summed over labels; those with a state label also by ``name{state="..."}``."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        if (found := SERIES.match(line)) is None:
            continue  # a comment, or no line of Prometheus'; the others still count
        name, labels = found[1], found[2] or ""
        try:
            value = float(found[3])
        except ValueError:
            continue
        if not math.isfinite(value):
            continue
        values[name] = values.get(name, 0.0) + value
        if (state := dict(LABEL.findall(labels)).get("state")) is not None:
            key = f'{name}{{state="{state}"}}'
            values[key] = values.get(key, 0.0) + value
    return values


def _vllm_pool(text: str) -> dict[str, float]:
    """vLLM tells its pool in the labels of an info metric."""
    if (found := CACHE_INFO.search(text)) is None:
        return {}
    labels = dict(LABEL.findall(found[1]))
    names = {"pool_blocks": "num_gpu_blocks", "block_size": "block_size"}
    return {ours: float(labels[theirs]) for ours, theirs in names.items() if labels.get(theirs, "").isdigit()}


def share(before: Mapping[str, float], after: Mapping[str, float]) -> Share:
    """What was counted between two readings of one server. A counter that went back (a restart) says nothing."""

    def moved(name: str) -> float | None:
        if name not in before or name not in after or after[name] < before[name]:
            return None
        return after[name] - before[name]

    return Share(
        moved("queries"),
        moved("hits"),
        moved("copied") or 0.0,
        moved("computed"),
        moved("evictions"),
        moved("requests"),
    )


def timing(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float] | None:
    """The server's own times of the one request between two readings; None when it was not one, or is not told."""
    if after.get("timed_requests", 0.0) - before.get("timed_requests", 0.0) != 1:
        return None
    names = ("queue_s", "prefill_s", "decode_s")
    return {name: after[name] - before[name] for name in names if name in after and name in before} or None


def cached_tokens(sample: Sample) -> tuple[int, str] | None:
    """Prompt tokens of a request that were not computed, and who says so: "counters" or "usage"; None: nobody.

    Counters count if their queries are this prompt's tokens: otherwise another request was served in between, or
    this one not looked up.
    """
    if sample.counters_before is not None and sample.counters_after is not None:
        counted = share(sample.counters_before, sample.counters_after)
        n_prompt = sample.usage.prompt_tokens if sample.usage is not None else None
        n_prompt = n_prompt if n_prompt is not None else sample.request.get("prompt_tokens")
        if counted.cached is not None and counted.queries == n_prompt:
            return round(counted.cached), "counters"
    if sample.usage is not None and sample.usage.cached_tokens is not None:
        return sample.usage.cached_tokens, "usage"
    return None
