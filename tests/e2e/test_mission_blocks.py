"""Mission 3 (full blocks) and 5 (from keys to physical blocks), on a real model with its KV in real pages."""

from __future__ import annotations

import pytest
import torch

from headwater.cache.prefix import PrefixCache
from headwater.config import CacheConfig
from headwater.errors import CacheError, OutOfBlocks
from headwater.types import GroupKind, GroupSpec, Namespace
from tests.cache.cache_model import BASE, admit, full, hit, make_cache, serve, span
from tests.e2e.compare import assert_same, oracle
from tests.e2e.engine import Engine, Loaded, some_tokens

VOCAB = 300


# ---- mission 3 ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("common", "block_size", "expected"),
    [(50, 16, 48), (0, 16, 0), (1, 16, 0), (15, 16, 0), (16, 16, 16), (17, 16, 16), (63, 16, 48), (64, 16, 64),
     (50, 8, 48), (50, 32, 32), (50, 4, 48), (49, 7, 49)],
)  # fmt: skip
def test_floor_c_over_b_times_b_tokens_are_reused(plain: Loaded, common: int, block_size: int, expected: int) -> None:
    # mission 3: C = 50, B = 16 gives 48; two tokens of the common prefix are computed again
    shared = some_tokens(common, seed=1, vocab=100)
    engine = Engine(plain, block_size=block_size)
    engine.generate([*shared, *some_tokens(30, seed=2, vocab=100)])
    answer = engine.generate([*shared, 200, 201, 202])
    assert answer.n_cached == expected == common // block_size * block_size
    assert engine.model.calls[-1].tokens == [*shared[expected:], 200, 201, 202]
    assert engine.model.calls[-1].positions == list(range(expected, common + 3))
    assert_same(answer, oracle(plain, answer.prompt, 1), plain)


def test_knowing_a_key_is_not_a_hit() -> None:
    # mission 3: hit = key known + a valid published block + compatible identity
    cache = make_cache()
    chain = cache.chain(BASE, span(1, 13))
    assert len(chain.keys(3)) == 3
    assert cache.lookup(chain).n_hit == 0, "no block: a miss"

    _, holding = admit(cache, chain)
    assert hit(cache, span(1, 13)) == 0, "a block, but not published: a miss"
    cache.publish(chain, holding, 12)
    assert hit(cache, span(1, 13)) == 12

    assert hit(cache, span(1, 3)) == 0, "no full block, no key: cannot be looked up"
    assert hit(cache, span(1, 13), Namespace(b"weights", salt="other")) == 0, "a block of another identity: a miss"
    assert hit(cache, span(1, 13), Namespace(b"other weights")) == 0


def test_a_block_is_never_overwritten_while_it_is_mapped(plain: Loaded) -> None:
    # mission 3: a bug that must be impossible; strangers fill the pool many times over while one request runs
    engine = Engine(plain, block_size=4, n_blocks=24, max_seqs=4, max_model_len=60)
    engine.shuffle_free()
    answer = engine.submit(some_tokens(20, seed=1, vocab=VOCAB), 30)
    engine.step()
    before, table = engine.kv_of(answer), engine.table(answer)
    for i in range(8):
        engine.submit(some_tokens(16, seed=10 + i, vocab=VOCAB), 2)
    while len(answer.tokens) < 30:
        if len(answer.tokens) > 1:
            assert engine.table(answer)[: len(table)] == table
            for was, now in zip(before, engine.kv_of(answer), strict=True):
                assert torch.equal(now[:, :20], was)
        engine.step()
    engine.run()
    assert engine.counters["evictions"] > 20
    assert answer.seq.n_preemptions == 0
    assert_same(answer, oracle(plain, answer.prompt, 30), plain)


@pytest.mark.parametrize("n_known", [31, 32, 33, 48, 49])
def test_a_prompt_whose_every_block_is_cached_still_runs_the_model(plain: Loaded, n_known: int) -> None:
    # mission 3: at most known - 1 tokens hit, by whole blocks possibly a block less
    engine = Engine(plain)
    prompt = some_tokens(n_known, seed=3, vocab=VOCAB)
    engine.generate([*prompt, *some_tokens(40, seed=4, vocab=VOCAB)])
    answer = engine.generate(prompt)
    assert answer.n_cached == (n_known - 1) // 16 * 16
    assert engine.model.calls[-1].tokens == prompt[answer.n_cached :] != []
    assert_same(answer, oracle(plain, prompt, 1), plain)


def test_the_partial_tail_is_never_shared_and_its_space_is_reusable(plain: Loaded) -> None:
    # mission 3
    engine = Engine(plain, block_size=4)
    engine.order_free(7, 19, 23)
    first = engine.submit([*span(1, 8), 9, 10], 2)
    engine.step()
    assert engine.table(first) == [7, 19, 23]
    engine.run()
    stats = engine.cache.stats()
    assert (stats.evictable, stats.free) == (2, engine.cache.n_blocks - 2), "23 is free again, 7 and 19 are kept"
    second = engine.submit([*span(1, 8), 9, 10, 11], 2)
    engine.step()
    assert second.n_cached == 8
    assert engine.model.calls[-1].tokens == [9, 10, 11], "the tail's two tokens are computed again"
    assert engine.table(second) == [7, 19, 23], "in the block that the first one's tail had"
    engine.run()
    assert_same(second, oracle(plain, second.prompt, 2), plain)


def test_three_counts_and_where_the_next_kv_goes(plain: Loaded) -> None:
    # mission 3: known % B, computed % B, allocated slots; the next KV goes to block computed // B, slot computed % B
    engine = Engine(plain, block_size=4)
    engine.shuffle_free()
    answer = engine.submit(span(1, 10), 9)
    engine.step()
    seq, layer = answer.seq, engine.store.layers[0]
    for _ in range(7):
        n_computed = seq.n_computed
        assert seq.n_known == n_computed + 1, "the last token is known, its KV is not written"
        assert seq.n_slots == len(engine.table(answer)) * 4 >= n_computed
        before = layer.k.clone()
        engine.step()
        page, slot = engine.table(answer)[n_computed // 4], n_computed % 4
        changed = (layer.k != before).flatten(2).any(-1).nonzero().tolist()
        assert changed == [[page, slot]]
        assert seq.n_computed == n_computed + 1
    assert (seq.n_known % 4, seq.n_computed % 4, seq.n_slots) == (18 % 4, 17 % 4, 20)
    engine.run()


# ---- mission 5 ----------------------------------------------------------------------------------


def test_the_timeline_of_7_19_23(plain: Loaded) -> None:
    # mission 5: B = 4, tokens A..H I J; 7 and 19 hold A..D and E..H, nobody uses them
    a_to_h, i, j = span(65, 72), 73, 74
    engine = Engine(plain, block_size=4)
    engine.order_free(7, 19)
    engine.generate(a_to_h)
    engine.order_free(23)
    pool = engine.cache.pool
    assert set(pool.evictable) == {7, 19} and pool.refs[7] == pool.refs[19] == 0
    written = [layer.k[23].clone() for layer in engine.store.layers]

    answer = engine.submit([*a_to_h, i, j], 4)
    seq = answer.seq
    counts = lambda: (seq.n_cached, seq.n_computed, seq.n_scheduled, seq.n_known)  # noqa: E731
    assert counts() == (0, 0, 0, 10) and seq.holding is None  # arrival
    assert list(seq.chain.keys(2)) == list(seq.chain.keys(seq.chain.n_units)), "two full blocks, two keys"
    assert engine.hit(answer.prompt) == 8
    assert counts() == (0, 0, 0, 10) and set(pool.evictable) == {7, 19}, "a look-up changes nothing"

    during: list[object] = []
    engine.model.during = lambda: during.append((counts(), engine.table(answer), list(pool.evictable), pool.refs[7]))
    engine.step()
    assert during == [((8, 8, 10, 10), [7, 19, 23], [], 1)]
    call = engine.model.calls[-1]
    assert torch.tensor(call.tokens).shape == (2,) and call.tokens == [i, j], "model input [2]"
    assert call.positions == [8, 9] and call.context_len == (10,)
    assert counts() == (8, 10, 10, 11)
    assert seq.held().n_published == 8, "23 is partial: nothing to publish"
    for layer, was in zip(engine.store.layers, written, strict=True):
        assert (layer.k[23] != was).flatten(1).any(-1).tolist() == [True, True, False, False]

    engine.step()
    call = engine.model.calls[-1]
    assert (call.tokens, call.positions) == ([answer.tokens[0]], [10])
    assert counts() == (8, 11, 11, 12)
    engine.step()
    assert seq.held().n_published == 12, "23 is full and confirmed: findable, though the request still runs"
    engine.run()
    # Tail first: what was claimed stays findable longest.
    assert list(pool.evictable) == [23, 19, 7]
    assert engine.hit([*answer.prompt, *answer.tokens]) == 12
    assert_same(answer, oracle(plain, answer.prompt, 4), plain)


def test_a_miss_in_the_middle_ends_the_run_whatever_lies_behind() -> None:
    # mission 5: longest run from block 0
    cache = make_cache(n_blocks=4)
    serve(cache, span(1, 12))
    first, middle, last = cache.lookup(cache.chain(BASE, span(1, 13))).tables[0].blocks
    cache.pool.evictable.move_to_end(middle, last=False)
    cache.pool.evictable.move_to_end(last)
    holding = cache.claim(stranger := cache.chain(BASE, span(50, 57)), cache.lookup(stranger), "stranger")
    cache.allocate(holding, 8)  # the one free block and the middle one
    assert cache.pool.node[first] is not None and cache.pool.node[last] is not None
    assert cache.pool.node[middle] is None
    lookup = cache.lookup(cache.chain(BASE, span(1, 13)))
    assert (lookup.n_hit, lookup.tables[0].blocks) == (4, (first,))
    assert lookup.stop.reason.value == "evicted"
    cache.audit()


def test_a_claim_takes_refs_from_0_to_1_and_release_puts_the_block_back_with_key_and_kv(plain: Loaded) -> None:
    # mission 5
    engine = Engine(plain, block_size=4)
    engine.order_free(7, 19)
    engine.generate(span(1, 8))
    pool, nodes = engine.cache.pool, [engine.cache.pool.node[block] for block in (7, 19)]
    contents = engine.store.layers[0].k[[7, 19]].clone()
    a = engine.submit([*span(1, 8), 50], 3)
    engine.step()
    assert (pool.refs[7], pool.refs[19]) == (1, 1) and not {7, 19} & set(pool.evictable)
    b = engine.submit([*span(1, 8), 51], 9)
    engine.step()
    assert (pool.refs[7], pool.refs[19]) == (2, 2)
    while a.finish_reason is None:
        engine.step()
    assert (pool.refs[7], pool.refs[19]) == (1, 1) and not {7, 19} & set(pool.evictable)
    engine.run()
    assert (pool.refs[7], pool.refs[19]) == (0, 0) and {7, 19} <= set(pool.evictable)
    assert [pool.node[block] for block in (7, 19)] == nodes and None not in nodes
    assert torch.equal(engine.store.layers[0].k[[7, 19]], contents)
    assert a.n_cached == b.n_cached == 8


def test_new_content_first_withdraws_the_old_key(plain: Loaded) -> None:
    # mission 5: in the middle of the step that overwrites a block, the old prefix is a miss already
    engine = Engine(plain, block_size=4, n_blocks=3, max_model_len=12)
    old, new = span(1, 9), span(101, 109)
    engine.generate(old)
    assert engine.hit(old) == 8
    during: list[int] = []
    engine.model.during = lambda: during.append(engine.hit(old))
    engine.generate(new)
    assert during == [0]
    assert engine.hit(old) == 0 and engine.hit(new) == 8


def test_known_written_published_are_three_moments(plain: Loaded) -> None:
    # mission 5: while the step that writes a block runs, its key is known, and nobody may hit it
    engine = Engine(plain, block_size=4, budget=4)
    answer = engine.submit(span(1, 12), 4)
    during: list[tuple[int, int]] = []
    engine.model.during = lambda: during.append((len(answer.seq.chain.keys(3)), engine.hit(span(1, 13))))
    after = []
    for _ in range(3):
        engine.step()
        after.append(engine.hit(span(1, 13)))
    assert during == [(3, 0), (3, 4), (3, 8)]
    assert after == [4, 8, 12]
    assert answer.finish_reason is None, "shared before it ends"
    other = engine.submit([*span(1, 12), 50], 2)
    engine.step()
    assert other.n_cached == 12 and other.finish_reason is None
    assert engine.cache.stats().logical_blocks == engine.cache.stats().physical_in_use + 3
    engine.run()
    assert_same(other, oracle(plain, other.prompt, 2), plain)


def test_proposed_tokens_cannot_be_published_before_they_are_accepted() -> None:
    # mission 5: slots for speculation may be allocated; only tokens that are known can be published
    cache = make_cache()
    chain = cache.chain(BASE, span(1, 6))
    _, holding = admit(cache, chain)
    cache.allocate(holding, 10)  # room for two proposed tokens and more
    with pytest.raises(CacheError, match="8 tokens computed, but only 6 are known"):
        cache.publish(chain, holding, 8)
    assert hit(cache, span(1, 9)) == 0
    chain.extend([7, 8])  # accepted by the target model
    cache.publish(chain, holding, 8)
    assert hit(cache, span(1, 9)) == 8


def test_two_at_the_same_time_compute_two_copies_7_and_12(plain: Loaded) -> None:
    # mission 5: A and B both miss; two copies with an owner each, not one block with two references
    engine = Engine(plain, block_size=4, wait_s=0)
    engine.order_free(7, 8, 12, 13)
    a, b = engine.submit([1, 2, 3, 4, 50], 3), engine.submit([1, 2, 3, 4, 51], 3)
    engine.step()
    assert (a.n_cached, b.n_cached) == (0, 0)
    assert (engine.table(a), engine.table(b)) == ([7, 8], [12, 13])
    pool = engine.cache.pool
    assert pool.node[7] is pool.node[12] is not None
    assert (pool.refs[7], pool.refs[12]) == (1, 1)
    for layer in engine.store.layers:
        assert torch.equal(layer.k[7], layer.k[12]) and torch.equal(layer.v[7], layer.v[12])
    c = engine.submit([1, 2, 3, 4, 52], 3)
    engine.step()
    assert c.n_cached == 4 and engine.table(c)[0] in (7, 12), "a later hit takes either"
    assert sorted((pool.refs[7], pool.refs[12])) == [1, 2]
    engine.run()
    for answer in (a, b, c):
        assert_same(answer, oracle(plain, answer.prompt, 3), plain)


def test_when_a_new_block_is_needed_and_that_all_come_from_one_pool() -> None:
    # mission 5: the five cases, counted on one pool
    cache = make_cache(n_blocks=6)
    pool = cache.pool

    def taken(tokens: list[int]) -> int:
        chain = cache.chain(BASE, tokens)
        lookup = cache.lookup(chain)
        holding = cache.claim(chain, lookup, "r")
        n = cache.blocks_missing(holding, len(tokens))
        assert sum(map(len, cache.allocate(holding, len(tokens)))) == n
        cache.publish(chain, holding, len(tokens))
        cache.release(holding)
        return n

    assert taken(span(1, 8)) == 2, "the prefix misses"
    assert taken([*span(1, 8), 9]) == 1, "the request needs its own tail"
    chain = cache.chain(BASE, [*span(1, 8), 20])
    _, holding = admit(cache, chain)
    assert [cache.blocks_missing(holding, n) for n in (10, 12, 13)] == [0, 0, 1], "the writable block is full"
    same = cache.chain(BASE, [*span(1, 8), 20, 21, 22, 23, 24])
    lookup = cache.lookup(same)
    assert lookup.n_hit == 8
    other = cache.claim(same, lookup, "s")
    assert cache.blocks_missing(other, 13) == 2, "no published copy of the third block yet"
    cache.release(other)
    cache.release(holding)
    assert len(pool.free) + len(pool.evictable) == 6
    assert taken(span(101, 124)) == 6
    assert taken(span(1, 8)) == 2, "the old copy was evicted"
    cache.audit()


def test_groups_take_their_blocks_from_one_pool(hybrid: Loaded) -> None:
    # mission 5 and 6
    engine = Engine(hybrid, block_size=4, n_blocks=60)
    answer = engine.submit(some_tokens(30, seed=1, vocab=VOCAB), 4)
    engine.step()
    tables = [engine.table(answer, g) for g in range(len(engine.groups))]
    blocks = [block for table in tables for block in table]
    assert len(set(blocks)) == len(blocks) == engine.cache.stats().in_use
    engine.run()
    chain = engine.cache.chain(BASE, span(1, 4 * 21))
    holding = engine.cache.claim(chain, engine.cache.lookup(chain), "too long")
    with pytest.raises(OutOfBlocks, match="63 blocks needed, 60 available"):
        engine.cache.allocate(holding, 4 * 21)
    engine.cache.release(holding)


def test_a_block_size_of_one_and_of_the_whole_prompt() -> None:
    for size, expected in ((1, 9), (10, 0), (5, 5)):
        cache = PrefixCache([GroupSpec(GroupKind.FULL, size)], 32, config=CacheConfig(block_size=size))
        serve(cache, span(1, 10))
        assert hit(cache, span(1, 10)) == expected
    assert full(4).block_size == 4
