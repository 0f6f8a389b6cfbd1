"""Milliseconds of a model step, and where they go: `python benchmarks/step.py`.

Cases: decode of 1 and 8 rows at contexts 128 and 2,048; a cold prefill of 2,048 tokens in chunks of 512; the
same with 2,032 tokens cached and 16 new. Medians of repeats. The split is measured in separate runs with a clock
around every operation, so its parts are a little larger than the whole without. On a machine that is busy with
other things set GOMP_SPINCOUNT=2000: OpenMP's threads otherwise spin for milliseconds at every operation while the
one they wait for is not scheduled.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from headwater.config import CacheConfig, SchedulerConfig
from headwater.kernels import LayerKV, RaggedBatch, TorchOps
from headwater.kernels.linear import PackedLinear
from headwater.kernels.probe import probe_row_invariance
from headwater.model.load import load_model, resolve_dtype
from headwater.model.resolve import resolve
from headwater.run.memory import available_memory, fit_blocks, plan_groups
from headwater.run.runner import Runner
from headwater.run.store import KVStore
from headwater.step import AddedRow, ContinuedRow, RowSampling, StepPlan, StepResult, TableStart

CHUNK = 512
PROMPT = 2048


class Clock:
    """Seconds per kind of operation, while ``running``."""

    def __init__(self) -> None:
        self.running = False
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if self.running:
            self.seconds[kind] += time.perf_counter() - began


class TimedLinear:
    """A packed product with a clock around it."""

    def __init__(self, inner: PackedLinear, clock: Clock) -> None:
        self.inner, self.clock = inner, clock

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        with self.clock.timed("linear"):
            return self.inner(x)


class TimedOps(TorchOps):
    """TorchOps with a clock around products and attention."""

    def __init__(self, dtype: torch.dtype, clock: Clock) -> None:
        super().__init__(dtype)
        self.clock = clock

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None, **options: Any) -> Any:
        return TimedLinear(super().pack_linear(weight, bias, **options), self.clock)

    def attention(self, q: torch.Tensor, batch: RaggedBatch, kv: LayerKV, **options: Any) -> torch.Tensor:
        with self.clock.timed("attention"):
            return super().attention(q, batch, kv, **options)


class Bench:
    """Rows over one pool; every row has its own pages for the whole context, so that steps need no new blocks."""

    def __init__(self, model: Path, dtype: str, repeats: int) -> None:
        self.clock = Clock()
        self.repeats = repeats
        ops = TimedOps(resolve_dtype(dtype), self.clock)
        self.model = load_model(model, ops)
        print(
            f"{model.name}, {ops.dtype}, {torch.get_num_threads()} threads; {probe_row_invariance(ops.linears).line()}"
        )
        spec = self.model.spec
        self.groups = plan_groups(spec, 16)
        self.blocks_each = (PROMPT + 64) // 16
        n_blocks = 8 * self.blocks_each * len(self.groups)
        layout = ops.kv_layout(spec.n_kv_heads, spec.head_dim, 16)
        fit_blocks(spec, self.groups, layout, CacheConfig(n_blocks=n_blocks), SchedulerConfig(), available_memory())
        self.runner = Runner(self.model, KVStore(self.groups, n_blocks, layout), self.groups)
        self.tokens = torch.randint(100, spec.vocab_size, (PROMPT + 64,), generator=torch.Generator().manual_seed(0))
        self.n_steps = 0

    def added(self, row: int, n_known: int, n_computed: int, n_new: int, sampling: RowSampling) -> AddedRow:
        n = self.blocks_each
        tables = tuple(
            TableStart(0, tuple(range((row * len(self.groups) + g) * n, (row * len(self.groups) + g + 1) * n)))
            for g in range(len(self.groups))
        )
        tokens = tuple(self.tokens[:n_known].tolist())
        return AddedRow(f"r{row}", tokens, n_computed, n_new, tables, sampling)

    def step(self, plan_rows: list[AddedRow | ContinuedRow], removed: tuple[str, ...] = ()) -> StepResult:
        self.n_steps += 1
        added = tuple(row for row in plan_rows if isinstance(row, AddedRow))
        continued = tuple(row for row in plan_rows if isinstance(row, ContinuedRow))
        result = self.runner.execute(StepPlan(self.n_steps, added, continued, removed))
        failed = [row.error for row in result.rows if row.error is not None]
        if failed:
            raise RuntimeError(failed[0])
        return result

    def prefill(self, n_cached: int) -> list[StepResult]:
        """One prompt from ``n_cached`` computed tokens to its first sampled token."""
        first = min(CHUNK, PROMPT - n_cached)
        results = [self.step([self.added(0, PROMPT, n_cached, first, RowSampling())])]
        later = range(n_cached + first, PROMPT, CHUNK)
        results += [self.step([ContinuedRow("r0", begin, CHUNK, self.no_blocks)]) for begin in later]
        self.step([], removed=("r0",))
        return results

    @property
    def no_blocks(self) -> tuple[tuple[int, ...], ...]:
        return tuple(() for _ in self.groups)

    def decodes(self, n_rows: int, context: int, sampling: RowSampling, n_steps: int = 20) -> list[StepResult]:
        rows: list[AddedRow | ContinuedRow] = [
            self.added(row, context, context - 1, 1, sampling) for row in range(n_rows)
        ]
        self.step(rows)
        results = [
            self.step([ContinuedRow(f"r{row}", context + i, 1, self.no_blocks) for row in range(n_rows)])
            for i in range(n_steps)
        ]
        self.step([], removed=tuple(f"r{row}" for row in range(n_rows)))
        return results

    def report(self, name: str, run: Callable[[], list[StepResult]], *, per_step: bool) -> float:
        """Median milliseconds of the whole (of one step, or of all), and the split."""
        run()
        wholes, models, samples, prepares = [], [], [], []
        for _ in range(self.repeats):
            began = time.perf_counter()
            results = run()
            whole = time.perf_counter() - began
            n = len(results) if per_step else 1
            if per_step:
                models.append(statistics.median(r.model_s for r in results))
                samples.append(statistics.median(r.sample_s for r in results))
                prepares.append(statistics.median(r.prepare_s for r in results))
                wholes.append(models[-1] + samples[-1] + prepares[-1])
            else:
                models.append(sum(r.model_s for r in results))
                samples.append(sum(r.sample_s for r in results))
                prepares.append(sum(r.prepare_s for r in results))
                wholes.append(whole)
        self.clock.seconds.clear()
        self.clock.running = True
        timed = sum(r.model_s for r in run())
        self.clock.running = False
        linear, attention = self.clock.seconds["linear"] / n, self.clock.seconds["attention"] / n
        ms = [1e3 * statistics.median(values) for values in (wholes, models, prepares, samples)]
        print(
            f"{name:34} {ms[0]:9.2f}   model {ms[1]:9.2f}  prepare {ms[2]:6.3f}  sample {ms[3]:6.3f}   "
            f"[linear {1e3 * linear:8.2f}  attention {1e3 * attention:8.2f}  other "
            f"{1e3 * (timed / n - linear - attention):8.2f}]",
            flush=True,
        )
        return ms[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="smollm2-135m", help="a catalogue name, a .gguf file or a Hugging Face folder"
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    bench = Bench(resolve(args.model), args.dtype, args.repeats)
    print("case, median ms")
    for context in (128, PROMPT):
        for n_rows in (1, 8):
            name = f"decode, {n_rows} rows, context {context}"
            bench.report(name, lambda n=n_rows, c=context: bench.decodes(n, c, RowSampling()), per_step=True)  # type: ignore[misc]
    filtered = RowSampling(temperature=0.8, top_p=0.95, top_k=0, seed=1)
    bench.report("  the last but one with top_p", lambda: bench.decodes(8, 128, filtered), per_step=True)
    cold = bench.report(f"cold prefill of {PROMPT}", lambda: bench.prefill(0), per_step=False)
    hit = bench.report(f"{PROMPT - 16} cached + 16 new", lambda: bench.prefill(PROMPT - 16), per_step=False)
    print(f"hit / cold: {hit / cold:.3f}")


if __name__ == "__main__":
    main()
