"""One picture of everything that the live page shows, and what it takes to get there from the one before."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import msgspec

from headwater.cache.picture import AGES_S, CACHED, FENCED, FREE, IN_USE, SHARED

Json = dict[str, Any]

DIFFERENCE_BYTES = 5
"""Of a cell in a difference: its place and its new value."""


class Frame:
    """``cells`` as in PoolPicture, with the group of a block in the upper four bits. ``samples`` and ``requests`` are
    all that a new viewer is told, the newest requests first; ``n_new`` of them are not in the frame before."""

    def __init__(
        self,
        number: int,
        time_s: float,
        *,
        cells: bytes,
        queue: list[int],
        tree: Json,
        counters: dict[str, float],
        samples: list[list[float]],
        requests: list[Json],
        n_new: int,
    ) -> None:
        self.number = number
        self.time_s = time_s
        self.cells = cells
        self.queue = queue
        self.tree = tree
        self.counters = counters
        self.samples = samples
        self.requests = requests
        self.n_new = n_new
        self._whole: bytes | None = None
        self._after: tuple[int, bytes] | None = None

    def body(self) -> Json:
        """All of it, but for the cells."""
        return {
            "frame": self.number,
            "time": self.time_s,
            "counts": count_cells(self.cells),
            "queue": self.queue,
            "tree": self.tree,
            "counters": self.counters,
            "samples": self.samples,
            "requests": self.requests,
        }

    def whole(self) -> bytes:
        """For a viewer who has nothing yet; made once, whoever asks."""
        if self._whole is None:
            self._whole = msgspec.json.encode(self.body() | {"cells": b64encode(self.cells).decode()})
        return self._whole

    def after(self, seen: Frame) -> bytes:
        """For a viewer who has seen ``seen``: what is new, if that is the frame before this one."""
        if seen.number != self.number - 1:
            return self.whole()
        if self._after is None or self._after[0] != seen.number:
            self._after = seen.number, msgspec.json.encode(self._news(seen))
        return self._after[1]

    def _news(self, seen: Frame) -> Json:
        last_s = seen.samples[-1][0] if seen.samples else 0.0
        news: Json = {
            "frame": self.number,
            "base": seen.number,
            "time": self.time_s,
            "samples": [sample for sample in self.samples if sample[0] > last_s],
            "requests": self.requests[: self.n_new],
            "counters": self.counters,
        }
        if self.cells != seen.cells:
            news["counts"] = count_cells(self.cells)
            news |= difference(seen.cells, self.cells)
        if self.queue != seen.queue:
            news["queue"] = self.queue
        if self.tree is not seen.tree:
            news["tree"] = self.tree
        return news


def difference(old: bytes, new: bytes) -> Json:
    """``at`` (little-endian uint32) and ``to`` (bytes), in base64; or all ``cells`` where that is less."""
    places = [place for place, (before, after) in enumerate(zip(old, new, strict=True)) if before != after]
    if len(places) * DIFFERENCE_BYTES >= len(new):
        return {"cells": b64encode(new).decode()}
    at = b"".join([place.to_bytes(4, "little") for place in places])
    return {"at": b64encode(at).decode(), "to": b64encode(bytes([new[place] for place in places])).decode()}


def count_cells(cells: bytes) -> Json:
    """Blocks by state; ``ages`` counts the evictable ones by class of age."""
    codes = cells.translate(bytes(code & 15 for code in range(256)))
    ages = [codes.count(CACHED + age) for age in range(len(AGES_S) + 1)]
    return {
        "free": codes.count(FREE),
        "in_use": codes.count(IN_USE),
        "shared": codes.count(SHARED),
        "fenced": codes.count(FENCED),
        "evictable": sum(ages),
        "ages": ages,
    }


def with_groups(cells: bytes, groups: bytes) -> bytes:
    """Cells with the group in the upper bits; the last of 16 stands for all from there on."""
    if not groups:
        return cells
    return bytes([cell | min(group, 15) << 4 for cell, group in zip(cells, groups, strict=True)])
