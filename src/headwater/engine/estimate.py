"""How long it takes to compute tokens, by the steps that this engine has run."""

from __future__ import annotations

from bisect import bisect_left

WEIGHT = 0.125
"""Of a new step in the mean of steps of its size."""


class StepTimes:
    """Recent step times by size. Steps of 2**k to 2**(k + 1) - 1 tokens have one mean: a step of few tokens reads all
    weights for them, so that time is no straight line over tokens.

    ``max_step_tokens`` is the token budget of a step: more tokens take several.
    """

    def __init__(self, max_step_tokens: int) -> None:
        self._max_step_tokens = max_step_tokens
        self._means: dict[int, tuple[float, float]] = {}
        """Per bit length of the number of tokens: mean tokens and mean seconds."""

    def observe(self, n_tokens: int, seconds: float) -> None:
        """A step of ``n_tokens`` tokens, of all its requests together, took ``seconds``."""
        size = n_tokens.bit_length()
        known = self._means.get(size)
        if known is None:
            self._means[size] = (float(n_tokens), seconds)
        else:
            self._means[size] = (known[0] + WEIGHT * (n_tokens - known[0]), known[1] + WEIGHT * (seconds - known[1]))

    def seconds(self, n_tokens: int) -> float | None:
        """Seconds to compute ``n_tokens`` in steps of their own; None before there was a step. An estimate: it knows
        nothing of the length of the context, and no waiting."""
        if not self._means:
            return None
        n_full, n_rest = divmod(n_tokens, self._max_step_tokens)
        return (n_full * self._step(self._max_step_tokens) if n_full else 0.0) + (self._step(n_rest) if n_rest else 0.0)

    def _step(self, n_tokens: int) -> float:
        """Seconds of one step: between the nearest sizes that were measured; beyond the largest in proportion to it;
        below the smallest as long as that.

        seconds |        .-'  in proportion
                |     _.-'
                | ---'
                +-------------- tokens
        """
        points = [self._means[size] for size in sorted(self._means)]
        i = bisect_left(points, (float(n_tokens), 0.0))
        if i == 0:
            return points[0][1]
        low_n, low_s = points[i - 1]
        if i == len(points):
            return low_s * n_tokens / low_n
        high_n, high_s = points[i]
        return low_s + (high_s - low_s) * (n_tokens - low_n) / (high_n - low_n)
