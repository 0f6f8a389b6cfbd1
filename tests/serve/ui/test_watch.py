"""One picture for all viewers: what is asked of the engine, and what a viewer who applies all news ends up with."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headwater.engine.messages import (
    BlockView,
    EngineInfo,
    EngineStats,
    PoolView,
    TreeView,
    ViewBlock,
    ViewPool,
    ViewTree,
)
from headwater.errors import EngineDead
from headwater.serve.errors import ApiError
from headwater.serve.ui import watch as watching
from headwater.serve.ui.frame import Frame, count_cells, difference, with_groups
from headwater.serve.ui.history import SAMPLED, History
from headwater.serve.ui.watch import Watch
from headwater.serve.ui.wording import Wording
from tests.serve.ui.real_cache import build_core

INFO = msgspec.convert(
    {
        "model": "m", "family": "f", "max_model_len": 9, "vocab_size": 300, "block_size": 4, "n_blocks": 64,
        "n_groups": 1, "min_reusable_tokens": 4, "dtype": "float32", "kv_cache_bytes": 0, "threads": 1,
        "enable_prefix_caching": True, "hash_algo": "sha256", "max_num_seqs": 1, "max_num_batched_tokens": 1,
        "row_invariant": True,
    },
    EngineInfo,
)  # fmt: skip


class Engine:
    """An EngineClient that answers out of hand, and counts what it is asked."""

    def __init__(self) -> None:
        self.info = INFO
        self.stats = EngineStats()
        self.alive = True
        self.death = ""
        self.cells = bytes(64)
        self.asked: list[str] = []

    def add_stats_listener(self, listener: Callable[[EngineStats], None]) -> None:
        self.listener = listener

    def move(self) -> None:
        """Something happens: one cell changes, and a counter."""
        at = random.Random(len(self.asked)).randrange(64)
        self.cells = self.cells[:at] + bytes([(self.cells[at] + 1) % 10]) + self.cells[at + 1 :]
        self.stats = EngineStats({"prefix_queries": self.stats.counters.get("prefix_queries", 0) + 1})
        self.listener(self.stats)

    async def call(self, make: Callable[[int], Any], expected: type) -> Any:
        if not self.alive:
            raise EngineDead(self.death)
        message = make(len(self.asked))
        self.asked.append(type(message).__name__)
        if isinstance(message, ViewPool):
            return PoolView(message.call_id, self.cells, b"", [1, 2, 3])
        if isinstance(message, ViewTree):
            return TreeView(message.call_id, done=True, unit=4)
        return BlockView(
            message.call_id, message.block, "free", 0, 0, [], None, None, None, [], 0, 0, 0, None, None, []
        )


def watch_of(engine: Engine, requests: list[dict[str, Any]] | None = None, *, redact: bool = False) -> Watch:
    wording = Wording(lambda tokens: bytes(tokens).decode(errors="replace"), redact)
    told = requests if requests is not None else []
    return Watch(engine, wording, "served", lambda n: told[:n])  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("EVERY_S", 0.02), ("TREE_EVERY_S", 0.08), ("BEAT_S", 0.1), ("STILL_S", 0.5)):
        monkeypatch.setattr(watching, name, value)


def run(work: Awaitable[Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 20))  # type: ignore[arg-type]


class Viewer:
    """What a page keeps: the cells, after every event."""

    def __init__(self, watch: Watch) -> None:
        self.events = watch.events()
        self.cells = b""
        self.frame = 0
        self.requests: list[str] = []
        self.heard: list[str] = []

    async def hear(self) -> dict[str, Any]:
        event = json.loads(await anext(self.events))
        self.heard.append(next(iter(event)))
        if "frame" in event:
            assert "base" not in event or event["base"] == self.frame
            self.frame = event["frame"]
            self.requests = [request["id"] for request in event["requests"]] + (
                self.requests if "base" in event else []
            )
            if "cells" in event:
                self.cells = base64.b64decode(event["cells"])
            if "at" in event:
                cells = bytearray(self.cells)
                at, to = base64.b64decode(event["at"]), base64.b64decode(event["to"])
                for i, value in enumerate(to):
                    cells[int.from_bytes(at[4 * i : 4 * i + 4], "little")] = value
                self.cells = bytes(cells)
        return event


def test_viewers_who_apply_the_news_see_what_the_engine_has() -> None:
    async def work() -> None:
        engine, requests = Engine(), []
        watch = watch_of(engine, requests)
        viewers = [Viewer(watch) for _ in range(3)]
        for viewer in viewers:
            assert "about" in await viewer.hear()
        for i in range(30):
            engine.move()
            requests.insert(0, {"id": f"r{i}", "account": None})
            await asyncio.sleep(0.03)
            for n, viewer in enumerate(viewers):
                if n < 2 or i % 7 == 6:  # the third one is slow, and misses pictures
                    await viewer.hear()
        await asyncio.sleep(0.1)
        for viewer in viewers:
            while viewer.frame < watch._frame.number:  # type: ignore[union-attr]
                await viewer.hear()
            assert viewer.cells == engine.cells
            assert viewer.requests == [f"r{i}" for i in range(29, -1, -1)]

    run(work())


def test_all_viewers_share_one_picture() -> None:
    async def work(n_viewers: int) -> int:
        engine = Engine()
        watch = watch_of(engine)
        viewers = [Viewer(watch) for _ in range(n_viewers)]
        end = asyncio.get_running_loop().time() + 0.5

        async def look(viewer: Viewer) -> None:
            while asyncio.get_running_loop().time() < end:
                engine.move()
                await viewer.hear()

        await asyncio.gather(*map(look, viewers))
        return engine.asked.count("ViewPool")

    alone, many = run(work(1)), run(work(20))
    assert 1 < alone <= 27 and many <= 27  # one every 20 ms, whoever looks


def test_nothing_is_asked_when_nobody_looks_or_nothing_changes() -> None:
    async def work() -> None:
        engine = Engine()
        watch = watch_of(engine)
        engine.move()
        await asyncio.sleep(0.1)
        assert engine.asked == []
        viewer = Viewer(watch)
        await viewer.hear()
        await viewer.hear()
        await asyncio.sleep(0.3)
        assert engine.asked.count("ViewPool") == 1 and engine.asked.count("ViewTree") == 1
        assert "beat" in await viewer.hear()
        await viewer.events.aclose()
        n_asked = len(engine.asked)
        for _ in range(5):
            engine.move()
            await asyncio.sleep(0.05)
        assert len(engine.asked) == n_asked

    run(work())


def test_the_end_of_the_engine_is_told_and_ends_the_stream() -> None:
    async def work() -> None:
        engine = Engine()
        viewer = Viewer(watch_of(engine))
        await viewer.hear()
        await viewer.hear()
        engine.alive, engine.death = False, "killed by signal 9"
        engine.stats = EngineStats({"prefix_queries": 99})
        events = [json.loads(event) async for event in viewer.events]
        assert events[-1] == {"gone": "killed by signal 9"}

    run(work())


def test_too_many_viewers_are_refused_and_leave_room_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "MAX_VIEWERS", 2)

    async def work() -> None:
        watch = watch_of(Engine())
        viewers = [Viewer(watch) for _ in range(3)]
        await viewers[0].hear()
        await viewers[1].hear()
        with pytest.raises(ApiError, match="2 pages"):
            await viewers[2].hear()
        await viewers[0].events.aclose()
        await Viewer(watch).hear()

    run(work())


def test_redacted_accounts_and_blocks_hold_no_text() -> None:
    side = {"token_ids": [65], "text": "secret"}
    account = {
        "stop": {"sentence": "differs"},
        "difference": {"at_token": 3, "before": side, "ours": side, "theirs": side, "message": None},
    }

    async def work() -> None:
        watch = watch_of(Engine(), [{"id": "r", "account": account}], redact=True)
        frame = await watch.frame()
        assert "secret" not in frame.whole().decode() and "token_ids" not in frame.whole().decode()
        assert frame.requests[0]["account"]["difference"] == {"at_token": 3, "message": None, "redacted": True}

    run(work())
    view = BlockView(1, 0, "in use", 0, 1, ("r",), b"k", b"n", 0, (115, 101), 0, 1, 0, None, None, ())
    told = Wording(lambda tokens: "secret", True).block(view)
    assert "secret" not in str(told) and "115" not in str(told)
    assert told["n_tokens"] == 2 and told["redacted"]
    open_ = Wording(lambda tokens: bytes(tokens).decode(), False).block(view)
    assert (open_["text"], open_["token_texts"], open_["token_ids"]) == ("se", ["s", "e"], (115, 101))


def test_a_difference_is_sent_where_it_is_shorter() -> None:
    old = bytes(1000)
    few, many = bytearray(old), bytes([5]) * 1000
    few[700] = 3
    assert difference(old, bytes(few)) == {
        "at": base64.b64encode((700).to_bytes(4, "little")).decode(),
        "to": base64.b64encode(b"\x03").decode(),
    }
    assert difference(old, many) == {"cells": base64.b64encode(many).decode()}


def test_cells_are_counted_whatever_their_group() -> None:
    cells = with_groups(bytes([0, 1, 2, 3, 4, 5, 9]), bytes([0, 1, 2, 3, 20, 5, 6]))
    assert cells[4] == 4 | 15 << 4
    assert count_cells(cells) == {
        "free": 1, "in_use": 1, "shared": 1, "fenced": 1, "evictable": 3, "ages": [1, 1, 0, 0, 0, 1],
    }  # fmt: skip


def test_a_viewer_who_missed_a_frame_gets_all_of_the_next() -> None:
    def frame(number: int, cells: bytes) -> Frame:
        return Frame(number, 0.0, cells=cells, queue=[], tree={}, counters={}, samples=[], requests=[], n_new=0)

    first, third = frame(1, b"\0" * 9), frame(3, b"\1" * 9)
    assert third.after(first) == third.whole()
    assert b'"base":2' in third.after(frame(2, b"\1" * 9))


# ---- history ------------------------------------------------------------------------------------------


def test_history_keeps_one_sample_a_second_and_the_last_before_a_pause() -> None:
    now = [100.0]
    history = History(lambda: now[0])

    def see(at: float, n: int) -> None:
        now[0] = at
        history.observe(EngineStats({"prefix_queries": n}))

    for i in range(30):
        see(100 + i * 0.1, i)
    see(160.0, 50)
    told = [(sample[0], sample[1]) for sample in history.since(0.0)]
    # what was counted just before the pause is not smeared over it
    assert told == [(100.0, 0), (101.0, 10), (102.0, 20), (102.9, 29), (159.0, 29), (160.0, 50)]
    assert SAMPLED[0] == "prefix_queries" and history.since(159.5) == history.since(0.0)[-1:]
    now[0] = 1000.0
    assert history.since(0.0) == []


# ---- the engine's side --------------------------------------------------------------------------------


def test_the_real_core_answers_the_calls() -> None:
    config: Any = SimpleNamespace(model=SimpleNamespace(model="fake?blocks=512&fill=500"))
    core = build_core(config, lambda what, fraction: None)
    pool = core.call(ViewPool(1, 5))
    assert isinstance(pool, PoolView) and len(pool.cells) == 512 and len(pool.queue) == 5
    block = core.call(ViewBlock(2, pool.queue[0]))
    assert isinstance(block, BlockView) and block.queue_place == 0 and len(block.tokens) == 16
    assert "0 to 511" in core.call(ViewBlock(3, 512)).error  # type: ignore[attr-defined]
    tree = core.call(ViewTree(4))
    assert isinstance(tree, TreeView) and tree.done and tree.unit == 16
    for reply in (pool, block, tree):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(reply), type=type(reply)) == reply


def test_the_tree_is_folded_largest_first_with_sums() -> None:
    from headwater.serve.ui.tree import Tree

    config: Any = SimpleNamespace(model=SimpleNamespace(model="fake?blocks=512&fill=500"))
    core = build_core(config, lambda what, fraction: None)
    view = core.call(ViewTree(1))
    assert isinstance(view, TreeView)
    tree = Tree(view, Wording(lambda tokens: bytes(tokens).decode(), False))
    rows = tree.fold(6)
    root, trunk, *leaves = rows
    assert root["parent"] is None and root["tokens_held_in_all"] == 500 * 16 == root["blocks"] * 16
    assert (trunk["parent"], trunk["tokens"], trunk["n_children"]) == (root["id"], 8 * 16, 16)
    assert trunk["tokens_held_in_all"] == 500 * 16 and len(trunk["text"]) == 32
    assert [row["tokens_held_in_all"] for row in leaves] == [32 * 16] * 4
    assert {row["parent"] for row in leaves} == {trunk["id"]} and {row["start"] for row in leaves} == {8 * 16}
    below = tree.below(trunk["id"], 100)
    assert below is not None and len(below) == 16 and sum(row["tokens"] for row in below) == 492 * 16
    assert tree.below("gone", 10) is None
    assert Tree(view, Wording(lambda tokens: "secret", True)).fold(3)[1]["text"] is None
