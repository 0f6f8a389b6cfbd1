"""The operations that models call: one seam (``ops``), the PyTorch reference, and later native kernels."""

from __future__ import annotations

import torch

from headwater.kernels.layout import KVLayout, LayerKV
from headwater.kernels.ops import GroupBatch, HeadNorms, Int8Weight, Linear, Ops, RaggedBatch
from headwater.kernels.torch_ref import TorchOps

__all__ = [
    "GroupBatch",
    "HeadNorms",
    "Int8Weight",
    "KVLayout",
    "LayerKV",
    "Linear",
    "Ops",
    "RaggedBatch",
    "TorchOps",
    "make_ops",
]


def make_ops(dtype: torch.dtype) -> Ops:
    """The best implementation for this machine and compute dtype."""
    return TorchOps(dtype)
