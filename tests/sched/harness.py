"""Scheduler, cache and fake runner together, driven step by step, with everything audited after each."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from headwater.cache.key import Hasher
from headwater.cache.prefix import PrefixCache
from headwater.config import CacheConfig, SchedulerConfig
from headwater.sched.parts import Part
from headwater.sched.scheduler import Progress, Scheduler
from headwater.sched.sequence import Sequence, Status
from headwater.step import RowSampling, StepPlan
from headwater.types import FinishReason, GroupKind, GroupSpec, Namespace
from tests.sched.fake_runner import FakeRunner, oracle

FULL4 = GroupSpec(GroupKind.FULL, 4)


def sliding(window: int, block_size: int = 4) -> GroupSpec:
    return GroupSpec(GroupKind.SLIDING, block_size, window=window)


class Clock:
    """A clock that moves by ``tick`` s at every look: with 1, orders of events show as times."""

    def __init__(self, tick: float = 1.0) -> None:
        self.now = 0.0
        self.tick = tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


@dataclass
class Harness:
    groups: tuple[GroupSpec, ...] = (FULL4,)
    n_blocks: int = 64
    budget: int = 64
    mixed_budget: int = 1 << 20
    max_seqs: int = 8
    max_model_len: int = 200
    max_waiting: int = 4096
    vocab_size: int = 997
    hasher: Hasher | None = None
    parts: Iterable[Part] = ()
    partial: bool = False
    """Reuse of blocks that begin with the same tokens, by copying slots."""
    wait_s: float = 0.0
    """The bound of the in-flight wait; with one, the clock stands still until a test moves it."""

    sequences: dict[str, Sequence] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = Clock(0.0 if self.wait_s else 1.0)
        caching = CacheConfig(partial_reuse=self.partial)
        self.cache = PrefixCache(self.groups, self.n_blocks, config=caching, clock=self.clock, hasher=self.hasher)
        config = SchedulerConfig(
            max_num_seqs=self.max_seqs,
            max_num_batched_tokens=self.budget,
            max_num_mixed_tokens=self.mixed_budget,
            max_model_len=self.max_model_len,
            max_waiting=self.max_waiting,
            in_flight_wait_s=self.wait_s,
        )
        self.sched = Scheduler(self.cache, config, max_model_len=self.max_model_len, clock=self.clock, parts=self.parts)
        self.runner = FakeRunner(self.groups, self.n_blocks, vocab_size=self.vocab_size)

    def add(
        self,
        request_id: str,
        tokens: Seq[int],
        max_tokens: int = 1,
        *,
        salt: str | None = None,
        priority: int = 0,
        bypass: str | None = None,
        sampling: RowSampling = RowSampling(),
    ) -> Sequence:
        chain = self.cache.chain(Namespace(b"weights", salt=salt), tokens)
        seq = Sequence(
            request_id, chain, len(tokens), len(tokens) + max_tokens, sampling, priority=priority, bypass=bypass
        )
        self.sched.add(seq)
        self.sequences[request_id] = seq
        self.outputs[request_id] = []
        return seq

    def plan(self) -> StepPlan:
        plan = self.sched.plan()
        assert plan is not None, "nothing could run"
        return plan

    def land(self, plan: StepPlan) -> list[Progress]:
        """Run ``plan`` and apply its result; sequences at their limit are finished."""
        progress = self.sched.apply(self.runner.execute(plan))
        for p in progress:
            if p.error is not None:
                self.errors[p.seq.request_id] = p.error
                continue
            self.outputs[p.seq.request_id].extend(p.tokens)
            if p.tokens and p.at_limit:
                assert self.sched.finish(p.seq.request_id, FinishReason.LENGTH)
        self.sched.audit()
        return progress

    def step(self) -> StepPlan:
        plan = self.plan()
        self.land(plan)
        return plan

    def run(self, limit: int = 2000) -> int:
        """Step until idle; returns the number of steps."""
        for n_steps in range(limit):
            if not self.sched.n_running and not self.sched.n_waiting:
                self.check_idle()
                return n_steps
            self.step()
        raise AssertionError(f"still {self.sched.n_running} running and {self.sched.n_waiting} waiting")

    def run_overlapped(self, limit: int = 2000) -> None:
        """As ``run``, always with the next step planned before the last one's result is applied."""
        flying: list[StepPlan] = []
        for _ in range(limit):
            plan = self.sched.plan()
            if plan is not None:
                flying.append(plan)
            if not flying:
                self.check_idle()
                return
            if plan is None or len(flying) > 1:
                self.land(flying.pop(0))
        raise AssertionError(f"still {self.sched.n_running} running and {self.sched.n_waiting} waiting")

    def generate(self, request_id: str, tokens: Seq[int], max_tokens: int = 1, **kwargs: object) -> Sequence:
        """Add one request, run to idle, check its output."""
        seq = self.add(request_id, tokens, max_tokens, **kwargs)  # type: ignore[arg-type]
        self.run()
        self.check_output(request_id)
        return seq

    def expected(self, request_id: str, n_tokens: int) -> list[int]:
        seq = self.sequences[request_id]
        prompt = list(seq.chain.tokens)[: seq.n_prompt]
        return oracle(prompt, n_tokens, seq.sampling, vocab_size=self.vocab_size)

    def check_output(self, request_id: str) -> None:
        """All tokens so far are those of a run without cache; a sequence that ended by length has all of them."""
        seq, out = self.sequences[request_id], self.outputs[request_id]
        if seq.finish_reason is FinishReason.LENGTH:
            assert len(out) == seq.max_len - seq.n_prompt
        assert out == self.expected(request_id, len(out)), request_id

    def check_outputs(self) -> None:
        for request_id in self.sequences:
            self.check_output(request_id)

    def check_idle(self) -> None:
        stats = self.cache.stats()
        assert (stats.in_use, stats.fenced, stats.logical_blocks, stats.physical_in_use) == (0, 0, 0, 0)
        assert stats.free + stats.evictable == self.n_blocks == self.cache.available
        assert all(seq.status is Status.FINISHED for seq in self.sequences.values())
        self.sched.audit()

    def n_hit(self, request_id: str) -> int:
        """Tokens of whole blocks that the request hit when it was first admitted."""
        lookup = self.sequences[request_id].lookup
        assert lookup is not None
        return lookup.n_hit

    def n_copied(self, request_id: str) -> int:
        """Tokens copied beside those."""
        lookup = self.sequences[request_id].lookup
        assert lookup is not None
        return lookup.n_copy

    def tables(self, request_id: str) -> list[list[int]]:
        return [list(table.blocks) for table in self.sequences[request_id].held().tables]

    def counts(self, request_id: str) -> tuple[int, int, int, int]:
        seq = self.sequences[request_id]
        return seq.n_cached, seq.n_computed, seq.n_scheduled, seq.n_known


def span(first: int, last: int) -> list[int]:
    """Token ids first..last, both included."""
    return list(range(first, last + 1))
