"""The account of a look-up: what it says, to whom, and that nothing else notices."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest

from headwater.cache.account import (
    MAX_COMPARED_ELSEWHERE,
    MAX_ELSEWHERE,
    SHOWN_TOKENS,
    Account,
    State,
    Viewer,
    elsewhere,
)
from headwater.cache.block import NOBODY
from headwater.cache.extras import Extra, MediaSpan
from headwater.cache.key import TokenChain
from headwater.cache.lookup import StopReason
from headwater.cache.prefix import PrefixCache
from headwater.cache.senders import MAX_KNOWN_SETS, MAX_SENDERS, Senders
from headwater.types import Namespace
from tests.cache.cache_model import BASE, full, make_cache, sliding, span

OPERATOR = Viewer("", operator=True)
ANN, BOB = Viewer("ann", operator=False), Viewer("bob", operator=False)


def serve(
    cache: PrefixCache,
    tokens: list[int],
    *,
    owner: str = "r",
    sender: str = "",
    namespace: Namespace = BASE,
    extras: tuple[Extra, ...] = (),
) -> None:
    """Compute and publish ``tokens`` as one request of ``sender``, which then leaves."""
    chain = cache.chain(namespace, tokens, extras)
    holding = cache.claim(chain, cache.lookup(chain), owner, sender)
    cache.allocate(holding, len(chain))
    cache.copied(holding)
    cache.publish(chain, holding, len(chain))
    cache.release(holding)
    cache.audit()


def explain(
    cache: PrefixCache,
    tokens: list[int],
    viewer: Viewer = OPERATOR,
    *,
    namespace: Namespace = BASE,
    extras: tuple[Extra, ...] = (),
    bypass: str | None = None,
) -> Account:
    told = cache.account(cache.lookup(cache.chain(namespace, tokens, extras), bypass=bypass), viewer)
    check(told)
    return told


def check(told: Account) -> None:
    """Runs cover the prompt without gaps, neighbours differ, and the first ones are what the look-up says."""
    at = 0
    for run in told.runs:
        assert run.first_token == at and run.n_tokens > 0
        at += run.n_tokens
    assert at == told.n_tokens
    assert all(a.state is not b.state for a, b in zip(told.runs, told.runs[1:], strict=False))
    n = Counter({State.HIT: 0, State.COPIED: 0})
    for run in told.runs:
        n[run.state] += run.n_tokens
    assert (n[State.HIT], n[State.COPIED]) == (told.n_hit, told.n_copy)
    assert told.n_compute >= 1 or told.n_tokens == 0
    assert told.sentence()
    other = told.difference
    if other is not None:
        assert (
            other.theirs is None
            or other.ours[: other.at_token - other.first] == (other.theirs[: other.at_token - other.first])
        )
        assert (
            other.theirs is None
            or other.ours[other.at_token - other.first] != (other.theirs[other.at_token - other.first])
        )


def states(told: Account) -> list[tuple[str, int]]:
    return [(run.state.value, run.n_tokens) for run in told.runs]


# ---- reasons and runs -------------------------------------------------------------------------------


def test_no_record() -> None:
    cache = make_cache()
    told = explain(cache, span(1, 9))
    assert (told.stop.reason, states(told), told.difference) == (StopReason.NO_RECORD, [("unknown", 9)], None)
    serve(cache, span(1, 8))
    told = explain(cache, span(1, 13))
    assert (told.stop.reason, told.stop.at_token) == (StopReason.NO_RECORD, 8)
    assert states(told) == [("hit", 8), ("unknown", 5)]
    assert "never" not in told.sentence()


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("n_same", range(12))
def test_the_differing_token_is_named_exactly_wherever_it_lies(n_same: int, partial: bool) -> None:
    cache = make_cache(partial=partial)
    serve(cache, span(1, 16))
    prompt = [*span(1, n_same), *span(101, 116 - n_same)]
    told = explain(cache, prompt)
    assert told.stop.reason is StopReason.DIFFERS
    assert told.difference is not None
    assert told.difference.at_token == n_same
    assert told.difference.first == max(0, n_same - SHOWN_TOKENS)
    first = told.difference.first
    assert told.difference.ours == tuple(prompt[first : n_same + SHOWN_TOKENS])
    assert told.difference.theirs == tuple(span(1, 16)[first : n_same + SHOWN_TOKENS])
    assert told.sentence() == f"differs from what is recorded at token {n_same}"
    n_whole, n_rest = n_same // 4 * 4, n_same % 4
    expected = [("hit", n_whole), ("copied" if partial else "held", n_rest), ("unknown", 16 - n_same)]
    assert states(told) == [(state, n) for state, n in expected if n]


def test_where_several_records_share_as_much_the_nearest_is_the_other_side() -> None:
    cache = make_cache(partial=False)
    for last in (7, 8, 9):
        serve(cache, [1, 2, 3, last, 5, 5, 5, 5])
    serve(cache, [1, 2, 9, 9, 6, 6, 6, 6])
    told = explain(cache, [1, 2, 9, 8, 5, 5])
    assert told.difference is not None
    assert (told.difference.at_token, told.difference.theirs) == (3, (1, 2, 9, 9, 6, 6, 6, 6))


def test_a_tail_that_fills_no_block_is_compared_too() -> None:
    cache = make_cache(partial=False)
    serve(cache, span(1, 8))
    told = explain(cache, [*span(1, 5), 77])
    assert (told.stop.reason, told.stop.at_token) == (StopReason.PARTIAL_BLOCK, 4)
    assert states(told) == [("hit", 4), ("held", 1), ("unknown", 1)]
    assert told.difference is not None and told.difference.at_token == 5
    assert explain(cache, span(1, 6)).difference is None  # it only ends


def test_last_token() -> None:
    cache = make_cache()
    serve(cache, span(1, 12))
    told = explain(cache, span(1, 8))
    assert told.stop.reason is StopReason.LAST_TOKEN
    assert states(told) == [("hit", 4), ("copied", 3), ("held", 1)]
    assert told.difference is None
    assert explain(cache, [*span(1, 7), 99]).difference is None  # the last token is computed whatever it is


def test_evicted_says_how_long_ago_and_for_whom_and_what_is_held_behind() -> None:
    now = [100.0]
    cache = make_cache(n_blocks=4, clock=lambda: now[0])
    serve(cache, span(1, 16))
    now[0] = 110.0
    serve(cache, span(51, 58), owner="greedy")
    now[0] = 112.5
    told = explain(cache, [*span(1, 16), 17])
    assert (told.stop.reason, told.stop.at_token, told.stop.request) == (StopReason.EVICTED, 8, "greedy")
    assert told.evicted_ago_s == 2.5
    assert told.sentence() == "recorded but no longer held from token 8 on, evicted 2.5 s ago for request greedy"
    assert states(told) == [("hit", 8), ("evicted", 8), ("unknown", 1)]
    chain = cache.chain(BASE, span(1, 4))
    holding = cache.claim(chain, cache.lookup(chain, bypass="a test"), "again")  # its head is computed a second time
    cache.allocate(holding, 4)
    cache.publish(chain, holding, 4)
    cache.release(holding)


def test_what_lies_behind_the_stop_is_held() -> None:
    cache = make_cache()
    serve(cache, span(1, 16))
    block = next(b for b, node in enumerate(cache.pool.node) if node is not None and node.depth == 2)
    del cache.pool.evictable[block]
    from headwater.cache.evict import Eviction

    cache.index.evict([block], Eviction(1.0, "pressure", "ann"))
    cache.pool.free.append(block)
    told = explain(cache, [*span(1, 16), 17])
    assert states(told) == [("hit", 4), ("evicted", 4), ("held", 8), ("unknown", 1)]
    assert told.stop.reason is StopReason.EVICTED


def test_computing() -> None:
    cache = make_cache()
    serve(cache, span(1, 4))
    chain = cache.chain(BASE, span(1, 14))
    holding = cache.claim(chain, cache.lookup(chain), "busy", "ann")
    cache.allocate(holding, 14)
    told = explain(cache, [*span(1, 10), *span(90, 95)])
    assert (told.stop.reason, told.stop.request) == (StopReason.COMPUTING, "busy")
    assert told.sentence() == "request busy is computing what follows from token 4 on now"
    assert states(told) == [("hit", 4), ("computing", 4), ("unknown", 8)]
    assert told.difference is None
    cache.release(holding)


def test_many_that_compute_the_same_cost_little_more_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step loop stands still for it, at every start of a request."""
    cache, n_compared = make_cache(n_blocks=4000), [0]
    same = TokenChain.same_unit

    def counting(self: TokenChain, other: TokenChain, i: int) -> bool:
        n_compared[0] += 1
        return same(self, other, i)

    for i in range(30):
        chain = cache.chain(BASE, [*span(1, 400), i])
        cache.allocate(cache.claim(chain, cache.lookup(chain), f"busy {i}"), len(chain))
    shorter, longer = cache.chain(BASE, span(1, 40)), cache.chain(BASE, span(1, 440))
    for chain in (shorter, longer):
        cache.claim(chain, cache.lookup(chain), "another")
    monkeypatch.setattr(TokenChain, "same_unit", counting)
    told = explain(cache, span(1, 441))
    assert states(told) == [("computing", 440), ("unknown", 1)]
    assert n_compared[0] < 100 + 10 + 60  # its own units once, and few for each of the others


def test_bypassed_shows_what_would_have_been_there() -> None:
    cache = make_cache()
    serve(cache, span(1, 8))
    told = explain(cache, span(1, 9), bypass="an_option")
    assert (told.stop.reason, told.stop.option) == (StopReason.BYPASSED, "an_option")
    assert states(told) == [("held", 8), ("unknown", 1)]
    assert (told.difference, told.sentence()) == (None, "not looked up: bypassed by an_option")


def test_other_media_are_no_difference_of_tokens() -> None:
    cache = make_cache()
    picture, other = MediaSpan(b"cat", 1, 2), MediaSpan(b"dog", 1, 2)
    serve(cache, span(1, 8), extras=(picture,))
    assert explain(cache, span(1, 9), extras=(picture,)).n_hit == 8
    told = explain(cache, span(1, 9), extras=(other,))
    assert (told.stop.reason, told.difference) == (StopReason.OTHER_IDENTITY, None)
    adapted = Namespace(BASE.weights, ((b"a", 1.0),))
    told = explain(cache, span(1, 9), namespace=adapted)
    assert (told.stop.reason, told.difference) == (StopReason.OTHER_IDENTITY, None)


def test_a_group_that_cannot_start_there() -> None:
    cache = make_cache(full(4), sliding(4, 5), partial=False)
    serve(cache, span(1, 12))
    for block, node in enumerate(list(cache.pool.node)):
        if node is not None and cache.pool.group[block] == 1 and node.depth > 1:
            from headwater.cache.evict import Eviction

            del cache.pool.evictable[block]
            cache.index.evict([block], Eviction(0.0, "pressure"))
            cache.pool.free.append(block)
    told = explain(cache, span(1, 13))
    assert (told.stop.reason, told.stop.group) == (StopReason.GROUP_CANNOT_START, 1)
    assert told.sentence().startswith("layer group 1 holds too little to start at token 4, evicted ")
    assert states(told) == [("hit", 4), ("held", 8), ("unknown", 1)]


def test_groups_of_other_block_sizes() -> None:
    cache = make_cache(full(8), sliding(4, 5), partial=False)
    serve(cache, span(1, 24))
    told = explain(cache, [*span(1, 13), 99, *span(15, 24)])
    assert told.min_reusable_tokens == 8
    assert told.difference is not None and told.difference.at_token == 13
    cache = make_cache(full(8), full(12), partial=False)  # key unit 4: no block ends with the first unit
    serve(cache, span(1, 24))
    assert states(explain(cache, [*span(1, 8), 99], bypass="an_option")) == [("held", 8), ("unknown", 1)]
    assert states(explain(cache, span(1, 9), bypass="an_option")) == [("held", 9)]


def test_random_traffic_gives_whole_accounts() -> None:
    """Any account covers its prompt, and the difference it names is one (``check``), in caches of several kinds."""
    import random

    rng = random.Random(5)
    for groups in ((full(4),), (full(4), sliding(4, 5)), (full(8), sliding(4, 9))):
        for partial in (False, True):
            cache = make_cache(*groups, n_blocks=24, partial=partial, max_ghosts=30)
            for _ in range(150):
                prompt = [rng.choice((1, 2)) for _ in range(rng.randint(1, 30))]
                told = explain(cache, prompt, rng.choice((OPERATOR, ANN)))
                if told.stop.reason is StopReason.DIFFERS:
                    assert told.difference is not None
                serve(cache, prompt, sender=rng.choice(("", "ann", "bob")))


# ---- who may see what -------------------------------------------------------------------------------


def test_the_other_side_is_shown_to_its_sender_and_to_the_operator_only() -> None:
    cache = make_cache()
    serve(cache, span(1, 12), sender="ann")
    prompt = [*span(1, 6), 99, 99, 99]
    for viewer, theirs in ((ANN, tuple(span(1, 12))), (BOB, None), (OPERATOR, tuple(span(1, 12)))):
        told = explain(cache, prompt, viewer)
        assert told.difference is not None
        assert (told.difference.at_token, told.difference.theirs) == (6, theirs)
        assert (told.n_hit, told.n_copy, told.stop.reason) == (4, 2, StopReason.DIFFERS)
        assert told.difference.ours == tuple(prompt)


def test_who_sent_only_the_beginning_does_not_see_the_rest() -> None:
    cache = make_cache()
    serve(cache, span(1, 12), sender="ann")
    serve(cache, span(1, 8), sender="bob")
    told = explain(cache, [1, 2, 99, 99, 99], BOB)
    assert told.difference is not None and told.difference.theirs == tuple(span(1, 8))
    told = explain(cache, [*span(1, 8), 99, 99, 99, 99, 99], BOB)
    assert told.difference is not None and told.difference.theirs is None
    told = explain(cache, [1, 2, 99, 99, 99], ANN)
    assert told.difference is not None and told.difference.theirs == tuple(span(1, 10))


def test_of_records_that_share_as_much_ones_own_is_shown() -> None:
    cache = make_cache()
    for sender, token in (("bob", 50), ("ann", 60), ("bob", 70)):
        serve(cache, [1, 2, 3, 4, 5, token, 7, 8], sender=sender)
    for viewer, token in ((ANN, 60), (BOB, 50)):
        told = explain(cache, [1, 2, 3, 4, 5, 55, 7, 8, 9], viewer)
        assert told.difference is not None and told.difference.theirs is not None
        assert token in told.difference.theirs


def test_requests_of_others_are_not_named() -> None:
    cache = make_cache(n_blocks=4)
    serve(cache, span(1, 16), sender="ann")
    serve(cache, span(51, 58), owner="greedy", sender="bob")
    for viewer, named in ((ANN, None), (BOB, "greedy"), (OPERATOR, "greedy")):
        told = explain(cache, [*span(1, 16), 17], viewer)
        assert told.stop.request == named
        assert ("greedy" in told.sentence()) == (named is not None)
        assert "greedy" not in told.stop.describe()
        assert "greedy" not in repr(told) or named
    busy = cache.chain(BASE, span(70, 80))
    holding = cache.claim(busy, cache.lookup(busy), "secretly", "bob")
    told = explain(cache, span(70, 80), ANN)
    assert (told.stop.reason, told.stop.request) == (StopReason.COMPUTING, None)
    assert told.sentence() == "another request is computing what follows from token 0 on now"
    cache.release(holding)


def test_what_is_hidden_later_is_what_would_not_have_been_told() -> None:
    cache = make_cache(n_blocks=6, clock=lambda: 1.0)
    serve(cache, span(1, 16), sender="ann")
    serve(cache, span(51, 62), owner="greedy", sender="bob")
    for prompt in ([*span(1, 16), 17], [1, 2, 99, 99, 99], [51, 52, 99, 99, 99]):
        for viewer in (ANN, BOB):
            whole = explain(cache, prompt, Viewer(viewer.sender, operator=True))
            assert whole.seen_by(viewer) == explain(cache, prompt, viewer)


# ---- senders ----------------------------------------------------------------------------------------


def test_without_keys_nothing_is_noted() -> None:
    cache = make_cache()
    serve(cache, span(1, 12))
    nodes = [node for node in cache.pool.node if node is not None]
    assert len(nodes) == 3 and all(node.senders is NOBODY for node in nodes)


def test_senders_are_interned_and_bounded() -> None:
    cache = make_cache()
    for i in range(MAX_SENDERS + 5):
        serve(cache, span(1, 12), sender=f"s{i:02}")
    nodes = [node for node in cache.pool.node if node is not None]
    assert {id(node.senders) for node in nodes} == {id(nodes[0].senders)}
    assert nodes[0].senders == {f"s{i:02}" for i in range(MAX_SENDERS)}
    senders = Senders()
    for i in range(MAX_KNOWN_SETS * 2):
        senders.note(nodes[:1], f"t{i}")
        nodes[0].senders = NOBODY
    assert len(senders._sets) <= MAX_KNOWN_SETS


# ---- other namespaces -------------------------------------------------------------------------------


def others(cache: PrefixCache, tokens: list[int], n: int) -> None:
    for i in range(n):
        serve(cache, tokens, namespace=Namespace(BASE.weights, salt=f"tenant {i}"))


def test_an_operator_is_told_what_other_namespaces_hold_as_digests() -> None:
    cache = make_cache(n_blocks=256)
    others(cache, span(1, 12), 3)
    serve(cache, span(1, 4), namespace=Namespace(BASE.weights, salt="short"))
    chain = cache.chain(BASE, span(1, 14))
    found = elsewhere(cache.index, chain)
    assert [other.n_hit for other in found] == [12, 12, 12, 4]
    digests = {root.identity.digest for root in cache.index.roots.values()}
    assert {other.namespace for other in found} <= digests
    assert "tenant" not in repr(found)
    others(cache, span(1, 8), 30)
    assert len(elsewhere(cache.index, chain)) == MAX_ELSEWHERE


def test_the_walk_of_other_namespaces_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.cache.account.MAX_COMPARED_ELSEWHERE", 7)
    assert MAX_COMPARED_ELSEWHERE > 7
    cache = make_cache(n_blocks=256)
    others(cache, span(1, 12), 9)
    assert sum(other.n_hit // 4 + 1 for other in elsewhere(cache.index, cache.chain(BASE, span(1, 14)))) <= 8


def work(cache: PrefixCache, tokens: list[int], viewer: Viewer) -> tuple[Account, Counter[str]]:
    """An account, and every call that Python made for it."""
    chain = cache.chain(BASE, tokens)
    calls: Counter[str] = Counter()

    def count(frame: Any, event: str, argument: Any) -> None:
        calls[f"{event} {frame.f_code.co_name} {getattr(argument, '__name__', '')}"] += 1

    sys.setprofile(count)
    try:
        told = cache.account(cache.lookup(chain), viewer)
    finally:
        sys.setprofile(None)
    return told, calls


@pytest.mark.parametrize("mine", [[], span(1, 6), span(1, 30)])
def test_b05_neither_answer_nor_work_depends_on_other_namespaces(mine: list[int]) -> None:
    """What others have cached under another salt, equal or not, changes nothing that a tenant could see or measure."""
    seen = []
    for n_others, theirs in ((0, []), (1, span(1, 40)), (6, span(1, 40)), (6, [7, *span(2, 40)])):
        cache = make_cache(n_blocks=256)
        if mine:
            serve(cache, mine, sender="ann")
        others(cache, theirs, n_others)
        busy = cache.chain(Namespace(BASE.weights, salt="busy"), span(1, 40))
        holding = cache.claim(busy, cache.lookup(busy), "busy") if n_others else None
        seen.append(work(cache, [*span(1, 20), 99, 99], ANN))
        if holding is not None:
            cache.release(holding)
    assert seen == [seen[0]] * 4


def test_the_work_test_sees_work() -> None:
    cache = make_cache(n_blocks=256)
    less = work(cache, span(1, 20), ANN)[1]
    serve(cache, span(1, 20))
    assert work(cache, span(1, 20), ANN)[1] != less
