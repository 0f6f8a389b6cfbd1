"""Speed of the prefix cache on one core: a 131,072-token prompt, 8,192 blocks of 16 tokens.

    python benchmarks/cache.py [--repeats N] [--clock wall|cpu] [--json]

Prints the minimum, median and maximum over the repeats, in milliseconds, and the target where there is one.
The garbage collector runs as it does in a server. On a machine that does other work the minimum says most;
--clock cpu counts the time of this thread only.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headwater.cache.key import TokenChain
from headwater.cache.prefix import PrefixCache
from headwater.config import CacheConfig
from headwater.types import GroupKind, GroupSpec, Namespace

BLOCK = 16
N_BLOCKS = 8192
N_TOKENS = BLOCK * N_BLOCKS
FULL = (GroupSpec(GroupKind.FULL, BLOCK),)
HYBRID = (*FULL, *(GroupSpec(GroupKind.SLIDING, BLOCK, window=512) for _ in range(5)))
NAMESPACE = Namespace(weights=b"w" * 32)


Clock = Callable[[], float]
Times = Callable[[random.Random, Clock], Iterator[float]]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.thread_time}


@dataclass(frozen=True)
class Case:
    name: str
    target_ms: float | None
    times: Times
    """Endless seconds, one per repeat; preparation is not in them."""


def prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(50_000) for _ in range(N_TOKENS)]


def cache_of(groups: tuple[GroupSpec, ...], n_blocks: int, algorithm: str = "sha256") -> PrefixCache:
    return PrefixCache(groups, n_blocks, config=CacheConfig(block_size=BLOCK, hash_algo=algorithm))


def hashed(cache: PrefixCache, tokens: list[int]) -> TokenChain:
    chain = cache.chain(NAMESPACE, tokens)
    chain.keys(chain.n_units)
    return chain


def keys(algorithm: str) -> Times:
    """From a list of token ids to all keys."""

    def times(rng: random.Random, now: Clock) -> Iterator[float]:
        cache = cache_of(FULL, 1, algorithm)
        tokens = prompt(rng)
        while True:
            start = now()
            chain = cache.chain(NAMESPACE, tokens)
            chain.keys(chain.n_units)
            yield now() - start

    return times


def look_up(groups: tuple[GroupSpec, ...]) -> Times:
    """8,192 proven hits (keys known: the chain has hashed them)."""

    def times(rng: random.Random, now: Clock) -> Iterator[float]:
        cache = cache_of(groups, N_BLOCKS * len(groups))
        tokens = prompt(rng)
        first = hashed(cache, tokens)
        holding = cache.claim(first, cache.lookup(first), "first")
        cache.allocate(holding, N_TOKENS)
        cache.publish(first, holding, N_TOKENS)
        cache.release(holding)
        chain = hashed(cache, [*tokens, 1])
        while True:
            start = now()
            lookup = cache.lookup(chain)
            yield now() - start
            if lookup.n_hit != N_TOKENS:
                raise SystemExit(f"expected {N_TOKENS} tokens to hit, got {lookup.n_hit}")

    return times


def life(part: str, groups: tuple[GroupSpec, ...] = FULL) -> Times:
    """One part of: claim a hit, or allocate + publish cold, or release, all 8,192 blocks (of each group)."""

    def times(rng: random.Random, now: Clock) -> Iterator[float]:
        tokens = prompt(rng)
        while True:
            cache = cache_of(groups, N_BLOCKS * len(groups))
            chain = hashed(cache, [*tokens, 1])
            holding = cache.claim(chain, cache.lookup(chain), "a")
            marks = [now()]
            cache.allocate(holding, N_TOKENS)
            cache.publish(chain, holding, N_TOKENS)
            marks.append(now())
            cache.release(holding)
            marks.append(now())
            lookup = cache.lookup(chain)
            marks.append(now())
            cache.claim(chain, lookup, "b")
            marks.append(now())
            at = {"allocate + publish": 0, "release": 1, "claim": 3}[part]
            yield marks[at + 1] - marks[at]

    return times


def evicting(part: str) -> Times:
    """The pool is full of another prompt's blocks: each new block evicts one."""

    def times(rng: random.Random, now: Clock) -> Iterator[float]:
        cache = cache_of(FULL, N_BLOCKS)
        while True:
            chain = hashed(cache, prompt(rng))
            marks = [now()]
            lookup = cache.lookup(chain)
            holding = cache.claim(chain, lookup, "a")
            cache.allocate(holding, N_TOKENS)
            cache.publish(chain, holding, N_TOKENS)
            marks.append(now())
            cache.release(holding)
            marks.append(now())
            at = {"admit": 0, "release": 1}[part]
            yield marks[at + 1] - marks[at]

    return times


CASES = (
    Case("keys, sha256", 7.0, keys("sha256")),
    Case("keys, xxh3_128", 3.0, keys("xxh3_128")),
    Case("look-up of 8,192 proven hits", 4.0, look_up(FULL)),
    Case("allocate + publish 8,192 blocks", 12.0, life("allocate + publish")),
    Case("release 8,192 blocks", 1.2, life("release")),
    Case("claim 8,192 blocks", None, life("claim")),
    Case("evicting: look-up + claim + allocate + publish", None, evicting("admit")),
    Case("evicting: release", None, evicting("release")),
    Case("1 full + 5 sliding groups: look-up", None, look_up(HYBRID)),
    Case("1 full + 5 sliding groups: allocate + publish", None, life("allocate + publish", HYBRID)),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    rows = []
    for case in CASES:
        times = case.times(random.Random(0), CLOCKS[options.clock])
        next(times)  # warm-up
        ms = sorted(next(times) * 1e3 for _ in range(options.repeats))
        median = statistics.median(ms)
        rows.append({"case": case.name, "min": ms[0], "median": median, "max": ms[-1], "target": case.target_ms})
    where = f"Python {platform.python_version()}, {platform.processor() or platform.machine()}"
    if options.json:
        print(
            json.dumps({"unit": "ms", "repeats": options.repeats, "clock": options.clock, "where": where, "rows": rows})
        )
        return 0
    print(
        f"{N_TOKENS} tokens, {N_BLOCKS} blocks of {BLOCK}; {options.clock} ms over {options.repeats} repeats; {where}\n"
    )
    print(f"{'':<48}{'min':>8}{'median':>8}{'max':>8}{'target':>8}")
    for row in rows:
        target = "" if row["target"] is None else f"{row['target']:.1f}"
        print(f"{row['case']:<48}{row['min']:>8.2f}{row['median']:>8.2f}{row['max']:>8.2f}{target:>8}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
