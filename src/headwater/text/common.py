"""How far two texts are the same."""

from __future__ import annotations

from typing import TypeVar

Text = TypeVar("Text", str, bytes)


def common_length(a: Text, b: Text) -> int:
    """How many characters (or bytes) two texts have in common at their beginning."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
