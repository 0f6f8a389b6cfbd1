"""The few operations that models call: one seam for the PyTorch reference and for native kernels.

Everything works on a packed ragged batch: the new tokens of all rows, one after another, without
padding. Row r owns tokens query_start[r] .. query_start[r+1]-1; its keys are positions
0 .. context_len[r]-1, read from the paged store through the row's block table (its own new keys
too: they are written first).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

Linear = Callable[[Tensor], Tensor]
"""A packed weight: [n, in_features] -> [n, out_features]."""


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """One group's part of a batch.

    ``block_tables`` int32 [n_rows, max_blocks]: column j of row r is logical block first_block[r] + j;
    padded with 0. ``first_block`` int32 [n_rows]. ``slot_mapping`` int64 [n_tokens]: page * block_size +
    offset, where each new token's K and V go.
    """

    block_tables: Tensor
    first_block: Tensor
    slot_mapping: Tensor
    block_size: int


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """All rows of one step. ``query_start`` and ``context_len`` are plain tuples (the host plans with them)."""

    token_ids: Tensor
    """int64 [n_tokens]"""
    positions: Tensor
    """int64 [n_tokens], absolute"""
    query_start: tuple[int, ...]
    """n_rows + 1 offsets"""
    context_len: tuple[int, ...]
    """n_rows; tokens known to the store after this step's writes"""
    groups: tuple[GroupBatch, ...]
    logits_at: Tensor
    """int64 [n_sampled]: indices into the packed tokens whose logits are wanted"""
    prepared: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What an Ops works out once per step and reuses in every layer (index and mask tensors); its own keys."""

    @property
    def n_rows(self) -> int:
        return len(self.context_len)


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's view of the paged store.

    ``k``, ``v``: [n_pages, block_size, n_kv_heads, head_dim]; ``group`` indexes RaggedBatch.groups.
    """

    k: Tensor
    v: Tensor
    group: int


class Ops(Protocol):
    """dtype of activations is the compute dtype (bf16 or float32) unless said otherwise."""

    dtype: torch.dtype

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Prepare [out_features, in_features] once, at load."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm over the last dimension, computed in float32. ``weight`` is float32 [dim] and already
        holds what is multiplied (Gemma's 1 + w is folded in at load)."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """residual' = x + residual; returns (rms_norm(residual'), residual')."""
        ...

    def rope_and_write(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, batch: RaggedBatch, kv: LayerKV
    ) -> Tensor:
        """Rotate q [n, n_heads, d] and k [n, n_kv_heads, d] (half-split layout, as in GPT-NeoX/Llama-HF) by
        cos/sin float32 [max_positions, d/2] at batch.positions; write k and v into the store at the
        group's slot_mapping; return rotated q."""
        ...

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
        """Causal attention of q [n, n_heads, d] over the paged store; returns [n, n_heads, d]. With a
        window, position p sees max(0, p - window + 1) .. p. Never reads slots past the context, or
        blocks that slid out."""
        ...

    def gated_act(self, gate_up: Tensor, kind: str) -> Tensor:
        """[n, 2f] -> [n, f]: act(first half) * second half; ``kind`` is "silu" or "gelu_tanh"."""
        ...
