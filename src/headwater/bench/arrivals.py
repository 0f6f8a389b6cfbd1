"""When the requests of an open load arrive: at random, or at a fixed rate."""

from __future__ import annotations

import numpy as np


def poisson(n_requests: int, rate: float, seed: int) -> list[float]:
    """Arrival times in seconds, ascending, of independent users who send ``rate`` requests per second together: the
    gaps are exponential with mean 1 / rate, and the first request comes after one of them."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, n_requests)
    return [float(at) for at in np.cumsum(gaps)]


def fixed(n_requests: int, rate: float) -> list[float]:
    """Arrival times in seconds, one every 1 / rate, from 0 on."""
    return [i / rate for i in range(n_requests)]
