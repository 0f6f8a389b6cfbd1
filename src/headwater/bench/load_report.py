"""What the report says of loads: waiting under load, throughput, goodput, and whether the client kept up.

Requests of one load wait for each other, so that they are no independent samples: quantiles are given, but no
intervals, and no load is said to differ from another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import numpy as np
from matplotlib.figure import Figure
from scipy import stats as distributions

from headwater.bench import stats, words
from headwater.bench.flags import Flag
from headwater.bench.plots import SERIES, Drawing, panels_of, plain_ticks, shortened
from headwater.bench.readings import Reading, Run, arguments_of, values
from headwater.bench.tables import Table

LATE_S = 0.010
"""A request that leaves so long after its time was held up by the measuring side, not by the server."""

LATE_SHARE = 0.05


@dataclass(frozen=True)
class Goodput:
    """Requests within the limits, which are in seconds; None: not asked for. Failed ones are not good."""

    n_good: int
    n_all: int
    ttft_limit_s: float | None
    itl_limit_s: float | None

    @property
    def share(self) -> tuple[float, float, float]:
        """The share of good ones, with Wilson's 95 % interval."""
        found = distributions.binomtest(self.n_good, self.n_all).proportion_ci(stats.LEVEL, method="wilson")
        return self.n_good / self.n_all, float(found.low), float(found.high)

    @property
    def limits(self) -> str:
        told = (("first token", self.ttft_limit_s), ("between tokens", self.itl_limit_s))
        return ", ".join(f"{what} within {words.ms(limit)} ms" for what, limit in told if limit is not None)


@dataclass(frozen=True)
class LoadFinding:
    """One load: a run, and what was sent."""

    run: Run
    load: str
    readings: Sequence[Reading]

    @property
    def name(self) -> str:
        return f"{self.run.label}: {self.load}"

    @property
    def good(self) -> list[Reading]:
        return [one for one in self.readings if one.measured]

    @property
    def wall_s(self) -> float:
        """From the first sending to the last token."""
        starts = [one.sample.started_s for one in self.readings]
        ends = [one.sample.started_s + (one.e2e_s or 0.0) for one in self.readings]
        return max(ends) - min(starts)

    @property
    def prompt_tokens(self) -> int:
        return sum(one.prompt_tokens or 0 for one in self.good)

    @property
    def cached_tokens(self) -> int | None:
        told = [one.cached for one in self.good if one.cached is not None]
        return sum(told) if told else None

    @property
    def output_tokens(self) -> int:
        return sum(one.output_tokens or 0 for one in self.good)

    @property
    def late_s(self) -> list[float]:
        """How long after its time each request left."""
        good = [one.sample for one in self.good]
        return [max(0.0, one.started_s - one.scheduled_s) for one in good if one.scheduled_s is not None]

    @property
    def client_was_slow(self) -> bool:
        late = sum(1 for s in self.late_s if s > LATE_S)
        return late > LATE_SHARE * len(self.late_s)

    @property
    def goodput(self) -> Goodput | None:
        """None where no limit was given."""
        given = arguments_of(self.run)
        ttft, itl = (_limit(given.get(name)) for name in ("ttft_limit_s", "itl_limit_s"))
        if ttft is None and itl is None:
            return None
        good = sum(within(one, ttft, itl) for one in self.readings)
        return Goodput(good, len(self.readings), ttft, itl)


def _limit(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def within(one: Reading, ttft_limit_s: float | None, itl_limit_s: float | None) -> bool:
    """Whether a request kept the limits: its first token, and the mean time between its tokens (over a request the mean
    is what a reader waits for; a single long gap shows in the P99 of the gaps)."""
    if not one.measured or one.ttft_s is None:
        return False
    if ttft_limit_s is not None and one.ttft_s > ttft_limit_s:
        return False
    between = mean_gap(one)
    return itl_limit_s is None or between is None or between <= itl_limit_s


def mean_gap(one: Reading) -> float | None:
    """Seconds by token after the first; None for one token."""
    if one.e2e_s is None or one.ttft_s is None:
        return None
    n = one.output_tokens if one.output_tokens is not None else len(one.gaps_s) + 1
    return (one.e2e_s - one.ttft_s) / (n - 1) if n > 1 else None


def find_loads(runs: Sequence[Run]) -> list[LoadFinding]:
    """The loads among ``runs``, in their order."""
    found = []
    for run in runs:
        by_load: dict[str, list[Reading]] = {}
        for one in run.readings:
            if one.kind == "load":
                by_load.setdefault(str(one.cell.get("load", one.cell.get("workload"))), []).append(one)
        found += [LoadFinding(run, load, readings) for load, readings in by_load.items()]
    return found


def load_flags(loads: Sequence[LoadFinding]) -> list[Flag]:
    return [
        Flag(
            "client lag",
            f"{one.name}: {sum(s > LATE_S for s in one.late_s):,} of {len(one.late_s):,} requests left more than "
            f"{words.ms(LATE_S)} ms late: the measuring side was the bottleneck.",
        )
        for one in loads
        if one.client_was_slow
    ]


# ---- tables, plot, sentences -------------------------------------------------------------------------


def load_tables(loads: Sequence[LoadFinding]) -> list[Table]:
    tables = [_waits(loads), _rates(loads), _cache(loads), _client(loads)]
    return [table for table in tables if table.rows]


def _waits(loads: Sequence[LoadFinding]) -> Table:
    rows = []
    for one in loads:
        gaps = [gap for reading in one.good for gap in reading.gaps_s]
        kinds = (("time to first token", values(one.good, "ttft")), ("gaps of all requests", gaps))
        for what, seconds in (*kinds, ("whole request", values(one.good, "e2e"))):
            if seconds:
                made = stats.estimate(np.sort(np.array(seconds)))
                shown = (words.ms(made.median), words.p95(made), words.p99(made), words.ms(max(seconds)))
                rows.append((one.run.label, one.load, what, f"{made.n:,}", *shown))
    head = ("engine", "load", "what", "n", "median, ms", "P95, ms", "P99, ms", "longest, ms")
    note = (
        "Requests of one load wait for each other: these are quantiles of this load, without intervals, and no load is "
        "said to differ from another. Repeat loads to compare them."
    )
    return Table("load-waits", "Under load", head, tuple(rows), note)


def _rates(loads: Sequence[LoadFinding]) -> Table:
    rows = []
    for one in loads:
        wall = max(one.wall_s, stats.RESOLUTION_S)
        failed = len(one.readings) - len(one.good)
        rates = (f"{n / wall:,.2f}" for n in (len(one.good), one.prompt_tokens, one.output_tokens))
        goodput = one.goodput
        told = ("-", "-", "-")
        if goodput is not None:
            share, low, high = goodput.share
            told = (goodput.limits, f"{share:.1%} [{low:.1%}, {high:.1%}]", f"{goodput.n_good / wall:,.2f}")
        rows.append((one.run.label, one.load, f"{len(one.readings):,}", f"{failed:,}", f"{wall:,.1f}", *rates, *told))
    counts = ("requests", "failed", "wall, s", "requests/s", "input, tokens/s", "output, tokens/s")
    head = ("engine", "load", *counts, "limits", "within limits", "goodput, requests/s")
    note = (
        "Input tokens include cached ones. Goodput counts requests that were answered within the limits; the time "
        "between tokens is a request's mean there."
    )
    return Table("load-rates", "Throughput and goodput", head, tuple(rows), note)


def _cache(loads: Sequence[LoadFinding]) -> Table:
    rows = []
    for one in loads:
        cached = one.cached_tokens
        share = f"{cached / one.prompt_tokens:.1%}" if cached is not None and one.prompt_tokens else "-"
        sharing = one.run.about.get("sharing")
        saved = "-"
        if isinstance(sharing, dict) and {"saved_blocks", "logical_blocks"} <= sharing.keys():
            saved = f"{sharing['saved_blocks']:,.0f} of {sharing['logical_blocks']:,.0f}"
        rows.append((one.run.label, one.load, words.count(one.prompt_tokens), words.count(cached), share, saved))
    head = ("engine", "load", "prompt tokens", "cached", "share", "KV blocks saved by sharing, at most")
    note = (
        "Cached: by the usage field of each answer. Blocks saved: table entries of running requests over the blocks "
        "behind them, at the moment when that was most. A share of hits is not a share of memory, nor of time."
    )
    return Table("load-cache", "Cached tokens, shared blocks", head, tuple(rows), note)


def _client(loads: Sequence[LoadFinding]) -> Table:
    rows = []
    for one in loads:
        late, lags = one.late_s, [reading.sample.lag_s for reading in one.good]
        if late:
            shown = [words.ms(f(np.array(some))) for some in (late, lags) for f in (_middle, _most)]
            rows.append((one.run.label, one.load, *shown, "the bottleneck" if one.client_was_slow else "kept up"))
    head = ("engine", "load", "left late, median ms", "at most", "loop late, median ms", "at most", "measuring side")
    return Table("load-client", "The measuring side", head, tuple(rows))


def _middle(numbers: np.ndarray) -> float:
    return float(np.median(numbers))


def _most(numbers: np.ndarray) -> float:
    return float(np.max(numbers))


def load_sentences(loads: Sequence[LoadFinding]) -> tuple[str, ...]:
    return tuple(_sentence(one) for one in loads)


def _sentence(one: LoadFinding) -> str:
    failed = len(one.readings) - len(one.good)
    said = f"{one.name}: {words.plural(len(one.readings), 'request')} in {one.wall_s:,.1f} s"
    said += f", {failed:,} of them failed." if failed else "."
    first = values(one.good, "ttft")
    if first:
        made = stats.estimate(np.sort(np.array(first)))
        said += f" First token: median {words.ms(made.median)} ms, P95 {words.p95(made)}{' ms' if made.p95 else ''}."
    goodput = one.goodput
    if goodput is not None:
        share, low, high = goodput.share
        said += (
            f" {goodput.n_good:,} of {goodput.n_all:,} kept the limits ({goodput.limits}): {share:.0%} "
            f"[{low:.0%}, {high:.0%}]."
        )
    cached = one.cached_tokens
    if cached is not None and one.prompt_tokens:
        said += f" {cached / one.prompt_tokens:.0%} of the prompt tokens came from the cache."
    if one.client_was_slow:
        said += (
            " The measuring side was the bottleneck: it sent requests late, so that this is not what the server can do."
        )
    return said


def load_plots(loads: Sequence[LoadFinding]) -> dict[str, Drawing]:
    if not any(values(one.good, "ttft") for one in loads):
        return {}
    about = "Under load: the share of requests whose first token came within so many ms, and whose gaps did."
    return {"load": (about, partial(_distributions, loads))}


def _distributions(loads: Sequence[LoadFinding]) -> Figure:
    figure, panels = panels_of(1, 2)
    for (metric, label), axes in zip(
        (("ttft", "time to first token, ms"), ("gap", "gaps, ms")), panels[0], strict=True
    ):
        for one, (color, _) in zip(loads, cycle(SERIES), strict=False):
            gaps = [gap for reading in one.good for gap in reading.gaps_s]
            seconds = np.sort(values(one.good, "ttft") if metric == "ttft" else gaps)
            if len(seconds):
                share = np.arange(1, len(seconds) + 1) / len(seconds)
                axes.step(
                    1e3 * seconds, share, where="post", color=color, label=f"{shortened(one.name)} (n={len(seconds):,})"
                )
        axes.set_xlabel(label)
        axes.set_ylabel("share")
        axes.set_ylim(0, 1.02)
        if axes.lines:
            axes.set_xscale("log")
            plain_ticks(axes.xaxis)
            axes.legend(fontsize=7, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure
