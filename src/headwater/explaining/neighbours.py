"""Which of the texts seen so far shares the longest beginning with a new one."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import Generic

from headwater.text.common import Text, common_length


class Neighbours(Generic[Text]):
    """Keeps texts in order: the one that shares the longest beginning with another stands right beside its place."""

    def __init__(self) -> None:
        self._keys: list[Text] = []
        self._owners: list[int] = []

    def nearest(self, key: Text) -> tuple[int, int] | None:
        """The owner of the text with the longest common beginning, and that one's length; None if there is no text."""
        at = bisect_left(self._keys, key)
        found = [(self._owners[i], common_length(self._keys[i], key)) for i in (at - 1, at) if 0 <= i < len(self._keys)]
        return max(found, key=lambda one: (one[1], one[0]), default=None)

    def add(self, key: Text, owner: int) -> None:
        at = bisect_left(self._keys, key)
        self._keys.insert(at, key)
        self._owners.insert(at, owner)


TOKEN_BYTES = 4


def token_key(token_ids: Sequence[int]) -> bytes:
    """Token ids as bytes that sort as they do; TOKEN_BYTES for each."""
    packed = array("I", token_ids)
    packed.byteswap()
    return packed.tobytes()
