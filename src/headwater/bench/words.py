"""Figures as a report writes them."""

from __future__ import annotations

from headwater.bench.stats import MIN_P95, MIN_P99, Comparison, Estimate, Outcome

TOO_SMALL = "n too small"


def ms(seconds: float) -> str:
    """Milliseconds with three digits or so."""
    value = 1e3 * seconds
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def times(ratio: float) -> str:
    """A ratio with two digits that say something, however near to 0."""
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"


def median(one: Estimate | None) -> str:
    """``605 [593, 624] n=7``, in ms; without an interval where n is too small for one."""
    if one is None or one.n == 0:
        return "-"
    if one.low is None or one.high is None:
        return f"{ms(one.median)} [{TOO_SMALL}] n={one.n}"
    return f"{ms(one.median)} [{ms(one.low)}, {ms(one.high)}] n={one.n}"


def p95(one: Estimate | None) -> str:
    return _quantile(one.p95 if one else None, one, MIN_P95)


def p99(one: Estimate | None) -> str:
    return _quantile(one.p99 if one else None, one, MIN_P99)


def _quantile(value: float | None, one: Estimate | None, least: int) -> str:
    if one is None or one.n == 0:
        return "-"
    return f"{TOO_SMALL} (< {least})" if value is None else ms(value)


def ratio(one: Comparison | None) -> str:
    """The ratio with its interval, or why there is none."""
    if one is None:
        return "-"
    if one.outcome is Outcome.DIFFERENT and one.ratio is None:
        return "different, no ratio (times of 0)"
    if one.ratio is None or one.ratio_low is None or one.ratio_high is None:
        return one.outcome.value
    return f"{times(one.ratio)} [{times(one.ratio_low)}, {times(one.ratio_high)}]"


def count(number: float | None) -> str:
    return "-" if number is None else f"{number:,.0f}"


def plural(n: int, one: str, many: str | None = None) -> str:
    return f"{n:,} {one}" if n == 1 else f"{n:,} {many or one + 's'}"
