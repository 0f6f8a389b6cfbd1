"""Norms and gated activations by the native kernels: what is done to each token alone."""

from __future__ import annotations

from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor

from headwater.kernels.cpu.library import SUFFIX, Library


class NativeRowwise:
    """``rms_norm``, ``add_rms_norm`` and ``gated_act`` of ``Ops`` for bf16 or float32 ``dtype``.

    A token's bits depend on its own values only. Activations are rounded once, after the product.
    """

    def __init__(self, library: Library, dtype: torch.dtype) -> None:
        suffix, p, n = SUFFIX[dtype], c_void_p, c_int64
        self.dtype = dtype
        self._norm = library.bind(f"hw_rms_norm_{suffix}", None, [p, p, p, n, n, c_float])
        self._add_norm = library.bind(f"hw_add_rms_norm_{suffix}", None, [p, p, p, p, p, n, n, c_float])
        self._acts = {kind: library.bind(f"hw_{kind}_{suffix}", None, [p, p, n, n]) for kind in ("silu", "gelu_tanh")}

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        dim = x.shape[-1]
        self._norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // dim, dim, eps)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x, residual = x.contiguous(), residual.contiguous()
        out, total = torch.empty_like(x), torch.empty_like(x)
        dim = x.shape[-1]
        self._add_norm(
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            total.data_ptr(),
            x.numel() // dim,
            dim,
            eps,
        )
        return out, total

    def gated_act(self, gate_up: Tensor, kind: str) -> Tensor:
        gate_up = gate_up.contiguous()
        n, twice = gate_up.shape
        out = torch.empty((n, twice // 2), dtype=self.dtype)
        self._acts[kind](gate_up.data_ptr(), out.data_ptr(), n, twice // 2)
        return out
