from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest
import torch

from headwater.run.philox import Purpose, philox, uniform
from headwater.run.sampler import NotFinite, candidates, nucleus, pick, sample
from headwater.step import RowSampling


def test_philox_is_numpys() -> None:
    rng = random.Random(1)
    for _ in range(50):
        counter = [rng.getrandbits(64) for _ in range(4)]
        key = [rng.getrandbits(64) for _ in range(2)]
        before = sum(word << (64 * i) for i, word in enumerate(counter)) - 1  # NumPy counts up before it draws
        words = [(before >> (64 * i)) & (2**64 - 1) for i in range(4)]
        generator = np.random.Philox(counter=np.array(words, np.uint64), key=np.array(key, np.uint64))
        assert list(philox(tuple(counter), tuple(key))) == generator.random_raw(4).tolist()  # type: ignore[arg-type]


def test_draws_differ_by_everything_they_are_keyed_by() -> None:
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**63, 0, 0), (-1, 0, 0)]
    draws = [uniform(seed, choice, position, Purpose.TOKEN) for seed, choice, position in keys]
    assert len(set(draws)) == len(keys)
    assert draws == [uniform(seed, choice, position, Purpose.TOKEN) for seed, choice, position in keys]
    assert all(0.0 <= draw < 1.0 for draw in draws)


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0], [-5.0, -1.0, -3.0, -1.0]])
    assert sample(logits, [RowSampling()] * 3, [1, 2, 3]) == [1, 0, 1]
    assert sample(logits, [RowSampling(temperature=1e-6)] * 3, [1, 2, 3]) == [1, 0, 1]
    assert sample(logits, [RowSampling(temperature=5.0, top_k=1)] * 3, [1, 2, 3]) == [1, 0, 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [RowSampling(), RowSampling(temperature=1.0, top_p=0.9, seed=1)])
def test_a_row_that_is_not_finite_fails_alone(bad: float, sampling: RowSampling) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    expected = sample(logits, [sampling] * 3, [4, 5, 6])
    logits[1, 17] = bad
    got = sample(logits, [sampling] * 3, [4, 5, 6])
    assert isinstance(got[1], NotFinite)
    assert got[1].reason == "logits are not finite"
    assert (got[0], got[2]) == (expected[0], expected[2])


@pytest.mark.parametrize("sampling", [RowSampling(), RowSampling(temperature=1.0, top_p=0.9, seed=1)])
def test_minus_infinity_rules_a_token_out_and_nothing_else(sampling: RowSampling) -> None:
    logits = torch.full((2, 50), -math.inf)
    logits[0, 17] = -3.0
    only, none = sample(logits, [sampling] * 2, [4, 5])
    assert only == 17
    assert isinstance(none, NotFinite)


def exact(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> list[float]:
    """Probabilities by the definition, with a full sort, in float64 (no equal logits at the cuts)."""
    scaled = logits.double() / temperature
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    kept = order[:top_k] if top_k > 0 else order
    p = torch.softmax(scaled[kept], 0).tolist()
    n, mass = 0, 0.0
    while n < len(kept) and mass < top_p:
        mass += p[n]
        n += 1
    out = [0.0] * len(logits)
    for i, probability in zip(kept[:n], p[:n], strict=True):
        out[i] = probability / mass
    return out


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 5, 1.0), (1.0, 0, 0.8), (1.5, 12, 0.9), (2.0, 0, 0.999), (1.0, 3, 0.01)],
)
def test_distribution_by_chi_square(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(20, generator=torch.Generator().manual_seed(5)) * 2
    expected = exact(logits, temperature, top_k, top_p)
    n = 6000
    sampling = [RowSampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed) for seed in range(n)]
    drawn = Counter(sample(logits.expand(n, -1), sampling, [7] * n))
    assert set(drawn) <= {i for i, p in enumerate(expected) if p > 0}
    cells = [(drawn[i], n * p) for i, p in enumerate(expected) if p > 0]
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in cells)
    freedom = len(cells) - 1
    # Mean `freedom`, variance 2 * `freedom`; six standard deviations.
    assert statistic <= freedom + 6 * math.sqrt(2 * freedom) + 1e-9


@pytest.mark.parametrize("n", [1, 7, 512, 513, 5000])
def test_pick_is_the_running_sum(n: int) -> None:
    weights = np.exp(np.random.default_rng(n).standard_normal(n) * 3).astype(np.float32)
    weights[np.random.default_rng(1).random(n) < 0.3] = 0.0
    weights[n // 2] = 1.0
    running = np.cumsum(weights, dtype=np.float64)
    for u in [0.0, *np.random.default_rng(2).random(300), 1.0 - 2.0**-53]:
        at = pick(weights, float(u))
        assert weights[at] > 0
        assert running[at] >= u * running[-1] * (1 - 1e-12)
        assert at == 0 or running[at - 1] <= u * running[-1] * (1 + 1e-12)


def test_positions_of_one_seed_are_independent_draws() -> None:
    logits = torch.zeros(10)
    n = 5000
    drawn = Counter(sample(logits.expand(n, -1), [RowSampling(temperature=1.0, seed=3)] * n, range(n)))
    assert all(abs(drawn[i] - n / 10) < 6 * math.sqrt(n * 0.09) for i in range(10))


def test_a_row_draws_the_same_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(9, 4001, generator=generator) * 3  # rows of an odd length start unaligned
    sampling = [
        RowSampling(temperature=0.5 + i / 4, top_p=[1.0, 0.9, 0.99][i % 3], top_k=[0, 50, 3000][i // 3], seed=i)
        for i in range(9)
    ]
    positions = list(range(100, 109))
    together = sample(logits, sampling, positions)
    for i in range(9):
        assert sample(logits[i : i + 1].clone(), [sampling[i]], [positions[i]]) == [together[i]]
    shuffled = list(range(9))
    random.Random(1).shuffle(shuffled)
    again = sample(logits[shuffled], [sampling[i] for i in shuffled], [positions[i] for i in shuffled])
    assert again == [together[i] for i in shuffled]


@pytest.mark.parametrize("n", [10, 300, 30000])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("rounded", [False, True], ids=["distinct", "many-equal"])
def test_nucleus_is_the_one_of_a_full_sort(n: int, top_p: float, rounded: bool) -> None:
    for seed in range(5):
        logits = torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 2
        if rounded:
            logits = logits.to(torch.bfloat16).float().round(decimals=0)  # as a bf16 head gives: many equal logits
        weights = torch.exp(logits - logits.max()).numpy()
        order = sorted(range(n), key=lambda i: (-weights[i], i))
        cumulative = np.cumsum(weights[order].astype(np.float64))
        target = top_p * weights.sum(dtype=np.float64)
        count = int(np.searchsorted(cumulative, target)) + 1
        got = nucleus(weights, top_p).tolist()
        assert got == sorted(got)
        if abs(cumulative[min(count, n) - 1] - target) < 1e-9 * target:
            continue  # decided by rounding
        assert got == sorted(order[:count])


def test_equal_logits_at_the_cuts() -> None:
    logits = np.array([1.0, 2.0, 2.0, 3.0, 2.0, 0.0], dtype=np.float32)
    # top_k keeps the equals of the k-th, as vLLM and Transformers do.
    ids, _ = candidates(logits, RowSampling(temperature=1.0, top_k=2), np.float32(3.0))
    assert ids.tolist() == [1, 2, 3, 4]
    # top_p takes the lowest ids of equals, no more than are needed: 0.61, then 0.22 each.
    ids, _ = candidates(logits[1:4], RowSampling(temperature=1.0, top_p=0.7), np.float32(3.0))
    assert ids.tolist() == [0, 2]


def test_top_k_of_the_whole_vocabulary_or_more_is_no_filter() -> None:
    logits = np.arange(5, dtype=np.float32)
    for top_k in (0, -1, 5, 6):
        ids, _ = candidates(logits, RowSampling(temperature=1.0, top_k=top_k), np.float32(4.0))
        assert ids.tolist() == [0, 1, 2, 3, 4]


def test_extreme_parameters_give_a_token() -> None:
    logits = torch.tensor([[0.0, 1.0, 200.0, -1e30]])
    for sampling in (
        RowSampling(temperature=1e-4, seed=1),
        RowSampling(temperature=1.0, top_p=1e-9, seed=1),
        RowSampling(temperature=1.0, seed=2**64 + 5),
    ):
        assert sample(logits, [sampling], [0]) == [2]
    assert sample(torch.zeros((0, 5)), [], []) == []
