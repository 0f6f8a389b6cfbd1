"""Seeded random traffic through the whole engine, against an engine without cache that answers one at a time.

Shared prefixes, salts, priorities, aborts, preemptions, evictions, forced resets, stop strings, seeded sampling:
whatever happens to a request, its tokens are those that it gets alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from headwater.types import FinishReason
from tests.e2e.engine import Answer, Engine, Loaded, some_tokens

VOCAB = 300
N_REQUESTS = 70
MAX_LEN = 80


def some_request(rng: random.Random) -> tuple[list[int], dict[str, Any]]:
    """A prompt that shares a beginning with others, or not, and how it is to be answered."""
    stem = some_tokens(48, seed=rng.randrange(3), vocab=VOCAB)
    shared = rng.choice([0, 3, 8, 16, 17, 30, 48])
    prompt = stem[:shared] + some_tokens(rng.randint(1, 14), seed=rng.randrange(40), vocab=VOCAB)
    options: dict[str, Any] = {
        "max_tokens": rng.randint(1, 16),
        "salt": rng.choice([None, None, None, "a", "b"]),
        "priority": rng.choice([0, 0, 0, 1, -1]),
        "skip_reading": rng.random() < 0.05,
    }
    if rng.random() < 0.4:
        options |= {"temperature": rng.choice([0.7, 1.5]), "seed": rng.randrange(5)}
        options |= rng.choice([{}, {"top_p": 0.8}, {"top_k": 20}])
    if rng.random() < 0.3:
        options["stop"] = tuple(rng.sample(["a", "e", " the", "on", "\n", "7"], 2))
    return prompt, options


@dataclass
class Traffic:
    engine: Engine
    rng: random.Random
    answers: list[tuple[Answer, dict[str, Any]]] = field(default_factory=list)
    n_resets: int = 0

    def run(self) -> None:
        rng, engine = self.rng, self.engine
        while len(self.answers) < N_REQUESTS or engine.core.busy:
            if len(self.answers) < N_REQUESTS and rng.random() < 0.5:
                prompt, options = some_request(rng)
                self.answers.append((engine.submit(prompt, **options), options))
            live = [answer for answer, _ in self.answers if answer.finish_reason is None and not answer.aborted]
            if live and rng.random() < 0.02:
                engine.abort(rng.choice(live))
            if rng.random() < 0.01:
                assert engine.reset(force=True).done
                self.n_resets += 1
            engine.step()  # audited
        engine.check_idle()

    def finished(self) -> Iterator[tuple[Answer, dict[str, Any]]]:
        return ((answer, options) for answer, options in self.answers if not answer.aborted)


class Alone:
    """Answers one request at a time, without a cache; the same request only once."""

    def __init__(self, loaded: Loaded) -> None:
        self.engine = Engine(loaded, caching=False, audit=False)
        self.known: dict[str, Answer] = {}

    def answer(self, prompt: list[int], options: dict[str, Any]) -> Answer:
        key = repr((prompt, options))
        if key not in self.known:
            self.known[key] = self.engine.generate(prompt, **options)
        return self.known[key]


@pytest.fixture(scope="module")
def alone(plain: Loaded, hybrid: Loaded) -> dict[str, Alone]:
    return {"plain": Alone(plain), "hybrid": Alone(hybrid)}


@pytest.mark.parametrize(("seed", "partial"), [(1, False), (2, False), (1, True), (2, True)])
@pytest.mark.parametrize("model", ["plain", "hybrid"])
def test_random_traffic_is_answered_as_one_alone_without_cache(
    request: pytest.FixtureRequest, alone: dict[str, Alone], model: str, seed: int, partial: bool
) -> None:
    loaded: Loaded = request.getfixturevalue(model)
    n_blocks = {"plain": 34, "hybrid": 72}[model]
    engine = Engine(
        loaded, block_size=4, n_blocks=n_blocks, budget=24, max_seqs=6, max_model_len=MAX_LEN, partial=partial
    )
    engine.shuffle_free()
    traffic = Traffic(engine, random.Random(seed))
    traffic.run()

    counters, n_finished = engine.counters, 0
    for answer, options in traffic.finished():
        expected = alone[model].answer(answer.prompt, options)
        assert answer.tokens == expected.tokens, (answer.request_id, answer.n_cached, answer.seq.n_preemptions)
        assert answer.text == expected.text
        assert (answer.finish_reason, answer.last.stop_reason) == (expected.finish_reason, expected.last.stop_reason)
        usage = answer.usage
        assert usage.n_prompt == len(answer.prompt) == usage.n_computed + usage.n_cached
        n_finished += 1
    assert n_finished > N_REQUESTS * 0.8
    assert (counters["copied_tokens"] > 5) is partial

    # All that was meant to happen did.
    answered = [answer for answer, _ in traffic.answers]
    assert traffic.n_resets and sum(answer.aborted for answer in answered)
    assert counters["preemptions"] == sum(answer.seq.n_preemptions for answer in answered) > 3
    assert counters["evictions"] > 10
    reasons = {answer.finish_reason for answer in answered}
    assert {FinishReason.STOP, FinishReason.LENGTH} <= reasons
    assert counters["requests_finished_abort"] == sum(answer.aborted for answer in answered)

    # The counters are the sum of what the admitted requests that looked were told.
    looked = [a.seq for a in answered if a.seq.lookup is not None and a.seq.bypass is None]
    assert counters["prefix_queries"] == sum(seq.n_prompt for seq in looked)
    assert counters["prefix_hits"] == sum(seq.lookup.n_hit for seq in looked if seq.lookup is not None) > 0
    told = [answer.usage for answer, _ in traffic.finished() if answer.seq.bypass is None]
    assert counters["copied_tokens"] == sum(seq.lookup.n_copy for seq in looked if seq.lookup is not None)
    unfinished = [a.seq.lookup.n_start for a in answered if a.aborted and a.seq.lookup is not None and not a.seq.bypass]
    n_cached = sum(usage.n_cached for usage in told) + sum(unfinished)
    assert counters["prefix_hits"] + counters["copied_tokens"] == n_cached
    assert counters["generation_tokens"] == sum(len(answer.tokens) for answer in answered)
    assert counters["bypassed_requests"] == sum(a.seq.bypass is not None and a.seq.lookup is not None for a in answered)
    whole = sum(answer.usage.n_computed for answer, _ in traffic.finished())
    partly = sum(a.seq.n_prompt for a in answered if a.aborted)
    assert whole <= counters["prompt_tokens_computed"] <= whole + partly


def test_b67_tokens_in_the_model_s_input_are_what_usage_and_counters_say(plain: Loaded) -> None:
    # Without preemption: all that the model was given is the computed prompt tokens and the decoded ones.
    engine, rng = Engine(plain, block_size=4, budget=24), random.Random(3)
    answers = []
    for _ in range(40):
        prompt, options = some_request(rng)
        answers.append(engine.submit(prompt, **options))
        engine.step()
    engine.run()
    assert engine.counters["preemptions"] == 0
    n_input = sum(len(call.tokens) for call in engine.model.calls)
    n_decoded = sum(len(answer.tokens) - 1 for answer in answers)
    assert n_input - n_decoded == sum(answer.usage.n_computed for answer in answers)
    assert n_input - n_decoded == engine.counters["prompt_tokens_computed"]
    assert sum(answer.n_cached for answer in answers) == engine.counters["prefix_hits"] > 0


def test_b63_prompts_with_nothing_in_common_have_a_hit_rate_of_0_whatever_is_preempted(plain: Loaded) -> None:
    engine = Engine(plain, block_size=4, n_blocks=28, max_seqs=6, max_model_len=MAX_LEN)
    answers = [engine.submit(some_tokens(9, seed=100 + i, vocab=VOCAB), 40) for i in range(16)]
    engine.run()
    counters = engine.counters
    assert counters["preemptions"] >= 20
    assert counters["prefix_hits"] == 0 and counters["prefix_queries"] == 16 * 9
    assert counters["resumed_hits"] > 0
    assert all(answer.n_cached == 0 for answer in answers)


def test_b31_200_prompts_with_mixed_ends_leave_nothing_in_use(plain: Loaded) -> None:
    engine = Engine(plain, block_size=4, n_blocks=40, max_model_len=MAX_LEN)
    ends = set()
    for i in range(200):
        prompt = some_tokens(9, seed=i, vocab=VOCAB)
        kind = i % 4
        answer = engine.submit(prompt, 3, stop_token_ids=tuple(range(VOCAB)) if kind == 1 else ())
        if kind == 2:
            engine.step()
        if kind >= 2:
            engine.abort(answer)
        engine.run()  # checks that nothing is in use, and the sum
        ends.add(answer.finish_reason if not answer.aborted else FinishReason.ABORT)
    assert ends == {FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT}
