"""The ring of accounts: bounded in number and in bytes, and found again by the answer's id."""

from __future__ import annotations

import tracemalloc

from headwater.cache.account import Account, Difference, Run, State
from headwater.cache.lookup import Stop, StopReason
from headwater.engine.messages import PrefixAccount
from headwater.serve.explain.ring import AccountRing, Finished


def finished(request_id: str, n_runs: int = 2) -> Finished:
    runs = tuple(Run(16 * i, 16, (State.HELD, State.EVICTED)[i % 2]) for i in range(n_runs))
    difference = Difference(40, 32, tuple(range(16)), tuple(range(16)), ("ann",))
    account = Account(99, 32, 0, Stop(StopReason.DIFFERS, 40), runs, difference, 16)
    return Finished(request_id, "ann", 1.5, 99, 32, 7, 0.25, PrefixAccount(account, 0.125))


def test_what_was_kept_comes_back() -> None:
    ring = AccountRing()
    ring.add("a", [finished("a")])
    ring.add("b", [finished("b-0"), finished("b-1")])
    assert ring.get("a") == [finished("a")]
    assert ring.get("b") == [finished("b-0"), finished("b-1")]
    assert ring.get("b-1") == [finished("b-1")]
    assert [ring.get(name) for name in ("c", "b-2", "a-0", "", "-")] == [None] * 5
    assert [one.request_id for one in ring.recent(9)] == ["b-1", "b-0", "a"]
    assert [one.request_id for one in ring.recent(2)] == ["b-1", "b-0"]


def test_the_oldest_go_first() -> None:
    ring = AccountRing(max_answers=3)
    for i in range(10):
        ring.add(f"r{i}", [finished(f"r{i}")])
    assert len(ring) == 3 and ring.get("r6") is None and ring.get("r7") is not None


def test_bytes_are_bounded_however_large_the_accounts() -> None:
    ring = AccountRing(max_bytes=100_000)
    for i in range(50):
        ring.add(f"r{i}", [finished(f"r{i}", n_runs=1000)])
        assert ring.n_bytes <= 100_000
    assert 1 <= len(ring) < 10
    ring.add("huge", [finished("huge", n_runs=50_000)])
    assert (len(ring), ring.n_bytes, ring.get("huge")) == (0, 0, None)


def test_a_full_ring_takes_what_the_documentation_states() -> None:
    """A thousand ordinary answers: below 2 MiB of the process's memory."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    ring = AccountRing()
    for i in range(3000):
        ring.add(f"chatcmpl-{i:032}", [finished(f"chatcmpl-{i:032}", n_runs=3)])
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(ring) == 1000
    assert taken < 2 * 2**20
    assert 0.5 * ring.n_bytes < taken < 1.5 * ring.n_bytes
