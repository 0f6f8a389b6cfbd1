"""Sequences in the order in which they are served: by priority, then by arrival."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from headwater.sched.sequence import Sequence


class SequenceQueue:
    """A sorted list: first and last are O(1), joining and leaving O(log n) compares and one memmove.

    (A heap would make leaving from the middle, which an abort needs, a scan or a tombstone.)
    """

    __slots__ = ("_items",)

    def __init__(self) -> None:
        self._items: list[tuple[int, int, Sequence]] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return (item[2] for item in self._items)

    def add(self, seq: Sequence) -> None:
        key = (*seq.order, seq)
        self._items.insert(bisect_left(self._items, key[:2]), key)

    def remove(self, seq: Sequence) -> None:
        at = bisect_left(self._items, seq.order)
        if at == len(self._items) or self._items[at][2] is not seq:
            raise KeyError(f"sequence {seq.request_id!r} is not in this queue")
        del self._items[at]

    def __getitem__(self, at: int) -> Sequence:
        """The one at place ``at``, counted from the first."""
        return self._items[at][2]

    @property
    def last(self) -> Sequence:
        """The newest of the lowest priority: the one to preempt."""
        return self._items[-1][2]
