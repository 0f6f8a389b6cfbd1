"""From logits to the next token of each row, by that row's logits and parameters alone.

In NumPy, row by row: one thread, no barrier to wait at, and nothing that depends on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from headwater.run.philox import Purpose, uniform
from headwater.step import RowSampling

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM: logits divided by less overflow."""
SMALL = 256
"""So many candidates are sorted rather than halved again."""


@dataclass(frozen=True, slots=True)
class NotFinite:
    """A row whose logits hold NaN or infinity: no token can be chosen."""

    reason: str = "logits are not finite"


def sample(
    logits: Tensor, sampling: Sequence[RowSampling], positions: Sequence[int], choice: int = 0
) -> list[int | NotFinite]:
    """The token of each row, or NotFinite for that row alone.

    ``logits`` float32 [n, vocab_size]; ``positions[i]`` is the position that row i's token will have. Greedy takes
    the largest logit, the lowest id of equals. Otherwise temperature, then top_k (equals of the k-th stay in), then
    top_p on what is left: the fewest most likely tokens whose mass reaches top_p (of equals the lowest ids).
    """
    return [
        _token(row, one, position, choice)
        for row, one, position in zip(logits.numpy(), sampling, positions, strict=True)
    ]


def _token(logits: Floats, sampling: RowSampling, position: int, choice: int) -> int | NotFinite:
    best = int(logits.argmax())
    if not np.isfinite(logits[best]) or not np.isfinite(logits.min()):  # argmax and min both stop at a NaN
        return NotFinite()
    if sampling.temperature < GREEDY_BELOW or sampling.top_k == 1:
        return best
    ids, weights = candidates(logits, sampling, top=logits[best])
    mass = np.cumsum(weights, dtype=np.float64)
    u = uniform(sampling.seed, choice, position, Purpose.TOKEN)
    # The first id with mass > u * total has a weight above 0. The product may round up to the total itself.
    at = min(int(np.searchsorted(mass, u * mass[-1], side="right")), len(mass) - 1)
    return int(ids[at])


def candidates(logits: Floats, sampling: RowSampling, top: np.float32) -> tuple[Ints, Floats]:
    """Ids that may be drawn, ascending, and their weights (probabilities but for a common factor).

    ``top`` is the largest logit. No sort of the vocabulary: selection by halves.
    """
    n = len(logits)
    ids: Ints = np.arange(n)
    if 0 < sampling.top_k < n:
        kth = np.partition(logits, n - sampling.top_k)[n - sampling.top_k]
        ids = np.flatnonzero(logits >= kth)
        logits = logits[ids]
    weights: Floats = logits - top
    with np.errstate(under="ignore"):
        weights /= np.float32(sampling.temperature)
        np.exp(weights, out=weights)
    if sampling.top_p < 1.0:
        kept = nucleus(weights, sampling.top_p)
        return ids[kept], weights[kept]
    return ids, weights


def nucleus(weights: Floats, top_p: float) -> Ints:
    """Indices, ascending, of the fewest largest weights whose sum reaches top_p of the total; at least one."""
    total = float(weights.sum(dtype=np.float64))
    target = top_p * total
    # Weights below (1 - top_p) * total / n sum to less than what may be left out: none of them is needed.
    active = np.flatnonzero(weights >= (1.0 - top_p) * total / len(weights))
    values = weights[active]
    taken: list[Ints] = []  # indices known to be in
    mass = 0.0  # of those
    while len(values) > SMALL:
        pivot = np.partition(values, len(values) // 2)[len(values) // 2]
        above = values > pivot
        mass_above = mass + float(values[above].sum(dtype=np.float64))
        if mass_above >= target:
            values, active = values[above], active[above]
            continue
        equal = values == pivot
        taken.append(active[above])
        mass = mass_above
        n_equal = _needed(target - mass, float(pivot), int(equal.sum()))
        taken.append(active[equal][:n_equal])
        if n_equal < int(equal.sum()) or mass + n_equal * float(pivot) >= target:
            return np.sort(np.concatenate(taken))
        mass += n_equal * float(pivot)
        below = values < pivot
        values, active = values[below], active[below]
    order = np.lexsort((active, -values))
    cumulative = mass + np.cumsum(values[order], dtype=np.float64)
    taken.append(active[order[: int(np.searchsorted(cumulative, target, side="left")) + 1]])
    return np.sort(np.concatenate(taken))


def _needed(missing: float, each: float, most: int) -> int:
    """How many of ``most`` equal weights reach ``missing``."""
    return min(most, max(1, int(np.ceil(missing / each)))) if each > 0.0 else most
