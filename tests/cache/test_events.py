"""Events: first copy in, last copy out, in order, bounded (known faults, section L)."""

from __future__ import annotations

import random

import pytest

from headwater.cache.events import AllCleared, BlockRemoved, BlockStored, EventLog
from headwater.errors import ConfigError
from headwater.types import Namespace
from tests.cache.cache_model import BASE, TRUNCATED, admit, full, make_cache, serve, sliding, span


def with_events(*groups, **kwargs):
    return make_cache(*groups, events=EventLog(enabled=True), **kwargs)


def test_events_are_off_unless_enabled() -> None:
    cache = make_cache(n_blocks=4)
    serve(cache, span(1, 12))
    serve(cache, span(50, 61))
    cache.reset()
    assert cache.events.drain() == [] and cache.events.next_sequence == 0


def test_b08_the_event_key_is_the_cache_key() -> None:
    cache = with_events()
    keys = []
    for salt in ("a", "b"):
        namespace = Namespace(b"w", salt=salt)
        serve(cache, span(1, 8), namespace=namespace)
        stored = cache.events.drain()
        chain = cache.chain(namespace, span(1, 8))
        assert [event.key for event in stored] == list(chain.keys(2))
        assert [event.parent for event in stored] == [chain.root.digest, chain.keys(1)[0]]
        assert [event.tokens for event in stored] == [(1, 2, 3, 4), (5, 6, 7, 8)]
        assert [(event.block_size, event.group) for event in stored] == [(4, 0), (4, 0)]
        keys.append({event.key for event in stored})
        assert f"'{salt}'" not in repr(stored)
    assert not keys[0] & keys[1]


def test_a_wide_blocks_event_covers_all_its_tokens() -> None:
    cache = with_events(full(8), sliding(4, 6))
    serve(cache, span(1, 17))
    keys = cache.chain(BASE, span(1, 17)).keys(4)
    wide = [event for event in cache.events.drain() if event.group == 0]
    assert [event.tokens for event in wide] == [tuple(span(1, 8)), tuple(span(9, 16))]
    assert [event.key for event in wide] == [keys[1], keys[3]]
    assert wide[1].parent == keys[1]


def test_b71_removal_is_announced_when_the_last_copy_goes() -> None:
    cache = with_events(n_blocks=4)
    chains = [cache.chain(BASE, span(1, 8)) for _ in range(2)]
    holdings = [admit(cache, chain)[1] for chain in chains]
    for chain, holding in zip(chains, holdings, strict=True):
        cache.publish(chain, holding, 8)
    assert len(cache.events.drain()) == 2  # two contents, four blocks
    for holding in holdings:
        cache.release(holding)
    admit(cache, cache.chain(BASE, span(50, 57)))
    assert cache.events.drain() == []  # the duplicates went
    admit(cache, cache.chain(BASE, span(60, 67)))
    removed = cache.events.drain()
    assert [type(event) for event in removed] == [BlockRemoved, BlockRemoved]
    assert {event.key for event in removed} == set(chains[0].keys(2))


@pytest.mark.parametrize("hasher", [None, TRUNCATED])
def test_b71_replaying_the_stream_gives_the_index(hasher) -> None:
    rng = random.Random(71)
    cache = with_events(full(4), sliding(4, 6), n_blocks=24, hasher=hasher, max_ghosts=10)
    heard: set[tuple[int, bytes]] = set()
    running = []
    expected_sequence = 0
    for _ in range(1000):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 14))]
        chain = cache.chain(BASE, tokens)
        lookup = cache.lookup(chain)
        if len(running) < 4 and cache.can_admit(lookup, len(tokens)):
            _, holding = admit(cache, chain)
            running.append((chain, holding))
        elif running:
            chain, holding = running.pop(rng.randrange(len(running)))
            if rng.random() < 0.7:
                cache.publish(chain, holding, len(chain))
            cache.release(holding)
        if not running and rng.random() < 0.02:
            cache.reset()
        for event in cache.events.drain():
            assert event.sequence == expected_sequence
            expected_sequence += 1
            if isinstance(event, BlockStored):
                heard.add((event.group, event.key))
            elif isinstance(event, BlockRemoved):
                heard.remove((event.group, event.key))
            else:
                heard.clear()
        assert heard == {(cache.pool.group[b], node.key) for b, node in enumerate(cache.pool.node) if node}
        cache.audit()
    assert cache.stats().evictions > 200


def test_b72_a_reader_that_joins_late_gets_a_snapshot_in_order() -> None:
    cache = with_events()
    serve(cache, span(1, 8))
    cache.events.drain()
    snapshot = cache.snapshot()
    serve(cache, span(1, 12))
    later = cache.events.drain()
    assert later[0].sequence == snapshot[0].sequence == 2
    known = [event.key for event in [*snapshot, *later]]
    assert known == list(cache.chain(BASE, span(1, 12)).keys(3))
    parents = {event.parent for event in snapshot}
    assert parents == {cache.chain(BASE, []).root.digest, known[0]}


def test_b74_a_slow_reader_loses_the_oldest_and_sees_the_gap() -> None:
    cache = make_cache(events=EventLog(enabled=True, capacity=3))
    serve(cache, span(1, 20))
    events = cache.events.drain()
    assert [event.sequence for event in events] == [2, 3, 4]
    assert cache.events.n_dropped == 2
    cache.reset()
    assert cache.events.drain() == [AllCleared(5)]
    with pytest.raises(ConfigError):
        EventLog(capacity=0)
