"""Cache on against cache off on tiny models: same logits, same tokens, and hits for certain.

The oracle of each request is a fresh engine without caching, the whole prompt in one chunk, alone. Every hit length,
chunk, batch and family, bit for bit: tests/bits.
"""

from __future__ import annotations

import pytest
import torch

from tests.e2e.compare import assert_same, oracle, same_logits
from tests.e2e.conftest import LoadTiny
from tests.e2e.engine import WHOLE, Engine, Loaded, other_than, some_tokens

VOCAB = 97
N_NEW = 4
SHARED = some_tokens(80, seed=1, vocab=VOCAB)
POOLS = {"smollm": 34, "qwen2-sliding": 52, "gemma3": 116}
"""Blocks: fewer than six grown requests need, enough for one, even if it resumes in one chunk."""


@pytest.mark.parametrize("kind", list(POOLS))
@pytest.mark.parametrize("chunk", [7, WHOLE])
def test_after_preemption(load_tiny: LoadTiny, kind: str, chunk: int) -> None:
    # Six requests that share 16 tokens grow by 32 each in a pool that cannot hold them all.
    loaded = load_tiny(kind)
    engine = Engine(loaded, block_size=4, n_blocks=POOLS[kind], budget=chunk, every_position=True, max_model_len=64)
    engine.shuffle_free()
    engine.generate(SHARED[:18])
    prompts = [SHARED[:16] + some_tokens(9 + i, seed=60 + i, vocab=VOCAB) for i in range(6)]
    answers = [engine.submit(prompt, 32) for prompt in prompts]
    engine.run()
    preempted = [answer for answer in answers if answer.seq.n_preemptions]
    assert preempted, "the pool was too large"
    assert answers[0].n_cached == 16
    for answer in answers:
        assert_same(answer, oracle(loaded, answer.prompt, 32, every_position=True), loaded)
    assert any(len(many) > 1 for answer in preempted for many in answer.logits.values()), "nothing was computed again"
    if kind == "smollm":  # what a preempted request had published it finds again
        assert engine.counters["resumed_hits"] > 0


@pytest.mark.parametrize("kind", ["smollm", "mistral-sliding", "gemma3"])
def test_after_eviction(load_tiny: LoadTiny, kind: str) -> None:
    # Strangers take the tail of SHARED, block by block: shorter hits, the same answers.
    loaded = load_tiny(kind)
    n_groups = len(Engine(loaded, n_blocks=100).groups)
    prompt = [*SHARED[:70], other_than(SHARED[70], VOCAB)]
    expected = oracle(loaded, prompt, N_NEW, every_position=True)
    hits = set()
    for n_strangers in range(0, 9, 2):
        engine = Engine(loaded, n_blocks=8 * n_groups, every_position=True)
        engine.shuffle_free()
        engine.generate(SHARED)
        for i in range(n_strangers):
            engine.generate(some_tokens(16, seed=80 + i, vocab=VOCAB))
        answer = engine.generate(prompt, N_NEW)
        assert_same(answer, expected, loaded)
        hits.add(answer.n_cached)
        assert (engine.counters["evictions"] > 0) or n_strangers < 4
    assert {0, 64} <= hits
    if kind != "gemma3":  # there a shorter hit needs windows that slid out, and those went first
        assert len(hits) > 2


@pytest.mark.parametrize("kind", ["smollm", "gemma3"])
def test_b27_hits_through_tables_in_no_order(load_tiny: LoadTiny, kind: str) -> None:
    # Blocks 5, 2, 7 in this order; the hit request shares a batch with a miss.
    loaded = load_tiny(kind)
    engine = Engine(loaded, block_size=4, every_position=True)
    engine.shuffle_free()
    if kind == "smollm":
        engine.order_free(5, 2, 7)
    first = engine.submit([*range(1, 13), 20])
    engine.model.during = lambda: tables.append([engine.table(first, g) for g in range(len(engine.groups))])
    tables: list[list[list[int]]] = []
    engine.run()
    engine.model.during = lambda: None
    assert all(table != sorted(table) for table in tables[0])
    assert kind != "smollm" or tables[0][0][:3] == [5, 2, 7]
    hit, miss = engine.submit([*range(1, 13), 21], N_NEW), engine.submit([*range(60, 71)], N_NEW)
    engine.run()
    assert engine.model.calls[-N_NEW].context_len == (13, 11)
    assert engine.model.calls[-N_NEW].positions == [12, *range(11)]
    assert (hit.n_cached, miss.n_cached) == (12, 0)
    for answer in (hit, miss):
        assert_same(answer, oracle(loaded, answer.prompt, N_NEW, every_position=True), loaded)


@pytest.mark.parametrize("kind", ["smollm", "qwen2-sliding", "gemma3"])
def test_what_is_in_the_blocks_of_a_hit_is_what_would_have_been_written(load_tiny: LoadTiny, kind: str) -> None:
    loaded = load_tiny(kind)
    prompt = SHARED[:48] + some_tokens(20, seed=4, vocab=VOCAB)
    contents = []
    for chunk, caching in ((WHOLE, False), (7, True)):
        engine = Engine(loaded, budget=chunk, caching=caching)
        engine.shuffle_free()
        engine.generate(SHARED)
        answer = engine.submit(prompt, 8)
        while len(answer.tokens) < 3:
            engine.step()
        contents.append(engine.kv_of(answer))
        if caching:
            assert answer.n_cached == 48
        engine.run()
    for layer, (want_kv, got_kv) in enumerate(zip(*contents, strict=True)):
        n = got_kv.shape[1]
        assert n > 0
        want_kv = want_kv[:, -n:]  # the same last tokens, should one of the two hold more of a window
        if loaded.row_invariant:
            assert torch.equal(got_kv, want_kv), f"layer {layer}"
        else:
            assert same_logits(got_kv, want_kv, loaded), f"layer {layer}"


@pytest.mark.parametrize("max_tokens", [1, 2])
@pytest.mark.parametrize("kind", ["smollm", "gemma3"])
def test_b40_short_aligned_and_longest_prompts_three_times(load_tiny: LoadTiny, kind: str, max_tokens: int) -> None:
    loaded, longest = load_tiny(kind), 40
    engine = Engine(loaded, block_size=4, max_model_len=longest, every_position=True)
    for n in (1, 3, 4, 5, 7, 8, 9, 12, longest - max_tokens):
        prompt = some_tokens(n, seed=200 + n, vocab=VOCAB)
        expected = oracle(loaded, prompt, max_tokens, every_position=True)
        for hits in (0, (n - 1) // 4 * 4, (n - 1) // 4 * 4):
            answer = engine.generate(prompt, max_tokens)
            assert answer.n_cached == hits
            assert answer.usage.n_computed == n - hits
            assert_same(answer, expected, loaded)
    assert engine.counters["prefix_hits"] > 0


@pytest.mark.parametrize("kind", ["smollm", "gemma3"])
def test_b88_37_tokens_three_times_beside_0_and_2_others(load_tiny: LoadTiny, kind: str) -> None:
    loaded = load_tiny(kind)
    prompt = list(range(1, 38))
    expected = oracle(loaded, prompt, N_NEW, every_position=True)
    for batch in (1, 3):
        engine = Engine(loaded, every_position=True)
        hits = []
        for _ in range(3):
            answer = engine.submit(prompt, N_NEW)
            for i in range(batch - 1):
                engine.submit(some_tokens(11 + i, seed=i, vocab=VOCAB), N_NEW)
            engine.run()
            assert_same(answer, expected, loaded)
            hits.append(answer.n_cached)
        assert hits == [0, 32, 32]


def test_b49_a_window_model_reuses_at_the_second_request(hybrid: Loaded) -> None:
    # Window 8, B = 4, 24 tokens twice.
    prompt = some_tokens(24, seed=1, vocab=300)
    engine = Engine(hybrid, block_size=4)
    first, second = engine.generate(prompt, N_NEW), engine.generate(prompt, N_NEW)
    assert (first.n_cached, second.n_cached) == (0, 20)
    assert_same(second, oracle(hybrid, prompt, N_NEW), hybrid)


@pytest.mark.parametrize(("block_size", "hits"), [(16, 16), (32, 0)])
def test_b89_a_chat_of_25_tokens_twice(plain: Loaded, block_size: int, hits: int) -> None:
    text = plain.tokenizer.render_chat([{"role": "user", "content": "Hi you1234567"}])
    prompt = plain.tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    assert len(prompt) == 25
    engine = Engine(plain, block_size=block_size)
    first, second = engine.generate(prompt, N_NEW), engine.generate(prompt, N_NEW)
    assert (first.n_cached, second.n_cached) == (0, hits)
    assert engine.core.stats().gauges["min_reusable_tokens"] == block_size
    assert_same(second, oracle(plain, prompt, N_NEW), plain)


def test_b43_every_way_of_running_hits(plain: Loaded, hybrid: Loaded) -> None:
    for loaded in (plain, hybrid):
        for chunk in (1, 3, 4, 5, WHOLE):
            engine = Engine(loaded, block_size=4, budget=chunk)
            assert [engine.generate(range(1, 13), 3).n_cached for _ in range(3)] == [0, 8, 8]


def test_b84_a_forced_reset_leaves_the_answer_and_forgets_the_rest(hybrid: Loaded) -> None:
    prompt = some_tokens(30, seed=9, vocab=300)
    engine = Engine(hybrid, block_size=4)
    answer = engine.submit(prompt, 12)
    while len(answer.tokens) < 5:
        engine.step()
    refused = engine.reset()
    assert not refused.done and refused.n_busy == engine.cache.stats().in_use > 0
    assert engine.hit(prompt) == 28, "refused: nothing is forgotten"
    done = engine.reset(force=True)
    assert done.done and done.n_preempted == 1 and done.n_cleared > 0
    assert engine.hit(prompt) == 0
    engine.run()
    assert_same(answer, oracle(hybrid, prompt, 12), hybrid)
    assert engine.counters["prefix_hits"] == engine.counters["resumed_hits"] == 0
