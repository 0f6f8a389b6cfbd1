"""The reason that takes several groups of layers, for real: a tiny model with sliding windows, served as any other."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx

from tests.e2e.models import hybrid_model, write_folder
from tests.serve.harness import launched


def test_a_group_cannot_start_there(tmp_path: Path) -> None:
    """The full group still holds the beginning, but of a sliding one so much was evicted that it cannot start there."""
    folder = write_folder(tmp_path / "model", hybrid_model())
    command = [sys.executable, "-m", "headwater", "serve", str(folder), "--port", "0", "--threads", "1"]
    command += [
        "--kernels",
        "torch",
        "--dtype",
        "float32",
        "--num-blocks",
        "40",
        "--max-model-len",
        "48",
        "--block-size",
        "4",
    ]
    with launched([*command, "--no-partial-reuse", "--no-ui"], ready=r"^Serving on (http\S+)") as server:
        prompt = [5 + i % 40 for i in range(24)]
        reasons = []
        for n in range(1, 24):
            server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
            server.post("/v1/completions", {"prompt": [60 + n % 20] * (n + 20), "max_tokens": 1})
            foreseen = server.post("/v1/explain", {"prompt": prompt}).json()
            reasons.append(foreseen["stop"]["reason"])
            if reasons[-1] == "group_cannot_start":
                break
        assert reasons[-1] == "group_cannot_start", reasons
        body = {"prompt": prompt, "max_tokens": 1, "headwater": {"explain": True}}
        answer = server.post("/v1/completions", body)
        told = answer.json()["usage"]["headwater"]["prefix"]
        assert answer.headers["x-headwater-prefix"].endswith(" of=24 stop=group_cannot_start")
        assert httpx.get(f"{server.url}/v1/explain/{answer.json()['id']}").json()["runs"] == told["runs"]
        assert told["stop"]["group"] == foreseen["stop"]["group"] and told["stop"]["group"] is not None
        assert told["stop"]["sentence"].startswith(f"layer group {told['stop']['group']} holds too little to start")
        assert {"held"} <= {run["state"] for run in told["runs"]}
