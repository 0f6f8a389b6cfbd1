"""What a set of timings says, and what it does not: medians with intervals, comparisons that hold for a whole report.

A report makes many comparisons at once (three prefix lengths x three output lengths x two interferences x three
metrics x three pairs: 162), and a reader remembers the one that looks good. So the 5 % are those of the report, not of
a comparison: a difference counts only if

- the two medians' 95 % intervals do not overlap, and
- Welch's test on the logarithms, corrected by Holm over all comparisons of the report, finds it at 5 %.

Logarithms, because the noise of a timing is a share of it. No rank test: with 162 comparisons it could not find
anything below 8 samples a side, however large. A side's variance counts as no less than what is usual in the report
(the median over all sides of that metric), or few samples that happen to agree would look like certainty.

Sources: Welch, Biometrika 34 (1947); Holm, Scand. J. Statist. 6 (1979); Efron, Ann. Statist. 7 (1979) for the
bootstrap; Sen, JASA 63 (1968) and Jaeckel, Ann. Math. Statist. 43 (1972) for the growth line.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from scipy import stats as distributions

Floats = NDArray[np.float64]

LEVEL = 0.95
"""What an interval holds, and one less the false alarms that all comparisons of a report may give together."""

MIN_INTERVAL = 5
"""Samples from which on a median has an interval: all five span it with 94 % (1 - 2/2^5), four only with 88 %."""

MIN_P95 = 20
MIN_P99 = 100
"""Samples from which on these are told: one sample in 20 (100) lies beyond them."""

RESAMPLES = 2000
RESAMPLE_UP_TO = 1000
"""Samples up to which the bootstrap is drawn; beyond, it and the order statistics agree to the digits shown."""

RESOLUTION_S = 1e-4
"""Seconds that two clocks on a network do not tell apart: the least spread that a comparison assumes."""

SEED = 20260401
"""Of the resampling, so that the same results always give the same report."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What n samples of one quantity say. Units are the samples'.

    ``low`` and ``high`` are None below MIN_INTERVAL samples; ``holds`` is the probability with which such an
    interval of order statistics holds the true median whatever the distribution (0.94 at 5 samples, else at
    least 0.95). ``p95`` and ``p99`` are None below MIN_P95 and MIN_P99 samples.
    """

    n: int
    median: float
    low: float | None
    high: float | None
    holds: float
    p95: float | None
    p99: float | None


class Outcome(str, Enum):
    """What a comparison of two medians came to."""

    DIFFERENT = "different"
    NOT_SHOWN = "no difference shown"
    TOO_FEW = "n too small"


@dataclass(frozen=True, eq=False)
class Side:
    """The samples of one metric in one condition; its estimate is made when first asked for."""

    metric: str
    values: Floats

    @classmethod
    def of(cls, metric: str, values: Iterable[float]) -> Side:
        return cls(metric, np.sort(np.fromiter(values, float)))

    @property
    def n(self) -> int:
        return len(self.values)

    @cached_property
    def estimate(self) -> Estimate:
        return estimate(self.values)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sides of one metric.

    ``ratio`` is median of a / median of b with an interval from the outer ends of both intervals, so that it leaves
    out 1 exactly when they do not overlap. It is None unless the difference was shown: nobody can quote it then.
    ``p`` is corrected for the whole report. Where nothing was shown, ``least`` is the shift of a against b, as a ratio
    below 1, that the test would just have found with the noise at hand.
    """

    a: Side
    b: Side
    outcome: Outcome
    p: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    least: float | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """y = intercept + slope x through n points, each with a 95 % bootstrap interval."""

    slope: float
    slope_low: float
    slope_high: float
    intercept: float
    intercept_low: float
    intercept_high: float
    n: int

    def at(self, x: float) -> float:
        return self.intercept + self.slope * x


def estimate(values: Floats) -> Estimate:
    """Median, its interval, and the quantiles that n allows, of sorted ``values`` [n]."""
    n = len(values)
    low, high = median_interval(values) if n >= MIN_INTERVAL else (None, None)
    return Estimate(
        n=n,
        median=float(np.median(values)) if n else math.nan,
        low=low,
        high=high,
        holds=_held(n)[1] if n else 0.0,
        p95=float(np.quantile(values, 0.95)) if n >= MIN_P95 else None,
        p99=float(np.quantile(values, 0.99)) if n >= MIN_P99 else None,
    )


def median_interval(values: Floats) -> tuple[float, float]:
    """The bootstrap's 95 % percentile interval of the median of sorted ``values`` [n], never narrower than the order
    statistics that hold it with 95 %.

    The bootstrap alone is too sure of few samples: at n = 7 it leaves out the extremes and holds the median 88 % of
    the time.

        x1   x2   x3   x4   x5   x6   x7
             |----- bootstrap ----|          7/8
        |------- order statistics -------|   63/64
    """
    n = len(values)
    k, _ = _held(n)
    low, high = float(values[k - 1]), float(values[n - k])
    if n > RESAMPLE_UP_TO:
        return low, high
    drawn = np.random.default_rng(SEED).integers(n, size=(RESAMPLES, n))
    medians = np.median(values[drawn], axis=1)
    tail = (1 - LEVEL) / 2
    return min(low, float(np.quantile(medians, tail))), max(high, float(np.quantile(medians, 1 - tail)))


def _held(n: int) -> tuple[int, float]:
    """The k for which the k-th lowest and k-th highest of n samples hold the median with LEVEL, and with how much.

    Where even the extremes do not reach it, k is 1.
    """
    k = max(1, int(distributions.binom.ppf((1 - LEVEL) / 2, n, 0.5)))
    return k, float(1 - 2 * distributions.binom.cdf(k - 1, n, 0.5))


def compare(pairs: Sequence[tuple[Side, Side]]) -> list[Comparison]:
    """Compare all pairs (a, b) of a report; the correction is for exactly these. Values are in seconds."""
    tested = [i for i, (a, b) in enumerate(pairs) if min(a.n, b.n) >= MIN_INTERVAL]
    tests = _welch([pairs[i] for i in tested])
    corrected = holm([test.p for test in tests])
    found = [Comparison(a, b, Outcome.TOO_FEW) for a, b in pairs]
    for i, test, p in zip(tested, tests, corrected, strict=True):
        found[i] = _judge(*pairs[i], p, test)
    return found


@dataclass(frozen=True, slots=True)
class _Test:
    p: float
    least: float


def _judge(a: Side, b: Side, p: float, test: _Test) -> Comparison:
    if p > 1 - LEVEL:
        return Comparison(a, b, Outcome.NOT_SHOWN, p, least=test.least)
    (a_low, a_high), (b_low, b_high) = _ends(a), _ends(b)
    if a_low <= b_high and b_low <= a_high:
        return Comparison(a, b, Outcome.NOT_SHOWN, p)
    if min(a_low, b_low) <= 0:  # gaps of 0 s: no ratio
        return Comparison(a, b, Outcome.DIFFERENT, p)
    ratio = a.estimate.median / b.estimate.median
    return Comparison(a, b, Outcome.DIFFERENT, p, ratio, a_low / b_high, a_high / b_low)


def _ends(side: Side) -> tuple[float, float]:
    low, high = side.estimate.low, side.estimate.high
    if low is None or high is None:
        raise ValueError(f"{side.n} samples of {side.metric} have no interval")
    return low, high


@dataclass(frozen=True, slots=True)
class _Moments:
    """Of a side's logarithms."""

    mean: float
    variance: float


def _welch(pairs: Sequence[tuple[Side, Side]]) -> list[_Test]:
    """Welch's test of equal means of the logarithms, two-sided, for each pair. No side's variance counts as less than
    what is usual for its metric."""
    moments = _moments(dict.fromkeys(chain.from_iterable(pairs)))
    by_metric: dict[str, list[float]] = {}
    for side, one in moments.items():
        by_metric.setdefault(side.metric, []).append(one.variance)
    usual = {metric: float(np.median(variances)) for metric, variances in by_metric.items()}
    parts = np.array([[max(moments[s].variance, usual[s.metric]) / s.n for s in pair] for pair in pairs]).reshape(-1, 2)
    less_one = np.array([[side.n - 1 for side in pair] for pair in pairs]).reshape(-1, 2)
    apart = np.array([abs(moments[a].mean - moments[b].mean) for a, b in pairs])
    errors = np.sqrt(parts.sum(axis=1))
    degrees = parts.sum(axis=1) ** 2 / (parts**2 / less_one).sum(axis=1)
    p_values = 2 * distributions.t.sf(apart / errors, degrees)
    needed = distributions.t.isf((1 - LEVEL) / max(1, len(pairs)) / 2, degrees)
    return list(map(_Test, p_values.tolist(), np.exp(-errors * needed).tolist()))


def _moments(sides: Iterable[Side]) -> dict[Side, _Moments]:
    """Mean and variance of each side's logarithms; the variance is at least that of what clocks do not resolve."""
    by_size: dict[int, list[Side]] = {}
    for side in sides:
        by_size.setdefault(side.n, []).append(side)
    found: dict[Side, _Moments] = {}
    for some in by_size.values():
        logs = np.log(np.maximum(np.stack([side.values for side in some]), RESOLUTION_S))
        unresolved = (RESOLUTION_S / np.exp(np.median(logs, axis=1))) ** 2
        variances = np.maximum(logs.var(axis=1, ddof=1), unresolved)
        found.update(zip(some, map(_Moments, logs.mean(axis=1).tolist(), variances.tolist()), strict=True))
    return found


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction: with it, all true null hypotheses of the list together are rejected with 5 % at most."""
    p = np.asarray(p_values, float)
    order = np.argsort(p, kind="stable")
    stepped = np.minimum(1.0, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)))
    corrected = np.empty_like(p)
    corrected[order] = stepped
    return [float(one) for one in corrected]


LINE_POINTS = 150
LINE_RESAMPLES = 200
LINE_MIN_POINTS = 6
"""The growth line looks at every pair of points; more of them are thinned to so many, at random."""


def growth(x: Sequence[float], y: Sequence[float]) -> Line | None:
    """How y grows with x: the weighted median of the slopes of all pairs of points, each weighing its distance in x,
    and the median of what is left. One wild point in four does not move it much.

    None with fewer than 6 points or where x hardly varies: two clouds are needed for a slope.
    """
    xs, ys = np.asarray(x, float), np.asarray(y, float)
    if len(xs) < LINE_MIN_POINTS or np.ptp(xs) < 1:
        return None
    random = np.random.default_rng(SEED)
    if len(xs) > LINE_POINTS:
        kept = np.sort(random.choice(len(xs), LINE_POINTS, replace=False))
        xs, ys = xs[kept], ys[kept]
    line = _line(xs, ys)
    if line is None:
        return None
    drawn = (random.integers(len(xs), size=len(xs)) for _ in range(LINE_RESAMPLES))
    resampled = np.array([one for i in drawn if (one := _line(xs[i], ys[i])) is not None])
    tail = (1 - LEVEL) / 2
    (slope_low, intercept_low), (slope_high, intercept_high) = np.quantile(resampled, (tail, 1 - tail), axis=0)
    return Line(
        line[0], float(slope_low), float(slope_high), line[1], float(intercept_low), float(intercept_high), len(x)
    )


def _line(x: Floats, y: Floats) -> tuple[float, float] | None:
    first, second = np.triu_indices(len(x), 1)
    apart = x[second] - x[first]
    some = apart != 0
    if not some.any():
        return None
    slopes = (y[second] - y[first])[some] / apart[some]
    order = np.argsort(slopes)
    weights = np.cumsum(np.abs(apart[some])[order])
    slope = float(slopes[order][np.searchsorted(weights, weights[-1] / 2)])
    return slope, float(np.median(y - slope * x))
