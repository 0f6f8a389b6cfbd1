"""Mission 6 (ownership is not validity; this cache and others) and 7 (reading a measurement)."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater import LLM, SamplingParams
from headwater.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from headwater.engine.build import build_engine
from tests.e2e.compare import assert_same, oracle
from tests.e2e.engine import Engine, Loaded, some_tokens

VOCAB = 300


# ---- mission 6 ----------------------------------------------------------------------------------


def test_in_use_evictable_and_free(plain: Loaded) -> None:
    # mission 6: refs > 0 is in use, with or without a key; refs = 0 with a key is a hit; without one it is free
    engine = Engine(plain, block_size=4, n_blocks=8, max_model_len=32)

    def states() -> tuple[int, int, int]:
        stats = engine.cache.stats()
        return stats.in_use, stats.evictable, stats.free

    prompt = some_tokens(10, seed=1, vocab=VOCAB)
    assert states() == (0, 0, 8)
    answer = engine.submit(prompt, 2)
    engine.step()
    assert states() == (3, 0, 5), "two with a key and one without: all in use"
    engine.run()
    assert states() == (0, 2, 6)
    assert engine.hit(prompt) == 8, "no owner, still a hit"
    pool = engine.cache.pool
    assert all(pool.node[block] is None for block in pool.free)
    assert all(pool.node[block] is not None and pool.refs[block] == 0 for block in pool.evictable)

    # What is in use is not evicted: of a request that needs every other block, only those go.
    held = engine.submit(prompt, 20)
    engine.step()
    table = engine.table(held)[:2]
    other = engine.submit(some_tokens(17, seed=2, vocab=VOCAB), 2)
    while other.finish_reason is None:
        engine.step()
    assert not set(table) & set(pool.evictable) and engine.table(held)[:2] == table
    engine.run()
    for one in (answer, held, other):
        assert_same(one, oracle(plain, one.prompt, len(one.tokens)), plain)


def test_kv_inside_a_request_saves_decode_and_prefix_caching_saves_prefill(plain: Loaded) -> None:
    # mission 6 and 9: decode steps take one token each, hit or not; the hit shortens the first step only
    prompt = some_tokens(70, seed=1, vocab=VOCAB)
    inputs = {}
    for caching in (False, True):
        engine = Engine(plain, caching=caching)
        engine.generate(prompt)
        engine.model.calls.clear()
        engine.generate(prompt, 6)
        inputs[caching] = [(len(call.tokens), call.context_len) for call in engine.model.calls]
    assert inputs[False] == [(70, (70,)), *((1, (n,)) for n in range(71, 76))]
    assert inputs[True] == [(6, (70,)), *inputs[False][1:]], "decode still reads all history"


def test_no_answer_is_reused(plain: Loaded) -> None:
    # mission 6: this is no result cache; the same request with another seed is sampled anew
    engine = Engine(plain)
    prompt = some_tokens(40, seed=1, vocab=VOCAB)
    outputs = {tuple(engine.generate(prompt, 6, temperature=2.0, seed=seed).tokens) for seed in range(8)}
    assert len(outputs) > 1
    assert engine.counters["prefix_hits"] == 7 * 32


def test_a_hybrid_model_has_a_table_and_a_lifetime_per_group(hybrid: Loaded) -> None:
    # mission 6: full and sliding layers are managed apart (window 8, B = 4)
    engine = Engine(hybrid, block_size=4)
    kinds = [(group.kind.value, group.window, len(group.layers)) for group in engine.groups]
    assert kinds == [("full", None, 2), ("sliding", 8, 2), ("sliding", 8, 2)]
    prompt = some_tokens(33, seed=1, vocab=VOCAB)
    answer = engine.submit(prompt, 4)
    engine.step()
    tables = answer.seq.held().tables
    # the next query, at 33, sees 26 .. 33: blocks 6 to 8; the full group keeps all nine
    assert [(table.first, len(table.blocks)) for table in tables] == [(0, 9), (6, 3), (6, 3)]
    engine.run()

    again = engine.submit(prompt, 4)
    engine.step()
    assert again.n_cached == 32
    added = again.seq.held().tables
    assert [(table.first, len(table.blocks)) for table in added] == [(0, 9), (6, 3), (6, 3)]
    assert engine.cache.stats().in_use == 15, "a hit takes only the window of a sliding group"
    engine.run()
    for one in (answer, again):
        assert_same(one, oracle(hybrid, prompt, 4), hybrid)


def test_sharing_is_not_a_rate_of_hits(plain: Loaded) -> None:
    # mission 9: "80 % hit rate saves 80 % of KV memory" is a misreading: one after another, nothing is shared
    engine = Engine(plain)
    prompt = some_tokens(81, seed=1, vocab=VOCAB)
    for _ in range(6):
        engine.submit(prompt)
        engine.step()
        stats = engine.cache.stats()
        assert stats.logical_blocks == stats.physical_in_use
        engine.run()
    counters = engine.counters
    assert counters["prefix_hits"] / counters["prefix_queries"] > 0.8


# ---- mission 7 ----------------------------------------------------------------------------------


def test_the_article_s_counters_of_a_real_run(plain_folder: Path) -> None:
    # mission 7: queries 1727 -> 3456, hits 0 -> 1712: 1712/1729 = 99.02 %, and 1712 = 107 x 16.
    # Everything built as the server builds it.
    config = EngineConfig(
        ModelConfig(str(plain_folder), dtype="float32"), CacheConfig(n_blocks=256), SchedulerConfig(max_model_len=2048)
    )
    built = build_engine(config, lambda what, fraction: None)
    llm = LLM.over(built.core, built.tokenizer)
    first = some_tokens(1727, seed=1, vocab=256)
    second = [*first, *some_tokens(2, seed=2, vocab=256)]
    params = SamplingParams(temperature=0.0, max_tokens=1)

    def served(prompt: list[int]) -> tuple[float, float, int]:
        (output,) = llm.generate([prompt], params)
        counters = llm.stats().counters
        return counters["prefix_queries"], counters["prefix_hits"], output.num_cached_tokens

    before, after = served(first), served(second)
    assert before == (1727, 0, 0)
    assert after == (3456, 1712, 1712)
    queries, hits = after[0] - before[0], after[1] - before[1]
    assert (queries, hits) == (1729, 1712)
    assert f"{hits / queries:.2%}" == "99.02%"
    assert hits == 107 * 16
    assert llm.stats().counters["prompt_tokens_computed"] == 1727 + 17


def test_the_same_prompt_again_hits_all_but_its_last_token(plain: Loaded) -> None:
    # mission 7: a rate over the service's life is another figure than that of one request
    engine = Engine(plain)
    prompt = some_tokens(1729, seed=1, vocab=VOCAB)
    rates = []
    for _ in range(3):
        before = engine.counters
        answer = engine.generate(prompt)
        after = engine.counters
        assert after["prefix_queries"] - before["prefix_queries"] == answer.usage.n_prompt == 1729
        assert after["prefix_hits"] - before["prefix_hits"] == answer.n_cached
        rates.append(answer.n_cached)
    assert rates == [0, 1728, 1728]
    assert engine.counters["prefix_hits"] / engine.counters["prefix_queries"] < 0.67


def test_99_percent_hit_is_not_99_percent_of_the_work(plain: Loaded) -> None:
    # mission 7: the same number of model steps, and as many generated tokens; only prompt tokens are saved
    engine = Engine(plain)
    prompt = some_tokens(1601, seed=1, vocab=VOCAB)
    work = []
    for _ in range(2):
        engine.model.calls.clear()
        engine.generate(prompt, 32)
        calls = engine.model.calls
        work.append((len(calls), sum(len(call.tokens) for call in calls)))
    assert work == [(32, 1601 + 31), (32, 1 + 31)]


def test_bypassed_requests_count_apart(plain: Loaded) -> None:
    # mission 7 (and B65): neither a query nor a hit; what they compute is still published
    engine = Engine(plain)
    prompt = some_tokens(40, seed=1, vocab=VOCAB)
    assert engine.generate(prompt, skip_reading=True).n_cached == 0
    counters = engine.counters
    assert (counters["prefix_queries"], counters["bypassed_requests"]) == (0, 1)
    assert engine.generate(prompt).n_cached == 32


@pytest.mark.parametrize("n_attempts", [6])
def test_b64_a_request_that_waits_for_room_counts_once(plain: Loaded, n_attempts: int) -> None:
    # mission 7: look-ups of attempts that failed count nothing
    engine = Engine(plain, block_size=4, n_blocks=8, max_model_len=32)
    engine.generate(range(1, 9))
    long = engine.submit([*range(1, 9), *range(100, 114)], n_attempts)
    engine.step()
    late = engine.submit([*range(1, 9), *range(200, 210)], 1)
    for _ in range(n_attempts - 1):
        assert not late.deltas
        engine.step()
    engine.run()
    assert (long.n_cached, late.n_cached) == (8, 8)
    counters = engine.counters
    assert (counters["prefix_queries"], counters["prefix_hits"]) == (8 + 22 + 18, 8 + 8)
