"""Look-ups: proven, pure, the longest, and always explained."""

from __future__ import annotations

import copy
import pickle

import pytest

from headwater.cache.block import Node
from headwater.cache.events import EventLog
from headwater.cache.key import Hasher
from headwater.cache.lookup import StopReason
from headwater.cache.prefix import PrefixCache
from headwater.config import CacheConfig
from headwater.errors import StaleLookup
from headwater.types import Namespace
from tests.cache.cache_model import BASE, CONSTANT, TRUNCATED, admit, full, hit, make_cache, serve, sliding, span


@pytest.mark.parametrize("hasher", [None, CONSTANT, TRUNCATED])
def test_a_hit_is_proven_whatever_the_hash(hasher) -> None:
    """With a flat map and a constant hash, [A, C] and [B] cached would serve A's C for [B, C]."""
    cache = make_cache(hasher=hasher)
    a, b, c = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]
    serve(cache, [*a, *c])
    serve(cache, b)
    assert hit(cache, [*b, *c, 1]) == 4
    assert hit(cache, [*a, *c, 1]) == 8
    assert hit(cache, [*c, 1]) == 0
    serve(cache, [*b, *c, 1])
    assert hit(cache, [*b, *c, 1]) == 8


def test_only_prefixes_by_whole_blocks() -> None:
    cache = make_cache(full(16))
    serve(cache, span(1, 60))
    assert hit(cache, [*span(1, 50), 99, 99]) == 48
    assert hit(cache, [99, *span(1, 60)]) == 0
    assert hit(cache, [*span(17, 60)]) == 0


def test_not_two_histories_with_the_same_block() -> None:
    cache = make_cache()
    serve(cache, span(1, 8))
    assert hit(cache, [9, 9, 9, 9, 5, 6, 7, 8, 1]) == 0


@pytest.mark.parametrize("n", [1, 3, 4, 5, 7, 8, 9, 12])
def test_b40_the_last_token_is_always_computed(n: int) -> None:
    cache = make_cache(partial=False)
    expected = (n - 1) // 4 * 4
    assert serve(cache, span(1, n)).n_hit == 0
    for _ in range(2):
        lookup = serve(cache, span(1, n))
        assert lookup.n_hit == expected
        reason = StopReason.LAST_TOKEN if n % 4 == 0 else StopReason.PARTIAL_BLOCK
        assert (lookup.stop.reason, lookup.stop.at_token) == (reason, expected)


def test_an_empty_prompt_hits_nothing() -> None:
    cache = make_cache()
    lookup = cache.lookup(cache.chain(BASE, []))
    assert (lookup.n_hit, lookup.stop.reason) == (0, StopReason.PARTIAL_BLOCK)


def test_no_record() -> None:
    cache = make_cache()
    assert cache.lookup(cache.chain(BASE, span(1, 9))).stop.reason is StopReason.NO_RECORD
    serve(cache, span(1, 4))
    stop = cache.lookup(cache.chain(BASE, span(1, 9))).stop
    assert (stop.reason, stop.at_token) == (StopReason.NO_RECORD, 4)
    assert "never" not in stop.describe()


@pytest.mark.parametrize("n_children", [1, 2, 50])
def test_differs_at_the_token_of_the_nearest_recorded_child(n_children: int) -> None:
    cache = make_cache(n_blocks=256)
    shared = span(1, 4)
    for i in range(n_children):
        serve(cache, [*shared, 70_000 + i, 300, 300, 300])
    serve(cache, [*shared, 70_000, 256, 65_536, 1])
    for tail, at in (
        ([70_000, 256, 65_536, 2], 7),
        ([70_000, 256, 65_537, 1], 6),
        ([70_000, 300, 300, 299], 7),
        ([70_000, 301, 300, 300], 5),
        ([1, 300, 300, 300], 4),
    ):
        lookup = cache.lookup(cache.chain(BASE, [*shared, *tail, 5]))
        assert lookup.n_hit == 4
        assert (lookup.stop.reason, lookup.stop.at_token) == (StopReason.DIFFERS, at)


def test_one_token_at_the_start_makes_all_miss() -> None:
    cache = make_cache()
    serve(cache, span(1, 30))
    stop = cache.lookup(cache.chain(BASE, [7, *span(2, 30)])).stop
    assert (stop.reason, stop.at_token) == (StopReason.DIFFERS, 0)


def test_evicted_says_when_and_for_whom() -> None:
    now = [100.0]
    cache = make_cache(n_blocks=4, clock=lambda: now[0])
    serve(cache, span(1, 12))
    now[0] = 123.5
    serve(cache, span(50, 61), owner="greedy")
    lookup = cache.lookup(cache.chain(BASE, span(1, 13)))
    assert lookup.n_hit == 4  # tail first: the head is still there
    assert lookup.stop.reason is StopReason.EVICTED and lookup.stop.at_token == 4
    assert (lookup.stop.evicted_at, lookup.stop.request) == (123.5, "greedy")
    assert "123.5" in lookup.stop.describe() and "greedy" not in lookup.stop.describe()


def test_other_adapter_but_never_another_salt() -> None:
    cache = make_cache()
    serve(cache, span(1, 8), namespace=Namespace(b"w", ((b"a", 1.0),), salt="s"))
    for namespace, reason in (
        (Namespace(b"w", ((b"b", 1.0),), salt="s"), StopReason.OTHER_IDENTITY),
        (Namespace(b"w", (), salt="s"), StopReason.OTHER_IDENTITY),
        (Namespace(b"w", ((b"a", 1.0),), salt="t"), StopReason.NO_RECORD),
        (Namespace(b"w", ((b"a", 1.0),)), StopReason.NO_RECORD),
        (Namespace(b"w"), StopReason.NO_RECORD),
        (Namespace(b"v", ((b"a", 1.0),), salt="s"), StopReason.NO_RECORD),
    ):
        lookup = cache.lookup(cache.chain(namespace, span(1, 9)))
        assert (lookup.n_hit, lookup.stop.reason) == (0, reason)


def test_b05_salts_isolate_both_ways() -> None:
    cache = make_cache()
    a, b = Namespace(b"w", salt="a"), Namespace(b"w", salt="b")
    assert serve(cache, span(1, 32), namespace=a).n_hit == 0
    assert serve(cache, span(1, 32), namespace=b).n_hit == 0
    assert serve(cache, span(1, 32), namespace=a).n_hit == 28


@pytest.mark.parametrize("hasher", [None, CONSTANT])
def test_computing_says_who_and_follows_the_owner(hasher) -> None:
    cache = make_cache(hasher=hasher)
    leader = cache.chain(BASE, span(1, 14))
    _, holding = admit(cache, leader, "leader")
    follower = cache.chain(BASE, span(1, 20))
    other = cache.chain(BASE, [*span(1, 3), 99, *span(5, 20)])

    def stop_of(chain):
        lookup = cache.lookup(chain)
        return lookup.stop.reason, lookup.stop.at_token, lookup.stop.request

    assert stop_of(follower) == (StopReason.COMPUTING, 0, "leader")
    assert stop_of(other) == (StopReason.NO_RECORD, 0, None)
    cache.publish(leader, holding, 9)
    assert stop_of(follower) == (StopReason.COMPUTING, 8, "leader")
    assert stop_of(other) == (StopReason.DIFFERS, 3, None)
    assert stop_of(cache.chain(Namespace(b"weights", salt="s"), span(1, 20)))[0] is StopReason.NO_RECORD
    cache.publish(leader, holding, 14)  # 12 .. 15 is not full: its tokens are not even known
    assert stop_of(follower) == (StopReason.NO_RECORD, 12, None)
    leader.extend([15, 16])
    assert stop_of(follower) == (StopReason.COMPUTING, 12, "leader")
    cache.release(holding)
    assert stop_of(follower) == (StopReason.NO_RECORD, 12, None)
    cache.audit([])


def test_computing_again_what_was_evicted() -> None:
    cache = make_cache(n_blocks=6)
    serve(cache, span(1, 12))
    serve(cache, span(50, 65))
    again = cache.chain(BASE, span(1, 13))
    lookup, _ = admit(cache, again, "again")
    assert lookup.stop.reason is StopReason.EVICTED
    assert cache.lookup(cache.chain(BASE, span(1, 13))).stop.request == "again"


def test_bypassed_by_option() -> None:
    cache = make_cache()
    serve(cache, span(1, 8))
    lookup = cache.lookup(cache.chain(BASE, span(1, 8)), bypass="skip_reading_prefix_cache")
    assert (lookup.n_hit, lookup.stop.reason) == (0, StopReason.BYPASSED)
    assert "skip_reading_prefix_cache" in lookup.stop.describe()
    holding = cache.claim(lookup.chain, lookup, "r")
    cache.allocate(holding, 8)
    cache.publish(lookup.chain, holding, 8)  # it still publishes
    cache.release(holding)
    cache.audit()


def test_caching_off_hashes_and_publishes_nothing() -> None:
    calls = []
    hasher = Hasher("counted", lambda message: calls.append(message) or b"7")
    cache = PrefixCache((full(4),), 8, config=CacheConfig(enable_prefix_caching=False), hasher=hasher)
    for _ in range(3):
        lookup = serve(cache, span(1, 9))
        assert (lookup.n_hit, lookup.stop.option) == (0, "no_enable_prefix_caching")
    assert not calls
    assert cache.stats().free == 8
    assert (cache.stats().query_tokens, cache.stats().bypassed_requests) == (0, 3)


def test_b55_no_group_that_can_be_reused() -> None:
    for groups in ((), (full(4, reusable=False),)):
        cache = PrefixCache(groups, 8, config=CacheConfig())
        lookup = serve(cache, span(1, 9))
        assert (lookup.n_hit, lookup.stop.option) == (0, "no_reusable_group")


def _state(cache: PrefixCache) -> bytes:
    """Everything the cache holds, flat (a tree of nodes is deeper than pickle's stack likes)."""
    index, pool = cache.index, cache.pool

    def of(node: Node | None) -> object:
        return None if node is None else (node.key, node.depth, node.copies, [c.key for c in node.children()])

    nodes = [of(node) for node in index.by_key.values()]
    ghosts = [(of(node), eviction) for node, eviction in index.ghosts.nodes.items()]
    computing = [(of(node), [repr(h) for h in at]) for node, at in index.computing.items()]
    flat = (pool.refs, [of(n) for n in pool.node], pool.group, pool.free, list(pool.evictable), pool.fences)
    rest = (index.epoch, len(index.roots), index.first_units.keys(), cache.stats(), cache.events.next_sequence)
    return pickle.dumps(copy.deepcopy((flat, nodes, ghosts, computing, list(map(str, rest)))))


@pytest.mark.parametrize("groups", [(full(4),), (full(4), sliding(4, 6))])
def test_a_lookup_is_pure(groups) -> None:
    cache = make_cache(*groups, n_blocks=12, events=EventLog(enabled=True), max_ghosts=6)
    serve(cache, span(1, 12))
    serve(cache, [*span(1, 4), *span(50, 61)])
    admit(cache, cache.chain(BASE, span(200, 209)), "running")
    before = _state(cache)
    for tokens in (span(1, 13), span(1, 5), [*span(1, 4), *span(50, 70)], span(200, 220), span(300, 320), []):
        for namespace in (BASE, Namespace(b"weights", ((b"a", 1.0),)), Namespace(b"weights", salt="new")):
            chain = cache.chain(namespace, tokens)
            first = cache.lookup(chain)
            assert first == cache.lookup(chain)
            assert cache.can_admit(first, len(tokens)) == cache.can_admit(first, len(tokens))
    assert _state(cache) == before


def test_a_stale_lookup_is_refused_and_changes_nothing() -> None:
    cache = make_cache(n_blocks=4)
    serve(cache, span(1, 9))
    chain = cache.chain(BASE, span(1, 9))
    lookup = cache.lookup(chain)
    assert lookup.n_hit == 8
    serve(cache, span(50, 65), owner="other")
    before = _state(cache)
    with pytest.raises(StaleLookup):
        cache.claim(chain, lookup, "late")
    assert _state(cache) == before
    with pytest.raises(StaleLookup, match="another chain"):
        cache.claim(cache.chain(BASE, span(1, 9)), cache.lookup(chain), "r")


def test_a_lookup_survives_changes_that_do_not_matter() -> None:
    cache = make_cache(n_blocks=6)
    serve(cache, span(50, 57))
    serve(cache, span(1, 9))
    chain = cache.chain(BASE, span(1, 9))
    lookup = cache.lookup(chain)
    other = cache.chain(BASE, span(90, 101))
    _, busy = admit(cache, other)  # evicts something else
    assert cache.stats().evictions > 0
    holding = cache.claim(chain, lookup, "r")
    cache.audit([holding, busy])
    assert holding.tables[0].blocks == list(lookup.tables[0].blocks)


@pytest.mark.parametrize("groups", [(full(4),), (full(4), full(6)), (full(4), sliding(4, 6))])
def test_can_admit_tells_the_truth(groups) -> None:
    for n_blocks in range(8, 20):
        cache = make_cache(*groups, n_blocks=n_blocks)
        serve(cache, span(1, 13))
        busy = cache.chain(BASE, span(50, 53))
        admit(cache, busy, "busy")
        for n in range(1, 40):
            chain = cache.chain(BASE, span(1, n))
            lookup = cache.lookup(chain)
            said = cache.can_admit(lookup, n)
            holding = cache.claim(chain, lookup, "r")
            assert said == (cache.blocks_missing(holding, n) <= cache.available)
            cache.release(holding)
