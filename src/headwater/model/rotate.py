"""Rewriting a model so that its numbers survive int8: the same function, with outliers spread over many elements.

Nothing here rounds: in exact arithmetic the rewritten model is the model. H is the orthonormal Walsh-Hadamard transform
in pieces of a power of two, its own inverse (QuaRot, arXiv 2404.00456):

    inputs   x, then W                    ->  H x when the step runs, then W H      of qkv, gate_up, down and the head
    values   v, mixed over positions, o   ->  H v, mixed just the same, then o H    offline, head by head

QuaRot also turns the residual, offline, with the norm weights folded into what follows. Measured here, that is worse:
the norm weights are what tames the few elements that carry most of the residual (one alone 93 % in Gemma 3 270M);
without them these drown the others in the rounding of bf16. And norms on the way into the residual do not allow it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwater.kernels.int8_ref import hadamard
from headwater.model.spec import ModelSpec
from headwater.model.tensors import LayerTensors, Matrix


def walsh(x: Tensor, piece: int) -> Tensor:
    """``hadamard`` of x in pieces, as a product: faster for many rows."""
    out: Tensor = x.reshape(-1, piece) @ hadamard(torch.eye(piece), piece)
    return out.view(x.shape)


def power_of_two_in(size: int) -> int:
    """The largest power of two that divides ``size``."""
    return size & -size


@dataclass(frozen=True, slots=True)
class Rewriter:
    """Rewrites the products of ``spec``; float32 in and out."""

    spec: ModelSpec

    def head(self, head: Matrix) -> Matrix:
        """A head that was tied to the embedding is so no more."""
        return _transformed(head)

    def layer(self, layer: LayerTensors[Matrix]) -> LayerTensors[Matrix]:
        return replace(
            layer,
            qkv=self._turned_values(_transformed(layer.qkv)),
            o=self._reads_values(layer.o),
            gate_up=_transformed(layer.gate_up),
            down=_transformed(layer.down),
        )

    def _turned_values(self, qkv: Matrix) -> Matrix:
        """H v of every KV head; q and k as they were."""
        first = self.spec.q_size + self.spec.kv_size
        weight = torch.cat((qkv.weight[:first], self._in_heads(qkv.weight[first:].t()).t()))
        bias = None if qkv.bias is None else torch.cat((qkv.bias[:first], self._in_heads(qkv.bias[first:])))
        return replace(qkv, weight=weight, bias=bias)

    def _reads_values(self, o: Matrix) -> Matrix:
        """o of heads' outputs that come as H v."""
        return replace(o, weight=self._in_heads(o.weight))

    def _in_heads(self, x: Tensor) -> Tensor:
        """H of what each head has of the last dimension."""
        return walsh(x, power_of_two_in(self.spec.head_dim))


def _transformed(matrix: Matrix) -> Matrix:
    """The same product of an input that goes through H first; in pieces of 1 that is no transform."""
    pieces = power_of_two_in(matrix.weight.shape[1])
    if pieces == 1:
        return matrix
    return replace(matrix, weight=walsh(matrix.weight, pieces), hadamard=pieces)
