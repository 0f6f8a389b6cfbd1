"""The statistics against closed forms, scipy and simulation."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
from scipy import stats as reference

from headwater.bench.stats import (
    MIN_INTERVAL,
    RESOLUTION_S,
    Outcome,
    Side,
    compare,
    estimate,
    growth,
    holm,
    median_interval,
)

Draw = Callable[[np.random.Generator, "int | tuple[int, int]"], np.ndarray]

NOISES: dict[str, Draw] = {
    "lognormal": lambda random, n: 0.03 * np.exp(random.normal(0, 0.2, n)),
    "exponential": lambda random, n: 0.02 + random.exponential(0.01, n),
    "outliers": lambda random, n: 0.03 * np.exp(random.normal(0, 0.05, n)) * np.where(random.random(n) < 0.1, 4, 1),
    "two modes": lambda random, n: np.where(random.random(n) < 0.5, 0.02, 0.04) * np.exp(random.normal(0, 0.01, n)),
    "ticks": lambda random, n: 0.016 + 0.004 * random.integers(0, 3, n),
}


def simulated_report(draw: Draw, random: np.random.Generator, repeats: int) -> list[tuple[Side, Side]]:
    """What a full sweep compares: in each of 18 cells hit, control and off, in three metrics."""
    values = np.sort(draw(random, (18 * 3 * 3, repeats)), axis=1)
    sides = [Side(("ttft", "itl", "e2e")[i // 3 % 3], row) for i, row in enumerate(values)]
    return [pair for i in range(0, len(sides), 3) for pair in combinations(sides[i : i + 3], 2)]


CASES = [("lognormal", 20), ("two modes", 5), ("ticks", 5), *((noise, 10) for noise in NOISES)]


@pytest.mark.parametrize(("noise", "repeats"), CASES)
def test_fewer_than_5_percent_of_200_reports_about_nothing_name_a_difference(noise: str, repeats: int) -> None:
    random = np.random.default_rng(repeats)
    false = 0
    for _ in range(200):
        found = compare(simulated_report(NOISES[noise], random, repeats))
        assert len(found) == 162
        false += any(one.outcome is Outcome.DIFFERENT for one in found)
    assert false < 0.05 * 200


@pytest.mark.parametrize(("repeats", "ratio"), [(5, 0.3), (10, 0.5), (20, 0.7)])
def test_a_real_difference_among_161_others_is_found(repeats: int, ratio: float) -> None:
    random = np.random.default_rng(1)
    found = 0
    for _ in range(40):
        pairs = simulated_report(NOISES["lognormal"], random, repeats)
        shifted = Side.of("ttft", ratio * NOISES["lognormal"](random, repeats))
        found += compare([(shifted, pairs[0][1]), *pairs[1:]])[0].outcome is Outcome.DIFFERENT
    assert found >= 0.8 * 40


def test_a_hit_of_a_2048_token_prefix_is_found_with_ten_repeats_on_a_noisy_machine() -> None:
    random = np.random.default_rng(2)
    for _ in range(40):
        pairs = simulated_report(NOISES["outliers"], random, 10)
        control = Side.of("ttft", 20 * NOISES["outliers"](random, 10))
        one = compare([(pairs[0][0], control), *pairs[1:]])[0]
        assert one.outcome is Outcome.DIFFERENT
        assert one.ratio_low is not None and one.ratio_high is not None
        assert one.ratio_low < 0.05 < one.ratio_high


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("n", [5, 10, 20])
def test_an_interval_holds_the_median_as_often_as_it_says(noise: str, n: int) -> None:
    random = np.random.default_rng(n)
    true = float(np.median(NOISES[noise](random, 1_000_001)))
    held = []
    for _ in range(200):
        one = estimate(np.sort(NOISES[noise](random, n)))
        assert one.low is not None and one.high is not None
        held.append(one.low <= true <= one.high)
    assert np.mean(held) >= one.holds - 3 * np.sqrt(0.05 * 0.95 / 200)


def test_the_interval_is_no_narrower_than_scipys_bootstrap() -> None:
    values = np.sort(np.random.default_rng(3).lognormal(size=30))
    theirs = reference.bootstrap((values,), np.median, method="percentile", random_state=1).confidence_interval
    low, high = median_interval(values)
    assert low <= theirs.low * 1.0001
    assert high >= theirs.high * 0.9999
    assert high - low < 1.6 * (theirs.high - theirs.low)


@pytest.mark.parametrize(("n", "holds"), [(5, 1 - 2 / 2**5), (6, 1 - 2 / 2**6), (8, 1 - 2 / 2**8), (9, 1 - 20 / 2**9)])
def test_few_samples_span_the_median_with_a_known_probability(n: int, holds: float) -> None:
    assert estimate(np.arange(float(n))).holds == pytest.approx(holds)


def test_below_five_samples_there_is_a_median_and_no_interval() -> None:
    one = estimate(np.array([1.0, 2.0, 4.0, 8.0]))
    assert (one.n, one.median, one.low, one.high) == (4, 3.0, None, None)


@pytest.mark.parametrize(
    ("n", "has_p95", "has_p99"), [(19, False, False), (20, True, False), (99, True, False), (100, True, True)]
)
def test_p95_from_20_samples_and_p99_from_100(n: int, has_p95: bool, has_p99: bool) -> None:
    one = estimate(np.arange(float(n)))
    assert (one.p95 is not None, one.p99 is not None) == (has_p95, has_p99)
    if one.p95 is not None:
        assert one.p95 == pytest.approx(0.95 * (n - 1))


def test_holm_steps_down() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])  # Holm's own arithmetic
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_a_single_comparison_is_welchs_test() -> None:
    random = np.random.default_rng(4)
    a, b = random.lognormal(0, 0.2, 12), random.lognormal(0.3, 0.2, 9)
    # Of two sides the usual variance is their mean, which Welch's test is given here by equal samples of noise.
    a = np.exp((np.log(a) - np.log(a).mean()) / np.log(a).std(ddof=1) * 0.2)
    b = np.exp((np.log(b) - np.log(b).mean()) / np.log(b).std(ddof=1) * 0.2 + 0.3)
    one = compare([(Side.of("ttft", a), Side.of("ttft", b))])[0]
    assert one.p == pytest.approx(reference.ttest_ind(np.log(a), np.log(b), equal_var=False).pvalue)


def test_fewer_than_five_samples_decide_nothing_however_far_apart() -> None:
    one = compare([(Side.of("ttft", [0.01] * 4), Side.of("ttft", [1.0] * 50))])[0]
    assert (one.outcome, one.ratio, one.p) == (Outcome.TOO_FEW, None, None)


def test_no_ratio_without_a_shown_difference() -> None:
    random = np.random.default_rng(5)
    one = compare([(Side.of("ttft", random.lognormal(0, 0.3, 10)), Side.of("ttft", random.lognormal(0.1, 0.3, 10)))])[0]
    assert one.outcome is Outcome.NOT_SHOWN
    assert one.ratio is None and one.ratio_low is None
    assert one.least is not None and 0.3 < one.least < 0.9


def test_a_ratios_interval_leaves_out_one_exactly_when_the_intervals_are_apart() -> None:
    one = compare([(Side.of("ttft", np.linspace(1, 2, 10)), Side.of("ttft", np.linspace(9, 11, 10)))])[0]
    assert one.outcome is Outcome.DIFFERENT
    assert one.ratio == pytest.approx(1.5 / 10)
    assert one.ratio_high is not None and one.ratio_high < 1


def test_overlapping_intervals_show_no_difference_though_the_test_finds_one() -> None:
    one = compare([(Side.of("ttft", np.linspace(1, 2, 20)), Side.of("ttft", np.linspace(1.25, 2.25, 20)))])[0]
    assert one.p is not None and one.p < 0.05
    assert (one.outcome, one.ratio) == (Outcome.NOT_SHOWN, None)


def test_equal_constants_do_not_differ_and_far_ones_do() -> None:
    same, other = Side.of("itl", [0.012] * 10), Side.of("itl", [0.012] * 10)
    far, near = Side.of("itl", [0.010] * 10), Side.of("itl", [0.012 + RESOLUTION_S / 4] * 10)
    outcomes = [one.outcome for one in compare([(same, other), (same, far), (same, near)])]
    assert outcomes == [Outcome.NOT_SHOWN, Outcome.DIFFERENT, Outcome.NOT_SHOWN]


def test_gaps_of_zero_are_compared_without_a_ratio() -> None:
    one = compare([(Side.of("itl", [0.0] * 10), Side.of("itl", [0.01] * 10))])[0]
    assert (one.outcome, one.ratio) == (Outcome.DIFFERENT, None)


def test_few_samples_that_agree_by_chance_are_not_certain() -> None:
    """One lucky pair of tight groups among noisy ones: the usual variance is what counts."""
    random = np.random.default_rng(6)
    noisy = [tuple(Side.of("ttft", random.lognormal(0, 0.4, 5)) for _ in range(2)) for _ in range(20)]
    lucky = (Side.of("ttft", [1.0, 1.001, 1.002, 1.003, 1.004]), Side.of("ttft", [1.2, 1.201, 1.202, 1.203, 1.204]))
    assert compare([lucky])[0].outcome is Outcome.DIFFERENT
    assert compare([lucky, *noisy])[0].outcome is Outcome.NOT_SHOWN  # type: ignore[list-item]


def test_the_same_samples_always_give_the_same_interval() -> None:
    values = np.sort(np.random.default_rng(7).lognormal(size=17))
    assert median_interval(values) == median_interval(values)


# ---- the growth line ---------------------------------------------------------------------------------


def test_the_growth_line_finds_the_prices_despite_wild_points() -> None:
    random = np.random.default_rng(8)
    x = np.repeat([17.0, 145, 529, 2065], 15)
    y = (0.010 + 300e-6 * x) * np.exp(random.normal(0, 0.05, len(x)))
    y[::7] *= 5
    line = growth(x, y)
    assert line is not None
    assert line.slope == pytest.approx(300e-6, rel=0.06)
    assert line.intercept == pytest.approx(0.010, abs=0.004)
    assert line.slope_low < line.slope < line.slope_high
    assert line.n == 60


def test_growth_intervals_hold_the_truth() -> None:
    random = np.random.default_rng(9)
    held = []
    for _ in range(30):
        x = np.repeat([17.0, 145, 529, 2065], 8)
        line = growth(x, 0.010 + 300e-6 * x + random.normal(0, 0.004, len(x)))
        assert line is not None
        held.append((line.slope_low <= 300e-6 <= line.slope_high, line.intercept_low <= 0.010 <= line.intercept_high))
    assert np.mean(held, axis=0).min() >= 0.8


def test_no_line_through_one_cloud_or_few_points() -> None:
    assert growth([529.0] * 30, np.linspace(0.1, 0.2, 30)) is None
    assert growth([1.0, 2, 3], [1.0, 2, 3]) is None
    assert MIN_INTERVAL == 5
