"""Rewriting a model so that its numbers survive int8: the same function, with outliers spread over all elements.

Nothing here rounds: in exact arithmetic the rewritten model is the model. Every step is the identity M (M^-1 x) = x,
M orthogonal (QuaRot, arXiv 2404.00456, SpinQuant, arXiv 2405.16406):

    norm weights   norm(x) * g, then W          ->  norm(x), then W diag(g)
    residual R     embed, o, down write x       ->  they write x R;   qkv, gate_up, head read R^-1 (x R): an RMS norm
                                                    without weights commutes with R
    values V       v, mixed over positions, o   ->  v V, mixed just the same, then o reads V^-1 (v V), head by head
    inputs H       x, then W                    ->  H x at run time, then W H (H is its own inverse)

R and V cost nothing at run time. Norms on the way into the residual (Gemma's post norms) have weights that sit between
W and R, so that R cannot be folded: there the inputs of qkv, gate_up and head are transformed at run time too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwater.kernels.int8_ref import hadamard
from headwater.model.spec import ModelSpec
from headwater.model.tensors import LayerTensors, Matrix


@dataclass(frozen=True, slots=True)
class Rotation:
    """An orthogonal matrix R = diag(signs) (T x H) of any size m * 2^k: H is Walsh-Hadamard of size 2^k, T the
    discrete Hartley transform of the odd size m, "x" Kronecker's product. Its elements are at most sqrt(2 / size):
    no element of the input dominates one of the output. Signs are drawn from ``seed``.
    """

    size: int
    seed: int

    def rows(self, x: Tensor) -> Tensor:
        """x R, for x [..., size]; float32."""
        piece = power_of_two_in(self.size)
        signs = torch.randint(0, 2, (self.size,), generator=torch.Generator().manual_seed(self.seed)) * 2.0 - 1.0
        pieces = walsh(x.float() * signs, piece).view(*x.shape[:-1], -1, piece)
        out: Tensor = hartley(self.size // piece) @ pieces
        return out.flatten(-2)

    def columns(self, x: Tensor) -> Tensor:
        """R^T x, for x [size, n]: what a weight must be whose output shall come times R."""
        return self.rows(x.t()).t().contiguous()


def power_of_two_in(size: int) -> int:
    """The largest power of two that divides ``size``."""
    return size & -size


def walsh(x: Tensor, piece: int) -> Tensor:
    """``hadamard`` of x in pieces, as a product: faster for many rows."""
    out: Tensor = x.reshape(-1, piece) @ hadamard(torch.eye(piece), piece)
    return out.view(x.shape)


def hartley(size: int) -> Tensor:
    """The orthonormal discrete Hartley transform, symmetric and its own inverse; float32 [size, size]."""
    at = torch.arange(size, dtype=torch.float64)
    angles = 2 * math.pi / size * (at[:, None] * at[None, :] % size)
    out: Tensor = (angles.cos() + angles.sin()) * size**-0.5
    return out.float()


@dataclass(frozen=True, slots=True)
class Rewriter:
    """Which of the steps above are taken, and with which rotations.

    ``residual`` and ``values`` None, ``read_pieces`` and ``down_pieces`` 0: not that step. ``read_pieces`` is H on what
    qkv, gate_up and head read, ``down_pieces`` on what down reads.
    """

    spec: ModelSpec
    residual: Rotation | None
    values: Rotation | None
    read_pieces: int
    down_pieces: int

    @classmethod
    def of(cls, spec: ModelSpec) -> Rewriter:
        """Everything that ``spec`` allows."""
        return cls(
            spec,
            residual=None if spec.post_norms else Rotation(spec.d_model, seed=1),
            values=Rotation(spec.head_dim, seed=2),
            read_pieces=power_of_two_in(spec.d_model) if spec.post_norms else 0,
            down_pieces=power_of_two_in(spec.d_ff),
        )

    def embed(self, embed: Tensor) -> Tensor:
        """[vocab_size, d_model], float32 in and out."""
        return embed if self.residual is None else self.residual.rows(embed)

    def head(self, head: Matrix, final_norm: Tensor) -> Matrix:
        """Float32 in and out, as in ``layer``. A head that was tied to the embedding is so no more."""
        return self._reads(head, final_norm)

    def layer(self, layer: LayerTensors[Matrix]) -> LayerTensors[Matrix]:
        """Float32 in and out; the norm weights that were folded are 1."""
        return replace(
            layer,
            attn_norm=torch.ones_like(layer.attn_norm),
            qkv=self._turned_values(self._reads(layer.qkv, layer.attn_norm)),
            o=self._writes(self._reads_values(layer.o)),
            ffn_norm=torch.ones_like(layer.ffn_norm),
            gate_up=self._reads(layer.gate_up, layer.ffn_norm),
            down=self._writes(_transformed(layer.down, self.down_pieces)),
        )

    def _reads(self, matrix: Matrix, norm: Tensor) -> Matrix:
        """A product that reads the normed residual."""
        weight = matrix.weight * norm
        if self.residual is not None:
            weight = self.residual.rows(weight)
        return _transformed(replace(matrix, weight=weight), self.read_pieces)

    def _writes(self, matrix: Matrix) -> Matrix:
        """A product whose output joins the residual."""
        if self.residual is None:
            return matrix
        bias = None if matrix.bias is None else self.residual.rows(matrix.bias)
        return replace(matrix, weight=self.residual.columns(matrix.weight), bias=bias)

    def _turned_values(self, qkv: Matrix) -> Matrix:
        """v of every KV head times V; q and k as they were."""
        if self.values is None:
            return qkv
        spec, head_dim = self.spec, self.spec.head_dim
        first = spec.q_size + spec.kv_size
        heads = qkv.weight[first:].view(spec.n_kv_heads, head_dim, -1)
        turned = torch.cat([self.values.columns(head) for head in heads])
        bias = qkv.bias
        if bias is not None:
            bias = torch.cat((bias[:first], self.values.rows(bias[first:].view(-1, head_dim)).flatten()))
        return replace(qkv, weight=torch.cat((qkv.weight[:first], turned)), bias=bias)

    def _reads_values(self, o: Matrix) -> Matrix:
        """o of heads' outputs that come times V."""
        if self.values is None:
            return o
        n_out = o.weight.shape[0]
        return replace(o, weight=self.values.rows(o.weight.view(-1, self.spec.head_dim)).view(n_out, -1))


def _transformed(matrix: Matrix, pieces: int) -> Matrix:
    """The same product of an input that goes through H in ``pieces`` first; a piece of 1 is no transform."""
    if pieces <= 1:
        return matrix
    return replace(matrix, weight=walsh(matrix.weight, pieces), hadamard=pieces)
