"""Where the time of engine steps goes, part by part: what ``headwater bench step`` shows.

Every part of a running engine is given a clock for the time of the measurement. A part's time is what passes in it less
what passes in the parts that it calls, so the parts add up to the whole. The clocks themselves cost about a
microsecond a call: a decode step of 30 layers is about 0.3 ms slower with them; the whole is measured without.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from headwater.engine.build import BuiltEngine
from headwater.engine.messages import Submit
from headwater.engine.request_state import Answer
from headwater.errors import EngineError
from headwater.model.decoder import Model
from headwater.run import runner as runner_module
from headwater.types import RequestId, SamplingParams

GLUE = "engine loop"
OP_LABELS = {
    "rms_norm": "norms",
    "add_rms_norm": "norms",
    "rope_and_write": "rotate, write KV",
    "attention": "attention",
    "gated_act": "activation",
}


class Laps:
    """Seconds spent in each part, what it calls not included."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0

    def switch(self) -> float:
        """Book the time since the last switch on the part that is open; now."""
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now
        return now

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` with a clock; its time is booked on ``part``."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.switch()
            self._open.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.switch()
                self._open.pop()

        return call

    @contextmanager
    def patched(self, owner: Any, name: str, part: str) -> Iterator[None]:
        """Put a clock on ``owner.name`` (of an object, a class or a module) while the context lasts."""
        original = getattr(owner, name)
        is_own = name in vars(owner)
        setattr(owner, name, self.timed(part, original))
        try:
            yield
        finally:
            if is_own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)


@contextmanager
def one_by_one(model: Model) -> Iterator[None]:
    """Operations that run in one call run each alone, with the same bits, so that each has its clock."""
    stack, model.stack = model.stack, None
    try:
        yield
    finally:
        model.stack = stack


@contextmanager
def clocked(built: BuiltEngine) -> Iterator[Laps]:
    """Clocks on all parts of an engine while the context lasts."""
    laps = Laps()
    model = built.model
    places: list[tuple[Any, str, str]] = [
        (built.core, "step", GLUE),
        (built.scheduler, "plan", "schedule"),
        (built.scheduler, "apply", "apply"),
        (built.cache, "publish", "publish"),
        (built.runner, "execute", "prepare"),
        (model, "forward", "model, the rest"),
        (runner_module, "sample", "sample"),
        (Answer, "push", "detokenise"),
        *((model.ops, name, part) for name, part in OP_LABELS.items()),
    ]
    with ExitStack() as stack:
        stack.enter_context(one_by_one(model))
        for owner, name, part in places:
            stack.enter_context(laps.patched(owner, name, part))
        for kind in {type(linear) for linear in model.linears}:
            stack.enter_context(laps.patched(kind, "__call__", "products"))
        yield laps


@dataclass(frozen=True, slots=True)
class Case:
    """``rows`` requests of ``context`` tokens, of which ``cached`` are in the cache; then ``n_decode`` steps of one
    token each. What is measured is the prefill if ``n_decode`` is 0, else one decode step."""

    name: str
    rows: int
    context: int
    cached: int = 0
    n_decode: int = 0


CASES = (
    Case("decode, 1 row at 128 tokens", 1, 128, n_decode=24),
    Case("decode, 8 rows at 128 tokens", 8, 128, n_decode=24),
    Case("decode, 1 row at 2,048 tokens", 1, 2048, n_decode=24),
    Case("decode, 8 rows at 2,048 tokens, all different", 8, 2048, n_decode=24),
    Case("decode, 8 rows at 2,048 tokens, one prefix", 8, 2048, cached=2032, n_decode=24),
    Case("cold prompt of 2,048 tokens", 1, 2048),
    Case("2,032 tokens cached and 16 new", 1, 2048, cached=2032),
)


@dataclass(frozen=True, slots=True)
class Breakdown:
    """``whole_s``: median seconds of the case without clocks, and the spread of the repeats; ``parts_s``: with them."""

    case: Case
    whole_s: float
    least_s: float
    most_s: float
    parts_s: dict[str, float]


class StepBench:
    """Drives a built engine through the cases, nothing else running on it."""

    def __init__(self, built: BuiltEngine, *, seed: int = 0) -> None:
        self._built = built
        self._random = random.Random(seed)
        self._ids = (f"bench-{i}" for i in itertools.count())

    def run(self, case: Case, repeats: int) -> Breakdown:
        """EngineError if the engine cannot take the case (a shorter limit, too few blocks)."""
        info = self._built.core.info
        n_tokens = case.context + self._most_out(case)
        if n_tokens > info.max_model_len or case.rows > info.max_num_seqs:
            raise EngineError(
                f"{case.name}: needs {n_tokens} tokens a request and {case.rows} requests at "
                f"once; this engine takes {info.max_model_len} and {info.max_num_seqs}"
            )
        self._once(case)
        wholes = [self._once(case) for _ in range(repeats)]
        with clocked(self._built) as laps:
            runs = []
            for _ in range(repeats):
                laps.seconds.clear()
                n_steps = self._once(case, laps)
                runs.append({part: seconds / n_steps for part, seconds in laps.seconds.items()})
        parts = {
            part: statistics.median(run.get(part, 0.0) for run in runs)
            for part in dict.fromkeys(itertools.chain.from_iterable(runs))
        }
        return Breakdown(case, statistics.median(wholes), min(wholes), max(wholes), parts)

    def _once(self, case: Case, laps: Laps | None = None) -> float:
        """Run the case once: the seconds of what it measures, or with ``laps`` the number of steps to divide by."""
        core = self._built.core
        prefix = self._tokens(case.cached)
        if case.cached:
            self._submit([*prefix, *self._tokens(1)], 1)
            self._drain()
        n_out = self._most_out(case)
        ids = [self._submit(prefix + self._tokens(case.context - case.cached), n_out) for _ in range(case.rows)]
        while case.n_decode and not self._all_decode(case.rows):
            core.step()
        if laps is not None:
            laps.seconds.clear()
        times: list[float] = []
        while core.busy and (not case.n_decode or len(times) < case.n_decode):
            began = time.perf_counter()
            core.step()
            times.append(time.perf_counter() - began)
        for request_id in ids:
            core.abort(request_id)
        if laps is not None:
            return float(len(times)) if case.n_decode else 1.0
        return statistics.median(times) if case.n_decode else sum(times)

    def _most_out(self, case: Case) -> int:
        """Tokens to ask for: the first rows already decode while the last are still being prefilled."""
        if not case.n_decode:
            return 1
        info = self._built.core.info
        chunk = info.max_num_mixed_tokens or info.max_num_batched_tokens
        chunks = -(-case.rows * (case.context - case.cached) // chunk)
        return case.n_decode + chunks + case.rows + 1

    def _all_decode(self, n_rows: int) -> bool:
        running = self._built.scheduler.running()
        return len(running) == n_rows and all(seq.n_generated for seq in running)

    def _drain(self) -> None:
        while self._built.core.busy:
            self._built.core.step()

    def _tokens(self, n: int) -> list[int]:
        low, high = min(100, self._built.model.spec.vocab_size // 2), self._built.model.spec.vocab_size
        return [self._random.randrange(low, high) for _ in range(n)]

    def _submit(self, tokens: Sequence[int], n_out: int) -> RequestId:
        params = SamplingParams(max_tokens=n_out, temperature=0.0, ignore_eos=True)
        request_id = next(self._ids)
        refused = self._built.core.submit(Submit(request_id, list(tokens), params))
        if refused:
            raise EngineError(f"the engine refused a request of the benchmark: {refused[0].error}")
        return request_id
