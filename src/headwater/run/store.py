"""The KV of all layers: one pool of pages, in which each layer has its view."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.kernels.layout import KVLayout, LayerKV
from headwater.step import SlotCopy
from headwater.types import GroupSpec


class KVStore:
    """``n_blocks`` pages shared by all groups, zero at first: slots hold finite numbers always.

    Layer j of every group lives at index j of the pool: a page belongs to one group at a time, and its bytes are that
    group's layers. ``layers[i]`` is the view of the model's layer i.
    """

    def __init__(self, groups: Sequence[GroupSpec], n_blocks: int, layout: KVLayout) -> None:
        per_group = len(groups[0].layers)
        if any(len(group.layers) != per_group or group.block_size != layout.block_size for group in groups):
            raise ValueError("groups of one pool need the same number of layers and the layout's block size")
        self.layout = layout
        self.n_blocks = n_blocks
        self._pool = layout.allocate(per_group, n_blocks)
        views: dict[int, LayerKV] = {}
        for g, group in enumerate(groups):
            for j, layer in enumerate(group.layers):
                views[layer] = LayerKV(self._pool[j], g, layout)
        n_layers = per_group * len(groups)
        if sorted(views) != list(range(n_layers)):
            raise ValueError(f"groups must name every layer once: {n_layers} in all, and these {sorted(views)}")
        self.layers: list[LayerKV] = [views[layer] for layer in range(n_layers)]

    @property
    def n_bytes(self) -> int:
        return len(self._pool) * self.n_blocks * self.layout.block_bytes

    def clear(self, first: int, end: int) -> None:
        """Zeros into pages ``first`` to ``end`` - 1, as they were at first."""
        for pages in self._pool:
            for part in pages.parts:
                part[first:end].zero_()

    def copy(self, copies: Sequence[SlotCopy]) -> None:
        """One after another: the first ``n_slots`` slots of page ``source`` to ``target``, K and V, in all layers."""
        for copy in copies:
            for pages in self._pool:
                self.layout.copy(pages, copy.source, copy.target, copy.n_slots)
