"""Rotary embedding, the write of K and V, and paged attention by the native kernels.

What a step needs besides tensors of the layer (tables, and how its attention is cut into tasks) is worked out once per
step and group, and kept in ``RaggedBatch.prepared``.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwater.errors import ConfigError
from headwater.kernels.cpu.library import SUFFIX, Library
from headwater.kernels.layout import LayerKV
from headwater.kernels.ops import HeadNorms, RaggedBatch
from headwater.kernels.panel_layout import PanelLayout, PanelPages

NO_WINDOW = 2**31 - 1
"""A window that holds every position."""


class _Step(ctypes.Structure):
    """``hw::Step``."""

    _fields_ = (
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("tables", c_void_p),
        ("first_block", c_void_p),
        ("query_start", c_void_p),
        ("context_len", c_void_p),
        ("n_rows", ctypes.c_int32),
        ("n_tokens", ctypes.c_int32),
        ("table_width", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class _Prepared:
    """One group's ``_Step`` and the tensors that it points to."""

    step: _Step
    address: int
    holds: tuple[Tensor, ...]


class _Plan:
    """A native plan of tasks; freed with this object."""

    def __init__(self, address: int, free: Callable[[int], None]) -> None:
        self.address = address
        weakref.finalize(self, free, address)


class NativeAttention:
    """``kv_layout``, ``rope_and_write`` and ``attention`` of ``Ops`` for bf16 or float32 ``dtype``.

    The bits of a query's result depend on its position and its row's q, K and V only. ``share_prefixes``: rows whose
    tables name the same blocks read them together, with the same bits as alone.
    """

    def __init__(self, library: Library, dtype: torch.dtype, *, share_prefixes: bool = True) -> None:
        suffix, p = SUFFIX[dtype], c_void_p
        self.dtype = dtype
        self._share = share_prefixes
        self._rope = library.bind(f"hw_rope_{suffix}", None, [p, p, p, c_int, p, p, p, p, c_float])
        self._attention = library.bind(f"hw_attention_{suffix}", None, [p, p, p, p, c_int64, p, c_float, c_float])
        self._plan = library.bind("hw_plan", c_void_p, [p, c_int, c_int, c_int, c_int, c_int, c_int])
        self._free = library.bind("hw_plan_free", None, [p])

    def kv_layout(
        self, n_kv_heads: int, head_dim: int, block_size: int, kv_dtype: torch.dtype | None = None
    ) -> PanelLayout:
        return PanelLayout(n_kv_heads, head_dim, block_size, self.dtype, self.dtype if kv_dtype is None else kv_dtype)

    def rope_and_write(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: RaggedBatch,
        kv: LayerKV,
        *,
        n_heads: int,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """As ``Ops``; q is rotated where it lies and comes back as a view of ``qkv``."""
        qkv = qkv.contiguous()
        prepared = batch.prepared.get(("native", kv.group)) or _prepare(batch, kv.group)
        q_norm, k_norm, eps = (
            (None, None, 0.0) if norms is None else (norms.q.data_ptr(), norms.k.data_ptr(), norms.eps)
        )
        self._rope(
            address_of(kv),
            prepared.address,
            qkv.data_ptr(),
            n_heads,
            cos.data_ptr(),
            sin.data_ptr(),
            q_norm,
            k_norm,
            eps,
        )
        n, width = qkv.shape
        d = kv.layout.head_dim
        return qkv.as_strided((n, n_heads, d), (width, d, 1))

    def attention(
        self,
        q: Tensor,
        batch: RaggedBatch,
        kv: LayerKV,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        n, n_heads, d = q.shape
        row, head, element = q.stride()
        if head != d or element != 1:
            q, row = q.contiguous(), n_heads * d
        prepared, plan = self.step_of(batch, kv, n_heads, window)
        out = torch.empty((n, n_heads, d), dtype=self.dtype)
        self._attention(address_of(kv), prepared, plan, q.data_ptr(), row, out.data_ptr(), scale, softcap or 0.0)
        return out

    def step_of(self, batch: RaggedBatch, kv: LayerKV, n_heads: int, window: int | None) -> tuple[int, int]:
        """Addresses of the step's ``hw::Step`` for the layer's group, and of its ``Plan``; they live with the batch."""
        prepared = batch.prepared.get(("native", kv.group)) or _prepare(batch, kv.group)
        key = ("native", kv.group, n_heads, window)
        plan = batch.prepared.get(key)
        if plan is None:
            plan = batch.prepared[key] = self._make_plan(prepared, n_heads, kv, window)
        return prepared.address, plan.address

    def _make_plan(self, prepared: _Prepared, n_heads: int, kv: LayerKV, window: int | None) -> _Plan:
        address: Any = self._plan(
            prepared.address,
            n_heads,
            kv.layout.n_kv_heads,
            kv.layout.head_dim,
            NO_WINDOW if window is None else window,
            torch.get_num_threads(),
            self._share,
        )
        return _Plan(address, self._free)


def address_of(kv: LayerKV) -> int:
    pages = kv.pages
    if not isinstance(pages, PanelPages):
        raise ConfigError("the native attention reads a store in its own layout: allocate it with its kv_layout()")
    return pages.address


def _prepare(batch: RaggedBatch, group: int) -> _Prepared:
    part = batch.groups[group]
    query_start = torch.tensor(batch.query_start, dtype=torch.int32)
    context_len = torch.tensor(batch.context_len, dtype=torch.int32)
    tables, first_block = part.block_tables.contiguous(), part.first_block.contiguous()
    holds = (
        batch.positions.contiguous(),
        part.slot_mapping.contiguous(),
        tables,
        first_block,
        query_start,
        context_len,
    )
    step = _Step(
        *(tensor.data_ptr() for tensor in holds),
        batch.n_rows,
        len(batch.positions),
        tables.shape[1],
        part.block_size,
    )
    prepared = _Prepared(step, ctypes.addressof(step), holds)
    batch.prepared["native", group] = prepared
    return prepared
