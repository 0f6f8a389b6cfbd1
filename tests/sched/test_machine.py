"""Random histories of scheduler, cache and runner together, against the naive oracle, audited after each step."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from headwater.cache.key import Hasher
from headwater.errors import NeverFits
from headwater.sched.parts.in_flight import Follows
from headwater.sched.sequence import Sequence
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
SEEN = dict.fromkeys(
    (
        *("hits", "resumed hits", "preemptions", "finished", "waits", "saved", "cut short"),
        *("copied", "resumed copies", "copies planned again"),
    ),
    0,
)
"""Over the whole run, so that the machine is known to reach what it is for."""

# Few distinct prompts over a tiny alphabet, so that beginnings are shared and branches are many.
PROMPTS = st.lists(st.integers(1, 2), min_size=0, max_size=4).flatmap(
    lambda head: st.integers(0, 14).map(lambda n: [t for b in head for t in (b, b, 3, b)] + [9] * n + [1])
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        groups=st.sampled_from(sorted(GROUPS)),
        n_blocks=st.integers(4, 32),
        budget=st.sampled_from([1, 3, 7, 16, 64, 64, 64]),
        mixed_budget=st.sampled_from([1, 5, 12, 64]),
        max_seqs=st.integers(1, 8),
        hasher=st.sampled_from([None, None, SEVEN]),
        wait_s=st.sampled_from([0.0, 0.5, 0.5, 1.0, 1e9]),
        partial=st.sampled_from([True, True, False]),
    )
    def start(
        self,
        groups: str,
        n_blocks: int,
        budget: int,
        mixed_budget: int,
        max_seqs: int,
        hasher: Hasher | None,
        wait_s: float,
        partial: bool,
    ) -> None:
        n = len(GROUPS[groups])
        self.h = Harness(
            groups=GROUPS[groups],
            n_blocks=n_blocks * n,
            budget=budget,
            mixed_budget=mixed_budget,
            max_seqs=max_seqs,
            max_model_len=60,
            hasher=hasher,
            wait_s=wait_s,
            partial=partial,
        )
        self.held_back: dict[str, float] = {}
        """When each of those that wait for a leader was first seen to."""
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

    @rule(
        prompt=PROMPTS,
        n=st.integers(2, 4),
        own=st.integers(0, 5),
        priority=st.integers(0, 1),
        seconds=st.sampled_from([0.5, 2.0]),
    )
    def add_many(self, prompt: list[int], n: int, own: int, priority: int, seconds: float) -> None:
        """Several at once that share a beginning, or are equal; their first step is slow, and others are planned
        meanwhile."""
        for i in range(n):
            self.add(prompt + own * [4 + i], 3, priority + i % 2, None, False, None)
        for _ in range(3 - len(self.flying)):
            self.take_off()
            self.h.clock.now += seconds

    @precondition(lambda self: self.n_added)
    @rule(which=st.integers(0, 3), cut=st.integers(0, 9), own=st.integers(0, 3), lost=st.booleans())
    def add_like(self, which: int, cut: int, own: int, lost: bool) -> None:
        """A prompt that leaves an earlier one, or its answer, in the middle of a block, perhaps beside others."""
        sequences = list(self.h.sequences.values())
        tokens = list(sequences[-1 - which % len(sequences)].chain.tokens) if sequences else []
        self.add([*tokens[: max(0, len(tokens) - cut)], *own * [2], 1], 6, 0, None, False, None)
        if lost:  # its first step fails
            while self.flying:
                self.land()
            self.take_off()
            if self.flying:
                self.fail(late=True, give_up=False)

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
        before = {seq.request_id: seq.n_admissions for seq in self.h.sched.running() + self.h.sched.waiting()}
        generating = [seq for seq in self.h.sched.running() if len(seq.chain) - seq.n_scheduled <= 1]
        plan = self.h.sched.plan()
        self.h.sched.audit()
        self.check_waits(before, plan)
        if plan is None:
            assert self.flying or not self.live(), "nothing runs, nothing is in flight, and somebody waits"
        else:
            assert plan.n_tokens <= self.h.budget
            assert plan.n_tokens <= max(self.h.mixed_budget, len(generating)) or not generating
            assert self.h.sched.n_running <= self.h.max_seqs
            self.flying.append(plan)

    def check_waits(self, before: dict[str, int], plan: StepPlan | None) -> None:
        """Nobody starts to compute what another computes now, unless it does not read or has waited long enough; and
        whoever waits, waits for one that runs. ``before``: how often each had been admitted before ``plan``."""
        added = [self.h.sequences[row.request_id] for row in plan.added] if plan is not None else []
        admitted = [seq for seq in added if seq.n_admissions > before[seq.request_id]]
        earlier = [seq for seq in self.h.sched.running() if seq not in admitted]
        for seq in admitted:
            since = self.held_back.pop(seq.request_id, None)
            over = since is not None and self.h.clock.now - since >= self.h.wait_s
            if self.h.wait_s and seq.bypass is None:
                twice = [other.request_id for other in earlier if self.computes_the_same(seq, other)]
                assert not twice or over, f"{seq.request_id} computes what {twice} are computing"
                SEEN["cut short"] += bool(twice)
            earlier.append(seq)
        for seq in self.h.sched.waiting():
            if isinstance(seq.not_yet, Follows):
                self.held_back.setdefault(seq.request_id, self.h.clock.now)
                assert self.h.wait_s and seq.bypass is None
                if seq.not_yet.stands():
                    assert seq.not_yet.leader in self.h.sched.running()

    def computes_the_same(self, seq: Sequence, other: Sequence) -> bool:
        """Does ``seq``, just admitted, start at or after what ``other`` has published, with a whole hit unit that
        both know and neither has?

            0 ...... published by other ... n_cached ... common
        """
        unit = self.h.cache.min_reusable_tokens
        mine, others, holding = seq.chain, other.chain, other.held()
        if mine.namespace != others.namespace or holding.cursor is None:
            return False
        common = next((i for i, (a, b) in enumerate(zip(mine.tokens, others.tokens, strict=False)) if a != b), None)
        common = min(len(mine), len(others)) if common is None else common
        reach = min(common, len(mine) - 1) // unit * unit
        return holding.n_published // unit * unit <= seq.n_cached < reach

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
        SEEN["copies planned again"] += not give_up and any(seq.held().beginnings for seq in shaken)
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
        SEEN["copied"] += stats.copied_tokens
        SEEN["resumed copies"] += stats.resumed_copied_tokens
        assert self.h.runner.n_copied == 0 or stats.copied_tokens + stats.resumed_copied_tokens
        SEEN["preemptions"] += self.h.sched.n_preemptions
        SEEN["finished"] += len(self.h.sequences)
        part = self.h.sched.in_flight_wait
        assert not part._waits
        assert part.waits <= sum(seq.n_preemptions + 1 for seq in self.h.sequences.values())
        reused = stats.hit_tokens + stats.copied_tokens + stats.resumed_hit_tokens + stats.resumed_copied_tokens
        assert part.tokens_saved <= reused
        SEEN["waits"] += part.waits
        SEEN["saved"] += part.tokens_saved


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
    print(SEEN)
    assert all(n > 0 for n in SEEN.values()), SEEN
