"""Rows with known Q, K and V over a paged store, and attention written down naively in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.kernels import GroupBatch, LayerKV, RaggedBatch, TorchOps
from headwater.kernels.int8_ref import quantize_rows
from headwater.kernels.layout import Pages
from headwater.kernels.native_attention import NativeAttention

AttentionOps = TorchOps | NativeAttention


@dataclass(frozen=True, eq=False)
class Shape:
    n_heads: int
    n_kv_heads: int
    d: int
    window: int | None = None
    softcap: float | None = None
    block_size: int = 16

    @property
    def scale(self) -> float:
        return float(self.d**-0.5)


@dataclass(frozen=True, eq=False)
class Row:
    """A whole sequence's q [n, n_heads, d], k, v [n, n_kv_heads, d]."""

    q: Tensor
    k: Tensor
    v: Tensor


def as_stored(row: Row, kv_dtype: torch.dtype) -> Row:
    """Its K and V as they come out of a store in ``kv_dtype``."""
    if kv_dtype is not torch.int8:
        return row
    k, v = (values.double() * scale for values, scale in map(quantize_rows, (row.k, row.v)))
    return Row(row.q, k, v)


@dataclass(frozen=True, eq=False)
class Part:
    """Positions begin .. end - 1 of a row are this step's queries."""

    row: Row
    begin: int
    end: int


def make_row(shape: Shape, n: int, seed: int, dtype: torch.dtype) -> Row:
    generator = torch.Generator().manual_seed(seed)
    sizes = [(n, shape.n_heads, shape.d), (n, shape.n_kv_heads, shape.d), (n, shape.n_kv_heads, shape.d)]
    return Row(*(torch.randn(size, generator=generator).to(dtype) for size in sizes))


def attend(
    shape: Shape,
    parts: Sequence[Part],
    dtype: torch.dtype,
    seed: int = 0,
    *,
    ops: AttentionOps | None = None,
    kv_dtype: torch.dtype | None = None,
    shared: int = 0,
) -> list[Tensor]:
    """Each part's output [n_new, n_heads, d]; ``ops`` None is TorchOps. Pages are drawn at random, and every slot
    that no query of this step may read holds NaN: those past the context, before the window, and all pages of nobody.
    The first ``shared`` tokens (whole blocks) of all parts are in the same pages: the rows must agree there."""
    ops = TorchOps(dtype) if ops is None else ops
    rng = random.Random(seed)
    size = shape.block_size
    n_pages = sum(-(-part.end // size) for part in parts) + 3
    free = list(range(n_pages))
    rng.shuffle(free)
    layout = ops.kv_layout(shape.n_kv_heads, shape.d, size, kv_dtype)
    [pages] = layout.allocate(1, n_pages)
    kv = LayerKV(pages, 0, layout)
    poison(pages)
    in_common = [free.pop() for _ in range(shared // size)]
    tables, first_blocks, seen = [], [], []
    for part in parts:
        seen_from = 0 if shape.window is None else max(0, part.begin - shape.window + 1)
        first = seen_from // size
        n_blocks = (part.end - 1) // size + 1
        tables.append([in_common[b] if b < len(in_common) else free.pop() for b in range(first, n_blocks)])
        first_blocks.append(first)
        seen.append((seen_from, part.end))
    stored = paged_batch(tables, first_blocks, seen, size)
    k, v = (
        torch.cat([x[b:e] for x, (b, e) in zip(xs, seen, strict=True)])
        for xs in zip(*((p.row.k, p.row.v) for p in parts), strict=True)
    )
    write(ops, kv, stored, k, v)
    batch = paged_batch(tables, first_blocks, [(part.begin, part.end) for part in parts], size)
    q = torch.cat([part.row.q[part.begin : part.end] for part in parts])
    out = ops.attention(q, batch, kv, scale=shape.scale, window=shape.window, softcap=shape.softcap)
    return list(torch.split(out, [part.end - part.begin for part in parts]))


def poison(pages: Pages) -> None:
    """No slot holds a number."""
    for part in pages.parts:
        part.fill_(torch.nan if part.is_floating_point() else 127)


def write(ops: AttentionOps, kv: LayerKV, batch: RaggedBatch, k: Tensor, v: Tensor) -> None:
    """k, v [n, n_kv_heads, d] to the batch's slots, not rotated."""
    n_positions = max(batch.context_len)
    cos, sin = torch.ones(n_positions, k.shape[-1] // 2), torch.zeros(n_positions, k.shape[-1] // 2)
    qkv = torch.cat((k, k, v), 1).flatten(1)
    ops.rope_and_write(qkv, cos, sin, batch, kv, n_heads=k.shape[1])


def paged_batch(
    tables: Sequence[list[int]], first_blocks: Sequence[int], ranges: Sequence[tuple[int, int]], size: int
) -> RaggedBatch:
    """Rows with new tokens begin .. end - 1 (``ranges``), in one group of blocks of ``size``."""
    slots: list[int] = []
    positions: list[int] = []
    query_start = [0]
    for table, first, (begin, end) in zip(tables, first_blocks, ranges, strict=True):
        slots += [table[p // size - first] * size + p % size for p in range(begin, end)]
        positions += range(begin, end)
        query_start.append(len(positions))
    width = max(map(len, tables))
    group = GroupBatch(
        torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
        torch.tensor(first_blocks, dtype=torch.int32),
        torch.tensor(slots),
        size,
    )
    return RaggedBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=torch.tensor(positions),
        query_start=tuple(query_start),
        context_len=tuple(end for _, end in ranges),
        groups=(group,),
        logits_at=torch.zeros(0, dtype=torch.int64),
    )


def naive(shape: Shape, row: Row, position: int) -> Tensor:
    """[n_heads, d] in float64, one query head after another."""
    seen_from = 0 if shape.window is None else max(0, position - shape.window + 1)
    outs = []
    for head in range(shape.n_heads):
        kv_head = head // (shape.n_heads // shape.n_kv_heads)
        k = row.k[seen_from : position + 1, kv_head].double()
        scores = (k @ row.q[position, head].double()) * shape.scale
        if shape.softcap is not None:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        outs.append(torch.softmax(scores, 0) @ row.v[seen_from : position + 1, kv_head].double())
    return torch.stack(outs)
