"""The exact timeline of one request, and the rules of hits that show in plans (mission sections 3 to 5)."""

from __future__ import annotations

import pytest

from headwater.step import AddedRow, ContinuedRow, RowSampling, TableStart
from headwater.types import FinishReason, GroupKind, GroupSpec, Namespace
from tests.sched.harness import FULL4, Harness, sliding, span


def test_timeline_7_19_23() -> None:
    h = Harness(n_blocks=24, budget=4)
    # Hold every page but the one that is to be taken next, so that the pool has no choice.
    chain = h.cache.chain(Namespace(b"filler"), span(1, 4))
    fillers = {}
    for _ in range(24):
        holding = h.cache.claim(chain, h.cache.lookup(chain, bypass="filler"), "filler")
        ((page,),) = h.cache.allocate(holding, 4)
        fillers[page] = holding
    h.cache.release(fillers.pop(7))
    # (the audit of the harness knows no fillers, so the steps of this test are driven by hand)
    for warm, last in (("warm4", 4), ("warm8", 8)):
        h.add(warm, span(1, last))
        plan = h.sched.plan()
        assert plan is not None
        h.sched.apply(h.runner.execute(plan))
        assert h.tables(warm) == [[7, 19][: last // 4]]
        h.sched.finish(warm, FinishReason.LENGTH)
        if warm == "warm4":
            h.cache.release(fillers.pop(19))
    h.cache.release(fillers.pop(23))
    assert h.cache.stats().evictable == 2 and h.cache.stats().free == 1

    letters = [*span(1, 8), 9, 10]  # A..H, I, J
    h.add("r", letters, max_tokens=4)
    assert h.counts("r") == (0, 0, 0, 10)  # arrival
    lookup = h.cache.lookup(h.sequences["r"].chain)
    assert lookup.n_hit == 8
    assert h.counts("r") == (0, 0, 0, 10)  # a look-up changes nothing
    assert h.cache.stats().evictable == 2

    plan = h.sched.plan()
    assert plan is not None
    assert h.counts("r") == (8, 8, 10, 10)
    assert h.tables("r") == [[7, 19, 23]]
    assert h.cache.stats().evictable == 0
    assert plan.added == (AddedRow("r", tuple(letters), 8, 2, (TableStart(0, (7, 19, 23)),), RowSampling(), 10),)
    assert plan.continued == () and plan.removed == ("warm8",)

    result = h.runner.execute(plan)
    h.sched.apply(result)
    assert h.counts("r") == (8, 10, 10, 11)
    assert h.sequences["r"].held().n_published == 8  # 23 is partial: nothing new to publish
    assert [slot[:2] for slot in h.runner.pages[23]] == [(0, 8), (0, 9), ("poison", -1), ("poison", -1)]

    plan = h.sched.plan()
    assert plan is not None
    assert plan.continued == (ContinuedRow("r", 10, 1, ((),)),) and plan.added == ()
    h.sched.apply(h.runner.execute(plan))
    assert h.counts("r") == (8, 11, 11, 12)
    assert [slot[:2] for slot in h.runner.pages[23]] == [(0, 8), (0, 9), (0, 10), ("poison", -1)]

    h.sched.finish("r", FinishReason.STOP)
    stats = h.cache.stats()
    assert (stats.evictable, stats.free) == (2, 1)
    assert h.cache.lookup(h.cache.chain(Namespace(b"weights"), letters)).n_hit == 8
    spare = h.cache.claim(chain, h.cache.lookup(chain, bypass="filler"), "filler")
    # free 23 first, then the evictable ones, the tail (19) before the head (7)
    assert h.cache.allocate(spare, 12) == ((23, 19, 7),)


def test_three_counts_name_the_slot_of_the_next_token() -> None:
    h = Harness()
    h.add("r", span(1, 10), max_tokens=9)
    h.step()
    seq = h.sequences["r"]
    for _ in range(6):
        # the next KV goes to logical block computed // B, slot computed % B
        at, slot = divmod(seq.n_computed, 4)
        h.step()
        page = seq.held().tables[0].blocks[at]
        assert h.runner.pages[page][slot][:2] == (0, seq.n_computed - 1)
        assert seq.n_known == seq.n_computed + 1
        assert seq.n_slots >= seq.n_computed


@pytest.mark.parametrize("n_prompt", [1, 3, 4, 5, 7, 8, 9, 12])
@pytest.mark.parametrize("max_tokens", [1, 2])
@pytest.mark.parametrize("budget", [1, 3, 64])
def test_b40_aligned_and_short_prompts_three_times(n_prompt: int, max_tokens: int, budget: int) -> None:
    h = Harness(budget=budget)
    for i, n_hit in enumerate([0, (n_prompt - 1) // 4 * 4, (n_prompt - 1) // 4 * 4]):
        h.generate(f"r{i}", span(1, n_prompt), max_tokens)
        assert h.n_hit(f"r{i}") == n_hit
        assert sum(h.runner.inputs[f"r{i}"]) == n_prompt - n_hit + max_tokens - 1


def test_b40_longest_prompt() -> None:
    h = Harness(max_model_len=33)
    for i, n_hit in enumerate([0, 28, 28]):
        seq = h.generate(f"r{i}", span(1, 32), max_tokens=5)
        assert h.n_hit(f"r{i}") == n_hit
        assert seq.n_generated == 1 and seq.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("budget", [1, 4, 5, 64])
@pytest.mark.parametrize("second", [False, True], ids=["alone", "two groups"])
@pytest.mark.parametrize("overlapped", [False, True], ids=["one step", "overlapped"])
def test_b43_every_mode_hits(budget: int, second: bool, overlapped: bool) -> None:
    h = Harness(groups=(FULL4, sliding(6)) if second else (FULL4,), budget=budget)
    for i, n_hit in enumerate([0, 8, 8]):
        h.add(f"r{i}", span(1, 12), 3)
        if overlapped:
            h.run_overlapped()
        else:
            h.run()
        h.check_output(f"r{i}")
        assert h.n_hit(f"r{i}") == n_hit


def test_b25_hit_is_subtracted_before_the_chunk_is_cut() -> None:
    h = Harness(budget=8)
    h.generate("warm", span(1, 8))
    h.add("r", span(1, 14))
    assert h.step().added[0].n_new == 6
    h.run()

    h.generate("warm2", span(101, 125))
    h.add("r2", span(101, 130))
    (row,) = h.step().added
    assert (row.n_computed, row.n_new) == (24, 6)
    assert h.n_hit("r2") == 24
    h.run()
    h.check_outputs()


def test_c50_b16_reuses_48() -> None:
    h = Harness(groups=(GroupSpec(GroupKind.FULL, 16),))
    h.generate("a", span(1, 60))
    h.generate("b", [*span(1, 50), 900, 901])
    assert h.n_hit("b") == 48
    assert h.runner.inputs["b"] == [4]


def test_blocks_are_shared_while_their_request_runs() -> None:
    h = Harness(budget=4)
    h.add("a", span(1, 12), max_tokens=8)
    h.step()
    h.step()
    assert h.cache.lookup(h.cache.chain(Namespace(b"weights"), span(1, 12))).n_hit == 8
    h.step()
    h.add("b", span(1, 12), max_tokens=8)
    h.step()
    assert h.n_hit("b") == 8
    assert h.tables("a")[0][:2] == h.tables("b")[0][:2]
    assert h.cache.stats().logical_blocks == h.cache.stats().physical_in_use + 2
    h.run()
    h.check_outputs()


def test_salts_and_bypass_do_not_hit() -> None:
    h = Harness()
    h.generate("a", span(1, 12), salt="x")
    h.generate("b", span(1, 12), salt="y")
    h.generate("c", span(1, 12))
    h.generate("d", span(1, 12), salt="x", bypass="skip_reading_prefix_cache")
    h.generate("e", span(1, 12), salt="x")
    assert [h.n_hit(r) for r in "abcde"] == [0, 0, 0, 0, 8]
