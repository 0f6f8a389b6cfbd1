"""What a check of a block needs to know, and what withdrawing one takes away: it and all that follows, nothing else."""

from __future__ import annotations

import pytest

from headwater.cache.block import Node
from headwater.cache.events import BlockRemoved, EventLog
from headwater.cache.extras import MediaSpan
from headwater.cache.prefix import PrefixCache
from headwater.cache.recheck import suspects
from headwater.errors import CacheError, StaleLookup
from headwater.types import BlockTable, Namespace
from tests.cache.cache_model import BASE, CONSTANT, admit, full, hit, make_cache, serve, sliding, span


def path(cache: PrefixCache, tokens: list[int], namespace: Namespace = BASE) -> list[Node]:
    """The nodes of all full units of ``tokens``."""
    return cache.index.walk(cache.chain(namespace, tokens), len(tokens) // cache.unit)


def test_it_names_the_tokens_the_history_and_every_copy() -> None:
    cache = make_cache(full(4), n_blocks=16)
    chains = [cache.chain(BASE, span(1, 13)) for _ in range(2)]
    holdings = [admit(cache, chain)[1] for chain in chains]
    for chain, holding in zip(chains, holdings, strict=True):
        cache.publish(chain, holding, 13)  # two copies of each
    nodes = path(cache, span(1, 12))
    for i, node in enumerate(nodes):
        found = cache.recheck(node)
        assert found is not None
        assert (found.tokens, found.n_start) == (tuple(span(1, 4 * i + 4)), 4 * i)
        assert set(found.copies[0]) == {holding.tables[0].blocks[i] for holding in holdings}
        assert all(block in nodes[j].copies for j, block in enumerate(found.tables[0].blocks))
        assert len(found.tables[0].blocks) == i
    cache.audit(holdings)


def test_it_takes_and_moves_nothing() -> None:
    cache = make_cache(full(4), n_blocks=8)
    serve(cache, span(1, 12))
    before = (list(cache.pool.refs), list(cache.pool.evictable), list(cache.pool.free), cache.stats())
    for node in path(cache, span(1, 12)):
        assert cache.recheck(node) is not None
    assert before == (list(cache.pool.refs), list(cache.pool.evictable), list(cache.pool.free), cache.stats())


def test_a_window_needs_only_what_its_first_token_reads_and_says_where_it_starts() -> None:
    cache = make_cache(full(4), sliding(4, 6))
    serve(cache, span(1, 24))
    found = cache.recheck(path(cache, span(1, 24))[4])  # tokens 16 .. 19; the first reads 11 .. 16
    assert found is not None
    assert [(table.first, len(table.blocks)) for table in found.tables] == [(0, 4), (2, 2)]
    assert [len(copies) for copies in found.copies] == [1, 1]


def test_what_is_gone_or_lacks_its_history_cannot_be_checked() -> None:
    cache = make_cache(full(4), n_blocks=4)
    serve(cache, span(1, 16))
    nodes = path(cache, span(1, 16))
    serve(cache, span(50, 53))  # takes the block at the end
    assert [cache.recheck(node) is not None for node in nodes] == [True, True, True, False]
    cache.reset()
    assert [cache.recheck(node) for node in nodes] == [None] * 4


def test_a_window_that_slid_out_and_was_evicted_cannot_be_checked() -> None:
    cache = make_cache(full(4), sliding(4, 6), n_blocks=12)
    serve(cache, span(1, 24))
    nodes = path(cache, span(1, 24))
    assert cache.pool.free == []
    chain = cache.chain(BASE, span(100, 103))
    _, holding = admit(cache, chain)  # a block for each group: what slid out first, of the window, goes
    cache.release(holding)
    held = [{cache.pool.group[block] for block in node.copies} for node in nodes]
    checkable = [cache.recheck(node) is not None for node in nodes]
    assert any(groups == {0} for groups in held) and False in checkable and True in checkable
    cache.audit()


def test_media_in_the_history_is_more_than_tokens() -> None:
    cache = make_cache(full(4))
    extras = [MediaSpan(b"d" * 32, 2, 6)]
    chain = cache.chain(BASE, span(1, 12), extras)
    _, holding = admit(cache, chain)
    cache.publish(chain, holding, 12)
    nodes = cache.index.walk(chain, 3)
    assert len(nodes) == 3 and nodes[0].extras is not None
    assert [cache.recheck(node) for node in nodes] == [None] * 3


def test_blocks_of_several_sizes_are_refused() -> None:
    cache = make_cache(full(8), sliding(4, 6))
    serve(cache, span(1, 24))
    with pytest.raises(CacheError, match="one size"):
        cache.recheck(path(cache, span(1, 24))[0])


# ---- suspects ---------------------------------------------------------------------------------------


def test_suspects_are_the_history_from_its_beginning_and_what_begins_alike() -> None:
    cache = make_cache(full(4))
    for tail in ([5, 6, 7, 8], [5, 6, 9, 9], [5, 1, 1, 1], [4, 6, 7, 8]):
        serve(cache, [*span(1, 4), *tail, *span(20, 23)])
    nodes = path(cache, span(1, 8))
    alike = [path(cache, [*span(1, 4), *tail])[1] for tail in ([5, 6, 9, 9], [5, 1, 1, 1])]
    assert suspects(nodes[1]) == [nodes[0], *alike]
    assert suspects(path(cache, [*span(1, 8), *span(20, 23)])[2]) == nodes
    assert suspects(nodes[0]) == []


# ---- withdrawing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("hasher", [None, CONSTANT], ids=["honest", "constant"])
def test_withdrawing_takes_a_node_and_all_that_follows_and_nothing_else(hasher: object) -> None:
    cache = make_cache(full(4), sliding(4, 6), hasher=hasher, events=EventLog(enabled=True))  # type: ignore[arg-type]
    trunk = span(1, 8)
    for tail in (span(9, 16), span(30, 37), [9, 10, 11, 12, *span(40, 43)]):
        serve(cache, [*trunk, *tail])
    other = Namespace(b"w", salt="s")
    serve(cache, [*trunk, *span(9, 16)], namespace=other)
    node = path(cache, [*trunk, *span(9, 12)])[2]  # below it: 13 .. 16 and 40 .. 43
    subtree = [node, *node.children()]
    blocks = [block for at in subtree for block in at.copies]
    keys = {(cache.pool.group[block], at.key) for at in subtree for block in at.copies}
    free = len(cache.pool.free)
    cache.events.drain()
    assert cache.withdraw(node) == len(blocks) == 6
    cache.audit()
    removed = [event for event in cache.events.drain() if isinstance(event, BlockRemoved)]
    if hasher is None:  # with one key for all, a key goes when the last content under it does
        assert {(event.group, event.key) for event in removed} == keys
    assert set(blocks) <= set(cache.pool.free) and len(cache.pool.free) == free + 6
    assert cache.stats().withdrawn == 6
    assert hit(cache, [*trunk, *span(9, 17)]) == 8
    assert hit(cache, [*trunk, 9, 10, 11, 12, *span(40, 44)]) == 8
    assert hit(cache, [*trunk, *span(30, 38)]) == 16
    assert hit(cache, [*trunk, *span(9, 17)], other) == 16
    assert cache.withdraw(node) == 0, "it is gone"
    serve(cache, [*trunk, *span(9, 16)])  # computed anew, it is found again
    assert hit(cache, [*trunk, *span(9, 17)]) == 16


def test_the_last_thing_of_a_namespace_leaves_no_root() -> None:
    cache = make_cache(full(4))
    serve(cache, span(1, 12))
    assert cache.withdraw(path(cache, span(1, 4))[0]) == 3
    cache.audit()
    assert cache.index.roots == {} and len(cache.pool.free) == cache.n_blocks


def test_a_look_up_made_before_is_stale() -> None:
    cache = make_cache(full(4))
    serve(cache, span(1, 12))
    chain = cache.chain(BASE, span(1, 13))
    lookup = cache.lookup(chain)
    cache.withdraw(path(cache, span(1, 8))[1])
    with pytest.raises(StaleLookup):
        cache.claim(chain, lookup, "late")


def test_owners_keep_their_blocks_and_publish_nothing_that_rests_on_them() -> None:
    cache = make_cache(full(4))
    serve(cache, span(1, 8))
    chain = cache.chain(BASE, span(1, 21))
    lookup, holding = admit(cache, chain)
    assert lookup.n_hit == 8
    cache.publish(chain, holding, 13)
    table: BlockTable = holding.tables[0]
    blocks = list(table.blocks)
    assert cache.withdraw(path(cache, span(1, 8))[1]) == 2  # tokens 4 .. 7 and 8 .. 11
    cache.audit([holding])
    assert table.blocks == blocks and [cache.pool.refs[block] for block in blocks] == [1] * len(blocks)
    cache.publish(chain, holding, 21)
    cache.audit([holding])
    assert hit(cache, span(1, 22)) == 4
    cache.release(holding)
    cache.audit()
    assert len(cache.pool.free) == cache.n_blocks - 1


def test_who_may_have_copied_from_it_publishes_nothing_either() -> None:
    # Both compute what follows the same parent: the one that shares a beginning with it may hold copied slots.
    for shared in (span(1, 4), []):
        cache = make_cache(full(4))
        serve(cache, [*shared, *span(11, 18)])
        chain = cache.chain(BASE, [*shared, 11, 12, 99, 99, 99])
        _, holding = admit(cache, chain)
        cache.withdraw(path(cache, [*shared, *span(11, 14)])[-1])
        cache.audit([holding])
        cache.publish(chain, holding, len(chain))
        cache.audit([holding])
        assert hit(cache, [*shared, 11, 12, 99, 99, 99]) == len(shared)
        cache.release(holding)
        cache.audit()
        serve(cache, [*shared, 11, 12, 99, 99, 99])
        assert hit(cache, [*shared, 11, 12, 99, 99, 99]) == len(shared) + 4
