"""How K and V lie in memory: what a block of the store looks like to the operations that read and write it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class KVLayout(Protocol):
    """The form of a block in one layer: ``block_size`` tokens of K and V in all KV heads."""

    @property
    def n_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one layer, K, V and whatever belongs to them."""
        ...

    def allocate(self, n_layers: int, n_blocks: int) -> list[Pages]:
        """Zeroed memory, per layer: every slot holds finite numbers always. RuntimeError if there is none."""
        ...

    def read(self, pages: Pages, block: int, n_slots: int) -> tuple[Tensor, ...]:
        """The first ``n_slots`` slots of a block as they are stored: K and V [n_slots, n_kv_heads, head_dim], then
        their scales if there are any. Two blocks hold the same KV if and only if all this is equal bit for bit."""
        ...

    def copy(self, pages: Pages, source: int, target: int, n_slots: int) -> None:
        """The first ``n_slots`` slots of block ``source`` to ``target``, whose other slots keep what they hold."""
        ...


@dataclass(frozen=True, slots=True)
class Pages:
    """One layer's memory. What the tensors look like is the layout's business; the first dimension is the block."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def parts(self) -> list[Tensor]:
        """All that there is of them."""
        return [part for part in (self.k, self.v, self.k_scale, self.v_scale) if part is not None]


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's view of the paged store; ``group`` indexes RaggedBatch.groups."""

    pages: Pages
    group: int
    layout: KVLayout

    @property
    def k(self) -> Tensor:
        return self.pages.k

    @property
    def v(self) -> Tensor:
        return self.pages.v


@dataclass(frozen=True, slots=True)
class PlainLayout:
    """Token after token: K and V [n_blocks, block_size, n_kv_heads, head_dim] in the compute dtype ``dtype``, or as
    ``kv_dtype`` says in torch.int8, with scales float32 [n_blocks, block_size, n_kv_heads, 1]."""

    n_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype | None = None

    @property
    def block_bytes(self) -> int:
        head_bytes = self.head_dim * (self.kv_dtype or self.dtype).itemsize
        if self.kv_dtype is torch.int8:
            head_bytes += torch.float32.itemsize
        return 2 * self.block_size * self.n_kv_heads * head_bytes

    def allocate(self, n_layers: int, n_blocks: int) -> list[Pages]:
        shape = (n_layers, 2, n_blocks, self.block_size, self.n_kv_heads)
        pool = torch.zeros((*shape, self.head_dim), dtype=self.kv_dtype or self.dtype)
        if self.kv_dtype is not torch.int8:
            return [Pages(layer[0], layer[1]) for layer in pool]
        scales = torch.zeros((*shape, 1))
        return [Pages(*layer, *scale) for layer, scale in zip(pool, scales, strict=True)]

    def read(self, pages: Pages, block: int, n_slots: int) -> tuple[Tensor, ...]:
        return tuple(part[block, :n_slots] for part in pages.parts)

    def copy(self, pages: Pages, source: int, target: int, n_slots: int) -> None:
        for part in pages.parts:
            part[target, :n_slots] = part[source, :n_slots]
