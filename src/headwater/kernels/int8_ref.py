"""Products with int8 weights in PyTorch: the reference for the native ones."""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.kernels.linear import PackedLinear
from headwater.kernels.ops import Int8Weight

QMAX = 127


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 with a scale per row: (values int8 like ``x``, scale float32 [..., 1]); x is about values * scale.

    Rounded to nearest, ties to even. A row of zeros has scale 0.
    """
    x = x.float()
    top = x.abs().amax(-1, keepdim=True)
    inverse = torch.where(top > 0, QMAX / top, torch.zeros_like(top))
    return (x * inverse).round().clamp(-QMAX, QMAX).to(torch.int8), top / QMAX


def hadamard(x: Tensor, size: int) -> Tensor:
    """The orthonormal Walsh-Hadamard transform (natural order) of each piece of ``size`` elements, a power of two, of
    the last dimension; float32. It is its own inverse."""
    pieces = x.float().reshape(-1, size)
    half = 1
    while half < size:
        a, b = pieces.view(-1, size // (2 * half), 2, half).unbind(2)
        pieces = torch.stack((a + b, a - b), 2).view(-1, size)
        half *= 2
    out: Tensor = (pieces * size**-0.5).view(x.shape)
    return out


class Int8Linear:
    """``Int8Weight`` times rows in ``dtype``. Sums of int8 activations are exact; the others are ``PackedLinear``'s."""

    def __init__(self, weight: Int8Weight, bias: Tensor | None, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
        self.out_features, self.in_features = weight.values.shape
        self.dtype = dtype
        self._weight = weight
        self._bias = None if bias is None else bias.float()
        self._out_dtype = out_dtype
        self._product = PackedLinear(weight.values.to(dtype)) if weight.activations == "compute" else None

    def __call__(self, x: Tensor) -> Tensor:
        weight = self._weight
        if weight.hadamard:
            x = hadamard(x, weight.hadamard)
        if self._product is not None:
            out = self._product(x.to(self.dtype)).float() * weight.scale
        else:
            values, scale = quantize_rows(x)
            # whole numbers below 2**53: exact in any order
            out = (values.double() @ weight.values.double().t()).float() * (scale * weight.scale)
        return (out if self._bias is None else out + self._bias).to(self._out_dtype)
