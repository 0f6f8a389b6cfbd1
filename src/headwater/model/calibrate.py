"""What goes into each product when a model reads: second moments of its inputs, for ``rounding``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from headwater.kernels.layout import LayerKV
from headwater.kernels.ops import GroupBatch, Linear, Ops, RaggedBatch
from headwater.model.assemble import packed
from headwater.model.layers import DecoderLayer, rope_table
from headwater.model.rotate import walsh
from headwater.model.spec import ModelSpec
from headwater.model.tensors import LayerTensors, Matrix

BLOCK_TOKENS = 16

RANDOM_SEQUENCES = 8
RANDOM_TOKENS = 256
SEED = 3


def random_sequences(spec: ModelSpec) -> list[list[int]]:
    """Something to read where there is no text. Moments of text serve better."""
    shape = (RANDOM_SEQUENCES, min(RANDOM_TOKENS, spec.max_positions))
    ids: list[list[int]] = torch.randint(
        0, spec.vocab_size, shape, generator=torch.Generator().manual_seed(SEED)
    ).tolist()
    return ids


class Watched:
    """A float product that adds up x x^T of its inputs, after the transform that ``matrix.hadamard`` asks for."""

    def __init__(self, matrix: Matrix, product: Linear) -> None:
        self.out_features, self.in_features = matrix.weight.shape
        self.dtype = product.dtype
        self._hadamard = matrix.hadamard
        self._product = product
        self._sum = torch.zeros(self.in_features, self.in_features)
        self._n = 0

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        if self._hadamard:
            wide = walsh(wide, self._hadamard)
        self._sum.addmm_(wide.t(), wide)
        self._n += len(x)
        return self._product(wide.to(x.dtype))

    @property
    def moments(self) -> Tensor:
        """Mean of x x^T, float32 [in, in]."""
        return self._sum / max(1, self._n)


class Calibration:
    """A model reading its tokens layer by layer: only one layer's weights are held at a time.

    Give the layers in order, in float32, as they are to be rounded; then ask for the head's.
    """

    def __init__(self, spec: ModelSpec, ops: Ops, embed: Tensor, sequences: Sequence[Sequence[int]]) -> None:
        """``embed`` [vocab_size, d_model] in the compute dtype; ``sequences`` of token ids are what is read."""
        self._spec = spec
        self._ops = ops
        self._batch = _whole(sequences)
        longest = max(len(tokens) for tokens in sequences)
        self._tables = {rope: rope_table(rope, spec.head_dim, longest) for rope in dict.fromkeys(spec.layer_ropes)}
        residual = embed[self._batch.token_ids]
        if spec.embed_scale is not None:
            residual = residual * torch.tensor(spec.embed_scale, dtype=ops.dtype)
        self._residual = residual
        self._n_layers = 0

    @torch.inference_mode()
    def layer(self, tensors: LayerTensors[Matrix]) -> LayerTensors[Tensor]:
        """Moments of what the layer's products read; the tokens then stand behind this layer."""
        spec, ops, i = self._spec, self._ops, self._n_layers
        watched = tensors.map(lambda m: Watched(m, ops.pack_linear(m.weight.to(ops.dtype), m.bias)))
        weights = packed(watched, lambda product, out_dtype: product)
        layer = DecoderLayer(spec, i, weights, self._tables[spec.layer_ropes[i]], ops)
        layout = ops.kv_layout(spec.n_kv_heads, spec.head_dim, BLOCK_TOKENS)
        (pages,) = layout.allocate(1, self._batch.groups[0].block_tables.numel())
        h = ops.rms_norm(self._residual, weights.attn_norm, spec.norm_eps)
        heads = layer.attend(h, self._batch, LayerKV(pages, 0, layout))
        _, self._residual = layer.finish(heads, self._residual, weights.ffn_norm)  # which norm comes next is no matter
        self._n_layers += 1
        return watched.map(lambda product: product.moments)

    @torch.inference_mode()
    def head(self, final_norm: Tensor, hadamard: int) -> Tensor:
        """Moments of what the head reads, after a transform in pieces of ``hadamard``."""
        x = self._ops.rms_norm(self._residual, final_norm, self._spec.norm_eps).float()
        if hadamard:
            x = walsh(x, hadamard)
        return x.t() @ x / len(x)


def _whole(sequences: Sequence[Sequence[int]]) -> RaggedBatch:
    """All of them whole, each in blocks of its own."""
    lengths = [len(tokens) for tokens in sequences]
    n_blocks = -(-max(lengths) // BLOCK_TOKENS)
    tables = torch.arange(len(lengths) * n_blocks, dtype=torch.int32).view(len(lengths), n_blocks)
    positions = [torch.arange(length) for length in lengths]
    slots = [row * n_blocks * BLOCK_TOKENS + at for row, at in enumerate(positions)]
    group = GroupBatch(tables, torch.zeros(len(lengths), dtype=torch.int32), torch.cat(slots), BLOCK_TOKENS)
    return RaggedBatch(
        token_ids=torch.tensor([token for tokens in sequences for token in tokens]),
        positions=torch.cat(positions),
        query_start=tuple(itertools.accumulate(lengths, initial=0)),
        context_len=tuple(lengths),
        groups=(group,),
        logits_at=torch.arange(0),
    )
