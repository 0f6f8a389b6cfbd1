"""References, the free list, the queue, fences (known faults, sections D and E)."""

from __future__ import annotations

import random

import pytest

from headwater.cache.block import Node
from headwater.cache.events import BlockRemoved, EventLog
from headwater.cache.pool import BlockPool
from headwater.errors import DoubleRelease, OutOfBlocks, StaleLookup
from tests.cache.cache_model import BASE, admit, full, hit, make_cache, serve, sliding, span


def queue(cache) -> list[int]:
    return list(cache.pool.evictable)


def test_b36_each_group_tail_first_on_both_paths() -> None:
    for fence in (None, 7):
        cache = make_cache(full(4), full(4), n_blocks=6)
        chain = cache.chain(BASE, span(1, 12))
        _, holding = admit(cache, chain)
        first, second = (list(table.blocks) for table in holding.tables)
        cache.publish(chain, holding, 12)
        cache.release(holding, fence=fence)
        if fence is not None:
            assert queue(cache) == []
            cache.step_applied(fence)
        assert queue(cache) == [*first[::-1], *second[::-1]]


def test_free_blocks_are_taken_before_evictable_ones() -> None:
    cache = make_cache(n_blocks=5)
    serve(cache, span(1, 8))
    _, holding = admit(cache, cache.chain(BASE, span(50, 61)))
    assert cache.stats().evictions == 0
    assert hit(cache, span(1, 9)) == 8
    cache.allocate(holding, 13)
    assert cache.stats().evictions == 1
    assert hit(cache, span(1, 9)) == 4


def test_lru_over_sequences_and_a_claim_moves_to_the_end() -> None:
    cache = make_cache(n_blocks=4, partial=False)
    serve(cache, span(1, 8))
    serve(cache, span(50, 57))
    serve(cache, span(1, 7))  # uses the first block again
    serve(cache, span(90, 97))
    assert hit(cache, span(1, 8)) == 4
    assert hit(cache, span(50, 58)) == 4


def test_b39_a_cache_full_of_evictable_blocks_is_available() -> None:
    cache = make_cache(n_blocks=10)
    for i in range(5):
        serve(cache, span(100 * i, 100 * i + 7))
    assert (cache.stats().evictable, cache.available) == (10, 10)
    chain = cache.chain(BASE, span(900, 907))
    assert cache.can_admit(cache.lookup(chain), 8)
    admit(cache, chain)


def test_out_of_blocks_leaves_everything_as_it_was() -> None:
    cache = make_cache(full(4), full(4), n_blocks=7)
    serve(cache, span(1, 8))
    chain = cache.chain(BASE, span(50, 70))
    lookup = cache.lookup(chain)
    holding = cache.claim(chain, lookup, "r")
    before = (list(cache.pool.free), queue(cache), cache.stats())
    with pytest.raises(OutOfBlocks) as caught:
        cache.allocate(holding, 16)
    assert (caught.value.needed, caught.value.available) == (8, 7)
    assert (list(cache.pool.free), queue(cache), cache.stats()) == before
    assert len(cache.allocate(holding, 12)[0]) == 3
    cache.audit([holding])


def test_b33_double_release_is_refused_and_counted() -> None:
    cache = make_cache(n_blocks=4)
    chain = cache.chain(BASE, span(1, 5))
    _, holding = admit(cache, chain)
    cache.release(holding)
    with pytest.raises(DoubleRelease, match="'r'"):
        cache.release(holding)
    assert cache.stats().refused_releases == 1
    assert sorted(cache.pool.free) == [0, 1, 2, 3]
    _, a = admit(cache, cache.chain(BASE, span(50, 53)), "a")
    _, b = admit(cache, cache.chain(BASE, span(60, 63)), "b")
    assert a.tables[0].blocks != b.tables[0].blocks
    cache.audit([a, b])


def test_b33_the_pool_itself_refuses_too() -> None:
    pool = BlockPool(4)
    taken, _ = pool.take(2)
    pool.release(taken)
    for again in (lambda: pool.release(taken), lambda: pool.fence(taken, 1)):
        with pytest.raises(DoubleRelease):
            again()
    assert sorted(pool.free) == [0, 1, 2, 3] and pool.refs == [0] * 4 and not pool.fences


def test_b31_at_idle_everything_is_free_or_evictable() -> None:
    cache = make_cache(n_blocks=12)
    for i in range(200):
        chain = cache.chain(BASE, span(10 * i, 10 * i + 8))
        _, holding = admit(cache, chain)
        if i % 4 == 0:  # stop, length
            cache.publish(chain, holding, 9)
        elif i % 4 == 1:  # abort half way
            cache.publish(chain, holding, 5)
        cache.release(holding)
        stats = cache.stats()
        assert (stats.in_use, stats.free + stats.evictable, stats.logical_blocks) == (0, 12, 0)
        cache.audit([])


def two_copies(cache, tokens):
    chains = [cache.chain(BASE, tokens) for _ in range(2)]
    holdings = [admit(cache, chain, f"r{i}")[1] for i, chain in enumerate(chains)]
    for chain, holding in zip(chains, holdings, strict=True):
        cache.publish(chain, holding, len(tokens))
    return holdings


def test_b34_two_copies_are_two_blocks_with_an_owner_each() -> None:
    cache = make_cache(n_blocks=8)
    a, b = two_copies(cache, span(1, 8))
    assert not set(a.tables[0].blocks) & set(b.tables[0].blocks)
    cache.audit([a, b])
    third = cache.claim(*(lambda c: (c, cache.lookup(c)))(cache.chain(BASE, span(1, 9))), "c")
    assert sorted(cache.pool.refs, reverse=True)[:4] == [2, 2, 1, 1]
    for holding in (a, b, third):
        cache.release(holding)
        cache.audit()
        stats = cache.stats()
        assert stats.in_use + stats.evictable + stats.free == 8
    assert cache.stats().evictable == 4


def test_a_duplicate_goes_first_and_the_content_keeps_its_place() -> None:
    cache = make_cache(n_blocks=6)
    serve(cache, span(50, 57))  # older
    a, b = two_copies(cache, span(1, 8))
    cache.release(a)
    duplicates = queue(cache)[:2]  # b's copies are in use and stand for the content
    cache.release(b)  # now b's take its place in the order, and a's stay first
    assert set(queue(cache)[:2]) == set(duplicates)
    admit(cache, cache.chain(BASE, span(90, 97)), "new")
    assert not set(duplicates) & set(queue(cache))
    assert hit(cache, span(1, 9)) == 8
    assert hit(cache, span(50, 58)) == 8


def test_b71_copies_of_what_is_computed_again_and_again_do_not_pile_up() -> None:
    """The last block of an aligned prompt is computed every time; a copy of each time would fill the pool, and
    every look-up and release of that content would walk over all of them."""
    cache = make_cache(full(4), sliding(4, 8), n_blocks=64, events=EventLog(enabled=True))
    for _ in range(30):
        serve(cache, span(1, 8))
    last = cache.lookup(cache.chain(BASE, span(1, 9))).path[-1]
    assert len(last.copies) <= 4  # in each of two groups, the one of the last time and that of the time before
    stats = cache.stats()
    assert (stats.evictions, stats.in_use, stats.free + stats.evictable) == (0, 0, 64)
    assert hit(cache, span(1, 9)) == 8
    assert sum(isinstance(event, BlockRemoved) for event in cache.events.drain()) == 0


def test_a_lookup_whose_copy_was_freed_as_surplus_is_stale() -> None:
    cache = make_cache(n_blocks=8, partial=False)
    serve(cache, span(1, 4))
    chain = cache.chain(BASE, span(1, 5))
    lookup = cache.lookup(chain)
    again = cache.chain(BASE, span(1, 4))
    holding = cache.claim(again, cache.lookup(again), "again")
    cache.allocate(holding, 4)
    cache.publish(again, holding, 4)
    with pytest.raises(StaleLookup):
        cache.claim(chain, lookup, "r")
    assert hit(cache, span(1, 5)) == 4
    cache.audit([holding])


def test_a_lookup_prefers_the_copy_in_use() -> None:
    cache = make_cache(n_blocks=6)
    a, b = two_copies(cache, span(1, 4))
    in_use = list(b.tables[0].blocks)
    cache.release(a)
    assert list(cache.lookup(cache.chain(BASE, span(1, 5))).tables[0].blocks) == in_use


def test_b35_the_queue_against_a_plain_list() -> None:
    rng = random.Random(35)
    pool = BlockPool(32)
    free, order = list(range(32)), []
    held: dict[int, int] = {}
    for _ in range(10_000):
        kind = rng.random()
        if (kind < 0.4 and free) or order:
            n = rng.randint(1, 4)
            if n > len(free) + len(order):
                with pytest.raises(OutOfBlocks):
                    pool.take(n)
                continue
            if kind < 0.4:
                taken, evicted = pool.take(n)
                n_evicted = max(0, n - len(free))
                assert evicted == order[:n_evicted]
                del order[:n_evicted]
                free = [block for block in free if block not in taken]
                for block in taken:
                    pool.node[block] = None
                    held[block] = 1
                continue
        if kind < 0.6 and order:
            block = rng.choice(order)
            pool.claim([block])
            order.remove(block)
            held[block] = 1
        elif kind < 0.7 and held:
            block = rng.choice([*held])
            if pool.node[block] is not None:
                pool.claim([block])
                held[block] += 1
        elif held:
            block = rng.choice([*held])
            if pool.node[block] is None and rng.random() < 0.7:
                node = Node(None, b"", b"", None, 1)
                node.copies = (block,)
                pool.node[block] = node
            pool.release([block])
            held[block] -= 1
            if not held[block]:
                del held[block]
                (free if pool.node[block] is None else order).append(block)
        assert list(pool.evictable) == order and sorted(pool.free) == sorted(free)


def test_b35_eviction_visits_only_what_it_evicts(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(n_blocks=10_000)
    for i in range(10):
        serve_quietly(cache, [i, *range(3_999)])
    assert cache.stats().evictable == 10_000
    visited = set()
    read = Node.copies.__get__  # type: ignore[attr-defined]

    class Counting:
        def __get__(self, node, owner=None):
            visited.add(id(node))
            return read(node, owner)

        def __set__(self, node, value):
            slot.__set__(node, value)

    slot = Node.copies
    chain = cache.chain(BASE, range(100_000, 104_000))
    lookup = cache.lookup(chain)
    holding = cache.claim(chain, lookup, "r")
    monkeypatch.setattr(Node, "copies", Counting())
    cache.allocate(holding, 4_000)
    assert 1_000 <= len(visited) <= 2_000


def serve_quietly(cache, tokens) -> None:
    chain = cache.chain(BASE, tokens)
    _, holding = admit(cache, chain)
    cache.publish(chain, holding, len(tokens))
    cache.release(holding)


def test_b28_a_block_that_slid_out_waits_for_the_step_that_names_it() -> None:
    cache = make_cache(sliding(4, 8), n_blocks=4)
    chain = cache.chain(BASE, span(1, 11))
    _, holding = admit(cache, chain)
    first = holding.tables[0].blocks[0]
    cache.publish(chain, holding, 11)
    cache.slide(holding, 11, fence=5)
    assert holding.tables[0].first == 1
    other = cache.claim(*(lambda c: (c, cache.lookup(c)))(cache.chain(BASE, span(50, 53))), "other")
    assert first not in cache.allocate(other, 4)[0]
    with pytest.raises(OutOfBlocks):
        cache.allocate(other, 5)
    assert cache.stats().fenced == 1
    cache.step_applied(4)
    assert cache.available == 0
    cache.step_applied(5)
    assert cache.allocate(other, 5)[0] == (first,)
    cache.audit([holding, other])


def test_b28_several_steps_in_flight_and_a_fenced_block_may_still_hit() -> None:
    cache = make_cache(n_blocks=8)
    chains = [cache.chain(BASE, span(100 * i, 100 * i + 8)) for i in range(2)]
    holdings = [admit(cache, chain, f"r{i}")[1] for i, chain in enumerate(chains)]
    for chain, holding in zip(chains, holdings, strict=True):
        cache.publish(chain, holding, 9)
    cache.release(holdings[0], fence=2)
    cache.release(holdings[1], fence=1)
    cache.audit()
    assert (cache.stats().fenced, cache.stats().in_use, cache.available) == (6, 0, 2)
    again = cache.chain(BASE, span(0, 8))
    lookup = cache.lookup(again)
    assert lookup.n_hit == 8
    held = cache.claim(again, lookup, "again")
    assert (cache.stats().fenced, cache.stats().in_use) == (4, 2)
    cache.step_applied(1)
    assert cache.stats().fenced == 1
    cache.step_applied(2)
    cache.audit([held])
    assert (cache.stats().fenced, cache.stats().in_use, cache.available) == (0, 2, 6)
    cache.release(held, fence=2)  # a step that is over fences nothing
    assert cache.available == 8
