"""Seeded sampling is a function of the request alone: not of the batch, of preemption, or of the cache."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.engine import WHOLE, Answer, Engine, Loaded, some_tokens

VOCAB = 300
N_NEW = 24
SHARED = some_tokens(24, seed=1, vocab=VOCAB)
PROMPTS = [SHARED + some_tokens(3 + i, seed=50 + i, vocab=VOCAB) for i in range(6)]
WAYS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 1.5, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 12},
    {"temperature": 2.0, "top_k": 50, "top_p": 0.7},
    {"temperature": 1.0},
    {"temperature": 0.3},
]


@pytest.fixture(scope="module")
def alone(plain: Loaded) -> list[list[int]]:
    """Each request alone, without cache, its prompt in one chunk."""
    out = []
    for i, (prompt, way) in enumerate(zip(PROMPTS, WAYS, strict=True)):
        out.append(Engine(plain, caching=False).generate(prompt, N_NEW, seed=i, **way).tokens)
    return out


def submit_all(engine: Engine, order: list[int]) -> dict[int, Answer]:
    return {i: engine.submit(PROMPTS[i], N_NEW, seed=i, **WAYS[i]) for i in order}


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("chunk", [5, WHOLE])
@pytest.mark.parametrize("max_seqs", [1, 2, 6])
def test_whatever_the_batch_and_the_cache(
    plain: Loaded, alone: list[list[int]], caching: bool, chunk: int, max_seqs: int
) -> None:
    engine = Engine(plain, caching=caching, budget=chunk, max_seqs=max_seqs, block_size=8)
    engine.generate(SHARED)
    answers = submit_all(engine, [3, 0, 5, 1, 4, 2])
    engine.run()
    assert [answers[i].tokens for i in range(6)] == alone
    assert {answer.n_cached for answer in answers.values()} == {24 if caching else 0}


def test_whatever_is_preempted(plain: Loaded, alone: list[list[int]]) -> None:
    engine = Engine(plain, block_size=4, n_blocks=24, max_model_len=60)
    answers = submit_all(engine, list(range(6)))
    engine.run()
    assert sum(answer.seq.n_preemptions for answer in answers.values()) > 3
    assert [answers[i].tokens for i in range(6)] == alone


def test_a_forced_reset_in_the_middle_changes_no_draw(plain: Loaded, alone: list[list[int]]) -> None:
    engine = Engine(plain, block_size=4)
    answers = submit_all(engine, list(range(6)))
    for _ in range(4):
        for _ in range(5):
            engine.step()
        assert engine.reset(force=True).done
    engine.run()
    assert [answers[i].tokens for i in range(6)] == alone


def test_seeds_matter_and_are_repeatable(plain: Loaded) -> None:
    engine = Engine(plain)
    prompt = PROMPTS[0]
    outputs = [tuple(engine.generate(prompt, 8, temperature=1.5, seed=seed).tokens) for seed in (0, 1, 2, 0, 1, 2)]
    assert outputs[:3] == outputs[3:]
    assert len(set(outputs)) == 3
    # Without a seed the engine draws one for each request.
    assert len({tuple(engine.generate(prompt, 8, temperature=1.5).tokens) for _ in range(4)}) > 1


def test_equal_requests_side_by_side_draw_equally(plain: Loaded, alone: list[list[int]]) -> None:
    engine = Engine(plain)
    answers = [engine.submit(PROMPTS[0], N_NEW, seed=0, **WAYS[0]) for _ in range(4)]
    engine.run()
    assert all(answer.tokens == alone[0] for answer in answers)
