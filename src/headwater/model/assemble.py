"""Putting a Model together of its tensors, in whichever form these are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from headwater.kernels.ops import LayerWeights, Linear, Ops
from headwater.model.decoder import Model, OuterWeights
from headwater.model.layers import DecoderLayer, rope_table
from headwater.model.spec import ModelSpec
from headwater.model.tensors import LayerTensors, M, Matrix, OuterTensors
from headwater.types import Progress

Pack = Callable[[M, "torch.dtype | None"], Linear]
"""A product, and the dtype of what it gives (None: the compute dtype), packed."""


@dataclass(frozen=True, slots=True)
class Assembler:
    """Makes models of ``spec`` that go up to ``max_positions`` tokens."""

    spec: ModelSpec
    ops: Ops
    max_positions: int

    def model(
        self,
        outer: OuterTensors[M],
        layers: Iterable[LayerTensors[M]],
        pack: Pack[M],
        weights_digest: bytes,
        progress: Progress,
    ) -> Model:
        """``layers`` are asked for one by one, each when the last is packed."""
        spec = self.spec
        tables = {rope: rope_table(rope, spec.head_dim, self.max_positions) for rope in dict.fromkeys(spec.layer_ropes)}
        head = pack(outer.head, torch.float32)
        decoder = []
        for i, layer in enumerate(layers):
            progress("loading weights", i / spec.n_layers)
            weights = packed(layer, pack)
            decoder.append(DecoderLayer(spec, i, weights, tables[spec.layer_ropes[i]], self.ops))
        progress("loading weights", 1.0)
        is_tied = isinstance(outer.head, Matrix) and outer.head.weight is outer.embed
        embed = self.ops.embedding(outer.embed, head if is_tied else None)
        return Model(spec, self.ops, OuterWeights(embed, outer.final_norm, head), decoder, weights_digest)


def packed(layer: LayerTensors[M], pack: Pack[M]) -> LayerWeights:
    """One layer, ready to run."""
    return LayerWeights(
        attn_norm=layer.attn_norm,
        qkv=pack(layer.qkv, None),
        o=pack(layer.o, None),
        ffn_norm=layer.ffn_norm,
        gate_up=pack(layer.gate_up, None),
        down=pack(layer.down, None),
        head_norms=layer.head_norms,
        post_attn_norm=layer.post_attn_norm,
        post_ffn_norm=layer.post_ffn_norm,
    )
