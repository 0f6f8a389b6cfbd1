"""Explain asked of the engine: what it answers, that it leaves no trace, and what it may take."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from headwater.cache.account import Account, State, Viewer
from headwater.cache.lookup import StopReason
from headwater.engine.messages import (
    Delta,
    Explain,
    Explained,
    FromEngine,
    Outputs,
    PrefixAccount,
    Refused,
    ToEngine,
)
from headwater.types import GroupKind, GroupSpec
from tests.engine.test_core import Engine

OPERATOR = Viewer("", operator=True)
HYBRID = (GroupSpec(GroupKind.FULL, 4), GroupSpec(GroupKind.SLIDING, 4, window=7))


def explain(engine: Engine, prompt: bytes | list[int], viewer: Viewer = OPERATOR, **more: Any) -> PrefixAccount:
    reply = engine.core.call(Explain(7, list(prompt), viewer, **more))
    assert isinstance(reply, Explained) and reply.call_id == 7
    return reply.prefix


def generate(engine: Engine, r: str, prompt: bytes, **more: Any) -> Delta:
    engine.submit(r, prompt, params={"max_tokens": 1}, **more)
    engine.run()
    return engine.last(r)


def told(delta: Delta) -> Account:
    assert delta.prefix is not None
    return delta.prefix.account


def everything(*roots: object) -> list[object]:
    """The whole state behind ``roots`` in the order in which it is met: values, orders of all containers, and which
    objects are the same one. Not the clock, which is a function."""
    seen: dict[int, int] = {}
    kept: list[object] = []
    todo: list[object] = list(reversed(roots))
    found: list[object] = []
    while todo:
        at = todo.pop()
        if isinstance(at, (str, bytes, int, float, bool, type(None), Callable, type)):  # type: ignore[arg-type]
            found.append(at if not callable(at) else getattr(at, "__qualname__", "callable"))
            continue
        if id(at) in seen:
            found.append(("again", seen[id(at)]))
            continue
        seen[id(at)] = len(seen)
        kept.append(at)  # no id is used twice while this runs
        found.append(type(at).__name__)
        parts: list[object] = []
        if isinstance(at, (dict, OrderedDict)):
            parts = [part for pair in at.items() for part in pair]
        elif isinstance(at, (set, frozenset)):
            parts = sorted(at, key=repr)
        elif hasattr(at, "__iter__") and hasattr(at, "__len__"):
            parts = list(at)
        slots = [name for kind in type(at).__mro__ for name in getattr(kind, "__slots__", ())]
        names = sorted({*getattr(at, "__dict__", {}), *slots} - {"__weakref__", "__dict__"})
        parts += [part for name in names for part in (name, getattr(at, name, None))]
        todo += reversed(parts)
    return found


@pytest.mark.parametrize("groups", [(GroupSpec(GroupKind.FULL, 4),), HYBRID])
def test_ten_thousand_explains_change_nothing(groups: tuple[GroupSpec, ...]) -> None:
    """In the midst of traffic, with evicted, held, computed and waiting blocks: eviction order, recency, counters,
    ghosts, tree, in-flight state and the answers to come are what they are without."""
    engines = []
    prompts = [b"a common beginning, and then %d." % i for i in range(9)]
    prompts += [
        b"another beginning, of which more is evicted",
        b"never seen",
        b"a",
        b"a common beginning, being computed now and for long, they say",
    ]
    for n in (0, 10_000):
        engine = Engine(n_blocks=40, budget=16, groups=groups)
        for i in range(12):
            generate(engine, f"r{i}", prompts[i % 10], sender=f"s{i % 3}")
        engine.submit(
            "busy", b"a common beginning, being computed now and for long", params={"max_tokens": 9}, sender="s1"
        )
        engine.step()
        engine.submit("waiting", b"a common beginning, being computed now as well", params={"max_tokens": 3})
        before = everything(engine.cache, engine.sched)
        order = list(engine.cache.pool.evictable)
        reasons = set()
        for i in range(n):
            viewer = (OPERATOR, Viewer("s1", operator=False))[i % 2]
            salt = (None, None, "salt")[i % 3]
            skip = i % 7 == 0
            asked = explain(engine, prompts[i % 13], viewer, cache_salt=salt, skip_reading_prefix_cache=skip)
            reasons.add(asked.account.stop.reason)
        if n:
            assert {StopReason.COMPUTING, StopReason.DIFFERS, StopReason.BYPASSED, StopReason.NO_RECORD} <= reasons
            assert len(before) > 1000
            assert everything(engine.cache, engine.sched) == before
        assert list(engine.cache.pool.evictable) == order
        engine.sched.audit()
        stats = engine.cache.stats()
        engine.run()
        engines.append((stats, order, engine.tokens("busy"), engine.tokens("waiting"), engine.cache.stats()))
    assert engines[0] == engines[1]


def test_the_comparison_sees_a_touch() -> None:
    engine = Engine()
    generate(engine, "a", b"some prompt that fills blocks")
    before = everything(engine.cache)
    assert everything(engine.cache) == before
    engine.cache.pool.evictable.move_to_end(next(iter(engine.cache.pool.evictable)))
    assert everything(engine.cache) != before


def test_explain_says_what_the_request_then_gets() -> None:
    """Predicted and real accounts are one, over traffic of all kinds."""
    for groups in ((GroupSpec(GroupKind.FULL, 4),), HYBRID):
        for partial in (False, True):
            engine = Engine(n_blocks=24, groups=groups, partial=partial)
            reasons = set()
            for i in range(60):
                prompt = b"beginning %d, then the middle %d and the end" % (i % 3, i % 7)
                prompt = prompt[: 10 + 5 * (i % 8)]
                skip = i % 11 == 0
                expected = explain(engine, prompt, skip_reading_prefix_cache=skip).account
                real = told(generate(engine, f"r{i}", prompt, skip_reading_prefix_cache=skip))
                usage = engine.last(f"r{i}").usage
                assert usage is not None and usage.n_cached == expected.n_hit + expected.n_copy
                assert msgspec.structs.replace(engine.last(f"r{i}")).prefix_stop == expected.stop.reason.value
                assert (real.runs, real.difference, real.stop) == (expected.runs, expected.difference, expected.stop)
                reasons.add(real.stop.reason)
            assert len(reasons) >= 4


def test_the_account_comes_once_with_the_first_delta_even_before_the_first_token() -> None:
    engine = Engine(budget=8)
    engine.submit("a", b"a prompt that takes more than a step", params={"max_tokens": 3})
    engine.step()
    first = engine.deltas["a"]
    assert [(d.token_ids, d.text, d.finish_reason) for d in first] == [([], "", None)]
    assert first[0].prefix_stop == "no_record" and first[0].usage is not None
    engine.run()
    assert [d.prefix is not None for d in engine.deltas["a"]] == [True, False, False, False]
    assert [len(d.token_ids) for d in engine.deltas["a"]] == [0, 1, 1, 1]


def test_a_preempted_request_keeps_the_account_of_its_first_start() -> None:
    from headwater.engine.messages import ResetCache

    engine = Engine(budget=8)
    engine.submit("a", b"a prompt that takes several steps of 8", params={"max_tokens": 2})
    engine.step()
    assert engine.core.call(ResetCache(1, force=True))
    engine.run()
    assert [d.prefix is not None for d in engine.deltas["a"]] == [True, False, False]


def test_other_peoples_tokens_and_requests_stay_in_the_engine() -> None:
    engine = Engine(partial=False)
    generate(engine, "ann-1", b"one two three four", sender="ann")
    for sender, operator, shown in (("ann", False, True), ("bob", False, False), ("bob", True, True)):
        account = explain(engine, b"one two throw", Viewer(sender, operator)).account
        assert account.difference is not None and account.difference.at_token == 11
        assert (account.difference.theirs is not None) == shown
        assert account.n_hit == 8
    account = told(generate(engine, "bob-1", b"one two throw", sender="bob"))
    assert account.difference is not None and account.difference.senders == ("ann",)
    assert account.seen_by(Viewer("bob", operator=False)).difference.theirs is None  # type: ignore[union-attr]


def test_only_an_operators_explain_walks_other_namespaces() -> None:
    engine = Engine()
    generate(engine, "a", b"one two three four", cache_salt="ann's")
    assert explain(engine, b"one two three four").account.elsewhere[0].n_hit == 16
    assert explain(engine, b"one two three four", Viewer("bob", operator=False)).account.elsewhere == ()
    assert told(generate(engine, "b", b"one two three four")).elsewhere == ()


def test_what_is_no_token_id_is_refused() -> None:
    engine = Engine()
    for bad in (-1, 258):
        reply = engine.core.call(Explain(3, [1, bad], OPERATOR))
        assert isinstance(reply, Refused) and reply.error_kind == "bad_request"
        assert "prompt[1]" in reply.error


def test_accounts_travel_as_messages() -> None:
    engine = Engine(n_blocks=8)
    generate(engine, "a", b"one two three four", sender="ann")
    prefix = explain(engine, b"one two throw")
    for message in (Explained(1, prefix), Explain(2, [1], OPERATOR, "salt")):
        kind = FromEngine if isinstance(message, Explained) else ToEngine
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind) == message
    outputs = engine.core.stats()
    sent = Outputs([Delta("a", [], "", prefix=prefix)], outputs)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=FromEngine) == sent
    assert prefix.account.runs[0].state is State.HIT


def test_without_accounts_a_delta_has_the_reason_only() -> None:
    from headwater.sched.parts.accounts import Accounts

    engine = Engine()
    engine.sched._parts = tuple(part for part in engine.sched._parts if not isinstance(part, Accounts))
    engine.sched._planner._parts = engine.sched._parts
    delta = generate(engine, "a", b"one two three four")
    assert (delta.prefix, delta.prefix_stop) == (None, "no_record")


def test_the_estimate_comes_from_steps() -> None:
    engine = Engine()
    assert explain(engine, b"one two").estimate_s is None
    generate(engine, "a", b"one two three four")
    estimate = explain(engine, b"never seen before").estimate_s
    assert estimate is not None and estimate > 0


def test_a_long_prompt_is_explained_in_linear_time() -> None:
    """Doubling a prompt must not quadruple the time that the step loop stands still for it."""
    engine = Engine(n_blocks=4096, budget=4096, max_model_len=17_000)
    generate(engine, "a", bytes(i * i % 251 for i in range(16_000)))
    times = []
    for n in (4_000, 16_000):
        prompt = bytes(i * i % 251 for i in range(n))
        start = time.perf_counter()
        for _ in range(3):
            explain(engine, prompt)
        times.append(time.perf_counter() - start)
    assert times[1] < 12 * times[0]
