"""Int8 weights from a model in float32: one scale per output channel, symmetric; what multiplies them is the scheme's.

    w8a16   int8 weights, activations in the compute dtype: the traffic of int8, the products of bf16
    w8a8    int8 weights and activations, the latter with a scale per token found when the step runs: exact sums

Both go through ``rotate`` first, and are rounded by what the products read (``calibrate``, ``rounding``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Literal

from torch import Tensor

from headwater.errors import ConfigError
from headwater.kernels.ops import Int8Weight, Ops
from headwater.model.calibrate import Calibration
from headwater.model.rotate import Rewriter
from headwater.model.rounding import rounded
from headwater.model.spec import ModelSpec
from headwater.model.tensors import LayerTensors, M, Matrix, OuterTensors, TensorReader
from headwater.types import Progress

RECIPE = 3
"""Counts the ways in which this file and those it uses have made weights: files of another count are made again."""
ACTIVATIONS: dict[str, Literal["int8", "compute"]] = {"w8a8": "int8", "w8a16": "compute"}


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """A product with an int8 weight; ``bias`` float32 [out]."""

    weight: Int8Weight
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class ModelTensors(Generic[M]):
    """All of a model."""

    outer: OuterTensors[M]
    layers: Sequence[LayerTensors[M]]


class Quantizer:
    """Makes int8 tensors under ``scheme``. ConfigError for a scheme that is not known.

    ``ops`` run the model once, in the compute dtype, to see what its products read (``calibrate``).
    """

    def __init__(self, spec: ModelSpec, ops: Ops, scheme: str) -> None:
        if scheme not in ACTIVATIONS:
            raise ConfigError(f"quantization is {scheme!r}; it must be none, {' or '.join(ACTIVATIONS)}")
        self._spec = spec
        self._ops = ops
        self._activations = ACTIVATIONS[scheme]

    def model(
        self, reader: TensorReader, sequences: Sequence[Sequence[int]], progress: Progress
    ) -> ModelTensors[Int8Matrix]:
        """Everything that ``reader`` (of float32) reads; ``embed`` stays in the compute dtype. ``sequences`` of token
        ids are what the model is run on."""
        spec, rewriter = self._spec, Rewriter(self._spec)
        embed = reader.embed().to(self._ops.dtype)
        calibration = Calibration(spec, self._ops, embed, sequences)
        layers = []
        for i in range(spec.n_layers):
            progress("quantising weights", i / (spec.n_layers + 1))
            layer = rewriter.layer(reader.layer(i))
            layers.append(self._int8_layer(layer, calibration.layer(layer)))
        progress("quantising weights", spec.n_layers / (spec.n_layers + 1))
        norm, head = reader.final_norm(), rewriter.head(reader.head())
        outer = OuterTensors(embed, norm, self._int8(head, calibration.head(norm, head.hadamard)))
        progress("quantising weights", 1.0)
        return ModelTensors(outer, tuple(layers))

    def _int8_layer(self, layer: LayerTensors[Matrix], moments: LayerTensors[Tensor]) -> LayerTensors[Int8Matrix]:
        return LayerTensors(
            attn_norm=layer.attn_norm,
            qkv=self._int8(layer.qkv, moments.qkv),
            o=self._int8(layer.o, moments.o),
            ffn_norm=layer.ffn_norm,
            gate_up=self._int8(layer.gate_up, moments.gate_up),
            down=self._int8(layer.down, moments.down),
            head_norms=layer.head_norms,
            post_attn_norm=layer.post_attn_norm,
            post_ffn_norm=layer.post_ffn_norm,
        )

    def _int8(self, matrix: Matrix, moments: Tensor) -> Int8Matrix:
        values, scale = rounded(matrix.weight, moments)
        return Int8Matrix(Int8Weight(values, scale, self._activations, matrix.hadamard), matrix.bias)
