"""Requests that arrive together compute their common beginning once, and answer as if each were alone (B62)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headwater.engine.messages import Delta
from headwater.types import FinishReason
from tests.e2e.compare import assert_same, oracle
from tests.e2e.conftest import LoadTiny
from tests.e2e.engine import WHOLE, Answer, Engine, Loaded, some_tokens

VOCAB = 97
PROMPT = some_tokens(100, seed=3, vocab=VOCAB)
N_NEW = 4
PARTIAL = pytest.mark.parametrize("partial", [False, True], ids=["whole blocks", "slots too"])


def n_computed(engine: Engine) -> int:
    return sum(len(call.tokens) for call in engine.model.calls)


def check(answers: list[Answer], loaded: Loaded) -> None:
    for answer in answers:
        assert len(answer.tokens) == N_NEW
        assert_same(answer, oracle(loaded, answer.prompt, N_NEW, every_position=True), loaded)


@PARTIAL
@pytest.mark.parametrize("wait_s", [0.0, 30.0], ids=["off", "on"])
@pytest.mark.parametrize("chunk", [40, WHOLE])
@pytest.mark.parametrize("kind", ["smollm", "qwen2-sliding", "gemma3"])
def test_eight_copies_at_once(load_tiny: LoadTiny, kind: str, chunk: int, wait_s: float, partial: bool) -> None:
    loaded = load_tiny(kind)
    engine = Engine(loaded, budget=chunk, every_position=True, wait_s=wait_s, partial=partial)
    answers = [engine.submit(PROMPT, N_NEW) for _ in range(8)]
    engine.run()
    check(answers, loaded)
    decoded = 8 * (N_NEW - 1)
    waits = engine.counters["in_flight_waits"]
    if wait_s:
        assert n_computed(engine) - decoded <= len(PROMPT) + 8 * 16
        assert [answer.n_cached >= 96 for answer in answers] == [False] + 7 * [True]
        assert waits == 7 and engine.counters["in_flight_tokens_saved"] >= 7 * 16
    else:
        assert waits == 0
        if chunk == WHOLE:  # the two copies of the article, and six more
            assert n_computed(engine) - decoded == 8 * len(PROMPT)
            assert not any(answer.n_cached for answer in answers)
    assert sum(answer.usage.n_computed + answer.usage.n_cached for answer in answers) == 8 * len(PROMPT)
    assert engine.counters["prompt_tokens_computed"] == sum(answer.usage.n_computed for answer in answers)
    assert engine.counters["prompt_tokens_computed"] == n_computed(engine) - decoded


@PARTIAL
@pytest.mark.parametrize("kind", ["smollm", "gemma3"])
def test_equal_bits_in_bf16_where_products_have_them(load_tiny: LoadTiny, kind: str, partial: bool) -> None:
    loaded = load_tiny(kind, torch.bfloat16)
    logits: list[dict[int, Tensor]] = []
    for wait_s in (0.0, 30.0):
        engine = Engine(loaded, budget=70, every_position=True, wait_s=wait_s, partial=partial)
        answers = [engine.submit([*PROMPT[:n], *some_tokens(9, n, VOCAB)], N_NEW) for n in (100, 100, 80, 33)]
        engine.run()
        check(answers, loaded)
        assert engine.counters["in_flight_waits"] == (2 if wait_s else 0)
        logits.append({i: answer.logits[len(answer.prompt) - 1][-1] for i, answer in enumerate(answers)})
    if loaded.row_invariant:
        assert all(torch.equal(logits[0][i], logits[1][i]) for i in logits[0])
    assert sum(answer.n_cached for answer in answers) > 0


@PARTIAL
def test_followers_that_differ_early_do_not_wait_for_the_rest(load_tiny: LoadTiny, partial: bool) -> None:
    loaded = load_tiny("smollm")
    engine = Engine(loaded, budget=64, every_position=True, partial=partial)
    leader = engine.submit(PROMPT, N_NEW)
    early = engine.submit([*PROMPT[:32], *some_tokens(5, 8, VOCAB)], N_NEW)
    late = engine.submit([*PROMPT[:96], *some_tokens(5, 9, VOCAB)], N_NEW)
    engine.step()
    engine.step()
    assert early.n_cached >= 32 and early.tokens and not late.deltas
    engine.run()
    check([leader, early, late], loaded)
    assert late.n_cached >= 96


@PARTIAL
@pytest.mark.parametrize("kind", ["smollm", "gemma3"])
def test_when_the_leader_is_aborted_in_mid_prefill_a_follower_takes_over(
    load_tiny: LoadTiny, kind: str, partial: bool
) -> None:
    loaded = load_tiny(kind)
    engine = Engine(loaded, budget=64, every_position=True, partial=partial)
    leader, *others = [engine.submit(PROMPT, N_NEW) for _ in range(4)]
    engine.step()
    engine.abort(leader)
    engine.run()
    check(others, loaded)
    assert others[0].n_cached == 64 and others[1].n_cached >= 96
    assert n_computed(engine) <= len(PROMPT) + 3 * 16 + 3 * N_NEW
    assert not any(delta.token_ids for delta in leader.deltas)


@PARTIAL
def test_when_the_leader_fails_a_follower_takes_over(load_tiny: LoadTiny, partial: bool) -> None:
    loaded = load_tiny("smollm")
    engine = Engine(loaded, every_position=True, partial=partial)
    leader, *others = [engine.submit(PROMPT, N_NEW) for _ in range(4)]

    def fail() -> None:
        raise RuntimeError("injected")

    engine.model.during = fail  # the step holds the leader only: it fails, and so does the row on its own
    (failed,) = engine.core.step().deltas
    engine.model.during = lambda: None
    assert isinstance(failed, Delta) and failed.request_id == leader.request_id
    assert failed.finish_reason is FinishReason.ERROR and "injected" in (failed.error or "")
    engine.model.calls.clear()
    engine.run()
    check(others, loaded)
    assert [answer.n_cached >= 96 for answer in others] == [False, True, True]
    assert n_computed(engine) <= len(PROMPT) + 3 * 16 + 3 * N_NEW


def test_another_salt_does_not_wait(load_tiny: LoadTiny) -> None:
    loaded = load_tiny("smollm")
    engine = Engine(loaded, every_position=True)
    answers = [engine.submit(PROMPT, N_NEW, salt=salt) for salt in (None, "a", "b")]
    engine.step()
    assert all(answer.tokens for answer in answers)
    engine.run()
    check(answers, loaded)
    assert engine.counters["in_flight_waits"] == 0 and not any(answer.n_cached for answer in answers)
