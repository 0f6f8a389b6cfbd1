"""Time to first token, cold against hit, through a real server process and HTTP.

    python benchmarks/first_token.py
    python benchmarks/first_token.py --prefix 512 --repeats 9 -- --dtype float32

Each repeat takes a prefix of random token ids that nobody has sent: cold sends it with 16 more, hit sends it
again with 16 others. Counters are read before and after each request, so that a hit is a hit. Options after ``--`` go
to `headwater serve`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SUFFIX = 16
WARM_UP = 256


@contextmanager
def server(options: list[str]) -> Iterator[str]:
    """A server on a free port; yields its URL."""
    command = [sys.executable, "-m", "headwater", "serve", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        if process.stdout is None:
            raise RuntimeError("no output to read the address from")
        for line in process.stdout:
            print(line, end="", flush=True)
            if (found := re.search(r"^Serving on (http://\S+)", line)) is not None:
                yield found[1]
                return
        raise RuntimeError("the server did not start")
    finally:
        process.terminate()
        process.wait()


def post(url: str, body: dict[str, Any]) -> tuple[float, int]:
    """Seconds to the first event of a streamed completion, and the cached tokens of its usage."""
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began = time.perf_counter()
    first_s = 0.0
    with urllib.request.urlopen(request) as response:
        for line in response:
            if line.startswith(b"data: {"):
                first_s = first_s or time.perf_counter() - began
                if (usage := json.loads(line[6:]).get("usage")) is not None:
                    return first_s, usage["prompt_tokens_details"]["cached_tokens"]
    raise RuntimeError("the stream ended without usage")


def complete(url: str, prompt: list[int]) -> tuple[float, int]:
    options = {"max_tokens": 1, "temperature": 0, "ignore_eos": True, "stream": True}
    return post(url, {"prompt": prompt, **options, "stream_options": {"include_usage": True}})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", type=int, default=2048, help="tokens of the shared prefix (default 2048)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("serve", nargs="*", help="options of `headwater serve`, after --")
    args = parser.parse_args()
    rng = random.Random(0)

    def ids(n: int) -> list[int]:
        return [rng.randrange(1000, 40_000) for _ in range(n)]

    cold_s, hit_s = [], []
    with server(args.serve) as url:
        complete(url, ids(WARM_UP))
        for i in range(args.repeats):
            prefix = ids(args.prefix)
            cold, cached = complete(url, prefix + ids(SUFFIX))
            hit, reused = complete(url, prefix + ids(SUFFIX))
            if cached or reused != args.prefix // 16 * 16:
                raise RuntimeError(f"expected 0 and {args.prefix} cached tokens, got {cached} and {reused}")
            cold_s.append(cold)
            hit_s.append(hit)
            print(f"repeat {i + 1}: cold {1e3 * cold:8.1f} ms   hit {1e3 * hit:8.1f} ms   {hit / cold:.3f}", flush=True)
    ratios = [hit / cold for cold, hit in zip(cold_s, hit_s, strict=True)]
    for name, values, scale, unit in (
        ("cold", cold_s, 1e3, " ms"),
        ("hit", hit_s, 1e3, " ms"),
        ("hit / cold", ratios, 1.0, ""),
    ):
        low, middle, high = (scale * f(values) for f in (min, statistics.median, max))
        print(f"{name:12} median {middle:9.3f}{unit}   min {low:9.3f}   max {high:9.3f}")


if __name__ == "__main__":
    main()
