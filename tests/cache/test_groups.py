"""Several groups over one pool: full and sliding, blocks of different sizes (known faults, section G)."""

from __future__ import annotations

import random

import pytest

from headwater.cache.block import Node
from headwater.cache.evict import Eviction
from headwater.cache.group import Layout, longest_hit, window_blocks
from headwater.cache.lookup import StopReason
from headwater.cache.pool import BlockPool
from headwater.errors import StaleLookup
from headwater.types import GroupKind, GroupSpec
from tests.cache.cache_model import BASE, admit, full, hit, make_cache, serve, sliding, span


def test_b46_need_is_one_formula() -> None:
    assert window_blocks(sliding(2, 4)) == 2
    assert window_blocks(sliding(2, 4), drop=1) == 3
    assert [window_blocks(sliding(4, w)) for w in (1, 2, 5, 6, 8, 9, 10)] == [0, 1, 1, 2, 2, 2, 3]
    with pytest.raises(ValueError):
        window_blocks(full(4))


def path_with(pool: BlockPool, n: int, held: set[int]) -> list[Node]:
    path: list[Node] = []
    for i in range(n):
        node = Node(path[-1] if path else None, b"", b"", None, i + 1)
        if i in held:
            node.copies = (i,)
        path.append(node)
    return path


@pytest.mark.parametrize(
    ("held", "drop", "expected"),
    [({5, 6}, 0, 7), ({5, 6}, 1, 0), ({4, 5, 6}, 1, 6), ({4, 5, 6}, 0, 7), ({0, 1}, 1, 1), ({0}, 0, 1), ({3}, 0, 0)],
)
def test_b46_a_dropped_block_leaves_a_whole_window(held: set[int], drop: int, expected: int) -> None:
    pool = BlockPool(8)
    layout = Layout.of([sliding(2, 4)], 2)
    n_units, hits = longest_hit(layout, path_with(pool, 8, held), pool, drop=drop)
    assert n_units == expected
    assert list(hits[0].blocks) == list(range(max(0, expected - 2), expected))


def test_each_block_is_looked_at_once_when_two_windows_disagree() -> None:
    """Never the square of the prompt: holes that make one window after the other fail."""
    layout = Layout.of([sliding(2, 200), sliding(2, 200)], 2)
    pool = BlockPool(4096)
    reads = 0

    class Counted(Node):
        __slots__ = ()

    path: list[Node] = []
    for i in range(2048):
        node = Counted(None, b"", b"", None, i + 1)
        copies = [] if i % 100 == 50 else [2 * i]
        copies += [] if i % 100 == 0 else [2 * i + 1]
        pool.group[2 * i + 1] = 1
        node.copies = tuple(copies)
        path.append(node)
    copies_slot = Node.copies

    def read(node):
        nonlocal reads
        reads += 1
        return copies_slot.__get__(node)  # type: ignore[attr-defined]

    Counted.copies = property(read)  # type: ignore[misc, assignment]
    n_units, _ = longest_hit(layout, path, pool)
    assert n_units == 0
    assert reads <= 2 * len(path)


def fill(cache, n_tokens: int) -> None:
    """Publish ``1 .. n_tokens`` in every group, every block of a window included."""
    chain = cache.chain(BASE, span(1, n_tokens))
    _, holding = admit(cache, chain)
    cache.publish(chain, holding, n_tokens)
    cache.release(holding)


def withdraw(cache, group: int, first: int, last: int) -> None:
    """Evict logical blocks ``first .. last`` of ``1 ..`` in one group, as pressure would."""
    for block, node in enumerate(list(cache.pool.node)):
        if node is None or cache.pool.group[block] != group:
            continue
        j = node.depth * cache.unit // cache.groups[group].block_size - 1
        if first <= j <= last:
            del cache.pool.evictable[block]
            cache.index.evict([block], Eviction(1.0, "pressure"))
            cache.pool.free.append(block)
    cache.audit()


def test_b44_a_length_counts_only_if_every_group_can_start_there() -> None:
    cache = make_cache(full(4), sliding(4, 5))
    fill(cache, 8)
    assert hit(cache, span(1, 9)) == 8
    withdraw(cache, 1, 1, 1)
    lookup = cache.lookup(cache.chain(BASE, span(1, 9)))
    assert lookup.n_hit == 4
    assert (lookup.stop.reason, lookup.stop.group, lookup.stop.at_token) == (StopReason.GROUP_CANNOT_START, 1, 4)
    withdraw(cache, 1, 0, 0)
    lookup = cache.lookup(cache.chain(BASE, span(1, 9)))
    assert (lookup.n_hit, lookup.stop.reason, lookup.stop.group) == (0, StopReason.GROUP_CANNOT_START, 1)
    withdraw(cache, 0, 0, 1)
    assert cache.lookup(cache.chain(BASE, span(1, 9))).stop.reason is StopReason.EVICTED


def test_what_one_group_lost_is_remembered_until_it_is_held_again() -> None:
    cache = make_cache(full(4), sliding(4, 5))
    fill(cache, 8)
    withdraw(cache, 1, 1, 1)
    stop = cache.lookup(cache.chain(BASE, span(1, 9))).stop
    assert (stop.reason, stop.group, stop.evicted_at, stop.request) == (
        StopReason.GROUP_CANNOT_START, 1, 1.0, "pressure"
    )  # fmt: skip
    assert stop.describe() == "group 1 holds too little to start at token 4 (evicted at 1.0 s)"
    fill(cache, 8)
    assert hit(cache, span(1, 9)) == 8
    assert not cache.index.partly
    withdraw(cache, 1, 1, 1)
    withdraw(cache, 0, 1, 1)
    stop = cache.lookup(cache.chain(BASE, span(1, 9))).stop
    assert (stop.reason, stop.request) == (StopReason.EVICTED, "pressure")
    assert not cache.index.partly


def test_a_full_group_needs_all_a_sliding_one_only_its_window() -> None:
    cache = make_cache(full(4), sliding(4, 8), n_blocks=32)
    fill(cache, 24)
    withdraw(cache, 1, 0, 2)
    lookup = cache.lookup(cache.chain(BASE, span(1, 25)))
    assert lookup.n_hit == 24
    assert [(table.first, len(table.blocks)) for table in lookup.tables] == [(0, 6), (4, 2)]
    assert hit(cache, span(1, 13)) == 0
    withdraw(cache, 0, 2, 2)
    assert hit(cache, span(1, 25)) == 0  # 8 is as far as the full group goes; the window before 8 is gone


def test_b48_the_hit_unit_is_the_common_multiple_of_those_that_take_part() -> None:
    for extra in ((), (full(7, reusable=False),)):
        cache = make_cache(full(4), full(6), *extra)
        assert (cache.unit, cache.min_reusable_tokens) == (2, 12)
        serve(cache, span(1, 11))
        assert hit(cache, [*span(1, 11), 99]) == 0
        serve(cache, span(1, 13))
        assert hit(cache, [*span(1, 12), 99]) == 12
        assert hit(cache, [*span(1, 11), 99, 99]) == 0


def test_a_group_that_takes_no_part_gets_the_block_of_the_first_token_to_compute() -> None:
    cache = make_cache(full(4), full(6), full(7, reusable=False))
    serve(cache, span(1, 13))
    chain = cache.chain(BASE, span(1, 20))
    lookup, holding = admit(cache, chain)
    assert lookup.n_hit == 12
    assert (holding.tables[2].first, holding.tables[2].end) == (1, 3)  # 12 is in 7 .. 13
    cache.audit([holding])
    cache.release(holding)


def test_b49_a_window_model_hits_on_the_second_request() -> None:
    cache = make_cache(sliding(4, 8), partial=False)
    assert serve(cache, span(1, 24)).n_hit == 0
    lookup = serve(cache, span(1, 24))
    assert lookup.n_hit == 20
    assert (lookup.tables[0].first, len(lookup.tables[0].blocks)) == (3, 2)


def test_b11_a_group_is_keyed_at_its_own_block_end() -> None:
    cache = make_cache(sliding(4, 64), full(8))
    assert cache.unit == 4
    serve(cache, span(1, 16))
    assert hit(cache, [*span(1, 8), *span(90, 97), 1]) == 8
    assert hit(cache, [*span(1, 4), *span(90, 97), 1]) == 0
    keys = cache.chain(BASE, span(1, 16)).keys(4)
    in_full_group = {node.key for b, node in enumerate(cache.pool.node) if node and cache.pool.group[b] == 1}
    assert in_full_group == {keys[1], keys[3]}
    for _ in range(3):
        assert serve(cache, span(1, 16)).n_hit == 8


def test_sliding_gives_back_what_no_later_query_reads() -> None:
    cache = make_cache(full(4), sliding(4, 6), n_blocks=32)
    chain = cache.chain(BASE, span(1, 20))
    _, holding = admit(cache, chain)
    for n in range(1, 21):
        cache.publish(chain, holding, n)
        cache.slide(holding, n)
        assert holding.tables[1].first == max(0, n - 5) // 4  # the query at n reads n - 5 .. n
        assert holding.tables[0].first == 0
        cache.audit([holding])
    cache.slide(holding, 5)  # going back gives nothing back
    assert holding.tables[1].first == 3
    assert hit(cache, span(1, 9)) == 8  # what slid out is still found
    cache.release(holding)


def test_unpublished_blocks_that_slide_out_are_free() -> None:
    cache = make_cache(sliding(4, 4))
    chain = cache.chain(BASE, span(1, 20))
    _, holding = admit(cache, chain)
    cache.slide(holding, 20)
    assert (cache.stats().evictable, cache.stats().free) == (0, 63)
    cache.publish(chain, holding, 20)  # only what is still held
    assert hit(cache, span(1, 17)) == 0
    assert hit(cache, span(1, 21)) == 20
    cache.audit([holding])


def test_a_window_of_one_needs_no_block() -> None:
    cache = make_cache(sliding(4, 1))
    serve(cache, span(1, 9))
    lookup = serve(cache, span(1, 9))
    assert (lookup.n_hit, lookup.tables[0].first, lookup.tables[0].blocks) == (8, 2, ())
    chain = cache.chain(BASE, span(1, 9))
    lookup = cache.lookup(chain)
    cache.reset()
    with pytest.raises(StaleLookup):
        cache.claim(chain, lookup, "r")
    cache.audit([])


@pytest.mark.parametrize("window", [None, 1, 2, 5, 8, 9, 33])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_peak_blocks_is_the_worst_that_chunking_can_do(window: int | None, size: int) -> None:
    spec = full(size) if window is None else GroupSpec(GroupKind.SLIDING, size, window=window)
    for n in range(1, 26):
        for most in (1, 2, 5, 30):
            worst = 0
            for start in range(n):
                for new in range(1, min(most, n - start) + 1):
                    first = spec.first_needed(start) // size
                    worst = max(worst, -(-(start + new) // size) - first)
            assert spec.peak_blocks(n, most) == worst, (n, most)
    cache = make_cache(spec, full(4))
    assert cache.peak_blocks(21, 5) == spec.peak_blocks(21, 5) + 6


def test_every_full_group_must_have_the_whole_run() -> None:
    cache = make_cache(full(4), full(6))
    fill(cache, 24)
    assert hit(cache, span(1, 25)) == 24
    withdraw(cache, 1, 3, 3)
    lookup = cache.lookup(cache.chain(BASE, span(1, 25)))
    assert [(table.first, len(table.blocks)) for table in lookup.tables] == [(0, 3), (0, 2)]
    assert (lookup.n_hit, lookup.stop.reason, lookup.stop.group) == (12, StopReason.GROUP_CANNOT_START, 1)
    assert lookup.stop.at_token == 18
    withdraw(cache, 0, 0, 0)
    assert hit(cache, span(1, 25)) == 0


@pytest.mark.parametrize(
    "specs",
    [
        (sliding(2, 4), sliding(2, 9)),
        (sliding(4, 6), sliding(2, 7), full(2)),
        (full(4), full(6), sliding(2, 5)),
        (sliding(6, 8), sliding(4, 9), full(3, reusable=False)),
    ],
)
def test_the_longest_hit_against_trying_every_length(specs: tuple[GroupSpec, ...]) -> None:
    """Random holes in every group; the blocks named must be the copies."""
    rng = random.Random(str(specs))
    layout = Layout.of(specs, 1)
    lengths = set()
    for _ in range(600):
        n_units = rng.randrange(40)
        pool = BlockPool(4 * 40)
        path = path_with(pool, n_units, set())
        held: dict[tuple[int, int], int] = {}
        free = iter(range(4 * 40))
        holes = rng.choice([0.02, 0.1, 0.3])
        for g in layout.reusable:
            for j in range(n_units // g.ratio):
                if rng.random() > holes:
                    block = held[g.index, j] = next(free)
                    pool.group[block] = g.index
                    node = g.node_of(path, j)
                    node.copies = (*node.copies, block)

        def stands(length: int, held: dict[tuple[int, int], int] = held) -> bool:
            needed = [
                (g.index, j)
                for g in layout.reusable
                for j in range(length * layout.unit // g.spec.block_size)
                if (j + 1) * g.spec.block_size > g.spec.first_needed(length * layout.unit)
            ]
            return all(place in held for place in needed)

        expected = max(n for n in range(0, n_units + 1, layout.period) if stands(n))
        found, hits = longest_hit(layout, path, pool)
        assert found == expected
        lengths.add(found)
        for g in layout.reusable:
            table = hits[g.index]
            first = g.spec.first_needed(found * layout.unit) // g.spec.block_size
            assert (table.first, table.end) == (first, found // g.ratio)
            assert list(table.blocks) == [held[g.index, j] for j in range(table.first, table.end)]
    assert len(lengths) > 3
