"""The operations that models call: one seam (``ops``), native CPU kernels, and their PyTorch reference."""

from __future__ import annotations

from headwater.kernels.choose import make_ops
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
