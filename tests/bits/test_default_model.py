"""The matrix on the default model, pair by pair: every two levels of different factors meet in some cell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bits.matrix import STRANGERS, THREADS, WHOLE, Cell
from tests.bits.numbers import NATIVE, Numbers
from tests.bits.pairwise import pairwise
from tests.bits.real import RealMatrix

CASES = pairwise((NATIVE, (1, 7, 64, WHOLE), STRANGERS, THREADS, (False, True), (False, True)), seed=5)


@pytest.mark.parametrize("numbers", NATIVE, ids=lambda numbers: numbers.name)
def test_the_same_bits(model_file: Callable[[str], Path], numbers: Numbers) -> None:
    cells = [Cell(*case[1:]) for case in CASES if case[0] == numbers]
    matrix = RealMatrix(model_file("smollm2-135m"), numbers, n_shared=96, n_cold=70)
    assert matrix.promised, "the start-up probe says that bits are not kept"
    total = matrix.run(cells)
    assert total.cells == len(cells) and total.hit_tokens >= 144 * len(cells)
    assert total.copied_tokens == 20 * len(cells) and total.preemptions > 0
    assert total.logits > 40 * len(cells) and total.kv_bytes > 1_000_000 * len(cells)


def test_the_selection_is_no_more_than_needed() -> None:
    assert 24 <= len(CASES) <= 30
    assert {case[0] for case in CASES} == set(NATIVE)
