"""Loads against a server with known delays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.bench.arrivals import fixed, poisson
from headwater.bench.dialect import Dialect
from headwater.bench.load import make_items, run_load
from headwater.bench.load_report import Goodput, find_loads, within
from headwater.bench.load_settings import LoadSettings
from headwater.bench.mixes import Item
from headwater.bench.prompts import Vocabulary
from headwater.bench.readings import read_runs, reading
from headwater.bench.report import as_html, make_report
from headwater.bench.results import Sample, Usage, read_run, read_samples
from headwater.cli.arguments import parse
from headwater.errors import BenchError, ConfigError
from tests.bench.fake_server import ROOT, fake_server

IDS = range(1000, 30_000)
DIALECT = Dialect(model="m", token_ids=True, ids_from=1000, ids_to=30_000, ignore_eos=True, usage=True)
VOCABULARY = Vocabulary(IDS, IDS, 0)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with fake_server("--base-ms", "5", "--token-ms", "0.02", "--itl-ms", "3") as address:
        yield address


def loaded(folder: Path, url: str, workload: str, **more: Any) -> list[Sample]:
    settings = LoadSettings(workload=workload, url=url, **more)
    run_load(settings, folder, {}, ["headwater", "bench", "load"], frozenset(more))
    return sorted(read_samples(folder), key=lambda one: one.repeat)


def items(workload: str, **more: Any) -> list[Item]:
    return make_items(LoadSettings(workload=workload, **more), 1, VOCABULARY, DIALECT)


def prompt(item: Item) -> list[int]:
    sent = item.body()["prompt"]
    assert isinstance(sent, list)
    return sent


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# ---- what is sent ------------------------------------------------------------------------------------


def test_poisson_arrivals_have_exponential_gaps() -> None:
    gaps = np.diff([0.0, *poisson(20_000, 4.0, 1)])
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.03)
    assert np.mean(gaps > 0.25) == pytest.approx(np.exp(-1), abs=0.015)
    assert poisson(9, 4.0, 1) == poisson(9, 4.0, 1) != poisson(9, 4.0, 2)
    assert fixed(3, 4.0) == [0.0, 0.25, 0.5]


def test_turns_grow_and_users_of_one_system_prompt_share_it() -> None:
    made = items("mix", conversations=6, systems=2, turns=3, system_tokens=100, turn_tokens=20, output=10)
    assert len(made) == 18
    assert [len(prompt(item)) for item in made[::6]] == [120, 150, 180]
    assert all(item.prompt_tokens == len(prompt(item)) for item in made)
    assert common(prompt(made[0]), prompt(made[2])) == 100
    assert common(prompt(made[0]), prompt(made[1])) < 5
    assert prompt(made[6])[:120] == prompt(made[0])
    assert made[6].after == (0,) and made[0].after == ()


def test_a_chat_has_one_system_prompt() -> None:
    made = items("chat", conversations=3, turns=1, system_tokens=64)
    assert {common(prompt(made[0]), prompt(item)) for item in made[1:]} == {64}


def test_a_herd_shares_one_fresh_prefix_and_waits_for_the_one_before() -> None:
    made = items("herd", clients=3, herds=2, prefix_tokens=200, turn_tokens=16, output=4)
    assert common(prompt(made[0]), prompt(made[2])) == 200
    assert common(prompt(made[0]), prompt(made[3])) < 5
    assert [item.after for item in made] == [(), (), (), (0, 1, 2), (0, 1, 2), (0, 1, 2)]


def test_a_trace_is_scaled_in_time_and_length(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000, "input_length": 1024, "output_length": 100, "hash_ids": [1, 2]},
        {"timestamp": 3000, "input_length": 1324, "output_length": 0, "hash_ids": [1, 2, 9]},
    ]
    (tmp_path / "t").write_text("\n".join(map(json.dumps, rows)))
    first, second = items("trace", file=str(tmp_path / "t"), length_scale=0.25, time_scale=0.5)
    assert (first.at_s, second.at_s) == (0.0, 1.0)
    assert (len(prompt(first)), len(prompt(second))) == (256, 331)
    assert prompt(second)[:256] == prompt(first)
    assert (first.max_tokens, second.max_tokens) == (25, 1)
    assert set(prompt(second)) <= set(IDS)


REQUESTS = [
    {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "temperature": 0.5, "model": "gpt"},
    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [], "stream": False}},
    {"prompt": "Once", "max_tokens": 3},
]


def test_requests_of_a_file_are_sent_as_they_are_but_for_model_and_streaming(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("\n".join(map(json.dumps, REQUESTS)))
    made = items("jsonl", file=str(tmp_path / "r"), output=7)
    assert [item.path for item in made] == ["/chat/completions", "/chat/completions", "/completions"]
    assert [item.max_tokens for item in made] == [5, 7, 3]
    body = made[0].body()
    assert (body["model"], body["stream"], body["temperature"]) == ("m", True, 0.5)
    assert made[1].body()["max_tokens"] == 7


@pytest.mark.parametrize(
    ("line", "message"), [("{", "no JSON"), ("[]", "neither messages nor prompt"), ('{"x": 1}', "line 2")]
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "r").write_text(json.dumps(REQUESTS[0]) + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=message):
        items("jsonl", file=str(tmp_path / "r"))


# ---- sending it --------------------------------------------------------------------------------------


def test_a_closed_loop_never_has_more_than_k_requests_at_once(tmp_path: Path, url: str) -> None:
    samples = loaded(
        tmp_path / "r", url, "chat", users=3, conversations=6, turns=2, system_tokens=64, turn_tokens=16, output=8
    )
    assert len(samples) == 12 and not any(one.error for one in samples)
    edges = sorted(
        [(one.started_s, 1) for one in samples] + [(one.started_s + (one.e2e_s or 0), -1) for one in samples]
    )
    at_once = np.cumsum([step for _, step in edges])
    assert at_once.max() == 3
    for turn_1, turn_2 in zip(samples[:6], samples[6:], strict=True):
        assert turn_2.started_s >= turn_1.started_s + (turn_1.e2e_s or 0)
        assert turn_2.usage is not None and turn_2.usage.cached_tokens == 80


def test_a_turn_waits_for_the_answer_before_it_however_many_users_are_free(tmp_path: Path, url: str) -> None:
    samples = loaded(tmp_path / "r", url, "chat", users=9, conversations=2, turns=3, system_tokens=32, output=6)
    for before, after in zip(samples[:4], samples[2:], strict=True):
        assert after.started_s >= before.started_s + (before.e2e_s or 0)


def test_an_open_load_sends_when_it_is_due_whatever_is_answered(tmp_path: Path, url: str) -> None:
    samples = loaded(
        tmp_path / "r", url, "mix", rate=40.0, arrival="fixed", conversations=20, turns=1, system_tokens=64, output=60
    )
    assert [one.scheduled_s for one in samples] == pytest.approx([i / 40 for i in range(20)])
    late = [one.started_s - (one.scheduled_s or 0) for one in samples]
    assert min(late) > -0.001 and np.median(late) < 0.02
    assert sum(one.started_s < samples[0].started_s + (samples[0].e2e_s or 0) for one in samples) > 4


def test_a_herd_leaves_at_one_moment_and_the_report_says_what_hit(tmp_path: Path, url: str) -> None:
    samples = loaded(
        tmp_path / "r", url, "herd", clients=5, herds=3, prefix_tokens=160, turn_tokens=16, output=4, label="fake"
    )
    for herd in (samples[:5], samples[5:10], samples[10:]):
        assert max(one.started_s for one in herd) - min(one.started_s for one in herd) < 0.05
    report = make_report([tmp_path / "r"])
    assert report.verdict.headline.startswith("fake: herd, 5 at a time: 15 requests in ")
    assert {"load-waits", "load-rates", "load-cache", "load-client"} <= {table.name for table in report.tables}
    assert "plot-load" in as_html(report)


def test_a_trace_is_replayed_and_its_hits_are_real(tmp_path: Path, url: str) -> None:
    rows = [
        {"timestamp": 200 * i, "input_length": 512 * 3, "output_length": 80, "hash_ids": [1, 2, 100 + i]}
        for i in range(6)
    ]
    (tmp_path / "t").write_text("\n".join(map(json.dumps, rows)))
    samples = loaded(tmp_path / "r", url, "trace", file=str(tmp_path / "t"), length_scale=0.25, time_scale=0.5)
    assert [one.usage.cached_tokens if one.usage else None for one in samples] == [0] + [256] * 5
    assert [one.scheduled_s for one in samples] == pytest.approx([0.1 * i for i in range(6)])
    run = read_run(tmp_path / "r")
    assert run["finished"] is True
    counters = run["counters"]
    assert counters["after"]["hits"] - counters["before"]["hits"] == 5 * 256


def test_goodput_counts_what_kept_the_limits(tmp_path: Path, url: str) -> None:
    loaded(
        tmp_path / "r", url, "chat", users=1, conversations=8, turns=1, system_tokens=2048, turn_tokens=16, output=8,
        ttft_limit_s=0.035, itl_limit_s=1.0,
    )  # fmt: skip
    (found,) = find_loads(read_runs([tmp_path / "r"]))
    goodput = found.goodput
    assert goodput is not None and goodput.n_all == 8
    assert goodput.n_good in (5, 6, 7)  # the first prompt takes 46 ms, the others 5.3
    assert "kept the limits (first token within 35.0 ms, between tokens within 1,000 ms)" in (
        make_report([tmp_path / "r"]).verdict.headline
    )


def sample(**changes: Any) -> Sample:
    plain: dict[str, Any] = {
        "kind": "load",
        "cell": {"load": "x"},
        "role": "request",
        "repeat": 0,
        "request": {"prompt_tokens": 10, "max_tokens": 3},
        "started_s": 1.0,
        "scheduled_s": 1.0,
        "events_s": [0.1, 0.2, 0.4],
        "ttft_s": 0.1,
        "e2e_s": 0.4,
        "usage": Usage(10, 3, 0),
    }
    return Sample(**{**plain, **changes})


def test_limits_are_kept_or_not() -> None:
    one = reading("x", sample())
    assert within(one, 0.1, 0.151) and within(one, None, None)
    assert not within(one, 0.099, None)
    assert not within(one, None, 0.149)
    assert not within(reading("x", sample(error="no")), None, None)
    assert within(reading("x", sample(events_s=[0.1], e2e_s=0.1, usage=Usage(10, 1, 0))), None, 0.0001)


def test_goodput_has_wilsons_interval() -> None:
    share, low, high = Goodput(9, 10, 1.0, None).share
    assert (share, low, high) == pytest.approx((0.9, 0.596, 0.982), abs=0.001)


def test_a_client_that_sends_late_is_called_the_bottleneck(tmp_path: Path) -> None:
    from headwater.bench.results import ResultsWriter, write_run

    write_run(tmp_path, {"kind": "load"})
    with ResultsWriter(tmp_path) as writer:
        for i in range(20):
            writer.write(sample(repeat=i, started_s=1.2, label="slow client"))
    report = make_report([tmp_path])
    assert "The measuring side was the bottleneck" in report.verdict.headline
    assert [flag.name for flag in report.flags] == ["client lag"]


# ---- when it goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trace"], "needs a file"),
        (["mix", "file"], "FILE changes nothing in 'mix'"),
        (["mix", "--clients", "3"], "--clients changes nothing in 'mix': it is for herd"),
        (["herd", "--users", "3"], "its size is --clients"),
        (["mix", "--arrival", "poisson"], "needs --rate"),
        (["mix", "--rate", "1", "--users", "3"], "--users is for --arrival closed"),
        (["chat", "--arrival", "trace"], "needs the workload trace"),
        (["jsonl", "no-such-file"], "there is no file"),
        (["mix", "--url", "http://127.0.0.1:1"], "no server answers"),
        (["mix", "--url", "nonsense://x"], "is no address"),
    ],
)
def test_bad_arguments_are_refused_at_once(tmp_path: Path, words: list[str], message: str) -> None:
    arguments = parse(["bench", "load", *words, "--out", str(tmp_path / "r")])
    with pytest.raises((ConfigError, BenchError), match=message):
        arguments.run(arguments)
    assert not (tmp_path / "r").exists()


def test_what_the_context_cannot_hold_is_refused_or_left_out(tmp_path: Path, url: str) -> None:
    rows = [
        {"timestamp": 0, "input_length": n, "output_length": 2, "hash_ids": list(range(-(-n // 512)))}
        for n in (600, 9000)
    ]
    (tmp_path / "t").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(
        ConfigError, match=r"1 of 2 requests are longer than the 8192 tokens.*all fit with --length-scale 0\.9"
    ):
        loaded(tmp_path / "r", url, "trace", file=str(tmp_path / "t"))
    assert len(loaded(tmp_path / "r", url, "trace", file=str(tmp_path / "t"), skip_too_long=True)) == 1
    assert any("were left out" in text for text in read_run(tmp_path / "r")["flags"])


def test_failed_requests_are_counted_and_the_others_kept(tmp_path: Path, url: str) -> None:
    rows = [{"prompt": f"request {i}", "max_tokens": 3, **({"fault": "error"} if i == 4 else {})} for i in range(8)]
    (tmp_path / "q").write_text("\n".join(map(json.dumps, rows)))
    samples = loaded(tmp_path / "r", url, "jsonl", file=str(tmp_path / "q"), users=2)
    assert [one.repeat for one in samples if one.error is not None] == [4]
    report = make_report([tmp_path / "r"])
    assert "8 requests in" in report.verdict.headline and "1 of them failed" in report.verdict.headline
    assert "errors" in {flag.name for flag in report.flags}


def test_a_server_that_dies_ends_the_load_with_what_was_answered(tmp_path: Path) -> None:
    with (
        fake_server("--fault", "die@20") as url,
        pytest.raises(BenchError, match="the server is gone"),
    ):
        loaded(tmp_path / "r", url, "chat", conversations=40, turns=1, system_tokens=32, users=1, output=4)
    kept = read_samples(tmp_path / "r")
    assert any(one.error is None for one in kept) and any(one.error for one in kept)
    assert read_run(tmp_path / "r")["finished"] is False


def test_interrupted_it_keeps_what_was_answered(tmp_path: Path, url: str) -> None:
    folder = tmp_path / "r"
    words = [
        "load",
        "chat",
        "--url",
        url,
        "--conversations",
        "400",
        "--turns",
        "1",
        "--output",
        "30",
        "--out",
        str(folder),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "headwater", "bench", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 30
    while not (folder / "results.jsonl").exists() or (folder / "results.jsonl").stat().st_size < 2000:
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130, errors
    assert "stopped; what was answered is in" in errors
    n = len(read_samples(folder))
    assert 0 < n < 400
    assert read_run(folder)["finished"] is False
    assert "unfinished" in {flag.name for flag in make_report([folder]).flags}
