"""The few operations that models call: one seam for the PyTorch reference and for native kernels.

Everything works on a packed ragged batch: the new tokens of all rows, one after another, without
padding. Row r owns tokens query_start[r] .. query_start[r+1]-1; its keys are positions
0 .. context_len[r]-1, read from the paged store through the row's block table (its own new keys
too: they are written first).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from headwater.kernels.layout import KVLayout, LayerKV


class Linear(Protocol):
    """A packed weight: [n, in_features] in ``dtype`` -> [n, out_features] in the dtype that it was packed for."""

    in_features: int
    out_features: int
    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor: ...


Embedding = Callable[[Tensor], Tensor]
"""Token ids int64 [n] -> [n, d_model] in the compute dtype, in memory of its own."""


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight in int8: out_features rows of ``values`` [out_features, in_features], each times its ``scale``.

    ``activations`` says what multiplies it: "int8" (each row of the input is quantised, symmetric, with a scale
    of its own, and the sums are exact) or "compute" (the input as it is). ``hadamard`` > 0: the input first goes
    through an orthonormal Walsh-Hadamard transform in pieces of so many elements, as the weight's rows did.
    """

    values: Tensor
    """int8 [out_features, in_features]"""
    scale: Tensor
    """float32 [out_features]"""
    activations: Literal["int8", "compute"]
    hadamard: int = 0


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of each head's q and k before they are rotated: float32 [head_dim], what is multiplied."""

    q: Tensor
    k: Tensor
    eps: float


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
class LayerWeights:
    """One layer's packed products and its norms (float32, what is multiplied).

    ``qkv`` gives q, k and v side by side, ``gate_up`` gate and up. ``head_norms`` is None without qk_norm, the
    post norms without post_norms.
    """

    attn_norm: Tensor
    qkv: Linear
    o: Linear
    ffn_norm: Tensor
    gate_up: Linear
    down: Linear
    head_norms: HeadNorms | None = None
    post_attn_norm: Tensor | None = None
    post_ffn_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerParts:
    """All that a layer is. ``cos``, ``sin`` and ``window`` as in ``rope_and_write`` and ``attention``, ``act`` as in
    ``gated_act``."""

    weights: LayerWeights
    cos: Tensor
    sin: Tensor
    n_heads: int
    head_dim: int
    act: str
    norm_eps: float
    attn_scale: float
    window: int | None


class LayerStack(Protocol):
    """All layers of a model in one call, with the bits that their operations have one by one."""

    def run(self, h: Tensor, residual: Tensor, batch: RaggedBatch, kv: Sequence[LayerKV]) -> Tensor:
        """From the first layer's normed input h and the residual, both contiguous [n, d_model] and overwritten, to
        the output of the tokens at ``batch.logits_at`` (ascending), normed: [n_sampled, d_model]."""
        ...


class Ops(Protocol):
    """dtype of activations is the compute dtype (bf16 or float32) unless said otherwise."""

    dtype: torch.dtype

    @property
    def notes(self) -> list[str]:
        """One-line remarks to print at start, when everything is packed: which kernels run, what they cannot do."""
        ...

    def kv_layout(
        self, n_kv_heads: int, head_dim: int, block_size: int, kv_dtype: torch.dtype | None = None
    ) -> KVLayout:
        """How these operations want K and V stored; ``kv_dtype`` None is the compute dtype, else torch.int8.
        ConfigError for what they cannot store."""
        ...

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> Linear:
        """Prepare [out_features, in_features] once, at load. The product comes in ``out_dtype``; None is the
        compute dtype, the other choice float32 (for logits)."""
        ...

    def pack_int8(
        self, weight: Int8Weight, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> Linear:
        """The same for a weight in int8; what goes in and comes out is in the compute dtype all the same."""
        ...

    def embedding(self, weight: Tensor, head: Linear | None) -> Embedding:
        """Rows of ``weight`` [vocab_size, d_model] (in the compute dtype) by token id. ``head`` is the product that was
        packed from this very weight, if there is one: the look-up may read that, so that the weight is kept once."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm over the last dimension, computed in float32. ``weight`` is float32 [dim] and already
        holds what is multiplied (Gemma's 1 + w is folded in at load)."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """residual' = x + residual; returns (rms_norm(residual'), residual')."""
        ...

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
        """From ``qkv`` [n, (n_heads + 2 * n_kv_heads) * d], q's heads first, then k's, then v's: norm q and k
        head by head if there are ``norms``, rotate them (half-split layout, as in GPT-NeoX/Llama-HF) by cos/sin float32
        [max_positions, d/2] at batch.positions, write k and v into the store at the group's slot_mapping, and
        return the rotated q [n, n_heads, d]. ``qkv`` may be overwritten."""
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

    def stack(self, layers: Sequence[LayerParts], final_norm: Tensor) -> LayerStack | None:
        """The layers as one call; None where these operations have none."""
        ...
