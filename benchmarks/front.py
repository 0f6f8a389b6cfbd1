"""What HTTP, tokenising and detokenising take from the engine, on the cores that they share.

    python benchmarks/front.py
    python benchmarks/front.py --streams 16 --repeats 5 -- --dtype float32

Requests decode in a real server, over HTTP, in three ways that take turns: answered in one piece; as streams, an event
for every token; and as streams while somebody has long texts tokenised one after another (explained, not computed).
Of each: the time of a step's model part by the server's own clock, which grows when its cores are taken from it; the
time of a whole step; and how busy the front's process, the engine's and this client's were, in per cent of a core.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import statistics
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from first_token import server

WORDS = ("river", "stone", "of the", "and", "seven", "lamps", "under", "harbour", "quiet", "morning", "Lützow", "1729")
LONG_TEXT_WORDS = 4000
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Figures:
    """Milliseconds of a step and of its model part; per cent of a core of three processes."""

    step_ms: float
    model_ms: float
    front: float
    engine: float
    client: float


def ask(url: str, path: str, body: dict[str, object]) -> None:
    """Send ``body`` and read the answer to its end, which costs little: nothing is parsed."""
    address = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    while answer.read(1 << 16):
        pass
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{path} was answered with {answer.status}")


def step_sums(url: str) -> tuple[float, float, float]:
    """Steps so far, their seconds, and those of their model parts."""
    with urllib.request.urlopen(f"{url}/metrics") as response:
        text = response.read().decode()

    def value(name: str) -> float:
        return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name + "{"))

    return (
        value("headwater_step_seconds_count"),
        value("headwater_step_seconds_sum"),
        value("headwater_step_model_seconds_sum"),
    )


def children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def decode(url: str, streams: int, n_tokens: int, *, stream: bool) -> None:
    """``streams`` requests of ``n_tokens`` tokens each, at once."""
    body = {
        "prompt": "Once upon a time",
        "max_tokens": n_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": stream,
    }
    askers = [threading.Thread(target=ask, args=(url, "/v1/completions", body)) for _ in range(streams)]
    for each in askers:
        each.start()
    for each in askers:
        each.join()


def beside_tokenising(url: str, work: Callable[[], None], text: str) -> None:
    """``work`` while long texts are tokenised, one after another."""
    over = threading.Event()

    def tokenise() -> None:
        while not over.is_set():
            ask(url, "/v1/explain", {"prompt": text})

    other = threading.Thread(target=tokenise)
    other.start()
    try:
        work()
    finally:
        over.set()
        other.join()


def measure(url: str, front: int, engine: int, work: Callable[[], None]) -> Figures:
    steps, step_s, model_s = step_sums(url)
    before = [cpu_s(pid) for pid in (front, engine, os.getpid())]
    began = time.perf_counter()
    work()
    wall = time.perf_counter() - began
    after = [cpu_s(pid) for pid in (front, engine, os.getpid())]
    steps_now, step_s_now, model_s_now = step_sums(url)
    n_steps = steps_now - steps
    busy = [100 * (b - a) / wall for a, b in zip(before, after, strict=True)]
    return Figures(1e3 * (step_s_now - step_s) / n_steps, 1e3 * (model_s_now - model_s) / n_steps, *busy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8, help="requests at a time (default 8)")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each (default 200)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("serve", nargs="*", help="options of `headwater serve`, after --")
    args = parser.parse_args()
    text = " ".join(random.Random(0).choices(WORDS, k=LONG_TEXT_WORDS))
    with server(args.serve) as url:
        front = children(os.getpid())[0]
        engine = children(front)[0]
        cases: dict[str, Callable[[], None]] = {
            "in one piece": lambda: decode(url, args.streams, args.tokens, stream=False),
            "streams": lambda: decode(url, args.streams, args.tokens, stream=True),
            "streams, tokenising": lambda: beside_tokenising(
                url, lambda: decode(url, args.streams, args.tokens, stream=True), text
            ),
        }
        found: dict[str, list[Figures]] = {name: [] for name in cases}
        decode(url, args.streams, args.tokens, stream=True)  # warm-up
        for i in range(args.repeats):
            for name, work in cases.items():
                found[name].append(measure(url, front, engine, work))
            print(f"repeat {i + 1} of {args.repeats}", flush=True)
    print(f"{args.streams} requests of {args.tokens} tokens at a time, medians of {args.repeats}")
    print(f"{'':20} {'step ms':>8} {'model ms':>9} {'(min to max)':>16} {'front':>7} {'engine':>7} {'client':>7}")
    for name, figures in found.items():
        step, model = (statistics.median(getattr(one, part) for one in figures) for part in ("step_ms", "model_ms"))
        spread = f"({min(f.model_ms for f in figures):.2f} to {max(f.model_ms for f in figures):.2f})"
        busy = [statistics.median(getattr(one, part) for one in figures) for part in ("front", "engine", "client")]
        print(f"{name:20} {step:8.2f} {model:9.2f} {spread:>16} " + " ".join(f"{share:6.0f}%" for share in busy))


if __name__ == "__main__":
    main()
