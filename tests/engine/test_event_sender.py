"""The sender of KV events: never in the engine's way, and what it says on the wire (known faults, section L)."""

from __future__ import annotations

import random
import struct
import threading
import time
from dataclasses import replace

import pytest
import zmq

from headwater.cache.events import AllCleared, BlockRemoved, BlockStored, EventLog
from headwater.cache.extras import MediaSpan
from headwater.config import EventsConfig
from headwater.engine import event_sender
from headwater.engine.event_sender import ReplayBuffer, WireWriter, is_local, publish_events
from headwater.engine.kv_events import Batch
from headwater.engine.options import engine_config
from headwater.errors import ConfigError
from headwater.events.client import ReplayClient
from headwater.events.follow import Block, Follower, Verdict
from headwater.events.wire import decode
from headwater.types import Namespace
from tests.cache.cache_model import BASE, admit, full, make_cache, serve, sliding, span
from tests.engine.stream import HERE, Engine, catch_up, engine, reading


@pytest.fixture(autouse=True)
def snapshots_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_sender, "SNAPSHOT_EVERY_S", 0.0)


# ---- the engine never waits ---------------------------------------------------------------------


def flood(engine: Engine, n_batches: int) -> float:
    """Batches of about 30 kB; the longest that one flush took, in seconds."""
    longest = 0.0
    for i in range(n_batches):
        serve(engine.cache, [i * 4000 + k for k in range(3600)])
        start = time.perf_counter()
        engine.flush()
        longest = max(longest, time.perf_counter() - start)
    return longest


def test_b74_a_reader_that_never_reads_is_counted_and_holds_nobody_up() -> None:
    config = replace(HERE, buffer_batches=8, topic="long" * 10_000)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stuck = context.socket(zmq.SUB)
    stuck.setsockopt(zmq.RCVHWM, 1)
    stuck.setsockopt(zmq.RCVBUF, 4096)
    stuck.setsockopt(zmq.SUBSCRIBE, b"")
    try:
        with engine(config=config) as made, reading(made) as (reader, _):
            stuck.connect(made.stream)
            for i in range(4000):
                serve(made.cache, span(i * 10, i * 10 + 7))
                made.flush()
                catch_up(made, reader)
                if made.events.counters()["kv_event_slow_readers"]:
                    break
            counters = made.events.counters()
            assert counters["kv_event_slow_readers"] > 0
            assert counters["kv_event_batches_dropped"] == 0
            assert reader.counts.gaps == 0, "the other reader lost nothing"
            assert reader.keys == made.index
    finally:
        context.destroy(linger=0)


def test_b74_a_sender_that_does_not_get_on_costs_batches_not_time() -> None:
    with engine(n_blocks=64) as made, reading(made) as (reader, _):
        while len(made.outbox):  # what the start says is on its way
            time.sleep(0.001)
        made.outbox.capacity = 3
        hold = threading.Event()

        def held_up(batch):
            hold.wait(20)
            return type(made.sender._writer).batch(made.sender._writer, batch)

        made.sender._writer.batch = held_up  # type: ignore[method-assign]
        before = made.events.counters()
        start = time.perf_counter()
        for i in range(10):
            serve(made.cache, span(i * 100, i * 100 + 7))
            made.flush()
        assert time.perf_counter() - start < 5
        after = made.events.counters()
        dropped = after["kv_event_batches_dropped"] - before["kv_event_batches_dropped"]
        assert dropped in (6, 7)  # three wait, and one may be at the sender's
        assert after["kv_event_batches"] - before["kv_event_batches"] == 10 - dropped
        hold.set()
        while reader.poll(0.2):
            pass
        assert reader.keys != made.index
        serve(made.cache, span(5000, 5007))
        made.flush()  # its number tells that those before are missing; no replay has them
        while reader.keys != made.index:
            reader.poll(1.0)
        assert reader.counts.gaps == 1
        assert reader.counts.snapshots == 1


def test_more_events_in_one_step_than_the_log_holds_leave_a_gap() -> None:
    with engine(capacity=4) as made, reading(made) as (reader, _):
        before = made.next_sequence
        serve(made.cache, span(1, 40))
        made.flush()
        assert made.next_sequence == before + 2
        assert made.events.counters()["kv_event_batches_dropped"] == 1
        while reader.keys != made.index:
            reader.poll(1.0)
        assert reader.counts.gaps == 1


def test_nothing_happened_nothing_is_sent() -> None:
    with engine() as made:
        before = made.events.counters()
        made.flush()
        serve(made.cache, span(1, 3))  # no full block
        made.flush()
        assert made.events.counters() == before
        serve(made.cache, span(1, 20))
        serve(made.cache, span(50, 69))
        made.flush()
        after = made.events.counters()
        assert (after["kv_event_batches"], after["kv_events"]) == (before["kv_event_batches"] + 1, 11)


# ---- the replay endpoint ------------------------------------------------------------------------


def test_b74_replay_speaks_vllms_framing_topic_included() -> None:
    with engine(config=replace(HERE, topic="kv@pod@model")) as made, zmq.Context() as context:
        for i in range(3):
            serve(made.cache, span(i * 100, i * 100 + 7))
            made.flush()
        with context.socket(zmq.REQ) as req:
            req.connect(made.replay)
            req.send((2).to_bytes(8, "big"))
            first = req.recv_multipart()  # a REQ socket takes but one answer
            assert first[:2] == [b"kv@pod@model", (2).to_bytes(8, "big")]
        with context.socket(zmq.DEALER) as dealer:
            dealer.connect(made.replay)
            dealer.send_multipart([b"", (2).to_bytes(8, "big")])
            answers = [dealer.recv_multipart() for _ in range(3)]
            assert [parts[:3] for parts in answers[:2]] == [
                [b"", b"kv@pod@model", number.to_bytes(8, "big")] for number in (2, 3)
            ]
            assert answers[2] == [b"", b"", (-1).to_bytes(8, "big", signed=True), b""]
            assert answers[0][3] == first[2]


@pytest.mark.parametrize(
    "request_frames", [[b""], [b"", b"x"], [b"no", b"delimiter"], [b"", b"a" * 9], [b"", b"", b""]]
)
def test_a_request_that_is_none_harms_nobody(request_frames: list[bytes]) -> None:
    with engine() as made, reading(made) as (reader, _), zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(made.replay)
        dealer.send_multipart(request_frames)
        serve(made.cache, span(1, 8))
        made.flush()
        catch_up(made, reader)
        reader.check()
        assert reader.keys == made.index
        if request_frames[0] == b"" and len(request_frames) == 2:
            assert dealer.recv_multipart() == [b"", b"", (-1).to_bytes(8, "big", signed=True), b""]


def test_a_reader_that_asks_and_never_reads_or_leaves_harms_nobody() -> None:
    config = replace(HERE, buffer_batches=16)
    with engine(config=config, n_blocks=1000) as made, reading(made) as (reader, _), zmq.Context() as context:
        flood(made, 16)
        rude = context.socket(zmq.DEALER)
        rude.setsockopt(zmq.RCVHWM, 1)
        rude.connect(made.replay)
        for _ in range(2000):
            rude.send_multipart([b"", bytes(8)])
        serve(made.cache, span(1, 8))
        made.flush()
        catch_up(made, reader)
        rude.close(linger=0)
        reader.check()
        assert reader.keys == made.index


def test_what_is_kept_is_bounded_in_batches_and_in_bytes() -> None:
    kept = ReplayBuffer(3, max_bytes=100)
    for i in range(5):
        kept.keep(i, bytes(10))
    assert [sequence for sequence, _ in kept.since(0)] == [2, 3, 4]
    assert [sequence for sequence, _ in kept.since(4)] == [4]
    kept.keep(5, bytes(85))
    assert [sequence for sequence, _ in kept.since(0)] == [4, 5]
    kept.keep(6, bytes(101))
    assert kept.since(0) == []


# ---- what is told -------------------------------------------------------------------------------


def told(made: Engine) -> list:
    """The events of the newest batch, as they are told."""
    made.flush()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        return list(ReplayClient(context, made.replay).since(made.next_sequence - 1)[0].events)
    finally:
        context.term()


def test_b08_keys_are_the_caches_and_a_salt_is_seen_as_a_digest_only() -> None:
    with engine() as made:
        keys, apart = [], []
        for salt in (None, "a-salt", "b-salt"):
            namespace = Namespace(b"weights", salt=salt)
            serve(made.cache, span(1, 8), namespace=namespace)
            chain = made.cache.chain(namespace, span(1, 8))
            (event,) = told(made)
            assert event.block_hashes == list(chain.keys(2))
            assert (event.parent_block_hash, event.token_ids) == (None, span(1, 8))
            assert event.namespace == chain.root.digest
            keys.append(set(event.block_hashes))
            apart.append(event.extra_keys)
            serve(made.cache, span(1, 12), namespace=namespace)
            (event,) = told(made)
            assert (event.parent_block_hash, event.extra_keys) == (chain.keys(2)[1], [None])
        assert not keys[0] & keys[1] and not keys[1] & keys[2]
        assert apart[0] == [None, None]
        assert apart[1] != apart[2] and apart[1][0] and apart[1][1] is None
        kept = b"".join(payload for _, payload in made.sender._kept.since(0))
        assert len(kept) > 500
        assert b"-salt" not in kept


def test_groups_are_told_with_their_blocks() -> None:
    with engine(full(8), sliding(4, 6)) as made:
        serve(made.cache, span(1, 17))
        wide, narrow = sorted(told(made), key=lambda event: event.group_idx)
        keys = made.cache.chain(BASE, span(1, 17)).keys(4)
        assert (wide.block_hashes, wide.block_size, wide.token_ids) == ([keys[1], keys[3]], 8, span(1, 16))
        assert (wide.kv_cache_spec_kind, wide.kv_cache_spec_sliding_window) == ("full_attention", None)
        assert (narrow.block_hashes, narrow.block_size) == (list(keys), 4)
        assert (narrow.kv_cache_spec_kind, narrow.kv_cache_spec_sliding_window) == ("sliding_window", 6)
        assert {wide.medium, narrow.medium} == {"GPU"}


def test_images_set_blocks_apart() -> None:
    with engine() as made:
        serve(made.cache, span(1, 8), extras=[MediaSpan(b"digest of an image", 4, 2)])
        (event,) = told(made)
        assert event.extra_keys[0] is None
        assert b"digest of an image".hex() in event.extra_keys[1][0]


def test_b71_only_the_last_copys_end_is_told() -> None:
    with engine(n_blocks=4) as made:
        chains = [made.cache.chain(BASE, span(1, 8)) for _ in range(2)]
        holdings = [admit(made.cache, chain)[1] for chain in chains]
        for chain, holding in zip(chains, holdings, strict=True):
            made.cache.publish(chain, holding, 8)
        for holding in holdings:
            made.cache.release(holding)
        assert len(told(made)) == 1
        before = made.next_sequence
        admit(made.cache, made.cache.chain(BASE, span(50, 57)))
        made.flush()
        assert made.next_sequence == before, "the duplicates went: nothing to tell"
        admit(made.cache, made.cache.chain(BASE, span(60, 67)))
        (removed,) = told(made)
        assert set(removed.block_hashes) == set(chains[0].keys(2))


def test_a_reset_is_told_as_all_cleared() -> None:
    with engine() as made:
        serve(made.cache, span(1, 8))
        made.cache.reset()
        serve(made.cache, span(1, 4))
        names = [type(event).__name__ for event in told(made)]
        assert names == ["BlockStored", "AllBlocksCleared", "BlockStored"]


def test_events_of_one_batch_keep_their_order() -> None:
    rng = random.Random(3)
    writer = WireWriter([full(4), sliding(4, 6)], legacy=False)
    root = make_cache().chain(BASE, []).root
    for _ in range(200):
        follower, held, events = Follower(), {}, []
        for sequence in range(rng.randrange(1, 30)):
            group, key = rng.randrange(2), bytes([rng.randrange(5)])
            if rng.random() < 0.05:
                events.append(AllCleared(sequence))
                held.clear()
            elif (group, key) in held:
                events.append(BlockRemoved(sequence, key, group))
                del held[group, key]
            else:
                parent = rng.choice([root.digest, *(bytes([i]) for i in range(5) if bytes([i]) != key)])
                tokens = tuple(rng.randrange(9) for _ in range(4))
                chunk = struct.pack("<4I", *tokens)
                events.append(BlockStored(sequence, key, parent, chunk, group, root.digest, False, b""))
                held[group, key] = Block(None if parent == root.digest else parent, tokens, root.digest)
        payload = writer.batch(Batch(1, 0.0, events))
        follower.restore([decode(0, writer.batch(Batch(0, 0.0, [AllCleared(0)])))])
        follower.next_sequence = 1
        assert follower.push(decode(1, payload)) is Verdict.APPLIED
        assert follower.blocks == held


# ---- options ------------------------------------------------------------------------------------


def test_addresses_that_cannot_be_used_are_named() -> None:
    with engine() as made:
        with (
            pytest.raises(ConfigError, match=r"kv_events_endpoint.*in use"),
            engine(config=replace(HERE, endpoint=made.stream)),
        ):
            pass
        with (
            pytest.raises(ConfigError, match=r"kv_events_replay_endpoint.*in use"),
            engine(config=replace(HERE, replay_endpoint=made.replay)),
        ):
            pass
    for bad in ("127.0.0.1:5557", "inproc://here", "udp://127.0.0.1:5557"):
        with (
            pytest.raises(ConfigError, match="must begin with tcp:// or ipc://"),
            engine(config=replace(HERE, endpoint=bad)),
        ):
            pass
    with pytest.raises(ConfigError, match="cannot be used"), engine(config=replace(HERE, endpoint="tcp://127.0.0.1")):
        pass


@pytest.mark.parametrize(
    ("endpoint", "local"),
    [
        ("tcp://127.0.0.1:5557", True),
        ("tcp://127.9.9.9:5557", True),
        ("tcp://localhost:5557", True),
        ("tcp://[::1]:5557", True),
        ("ipc:///run/events", True),
        ("tcp://*:5557", False),
        ("tcp://0.0.0.0:5557", False),
        ("tcp://[::]:5557", False),
        ("tcp://192.168.1.7:5557", False),
        ("tcp://eth0:5557", False),
        ("tcp://localhost.example.org:5557", False),
    ],
)
def test_which_addresses_are_local(endpoint: str, local: bool) -> None:
    assert is_local(endpoint) is local


def test_an_address_open_to_the_network_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    cache = make_cache(events=EventLog(enabled=True))
    config = replace(HERE, endpoint="tcp://0.0.0.0:*")
    events, notes = publish_events(config, cache)
    assert events is not None
    events.close()
    assert len(notes) == 1
    (warning,) = caplog.messages
    assert "open to the network" in warning


def test_off_by_default() -> None:
    assert publish_events(engine_config("m", {}).events, make_cache()) == (None, [])
    assert engine_config("m", {"kv_events": True}).events == EventsConfig(enabled=True)
