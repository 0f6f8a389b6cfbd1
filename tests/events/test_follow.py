"""What a reader makes of batches, one by one, without sockets."""

from __future__ import annotations

from headwater.events.follow import Follower, Verdict
from headwater.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, Event, Message, decode, encode

A, B, C = (bytes([i]) * 32 for i in (1, 2, 3))
ONE, TWO = b"start 1", b"start 2"


def stored(*keys: bytes, parent: bytes | None = None, publisher: bytes | None = None, group: int = 0) -> BlockStored:
    tokens = list(range(2 * len(keys)))
    return BlockStored(list(keys), parent, tokens, 2, None, "GPU", None, group_idx=group, publisher=publisher)


def batch(sequence: int, *events: Event, time_s: float = 0.0) -> Message:
    return decode(sequence, encode(time_s, events, legacy=False))


def following(sequence: int = 5, publisher: bytes | None = ONE) -> Follower:
    follower = Follower()
    follower.restore([batch(sequence, AllBlocksCleared(publisher), stored(A), time_s=100.0)])
    return follower


def keys(follower: Follower) -> set[bytes]:
    return {key for _, key in follower.keys}


def test_nothing_is_applied_before_a_snapshot() -> None:
    follower = Follower()
    assert follower.push(batch(0, stored(A))) is Verdict.GAP
    assert follower.keys == set()


def test_batches_are_applied_in_order_once() -> None:
    follower = following()
    assert follower.push(batch(6, stored(C, publisher=ONE))) is Verdict.GAP
    assert follower.push(batch(5, stored(B, C, parent=A, publisher=ONE))) is Verdict.APPLIED
    assert follower.push(batch(5, stored(B, C, parent=A, publisher=ONE))) is Verdict.OLD
    assert {key: block.parent for (_, key), block in follower.blocks.items()} == {A: None, B: A, C: B}
    assert follower.blocks[0, C].token_ids == (2, 3)
    assert follower.push(batch(6, BlockRemoved([A, B], "GPU", 0, ONE))) is Verdict.APPLIED
    assert keys(follower) == {C}
    assert follower.push(batch(7, AllBlocksCleared(ONE), stored(A))) is Verdict.APPLIED
    assert keys(follower) == {A}


def test_groups_are_apart() -> None:
    follower = following()
    follower.push(batch(5, stored(A, group=1, publisher=ONE)))
    follower.push(batch(6, BlockRemoved([A], "GPU", 0, ONE)))
    assert follower.keys == {(1, A)}


def test_b74_what_is_from_another_start_is_not_applied_whatever_its_number() -> None:
    for sequence in (0, 5, 9):
        follower = following()
        assert follower.push(batch(sequence, stored(B, publisher=TWO), time_s=200.0)) is Verdict.RESTARTED
        assert keys(follower) == {A}
        follower.forget()
        assert follower.keys == set()
        follower.restore([batch(3, AllBlocksCleared(TWO), time_s=201.0)])
        assert follower.push(batch(6, stored(C, publisher=ONE), time_s=150.0)) is Verdict.OLD, "it was on its way"
        assert follower.push(batch(3, stored(B, publisher=TWO), time_s=202.0)) is Verdict.APPLIED
        assert keys(follower) == {B}


def test_b74_the_legacy_layout_tells_a_start_anew_by_its_numbers() -> None:
    follower = following(publisher=None)
    follower.push(batch(5, stored(B), time_s=110.0))
    assert follower.push(batch(4, stored(C), time_s=105.0)) is Verdict.OLD
    assert follower.push(batch(0, AllBlocksCleared(), time_s=120.0)) is Verdict.RESTARTED


def test_b74_a_replay_continues_only_from_the_very_same_batch() -> None:
    for publisher in (ONE, None):
        follower = following(publisher=publisher)
        last = batch(5, stored(B, publisher=publisher), time_s=110.0)
        follower.push(last)
        assert follower.continues(last)
        assert not follower.continues(batch(5, stored(C, publisher=publisher), time_s=110.0))
        assert not follower.continues(batch(5, stored(B, publisher=publisher), time_s=111.0))
        assert not follower.continues(batch(6, stored(B, publisher=publisher), time_s=110.0))


def test_after_a_snapshot_a_replay_continues_from_the_same_start_of_the_engine() -> None:
    before = batch(4, stored(A, publisher=ONE))
    assert following(publisher=ONE).continues(before)
    assert not following(publisher=TWO).continues(before)
    assert not following(publisher=None).continues(batch(4, stored(A))), "the legacy layout cannot say"
