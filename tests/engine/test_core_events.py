"""EngineCore with events: told after every step, abort and reset, and answering in idle time."""

from __future__ import annotations

import random
import select
import threading
from collections.abc import Iterator
from contextlib import closing

import msgspec
import pytest
import zmq

from headwater.engine.core import EngineCore
from headwater.engine.event_sender import publish_events
from headwater.engine.messages import ResetCache, Shutdown, ToEngine
from headwater.engine.process import EngineLoop
from headwater.events.client import ReplayClient
from headwater.events.reader import ConnectedReader
from headwater.events.wire import Message
from headwater.types import Namespace
from tests.engine.stream import HERE
from tests.engine.test_core import Engine, byte_tokenizer


@pytest.fixture
def told() -> Iterator[tuple[Engine, str, str]]:
    """An engine with events, and where they are to be had."""
    engine = Engine()
    engine.cache.events.enabled = True
    events, (note,) = publish_events(HERE, engine.cache)
    engine.core = EngineCore(
        engine.runner,
        engine.sched,
        engine.cache,
        byte_tokenizer(),
        engine.core.info,
        namespace=Namespace(b"weights"),
        rng=random.Random(1),
        events=events,
    )
    stream, replay = (word.rstrip(",") for word in note.split() if word.startswith("tcp://"))
    with closing(engine.core):
        yield engine, stream, replay


def batches(replay: str, since: int = 0) -> list[Message]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        return ReplayClient(context, replay).since(since)
    finally:
        context.term()


def names(message: Message) -> list[str]:
    return [type(event).__name__ for event in message.events]


def test_one_batch_a_step_at_most_and_none_for_nothing(told: tuple[Engine, str, str]) -> None:
    engine, _, replay = told
    assert [names(message) for message in batches(replay)] == [["AllBlocksCleared"]]
    for step in range(1, 4):
        engine.submit(f"r{step}", bytes([step]) * 20, params={"max_tokens": 1})
        engine.submit(f"s{step}", bytes([step]) * 19 + b"!", params={"max_tokens": 1})
    engine.run()
    sent = batches(replay)
    assert [message.sequence for message in sent] == list(range(len(sent)))
    counters = engine.core.stats().counters
    assert counters["kv_event_batches"] == len(sent)
    assert 1 < len(sent) <= 1 + len(engine.core.stats().steps) + 6
    engine.submit("short", b"abc", params={"max_tokens": 1})
    engine.run()
    assert len(batches(replay)) == len(sent)


def test_aborts_and_resets_are_told_at_once(told: tuple[Engine, str, str]) -> None:
    engine, _, replay = told
    engine.submit("r", b"twelve bytes and more", params={"max_tokens": 50})
    engine.step()
    engine.step()
    engine.core.abort("r")
    n_before = len(batches(replay))
    engine.core.call(ResetCache(1))
    assert names(batches(replay)[-1]) == ["AllBlocksCleared"]
    assert len(batches(replay)) == n_before + 1
    engine.submit("s", b"twelve bytes and more", params={"max_tokens": 50})
    engine.step()
    engine.core.call(ResetCache(2, force=True))
    assert names(batches(replay)[-1]) == ["AllBlocksCleared"]
    engine.core.abort("s")


def test_a_core_without_events_has_no_doorbell_and_counts_none() -> None:
    core = Engine().core
    assert core.doorbell is None
    assert not core.idle_work
    assert not [name for name in core.stats().counters if name.startswith("kv_event")]


def test_b72_an_idle_engine_gives_a_snapshot(told: tuple[Engine, str, str]) -> None:
    engine, stream, replay = told
    engine.submit("r", b"twelve bytes and more", params={"max_tokens": 3})
    engine.run()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    front, inside = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    front.bind("inproc://engine")
    inside.connect("inproc://engine")
    loop = threading.Thread(target=EngineLoop(engine.core, inside).run)
    loop.start()
    try:
        with ConnectedReader(stream, replay, timeout_s=5) as reader:
            reader.start()
            assert reader.keys == engine.cache.events.announced
            assert len(reader.keys) == 5
            assert select.select([engine.core.doorbell], [], [], 0)[0] == [], "hushed: an idle engine sleeps"
            message: ToEngine = ResetCache(1)
            front.send(msgspec.msgpack.encode(message))
            while reader.keys:
                reader.check()
    finally:
        front.send(msgspec.msgpack.encode(Shutdown()))
        loop.join(10)
        context.destroy(linger=0)
    assert not loop.is_alive()
