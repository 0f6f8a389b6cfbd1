"""How the native kernels want K and V stored: in panels of 16 slots, in the order in which they are multiplied.

A KV head's slots of a block lie together. With a dword of ``pair`` elements (2 bf16, 1 float32) they go, 16 slots at a
time, K as [head_dim / pair][16][pair] and V as [16 / pair][head_dim][pair]; a block size that is no multiple of 16 as
plain rows [block_size][head_dim]. Values in int8 lie where the compute dtype's would, so that widening them is
elementwise. The C side of this is ``cpu/paged.h``.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwater.errors import ConfigError
from headwater.kernels.layout import Pages
from headwater.kernels.pages import huge_tensor

PANEL = 16
"""Slots in a panel."""
MAX_HEAD_DIM = 256
DTYPES = (torch.bfloat16, torch.float32)


def stores_heads_of(head_dim: int) -> bool:
    """Whether the native attention takes heads of that size."""
    return head_dim % 32 == 0 and 32 <= head_dim <= MAX_HEAD_DIM


class Store(ctypes.Structure):
    """``hw::Store``: one layer."""

    _fields_ = (
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("k_scale", ctypes.c_void_p),
        ("v_scale", ctypes.c_void_p),
        ("block_stride", ctypes.c_int64),
        ("scale_stride", ctypes.c_int64),
        ("n_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class PanelPages(Pages):
    """K and V [n_blocks, n_kv_heads, block_size * head_dim], scales [n_blocks, n_kv_heads, block_size]: views of one
    layer, each block's part contiguous, the blocks a stride apart."""

    store: Store = field(default_factory=Store, compare=False, repr=False)
    address: int = field(default=0, compare=False, repr=False)
    """Of ``store``."""


@dataclass(frozen=True)
class PanelLayout:
    """``KVLayout`` of the native kernels. ``dtype`` is the compute dtype, ``kv_dtype`` that or torch.int8 (symmetric, a
    float32 scale per token and head).

    Raises ConfigError for a head size that is no multiple of 32 up to 256, or other dtypes.
    """

    n_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    k_order: Tensor = field(init=False, compare=False, repr=False)
    """int64 [block_size * head_dim]: where the elements (slot, dimension) of a head's block are."""
    v_order: Tensor = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not stores_heads_of(self.head_dim):
            raise ConfigError(
                f"the native attention takes heads of 32, 64, ... {MAX_HEAD_DIM} elements, not {self.head_dim}: "
                "the PyTorch operations serve this model"
            )
        if self.dtype not in DTYPES or self.kv_dtype not in (self.dtype, torch.int8):
            raise ConfigError(
                f"the native attention computes in bfloat16 or float32 and stores KV in that or int8; "
                f"not {self.dtype} with KV in {self.kv_dtype}"
            )
        k_order, v_order = self._orders()
        object.__setattr__(self, "k_order", k_order)
        object.__setattr__(self, "v_order", v_order)

    def _orders(self) -> tuple[Tensor, Tensor]:
        slot = torch.arange(self.block_size)[:, None]
        d = torch.arange(self.head_dim)
        if self.block_size % PANEL:
            plain = (slot * self.head_dim + d).reshape(-1)
            return plain, plain
        pair = 4 // self.dtype.itemsize
        panel, slot = slot // PANEL * (PANEL * self.head_dim), slot % PANEL
        k = panel + (d // pair * PANEL + slot) * pair + d % pair
        v = panel + (slot // pair * self.head_dim + d) * pair + slot % pair
        return k.reshape(-1), v.reshape(-1)

    @property
    def block_bytes(self) -> int:
        scale_bytes = torch.float32.itemsize if self.kv_dtype is torch.int8 else 0
        return 2 * self.block_size * self.n_kv_heads * (self.head_dim * self.kv_dtype.itemsize + scale_bytes)

    def allocate(self, n_layers: int, n_blocks: int) -> list[Pages]:
        """Zeros; memory is spent where something is written. All layers of a block lie together: blocks that were never
        used cost nothing, and the first one used costs a huge page, not one per layer."""
        shape = (n_blocks, n_layers, 2, self.n_kv_heads)
        values = huge_tensor((*shape, self.block_size * self.head_dim), self.kv_dtype)
        if self.kv_dtype is not torch.int8:
            return [self._pages(values[:, layer, 0], values[:, layer, 1]) for layer in range(n_layers)]
        scales = huge_tensor((*shape, self.block_size), torch.float32)
        return [
            self._pages(values[:, layer, 0], values[:, layer, 1], scales[:, layer, 0], scales[:, layer, 1])
            for layer in range(n_layers)
        ]

    def _pages(self, k: Tensor, v: Tensor, k_scale: Tensor | None = None, v_scale: Tensor | None = None) -> PanelPages:
        store = Store(
            k.data_ptr(),
            v.data_ptr(),
            None if k_scale is None else k_scale.data_ptr(),
            None if v_scale is None else v_scale.data_ptr(),
            k.stride(0),
            0 if k_scale is None else k_scale.stride(0),
            self.n_kv_heads,
            self.head_dim,
            self.block_size,
        )
        return PanelPages(k, v, k_scale, v_scale, store, ctypes.addressof(store))

    def read(self, pages: Pages, block: int, n_slots: int) -> tuple[Tensor, ...]:
        n = n_slots * self.head_dim
        shape = (self.n_kv_heads, n_slots, self.head_dim)
        k = pages.k[block].index_select(1, self.k_order[:n]).view(shape).transpose(0, 1)
        v = pages.v[block].index_select(1, self.v_order[:n]).view(shape).transpose(0, 1)
        if pages.k_scale is None or pages.v_scale is None:
            return k, v
        scales = (scale[block, :, :n_slots].t()[..., None] for scale in (pages.k_scale, pages.v_scale))
        return k, v, *scales

    def copy(self, pages: Pages, source: int, target: int, n_slots: int) -> None:
        n = n_slots * self.head_dim
        for part, order in ((pages.k, self.k_order[:n]), (pages.v, self.v_order[:n])):
            part[target].index_copy_(1, order, part[source].index_select(1, order))
        for scale in (pages.k_scale, pages.v_scale):
            if scale is not None:
                scale[target, :, :n_slots] = scale[source, :, :n_slots]
