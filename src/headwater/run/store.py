"""The KV of all layers: one pool of pages, in which each layer has its view."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headwater.kernels.ops import LayerKV
from headwater.step import SlotCopy
from headwater.types import GroupSpec


class KVStore:
    """``n_blocks`` pages shared by all groups, zero at first: slots hold finite numbers always.

    One tensor [layers per group, 2 (K, V), n_blocks, block_size, n_kv_heads, head_dim]. Layer j of every group
    lives at index j: a page belongs to one group at a time, and its bytes are that group's layers.
    ``layers[i]`` is the view of the model's layer i.
    """

    def __init__(
        self, groups: Sequence[GroupSpec], n_blocks: int, n_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        per_group = len(groups[0].layers)
        block_size = groups[0].block_size
        if any(len(group.layers) != per_group or group.block_size != block_size for group in groups):
            raise ValueError("groups of one pool need the same number of layers and the same block size")
        self._pool = torch.zeros((per_group, 2, n_blocks, block_size, n_kv_heads, head_dim), dtype=dtype)
        views: dict[int, LayerKV] = {}
        for g, group in enumerate(groups):
            for j, layer in enumerate(group.layers):
                views[layer] = LayerKV(self._pool[j, 0], self._pool[j, 1], g)
        n_layers = per_group * len(groups)
        if sorted(views) != list(range(n_layers)):
            raise ValueError(f"groups must name every layer once: {n_layers} in all, and these {sorted(views)}")
        self.layers: list[LayerKV] = [views[layer] for layer in range(n_layers)]

    @property
    def n_blocks(self) -> int:
        return self._pool.shape[2]

    @property
    def n_bytes(self) -> int:
        return self._pool.numel() * self._pool.itemsize

    def copy(self, copies: Sequence[SlotCopy]) -> None:
        """One after another: the first ``n_slots`` slots of page ``source`` to ``target``, K and V, in all layers."""
        for copy in copies:
            self._pool[:, :, copy.target, : copy.n_slots] = self._pool[:, :, copy.source, : copy.n_slots]
