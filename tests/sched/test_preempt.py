"""Preemption by recompute: who yields, that all finish, and what is counted (B59, B63, B67)."""

from __future__ import annotations

import random

import pytest

from headwater.sched.draft import Draft, Entry
from headwater.step import RowSampling
from headwater.types import FinishReason
from tests.sched.harness import FULL4, Harness, sliding, span


def test_b59_two_that_together_exceed_the_pool_both_finish() -> None:
    h = Harness(n_blocks=16, budget=64)
    for r, base in (("R1", 100), ("R2", 200)):
        h.generate(f"warm{r}", span(base, base + 23))  # 6 blocks each
    h.add("R1", span(100, 124), 23)  # 12 blocks each in the end: 24 > 16
    h.add("R2", span(200, 224), 23)
    h.step()
    assert (h.n_hit("R1"), h.n_hit("R2")) == (24, 24)
    h.run()
    h.check_outputs()
    assert h.sequences["R1"].n_preemptions == 0  # the older one never yields
    assert h.sequences["R2"].n_preemptions >= 1
    assert h.sequences["R1"].last_token_s < h.sequences["R2"].last_token_s  # type: ignore[operator]


def test_the_newest_of_the_lowest_priority_yields() -> None:
    h = Harness(n_blocks=8)
    h.add("low-old", span(1, 8), 16, priority=2)
    h.add("low-new", span(11, 18), 16, priority=2)
    h.add("high-new", span(21, 28), 16, priority=0)
    while not h.sched.n_preemptions:
        h.step()
    assert [seq.request_id for seq in h.sched.waiting()] == ["low-new"]
    while h.sched.n_preemptions < 2:
        h.step()
    assert [seq.request_id for seq in h.sched.waiting()] == ["low-old", "low-new"]
    h.run()
    h.check_outputs()
    assert h.sequences["high-new"].n_preemptions == 0


def test_the_requester_itself_yields_when_it_is_the_least() -> None:
    h = Harness(n_blocks=4)
    h.add("old", span(1, 7), 8)  # 7 computed in 2 blocks; the third at token 9
    h.add("new", span(11, 18), 8)  # 8 computed in 2 blocks; the third at once
    h.step()
    h.step()
    assert h.sched.n_preemptions == 1 and [s.request_id for s in h.sched.waiting()] == ["new"]
    assert h.counts("new") == (0, 0, 0, 9)
    h.run()
    h.check_outputs()


def test_a_resumed_sequence_hits_its_own_generated_blocks() -> None:
    h = Harness(n_blocks=16)
    h.add("a", span(1, 6), 14)
    for _ in range(8):
        h.step()  # 6 + 7 computed, 14 known
    assert h.counts("a") == (0, 13, 13, 14)
    h.sched.preempt_all()
    assert h.counts("a") == (0, 0, 0, 14)
    plan = h.step()
    assert plan.removed == ("a",)
    (row,) = plan.added
    assert (row.n_computed, row.n_new, row.n_prompt, len(row.tokens)) == (12, 2, 6, 14)
    assert h.n_hit("a") == 0  # usage: the first admission counts
    stats = h.cache.stats()
    assert (stats.query_tokens, stats.hit_tokens) == (6, 0)
    assert (stats.resumed_query_tokens, stats.resumed_hit_tokens) == (14, 12)
    assert h.sched.accounting.tokens_recomputed == 1  # token 12 again; token 13 is new
    h.run()
    h.check_outputs()


def test_seeded_rows_draw_the_same_after_preemption() -> None:
    sampling = RowSampling(temperature=1.0, seed=7)
    h = Harness()
    h.add("a", span(1, 6), 14, sampling=sampling)
    for _ in range(5):
        h.step()
        h.sched.preempt_all()
    h.run()
    h.check_outputs()


def test_b63_random_prompts_and_twenty_preemptions_give_a_hit_rate_of_zero() -> None:
    rng = random.Random(63)
    h = Harness(n_blocks=12, budget=32)
    for i in range(40):
        h.add(f"r{i}", [rng.randrange(1, 900) for _ in range(8)], 12)
    h.run()
    h.check_outputs()
    stats = h.cache.stats()
    assert h.sched.n_preemptions >= 20
    assert (stats.query_tokens, stats.hit_tokens) == (320, 0)
    assert stats.resumed_hit_tokens > 0
    assert all(h.n_hit(r) == 0 for r in h.sequences)


@pytest.mark.parametrize("groups", [(FULL4,), (FULL4, sliding(6))], ids=["one group", "two groups"])
@pytest.mark.parametrize("budget", [1, 5, 64])
@pytest.mark.parametrize("priorities", [(0,), (0, 1, 2)], ids=["equal", "mixed"])
def test_b67_prompt_is_computed_plus_cached_and_usage_sums_to_the_counters(
    groups: tuple, budget: int, priorities: tuple[int, ...]
) -> None:
    h = Harness(groups=groups, n_blocks=40, budget=budget)
    for i in range(12):
        prompt = [*span(1, 4 * (i % 4)), i + 500, *span(600, 600 + i)]
        h.add(f"r{i}", prompt, 5, priority=priorities[i % len(priorities)])
        h.step()
    h.run()
    h.check_outputs()
    stats, counted = h.cache.stats(), h.sched.accounting
    sequences = h.sequences.values()
    assert stats.query_tokens == sum(s.n_prompt for s in sequences) == counted.prompt_tokens
    assert stats.hit_tokens == sum(h.n_hit(r) for r in h.sequences) > 0
    by_runner = sum(sum(chunks) for chunks in h.runner.inputs.values())
    assert counted.tokens_computed == by_runner
    assert h.sched.n_preemptions == 0
    assert counted.prompt_tokens_computed + stats.hit_tokens == counted.prompt_tokens
    assert by_runner == counted.prompt_tokens_computed + counted.generation_tokens - len(h.sequences)
    for r, seq in h.sequences.items():
        assert sum(h.runner.inputs[r]) == seq.n_prompt - h.n_hit(r) + seq.n_generated - 1


@pytest.mark.parametrize("groups", [(FULL4,), (FULL4, sliding(6))], ids=["one group", "two groups"])
def test_b67_counters_stay_straight_under_preemption(groups: tuple) -> None:
    h = Harness(groups=groups, n_blocks=10 * len(groups), budget=16)
    for i in range(12):
        h.add(f"r{i}", [i + 500, *span(600, 607)], 12)
    h.run()
    h.check_outputs()
    stats, counted = h.cache.stats(), h.sched.accounting
    assert h.sched.n_preemptions > 0 and counted.tokens_recomputed > 0
    by_runner = sum(sum(chunks) for chunks in h.runner.inputs.values())
    assert counted.tokens_computed == by_runner
    assert counted.prompt_tokens_computed + stats.hit_tokens == counted.prompt_tokens == 12 * 9
    assert by_runner == counted.prompt_tokens_computed + counted.tokens_recomputed + 12 * (12 - 1)


def test_b44_a_hit_counts_only_where_every_group_can_start() -> None:
    h = Harness(groups=(FULL4, sliding(4)), n_blocks=20)
    h.generate("a", span(1, 9), 1)
    h.generate("b", [*span(1, 9), 10], 1)
    assert h.n_hit("b") == 8
    table = h.cache.lookup(h.sequences["b"].chain).tables
    assert [len(t.blocks) for t in table] == [2, 1] and table[1].first == 1


def test_b49_a_window_model_reuses_its_prompt() -> None:
    h = Harness(groups=(sliding(8),))
    h.generate("a", span(1, 24), 2)
    h.generate("b", span(1, 24), 2)
    assert h.n_hit("b") == 20


def test_finish_of_all_while_preempted_leaves_nothing() -> None:
    h = Harness(n_blocks=8)
    for r in "abc":
        h.add(r, [ord(r), *span(2, 8)], 16)
    while not h.sched.n_preemptions:
        h.step()
    for r in "abc":
        h.sched.finish(r, FinishReason.ABORT)
    h.check_idle()
    h.generate("d", span(1, 9), 3)


def test_a_request_bypasses_the_cache_once_however_often_it_resumes() -> None:
    h = Harness()
    h.add("a", span(1, 9), 4, bypass="skip_reading_prefix_cache")
    for _ in range(3):
        h.step()
        h.sched.preempt_all()
    h.run()
    h.check_outputs()
    stats = h.cache.stats()
    assert (stats.bypassed_requests, stats.query_tokens, stats.resumed_query_tokens) == (1, 0, 0)


def test_a_hit_that_is_lost_before_its_step_ran_is_recomputed_not_computed() -> None:
    h = Harness()
    h.generate("warm", span(1, 9))
    h.add("r", span(1, 10), 2)
    plan = h.plan()
    h.sched.preempt_all()
    h.land(plan)
    h.cache.reset()
    h.run()
    h.check_outputs()
    counted = h.sched.accounting
    assert h.n_hit("r") == 8
    assert counted.prompt_tokens_computed == 9 + 2 and counted.tokens_recomputed == 8


def test_a_follower_that_waits_for_room_starts_once_the_leader_has_published() -> None:
    h = Harness(n_blocks=6, budget=40)
    h.add("leader", span(1, 16), 8)
    h.add("follower", [*span(1, 16), 99], 2)  # five blocks; two are left
    assert [row.request_id for row in h.step().added] == ["leader"]
    assert [row.request_id for row in h.step().added] == ["follower"]  # four of them are the leader's
    assert h.n_hit("follower") == 16
    h.run()
    h.check_outputs()


def test_dropping_an_entry_gives_its_tokens_back_to_the_budget() -> None:
    h = Harness()
    seq, other = h.add("a", span(1, 9), 4), h.add("b", span(1, 9), 4)
    draft = Draft(10)
    draft.place(Entry(seq, 0, 9))
    assert draft.budget == 1
    draft.drop(other)  # has none
    assert draft.budget == 1
    draft.drop(seq)
    assert draft.budget == 10 and not draft.entries
