"""`headwater demo` with the real model, and that it leaves nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def test_the_demo_shows_hits_and_stops(model_file: Callable[[str], Path]) -> None:
    command = [sys.executable, "-m", "headwater", "demo", str(model_file("smollm2-135m")), "--requests", "2"]
    command += ["--threads", "1", "--max-model-len", "1024", "--kv-cache-memory-bytes", "64MiB"]
    env = {**os.environ, "COLUMNS": "100"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=env)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    rows = re.findall(r"│\s+(\d+) │\s+(\d+) │\s+(\d+) │\s+(\d+) │\s+(\d+) ms │\s+(\d\.\d\d) │", done.stdout)
    (_, prompt, cached, computed, _, _), (_, prompt_2, cached_2, computed_2, _, of_first) = rows
    assert (int(cached), int(computed)) == (0, int(prompt))
    assert int(cached_2) > 0.9 * int(prompt_2)
    assert int(cached_2) + int(computed_2) == int(prompt_2)
    assert float(of_first) < 0.5
    port = re.search(r"Serving on http://127\.0\.0\.1:(\d+)", done.stdout)
    assert port is not None
    listening = Path("/proc/net/tcp").read_text()
    assert f":{int(port[1]):04X} 00000000:0000 0A" not in listening
