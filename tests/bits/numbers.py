"""What can be computed in, and by which kernels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from headwater.text.tokenizer import Tokenizer
from tests.e2e.engine import Loaded, load

F32, BF16, INT8 = torch.float32, torch.bfloat16, torch.int8


@dataclass(frozen=True)
class Numbers:
    name: str
    dtype: torch.dtype = BF16
    kernels: str = "auto"
    quantization: str = "none"
    kv_dtype: torch.dtype | None = None

    def load(
        self, path: Path, tokenizer: Tokenizer, *, max_positions: int | None = None, cache_dir: Path | None = None
    ) -> Loaded:
        return load(
            path,
            tokenizer,
            self.dtype,
            max_positions,
            self.kernels,
            quantization=self.quantization,
            kv_dtype=self.kv_dtype,
            cache_dir=cache_dir,
        )


NATIVE = (
    Numbers("bf16"),
    Numbers("float32", F32),
    Numbers("w8a8", quantization="w8a8"),
    Numbers("w8a16", quantization="w8a16"),
    Numbers("bf16-kv-int8", kv_dtype=INT8),
    Numbers("w8a8-kv-int8", quantization="w8a8", kv_dtype=INT8),
)
"""With the best kernels that this machine runs: PyTorch's, where native ones cannot be compiled."""
TORCH = (
    Numbers("torch-bf16", kernels="torch"),
    Numbers("torch-float32", F32, "torch"),
    Numbers("torch-w8a8", F32, "torch", "w8a8"),
    Numbers("torch-kv-int8", F32, "torch", kv_dtype=INT8),
)
