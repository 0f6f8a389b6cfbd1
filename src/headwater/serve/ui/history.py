"""The engine's counters over the last minutes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from headwater.engine.messages import EngineStats

EVERY_S = 1.0
KEEP_S = 300.0

SAMPLED = (
    "prefix_queries",
    "prefix_hits",
    "copied_tokens",
    "prompt_tokens_computed",
    "generation_tokens",
    "evictions",
    "preemptions",
    "running",
    "waiting",
    "blocks_in_use",
    "blocks_evictable",
    "blocks_free",
)
"""Counters and gauges of a sample, in this order, after its time."""


class History:
    """Samples of the last KEEP_S seconds, about one every EVERY_S, taken from the snapshots that come by. An idle
    engine sends none: the last before a pause, and the first after it, are kept."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._samples: deque[list[float]] = deque(maxlen=2 * round(KEEP_S / EVERY_S))
        self._skipped: tuple[float, EngineStats] | None = None
        """The newest snapshot, if it came too soon after the last sample: the last word, should nothing follow."""

    def observe(self, stats: EngineStats) -> None:
        """Take a snapshot over if the last sample is old enough."""
        now = self._clock()
        if self._samples and now - self._samples[-1][0] < EVERY_S:
            self._skipped = now, stats
            return
        if self._samples and now - self._samples[-1][0] > 2 * EVERY_S:  # a pause
            self._keep_skipped()
            self._samples.append([now - EVERY_S, *self._samples[-1][1:]])
        self._samples.append(_sample(now, stats))
        self._skipped = None

    def since(self, then: float) -> list[list[float]]:
        """Samples after ``then`` (seconds since the epoch), oldest first; of the last KEEP_S seconds at most."""
        now = self._clock()
        if self._skipped is not None and now - self._samples[-1][0] >= EVERY_S:
            self._keep_skipped()
        oldest = max(then, now - KEEP_S)
        return [sample for sample in self._samples if sample[0] > oldest]

    def _keep_skipped(self) -> None:
        if self._skipped is not None:
            self._samples.append(_sample(*self._skipped))
            self._skipped = None


def _sample(at_s: float, stats: EngineStats) -> list[float]:
    values = stats.counters | stats.gauges
    return [round(at_s, 2), *(values.get(name, 0.0) for name in SAMPLED)]
