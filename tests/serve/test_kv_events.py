"""KV events of a real server, over real sockets, read by the package's own reader and by `headwater events`."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import zmq

from headwater import LLM, ConfigError, SamplingParams
from headwater.cli import main
from headwater.events.client import ReplayClient
from headwater.events.reader import ConnectedReader
from tests.e2e.models import hybrid_model, write_folder
from tests.serve.harness import Server, launched, wait_until

BLOCK = 4


@dataclass
class Published:
    server: Server
    stream: str
    replay: str

    def reader(self) -> ConnectedReader:
        return ConnectedReader(self.stream, self.replay, topic="kv@")

    def ids(self, n: int, seed: int) -> list[int]:
        return [5 + (seed * 7 + i * i) % 90 for i in range(n)]


@pytest.fixture(scope="module")
def published() -> Iterator[Published]:
    with tempfile.TemporaryDirectory() as folder:
        model = write_folder(Path(folder) / "model", hybrid_model())
        stream, replay = f"ipc://{folder}/stream", f"ipc://{folder}/replay"
        command = [sys.executable, "-m", "headwater", "serve", str(model), "--port", "0", "--block-size", str(BLOCK)]
        command += ["--num-blocks", "300", "--max-model-len", "200", "--threads", "1", "--kernels", "torch"]
        command += ["--kv-events", "--kv-events-endpoint", stream, "--kv-events-replay-endpoint", replay]
        command += ["--kv-events-topic", "kv@here"]
        with launched(command, ready=r"^Serving on (http\S+)") as server:
            yield Published(server, stream, replay)
            assert "Traceback" not in server.stderr()


def test_a_reader_of_an_idle_server_and_of_a_busy_one(published: Published) -> None:
    prompt = published.ids(40, 1)
    with published.reader() as reader:
        reader.start()
        assert reader.keys == set()
        answer = published.server.complete(prompt, max_tokens=1, return_token_ids=True)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        wait_until(lambda: bool(reader.poll(0.1)) or len(reader.keys) > 0, 10)
        reader.check()
        full = {key: block for (group, key), block in reader.held.blocks.items() if block.namespace}
        assert {len(block.token_ids) for block in full.values()} == {BLOCK}
        n_groups = len({group for group, _ in reader.keys})
        assert n_groups == 3
        chains = [block for block in full.values() if block.parent is None]
        assert [list(block.token_ids) for block in chains] == [prompt[:BLOCK]]
        told = {block.token_ids for block in full.values()}
        assert told == {tuple(prompt[i : i + BLOCK]) for i in range(0, 40, BLOCK)}
        before = set(reader.keys)
        again = published.server.complete(prompt, max_tokens=1)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        reader.check()
        assert reader.keys == before, "a hit stores nothing"
        assert httpx.post(published.server.url + "/reset_prefix_cache").status_code == 200
        reader.check()
        assert reader.keys == set()
        assert (reader.counts.snapshots, reader.counts.restarts) == (1, 0)
    metrics = published.server.metrics()
    assert metrics["headwater_kv_event_snapshots_total"] >= 1
    assert metrics["headwater_kv_event_batches_total"] >= 3
    assert metrics["headwater_kv_event_batches_dropped_total"] == metrics["headwater_kv_event_slow_readers_total"] == 0


def test_the_command_prints_the_snapshot(published: Published, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = published.ids(24, 2)
    published.server.complete(prompt, max_tokens=1, cache_salt="a salt")
    assert main(["events", "--snapshot", "--replay-endpoint", published.replay]) == 0
    out = capsys.readouterr().out
    cleared, *stored = [json.loads(line) for line in out.splitlines()]
    assert cleared["event"] == "AllBlocksCleared"
    ours = [event for event in stored if event["token_ids"] == prompt]
    assert len(ours) == 3, "one line for each group"
    assert {event["event"] for event in ours} == {"BlockStored"}
    assert all(len(event["keys"]) == 24 // BLOCK and event["parent"] is None for event in ours)
    assert all(event["extra_keys"][0] == [event["namespace"]] for event in ours)
    assert "a salt" not in out


def test_the_command_follows_the_stream(published: Published) -> None:
    command = [sys.executable, "-m", "headwater", "events", "--endpoint", published.stream]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert process.stdout is not None
            assert process.stderr.readline() == f"listening on {published.stream}\n"
            for seed in range(3, 3000):
                if select.select([process.stdout], [], [], 0.01)[0]:  # its subscription has arrived
                    break
                published.server.complete(published.ids(12, seed), max_tokens=1, cache_salt=str(seed))
            event = json.loads(process.stdout.readline())
            assert event["event"] in ("BlockStored", "BlockRemoved")
        finally:
            process.terminate()


def test_in_process_and_its_addresses_are_free_again_after_close(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, hybrid_model())
    with tempfile.TemporaryDirectory() as sockets, zmq.Context() as context:
        options = {"max_model_len": 64, "num_blocks": 100, "dtype": "float32", "kernels": "torch", "kv_events": True}
        options |= {"kv_events_endpoint": f"ipc://{sockets}/s", "kv_events_replay_endpoint": f"ipc://{sockets}/r"}
        for _ in range(2):
            with LLM(folder, **options) as llm:
                assert any("KV events on ipc://" in note for note in llm.info.notes)
                llm.generate([[*range(5, 45)]], SamplingParams(temperature=0.0, max_tokens=2))
                sent = ReplayClient(context, options["kv_events_replay_endpoint"]).since(0)
                assert [message.sequence for message in sent] == list(range(len(sent)))
                assert len(sent) == llm.stats().counters["kv_event_batches"] > 1
        with pytest.raises(ConfigError, match="kv_events_layout must be one of map, legacy"):
            LLM(folder, **options, kv_events_layout="maps")


def test_nobody_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert main(["events", "--snapshot", "--replay-endpoint", f"ipc://{folder}/no", "--timeout", "0.2"]) == 1
    assert "did not answer within 0.2 s" in capsys.readouterr().err
    assert main(["events", "--snapshot", "--replay-endpoint", "nonsense"]) == 1
    assert "is no address to connect to" in capsys.readouterr().err
