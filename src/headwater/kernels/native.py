"""``Ops`` by the native kernels; what they cannot do goes to the PyTorch reference, and a note says so."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headwater.errors import ConfigError
from headwater.kernels.cpu.library import Library
from headwater.kernels.layout import KVLayout, LayerKV, PlainLayout
from headwater.kernels.native_attention import NativeAttention
from headwater.kernels.native_linear import NativeInt8Linear, NativeLinear
from headwater.kernels.native_rowwise import NativeRowwise
from headwater.kernels.native_stack import NativeStack, can_stack
from headwater.kernels.ops import Embedding, HeadNorms, Int8Weight, LayerParts, Linear, RaggedBatch
from headwater.kernels.pages import Arena
from headwater.kernels.torch_ref import TorchOps


class NativeOps:
    """``Ops`` over one loaded variant; ``dtype`` is torch.bfloat16 or torch.float32. Used by one thread.

    A row's bits depend on that row's own data only.
    """

    def __init__(self, library: Library, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.library = library
        self.notes = [f"native kernels: {library.variant}"]
        self._attention = NativeAttention(library, dtype)
        self._torch = TorchOps(dtype)
        self._arena = Arena()
        rowwise = NativeRowwise(library, dtype)
        self.rms_norm = rowwise.rms_norm
        self.add_rms_norm = rowwise.add_rms_norm
        self.gated_act = rowwise.gated_act

    def kv_layout(
        self, n_kv_heads: int, head_dim: int, block_size: int, kv_dtype: torch.dtype | None = None
    ) -> KVLayout:
        try:
            return self._attention.kv_layout(n_kv_heads, head_dim, block_size, kv_dtype)
        except ConfigError as error:
            if kv_dtype is not None:  # asked for by name: refused rather than served several times slower
                raise
            note = f"attention runs in PyTorch, several times slower: {error}"
            if note not in self.notes:
                self.notes.append(note)
            return self._torch.kv_layout(n_kv_heads, head_dim, block_size)

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> Linear:
        out = self.dtype if out_dtype is None else out_dtype
        return NativeLinear(self.library, weight, bias, self.dtype, out, self._arena)

    def pack_int8(
        self, weight: Int8Weight, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> Linear:
        out = self.dtype if out_dtype is None else out_dtype
        return NativeInt8Linear(self.library, weight, bias, self.dtype, out, self._arena)

    def embedding(self, weight: Tensor, head: Linear | None) -> Embedding:
        return head.rows if isinstance(head, NativeLinear) else self._torch.embedding(weight, head)

    def stack(self, layers: Sequence[LayerParts], final_norm: Tensor) -> NativeStack | None:
        if not can_stack(self.dtype, layers):
            return None
        return NativeStack(self.library, self.dtype, self._attention, layers, final_norm)

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
        ops = self._torch if isinstance(kv.layout, PlainLayout) else self._attention
        return ops.rope_and_write(qkv, cos, sin, batch, kv, n_heads=n_heads, norms=norms)

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
        ops = self._torch if isinstance(kv.layout, PlainLayout) else self._attention
        return ops.attention(q, batch, kv, scale=scale, window=window, softcap=softcap)
