"""All layers of a decoder in one native call (``cpu/layer.cpp``): with few tokens, the time between calls counts."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from headwater.kernels.cpu.library import SUFFIX, Library
from headwater.kernels.layout import LayerKV
from headwater.kernels.native_attention import NativeAttention, address_of
from headwater.kernels.native_linear import NativeInt8Linear, NativeLinear
from headwater.kernels.ops import LayerParts, RaggedBatch
from headwater.kernels.panel_layout import stores_heads_of

PRODUCTS = ("qkv", "o", "gate_up", "down")


class _Layer(ctypes.Structure):
    """``struct Layer`` of cpu/layer.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in PRODUCTS),
        *((name, c_void_p) for name in ("ffn_norm", "post_attn_norm", "post_ffn_norm", "next_norm")),
        *((name, c_void_p) for name in ("cos", "sin", "q_norm", "k_norm")),
        *((name, c_int32) for name in ("n_heads", "gelu")),
        *((name, c_float) for name in ("eps", "head_eps", "scale")),
    )


class _Place(ctypes.Structure):
    """``struct Place`` of cpu/layer.cpp."""

    _fields_ = (("store", c_void_p), ("step", c_void_p), ("plan", c_void_p))


class NativeStack:
    """``LayerStack``. Holds the weights whose addresses it passes on, and its scratch memory; for one thread."""

    def __init__(
        self,
        library: Library,
        dtype: torch.dtype,
        attention: NativeAttention,
        layers: Sequence[LayerParts],
        final_norm: Tensor,
    ) -> None:
        arguments = [c_void_p, c_void_p, c_int64, c_void_p, c_int64, *[c_void_p] * 5]
        self._run = library.bind(f"hw_layers_{SUFFIX[dtype]}", None, arguments)
        self._dtype = dtype
        self._attention = attention
        self._parts = tuple(layers)
        self._final_norm = final_norm
        next_norms = [*(layer.weights.attn_norm for layer in layers[1:]), final_norm]
        self._layers = (_Layer * len(layers))(*map(_layer, layers, next_norms))
        self._places = (_Place * len(layers))()
        weights = [layer.weights for layer in layers]
        self._widths = (
            max(w.qkv.out_features for w in weights),
            max(w.o.in_features for w in weights),
            max(w.o.out_features + 3 * w.down.in_features for w in weights),
        )
        """Elements of a row of qkv, of the heads, and of what the rest of a layer needs."""
        self._scratch = torch.empty(0, dtype=dtype)

    def run(self, h: Tensor, residual: Tensor, batch: RaggedBatch, kv: Sequence[LayerKV]) -> Tensor:
        for place, part, pages in zip(self._places, self._parts, kv, strict=True):
            place.store = address_of(pages)
            place.step, place.plan = self._attention.step_of(batch, pages, part.n_heads, part.window)
        n, at = len(h), batch.logits_at
        n_elements = n * sum(self._widths)
        if len(self._scratch) < n_elements:
            self._scratch = torch.empty(n_elements, dtype=self._dtype)
        qkv, size = self._scratch.data_ptr(), n * self._scratch.itemsize
        heads = qkv + self._widths[0] * size
        self._run(
            ctypes.addressof(self._layers),
            ctypes.addressof(self._places),
            len(self._layers),
            at.data_ptr(),
            len(at),
            h.data_ptr(),
            residual.data_ptr(),
            qkv,
            heads,
            heads + self._widths[1] * size,
        )
        return h[: len(at)]


def _layer(parts: LayerParts, next_norm: Tensor) -> _Layer:
    weights, norms = parts.weights, parts.weights.head_norms
    tensors = (weights.ffn_norm, weights.post_attn_norm, weights.post_ffn_norm, next_norm, parts.cos, parts.sin)
    head_norms = (None, None) if norms is None else (norms.q, norms.k)
    return _Layer(
        *(getattr(weights, name).address for name in PRODUCTS),
        *(None if tensor is None else tensor.data_ptr() for tensor in (*tensors, *head_norms)),
        parts.n_heads,
        parts.act == "gelu_tanh",
        parts.norm_eps,
        0.0 if norms is None else norms.eps,
        parts.attn_scale,
    )


def can_stack(dtype: torch.dtype, layers: Sequence[LayerParts]) -> bool:
    """Whether every product is native, and the heads are such as the native attention stores."""
    products = [getattr(layer.weights, name) for layer in layers for name in PRODUCTS]
    return all(
        isinstance(product, NativeLinear | NativeInt8Linear) and product.out_dtype == dtype for product in products
    ) and all(stores_heads_of(layer.head_dim) for layer in layers)
