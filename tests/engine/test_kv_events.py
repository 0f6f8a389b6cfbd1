"""The stream of KV events, over real sockets, against the index (known faults, section L)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from headwater.engine import event_sender
from headwater.events.follow import Verdict
from headwater.types import Namespace
from tests.cache.cache_model import BASE, TRUNCATED, admit, full, serve, sliding, span
from tests.engine.stream import HERE, Engine, at, catch_up, engine, reading

LAYOUTS = {
    "full": (full(4),),
    "hybrid": (full(4), sliding(4, 6)),
    "wide": (full(8), sliding(4, 6), sliding(4, 3)),
}


@pytest.fixture(autouse=True)
def snapshots_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_sender, "SNAPSHOT_EVERY_S", 0.0)


def random_steps(engine: Engine, rng: random.Random, n_steps: int) -> Iterator[None]:
    """A generator of steps: admissions, copies, publishing, slides, releases, withdrawals, resets."""
    cache = engine.cache
    running = []
    for _ in range(n_steps):
        namespace = Namespace(b"weights", salt=rng.choice([None, "a"]))
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 22))]
        chain = cache.chain(namespace, tokens)
        if len(running) < 4 and cache.can_admit(cache.lookup(chain), len(tokens)):
            running.append((chain, admit(cache, chain)[1]))
        elif running:
            chain, holding = running.pop(rng.randrange(len(running)))
            if rng.random() < 0.8:
                cache.copied(holding)
                cache.publish(chain, holding, len(chain))
                cache.slide(holding, len(chain))
            if rng.random() < 0.1 and (held := [node for node in cache.pool.node if node]):
                cache.withdraw(rng.choice(held))
            cache.release(holding)
        if not running and rng.random() < 0.03:
            cache.reset()
        cache.audit()
        engine.flush()
        yield


@pytest.mark.parametrize("layout", LAYOUTS)
def test_b71_b74_the_stream_replayed_into_a_set_is_the_index_after_each_of_1000_steps(layout) -> None:
    rng = random.Random(71)
    n_same = 0
    with engine(*LAYOUTS[layout], n_blocks=24, max_ghosts=10) as made:
        with reading(made, rng=rng, probability=0.1) as (reader, live):
            for _ in random_steps(made, rng, 1000):
                while live.heard < made.next_sequence - 1:
                    reader.poll(1.0)
                reader.poll()
                if reader.held.next_sequence != made.next_sequence:
                    assert live.n_lost  # the newest is lost, and nothing has told yet
                    if rng.random() < 0.5:
                        continue
                    reader.check()
                assert reader.held.blocks == made.blocks
                n_same += 1
        assert n_same > 900
        assert live.n_lost > 40
        assert reader.counts.gaps > 15
        assert reader.counts.replays > 30
        assert made.cache.stats().evictions > 200
        assert made.cache.stats().withdrawn > 20
        assert made.cache.stats().copied_tokens > 100


def test_colliding_hashes_do_not_confuse_the_stream() -> None:
    rng = random.Random(8)
    with engine(*LAYOUTS["hybrid"], n_blocks=24, hasher=TRUNCATED, max_ghosts=10) as made, reading(made) as (reader, _):
        for _ in random_steps(made, rng, 300):
            catch_up(made, reader)
            assert reader.keys == made.index


def test_b74_a_lost_store_and_the_removal_that_was_heard_leave_nothing() -> None:
    with engine(n_blocks=2) as made, reading(made) as (reader, live):
        start = made.next_sequence
        live.lose = {start + 4}  # batch 5 of 10 stores A, batch 6 removes it
        lost = made.cache.chain(Namespace(b"weights"), span(500, 507)).keys(2)
        for step in range(10):
            first = 500 if step == 4 else step * 10
            serve(made.cache, span(first, first + 7), namespace=Namespace(b"weights"))
            made.flush()
        catch_up(made, reader)
        assert made.next_sequence == start + 10
        assert (live.n_lost, reader.counts.gaps, reader.counts.replays) == (1, 1, 1)
        assert not {key for _, key in reader.keys} & set(lost)
        assert reader.keys == made.index != set()


def test_b72_who_joins_late_knows_all_in_order_and_follows() -> None:
    with engine() as made:
        serve(made.cache, span(1, 8))
        serve(made.cache, [*span(1, 4), *span(50, 57)])
        made.flush()
        with reading(made) as (reader, _):
            serve(made.cache, span(1, 8))
            serve(made.cache, span(20, 31))
            made.flush()
            catch_up(made, reader)
            serve(made.cache, span(20, 35))  # the fourth block follows one that was there before
            made.flush()
            catch_up(made, reader)
            assert reader.keys == made.index
            keys = made.cache.chain(BASE, span(20, 35)).keys(4)
            blocks = reader.held.blocks
            assert [blocks[0, key].parent for key in keys] == [None, *keys[:3]]
            assert blocks[0, keys[3]].token_ids == (32, 33, 34, 35)
            late = reader._replay.snapshot()
            seen: set[bytes | None] = {None}
            for event in [event for message in late for event in message.events[0 if seen != {None} else 1 :]]:
                assert event.parent_block_hash in seen, "a parent comes before its children"
                seen.update(event.block_hashes)
            assert seen - {None} == {key for _, key in made.index}
            assert {message.sequence for message in late} == {made.next_sequence}


def test_a_snapshot_of_many_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_sender, "CHUNK", 3)
    with engine(*LAYOUTS["hybrid"]) as made:
        for first in range(0, 100, 20):
            serve(made.cache, span(first, first + 11))
        made.flush()
        with reading(made) as (reader, _):
            serve(made.cache, span(1, 12))
            made.flush()
            snapshot = reader._replay.snapshot()
            assert len(snapshot) > 5
            reader.held.restore(snapshot)
            assert reader.keys == made.index


@pytest.mark.parametrize("layout", ["map", "legacy"])
def test_b74_a_start_anew_clears_and_rebuilds(layout) -> None:
    config = replace(HERE, layout=layout)
    with engine(config=config) as first:
        serve(first.cache, span(1, 20))
        first.flush()
        with reading(first) as (reader, _):
            serve(first.cache, span(1, 40))
            first.flush()
            catch_up(first, reader)
            assert reader.keys == first.index != set()
            addresses = replace(at(first), layout=layout)
            first.sender.close()
            with engine(config=addresses) as second:
                reader._replay.engine = second  # type: ignore[attr-defined]
                serve(second.cache, span(100, 107))
                second.flush()
                while reader.keys != second.index:  # it takes the sockets a moment to connect again
                    serve(second.cache, span(second.next_sequence * 100, second.next_sequence * 100 + 7))
                    second.flush()
                    reader.poll(0.05)
                # In the legacy layout, a first number far from the old ones is a gap like any other.
                assert reader.counts.restarts == 1 or (layout == "legacy" and reader.counts.snapshots == 1)
                assert len(reader.keys) >= 4


def test_b74_a_start_anew_is_noticed_even_if_the_numbers_go_on() -> None:
    with engine() as first, engine() as second:
        for made in (first, second):
            serve(made.cache, span(1, 20))
            made.flush()
        with reading(first) as (reader, _):
            catch_up(first, reader)
            for marker in range(10**6, 10**6 + first.next_sequence - second.next_sequence):
                serve(second.cache, [marker] * 4)
                second.flush()
            serve(second.cache, span(50, 57))
            second.flush()
            with reading(second) as (other, _):
                message = other._replay.since(first.next_sequence)[0]
            assert message.sequence == reader.held.next_sequence
            assert reader.held.push(message) is Verdict.RESTARTED


def test_a_quiet_restart_is_found_by_asking() -> None:
    with engine() as first, reading(first) as (reader, _):
        serve(first.cache, span(1, 20))
        first.flush()
        catch_up(first, reader)
        addresses = at(first)
        first.sender.close()
        with engine(config=addresses) as second:
            reader._replay.engine = second  # type: ignore[attr-defined]
            reader.check()
            assert (reader.keys, reader.counts.restarts) == (set(), 1)


def test_the_last_batch_lost_is_found_by_asking() -> None:
    with engine() as made, reading(made) as (reader, live):
        live.lose = {made.next_sequence}
        serve(made.cache, span(1, 8))
        made.flush()
        while live.heard < made.next_sequence - 1:
            reader.poll(1.0)
        assert reader.keys != made.index
        reader.check()
        assert reader.keys == made.index
