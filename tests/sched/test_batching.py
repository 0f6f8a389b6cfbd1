"""Who runs, in which order, and within which limits."""

from __future__ import annotations

import pytest

from headwater.cache.lookup import Lookup
from headwater.config import CacheConfig, SchedulerConfig
from headwater.errors import BadRequest, ConfigError, NeverFits, Overloaded
from headwater.sched.parts import NotYet, Part
from headwater.sched.queue import SequenceQueue
from headwater.sched.scheduler import Scheduler
from headwater.sched.sequence import Sequence
from headwater.types import FinishReason
from tests.sched.harness import FULL4, Harness, sliding, span


def rows(plan: object) -> dict[str, int]:
    return {row.request_id: row.n_new for row in [*plan.continued, *plan.added]}  # type: ignore[attr-defined]


def test_running_first_then_the_queue_within_the_budget() -> None:
    h = Harness(budget=8)
    h.add("a", span(1, 3), 9)
    h.add("b", span(11, 30), 9)
    h.add("c", span(41, 42), 9)
    assert rows(h.step()) == {"a": 3, "b": 5}
    assert rows(h.step()) == {"a": 1, "b": 7}  # decodes before prefills that are not done
    assert rows(h.step()) == {"a": 1, "b": 7}
    assert rows(h.step()) == {"a": 1, "b": 1, "c": 2}
    h.run()
    h.check_outputs()


def test_while_somebody_generates_steps_are_short() -> None:
    h = Harness(budget=16, mixed_budget=6)
    h.add("a", span(1, 3), 3)
    assert rows(h.step()) == {"a": 3}
    h.add("b", span(11, 60), 2)
    assert rows(h.step()) == {"a": 1, "b": 5}
    assert rows(h.step()) == {"a": 1, "b": 5}
    assert rows(h.step()) == {"b": 16}  # a is done
    h.run()
    h.check_outputs()


def test_one_whose_next_token_is_being_sampled_generates() -> None:
    h = Harness(budget=16, mixed_budget=6)
    h.add("a", span(1, 3), 9)
    first = h.plan()
    h.add("b", span(11, 60), 2)
    second = h.plan()  # the first is in flight
    assert rows(second) == {"b": 6}
    h.land(first)
    h.land(second)
    h.run()
    h.check_outputs()


def test_all_that_generate_go_on_however_short_a_step_is() -> None:
    h = Harness(budget=16, mixed_budget=1)
    for i in range(3):
        h.add(f"r{i}", span(10 * i, 10 * i + 3), 3)
    h.step()
    h.add("late", span(50, 60), 2)
    assert rows(h.step()) == {"r0": 1, "r1": 1, "r2": 1}
    h.run()
    h.check_outputs()


def test_a_step_is_never_over_its_own_limit() -> None:
    h = Harness(budget=4, mixed_budget=99)
    h.add("a", span(1, 3), 9)
    h.step()
    h.add("b", span(11, 60), 2)
    assert rows(h.step()) == {"a": 1, "b": 3}


def test_a_chunk_that_is_not_the_last_samples_nothing() -> None:
    h = Harness(budget=5)
    h.add("a", span(1, 12), 2)
    assert [p.tokens for p in h.land(h.plan())] == [()]
    assert [p.tokens for p in h.land(h.plan())] == [()]
    assert len(h.land(h.plan())[0].tokens) == 1


def test_at_most_max_num_seqs_run() -> None:
    h = Harness(max_seqs=2)
    for i in range(5):
        h.add(f"r{i}", span(i * 10 + 1, i * 10 + 4), 3)
    most = 0
    while h.sched.n_running or h.sched.n_waiting:
        h.step()
        most = max(most, h.sched.n_running)
    assert most == 2
    h.check_outputs()


def test_lower_priority_number_first_then_arrival() -> None:
    h = Harness(max_seqs=1)
    for r, priority in [("a", 0), ("b", 1), ("c", 0), ("d", -1), ("e", 1)]:
        h.add(r, span(1, 4), 2, priority=priority)
    order = []
    while h.sched.n_waiting or h.sched.n_running:
        order += [row.request_id for row in h.step().added]
    assert order == ["d", "a", "c", "b", "e"]


def test_a_late_urgent_request_does_not_preempt_for_a_place() -> None:
    h = Harness(max_seqs=1)
    h.add("a", span(1, 4), 4, priority=5)
    h.step()
    h.add("b", span(1, 4), 4, priority=0)
    h.step()
    assert [seq.request_id for seq in h.sched.running()] == ["a"]
    assert h.sched.n_preemptions == 0


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    h = Harness(n_blocks=8)
    h.add("a", span(1, 16), 8)
    h.step()
    h.add("big", span(101, 117), 2)
    h.add("small", span(201, 202), 2)
    plan = h.step()
    assert rows(plan) == {"a": 1}
    assert h.sched.n_waiting == 2
    h.run()
    h.check_outputs()


def test_a_blocked_head_is_not_looked_up_again_until_something_changed() -> None:
    h = Harness(n_blocks=8)
    h.add("a", span(1, 16), 12)
    h.step()
    calls = []
    lookup = h.cache.lookup

    def counting(chain: object, *, bypass: str | None = None) -> Lookup:
        calls.append(chain)
        return lookup(chain, bypass=bypass)  # type: ignore[arg-type]

    h.cache.lookup = counting  # type: ignore[method-assign]
    h.add("big", span(101, 124), 2)
    while h.sequences["a"].finish_reason is None:
        h.step()
    assert len(calls) == 1
    h.run()
    h.check_outputs()


def test_what_can_never_fit_is_refused_at_once() -> None:
    h = Harness(max_model_len=16)
    with pytest.raises(NeverFits, match="16 tokens"):
        h.add("a", span(1, 16), 1)
    with pytest.raises(NeverFits):
        h.add("b", span(1, 64), 1)
    h.generate("c", span(1, 15), 5)
    assert len(h.outputs["c"]) == 1  # the limit ends it
    assert h.sched.n_waiting == 0


def test_the_limit_is_what_the_pool_can_hold() -> None:
    h = Harness(n_blocks=3, max_model_len=200)
    assert h.sched.max_model_len == 13  # 12 tokens in 3 blocks; the last one's KV is never written
    with pytest.raises(NeverFits):
        h.add("a", span(1, 13), 1)
    h.generate("b", span(1, 12), 5)
    h.generate("c", span(1, 5), 100)
    assert len(h.outputs["c"]) == 8
    two = Harness(groups=(FULL4, sliding(4)), n_blocks=10, budget=4, max_model_len=200)
    assert two.sched.max_model_len < 41
    two.generate("long", span(1, 9), 100)
    assert two.sequences["long"].n_known == two.sched.max_model_len


def test_a_pool_that_holds_nothing_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="no request fits"):
        Harness(groups=(FULL4, FULL4), n_blocks=1)
    h = Harness()
    with pytest.raises(ConfigError, match="max_num_seqs"):
        Scheduler(h.cache, SchedulerConfig(max_num_seqs=0), max_model_len=10)
    with pytest.raises(ConfigError, match="max_num_mixed_tokens"):
        Scheduler(h.cache, SchedulerConfig(max_num_mixed_tokens=0), max_model_len=10)
    assert CacheConfig().block_size == 16


def test_the_queue_is_bounded_and_preempted_ones_do_not_count() -> None:
    h = Harness(max_waiting=2, max_seqs=1)
    h.add("a", span(1, 4), 4)
    h.step()
    h.add("b", span(1, 4), 4)
    h.add("c", span(1, 4), 4)
    with pytest.raises(Overloaded, match="2 requests are waiting"):
        h.add("d", span(1, 4), 4)
    assert h.sched.preempt_all() == 1
    assert h.sched.n_waiting == 3
    h.run()
    h.check_outputs()


def test_bad_requests_are_named() -> None:
    h = Harness()
    h.add("a", span(1, 4), 4)
    with pytest.raises(BadRequest, match="already in use"):
        h.sched.add(h.sequences["a"])
    with pytest.raises(BadRequest, match="at least one token"):
        h.add("b", [], 4)
    with pytest.raises(BadRequest, match="at least one token"):
        h.add("c", span(1, 4), 0)
    assert h.sched.n_waiting == 1


def test_an_id_can_be_used_again_after_its_end() -> None:
    h = Harness()
    h.add("a", span(1, 9), 9)
    h.step()
    h.sched.abort("a")
    h.add("a", span(50, 58), 3)
    plan = h.step()
    assert plan.removed == ("a",) and [row.request_id for row in plan.added] == ["a"]
    h.run()
    h.check_outputs()


class DeferFour(Part):
    """Says "not yet" four times."""

    def __init__(self) -> None:
        self.asked = 0

    def hold_back(self, seq: Sequence, lookup: Lookup) -> NotYet | None:
        self.asked += 1
        return NotYet("not four times", 1e9, lookup.n_hit) if self.asked <= 4 else None


def test_b64_deferred_four_times_counts_once() -> None:
    part = DeferFour()
    h = Harness(parts=(part,))
    part.asked = 4
    h.generate("warm", span(1, 8))
    before = h.cache.stats()
    part.asked = 0
    h.add("r", span(1, 9))
    for _ in range(4):
        assert h.sched.plan() is None
        assert h.cache.stats() == before
    h.run()
    after = h.cache.stats()
    assert (after.query_tokens - before.query_tokens, after.hit_tokens - before.hit_tokens) == (9, 8)
    assert after.n_lookups - before.n_lookups == 1
    assert h.sched.accounting.requests_admitted == 2


def test_b64_six_attempts_to_be_admitted_count_once() -> None:
    h = Harness(n_blocks=5)
    h.generate("warm", span(1, 8))
    h.add("a", span(101, 109), 3)
    plan = h.plan()
    before = h.cache.stats()
    h.add("b", span(1, 9))  # its hit of two blocks is there, a third is not
    for _ in range(6):
        h.sequences["b"].blocked_at = None  # try again although nothing changed
        assert h.sched.plan() is None
        assert h.sequences["b"].blocked_at is not None
        assert h.cache.stats() == before
    h.sched.finish("a", FinishReason.STOP)
    h.land(plan)
    h.run()
    after = h.cache.stats()
    assert (after.query_tokens - before.query_tokens, after.hit_tokens - before.hit_tokens) == (9, 8)
    assert after.n_lookups - before.n_lookups == 1
    assert h.sched.accounting.requests_admitted == 3
    h.check_outputs()


def test_queue_order_and_removal() -> None:
    h = Harness()
    queue = SequenceQueue()
    seqs = [h.add(f"r{i}", span(1, 4), 1, priority=i % 3) for i in range(9)]
    for seq in seqs:
        queue.add(seq)
    queue.remove(seqs[4])
    with pytest.raises(KeyError, match="r4"):
        queue.remove(seqs[4])
    assert [s.request_id for s in queue] == ["r0", "r3", "r6", "r1", "r7", "r2", "r5", "r8"]
    assert (queue[0], queue[1], queue.last, len(queue)) == (seqs[0], seqs[3], seqs[8], 8)
