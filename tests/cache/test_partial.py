"""Finer than a block: slots copied from a published block that begins with the same tokens."""

from __future__ import annotations

import pytest

from headwater.cache.block import Holding
from headwater.cache.extras import EmbeddingSpan, MediaSpan, shared_extras, unit_extras
from headwater.cache.key import TokenChain
from headwater.cache.lookup import Lookup, StopReason
from headwater.cache.partial import MAX_COMPARED
from headwater.cache.prefix import PrefixCache
from headwater.errors import AuditError, DoubleRelease, StaleLookup
from headwater.types import GroupSpec, Namespace
from tests.cache.cache_model import BASE, CONSTANT, TRUNCATED, admit, full, make_cache, serve, sliding, span

B = 8


def look(cache: PrefixCache, tokens: list[int], namespace: Namespace = BASE, **kwargs: object) -> Lookup:
    return cache.lookup(cache.chain(namespace, tokens, **kwargs))  # type: ignore[arg-type]


def reach(lookup: Lookup) -> tuple[int, int]:
    return lookup.n_hit, lookup.n_copy


def cold(cache: PrefixCache, tokens: list[int]) -> tuple[TokenChain, Holding]:
    """A request that is computed, published and goes on running."""
    chain = cache.chain(BASE, tokens)
    _, holding = admit(cache, chain, "cold")
    cache.copied(holding)
    cache.publish(chain, holding, len(chain))
    return chain, holding


# ---- how far -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("hasher", [None, CONSTANT, TRUNCATED])
@pytest.mark.parametrize("t", range(B))
def test_as_many_tokens_as_are_equal(t: int, hasher) -> None:
    cache = make_cache(full(B), hasher=hasher)
    serve(cache, span(1, 3 * B))
    lookup = look(cache, [*span(1, B + t), *span(100, 120)])
    assert reach(lookup) == (B, t)
    assert (lookup.stop.reason, lookup.stop.at_token) == (StopReason.DIFFERS, B + t)
    assert lookup.n_start == B + t


@pytest.mark.parametrize("n", [1, 3, 4, 5, 7, 8, 9, 12])
def test_b40_of_a_prompt_in_memory_only_the_last_token_is_computed(n: int) -> None:
    cache = make_cache()
    assert serve(cache, [*span(1, n), 50, 50, 50]).n_start == 0  # fills the block that the prompt ends in
    for _ in range(3):
        lookup = serve(cache, span(1, n))
        assert reach(lookup) == ((n - 1) // 4 * 4, (n - 1) % 4)
        reason = StopReason.LAST_TOKEN if lookup.n_copy else StopReason.PARTIAL_BLOCK
        assert (lookup.stop.reason, lookup.stop.at_token) == (reason, n - 1)


def test_only_what_is_published_is_a_source() -> None:
    cache = make_cache(full(B))
    chain = cache.chain(BASE, span(1, B + 5))
    _, holding = admit(cache, chain)
    assert reach(look(cache, [*span(1, 5), 99])) == (0, 0)  # computing, nothing confirmed
    cache.publish(chain, holding, B + 5)
    assert reach(look(cache, [*span(1, 5), 99])) == (0, 5)
    assert reach(look(cache, [*span(1, B + 5), 99])) == (B, 0)  # its second block is not full
    cache.release(holding)
    assert reach(look(cache, [*span(1, B + 5), 99])) == (B, 0)


def test_the_middle_of_another_history_is_no_source() -> None:
    cache = make_cache()
    serve(cache, span(1, 12))
    serve(cache, [9, 9, 9, 9, *span(5, 12)])
    assert reach(look(cache, [*span(5, 6), 0])) == (0, 0)
    assert reach(look(cache, [*span(1, 4), 9, 9, 9, 9])) == (4, 0)


@pytest.mark.parametrize("n_branches", [2, 60, 500])
def test_the_longest_of_many_branches(n_branches: int) -> None:
    cache = make_cache(full(B), n_blocks=2048)
    for i in range(n_branches):
        serve(cache, [*span(1, B), 300 + i % 7, 256 + i // 7, 65_536, i, 1, 2, 3, 4])
    for i in range(0, n_branches, 11):
        lookup = look(cache, [*span(1, B), 300 + i % 7, 256 + i // 7, 65_536, i, 1, 9, 9, 9, 9])
        assert reach(lookup) == (B, 5)
        assert reach(look(cache, [*span(1, B), 300 + i % 7, 256 + i // 7, 1])) == (B, 2)


def test_a_branch_that_is_no_longer_held_is_passed_over() -> None:
    cache = make_cache(n_blocks=64)
    kept = [*span(1, 4), 7, 7, 1, 1]
    serve(cache, kept)
    _, holding = cold(cache, [*kept, 5])  # keeps it in use
    for i in range(MAX_COMPARED // 2):  # nearer branches, all evicted by what follows
        serve(cache, [*span(1, 4), 7, 7, 7, i + 10])
    for i in range(70):
        serve(cache, span(1000 * i + 1000, 1000 * i + 1003))
    asked = [*span(1, 4), 7, 7, 7, 7, 8]
    lookup = look(cache, asked)
    assert reach(lookup) == (4, 2)
    assert (lookup.stop.reason, lookup.stop.at_token) == (StopReason.DIFFERS, 6)
    cache.release(holding)


def test_an_evicted_block_is_replaced_by_a_sibling_that_is_nearly_equal() -> None:
    cache = make_cache(n_blocks=8)
    serve(cache, span(1, 8))
    _, sibling = cold(cache, [*span(1, 7), 70])
    serve(cache, span(100, 123))  # evicts 5 .. 8
    lookup = look(cache, span(1, 12))
    assert (reach(lookup), lookup.stop.reason, lookup.stop.at_token) == ((4, 3), StopReason.EVICTED, 7)
    assert lookup.beginnings[0].source == sibling.tables[0].blocks[1]
    cache.release(sibling)


def test_off_by_option() -> None:
    cache = make_cache(full(16), partial=False)
    serve(cache, span(1, 64))
    lookup = look(cache, [*span(1, 50), 99])
    assert (reach(lookup), lookup.beginnings, lookup.whole) == ((48, 0), (), None)
    assert reach(look(cache, span(1, 64))) == (48, 0)


def test_a_bypass_copies_nothing() -> None:
    cache = make_cache()
    serve(cache, span(1, 8))
    chain = cache.chain(BASE, span(1, 8))
    assert reach(cache.lookup(chain, bypass="skip_reading_prefix_cache")) == (0, 0)


# ---- identity ----------------------------------------------------------------------------------------


def test_never_across_namespaces() -> None:
    cache = make_cache()
    serve(cache, span(1, 8), namespace=Namespace(b"w", salt="a"))
    for other in (
        Namespace(b"w"),
        Namespace(b"w", salt="b"),
        Namespace(b"w", ((b"a", 1.0),), salt="a"),
        Namespace(b"v", salt="a"),
    ):
        assert reach(look(cache, span(1, 8), other)) == (0, 0)
    assert reach(look(cache, span(1, 8), Namespace(b"w", salt="a"))) == (4, 3)


X, Y = b"x" * 32, b"y" * 32


@pytest.mark.parametrize(
    ("mine", "theirs", "n_copy"),
    [
        ([], [MediaSpan(X, 13, 3)], 5),  # text before their picture
        ([MediaSpan(X, 13, 3)], [], 5),  # text before mine
        ([MediaSpan(X, 10, 4)], [MediaSpan(Y, 10, 4)], 2),
        ([MediaSpan(X, 10, 4)], [MediaSpan(X, 10, 4)], 7),
        ([MediaSpan(X, 8, 2), MediaSpan(X, 12, 2)], [MediaSpan(X, 8, 2), MediaSpan(Y, 12, 2)], 4),
        ([MediaSpan(X, 10, 4)], [MediaSpan(X, 11, 4)], 2),  # the same picture, moved
        ([MediaSpan(X, 4, 8)], [MediaSpan(X, 4, 9)], 0),  # it began in the block before
        ([EmbeddingSpan.of(8, [b"a"] * 6, [False] * 3 + [True] * 3)], [], 3),
        ([EmbeddingSpan.of(8, [b"a"] * 6, [False] * 6)], [], 7),  # no row is used
        (
            [EmbeddingSpan.of(10, [b"a", b"b"], [True, True])],
            [EmbeddingSpan.of(10, [b"a", b"c"], [True, True])],
            2,
        ),
    ],
)
def test_b16_no_further_than_media_and_embeddings_are_the_same(mine, theirs, n_copy: int) -> None:
    # Placeholder ids are equal; what was computed from them is not. Blocks of 8, the second one of 8 .. 15.
    cache = make_cache(full(B))
    serve(cache, [*span(1, 15), 20], extras=theirs)
    serve(cache, [*span(1, 8), 70], extras=[s for s in mine if s.start < 8])  # the first block of mine, if it differs
    lookup = look(cache, [*span(1, 15), 21, 22], extras=mine)
    assert reach(lookup) == (B, n_copy)


def test_where_extras_part() -> None:
    def of(*spans):
        return unit_extras(spans, 16, 0, 1).get(0)

    a, b = MediaSpan(X, 3, 2), MediaSpan(Y, 9, 4)
    for left, right, n in (
        (None, None, 16),
        (of(a, b), of(b, a), 16),
        (of(a), of(a, b), 9),
        (of(b), of(a, b), 3),
        (None, of(b), 9),
        (of(a), of(b), 3),
        (of(EmbeddingSpan.of(0, [b"r"] * 9, [False] * 5 + [True] * 4)), of(b), 5),
    ):
        assert shared_extras(left, right, 16) == shared_extras(right, left, 16) == n


# ---- several groups ------------------------------------------------------------------------------------


def test_every_group_must_hold_a_beginning() -> None:
    cache = make_cache(full(B), full(B))
    serve(cache, span(1, 2 * B))
    lookup = look(cache, [*span(1, B + 5), 99])
    assert reach(lookup) == (B, 5)
    assert [b.group for b in lookup.beginnings] == [0, 1]
    node = cache.pool.node[lookup.beginnings[1].source]
    assert node is not None
    cache.index.evict([lookup.beginnings[1].source], _eviction())  # as if it was taken for new content
    assert reach(look(cache, [*span(1, B + 5), 99])) == (B, 0)


def _eviction():
    from headwater.cache.evict import Eviction

    return Eviction(0.0, "test")


def test_groups_may_copy_from_different_branches() -> None:
    cache = make_cache(full(B), full(B))
    serve(cache, [*span(1, B), *span(50, 57)])
    serve(cache, [*span(1, B), *span(50, 54), 1, 1, 1])
    first, second = (look(cache, [*span(1, B), *span(50, 50 + n), 99]) for n in (6, 4))
    cache.index.evict([first.beginnings[0].source], _eviction())
    lookup = look(cache, [*span(1, B), *span(50, 57), 99])
    assert reach(lookup) == (B, 5)
    assert len({b.node for b in lookup.beginnings}) == 2
    assert second.n_copy == 5


@pytest.mark.parametrize("t", range(1, 8))
@pytest.mark.parametrize("window", [1, 2, 6, 9, 17])
def test_a_window_is_held_up_to_where_the_copy_ends(window: int, t: int) -> None:
    cache = make_cache(full(B), sliding(B, window), n_blocks=64)
    _, holding = cold(cache, span(1, 40))
    tokens = [*span(1, 24 + t), 99]
    lookup = look(cache, tokens)
    assert reach(lookup) == (24, t)
    first = max(0, 24 + t - window + 1) // B
    assert lookup.tables[1].first == min(first, 3)
    assert len(lookup.tables[1].blocks) == 3 - min(first, 3)
    chain = cache.chain(BASE, tokens)
    hold = cache.claim(chain, cache.lookup(chain), "r")
    cache.allocate(hold, len(tokens))
    cache.audit([holding, hold])


def test_a_window_that_stands_only_after_the_copy() -> None:
    # Window 8, blocks of 4. At 16 it needs 9 .. 15, in blocks 2 and 3; at 19 only 12 .. 18, in block 3 and the copy.
    cache = make_cache(full(4), sliding(4, 8))
    serve(cache, span(1, 20))
    chain = cache.chain(BASE, span(1, 20))
    block = next(c for c in cache.index.walk(chain, 3)[2].copies if cache.pool.group[c] == 1)
    cache.index.evict([block], _eviction())
    cache.pool.evictable.pop(block)
    cache.pool.free.append(block)
    lookup = cache.lookup(chain)
    assert lookup.whole is not None and lookup.whole.n_hit < 16
    assert reach(lookup) == (16, 3)
    assert (lookup.tables[1].first, len(lookup.tables[1].blocks)) == (3, 1)
    assert lookup.stop.reason is StopReason.LAST_TOKEN
    holding = cache.claim(chain, lookup, "r")
    cache.allocate(holding, 20)
    cache.audit([holding])
    cache.copied(holding)
    cache.publish(chain, holding, 20)
    cache.audit([holding])
    assert reach(look(cache, [*span(1, 18), 99])) == (8, 0), "there the window does not stand"


@pytest.mark.parametrize(
    ("groups", "n", "expected"),
    [
        ((full(4), full(6)), 11, (0, 10)),
        ((full(4), full(6)), 13, (12, 0)),
        ((full(4), full(6)), 23, (12, 10)),
        ((full(8), sliding(4, 9)), 15, (8, 6)),
        ((full(8), sliding(4, 9)), 16, (8, 7)),
    ],
)
def test_b48_blocks_of_several_sizes(groups: tuple[GroupSpec, ...], n: int, expected: tuple[int, int]) -> None:
    cache = make_cache(*groups)
    serve(cache, span(1, 24))
    lookup = look(cache, span(1, n))
    assert reach(lookup) == expected
    start = lookup.n_start
    for g, spec in enumerate(groups):  # whole blocks of the smaller group, and then a part of one
        slots = [b.n_slots for b in lookup.beginnings if b.group == g]
        assert sum(slots) == expected[1] and all(s == spec.block_size for s in slots[:-1])
    served = serve(cache, span(1, n))
    assert served.n_start == start


# ---- claims ------------------------------------------------------------------------------------------


def started(cache: PrefixCache, tokens: list[int], owner: str = "r") -> tuple[TokenChain, Lookup, Holding]:
    chain = cache.chain(BASE, tokens)
    lookup = cache.lookup(chain)
    holding = cache.claim(chain, lookup, owner)
    cache.allocate(holding, len(tokens))
    return chain, lookup, holding


def test_the_source_cannot_be_overwritten_until_the_copy_is_made() -> None:
    cache = make_cache(n_blocks=4)
    serve(cache, span(1, 8))
    _, lookup, holding = started(cache, [*span(1, 6), 99])
    source = lookup.beginnings[0].source
    (run,) = cache.copies(holding)
    assert (run.source, run.target, run.n_slots) == (source, holding.tables[0].blocks[1], 2)
    _, _, stranger = started(cache, span(50, 53))
    assert cache.available == 0, "the source is neither free nor evictable"
    assert source not in stranger.tables[0].blocks
    cache.audit([holding, stranger])
    cache.copied(holding)
    assert cache.copies(holding) == () and cache.pool.refs[source] == 0
    cache.copied(holding)  # does nothing
    cache.audit([holding, stranger])
    cache.allocate(stranger, 8)
    assert source in stranger.tables[0].blocks


@pytest.mark.parametrize("in_flight", [False, True])
def test_whoever_leaves_before_gives_the_source_back_once(in_flight: bool) -> None:
    cache = make_cache(n_blocks=8)
    serve(cache, span(1, 8))
    _, lookup, holding = started(cache, [*span(1, 6), 99])
    source = lookup.beginnings[0].source
    cache.release(holding, fence=7 if in_flight else None)
    cache.audit()
    assert cache.pool.refs[source] == int(in_flight)
    cache.step_applied(6)
    assert cache.pool.refs[source] == int(in_flight)
    cache.step_applied(7)
    assert cache.pool.refs[source] == 0 and source in cache.pool.evictable
    with pytest.raises(DoubleRelease):
        cache.release(holding)
    cache.audit()
    assert cache.stats().in_use == cache.stats().fenced == 0


def test_two_requests_may_copy_from_one_source() -> None:
    cache = make_cache(n_blocks=16)
    serve(cache, span(1, 8))
    _, lookup, one = started(cache, [*span(1, 6), 99])
    _, _, two = started(cache, [*span(1, 7), 98])
    source = lookup.beginnings[0].source
    assert cache.pool.refs[source] == 2
    cache.copied(one)
    cache.audit([one, two])
    cache.release(two)
    assert cache.pool.refs[source] == 0
    cache.audit([one])


def test_a_look_up_whose_source_was_evicted_is_stale() -> None:
    cache = make_cache(n_blocks=2)
    serve(cache, span(1, 4))
    chain = cache.chain(BASE, [1, 2, 9])
    lookup = cache.lookup(chain)
    assert reach(lookup) == (0, 2)
    serve(cache, span(50, 57))
    with pytest.raises(StaleLookup):
        cache.claim(chain, lookup, "late")
    cache.audit()
    assert cache.stats().in_use == 0


def test_room_for_the_source_counts_and_the_whole_blocks_are_there_for_when_it_lacks() -> None:
    cache = make_cache(n_blocks=3)
    serve(cache, span(1, 8))
    chain = cache.chain(BASE, [*span(1, 6), *span(90, 94)])  # 11 tokens: all three blocks
    lookup = cache.lookup(chain)
    assert reach(lookup) == (4, 2)
    assert not cache.can_admit(lookup, 11)
    assert lookup.whole is not None and reach(lookup.whole) == (4, 0) and lookup.whole.beginnings == ()
    assert cache.can_admit(lookup.whole, 11)
    holding = cache.claim(chain, lookup.whole, "r")
    cache.allocate(holding, 11)
    assert cache.copies(holding) == ()
    cache.audit([holding])


def test_counted_apart_from_hits() -> None:
    cache = make_cache(full(B))
    serve(cache, span(1, 2 * B))
    lookup = serve(cache, [*span(1, B + 3), 99])
    assert reach(lookup) == (B, 3)
    chain = cache.chain(BASE, [*span(1, B + 5), 98])
    cache.record(cache.lookup(chain), resumed=True)
    stats = cache.stats()
    assert (stats.query_tokens, stats.hit_tokens, stats.copied_tokens) == (2 * B + B + 4, B, 3)
    assert (stats.resumed_query_tokens, stats.resumed_hit_tokens, stats.resumed_copied_tokens) == (B + 6, B, 5)


def test_what_is_copied_and_completed_is_published_as_its_own() -> None:
    cache = make_cache()
    serve(cache, span(1, 8))
    serve(cache, [*span(1, 6), 77, 78, 79])
    assert reach(look(cache, [*span(1, 6), 77, 78, 1])) == (8, 0)
    assert reach(look(cache, [*span(1, 8), 1])) == (8, 0)
    assert reach(look(cache, [*span(1, 6), 77, 1])) == (4, 3)


def test_repeats_of_a_whole_prompt_do_not_fill_the_pool_with_copies() -> None:
    cache = make_cache(n_blocks=32)
    for _ in range(20):
        serve(cache, span(1, 8))
    stats = cache.stats()
    assert (stats.evictable, stats.free) == (2, 30)


@pytest.mark.parametrize("broken", ["namespace", "tokens", "reference", "target"])
def test_the_audit_sees_a_copy_that_must_not_be(broken: str) -> None:
    cache = make_cache()
    serve(cache, span(1, 8))
    serve(cache, span(1, 8), namespace=Namespace(b"other"))
    _, _, holding = started(cache, [*span(1, 6), 99])
    (right,) = holding.beginnings
    cache.audit([holding])
    other = look(cache, span(1, 8), Namespace(b"other")).beginnings[0]
    if broken == "namespace":
        cache.pool.claim([other.source])
        cache.pool.release([right.source])
        holding.beginnings = (other,)
    elif broken == "tokens":
        holding.beginnings = (type(right)(right.group, right.block, right.source, 3, right.node),)
    elif broken == "reference":
        cache.pool.release([right.source])
    else:
        holding.tables[0].blocks[1] = right.source
    with pytest.raises(AuditError):
        cache.audit([holding])
