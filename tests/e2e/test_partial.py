"""Finer than a block, on tiny models: a start inside a block has the bits of a start from nothing.

Every number of slots, in full, sliding and mixed models; the hit and the copy are asserted, so that no test passes by
computing everything. Logits of every computed position are compared, and the KV store too.
"""

from __future__ import annotations

import pytest
import torch

from headwater.types import FinishReason
from tests.e2e.compare import assert_same, oracle
from tests.e2e.conftest import LoadTiny
from tests.e2e.engine import WHOLE, Answer, Engine, other_than, some_tokens

B = 16
VOCAB = 97
N_NEW = 3
MODELS = ["smollm", "qwen2-sliding", "mistral-sliding", "gemma3"]
SHARED = some_tokens(3 * B, seed=1, vocab=VOCAB)


def leaving_at(n: int, n_own: int = 5) -> list[int]:
    """The first ``n`` tokens of SHARED, and then others."""
    own = some_tokens(n_own, seed=100 + n, vocab=VOCAB)
    own[0] = other_than(SHARED[n], VOCAB) if n < len(SHARED) else own[0]
    return SHARED[:n] + own


def pair(load: LoadTiny, kind: str, kernels: str = "torch", **options: object) -> tuple[Engine, Engine]:
    """Engines with and without partial reuse, that have answered SHARED."""
    engines = []
    for partial in (True, False):
        engine = Engine(
            load(kind, torch.float32, kernels), block_size=B, every_position=True, partial=partial, **options
        )  # type: ignore[arg-type]
        engine.shuffle_free()
        assert engine.generate(SHARED, 1).n_cached == 0
        engines.append(engine)
    return engines[0], engines[1]


def same_bits(got: Answer, want: Answer) -> None:
    """Wherever both computed logits they are equal, bit for bit, and so are the tokens."""
    assert got.tokens == want.tokens
    positions = got.logits.keys() & want.logits.keys()
    assert len(positions) >= len(got.prompt) - got.n_cached + len(got.tokens) - 1
    for position in positions:
        for logits in got.logits[position]:
            assert torch.equal(logits, want.logits[position][0]), position


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("kind", MODELS)
def test_every_number_of_slots_on_against_off(load_tiny: LoadTiny, kind: str, kernels: str) -> None:
    on, off = pair(load_tiny, kind, kernels)
    for t in range(1, B):
        prompt = leaving_at(B + t)
        got, want = on.generate(prompt, N_NEW), off.generate(prompt, N_NEW)
        assert (got.n_cached, want.n_cached) == (B + t, B)
        assert got.stop == "differs" and got.usage.n_computed == len(prompt) - B - t
        same_bits(got, want)
        assert_same(got, oracle(on.loaded, prompt, N_NEW, every_position=True), on.loaded)
    assert on.counters["copied_tokens"] == sum(range(1, B)) and off.counters["copied_tokens"] == 0
    assert on.counters["prefix_hits"] == off.counters["prefix_hits"] == B * (B - 1)


@pytest.mark.parametrize("kind", MODELS)
def test_b40_a_prompt_that_is_cached_to_its_last_token_computes_that_token(load_tiny: LoadTiny, kind: str) -> None:
    on, off = pair(load_tiny, kind)
    for _ in range(3):
        got, want = on.generate(SHARED, N_NEW), off.generate(SHARED, N_NEW)
        assert (got.n_cached, want.n_cached) == (3 * B - 1, 2 * B)
        assert on.model.calls[-N_NEW].positions == [3 * B - 1]
        assert got.stop == "last_token"
        same_bits(got, want)


@pytest.mark.parametrize("chunk", [1, 7, WHOLE])
@pytest.mark.parametrize("kind", ["smollm", "gemma3"])
def test_in_chunks_and_beside_strangers(load_tiny: LoadTiny, kind: str, chunk: int) -> None:
    on, off = pair(load_tiny, kind, budget=chunk)
    prompts = [leaving_at(B + 5, 20), some_tokens(9, seed=4, vocab=VOCAB), leaving_at(2 * B + 11, 9), leaving_at(7, 30)]
    answers = [[engine.submit(prompt, N_NEW) for prompt in prompts] for engine in (on, off)]
    on.run()
    off.run()
    assert [a.n_cached for a in answers[0]] == [B + 5, 0, 2 * B + 11, 7]
    for got, want in zip(*answers, strict=True):
        if on.loaded.row_invariant:
            same_bits(got, want)
        assert_same(got, oracle(on.loaded, got.prompt, N_NEW, every_position=True), on.loaded)


@pytest.mark.parametrize("kind", ["smollm", "gemma3"])
def test_the_slots_are_those_that_would_have_been_written(load_tiny: LoadTiny, kind: str) -> None:
    on, off = pair(load_tiny, kind)
    kv = []
    for engine in (on, off):
        answer = engine.submit(leaving_at(2 * B + 9), 8)
        while len(answer.tokens) < 3:
            engine.step()
        kv.append(engine.kv_of(answer))
        engine.run()
    for got, want in zip(*kv, strict=True):
        n = min(got.shape[1], want.shape[1])  # a window that starts later holds less before it
        assert n > 9 and torch.equal(got[:, -n:], want[:, -n:])


@pytest.mark.parametrize("kind", ["smollm", "gemma3"])
def test_a_copy_of_a_copy(load_tiny: LoadTiny, kind: str) -> None:
    on, _ = pair(load_tiny, kind)
    first = leaving_at(B + 9, 20)
    second = [*first[: B + 13], *some_tokens(12, seed=9, vocab=VOCAB)]
    assert on.generate(first, N_NEW).n_cached == B + 9
    got = on.generate(second, N_NEW)
    assert got.n_cached == B + 13
    assert_same(got, oracle(on.loaded, second, N_NEW, every_position=True), on.loaded)


@pytest.mark.parametrize("kind", ["smollm", "gemma3"])
def test_preempted_and_resumed_with_a_copy(load_tiny: LoadTiny, kind: str) -> None:
    on, off = pair(load_tiny, kind)
    answers = []
    for engine in (on, off):
        answer = engine.submit(leaving_at(B + 5), 14)
        while len(answer.tokens) < 3:
            engine.step()
        engine.scheduler.preempt_all()
        engine.run()
        answers.append(answer)
    got, want = answers
    assert on.counters["resumed_copied_tokens"] > 0 == off.counters["resumed_copied_tokens"]
    assert (got.n_cached, got.seq.n_preemptions) == (B + 5, 1)
    same_bits(got, want)


@pytest.mark.parametrize("kind", ["smollm", "gemma3"])
def test_b22_a_step_that_fails_makes_its_copies_again(load_tiny: LoadTiny, kind: str) -> None:
    on, _ = pair(load_tiny, kind)
    prompt = leaving_at(B + 5)
    answer = on.submit(prompt, N_NEW)
    plan = on.scheduler.plan()
    assert plan is not None and len(plan.copies) == len(on.groups)
    assert {copy.n_slots for copy in plan.copies} == {5}
    (seq,) = on.scheduler.fail_step(plan.step)  # it never ran
    on.scheduler.audit()
    assert seq is answer.seq
    on.run()
    assert answer.n_cached == B + 5
    assert_same(answer, oracle(on.loaded, prompt, N_NEW, every_position=True), on.loaded)


@pytest.mark.parametrize("kind", ["smollm", "gemma3"])
def test_b21_rows_that_are_tried_one_by_one_keep_what_was_copied(load_tiny: LoadTiny, kind: str) -> None:
    on, _ = pair(load_tiny, kind)
    good, bad = on.submit(leaving_at(B + 5), N_NEW), on.submit(leaving_at(B + 9), N_NEW)
    n_calls = 0

    def fails_together_and_for_bad() -> None:
        nonlocal n_calls
        n_calls += 1
        if n_calls in (1, 3):  # both together; the second alone
            raise RuntimeError("injected")

    on.model.during = fails_together_and_for_bad
    deltas = on.core.step().deltas
    on.model.during = lambda: None
    assert [d.request_id for d in deltas if d.error] == [bad.request_id]
    for delta in deltas:
        on.answers[delta.request_id].deltas.append(delta)
    on.run()
    assert (good.n_cached, good.finish_reason) == (B + 5, FinishReason.LENGTH)
    assert_same(good, oracle(on.loaded, good.prompt, N_NEW, every_position=True), on.loaded)
    on.check_idle()


@pytest.mark.parametrize("kind", ["smollm", "gemma3"])
def test_eight_equal_prompts(load_tiny: LoadTiny, kind: str) -> None:
    on, _ = pair(load_tiny, kind)
    prompt = some_tokens(3 * B, seed=50, vocab=VOCAB)
    expected = oracle(on.loaded, prompt, N_NEW, every_position=True)
    first = on.submit(prompt, N_NEW)
    on.step()
    others = [on.submit(prompt, N_NEW) for _ in range(7)]
    on.run()
    assert [a.n_cached for a in (first, *others)] == [0, *([3 * B - 1] * 7)]
    for answer in (first, *others):
        assert_same(answer, expected, on.loaded)


def test_salts_do_not_copy(load_tiny: LoadTiny) -> None:
    engine = Engine(load_tiny("smollm"), block_size=B, partial=True)
    engine.generate(SHARED, 1, salt="a")
    assert [engine.generate(SHARED, 1, salt=salt).n_cached for salt in ("b", None, "a")] == [0, 0, 3 * B - 1]


@pytest.mark.parametrize("kind", ["smollm", "gemma3"])
def test_prompt_is_computed_and_cached(load_tiny: LoadTiny, kind: str) -> None:
    # B67, with whole blocks and copies: usage, runner and counters tell the same.
    engine = Engine(load_tiny(kind), block_size=B, partial=True, budget=24)
    answers = [engine.generate(leaving_at(n), N_NEW) for n in (0, 3, 16, 20, 37, 37, 48, 30)]
    counters = engine.counters
    n_prompt = sum(len(answer.prompt) for answer in answers)
    n_cached = sum(answer.n_cached for answer in answers)
    assert all(a.usage.n_prompt == a.usage.n_cached + a.usage.n_computed for a in answers)
    assert counters["prefix_queries"] == n_prompt == counters["prompt_tokens_computed"] + n_cached
    assert counters["prefix_hits"] + counters["copied_tokens"] == n_cached
    assert counters["prefix_hits"] > 0 == counters["prefix_hits"] % B and counters["copied_tokens"] > 0
    n_run = sum(len(call.tokens) for call in engine.model.calls)
    assert n_run == counters["prompt_tokens_computed"] + len(answers) * (N_NEW - 1)
