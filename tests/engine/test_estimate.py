"""Seconds by steps: exact where measured, between and beyond by a stated rule."""

from __future__ import annotations

import pytest

from headwater.engine.estimate import StepTimes


def times(*steps: tuple[int, float], budget: int = 512) -> StepTimes:
    made = StepTimes(budget)
    for n_tokens, seconds in steps:
        made.observe(n_tokens, seconds)
    return made


def test_nothing_is_known_before_the_first_step() -> None:
    assert times().seconds(17) is None


def test_what_was_measured_is_what_is_told() -> None:
    made = times((1, 0.01), (128, 0.2), (512, 0.9))
    assert [made.seconds(n) for n in (1, 128, 512)] == pytest.approx([0.01, 0.2, 0.9])


def test_between_sizes_in_proportion_and_never_more_than_the_larger() -> None:
    made = times((1, 0.01), (101, 0.21))
    assert made.seconds(51) == pytest.approx(0.11)
    assert made.seconds(2) == pytest.approx(0.012)


def test_beyond_the_largest_in_proportion_and_below_the_smallest_as_long() -> None:
    made = times((64, 0.1))
    assert made.seconds(128) == pytest.approx(0.2)
    assert made.seconds(3) == pytest.approx(0.1)


def test_more_than_a_budget_takes_several_steps() -> None:
    made = times((1, 0.01), (100, 0.2), budget=100)
    assert made.seconds(301) == pytest.approx(0.61)
    assert made.seconds(300) == pytest.approx(0.6)
    assert made.seconds(0) == 0.0


def test_recent_steps_count_more() -> None:
    made = times((8, 1.0), *((8, 0.1) for _ in range(60)))
    assert made.seconds(8) == pytest.approx(0.1, rel=0.01)


def test_memory_is_bounded_by_the_sizes_of_steps() -> None:
    made = times(*((n, 0.001 * n) for n in range(1, 2000)))
    assert len(made._means) == 11
