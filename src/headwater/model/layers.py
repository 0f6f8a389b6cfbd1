"""One layer of the decoder, and what positions are turned into."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.kernels.layout import LayerKV
from headwater.kernels.ops import LayerParts, LayerWeights, Ops, RaggedBatch
from headwater.model.spec import ModelSpec, RopeSpec


@dataclass(frozen=True, slots=True)
class RopeTable:
    """cos and sin float32 [max_positions, head_dim / 2]."""

    cos: Tensor
    sin: Tensor


def rope_table(rope: RopeSpec, head_dim: int, max_positions: int) -> RopeTable:
    """All positions' rotations, in the arithmetic of Transformers (float32 throughout)."""
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inverse_frequencies(rope, head_dim)[None, :]
    return RopeTable(angles.cos(), angles.sin())


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """float32 [head_dim / 2], radians per position; the same bits as Transformers' (freq_factors aside)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.freq_factors is not None:
        return plain / torch.tensor(rope.freq_factors, dtype=torch.float32)
    if rope.llama3 is None:
        return plain / rope.linear_factor
    # Wavelengths in positions:  0 ... original/high | original/high ... original/low | original/low ...
    #                            kept                | blended                         | divided by factor
    scaling = rope.llama3
    wavelength = 2 * math.pi / plain
    longest_kept = scaling.original_positions / scaling.high_freq_factor
    shortest_divided = scaling.original_positions / scaling.low_freq_factor
    divided = torch.where(wavelength > shortest_divided, plain / scaling.factor, plain)
    smooth = (scaling.original_positions / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * divided / scaling.factor + smooth * divided
    return torch.where((wavelength >= longest_kept) & (wavelength <= shortest_divided), blended, divided)


class DecoderLayer:
    """Attention and MLP of one layer. Activations are [n, d_model] in the compute dtype."""

    def __init__(self, spec: ModelSpec, index: int, weights: LayerWeights, rope: RopeTable, ops: Ops) -> None:
        self.spec = spec
        self.window = spec.layer_windows[index]
        self.weights = weights
        self.rope = rope
        self.ops = ops

    @property
    def parts(self) -> LayerParts:
        spec = self.spec
        return LayerParts(
            self.weights,
            self.rope.cos,
            self.rope.sin,
            spec.n_heads,
            spec.head_dim,
            spec.act,
            spec.norm_eps,
            spec.attn_scale,
            self.window,
        )

    def attend(self, h: Tensor, batch: RaggedBatch, kv: LayerKV) -> Tensor:
        """Normed input to heads' outputs [n, n_heads * head_dim]; writes this layer's K and V."""
        spec, weights, ops = self.spec, self.weights, self.ops
        n = h.shape[0]
        q = ops.rope_and_write(
            weights.qkv(h),
            self.rope.cos,
            self.rope.sin,
            batch,
            kv,
            n_heads=spec.n_heads,
            norms=weights.head_norms,
        )
        out = ops.attention(q, batch, kv, scale=spec.attn_scale, window=self.window)
        return out.reshape(n, spec.q_size)

    def finish(self, heads: Tensor, residual: Tensor, next_norm: Tensor) -> tuple[Tensor, Tensor]:
        """From the heads' outputs on, any subset of rows: the next input, normed by ``next_norm``, and the residual."""
        weights, ops, eps = self.weights, self.ops, self.spec.norm_eps
        attended = weights.o(heads)
        if weights.post_attn_norm is not None:
            attended = ops.rms_norm(attended, weights.post_attn_norm, eps)
        h, residual = ops.add_rms_norm(attended, residual, weights.ffn_norm, eps)
        out = weights.down(ops.gated_act(weights.gate_up(h), self.spec.act))
        if weights.post_ffn_norm is not None:
            out = ops.rms_norm(out, weights.post_ffn_norm, eps)
        return ops.add_rms_norm(out, residual, next_norm, eps)
