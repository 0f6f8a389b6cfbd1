"""Choosing cells of a matrix."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

Case = tuple[Any, ...]


def pairwise(factors: Sequence[Sequence[object]], seed: int) -> list[Case]:
    """Cases in which every two levels of different factors meet. Greedy: each covers the most new pairs."""
    candidates = list(itertools.product(*factors))
    random.Random(seed).shuffle(candidates)

    def pairs(case: Case) -> set[tuple[int, object, int, object]]:
        both = itertools.combinations(enumerate(case), 2)
        return {(i, a, j, b) for (i, a), (j, b) in both}

    of = {case: pairs(case) for case in candidates}
    left = set().union(*of.values())
    cases = []
    while left:
        best = max(candidates, key=lambda case: len(of[case] & left))
        left -= of[best]
        cases.append(best)
    return cases
