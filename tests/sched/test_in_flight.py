"""Nothing is computed twice at the same time: followers wait for their leader's blocks, and then hit (B62)."""

from __future__ import annotations

import pytest

from headwater.cache.key import TokenChain
from headwater.cache.lookup import Lookup
from headwater.config import SchedulerConfig
from headwater.errors import ConfigError
from headwater.sched.parts import NotYet, Part
from headwater.sched.parts.in_flight import Follows
from headwater.sched.scheduler import Scheduler
from headwater.sched.sequence import Sequence
from headwater.step import StepPlan
from headwater.types import FinishReason, GroupKind, GroupSpec
from tests.sched.harness import Harness, sliding, span

FULL16 = GroupSpec(GroupKind.FULL, 16)
LONG = 1e9
"""Seconds: no wait is ever cut short."""
GROUPS = {
    "one": (FULL16,),
    "two groups": (FULL16, sliding(40, 16)),
    "only a window": (sliding(70, 16),),
    "blocks of 16 and 8": (FULL16, sliding(40, 8)),
}


def n_computed(h: Harness, *names: str) -> int:
    """Tokens that the runner computed for ``names``, or for all."""
    return sum(sum(chunks) for name, chunks in h.runner.inputs.items() if not names or name in names)


def started(plan: StepPlan) -> list[str]:
    return [row.request_id for row in plan.added]


def leader_of(h: Harness, name: str) -> str | None:
    """Whom ``name`` waits for."""
    not_yet = h.sequences[name].not_yet
    assert not_yet is None or isinstance(not_yet, Follows)
    return None if not_yet is None else not_yet.leader.request_id


def check_sums(h: Harness) -> None:
    """prompt = computed + cached, for each that consulted the cache and for all (without preemption)."""
    counted, stats = h.sched.accounting, h.cache.stats()
    readers = [name for name, seq in h.sequences.items() if seq.bypass is None and seq.lookup is not None]
    assert stats.hit_tokens == sum(h.n_hit(name) for name in readers)
    assert stats.query_tokens == sum(h.sequences[name].n_prompt for name in readers)
    assert stats.n_lookups == len(readers)
    if not h.sched.n_preemptions:
        assert counted.prompt_tokens_computed == counted.prompt_tokens - stats.hit_tokens


# ---- never twice ------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlapped", [False, True], ids=["one step at a time", "two in flight"])
@pytest.mark.parametrize("budget", [48, 500, 4096])
@pytest.mark.parametrize("groups", sorted(GROUPS))
@pytest.mark.parametrize("own", [0, 1, 100], ids=["equal", "one own token", "100 own tokens"])
def test_b62_eight_copies_at_once_compute_their_beginning_once(
    groups: str, budget: int, own: int, overlapped: bool
) -> None:
    n = len(GROUPS[groups])
    h = Harness(GROUPS[groups], n_blocks=1200 * n, budget=budget, max_seqs=16, max_model_len=4096, wait_s=LONG)
    for i in range(8):
        h.add(f"r{i}", [*span(1, 512), *(own * [600 + i])])
    h.run_overlapped() if overlapped else h.run()
    h.check_outputs()
    assert n_computed(h) <= 512 + 8 * (16 + own)
    assert all(h.n_hit(f"r{i}") >= 496 for i in range(1, 8))
    check_sums(h)


@pytest.mark.parametrize("budget", [500, 512, 4096])
def test_b62_eight_copies_of_2048_tokens(budget: int) -> None:
    h = Harness((FULL16,), n_blocks=1200, budget=budget, max_seqs=64, max_model_len=4096, wait_s=30)
    for i in range(8):
        h.add(f"r{i}", span(1, 2048), 4)
    n_steps = h.run()
    h.check_outputs()
    assert n_computed(h) - 8 * 3 <= 2048 + 7 * 16
    assert n_steps == -(-2048 // budget) + 1 + 3  # the leader's chunks, one for all followers, decodes together
    check_sums(h)


def test_what_is_counted() -> None:
    h = Harness((FULL16,), n_blocks=200, budget=100, wait_s=30, max_model_len=400)
    h.generate("warm", span(1, 33))
    for name in ("leader", "f1", "f2"):
        h.add(name, span(1, 96))
    prefill = h.plan()  # the followers would start with hits of 32
    h.clock.now += 0.25
    h.land(prefill)
    h.clock.now += 1
    h.run()
    part = h.sched.in_flight_wait
    assert (part.waits, part.waited_s, part.tokens_saved) == (2, 0.5, 2 * (80 - 32))
    check_sums(h)


def test_without_the_wait_two_copies_are_computed_side_by_side() -> None:
    h = Harness((FULL16,), budget=512, max_model_len=512)
    for name in ("a", "b"):
        h.add(name, span(1, 100))
    assert started(h.step()) == ["a", "b"]
    h.run()
    assert n_computed(h) == 200 and h.n_hit("b") == 0
    part = h.sched.in_flight_wait
    assert (part.waits, part.waited_s, part.tokens_saved) == (0, 0.0, 0)


def test_the_bound_must_be_a_number_of_seconds() -> None:
    h = Harness()
    for bad in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match="in_flight_wait_s"):
            Scheduler(h.cache, SchedulerConfig(in_flight_wait_s=bad), max_model_len=10)


def test_each_follower_starts_after_the_chunk_that_brings_its_last_common_block() -> None:
    h = Harness(budget=40, n_blocks=200, wait_s=LONG)
    h.add("leader", span(1, 64))
    for n_shared in (8, 30, 47, 64):
        h.add(f"f{n_shared}", [*span(1, n_shared), 900 + n_shared, 901])
    assert started(h.step()) == ["leader"]  # 40 tokens
    assert started(h.step()) == ["f8", "f30"]  # beside the leader's other 24
    assert started(h.step()) == ["f47", "f64"]
    h.run()
    h.check_outputs()
    assert [h.n_hit(f"f{n}") for n in (8, 30, 47, 64)] == [8, 28, 44, 64]
    assert n_computed(h) == 64 + 2 + (2 + 2) + (3 + 2) + 2
    assert h.sched.in_flight_wait.waits == 2
    check_sums(h)


def test_a_follower_that_differs_is_the_leader_of_those_that_are_more_like_it() -> None:
    h = Harness(budget=64, n_blocks=200, wait_s=LONG)
    left, right = [*span(1, 16), *span(101, 132)], [*span(1, 16), *span(201, 232)]
    h.add("l1", left)
    h.add("r1", right)
    h.add("r2", [*right, 7])
    h.add("l2", [*left, 7])
    plan = h.plan()
    assert started(plan) == ["l1"]
    assert [leader_of(h, name) for name in ("r1", "r2", "l2")] == ["l1", "l1", "l1"]
    h.land(plan)
    plan = h.plan()
    assert started(plan) == ["r1", "l2"] and leader_of(h, "r2") == "r1"
    h.land(plan)
    h.run()
    h.check_outputs()
    assert [h.n_hit(name) for name in ("l1", "r1", "r2", "l2")] == [0, 16, 48, 48]
    assert n_computed(h) == 48 + 32 + 1 + 1


def test_what_is_shared_by_less_than_a_hit_unit_is_not_waited_for() -> None:
    h = Harness((GroupSpec(GroupKind.FULL, 8), sliding(12, 4)), budget=200, n_blocks=100, wait_s=LONG)
    h.add("leader", span(1, 40))
    h.add("half", [*span(1, 4), *span(500, 520)])  # one unit of 4, no hit unit of 8
    h.add("more", [*span(1, 12), *span(600, 620)])
    assert started(h.step()) == ["leader", "half"] and leader_of(h, "more") == "leader"
    h.run()
    h.check_outputs()
    assert (h.n_hit("half"), h.n_hit("more")) == (0, 8)
    assert h.sched.in_flight_wait.waits == 1


def test_a_block_that_a_decode_is_about_to_fill_is_waited_for_one_step() -> None:
    h = Harness(n_blocks=100, wait_s=LONG)
    h.add("leader", span(1, 6), 6)
    h.step()
    h.step()  # 7 computed, 8 known: the next step fills the block
    h.add("follower", [*h.sequences["leader"].chain.tokens, 50])
    plan = h.plan()
    assert started(plan) == [] and leader_of(h, "follower") == "leader"
    h.land(plan)
    assert started(h.step()) == ["follower"]
    assert h.n_hit("follower") == 8
    h.run()
    h.check_outputs()


# ---- bounded ----------------------------------------------------------------------------------------


def test_b62_a_follower_waits_no_longer_than_the_bound_and_then_computes_for_itself() -> None:
    h = Harness(budget=200, n_blocks=200, wait_s=30)
    h.generate("warm", span(1, 8))
    for name in ("leader", "f1", "f2"):
        h.add(name, span(1, 64))
    flying = [h.plan()]  # takes long
    assert started(flying[0]) == ["leader"]
    h.clock.now = 29.9
    assert h.sched.plan() is None
    h.clock.now = 30
    flying.append(h.plan())
    assert started(flying[1]) == ["f1", "f2"]
    for plan in flying:
        h.land(plan)
    h.run()
    h.check_outputs()
    part = h.sched.in_flight_wait
    assert (part.waits, part.waited_s, part.tokens_saved) == (2, 60, 0)
    assert h.n_hit("f1") == h.n_hit("f2") == 8
    check_sums(h)


def test_the_bound_holds_over_all_leaders() -> None:
    h = Harness(budget=200, n_blocks=200, wait_s=30)
    for name in ("r0", "r1", "r2"):
        h.add(name, span(1, 64))
    first = h.plan()
    h.clock.now = 20
    h.sched.abort("r0")
    second = h.plan()
    assert started(second) == ["r1"] and leader_of(h, "r2") == "r1"
    h.clock.now = 30
    third = h.plan()
    assert started(third) == ["r2"]
    for plan in (first, second, third):
        h.land(plan)
    h.run()
    h.check_outputs()
    assert (h.sched.in_flight_wait.waits, h.sched.in_flight_wait.waited_s) == (2, 20 + 30)


def test_seconds_without_a_place_are_not_counted() -> None:
    h = Harness(budget=64, max_seqs=2, n_blocks=200, wait_s=30)
    h.add("leader", span(1, 32), 9)
    h.add("follower", span(1, 32))
    prefill = h.plan()
    assert leader_of(h, "follower") == "leader"
    h.add("urgent", span(101, 120), 20, priority=-1)
    h.clock.now = 1
    h.land(prefill)
    while h.sched.n_waiting:
        h.clock.now += 1
        h.step()
    assert h.clock.now > 5
    assert h.n_hit("follower") == 28
    assert h.sched.in_flight_wait.waited_s == 1


# ---- handing over -----------------------------------------------------------------------------------


def herd(h: Harness, n: int = 4, n_tokens: int = 64) -> list[str]:
    names = [f"r{i}" for i in range(n)]
    for name in names:
        h.add(name, span(1, n_tokens), 2)
    return names


@pytest.mark.parametrize("how", ["abort", "stop", "row error", "step failed, rows end", "step failed, rows go on"])
@pytest.mark.parametrize("n_published", [0, 40])
def test_b62_when_the_leader_ends_the_first_follower_takes_over_and_the_others_wait_for_it(
    how: str, n_published: int
) -> None:
    h = Harness(budget=40 if n_published else 100, n_blocks=200, wait_s=LONG)
    names = herd(h)
    if n_published:
        h.step()
    plan = h.plan()
    assert [leader_of(h, name) for name in names] == [None, "r0", "r0", "r0"]
    if how in ("abort", "stop"):
        h.sched.finish("r0", FinishReason.ABORT if how == "abort" else FinishReason.STOP)
        h.land(plan)
    elif how == "row error":
        h.runner.faults.bad_rows = {"r0"}
        h.land(plan)
    else:
        h.runner.faults.raise_late = True
        with pytest.raises(RuntimeError, match="injected"):
            h.runner.execute(plan)
        for seq in h.sched.fail_step(plan.step):
            if how == "step failed, rows end":
                h.sched.finish(seq.request_id, FinishReason.ERROR)
        h.sched.audit()
    new_leader = "r0" if how == "step failed, rows go on" else "r1"
    again = h.plan()
    assert started(again) == [new_leader]
    assert [leader_of(h, name) for name in ("r2", "r3")] == [new_leader] * 2
    h.land(again)
    h.run()
    h.check_outputs()
    if new_leader == "r1":
        assert h.n_hit("r1") == n_published
    assert h.n_hit("r2") == h.n_hit("r3") == 60
    assert n_computed(h) <= 64 + 64 - n_published + 2 * 4 + 4 * 2  # once, what was lost, two last blocks, decodes
    assert h.sched.in_flight_wait.waits == 3


def test_a_preempted_leader_leads_again_or_follows_a_more_urgent_one() -> None:
    h = Harness(budget=40, n_blocks=200, wait_s=LONG)
    h.add("slow", span(1, 64), 2, priority=5)
    h.step()
    h.add("urgent", span(1, 64), 2, priority=0)
    h.add("late", span(1, 64), 2, priority=5)
    plan = h.plan()
    assert (leader_of(h, "urgent"), leader_of(h, "late")) == ("slow", "slow")
    h.sched.preempt_all()
    h.land(plan)
    for _ in range(2):
        plan = h.plan()
        assert started(plan) == ["urgent"]
        assert (leader_of(h, "slow"), leader_of(h, "late")) == ("urgent", "urgent")
        h.sched.preempt_all()
        h.land(plan)
    h.run()
    h.check_outputs()
    assert h.n_hit("slow") == 0 and h.n_hit("urgent") == 40
    assert h.sched.in_flight_wait.waits == 3 and h.sched.accounting.requests_admitted == 3


def test_a_leader_that_yields_its_blocks_hands_over_to_a_more_urgent_follower() -> None:
    h = Harness(budget=60, n_blocks=13, wait_s=LONG)
    h.add("first", span(501, 509), 12)
    for _ in range(3):
        h.step()  # 12 known, in three blocks
    h.add("leader", span(1, 40), 2, priority=5)
    prefill = h.plan()
    h.add("follower", span(1, 40), 2, priority=3)
    assert h.sched.plan() is None and leader_of(h, "follower") == "leader"
    h.land(prefill)
    assert h.sched.n_running == 2
    h.step()  # "first" needs a fourth block
    assert h.sequences["leader"].n_preemptions == 1
    order = []
    while h.sched.n_running or h.sched.n_waiting:
        order += started(h.step())
    assert order == ["follower", "leader"] and h.n_hit("follower") >= 32
    h.check_outputs()
    h.check_idle()


def test_a_follower_that_ends_while_it_waits_is_forgotten() -> None:
    h = Harness(budget=100, n_blocks=200, wait_s=LONG)
    herd(h, 3)
    plan = h.plan()
    h.clock.now += 5
    assert h.sched.abort("r1")
    h.clock.now += 5
    h.land(plan)
    h.run()
    part = h.sched.in_flight_wait
    assert (part.waits, part.waited_s) == (2, 5 + 10)
    assert h.sched.accounting.requests_admitted == 2
    assert not part._waits


# ---- fairness ---------------------------------------------------------------------------------------


def test_those_behind_a_follower_start_in_places_that_it_does_not_need() -> None:
    h = Harness(budget=40, max_seqs=4, n_blocks=200, wait_s=LONG)
    h.add("leader", span(1, 64), 2)
    h.add("follower", span(1, 64), 2)
    for i in range(4):
        h.add(f"s{i}", span(100 * i + 100, 100 * i + 104), 30)
    assert started(h.step()) == ["leader"]  # all of the budget
    plan = h.step()
    assert started(plan) == ["s0", "s1"]  # the fourth place is the follower's
    assert started(h.step()) == ["follower"]
    h.run()
    h.check_outputs()


def test_those_behind_a_follower_leave_it_the_blocks_that_it_does_not_share() -> None:
    def starts(n_blocks: int) -> list[str]:
        h = Harness(budget=64, n_blocks=n_blocks, wait_s=LONG)
        h.add("leader", span(1, 33), 2)  # 9 blocks
        h.add("follower", [*span(1, 32), *span(901, 909)], 2)  # 11 blocks, 8 of them shared
        h.add("stranger", span(101, 108), 1)  # 2 blocks
        names = started(h.step())
        h.run()
        h.check_outputs()
        return names

    assert starts(9 + 3 + 2) == ["leader", "stranger"]
    assert starts(9 + 3 + 1) == ["leader"]


def test_a_follower_is_first_when_its_wait_is_over() -> None:
    h = Harness(budget=32, max_seqs=3, n_blocks=200, wait_s=LONG)
    h.add("leader", span(1, 32), 9)
    h.add("follower", span(1, 32), 9)
    for i in range(6):
        h.add(f"s{i}", span(100 * i + 100, 100 * i + 104), 3)
    assert started(h.step()) == ["leader"]
    assert started(h.step()) == ["follower", "s0"]


def test_one_that_does_not_fit_still_stops_those_behind_it() -> None:
    h = Harness(budget=200, n_blocks=24, wait_s=LONG)
    h.add("leader", span(1, 32), 4)
    h.add("follower", span(1, 32), 4)
    h.add("big", span(101, 180))  # 20 blocks
    h.add("small", span(201, 204))
    assert started(h.step()) == ["leader"]
    assert started(h.step()) == ["follower"]
    h.run()
    h.check_outputs()


class NotBefore(Part):
    """Holds ``name`` back until it is allowed; says so afresh at each plan."""

    def __init__(self, name: str) -> None:
        self.name: str | None = name

    def hold_back(self, seq: Sequence, lookup: Lookup) -> NotYet | None:
        return NotYet("the test says so", LONG, lookup.n_hit) if seq.request_id == self.name else None


def test_any_part_can_hold_back_and_those_behind_go_on() -> None:
    part = NotBefore("b")
    h = Harness(parts=(part,), max_seqs=3)
    for name in "abcd":
        h.add(name, span(ord(name), ord(name) + 5), 3)
    assert started(h.step()) == ["a", "c"]  # the third place is b's
    assert h.sequences["b"].not_yet == NotYet("the test says so", LONG, 0)
    part.name = None
    assert started(h.step()) == ["b"]
    assert h.sequences["b"].not_yet is None
    h.run()
    h.check_outputs()


# ---- who takes no part ------------------------------------------------------------------------------


def test_another_salt_and_a_request_that_does_not_read_wait_for_nobody() -> None:
    h = Harness(budget=400, n_blocks=400, wait_s=LONG)
    h.add("leader", span(1, 64))
    h.add("salted", span(1, 64), salt="s")
    h.add("blind", span(1, 64), bypass="skip_reading_prefix_cache")
    assert started(h.step()) == ["leader", "salted", "blind"]
    h.run()
    h.check_outputs()
    assert h.sched.in_flight_wait.waits == 0 and n_computed(h) == 3 * 64


def test_what_a_request_that_does_not_read_computes_is_waited_for() -> None:
    h = Harness(budget=400, n_blocks=400, wait_s=LONG)
    h.add("blind", span(1, 64), bypass="skip_reading_prefix_cache")
    h.add("follower", span(1, 64))
    h.add("blind too", span(1, 64), bypass="skip_reading_prefix_cache")
    assert started(h.step()) == ["blind", "blind too"]
    assert leader_of(h, "follower") == "blind"
    h.run()
    h.check_outputs()
    assert h.n_hit("follower") == 60 and h.sched.in_flight_wait.waits == 1
    check_sums(h)


# ---- cost -------------------------------------------------------------------------------------------


def test_a_follower_is_looked_up_again_only_when_its_leader_got_there() -> None:
    h = Harness(budget=200, n_blocks=400, max_seqs=40, wait_s=LONG)
    n_calls, lookup = [0], h.cache.lookup

    def counting(chain: TokenChain, *, bypass: str | None = None) -> Lookup:
        n_calls[0] += 1
        return lookup(chain, bypass=bypass)

    h.cache.lookup = counting  # type: ignore[method-assign]
    herd(h, 20, 160)
    plan = h.plan()
    for _ in range(5):
        assert h.sched.plan() is None
    assert n_calls[0] == 20
    h.land(plan)
    h.run()
    assert n_calls[0] == 20 + 19
    h.check_outputs()
