"""Random histories of scheduler, cache and runner together, against the naive oracle, audited after each step."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from headwater.cache.key import Hasher
from headwater.errors import NeverFits
from headwater.step import RowSampling, StepPlan
from headwater.types import FinishReason, GroupKind, GroupSpec
from tests.sched.harness import FULL4, Harness, sliding

GROUPS = {
    "one": (FULL4,),
    "window": (FULL4, sliding(6)),
    "two full and a window of whole blocks": (FULL4, FULL4, sliding(8)),
    "only a window": (sliding(5),),
    "blocks of 8 and 4": (GroupSpec(GroupKind.FULL, 8), sliding(6)),
}
SEVEN = Hasher("seven", lambda message: b"\7" * 32)
"""A hash function that says 7 of everything: the answers stay right."""
SEEN = {"hits": 0, "resumed hits": 0, "preemptions": 0, "finished": 0}
"""Over the whole run, so that the machine is known to reach what it is for."""

# Few distinct prompts over a tiny alphabet, so that beginnings are shared and branches are many.
PROMPTS = st.lists(st.integers(1, 2), min_size=0, max_size=4).flatmap(
    lambda head: st.integers(0, 14).map(lambda n: [t for b in head for t in (b, b, 3, b)] + [9] * n + [1])
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        groups=st.sampled_from(sorted(GROUPS)),
        n_blocks=st.integers(4, 24),
        budget=st.sampled_from([1, 3, 4, 7, 16, 64]),
        max_seqs=st.integers(1, 6),
        hasher=st.sampled_from([None, None, SEVEN]),
    )
    def start(self, groups: str, n_blocks: int, budget: int, max_seqs: int, hasher: Hasher | None) -> None:
        n = len(GROUPS[groups])
        self.h = Harness(
            groups=GROUPS[groups],
            n_blocks=n_blocks * n,
            budget=budget,
            max_seqs=max_seqs,
            max_model_len=60,
            hasher=hasher,
        )
        self.flying: list[StepPlan] = []
        self.n_added = 0

    # ---- requests

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 20),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, None, "s"]),
        seeded=st.booleans(),
        bypass=st.sampled_from([None, None, None, "skip_reading_prefix_cache"]),
    )
    def add(
        self, prompt: list[int], max_tokens: int, priority: int, salt: str | None, seeded: bool, bypass: str | None
    ) -> None:
        self.n_added += 1
        sampling = RowSampling(temperature=1.0, seed=self.n_added % 3) if seeded else RowSampling()
        name = f"r{self.n_added}"
        if len(prompt) + 1 > self.h.sched.max_model_len:
            with pytest.raises(NeverFits):
                self.h.add(name, prompt, max_tokens, priority=priority, salt=salt, bypass=bypass, sampling=sampling)
            return
        self.h.add(name, prompt, max_tokens, priority=priority, salt=salt, bypass=bypass, sampling=sampling)

    def live(self) -> list[str]:
        return [seq.request_id for seq in self.h.sched.running() + self.h.sched.waiting()]

    @precondition(lambda self: self.live())
    @rule(data=st.data(), reason=st.sampled_from([FinishReason.ABORT, FinishReason.STOP]))
    def end(self, data: st.DataObject, reason: FinishReason) -> None:
        assert self.h.sched.finish(data.draw(st.sampled_from(self.live())), reason)
        self.h.sched.audit()

    # ---- steps

    @rule(n=st.integers(1, 6))
    def step(self, n: int) -> None:
        for _ in range(n):
            self.land()
            self.take_off()
            self.land()

    @precondition(lambda self: len(self.flying) < 3)
    @rule()
    def take_off(self) -> None:
        plan = self.h.sched.plan()
        self.h.sched.audit()
        if plan is not None:
            assert plan.n_tokens <= self.h.budget
            assert self.h.sched.n_running <= self.h.max_seqs
            self.flying.append(plan)

    @rule()
    def land(self) -> None:
        if self.flying:
            plan = self.flying.pop(0)
            self.h.land(plan)
            self.h.check_outputs()

    @precondition(lambda self: self.flying)
    @rule(late=st.booleans(), give_up=st.booleans())
    def fail(self, late: bool, give_up: bool) -> None:
        """The oldest step fails, and with it those in flight behind it (the runner lost its place)."""
        self.h.runner.faults.raise_late, self.h.runner.faults.raise_early = late, not late
        plan = self.flying.pop(0)
        with pytest.raises(RuntimeError, match="injected"):
            self.h.runner.execute(plan)
        shaken = self.h.sched.fail_step(plan.step)
        if give_up:
            for seq in shaken:
                self.h.sched.finish(seq.request_id, FinishReason.ERROR)
        while self.flying:
            behind = self.flying.pop(0)
            self.h.sched.fail_step(behind.step)
        self.h.sched.audit()

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def row_error(self, data: st.DataObject) -> None:
        plan = self.flying[0]
        row = data.draw(st.sampled_from([*plan.added, *plan.continued]))
        if len(self.flying) == 1:  # a later step that names the row would read what was not written
            self.h.runner.faults.bad_rows = {row.request_id}
            self.land()

    # ---- pressure

    @rule()
    def preempt_all(self) -> None:
        self.h.sched.preempt_all()
        self.h.sched.audit()

    @rule()
    def reset(self) -> None:
        while self.flying:
            self.land()
        self.h.sched.preempt_all()
        self.h.cache.reset()
        self.h.sched.audit()
        assert self.h.cache.stats().evictable == 0

    def teardown(self) -> None:
        if not hasattr(self, "h"):
            return
        while self.flying:
            self.land()
        self.h.run(5000)
        self.h.check_outputs()
        stats = self.h.cache.stats()
        SEEN["hits"] += stats.hit_tokens
        SEEN["resumed hits"] += stats.resumed_hit_tokens
        SEEN["preemptions"] += self.h.sched.n_preemptions
        SEEN["finished"] += len(self.h.sequences)


BUDGET = settings(
    max_examples=int(os.environ.get("HEADWATER_MACHINE_EXAMPLES", "100")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    print_blob=True,
)
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = BUDGET


def test_the_machine_reached_what_it_is_for() -> None:
    if SEEN["finished"] == 0:
        pytest.skip("the machine did not run in this session")
    assert all(n > 0 for n in SEEN.values()), SEEN
