"""The life of a request: claim, allocate, publish, release, and what is counted (sections D, F, J, K)."""

from __future__ import annotations

import random

import pytest

from headwater.cache.audit import audit
from headwater.cache.prefix import PrefixCache
from headwater.config import CacheConfig
from headwater.errors import AuditError, CacheBusy, CacheError, ConfigError
from headwater.types import Namespace
from tests.cache.cache_model import BASE, CONSTANT, admit, full, hit, make_cache, serve, sliding, span


def test_the_timeline_of_7_19_23() -> None:
    """DESIGN: the first block's content in page 7, the second's in 19, the next free page is 23."""
    cache = make_cache(n_blocks=24)
    cache.pool.free = [b for b in range(23, -1, -1) if b not in (7, 19, 23)] + [23, 19, 7]
    a_to_j = span(1, 10)
    serve(cache, a_to_j[:8])
    cache.pool.free.remove(23)
    cache.pool.free.append(23)

    chain = cache.chain(BASE, a_to_j)
    assert chain.n_units == 2
    lookup = cache.lookup(chain)
    assert (lookup.n_hit, lookup.tables[0].blocks) == (8, (7, 19))
    assert list(cache.pool.evictable) == [19, 7] and cache.pool.refs[7] == 0
    holding = cache.claim(chain, lookup, "r")
    assert cache.pool.refs[7] == cache.pool.refs[19] == 1 and not cache.pool.evictable
    assert cache.allocate(holding, 10) == ((23,),)
    assert holding.tables[0].blocks == [7, 19, 23]
    cache.publish(chain, holding, 10)
    assert cache.pool.node[23] is None  # partial: nothing to publish
    chain.extend([11])
    assert cache.blocks_missing(holding, 11) == 0
    cache.publish(chain, holding, 11)
    cache.release(holding)
    assert list(cache.pool.evictable) == [19, 7] and cache.pool.free[-1] == 23
    cache.audit([])


def test_three_moments_known_written_published() -> None:
    cache = make_cache()
    chain = cache.chain(BASE, span(1, 12))
    _, holding = admit(cache, chain)
    for n_computed, expected in ((3, 0), (4, 4), (7, 4), (8, 8), (12, 12)):
        cache.publish(chain, holding, n_computed)
        assert hit(cache, span(1, 20)) == expected  # while the request runs
    cache.release(holding)


def test_b22_what_was_not_confirmed_is_never_found() -> None:
    cache = make_cache(n_blocks=8)
    for fence in (None, 1):  # abort, preemption or failure before the step; or with it in flight
        chain = cache.chain(BASE, span(1, 12))
        _, holding = admit(cache, chain)
        assert hit(cache, span(1, 12)) == 0
        cache.release(holding, fence=fence)
        assert hit(cache, span(1, 12)) == 0
        cache.step_applied(1)
        assert (cache.stats().free, cache.stats().evictable) == (8, 0)


def test_b23_equal_prompts_in_one_batch_do_not_hit_each_other() -> None:
    cache = make_cache()
    holdings = []
    for i in range(3):
        chain = cache.chain(BASE, span(1, 9))
        lookup, holding = admit(cache, chain, f"r{i}")
        assert lookup.n_hit == 0
        holdings.append((chain, holding))
    for chain, holding in holdings:
        cache.publish(chain, holding, 9)
    cache.audit([holding for _, holding in holdings])
    assert hit(cache, span(1, 9)) == 8


def test_publishing_again_or_less_is_nothing() -> None:
    cache = make_cache()
    chain = cache.chain(BASE, span(1, 12))
    _, holding = admit(cache, chain)
    cache.publish(chain, holding, 8)
    for n in (8, 4, 0):
        cache.publish(chain, holding, n)
    assert holding.n_published == 8 and hit(cache, span(1, 13)) == 8
    cache.audit([holding])


def test_claims_that_cannot_be_are_refused() -> None:
    cache = make_cache()
    chain = cache.chain(BASE, span(1, 8))
    _, holding = admit(cache, chain)
    with pytest.raises(CacheError, match="only 8 are known"):
        cache.publish(chain, holding, 9)
    chain.extend(span(9, 12))
    with pytest.raises(CacheError, match="allocated"):
        cache.publish(chain, holding, 12)
    with pytest.raises(CacheError, match="another chain"):
        cache.publish(cache.chain(BASE, span(1, 8)), holding, 8)
    cache.release(holding)
    for call in (lambda: cache.allocate(holding, 12), lambda: cache.publish(chain, holding, 4)):
        with pytest.raises(CacheError, match="released before"):
            call()
    with pytest.raises(CacheError, match="released before"):
        cache.slide(holding, 8)
    with pytest.raises(ConfigError):
        PrefixCache((full(4),), 0, config=CacheConfig())
    with pytest.raises(ConfigError, match="did you mean"):
        PrefixCache((full(4),), 4, config=CacheConfig(hash_algo="xxh3128"))


def test_resumed_after_preemption_finds_its_own_blocks() -> None:
    cache = make_cache()
    chain = cache.chain(BASE, span(1, 14))
    _, holding = admit(cache, chain)
    cache.publish(chain, holding, 10)
    cache.release(holding)
    again = cache.lookup(chain)
    assert again.n_hit == 8
    holding = cache.claim(chain, again, "r")
    cache.record(again, resumed=True)
    cache.allocate(holding, 14)
    cache.publish(chain, holding, 14)
    cache.release(holding)
    stats = cache.stats()
    assert (stats.query_tokens, stats.hit_tokens, stats.n_lookups) == (14, 0, 1)
    assert (stats.resumed_query_tokens, stats.resumed_hit_tokens) == (14, 8)


def test_b64_only_what_is_recorded_counts() -> None:
    cache = make_cache()
    serve(cache, span(1, 9))
    before = cache.stats()
    chain = cache.chain(BASE, span(1, 9))
    for _ in range(6):
        lookup = cache.lookup(chain)
    cache.record(lookup, resumed=False)
    cache.record(cache.lookup(chain, bypass="skip_reading_prefix_cache"), resumed=False)
    after = cache.stats()
    assert after.query_tokens - before.query_tokens == 9
    assert after.hit_tokens - before.hit_tokens == 8
    assert after.n_lookups - before.n_lookups == 1
    assert after.bypassed_requests == 1


def test_the_counters_give_the_articles_hit_rate() -> None:
    cache = make_cache(full(16), n_blocks=256)
    for tokens in (span(1, 1727), [*span(1, 1712), *span(5000, 5016)]):
        before = cache.stats()
        serve(cache, tokens)
        after = cache.stats()
    assert (before.query_tokens, after.query_tokens) == (1727, 3456)
    assert (before.hit_tokens, after.hit_tokens) == (0, 1712)
    assert 1712 == 107 * 16
    assert round(100 * (after.hit_tokens - before.hit_tokens) / (after.query_tokens - before.query_tokens), 2) == 99.02


def test_logical_against_physical_blocks() -> None:
    cache = make_cache()
    serve(cache, span(1, 8))
    holdings = [admit(cache, cache.chain(BASE, span(1, 9)), f"r{i}")[1] for i in range(3)]
    stats = cache.stats()
    assert (stats.logical_blocks, stats.physical_in_use, stats.in_use) == (9, 5, 5)
    for holding in holdings:
        cache.release(holding)
    assert cache.stats().logical_blocks == 0


def test_reset_refuses_while_blocks_are_in_use_and_then_forgets_all() -> None:
    cache = make_cache()
    serve(cache, span(1, 12))
    chain = cache.chain(BASE, span(1, 9))
    _, holding = admit(cache, chain)
    with pytest.raises(CacheBusy) as caught:
        cache.reset()
    assert caught.value.n_busy == 3
    assert hit(cache, span(1, 9)) == 8
    cache.release(holding, fence=3)
    with pytest.raises(CacheBusy):
        cache.reset()
    cache.step_applied(3)
    assert cache.reset() == 3
    assert hit(cache, span(1, 9)) == 0
    assert (cache.stats().free, cache.reset()) == (64, 0)
    cache.audit([])


def test_a_request_admitted_before_a_reset_publishes_after_it() -> None:
    cache = make_cache()
    chain = cache.chain(BASE, span(1, 9))
    holding = cache.claim(chain, cache.lookup(chain), "r")  # holds no block yet
    cache.reset()
    cache.audit([holding])
    cache.allocate(holding, 9)
    cache.publish(chain, holding, 9)
    cache.audit([holding])
    assert hit(cache, span(1, 9)) == 8


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_ghosts_are_bounded(limit: int) -> None:
    cache = make_cache(n_blocks=8, max_ghosts=limit)
    for i in range(50):
        serve(cache, [*span(1, 4), *span(100 * i, 100 * i + 15)])
        assert len(cache.index.ghosts) <= limit
    assert len(cache.index.by_key) <= 8 + limit


def test_what_a_dropped_ghost_hides_is_not_findable_and_its_blocks_are_free() -> None:
    cache = make_cache(sliding(4, 6), n_blocks=5, max_ghosts=1)
    chain = cache.chain(BASE, span(1, 16))
    _, holding = admit(cache, chain)
    cache.publish(chain, holding, 16)
    cache.slide(holding, 16)  # blocks 0 and 1 slide out
    cache.audit([holding])
    admit(cache, cache.chain(BASE, span(50, 61)), "other")  # evicts both: one ghost too many
    assert hit(cache, span(1, 17)) == 0
    assert not cache.pool.evictable
    cache.audit()
    chain.extend([17])  # in use, unpublished, and no longer publishing
    cache.publish(chain, holding, 16)
    cache.release(holding)
    cache.audit()
    assert cache.stats().free == 2


def test_a_used_path_keeps_its_ghosts() -> None:
    """A hit through a window leans on the record of what lies before it: using it keeps that record."""
    cache = make_cache(sliding(4, 6), n_blocks=8, max_ghosts=12)
    hot = span(1, 20)
    serve(cache, hot)
    for i in range(1, 60):
        serve(cache, span(1000 * i, 1000 * i + 10))
        assert serve(cache, [*hot, 1]).n_hit == 20


@pytest.mark.parametrize("limit", [0, 8])
def test_one_salt_per_request_leaves_nothing_behind(limit: int) -> None:
    cache = make_cache(n_blocks=8, max_ghosts=limit)
    for i in range(300):
        serve(cache, span(1, 10), namespace=Namespace(b"w", salt=str(i)))
    index = cache.index
    assert len(index.roots) <= 8 + limit
    assert len(index.first_units) <= len(index.roots)
    assert len(index.by_key) <= 8 + limit
    chain = cache.chain(Namespace(b"w", salt="aborted"), span(1, 10))
    holding = cache.claim(chain, cache.lookup(chain), "r")
    n_roots = len(index.roots)
    cache.release(holding)
    assert len(index.roots) == n_roots - 1


@pytest.mark.parametrize("hasher", [None, CONSTANT])
def test_the_partial_tail_is_never_shared_and_is_free_after(hasher) -> None:
    cache = make_cache(hasher=hasher, n_blocks=8)
    serve(cache, span(1, 10))
    assert (cache.stats().free, cache.stats().evictable) == (6, 2)
    assert hit(cache, span(1, 11)) == 8


def test_work_grows_with_the_prompt_not_its_square() -> None:
    """Nodes made and hashes taken while a long prompt is served in small chunks."""
    calls = 0

    def digest(message: bytes) -> bytes:
        nonlocal calls
        calls += 1
        return message[-16:]

    cache = make_cache(hasher=CONSTANT.__class__("counted", digest), n_blocks=1024)
    chain = cache.chain(BASE, range(4000))
    holding = cache.claim(chain, cache.lookup(chain), "r")
    for n in range(5, 4001, 5):
        cache.allocate(holding, n)
        cache.publish(chain, holding, n)
        cache.slide(holding, n)
    assert calls == 1001
    assert len(cache.index.by_key) == 1000


def test_the_audit_finds_what_is_broken() -> None:
    rng = random.Random(0)

    def fresh():
        cache = make_cache(full(4), sliding(4, 6), n_blocks=24, max_ghosts=8)
        serve(cache, span(1, 12))
        serve(cache, [*span(1, 4), *span(50, 61)])
        chain = cache.chain(BASE, span(1, 14))
        _, holding = admit(cache, chain)
        cache.publish(chain, holding, 14)
        audit(cache, [holding])
        return cache, holding

    def node(cache):
        return rng.choice([n for n in cache.pool.node if n is not None])

    def breakages():
        yield lambda c, h: c.pool.refs.__setitem__(h.tables[0].blocks[0], 2)
        yield lambda c, h: c.pool.free.append(c.pool.free[0])
        yield lambda c, h: c.pool.free.append(h.tables[0].blocks[0])
        yield lambda c, h: c.pool.free.pop()
        yield lambda c, h: c.pool.evictable.popitem()
        yield lambda c, h: h.tables[0].blocks.append(h.tables[0].blocks[0])
        yield lambda c, h: setattr(node(c), "copies", ())
        yield lambda c, h: setattr(node(c), "tokens", b"\0" * 16)
        yield lambda c, h: setattr(node(c), "key", b"k")
        yield lambda c, h: setattr(node(c), "parent", None)
        yield lambda c, h: c.index.by_key.popitem()
        yield lambda c, h: c.index.ghosts.nodes.__setitem__(node(c), None)
        yield lambda c, h: c.index.computing.clear()
        yield lambda c, h: c.index.first_units.clear()
        yield lambda c, h: setattr(h, "n_published", 4)
        yield lambda c, h: c.pool.group.__setitem__(h.tables[0].blocks[0], 1)
        yield lambda c, h: c.pool.fences.__setitem__(1, [h.tables[0].blocks[0]])
        yield lambda c, h: setattr(c, "n_logical", 0)
        yield lambda c, h: c.live.clear()
        yield lambda c, h: h.chain.tokens.__setitem__(0, 77) or setattr(h.chain, "_chunks", [b"x"] * 9)
        yield lambda c, h: h.tables[0].blocks.reverse()

    for i, breakage in enumerate(breakages()):
        cache, holding = fresh()
        breakage(cache, holding)
        assert _is_refused(cache, holding), f"breakage {i} went unnoticed"


def _is_refused(cache, holding) -> bool:
    try:
        audit(cache, [holding])
    except AuditError:
        return True
    return False
