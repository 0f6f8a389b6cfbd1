"""Whole sweeps against the fake server, with everything that may go wrong with it."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from headwater.bench.counters import cached_tokens
from headwater.bench.prefix import resume_prefix, run_prefix
from headwater.bench.results import RESULTS, Sample, read_run, read_samples
from headwater.bench.server import free_port
from headwater.bench.settings import Settings
from headwater.errors import BenchError, ConfigError
from tests.bench.fake_server import ROOT, command, fake_server

SMALL: dict[str, Any] = {"prefixes": (32, 64), "outputs": (1, 3), "repeats": 2}


def start_command(*options: str, flags: str = "{caching_flags} {pool_flags}") -> str:
    return f"env PYTHONPATH={ROOT}:{ROOT / 'src'} {shlex.join(command(*options))} {flags}".replace("'", "")


def sweep(folder: Path, *options: str, **settings: Any) -> tuple[dict[str, Any], list[Sample]]:
    given = Settings(start_command=start_command(*options), **{**SMALL, **settings})
    return run_prefix(given, folder, {}, ["headwater"]), read_samples(folder)


def hits(samples: list[Sample], role: str) -> set[tuple[int, int | None]]:
    """(prefix, cached) of all requests of a role."""
    found = [(sample.cell["prefix"], cached_tokens(sample)) for sample in samples if sample.role == role]
    return {(prefix, told[0] if told is not None else None) for prefix, told in found}


ONE = {"caching": ("on",), "interference": ("none",)}


def test_the_whole_experiment(tmp_path: Path) -> None:
    run, samples = sweep(tmp_path)
    assert run["finished"] and run["flags"] == []
    assert [sample.error for sample in samples] == [None] * len(samples)
    by = Counter((s.cell["caching"], s.cell["interference"], s.role) for s in samples)
    cells = 4 * 2  # of 2 repeats
    assert by["on", "none", "prime"] == by["on", "none", "hit"] == by["on", "none", "control"] == cells
    assert by["on", "none", "first_differs"] == by["on", "none", "other_salt"] == 2
    assert by["on", "evicting", "hit"] == by["on", "evicting", "control"] == cells
    assert by["on", "evicting", "evicted"] == 2
    assert by["on", "evicting", "interference"] >= 2
    for interference in ("none", "evicting"):
        assert by["off", interference, "prime"] == by["off", interference, "off"] == cells
    assert len(run["starts"]) == 4
    assert [start["warm"] for start in run["starts"]] == [False] * 4

    calm = [sample for sample in samples if sample.cell["interference"] == "none"]
    flooded = [sample for sample in samples if sample.cell["interference"] == "evicting"]
    assert hits([s for s in calm if s.cell["caching"] == "on"], "hit") == {(32, 32), (64, 64)}
    for role in ("control", "prime", "first_differs", "other_salt", "off", "evicted"):
        assert {cached for _, cached in hits(samples, role)} == {0}
    assert hits(flooded, "hit") == {(32, 0), (64, 0)}
    assert run["evicted"] == {"asked": 10, "told": 10, "still_cached": 0}

    for sample in samples:
        assert sample.usage is not None and sample.tokens_per_event is not None
        assert sample.usage.prompt_tokens == sample.request["prompt_tokens"]
        assert sum(sample.tokens_per_event) == sample.request["max_tokens"] == sample.usage.completion_tokens
        assert sample.counters_before is not None and sample.counters_after is not None
        assert sample.server_timing is not None and sample.server_timing["queue_s"] == pytest.approx(0.001)
    prefixes = [s.request["prompt_tokens"] for s in samples if s.role in ("hit", "control", "off", "prime")]
    assert set(prefixes) == {32 + 17, 64 + 17}


def test_times_are_the_servers(tmp_path: Path) -> None:
    """Against the times at which the server says that it sent: a busy machine makes some requests late on the way, a
    wrong clock all of them; so the best quarter must agree."""
    log = tmp_path / "log"
    options = ("--base-ms", "10", "--token-ms", "0.1", "--itl-ms", "4", "--log", str(log))
    _, samples = sweep(tmp_path / "run", *options, **ONE, outputs=(4,), repeats=5)
    records = [json.loads(line) for line in log.read_text().splitlines()][-len(samples) :]
    late, apart = [], []
    for sample, record in zip(samples, records, strict=True):
        assert sample.ttft_s is not None and sample.request["prompt_tokens"] == record["prompt"]
        first_s = record["times"][0] - record["begun"]
        assert first_s >= 0.010 + 0.0001 * (record["prompt"] - record["cached"])
        late.append(sample.ttft_s - first_s)
        apart.append(abs(median(gaps(sample)) - median(b - a for a, b in pairwise(record["times"]))))
    assert min(late) > 0
    assert sorted(late)[len(late) // 4] < 0.002
    assert sorted(apart)[len(apart) // 4] < 0.002


def gaps(sample: Sample) -> list[float]:
    return [after - before for before, after in pairwise(sample.events_s)]


def test_a_server_without_counters_is_measured_by_its_usage(tmp_path: Path) -> None:
    run, samples = sweep(tmp_path, "--counters", "none", **ONE)
    assert hits(samples, "hit") == {(32, 32), (64, 64)}
    assert {told[1] for s in samples if (told := cached_tokens(s)) is not None} == {"usage"}
    assert any("exports no counters" in flag for flag in run["flags"])
    assert run["starts"][0]["warm"] is None


def test_vllms_counters_late_and_without_usage_of_the_cache(tmp_path: Path) -> None:
    options = ("--counters", "vllm", "--counters-late-ms", "40", "--no-cached-usage")
    run, samples = sweep(tmp_path, *options, **ONE, repeats=1)
    assert hits(samples, "hit") == {(32, 32), (64, 64)}
    assert hits(samples, "control") == {(32, 0), (64, 0)}
    assert run["server"]["exporter"] == "vllm"


def test_a_plain_server_that_takes_texts_only(tmp_path: Path) -> None:
    options = ("--text-only", "--bos", "1", "--salt", "refused", "--no-counts", "--long-words", "river,milk")
    run, samples = sweep(tmp_path, *options, **ONE, repeats=1)
    assert {s.request["prompt_tokens"] for s in samples if s.role == "hit"} == {49, 81}
    assert all(s.usage is not None and s.usage.prompt_tokens == s.request["prompt_tokens"] for s in samples)
    assert hits(samples, "hit") == {(32, 32), (64, 64)}
    assert not [s for s in samples if s.role == "other_salt"]
    said = " ".join(run["flags"])
    assert "no token ids" in said and "refuses cache_salt" in said and "events do not tell" in said


def test_a_warm_server_is_flagged_and_an_ignored_salt_shows_as_a_hit(tmp_path: Path) -> None:
    run, samples = sweep(tmp_path, "--warm", "--salt", "ignored", **ONE, repeats=1)
    assert run["starts"][0]["warm"] is True
    assert any("was not fresh (500 tokens had been looked up" in flag for flag in run["flags"])
    assert hits(samples, "other_salt") == {(64, 64)}


def test_interference_that_does_not_evict_is_reported(tmp_path: Path) -> None:
    run, _ = sweep(tmp_path, "--never-evicts", caching=("on",), interference=("evicting",), repeats=1)
    assert run["evicted"]["still_cached"] == 5
    assert any("interference did not evict: 5 of 5" in flag for flag in run["flags"])


def test_a_running_server_is_measured_as_far_as_possible(tmp_path: Path) -> None:
    settings = {"prefixes": (32,), "outputs": (1,), "repeats": 2}
    with fake_server() as url:
        run = run_prefix(Settings(url=url, **settings), tmp_path / "on", {}, [])
        again = run_prefix(Settings(url=url, **settings), tmp_path / "again", {}, [])
    assert hits(read_samples(tmp_path / "on"), "hit") == {(32, 32)}
    assert hits(read_samples(tmp_path / "again"), "control") == {(32, 0)}  # fresh prefixes in spite of an equal seed
    assert run["starts"][0]["warm"] is False
    assert any("caching off was not measured" in flag for flag in run["flags"])
    assert again["starts"][0]["warm"] is True
    with fake_server("--no-enable-prefix-caching") as url:
        run_prefix(Settings(url=url, **settings), tmp_path / "off", {}, [])
    assert {s.role for s in read_samples(tmp_path / "off")} == {"warm_up", "prime", "off"}


def test_a_quick_sweep_is_cut_to_its_time_and_still_evicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest prefix costs half a second, so it goes; by then the first server runs with the pool made for it."""
    monkeypatch.setattr("headwater.bench.prefix.QUICK_S", 5.0)
    chosen = {"caching": ("on",), "interference": ("evicting",), "repeats": 5, "quick": True}
    begun = time.monotonic()
    run, _ = sweep(tmp_path, "--token-ms", "1", prefixes=(32, 512), outputs=(1,), **chosen)
    assert time.monotonic() - begun < 20
    assert list(run["plan"]["prefixes"]) == [32]
    assert any("too slow for everything" in flag for flag in run["flags"])
    assert run["evicted"]["asked"] > 0 and run["evicted"]["still_cached"] == 0


# ---- failures ----------------------------------------------------------------------------------------


def test_broken_answers_are_errors_and_the_sweep_goes_on(tmp_path: Path) -> None:
    faults = {"broken": 20, "cut": 23, "error": 27, "reset": 31, "stall": 36}
    options = [word for kind, at in faults.items() for word in ("--fault", f"{kind}@{at}")]
    run, samples = sweep(tmp_path, *options, **ONE, prefixes=(32,), outputs=(3,), repeats=6, stall_s=0.4)
    errors = [sample.error for sample in samples if sample.error is not None]
    assert len(errors) == len(faults)
    said = ("is no JSON", "ended inside an event", "the engine is on fire", "connection broke", "silent for 0.4 s")
    assert [known for known in said if any(known in error for error in errors)] == list(said)
    assert all(len(sample.events_s) == 1 for sample in samples if sample.error is not None)
    assert any(flag.startswith("5 requests failed") for flag in run["flags"])
    # The requests after a failed one are counted rightly.
    assert {cached for _, cached in hits([s for s in samples if s.error is None], "hit")} == {32}
    failed = {sample.repeat for sample in samples if sample.error is not None and sample.role != "warm_up"}
    resume_prefix(tmp_path, {})  # repeats the trials that failed, or fails with the same requests again
    again = {sample.repeat for sample in read_samples(tmp_path) if sample.attempt == 1 and sample.role == "prime"}
    assert again == failed


def test_a_sweep_that_is_complete_is_not_resumed(tmp_path: Path) -> None:
    sweep(tmp_path, **ONE, prefixes=(32,), outputs=(1,), repeats=1)
    with pytest.raises(BenchError, match="is complete"):
        resume_prefix(tmp_path, {})


def test_a_server_that_dies_is_started_again(tmp_path: Path) -> None:
    options = ("--fault", "die@30", "--fault-once", str(tmp_path / "died"))
    run, samples = sweep(tmp_path / "run", *options, **ONE, outputs=(3,), repeats=4)
    assert run["finished"]
    errors = [sample.error for sample in samples if sample.error is not None]
    assert 1 <= len(errors) <= 2
    assert any("ended in the middle and was started again" in flag for flag in run["flags"])
    whole = Counter((s.cell["prefix"], s.repeat, s.attempt) for s in samples if s.role == "hit" and s.error is None)
    assert {(prefix, repeat) for prefix, repeat, _ in whole} == {(p, r) for p in (32, 64) for r in range(4)}


def test_a_server_that_always_dies_ends_the_sweep_with_its_output(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"the server is gone: .*; its output is in .*server-caching-on"):
        sweep(tmp_path, "--fault", "die@20", **ONE, outputs=(3,), repeats=20)


def test_answers_that_all_fail_end_the_sweep(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="3 requests in a row failed, the last with: HTTP 500: it broke"):
        sweep(tmp_path, "--fault", "http500@20+", **ONE)


def spawn(folder: Path, *more: str) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-m", "headwater", "bench", "prefix", *more]
    return subprocess.Popen(arguments, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def n_lines(folder: Path) -> int:
    path = folder / RESULTS
    return path.read_bytes().count(b"\n") if path.exists() else 0


def stop_after(process: subprocess.Popen[str], folder: Path, lines: int, number: signal.Signals) -> str:
    end = time.monotonic() + 60
    while n_lines(folder) < lines:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    return said


def servers_on(folder: Path) -> list[int]:
    """Processes that a log of this folder names by their port."""
    ports = {found for log in folder.glob("*.log") for found in re.findall(r"--port (\d+)", log.read_text())}
    running = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode().split("\0")
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if "--port" in words and words[words.index("--port") + 1] in ports and state != "Z":
            running.append(int(process.name))
    return running


@pytest.mark.skipif(not Path("/proc").exists(), reason="finds processes by /proc")
def test_kill_9_loses_the_request_in_flight_and_resume_does_the_rest(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command_line = start_command("--itl-ms", "4", flags="{caching_flags}")
    options = ["--start-command", command_line, "--prefixes", "32", "--outputs", "1,9", "--repeats", "4"]
    process = spawn(tmp_path, *options, "--interference", "none", "--caching", "on", "--out", str(folder))
    stop_after(process, folder, 20, signal.SIGKILL)
    before = read_samples(folder)
    assert 20 <= len(before) <= 24
    assert not read_run(folder)["finished"]
    end = time.monotonic() + 20
    while servers_on(folder) and time.monotonic() < end:
        time.sleep(0.05)
    assert servers_on(folder) == []
    with (folder / RESULTS).open("ab") as file:
        file.write(b'{"kind":"prefix","cell":{"pre')  # what a kill in the middle of a write leaves
    resume_prefix(folder, {})
    after = read_samples(folder)
    assert after[: len(before)] == before
    assert {sample.attempt for sample in after[len(before) :]} == {1}
    for role in ("hit", "control", "first_differs"):
        done = {(s.cell["output"], s.repeat) for s in after if s.role == role}
        outputs = (1,) if role == "first_differs" else (1, 9)
        assert done == {(output, repeat) for output in outputs for repeat in range(4)}
    n_primes = sum(sample.role == "prime" for sample in after)
    assert 8 <= n_primes <= 9  # only the trial that was cut is repeated
    assert hits(after, "hit") == {(32, 32)}


def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = [
        "--start-command",
        start_command("--itl-ms", "4"),
        "--prefixes",
        "32",
        "--outputs",
        "9",
        "--caching",
        "on",
    ]
    process = spawn(tmp_path, *options, "--interference", "none", "--out", str(folder))
    said = stop_after(process, folder, 12, signal.SIGINT)
    assert process.returncode == 130
    assert f"headwater bench prefix --resume {folder}" in said.replace("\n", " ")
    assert servers_on(folder) == []
    assert "Traceback" not in said


# ---- refused at once ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"start_command": "vllm serve m {caching_flags} {pool_flags}"}, "must say {port}"),
        ({"start_command": "serve {port} {pool_flags}"}, "says nothing of caching, which is to be on and off"),
        ({"start_command": "serve {port} {caching_flags}"}, "says nothing of interference"),
        ({"start_command": "serve {port} {cachingflags}"}, "unknown placeholder {cachingflags}"),
        ({"start_command": "serve '{port}"}, "cannot be read"),
        ({"url": "http://127.0.0.1:1", "start_command": "x {port}"}, "give one of them"),
        ({"url": "http://127.0.0.1:1", "caching": ("on",)}, "use --start-command instead"),
        ({"url": "http://127.0.0.1:99999"}, "is no address"),
        ({"url": "ftp://x"}, "is no address"),
        ({"url": "http://127.0.0.1:1", "model": "m"}, "for Headwater's own server"),
        ({"evicting_blocks": 10}, "hold 160 tokens, and the longest request has 2321: give at least 146"),
    ],
)
def test_what_can_only_fail_is_refused_before_anything_starts(
    tmp_path: Path, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        run_prefix(Settings(**settings), tmp_path / "run", {}, [])
    assert not (tmp_path / "run").exists()


def test_nobody_at_the_url(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no server answers at http"):
        run_prefix(Settings(url=f"http://127.0.0.1:{free_port()}"), tmp_path / "run", {}, [])
    assert not (tmp_path / "run").exists()


def test_a_prefix_over_the_models_limit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prefix 9000 \+ question 17 \+ output 1 = 9018 tokens, but fake takes 8192"):
        sweep(tmp_path, prefixes=(9000,), outputs=(1,), **ONE)
    assert n_lines(tmp_path) == 0


def test_a_pool_that_is_too_small_for_the_prefix_names_its_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give more --evicting-blocks"):
        sweep(tmp_path, "--max-model-len", "60")


def test_a_command_that_cannot_start_shows_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"(?s)ended before it answered.*unrecognized arguments: --nonsense"):
        sweep(tmp_path, "--nonsense", **ONE)
    failing = Settings(start_command="/no/such/program {port} {caching_flags} {pool_flags}")
    with pytest.raises(BenchError, match="cannot run /no/such/program"):
        run_prefix(failing, tmp_path / "other", {}, [])


def test_a_bad_flag_of_a_later_start_shows_at_once(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="unrecognized arguments: --caching-is-off"):
        sweep(tmp_path, caching_off_flags="--caching-is-off", interference=("none",))
    assert n_lines(tmp_path) == 0


def test_a_folder_with_results_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / RESULTS).write_text("{}\n")
    with pytest.raises(ConfigError, match="holds results already"):
        sweep(tmp_path, **ONE)
    with pytest.raises(BenchError, match="holds no results"):
        resume_prefix(tmp_path / "nowhere", {})


def test_the_flags_of_the_own_server() -> None:
    settings = Settings(model="my model.gguf", serve_args="--threads 1")
    plan = settings.plan()
    commands = {(s.caching, s.interference): settings.command(s, 1234, plan) for s in plan.starts}
    assert len(commands) == 4
    assert commands["on", "none"][1:] == [
        *("-m", "headwater", "serve", "my model.gguf", "--port", "1234", "--enable-prefix-caching", "--threads", "1")
    ]
    n_blocks = str(plan.pool_blocks(16))
    assert commands["off", "evicting"][-5:] == [
        "--no-enable-prefix-caching",
        "--num-blocks",
        n_blocks,
        "--threads",
        "1",
    ]
