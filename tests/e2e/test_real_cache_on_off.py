"""Cache on against cache off on the two real models, in float32 and bf16.

The matrix model x dtype x hit x chunk x batch is covered pair by pair; the order of the candidates is seeded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from headwater.text.tokenizer import load_tokenizer
from tests.bits.pairwise import Case, pairwise
from tests.e2e.compare import assert_same, oracle
from tests.e2e.engine import WHOLE, Answer, Engine, Loaded, load, other_than
from tests.model.test_real_models import LONG_TEXT

MODELS = ("smollm2-135m", "gemma3-270m")
DTYPES = (torch.float32, torch.bfloat16)
HITS = (0, 16, 32, "long")
CHUNKS = (1, 7, 64, WHOLE)
BATCHES = (1, 3, 8)
LONG = {"smollm2-135m": 160, "gemma3-270m": 640}
"""A long hit; for Gemma longer than its windows of 512, so that sliding groups start in the middle."""
N_NEW = 3

ALL = list(itertools.product(MODELS, DTYPES))
CASES = pairwise([list(ALL), list(HITS), list(CHUNKS), list(BATCHES)], seed=1)


def test_the_selection_has_every_pair_and_is_no_more_than_needed() -> None:
    assert 16 <= len(CASES) <= 20
    assert {(case[0], case[1]) for case in CASES} == set(itertools.product(itertools.product(MODELS, DTYPES), HITS))
    assert {(case[2], case[3]) for case in CASES} == set(itertools.product(CHUNKS, BATCHES))


@dataclass
class Real:
    name: str
    loaded: Loaded
    text: list[int]
    """Real text, as tokens."""
    engine: Engine
    """Has ``text[: LONG + 16]`` in its cache, in blocks of no order."""


@pytest.fixture(scope="module", params=ALL, ids=lambda p: f"{p[0]}-{p[1]}".replace("torch.", ""))
def real(request: pytest.FixtureRequest, model_file: Callable[[str], Path]) -> Real:
    name, dtype = request.param
    path = model_file(name)
    loaded = load(path, load_tokenizer(path), dtype, max_positions=1024)
    text = loaded.tokenizer.encode(LONG_TEXT, add_special_tokens=True, parse_special=False)
    engine = Engine(loaded)
    engine.shuffle_free()
    engine.generate(text[: LONG[name] + 16])
    return Real(name, loaded, text, engine)


def prompt_for(real: Real, hit: int, n_tail: int, place: int) -> list[int]:
    """``hit`` tokens of the text, then others from another place of it."""
    tail = real.text[750 + 7 * place :][:n_tail]
    if tail[0] == real.text[hit]:
        tail[0] = other_than(tail[0], 1000)
    return real.text[:hit] + tail


def strangers(real: Real, n: int) -> list[list[int]]:
    return [real.text[900 + 10 * i :][: 1 + i % 3] for i in range(n)]


def check(real: Real, answer: Answer) -> None:
    assert_same(answer, oracle(real.loaded, answer.prompt, len(answer.tokens)), real.loaded)


@pytest.mark.parametrize(
    ("real", "case"),
    [(case[0], case) for case in sorted(CASES, key=lambda case: ALL.index(case[0]))],
    ids=lambda value: "-".join(map(str, value if value in ALL else value[1:])).replace("torch.", ""),
    indirect=["real"],
    scope="module",
)
def test_cache_on_and_off(real: Real, case: Case) -> None:
    _, hit, chunk, batch = case
    n_hit = LONG[real.name] if hit == "long" else hit
    engine = Engine(real.loaded, of=real.engine, budget=chunk, max_seqs=batch)
    prompt = prompt_for(real, n_hit, {1: 5, 7: 17}.get(chunk, 75), CASES.index(case))
    others = [engine.submit(tokens, 2, salt="stranger") for tokens in strangers(real, batch - 1)]
    answer = engine.submit(prompt, N_NEW)
    if real.name == "gemma3-270m" and hit == "long":
        # A sliding group is claimed from the block of the first position in the window of the hit's end.
        lookup = engine.cache.lookup(answer.seq.chain)
        assert [table.first for table in lookup.tables] == [0, *[(640 - 511) // 16] * 5]
    engine.run()
    assert answer.n_cached == n_hit
    check(real, answer)
    for other in others[-1:]:
        check(real, other)


def test_after_preemption(real: Real) -> None:
    # Three requests share 32 tokens; each needs a block more at its third token, and there is one.
    n_groups = len(real.engine.groups)
    engine = Engine(real.loaded, block_size=8, n_blocks=8 * n_groups, max_model_len=48, budget=64)
    engine.shuffle_free()
    engine.generate(real.text[:33])
    answers = [engine.submit(real.text[:32] + real.text[800 + 9 * i :][:6], 5) for i in range(3)]
    engine.run()
    preempted = [answer for answer in answers if answer.seq.n_preemptions]
    assert preempted and all(answer.n_cached == 32 for answer in answers)
    for answer in {answer.request_id: answer for answer in (answers[0], *preempted)}.values():
        check(real, answer)


def test_after_eviction(real: Real) -> None:
    # A stranger takes the last two blocks of the prefix that was cached first.
    n_groups = len(real.engine.groups)
    engine = Engine(real.loaded, n_blocks=(4 + 2) * n_groups + 4 * (n_groups > 1), max_model_len=96)
    engine.shuffle_free()
    engine.generate(real.text[:65])
    n_free = engine.cache.stats().free
    engine.generate(real.text[900 : 900 + 16 * -(-(n_free + 1) // n_groups)])
    assert engine.counters["evictions"] > 0
    answer = engine.generate(prompt_for(real, 64, 9, 0), N_NEW)
    assert 0 < answer.n_cached < 64
    assert answer.stop == ("evicted" if n_groups == 1 else "group_cannot_start")
    check(real, answer)


def test_b88_37_tokens_three_times_the_last_beside_two_others(real: Real) -> None:
    prompt = list(range(1, 38))
    expected = oracle(real.loaded, prompt, 2)
    engine = Engine(real.loaded)
    hits = []
    for n_others in (0, 0, 2):
        answer = engine.submit(prompt, 2)
        for tokens in strangers(real, n_others):
            engine.submit(tokens, 2)
        engine.run()
        assert_same(answer, expected, real.loaded)
        hits.append(answer.n_cached)
    assert hits == [0, 32, 32]
