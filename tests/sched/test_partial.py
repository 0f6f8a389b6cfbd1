"""Copies of slots in plans: made once, kept safe until then, given back once, whatever happens to the request."""

from __future__ import annotations

import pytest

from headwater.step import SlotCopy
from headwater.types import FinishReason
from tests.sched.harness import FULL4, Harness, sliding, span


def warm(**options: object) -> Harness:
    h = Harness(partial=True, **options)  # type: ignore[arg-type]
    h.generate("cold", span(1, 12))
    return h


def source_of(h: Harness, request_id: str) -> int:
    return h.sequences[request_id].held().beginnings[0].source


@pytest.mark.parametrize("groups", [(FULL4,), (FULL4, sliding(6)), (sliding(3),)])
@pytest.mark.parametrize("t", [1, 2, 3])
def test_the_first_step_copies_in_every_group_and_computes_the_rest(t: int, groups) -> None:
    h = warm(groups=groups)
    seq = h.add("a", [*span(1, 8 + t), 90, 91], max_tokens=3)
    plan = h.plan()
    tables = seq.held().tables
    assert [(c.group, c.target, c.n_slots) for c in plan.copies] == [
        (g, tables[g].blocks[2 - tables[g].first], t) for g in range(len(groups))
    ]
    assert (plan.added[0].n_computed, plan.added[0].n_new) == (8 + t, 2)
    assert h.counts("a") == (8 + t, 8 + t, 10 + t, 10 + t)
    h.land(plan)
    assert h.step().copies == ()
    h.run()
    h.check_outputs()
    assert (h.n_hit("a"), h.n_copied("a")) == (8, t)
    assert h.runner.inputs["a"] == [2, 1, 1]
    assert h.sched.accounting.prompt_tokens_computed == 12 + 2


def test_a_chunk_of_one_token_after_the_copy() -> None:
    h = warm(budget=1)
    h.add("a", [*span(1, 10), 90, 91, 92])
    h.run()
    h.check_outputs()
    assert h.runner.inputs["a"] == [1, 1, 1]
    assert sum(len(plan.copies) for plan in h.runner.plans) == 1


def test_with_steps_in_flight_the_copy_is_in_the_first_only() -> None:
    h = warm(budget=2)
    h.add("a", [*span(1, 10), *span(90, 95)])
    first, second, third = h.plan(), h.plan(), h.plan()
    assert [len(plan.copies) for plan in (first, second, third)] == [1, 0, 0]
    source = source_of(h, "a")
    assert h.cache.pool.refs[source] == 1
    h.land(first)
    assert h.cache.pool.refs[source] == 0 and h.sequences["a"].held().beginnings == ()
    h.land(second)
    h.land(third)
    h.run()
    h.check_outputs()


@pytest.mark.parametrize("how", ["abort", "stop", "preempt"])
def test_a_source_outlives_its_request_until_the_step_is_applied(how: str) -> None:
    # A stranger takes all blocks there are while the step that copies is in flight.
    h = warm(n_blocks=5)
    h.add("a", [*span(1, 10), 90])
    plan = h.plan()
    source = source_of(h, "a")
    if how == "preempt":
        h.sched.preempt_all()
        assert h.sched.abort("a")
    else:
        assert h.sched.finish("a", FinishReason.ABORT if how == "abort" else FinishReason.STOP)
    h.sched.audit()
    assert h.cache.pool.refs[source] == 1
    h.add("stranger", span(200, 211))
    assert h.sched.plan() is None, "a step in flight still names the blocks"
    h.land(plan)  # the runner checks what it reads
    assert h.cache.pool.refs[source] == 0
    h.run()
    h.check_output("stranger")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("n_in_flight", [1, 2])
def test_a_step_that_failed_makes_its_copies_again(n_in_flight: int, late: bool) -> None:
    h = warm(budget=2, groups=(FULL4, sliding(6)))
    h.add("a", [*span(1, 10), *span(90, 93)], max_tokens=4)
    plans = [h.plan() for _ in range(n_in_flight)]
    h.runner.faults.raise_late, h.runner.faults.raise_early = late, not late
    with pytest.raises(RuntimeError, match="injected"):
        h.runner.execute(plans[0])
    for plan in plans:
        h.sched.fail_step(plan.step)
        h.sched.audit()
    again = h.plan()
    assert again.copies == plans[0].copies != ()
    assert isinstance(again.copies[0], SlotCopy)
    h.land(again)
    h.run()
    h.check_outputs()
    assert h.sched.accounting.tokens_recomputed == 0


def test_a_row_that_fails_alone_gives_its_source_back() -> None:
    h = warm()
    h.add("a", [*span(1, 10), 90])
    plan = h.plan()
    h.runner.faults.bad_rows = {"a"}
    h.land(plan)
    assert "a" in h.errors
    h.check_idle()


def test_without_room_for_the_source_the_request_starts_where_its_whole_blocks_end() -> None:
    h = warm(n_blocks=4, max_model_len=17)
    h.add("a", [*span(1, 10), *span(90, 94)])  # needs every block, and the source is one of them
    h.run()
    h.check_outputs()
    assert (h.n_hit("a"), h.n_copied("a")) == (8, 0)


def test_resumed_with_a_copy() -> None:
    h = warm()
    h.add("a", [*span(1, 10), 90], max_tokens=6)
    h.step()
    h.step()
    h.sched.preempt_all()
    h.run()
    h.check_outputs()
    stats = h.cache.stats()
    assert (stats.hit_tokens, stats.copied_tokens) == (8, 2)
    assert stats.resumed_hit_tokens == 12 or stats.resumed_copied_tokens > 0
    assert h.n_copied("a") == 2


def test_bypass_and_salt_copy_nothing() -> None:
    h = warm()
    h.generate("bypass", span(1, 12), bypass="skip_reading_prefix_cache")
    h.generate("salt", span(1, 12), salt="s")
    assert h.n_copied("bypass") == h.n_copied("salt") == 0 == h.runner.n_copied
