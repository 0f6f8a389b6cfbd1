"""One cell against a real server with the real model."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from headwater.bench.counters import cached_tokens, share
from headwater.bench.prefix import run_prefix
from headwater.bench.results import Sample, read_samples
from headwater.bench.settings import Settings


def test_one_cell_of_our_own_server(tmp_path: Path, model_file: Callable[[str], Path]) -> None:
    settings = Settings(
        model=str(model_file("smollm2-135m")),
        serve_args=shlex.join(["--threads", "1", "--kv-cache-memory-bytes", "64MiB", "--max-model-len", "512"]),
        prefixes=(128,),
        outputs=(3,),
        caching=("on",),
        interference=("none",),
        repeats=1,
    )
    run = run_prefix(settings, tmp_path, {}, [])
    assert run["finished"] and run["flags"] == []
    assert run["server"]["exporter"] == "headwater" and run["server"]["max_model_len"] == 512
    assert run["starts"][0]["warm"] is False
    by_role = {sample.role: sample for sample in read_samples(tmp_path)}
    assert set(by_role) == {"warm_up", "prime", "hit", "control", "first_differs", "other_salt"}
    assert {role: cached_of(sample) for role, sample in by_role.items()} == {
        **dict.fromkeys(by_role, (0, "counters")),
        "hit": (128, "counters"),
    }
    for sample in by_role.values():
        assert sample.error is None
        assert sample.usage is not None and sample.usage.prompt_tokens == 128 + 17
        assert sample.tokens_per_event == [1] * sample.request["max_tokens"]
        assert sample.server_timing is not None and sample.ttft_s is not None
        assert set(sample.server_timing) == {"queue_s", "prefill_s", "decode_s"}
        assert 0 < sample.server_timing["prefill_s"] < sample.ttft_s
        assert sample.counters_before is not None and sample.counters_after is not None
        counted = share(sample.counters_before, sample.counters_after)
        assert counted.computed is not None and counted.cached is not None
        assert counted.computed + counted.cached == 128 + 17


def cached_of(sample: Sample) -> tuple[int, str] | None:
    found = cached_tokens(sample)
    assert sample.usage is not None and found is not None
    assert sample.usage.cached_tokens == found[0]
    return found
