"""One measured request: counters before, the request, counters after, a line of results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headwater.bench.client import Answer, Ask
from headwater.bench.clients import Clients
from headwater.bench.counters import Metrics, Scrape, timing
from headwater.bench.dialect import Dialect
from headwater.bench.prompts import Piece, as_prompt
from headwater.bench.results import ResultsWriter, Sample
from headwater.errors import BenchError

MOST_FAILURES = 3
"""After so many failed requests in a row, going on would measure nothing."""


class ServerGone(BenchError):
    """The server ended, or cannot be reached any more."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """What every sample of a session bears. ``origin_s``: its beginning by ``time.monotonic``."""

    origin_s: float
    attempt: int
    server: str
    label: str


class Measurer:
    """Sends requests to one running server, one at a time, and writes a line for each."""

    def __init__(
        self,
        clients: Clients,
        metrics: Metrics | None,
        dialect: Dialect,
        writer: ResultsWriter,
        stamp: Stamp,
        *,
        alive: Callable[[], bool],
        stall_s: float,
    ) -> None:
        self.dialect = dialect
        self._clients = clients
        self._metrics = metrics
        self._writer = writer
        self._stamp = stamp
        self._alive = alive
        self._stall_s = stall_s
        self._n_failures = 0
        self._settled = False
        self.samples: list[Sample] = []
        """All that were measured here, in order."""

    def measure(
        self,
        cell: dict[str, Any],
        role: str,
        repeat: int,
        pieces: Sequence[Piece],
        max_tokens: int,
        salt: str | None = None,
    ) -> Sample:
        """Send one request. A failure is told in the sample; ServerGone when the server is gone, BenchError when
        several requests in a row failed."""
        before = self._before()
        body = self.dialect.body(as_prompt(pieces), max_tokens, salt)
        answer = self._clients.ask(Ask(body=body, stall_s=self._stall_s))
        after = None
        if self._metrics is not None and before is not None:
            after = self._metrics.scrape_after(before) if answer.error is None else self._metrics.scrape()
        counted_before = before.counters if before is not None else None
        counted_after = after.counters if after is not None else None
        split = timing(counted_before, counted_after) if counted_before and counted_after else None
        sample = Sample(
            kind="prefix",
            cell=cell,
            role=role,
            repeat=repeat,
            attempt=self._stamp.attempt,
            request={"prompt_tokens": len(pieces) + self.dialect.extra_tokens, "max_tokens": max_tokens},
            started_s=answer.sent_s - self._stamp.origin_s,
            events_s=answer.events_s,
            tokens_per_event=answer.tokens_per_event,
            ttft_s=answer.ttft_s,
            e2e_s=answer.e2e_s,
            usage=answer.usage,
            counters_before=counted_before,
            counters_after=counted_after,
            server_timing=split or answer.server_timing,
            lag_s=answer.lag_s,
            error=answer.error,
            server=self._stamp.server,
            label=self._stamp.label,
        )
        self._writer.write(sample)
        self.samples.append(sample)
        self._settled = answer.error is None
        self._check_health(answer)
        return sample

    def _before(self) -> Scrape | None:
        """The counters now; those of the last request are in them, also where that one was not measured here."""
        if self._metrics is None:
            return None
        return self._metrics.scrape() if self._settled else self._metrics.settle()

    def _check_health(self, answer: Answer) -> None:
        if answer.error is None:
            self._n_failures = 0
            return
        self._n_failures += 1
        if not self._alive() or answer.unreachable:
            raise ServerGone(f"the server is gone: {answer.error}")
        if self._n_failures >= MOST_FAILURES:
            raise BenchError(f"{self._n_failures} requests in a row failed, the last with: {answer.error}")
