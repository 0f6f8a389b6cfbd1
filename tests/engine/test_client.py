"""EngineClient with a real engine process (on the fake core)."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headwater.config import EngineConfig, ModelConfig
from headwater.engine.client import EngineClient, socket_folder
from headwater.engine.messages import Delta, EngineStats, Loading, Submit
from headwater.errors import EngineDead, EngineError
from headwater.types import FinishReason, SamplingParams
from tests.serve.harness import PYTHON_PATH, exists

CORE = "tests.serve.fake_core:build_core"
IDLE_S = 0.1
"""What a piece of the fake's idle work takes."""


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)


@asynccontextmanager
async def started(settings: str = "step_ms=1", **more: Any) -> AsyncIterator[EngineClient]:
    config = EngineConfig(model=ModelConfig(model=f"fake?{settings}"))
    client = await EngineClient.start(config, core=CORE, **more)
    try:
        yield client
    finally:
        await client.close()


def submit(request_id: str, prompt: bytes = b"abc", max_tokens: int = 4, **params: Any) -> Submit:
    return Submit(request_id, list(prompt), SamplingParams(max_tokens=max_tokens, **params))


async def collect(client: EngineClient, *submits: Submit) -> list[Delta]:
    return [delta async for delta in client.stream(submits)]


def run(work: Callable[[EngineClient], Awaitable[None]], settings: str = "step_ms=1") -> None:
    async def main() -> None:
        async with started(settings) as client:
            await asyncio.wait_for(work(client), 30)

    asyncio.run(main())


def text(deltas: list[Delta], request_id: str) -> str:
    return "".join(delta.text for delta in deltas if delta.request_id == request_id)


def test_info_loading_and_a_stream() -> None:
    async def main() -> None:
        loading: list[Loading] = []
        async with started(on_loading=loading.append) as client:
            assert loading == [Loading("loading weights", 0.5)]
            assert client.alive
            assert client.info.model == "fake"
            deltas = await collect(client, submit("a"))
            assert text(deltas, "a") == "abca"
            assert [delta.finish_reason for delta in deltas] == [None] * 3 + [FinishReason.LENGTH]
            assert client.stats.counters["requests_finished_length"] == 1

    asyncio.run(main())


def test_many_streams_at_once_do_not_mix() -> None:
    async def work(client: EngineClient) -> None:
        prompts = {f"r{i}": bytes([65 + i]) * 3 for i in range(26)}
        answers = await asyncio.gather(*(collect(client, submit(r, prompt, 9)) for r, prompt in prompts.items()))
        for (r, prompt), deltas in zip(prompts.items(), answers, strict=True):
            assert text(deltas, r) == (prompt * 3).decode()

    run(work)


def test_several_submits_share_one_stream() -> None:
    async def work(client: EngineClient) -> None:
        deltas = await collect(client, submit("a"), submit("b", b"xyz", 7))
        assert (text(deltas, "a"), text(deltas, "b")) == ("abca", "xyzxyzx")

    run(work)


def test_a_snapshot_is_there_before_the_deltas_it_counts() -> None:
    async def work(client: EngineClient) -> None:
        counted: list[tuple[float, float]] = []  # a later snapshot may be here too: it counts as much, or more

        def listen(stats: EngineStats) -> None:
            counted.append((stats.counters["generation_tokens"], stats.counters.get("requests_finished_length", 0)))

        client.add_stats_listener(listen)
        n_tokens = 0
        async with aclosing(client.stream([submit("a", max_tokens=40)])) as deltas:
            async for delta in deltas:
                n_tokens += len(delta.token_ids)
                assert counted[-1][0] >= n_tokens
                assert counted[-1][1] == 1 or delta.finish_reason is None
        assert [n for n, _ in counted][-1] == n_tokens == 40

    run(work)


def test_leaving_a_stream_aborts_its_requests() -> None:
    async def work(client: EngineClient) -> None:
        async with aclosing(client.stream([submit("a", max_tokens=1000), submit("b", max_tokens=1000)])) as deltas:
            async for _ in deltas:
                break
        while client.stats.counters.get("requests_finished_abort", 0) < 2:
            await asyncio.sleep(0.01)
        assert client.stats.gauges["running"] == 0

    run(work)


def test_cancelling_a_reader_aborts_its_request() -> None:
    async def work(client: EngineClient) -> None:
        reader = asyncio.create_task(collect(client, submit("a", max_tokens=1000)))
        while client.stats.gauges.get("running") != 1:
            await asyncio.sleep(0.01)
        reader.cancel()
        while client.stats.gauges["running"] != 0:
            await asyncio.sleep(0.01)

    run(work)


def test_an_id_cannot_run_twice() -> None:
    async def work(client: EngineClient) -> None:
        with pytest.raises(EngineError, match="twice"):
            await collect(client, submit("a"), submit("a"))
        async with aclosing(client.stream([submit("a", max_tokens=1000)])) as deltas:
            await anext(deltas)
            with pytest.raises(EngineError, match="twice"):
                await collect(client, submit("a"))
            assert (await anext(deltas)).request_id == "a"

    run(work)


def test_reset_b84() -> None:
    async def work(client: EngineClient) -> None:
        await collect(client, submit("a", b"x" * 40))
        done = await client.reset_cache()
        assert (done.done, done.n_cleared) == (True, 2)
        async with aclosing(client.stream([submit("b", max_tokens=1000)])) as deltas:
            await anext(deltas)
            refused = await client.reset_cache()
            assert (refused.done, refused.n_busy) == (False, 1)
            assert (await client.reset_cache(force=True)).done

    run(work)


def test_idle_work_is_done_when_nothing_runs_and_a_request_waits_for_one_piece_at_most() -> None:
    async def work(client: EngineClient) -> None:
        await collect(client, submit("a", b"#idle"))
        while client.stats.counters.get("hits_verified", 0) < 3:  # nobody asks for anything
            await asyncio.sleep(0.01)
        began = asyncio.get_running_loop().time()
        await collect(client, submit("b"))
        assert asyncio.get_running_loop().time() - began < 10 * IDLE_S, "1000 pieces are left"
        async with aclosing(client.stream([submit("c", max_tokens=1000)])) as deltas:
            await anext(deltas)
            n_done = client.stats.counters["hits_verified"]
            for _ in range(50):
                await anext(deltas)
            assert client.stats.counters["hits_verified"] == n_done, "somebody is being served"
        while client.stats.counters["hits_verified"] <= n_done:
            await asyncio.sleep(0.01)
        assert (await client.reset_cache()).done

    run(work, f"step_ms=1&idle_ms={1000 * IDLE_S}")


def test_death_ends_every_stream_and_reset_at_once_b98() -> None:
    async def work(client: EngineClient) -> None:
        readers = [asyncio.create_task(collect(client, submit(f"r{i}", max_tokens=1000))) for i in range(8)]
        while client.stats.gauges.get("running") != 4:
            await asyncio.sleep(0.01)
        os.kill(client.pid, signal.SIGSTOP)  # so that the reset cannot be answered before the kill
        reset = asyncio.create_task(client.reset_cache())
        await asyncio.sleep(0.05)
        os.kill(client.pid, signal.SIGKILL)
        ends = await asyncio.wait_for(asyncio.gather(*readers, reset, return_exceptions=True), 2)
        assert [type(end) for end in ends] == [EngineDead] * 9
        assert not client.alive
        assert "signal 9" in client.death
        for call in (collect(client, submit("late")), client.reset_cache()):
            with pytest.raises(EngineDead):
                await call

    run(work)


def test_a_step_that_raises_is_told_with_its_reason(capfd: pytest.CaptureFixture[str]) -> None:
    async def work(client: EngineClient) -> None:
        with pytest.raises(EngineDead, match="RuntimeError: the step raised"):
            await collect(client, submit("a", b"#raise"))

    run(work)
    assert "Traceback" in capfd.readouterr().err  # nobody foresaw it: the log has all of it


@pytest.mark.parametrize(
    ("settings", "message"), [("missing=1", "^no such model: fake$"), ("broken=1", "^KeyError: 'broken'$")]
)
def test_a_start_that_fails_says_why(settings: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        with pytest.raises(EngineError, match=message):
            async with started(settings):
                pass

    asyncio.run(main())
    assert ("Traceback" in capfd.readouterr().err) == (settings == "broken=1")


def test_a_factory_that_is_not_there_says_so() -> None:
    async def main() -> None:
        with pytest.raises(EngineError, match="No module named 'nowhere'"):
            await EngineClient.start(EngineConfig(), core="nowhere:build")

    asyncio.run(main())


def test_close_is_bounded_while_a_step_runs_and_leaves_nothing() -> None:
    async def main() -> None:
        async with started("step_ms=60000") as client:
            pid = client.pid
            reader = asyncio.create_task(collect(client, submit("a")))
            await asyncio.sleep(0.2)
            await asyncio.wait_for(client.close(), 8)
            assert not exists(pid)
            with pytest.raises(EngineDead, match="stopped"):
                await reader

    asyncio.run(main())


def test_cancelling_a_start_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def main() -> None:
        start = asyncio.create_task(
            EngineClient.start(EngineConfig(model=ModelConfig(model="fake?load_s=60")), core=CORE)
        )
        await asyncio.sleep(0.5)
        start.cancel()
        await asyncio.wait({start}, timeout=8)
        assert start.cancelled()

    asyncio.run(main())
    assert list(tmp_path.iterdir()) == []


def test_the_sockets_folder_is_private_and_its_path_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    folder = socket_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(str(folder / "engine")) < 100
    assert list(deep.iterdir()) == []
    folder.rmdir()
