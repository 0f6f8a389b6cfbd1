"""Every way out of a step or of the engine: nothing unwritten is findable, nothing leaks (known-faults D and E)."""

from __future__ import annotations

import pytest

from headwater.errors import EngineError
from headwater.step import RowResult, StepResult
from headwater.types import FinishReason
from tests.sched.harness import FULL4, Harness, sliding, span

GROUPS = pytest.mark.parametrize("groups", [(FULL4,), (FULL4, sliding(6))], ids=["one group", "two groups"])


def then_cold(h: Harness) -> None:
    """R2 with the same prompt: no hit, and the right output."""
    h.generate("R2", span(1, 12), 4)
    assert h.n_hit("R2") == 0


@GROUPS
def test_b22a_abort_between_plan_and_run(groups: tuple) -> None:
    h = Harness(groups=groups)
    h.add("R1", span(1, 12), 4)
    plan = h.plan()
    assert h.sched.abort("R1")
    assert h.land(plan) == []
    then_cold(h)
    assert h.outputs["R1"] == []


@GROUPS
def test_b22a_abort_with_two_steps_in_flight(groups: tuple) -> None:
    h = Harness(groups=groups, budget=4, n_blocks=8)
    h.add("R1", span(1, 12), 4)
    one, two = h.plan(), h.plan()
    assert (one.n_tokens, two.n_tokens, two.continued[0].n_computed) == (4, 4, 4)
    results = [h.runner.execute(one), h.runner.execute(two)]
    assert h.sched.abort("R1")
    fenced = h.cache.stats().fenced
    assert fenced == 2 * len(groups)
    assert h.sched.apply(results[0]) == []
    assert h.cache.stats().fenced == fenced  # step 2 names all of them
    assert h.sched.apply(results[1]) == []
    assert h.cache.stats().fenced == 0 and h.cache.available == 8
    then_cold(h)


LASTING = pytest.mark.parametrize("groups", [(FULL4,), (FULL4, sliding(64))], ids=["one group", "two groups"])
"""Groups in which nothing slides out here, so that both run short of blocks at the same moment."""


@LASTING
def test_b22b_low_was_placed_and_is_dropped(groups: tuple) -> None:
    h = Harness(groups=groups, n_blocks=6 * len(groups), budget=8)
    h.add("low", span(1, 7), 9, priority=1)
    h.step()
    h.add("high", span(101, 116), 2, priority=0)
    plan = h.step()
    assert {r.request_id: r.n_new for r in [*plan.continued, *plan.added]} == {"low": 1, "high": 7}
    # low: token 8 needs a third block, and would be placed first; then high needs two for tokens 7..13, one is left
    plan = h.plan()
    assert [(r.request_id, r.n_new) for r in plan.continued] == [("high", 7)]
    assert plan.added == () and plan.removed == ("low",)
    assert h.counts("low") == (0, 0, 0, 9) and h.sequences["low"].n_preemptions == 1
    assert h.cache.lookup(h.sequences["low"].chain).n_hit == 8  # confirmed before; the third block is not findable
    h.land(plan)
    h.run()
    h.check_outputs()


@LASTING
def test_b22b_low_was_placed_and_is_dropped_with_a_step_in_flight(groups: tuple) -> None:
    h = Harness(groups=groups, n_blocks=8 * len(groups), budget=8)
    h.add("low", span(1, 7), 9, priority=1)
    h.step()
    h.add("high", span(101, 124), 2, priority=0)
    two = h.plan()  # low 7, high 0..6
    three = h.plan()  # high 7..14
    assert [(r.request_id, r.n_new) for r in three.continued] == [("high", 8)]
    h.land(two)
    four = h.plan()  # low is placed at 8, dropped for high 15..22
    assert [(r.request_id, r.n_new) for r in four.continued] == [("high", 7)] and four.removed == ("low",)
    h.land(three)
    h.land(four)
    h.run()
    h.check_outputs()


@LASTING
def test_b22b_blocks_of_one_preempted_in_flight_wait_for_its_step(groups: tuple) -> None:
    n = len(groups)
    h = Harness(groups=groups, n_blocks=7 * n, budget=4)
    h.add("low", span(1, 11), 9, priority=1)
    for _ in range(3):
        h.step()
    h.add("high", span(101, 116), 2, priority=0)
    h.step()  # low 11; high 0..2
    three = h.plan()  # low 12, in its fourth block; high 3..5
    four = h.plan()  # high 6..9, in its third: no block is left
    assert h.sched.plan() is None  # high 10..13 needs a fourth: low yields, but step three names its blocks
    assert h.sequences["low"].n_preemptions == 1
    assert h.cache.stats().fenced == 4 * n and h.cache.available == 0
    before = list(h.outputs["low"])
    h.land(three)
    assert h.outputs["low"] == before  # what the step brought for low is ignored
    assert h.cache.available == 4 * n
    five = h.plan()
    assert [r.request_id for r in five.continued] == ["high"]
    h.land(four)
    h.land(five)
    h.run()
    h.check_outputs()


def test_b22b_one_that_yielded_does_not_come_back_to_take_what_the_other_waits_for() -> None:
    h = Harness(n_blocks=9, budget=8)
    h.add("low", span(1, 11), 9, priority=1)
    h.step()
    h.step()
    h.add("high", span(101, 124), 2, priority=0)
    h.step()  # low 11; high 0..6
    three = h.plan()  # low 12, in its fourth block; high 7..13
    # high 14..21 needs two blocks and one is free: low yields. Its own next start would need just that one.
    assert h.sched.plan() is None
    assert h.sequences["low"].n_preemptions == 1 and h.cache.available == 1
    assert h.sched.plan() is None
    h.land(three)
    assert [r.request_id for r in h.step().continued] == ["high"]
    h.run()
    h.check_outputs()


def test_nobody_yields_while_blocks_that_suffice_come_back_with_a_step_in_flight() -> None:
    h = Harness(n_blocks=8, budget=6)
    h.add("gone", span(1, 5), 9, priority=1)
    h.add("new", span(21, 25), 9, priority=2)
    h.step()
    h.step()
    h.add("old", span(11, 26), 4, priority=0)  # four tokens a step beside the two that decode
    h.step()
    h.step()
    five = h.plan()
    assert [len(h.tables(r)[0]) for r in ("gone", "new", "old")] == [3, 2, 3]  # that is all
    h.sched.finish("gone", FinishReason.STOP)
    assert h.sched.plan() is None  # old needs one more; three come back when the step has landed
    assert h.sched.n_preemptions == 0
    h.land(five)
    h.step()
    assert h.sched.n_preemptions == 0 and len(h.tables("old")[0]) == 4
    h.run()
    h.check_outputs()


def test_a_lone_sequence_with_steps_in_flight_waits_for_its_window_rather_than_yield() -> None:
    h = Harness(groups=(sliding(4),), n_blocks=3, budget=4)
    h.add("r", span(1, 24), 3)
    flying = [h.plan(), h.plan(), h.plan()]
    assert h.sched.plan() is None  # no block is left until the window slides
    while flying:
        h.land(flying.pop(0))
        plan = h.sched.plan()
        if plan is not None:
            flying.append(plan)
    h.check_idle()
    h.check_outputs()
    assert h.sched.n_preemptions == 0 and len(h.outputs["r"]) == 3


def test_only_what_was_confirmed_is_findable_while_more_is_in_flight() -> None:
    h = Harness(budget=4)
    h.add("r", span(1, 12), 2)
    one, two = h.plan(), h.plan()
    h.land(one)
    assert h.cache.lookup(h.sequences["r"].chain).n_hit == 4
    h.land(two)
    assert h.cache.lookup(h.sequences["r"].chain).n_hit == 8
    h.run()


def test_a_removal_that_a_failed_step_may_have_lost_is_told_again() -> None:
    h = Harness()
    h.add("a", span(1, 4), 1)
    h.add("b", span(11, 14), 6)
    h.step()
    plan = h.plan()
    assert plan.removed == ("a",)
    h.runner.faults.raise_early = True
    with pytest.raises(RuntimeError):
        h.runner.execute(plan)
    h.sched.fail_step(plan.step)
    h.add("a", span(21, 24), 3)  # the same id again: the runner would know it twice
    assert set(h.step().removed) == {"a", "b"}
    h.run()
    h.check_outputs()


def test_a_removal_is_not_told_again_when_the_id_runs_again() -> None:
    h = Harness()
    h.add("a", span(1, 4), 1)
    h.add("b", span(11, 14), 6)
    h.step()
    one = h.plan()
    h.add("a", span(21, 24), 3)
    two = h.plan()
    assert one.removed == ("a",) and [row.request_id for row in two.added] == ["a"]
    h.runner.faults.raise_late = True
    with pytest.raises(RuntimeError):
        h.runner.execute(one)
    h.sched.fail_step(one.step)
    h.land(two)
    three = h.step()
    assert three.removed == ("b",) and [row.request_id for row in three.continued] == ["a"]
    h.run()
    h.check_outputs()


@GROUPS
@pytest.mark.parametrize("budget", [4, 8])
def test_always_a_step_in_flight_and_too_few_blocks(groups: tuple, budget: int) -> None:
    h = Harness(groups=groups, n_blocks=8 * len(groups), budget=budget)
    for i, r in enumerate("abcd"):
        h.add(r, [i + 1, *span(100, 113)], 12, priority=i % 2)
    h.run_overlapped()
    h.check_outputs()
    assert h.sequences["a"].n_preemptions == 0


@GROUPS
@pytest.mark.parametrize("late", [False, True], ids=["before anything", "half way"])
def test_b22c_the_step_raises_and_the_row_is_retried(groups: tuple, late: bool) -> None:
    h = Harness(groups=groups)
    h.add("R1", span(1, 12), 4)
    plan = h.plan()
    h.runner.faults.raise_late, h.runner.faults.raise_early = late, not late
    with pytest.raises(RuntimeError, match="injected"):
        h.runner.execute(plan)
    assert h.sched.fail_step(plan.step) == [h.sequences["R1"]]
    h.sched.audit()
    assert h.counts("R1") == (0, 0, 0, 12)
    again = h.cache.lookup(h.sequences["R1"].chain)
    assert again.n_hit == 0
    retry = h.plan()
    assert [row.request_id for row in retry.added] == ["R1"] and retry.removed == ("R1",)
    h.land(retry)
    h.run()
    h.check_output("R1")
    stats = h.cache.stats()
    assert stats.query_tokens == 12  # one admission, whatever failed


@GROUPS
@pytest.mark.parametrize("late", [False, True], ids=["before anything", "half way"])
def test_b22c_the_step_raises_and_the_request_ends(groups: tuple, late: bool) -> None:
    h = Harness(groups=groups, budget=8)
    h.add("R1", span(1, 12), 4)
    h.step()
    plan = h.plan()
    h.runner.faults.raise_late, h.runner.faults.raise_early = late, not late
    with pytest.raises(RuntimeError, match="injected"):
        h.runner.execute(plan)
    for seq in h.sched.fail_step(plan.step):
        assert h.sched.finish(seq.request_id, FinishReason.ERROR)
    h.check_idle()
    h.generate("R2", span(1, 12), 4)
    assert h.n_hit("R2") == 8  # what the first step confirmed, no more


@GROUPS
def test_b22c_a_failed_step_voids_the_one_in_flight_behind_it(groups: tuple) -> None:
    h = Harness(groups=groups, budget=4)
    h.add("R1", span(1, 12), 4)
    one, two = h.plan(), h.plan()
    h.runner.faults.raise_early = True
    with pytest.raises(RuntimeError):
        h.runner.execute(one)
    h.sched.fail_step(one.step)
    assert h.counts("R1") == (0, 0, 0, 12)
    # step 2 would read what step 1 never wrote; whatever it says does not count
    assert h.sched.apply(StepResult(two.step, (RowResult("R1"),))) == []
    assert h.cache.lookup(h.sequences["R1"].chain).n_hit == 0
    h.run()
    h.check_output("R1")


@GROUPS
def test_a_row_error_fails_only_its_row(groups: tuple) -> None:
    h = Harness(groups=groups, budget=24)
    for r in "abc":
        h.add(r, [ord(r), *span(2, 8)], 6)
    h.step()
    h.runner.faults.bad_rows = {"b"}
    h.step()
    assert h.errors == {"b": "injected: this row failed"}
    assert h.sequences["b"].finish_reason is FinishReason.ERROR
    assert "b" in h.step().removed
    h.run()
    h.check_outputs()
    assert len(h.outputs["a"]) == len(h.outputs["c"]) == 6 and len(h.outputs["b"]) == 1
    # an error in the first step: nothing of the row is findable
    h.add("d", span(50, 61), 4)
    h.runner.faults.bad_rows = {"d"}
    h.step()
    h.generate("d2", span(50, 61), 4)
    assert h.n_hit("d2") == 0


def test_b23_two_equal_prompts_in_one_cold_step() -> None:
    h = Harness(n_blocks=12)
    h.add("a", span(1, 9), 2)
    h.add("b", span(1, 9), 2)
    h.step()
    assert (h.n_hit("a"), h.n_hit("b")) == (0, 0)
    a, b = h.tables("a")[0], h.tables("b")[0]
    assert not set(a) & set(b)  # two copies with an owner each
    h.run()
    h.check_outputs()
    assert h.cache.stats().evictable == 4  # two copies of two full blocks
    # A duplicate goes before anything unique: after six more blocks are needed than are free, one copy is left.
    h.generate("c", span(101, 137), 1)
    h.add("d", span(1, 9), 1)
    h.step()
    assert h.n_hit("d") == 8
    h.run()
    h.check_outputs()


def test_b23_three_equal_prompts_in_chunks() -> None:
    h = Harness(budget=4)
    for r in "abc":
        h.add(r, span(1, 9), 2)
    h.run()
    h.check_outputs()
    assert h.n_hit("a") == 0
    h2 = Harness(budget=12)
    for r in "abc":
        h2.add(r, span(1, 9), 2)
    h2.run()
    h2.check_outputs()
    assert h2.n_hit("a") == h2.n_hit("b") == 0


def test_b28_the_window_slides_on_confirmed_counts() -> None:
    h = Harness(groups=(sliding(8),), n_blocks=6, budget=5)
    h.add("r", span(1, 15), 4)
    h.step()  # 0..4
    one = h.plan()  # 5..9
    two = h.plan()  # 10..14: the host has 15 scheduled tokens, and position 14 needs 7..14 only
    (block0, block1, *_) = h.tables("r")[0]
    # step `one` still reads positions 0..9: nothing slid, and nothing may be handed to another now
    assert h.sequences["r"].held().tables[0].first == 0
    h.add("other", span(101, 112), 2)
    assert h.sched.plan() is None  # two free blocks are too few: block 0 is not among them
    h.sched.apply(h.runner.execute(one))
    # 10 confirmed: position 10 needs 3..10, so block 0 stays; 15 would have freed blocks 0
    assert h.sequences["r"].held().tables[0].first == 0
    h.land(two)
    assert h.sequences["r"].held().tables[0].first == 2  # position 15 needs 8..15
    h.run()
    h.check_outputs()
    assert block0 != block1


def test_b28_finish_while_the_next_step_runs() -> None:
    h = Harness(n_blocks=3, budget=4)
    h.add("r", span(1, 8), 4)
    one, two = h.plan(), h.plan()
    result = h.runner.execute(one)
    h.sched.apply(result)
    h.sched.finish("r", FinishReason.STOP)  # stop found while step 2 runs
    assert h.cache.available == 1 and h.cache.stats().fenced == 2
    h.add("other", span(101, 112), 1)
    assert h.sched.plan() is None  # it needs all three blocks
    assert h.sched.apply(h.runner.execute(two)) == []
    assert h.cache.available == 3
    h.run()
    h.check_output("other")


def test_results_must_come_in_order_and_with_the_plans_rows() -> None:
    h = Harness(budget=4)
    with pytest.raises(EngineError, match="no step is in flight"):
        h.sched.apply(StepResult(1, ()))
    h.add("r", span(1, 8), 4)
    one, two = h.plan(), h.plan()
    with pytest.raises(EngineError, match="before that of step"):
        h.sched.apply(StepResult(two.step, (RowResult("r", (5,)),)))
    with pytest.raises(EngineError, match="rows"):
        h.sched.apply(StepResult(one.step, ()))
    with pytest.raises(EngineError, match="must sample 0 tokens, got 1"):
        h.sched.apply(StepResult(one.step, (RowResult("r", (5,)),)))
    assert h.counts("r") == (0, 0, 8, 8)  # nothing was confirmed
    h.land(one)
    h.land(two)
    h.run()
    h.check_outputs()


def test_b31_two_hundred_prompts_and_mixed_ends_leave_nothing() -> None:
    h = Harness(n_blocks=16)
    for i in range(200):
        r = f"r{i}"
        h.add(r, [i + 1, *span(300, 307)], 4)
        h.step()
        if i % 4 == 0:
            h.sched.finish(r, FinishReason.STOP)
        elif i % 4 == 1:
            h.run()
        elif i % 4 == 2:
            h.sched.abort(r)
        else:
            h.runner.faults.bad_rows = {r}
            h.step()
        h.check_idle()
    h.check_outputs()
    finished = h.sched.accounting.requests_finished
    assert {reason.value: n for reason, n in finished.items()} == {"stop": 50, "length": 50, "abort": 50, "error": 50}
    assert len(h.runner.rows) <= 1  # the runner was told to forget each


def test_b36_each_group_gives_back_its_tail_first() -> None:
    for deferred in (False, True):
        h = Harness(groups=(FULL4, FULL4), n_blocks=8, budget=12)
        h.add("r", span(1, 12), 4)
        h.step()
        (one, two) = h.tables("r")
        if deferred:
            plan = h.plan()
            h.sched.finish("r", FinishReason.STOP)
            h.land(plan)
        else:
            h.sched.finish("r", FinishReason.STOP)
        assert list(h.cache.pool.evictable) == [*reversed(one[:3]), *reversed(two[:3])]


def test_b39_evictable_blocks_are_available() -> None:
    h = Harness(n_blocks=10, max_seqs=8)
    for i in range(5):
        h.generate(f"r{i}", [i + 1, *span(101, 107)], 1)
    assert h.cache.stats().evictable == 10 and h.cache.stats().free == 0
    h.add("new", span(201, 208), 1)
    assert h.step().added[0].request_id == "new"
    h.run()


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode", "planned prefill", "planned decode"])
def test_b94_abort_at_every_moment(when: str) -> None:
    h = Harness(budget=4, max_seqs=1)
    if when == "waiting":
        h.add("first", span(1, 4), 4)
        h.step()
    h.add("r", span(11, 26), 8)
    if "prefill" in when:
        h.step()
    elif "decode" in when:
        for _ in range(6):
            h.step()
    plan = h.plan() if "planned" in when else None
    n_computed = h.sequences["r"].n_computed
    assert h.sched.abort("r") and not h.sched.abort("r")
    if plan is not None:
        assert h.land(plan) == []
    h.run()
    h.check_outputs()
    h.generate("again", span(11, 26), 8)
    assert h.n_hit("again") == min(n_computed // 4 * 4, 12)  # exactly the committed blocks
