"""The decoder: tokens and the paged store in, logits out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.kernels.layout import LayerKV
from headwater.kernels.ops import Embedding, Linear, Ops, RaggedBatch
from headwater.model.layers import DecoderLayer
from headwater.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class OuterWeights:
    """What lies around the layers: ``embed`` looks token ids up, ``final_norm``
    float32 [d_model], ``head`` [n, d_model] -> float32 [n, vocab_size]."""

    embed: Embedding
    final_norm: Tensor
    head: Linear


class Model:
    """A loaded decoder. ``weights_digest`` (32 bytes) is a function of the files' content alone.

    The residual stream is kept in the compute dtype, as in Transformers; norms are computed in float32.
    """

    def __init__(
        self,
        spec: ModelSpec,
        ops: Ops,
        outer: OuterWeights,
        layers: Sequence[DecoderLayer],
        weights_digest: bytes,
    ) -> None:
        self.spec = spec
        self.ops = ops
        self.layers = tuple(layers)
        self.weights_digest = weights_digest
        self._outer = outer
        self.stack = ops.stack([layer.parts for layer in layers], outer.final_norm)
        """All layers in one call where the operations can, with the same bits; None: one by one."""
        # Rounded to the compute dtype before it multiplies, as Transformers does.
        self._embed_scale = None if spec.embed_scale is None else torch.tensor(spec.embed_scale, dtype=ops.dtype)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Every packed product, for a probe of their properties."""
        layers = (layer.weights for layer in self.layers)
        return (self._outer.head, *(linear for w in layers for linear in (w.qkv, w.o, w.gate_up, w.down)))

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch, kv: Sequence[LayerKV]) -> Tensor:
        """Logits float32 [n_sampled, vocab_size] of the packed tokens at ``batch.logits_at``.

        ``kv[i]`` is layer i's store; the K and V of all the batch's tokens are in it afterwards.
        """
        spec, ops = self.spec, self.ops
        residual = self._outer.embed(batch.token_ids)
        if self._embed_scale is not None:
            residual = residual * self._embed_scale
        h = ops.rms_norm(residual, self.layers[0].weights.attn_norm, spec.norm_eps)
        if self.stack is None:
            h = self._one_by_one(h, residual, batch, kv)
        else:
            h = self.stack.run(h, residual, batch, kv)
        if not len(h):
            return torch.empty((0, spec.vocab_size), dtype=torch.float32)
        logits = self._outer.head(h)
        if spec.logit_softcap is not None:
            logits = torch.tanh(logits / spec.logit_softcap) * spec.logit_softcap
        return logits

    def _one_by_one(self, h: Tensor, residual: Tensor, batch: RaggedBatch, kv: Sequence[LayerKV]) -> Tensor:
        """What ``LayerStack.run`` does, operation by operation."""
        for i, layer in enumerate(self.layers):
            heads = layer.attend(h, batch, kv[i])
            if layer is self.layers[-1]:
                # Nothing after the last layer's attention mixes rows: go on with those that are sampled.
                heads, residual = heads[batch.logits_at], residual[batch.logits_at]
                if not len(heads):
                    return residual
            following = self._outer.final_norm if layer is self.layers[-1] else self.layers[i + 1].weights.attn_norm
            h, residual = layer.finish(heads, residual, following)
        return h
