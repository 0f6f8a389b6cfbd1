"""From logits to the next token of each row, by that row's logits and parameters alone.

In NumPy: one thread, no barrier to wait at, and nothing that depends on the other rows.
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
SMALL = 2048
"""So few candidates are sorted rather than halved again."""
STRETCH = 512
"""Weights summed at a time when one is picked."""


@dataclass(frozen=True, slots=True)
class NotFinite:
    """A row whose logits hold NaN or +inf, or nothing but -inf (which is how a token is ruled out): no token can be
    chosen."""

    reason: str = "logits are not finite"


def sample(
    logits: Tensor, sampling: Sequence[RowSampling], positions: Sequence[int], choice: int = 0
) -> list[int | NotFinite]:
    """The token of each row, or NotFinite for that row alone.

    ``logits`` float32 [n, vocab_size]; ``positions[i]`` is the position that row i's token will have. Greedy takes
    the largest logit, the lowest id of equals. Otherwise temperature, then top_k (equals of the k-th stay in), then
    top_p on what is left: the fewest most likely tokens whose mass reaches top_p (of equals the lowest ids).
    """
    rows: Floats = logits.numpy()
    best = rows.argmax(axis=1)
    finite = np.isfinite(rows[np.arange(len(rows)), best]).tolist()  # argmax stops at a NaN
    tokens: list[int | NotFinite] = []
    for i, (one, position) in enumerate(zip(sampling, positions, strict=True)):
        if not finite[i]:
            tokens.append(NotFinite())
        elif one.temperature < GREEDY_BELOW or one.top_k == 1:
            tokens.append(int(best[i]))
        else:
            tokens.append(_draw(rows[i], one, rows[i, best[i]], position, choice))
    return tokens


def _draw(logits: Floats, sampling: RowSampling, top: np.float32, position: int, choice: int) -> int:
    ids, weights = candidates(logits, sampling, top)
    at = pick(weights, uniform(sampling.seed, choice, position, Purpose.TOKEN))
    return int(ids[at])


def pick(weights: Floats, u: float) -> int:
    """The index at which the running sum of ``weights`` passes u of the total; never one with weight 0.

    Sums of stretches first, then inside one: a running sum of the whole vocabulary costs ten times as much.
    """
    sums = np.add.reduceat(weights, np.arange(0, len(weights), STRETCH), dtype=np.float64)
    running = np.cumsum(sums)
    target = u * running[-1]
    stretch = _passes(running, sums, target)
    part = weights[stretch * STRETCH : (stretch + 1) * STRETCH]
    return stretch * STRETCH + _passes(
        np.cumsum(part, dtype=np.float64), part, target - (running[stretch] - sums[stretch])
    )


def _passes(running: npt.NDArray[np.float64], weights: npt.NDArray[np.floating], target: float) -> int:
    """First index with running > target; where rounding leaves none, the last with a weight."""
    at = int(np.searchsorted(running, target, side="right"))
    return at if at < len(running) and weights[at] > 0 else int(np.flatnonzero(weights)[-1])


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
    """Indices, ascending, of the fewest largest weights whose sum reaches top_p of the total; at least one.

    The smallest weight that is needed is found by halves: a half that is needed whole is summed and left.
    """
    total = float(weights.sum(dtype=np.float64))
    target = top_p * total
    # Weights below (1 - top_p) * total / n sum to less than what may be left out: none of them is needed.
    rest = weights[weights >= (1.0 - top_p) * total / len(weights)]
    mass = 0.0  # of the larger ones that are no longer in rest
    while len(rest) > SMALL:
        middle = len(rest) // 2
        rest.partition(middle)
        with_upper = mass + float(rest[middle:].sum(dtype=np.float64))
        if with_upper >= target:
            rest = rest[middle:]
        else:
            mass, rest = with_upper, rest[:middle]
    falling = np.sort(rest)[::-1]
    reached = int(np.searchsorted(mass + np.cumsum(falling, dtype=np.float64), target, side="left"))
    smallest = falling[min(reached, len(falling) - 1)]
    larger, equal = np.flatnonzero(weights > smallest), np.flatnonzero(weights == smallest)
    missing = target - float(weights[larger].sum(dtype=np.float64))
    n_equal = max(1, int(np.ceil(missing / smallest))) if smallest > 0 else len(equal)
    return np.sort(np.concatenate((larger, equal[:n_equal])))
