"""One picture of the content tree, with the sums below each branch: what is shown of it, largest first."""

from __future__ import annotations

import heapq
from array import array
from typing import Any

from headwater.engine.messages import TreeView
from headwater.serve.ui.wording import Wording

Json = dict[str, Any]

ID_CHARS = 32
"""A branch is named by this much of its first node's key, in hexadecimal."""


class Tree:
    """``view`` made ready to be shown. Tokens, blocks and hits of a branch include all below it."""

    def __init__(self, view: TreeView, wording: Wording) -> None:
        self._view = view
        self._wording = wording
        self._parents = _numbers(view.parents)
        self._starts = _numbers(view.starts)
        self._units = _numbers(view.units)
        self._held = _numbers(view.held)
        self._blocks = _numbers(view.blocks)
        self._hits = _numbers(view.hits)
        self._own_held = self._held[:]
        self._children: list[list[int]] = [[] for _ in self._parents]
        self._roots: list[int] = []
        for place in range(len(self._parents) - 1, -1, -1):
            parent = self._parents[place]
            if parent == place:
                self._roots.append(place)
                continue
            self._children[parent].append(place)
            for numbers in (self._held, self._blocks, self._hits):
                numbers[parent] += numbers[place]
        self._places = {self._id(place): place for place in range(len(self._parents))}

    def fold(self, n_rows: int) -> list[Json]:
        """At most ``n_rows`` branches, the largest of all that hang on one that is shown; parents come first."""
        chosen: list[int] = []
        waiting = [(-self._held[root], root) for root in self._roots]
        heapq.heapify(waiting)
        while waiting and len(chosen) < n_rows:
            place = heapq.heappop(waiting)[1]
            chosen.append(place)
            for child in self._largest(place, n_rows):
                heapq.heappush(waiting, (-self._held[child], child))
        return [self._row(place) for place in chosen]

    def below(self, name: str, n_rows: int) -> list[Json] | None:
        """The largest children of the branch of that name; None if this picture has none of that name."""
        place = self._places.get(name)
        return None if place is None else [self._row(child) for child in self._largest(place, n_rows)]

    @property
    def n_branches(self) -> int:
        return len(self._parents) - len(self._roots)

    @property
    def n_left_out(self) -> int:
        return self._view.n_left_out

    def _largest(self, place: int, n: int) -> list[int]:
        return heapq.nsmallest(n, self._children[place], key=lambda child: (-self._held[child], child))

    def _id(self, place: int) -> str:
        return self._view.keys[place].hex()[:ID_CHARS]

    def _row(self, place: int) -> Json:
        unit, parent = self._view.unit, self._parents[place]
        row: Json = {
            "id": self._id(place),
            "parent": None if parent == place else self._id(parent),
            "start": self._starts[place] * unit,
            "tokens": self._units[place] * unit,
            "tokens_held": self._own_held[place] * unit,
            "tokens_held_in_all": self._held[place] * unit,
            "blocks": self._blocks[place],
            "hits": self._hits[place],
            "n_children": len(self._children[place]),
        }
        if parent == place:
            return row | {"salted": self._view.salted[place], "adapters": self._view.adapters[place]}
        return row | {"text": self._wording.preview(self._view.previews[place])}


def _numbers(packed: bytes) -> array[int]:
    numbers: array[int] = array("i")
    numbers.frombytes(packed)
    return numbers
