from __future__ import annotations

import time

import pytest

from headwater.bench.progress import BenchProgress, duration


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "0 s"), (99, "99 s"), (100, "2 min"), (2580, "43 min"), (7500, "2 h 5 min")],
)
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_the_time_left_follows_the_pace_but_not_the_first_request() -> None:
    with BenchProgress() as progress:
        progress.begin(100)
        begun = time.monotonic()
        assert progress.left_s(begun) == pytest.approx(100, rel=0.01)
        progress.advance(0.1)  # a tenth of a second of work that took ten
        assert progress.left_s(begun + 10) < 200
        progress.advance(49.9)
        assert progress.left_s(begun + 100) == pytest.approx(50 * 110 / 60, rel=0.01)  # twice as slow as thought
        progress.advance(50)
        assert progress.left_s(begun + 200) == 0
