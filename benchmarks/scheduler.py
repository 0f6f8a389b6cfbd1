"""Host time of a step outside the model: plan, apply, and with them detokenising, with a runner that does nothing.

    python benchmarks/scheduler.py

Prints the median microseconds per decode step, at batch 8 and 64, for the scheduler alone (plan + apply) and for the
whole EngineCore.step (deltas and the snapshot of the figures included).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from headwater.cache.prefix import PrefixCache
from headwater.config import CacheConfig, SchedulerConfig
from headwater.engine.core import EngineCore
from headwater.engine.messages import EngineInfo, Submit
from headwater.sched.scheduler import Scheduler
from headwater.step import RowResult, StepPlan, StepResult
from headwater.types import GroupKind, GroupSpec, Namespace, SamplingParams

GROUPS = {
    "one full group": (GroupSpec(GroupKind.FULL, 16),),
    "Gemma 3 270M (1 full, 5 sliding)": (
        GroupSpec(GroupKind.FULL, 16),
        *(GroupSpec(GroupKind.SLIDING, 16, window=512) for _ in range(5)),
    ),
}
N_STEPS = 600
N_PROMPT = 600


class NullRunner:
    """Samples 97 for every row that is complete; knows only how many tokens each row has."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}
        self.seconds = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        start = time.perf_counter()
        for request_id in plan.removed:
            self._known.pop(request_id, None)
        for added in plan.added:
            self._known[added.request_id] = len(added.tokens)
        rows = []
        for row in (*plan.continued, *plan.added):
            if row.n_computed + row.n_new == self._known[row.request_id]:
                self._known[row.request_id] += 1
                rows.append(RowResult(row.request_id, (97,)))
            else:
                rows.append(RowResult(row.request_id))
        self.seconds += time.perf_counter() - start
        return StepResult(plan.step, tuple(rows))


def build(groups: tuple[GroupSpec, ...], n_rows: int) -> tuple[EngineCore, Scheduler, NullRunner]:
    n_blocks = 200 * len(groups) * n_rows
    cache = PrefixCache(groups, n_blocks, config=CacheConfig())
    config = SchedulerConfig(max_num_seqs=n_rows, max_num_batched_tokens=2048)
    scheduler = Scheduler(cache, config, max_model_len=8192)
    info: Any = EngineInfo(
        "m", "f", 8192, 256, 16, n_blocks, len(groups), 16, "-", 0, 1, True, "sha256", n_rows, 2048, True
    )
    tokenizer: Any = SimpleNamespace(
        token_bytes=lambda i: bytes((i,)), special_ids=frozenset(), eos_ids=frozenset({255}), vocab_size=256
    )
    runner = NullRunner()
    core = EngineCore(runner, scheduler, cache, tokenizer, info, namespace=Namespace(b"w"), rng=random.Random(0))
    for i in range(n_rows):
        prompt = [i % 200 + 1, *(j % 250 for j in range(N_PROMPT))]
        core.submit(Submit(f"r{i}", prompt, SamplingParams(temperature=0.0, max_tokens=None, stop=("zzz",))))
    while any(seq.n_generated == 0 for seq in scheduler.running()) or scheduler.n_waiting:
        core.step()
    return core, scheduler, runner


def timed(step: Callable[[], object], runner: NullRunner) -> float:
    """Median seconds per step, the null runner's own time taken off."""
    seconds = []
    for _ in range(N_STEPS):
        start, inside = time.perf_counter(), runner.seconds
        step()
        seconds.append(time.perf_counter() - start - (runner.seconds - inside))
    return statistics.median(seconds)


def main() -> None:
    print(f"{'groups':<34} {'batch':>5} {'plan + apply':>14} {'whole core step':>16}")
    for name, groups in GROUPS.items():
        for n_rows in (8, 64):
            core, scheduler, runner = build(groups, n_rows)
            whole = timed(core.step, runner)

            def alone(scheduler: Scheduler = scheduler, runner: NullRunner = runner) -> None:
                plan = scheduler.plan()
                if plan is not None:
                    scheduler.apply(runner.execute(plan))

            bare = timed(alone, runner)
            print(f"{name:<34} {n_rows:>5} {bare * 1e6:>11.0f} us {whole * 1e6:>13.0f} us")


if __name__ == "__main__":
    main()
