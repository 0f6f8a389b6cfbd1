"""Prometheus metrics: the engine's newest counters as they are, and times observed on the way to the client.

The engine's snapshot comes with the deltas it counts, and is taken over before they go out: when a client has
its answer, /metrics shows it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from headwater.engine.messages import Delta, EngineInfo, EngineStats

FAST_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Buckets for what happens once a token or a step."""

SLOW_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
"""Buckets for what happens once a request."""

COUNTERS = {
    "prefix_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_hits": ("prefix_cache_hits", "Prompt tokens whose KV came from the prefix cache, by whole blocks."),
    "copied_tokens": (
        "prefix_cache_copied_tokens",
        "Prompt tokens whose KV was copied from the beginning of a cached block; not in hits.",
    ),
    "bypassed_requests": ("prefix_cache_bypassed_requests", "Requests that did not consult the prefix cache."),
    "resumed_queries": (
        "prefix_cache_resumed_queries",
        "Tokens looked up when a preempted request went on; not in queries.",
    ),
    "resumed_hits": ("prefix_cache_resumed_hits", "Tokens found then, by whole blocks; not in hits."),
    "resumed_copied_tokens": ("prefix_cache_resumed_copied_tokens", "Tokens copied then; not in copied tokens."),
    "in_flight_waits": (
        "in_flight_waits",
        "Requests held back until another one had computed their common beginning.",
    ),
    "in_flight_wait_s": ("in_flight_wait_seconds", "Seconds that they were held back for it, all together."),
    "in_flight_tokens_saved": (
        "in_flight_tokens_saved",
        "Tokens that they reused when they started and would not have without the wait.",
    ),
    "evictions": ("prefix_cache_evictions", "Cached blocks that gave way to new content."),
    "withdrawn": (
        "prefix_cache_withdrawn_blocks",
        "Cached blocks withdrawn because their content, or what it rests on, was wrong.",
    ),
    "hits_verified": ("hits_verified", "Hit blocks that were computed again in idle time and compared."),
    "hits_differing": ("hits_differing", "Those whose bits differed: a fault of memory or of Headwater."),
    "hits_verify_skipped": (
        "hits_verify_skipped",
        "Blocks chosen for it that could not be: no longer held, or what they are computed from.",
    ),
    "hits_verify_dropped": ("hits_verify_dropped", "Blocks chosen for it that gave way to newer ones."),
    "hits_verify_failed": ("hits_verify_failed", "Blocks whose computation failed."),
    "preemptions": ("preemptions", "Requests put back into the queue for want of blocks."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of all requests that were admitted."),
    "prompt_tokens_computed": ("prompt_tokens_computed", "Prompt tokens whose KV was computed for them."),
    "generation_tokens": ("generation_tokens", "Tokens generated."),
    "tokens_recomputed": ("tokens_recomputed", "Tokens computed again after a preemption."),
    "kv_events": ("kv_events", "Events of the prefix cache that were put on the stream."),
    "kv_event_batches": ("kv_event_batches", "Messages of the stream that carry them."),
    "kv_event_batches_dropped": (
        "kv_event_batches_dropped",
        "Messages that could not be put on it because too many waited already; readers see the gap.",
    ),
    "kv_event_slow_readers": (
        "kv_event_slow_readers",
        "Times that a reader of the stream was so far behind that it began to lose messages.",
    ),
    "kv_event_replays": ("kv_event_replays", "Requests for lost messages."),
    "kv_event_snapshots": ("kv_event_snapshots", "Snapshots that readers of the stream got."),
    "requests_refused": ("requests_refused", "Requests that the engine refused."),
}
"""Engine counter -> (metric, without prefix and suffix, and its help)."""

GAUGES = {
    "running": ("requests_running", "Requests that take part in steps."),
    "waiting": ("requests_waiting", "Requests in the queue."),
    "logical_blocks": ("kv_logical_blocks", "Entries in the block tables of running requests."),
    "physical_blocks": ("kv_physical_blocks", "Blocks behind those entries; the difference is what sharing saves."),
    "blocks_total": ("kv_pool_blocks", "All blocks of the pool."),
    "kv_usage": ("kv_cache_usage_ratio", "Blocks in use, of all blocks, 0 to 1."),
    "min_reusable_tokens": ("min_reusable_tokens", "The shortest shared beginning that whole blocks cover."),
}

BLOCK_STATES = ("in_use", "evictable", "free")

FINISHED_PREFIX = "requests_finished_"


class StatsSource(Protocol):
    """Where the newest snapshot comes from; an EngineClient."""

    @property
    def stats(self) -> EngineStats: ...

    @property
    def info(self) -> EngineInfo: ...

    @property
    def alive(self) -> bool: ...


@dataclass(frozen=True)
class EngineCollector(Collector):
    """The engine's own counters and gauges, read when somebody asks."""

    model_name: str
    source: StatsSource

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        stats, label = self.source.stats, [self.model_name]
        for key, (name, about) in COUNTERS.items():
            counter = CounterMetricFamily(f"headwater_{name}", about, labels=["model_name"])
            counter.add_metric(label, stats.counters.get(key, 0.0))
            yield counter
        for key, (name, about) in GAUGES.items():
            gauge = GaugeMetricFamily(f"headwater_{name}", about, labels=["model_name"])
            gauge.add_metric(label, stats.gauges.get(key, self._before_first_step().get(key, 0.0)))
            yield gauge
        yield self._blocks(stats)
        yield self._finished(stats)
        up = GaugeMetricFamily("headwater_engine_up", "1 while the engine process lives.", labels=["model_name"])
        up.add_metric(label, float(self.source.alive))
        yield up

    def _before_first_step(self) -> dict[str, float]:
        info = self.source.info
        return {
            "blocks_total": info.n_blocks,
            "blocks_free": info.n_blocks,
            "min_reusable_tokens": info.min_reusable_tokens,
        }

    def _blocks(self, stats: EngineStats) -> GaugeMetricFamily:
        about = "Blocks of the pool by state; evictable ones hold cached prefixes that nobody uses now."
        blocks = GaugeMetricFamily("headwater_kv_blocks", about, labels=["model_name", "state"])
        for state in BLOCK_STATES:
            key = f"blocks_{state}"
            blocks.add_metric([self.model_name, state], stats.gauges.get(key, self._before_first_step().get(key, 0.0)))
        return blocks

    def _finished(self, stats: EngineStats) -> CounterMetricFamily:
        about = "Requests that ended, by reason."
        finished = CounterMetricFamily("headwater_requests", about, labels=["model_name", "finish_reason"])
        for reason in ("stop", "length", "abort", "error"):
            n_requests = stats.counters.get(FINISHED_PREFIX + reason, 0.0)
            finished.add_metric([self.model_name, reason], n_requests)
        return finished


class Metrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self, model_name: str, source: StatsSource) -> None:
        self._registry = CollectorRegistry()
        self._model_name = model_name
        self._registry.register(EngineCollector(model_name, source))
        self.first_token_s = self._histogram("time_to_first_token_seconds", "Arrival to first token.", SLOW_S)
        self.next_token_s = self._histogram("inter_token_latency_seconds", "One token to the next.", FAST_S)
        self.e2e_s = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", SLOW_S)
        self.queue_s = self._histogram("request_queue_time_seconds", "Arrival to first admission.", SLOW_S)
        self.prefill_s = self._histogram("request_prefill_time_seconds", "First admission to first token.", SLOW_S)
        self.decode_s = self._histogram("request_decode_time_seconds", "First token to last token.", SLOW_S)
        self.step_s = self._histogram("step_seconds", "One engine step, all of it.", FAST_S)
        self.model_s = self._histogram("step_model_seconds", "The model's part of a step.", FAST_S)
        self.step_tokens = self._histogram(
            "step_tokens", "Tokens computed in a step.", tuple(float(2**i) for i in range(14))
        )
        self._stops = Counter(
            "headwater_prefix_cache_stops",
            "Admitted requests, by why the reuse of their prompt ended where it did.",
            ["model_name", "reason"],
            registry=self._registry,
        )
        self._disconnects = Counter(
            "headwater_client_disconnects",
            "Requests whose client left before the end.",
            ["model_name"],
            registry=self._registry,
        ).labels(model_name)

    def render(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self._registry)

    def observe_steps(self, stats: EngineStats) -> None:
        """Take over the step times of one snapshot."""
        for step_s, model_s, n_tokens in stats.steps:
            self.step_s.observe(step_s)
            self.model_s.observe(model_s)
            self.step_tokens.observe(n_tokens)

    def count_stop(self, reason: str) -> None:
        self._stops.labels(self._model_name, reason).inc()

    def count_disconnect(self) -> None:
        self._disconnects.inc()

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"headwater_{name}", about, ["model_name"], buckets=buckets, registry=self._registry)
        return histogram.labels(self._model_name)


class RequestClock:
    """Observes one request's times, token by token. ``arrival`` in seconds of the monotonic clock."""

    def __init__(self, metrics: Metrics, arrival: float) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._last_token: float | None = None

    def observe(self, delta: Delta) -> None:
        now = time.monotonic()
        if delta.prefix_stop is not None:
            self._metrics.count_stop(delta.prefix_stop)
        if delta.token_ids:
            if self._last_token is None:
                self._metrics.first_token_s.observe(now - self._arrival)
            else:
                self._metrics.next_token_s.observe(now - self._last_token)
            self._last_token = now
        if delta.finish_reason is not None and delta.timing is not None:
            self._metrics.e2e_s.observe(now - self._arrival)
            self._metrics.queue_s.observe(delta.timing.queue_s)
            self._metrics.prefill_s.observe(delta.timing.prefill_s)
            self._metrics.decode_s.observe(delta.timing.decode_s)
