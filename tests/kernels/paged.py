"""Rows with known Q, K and V over a paged store, and attention written down naively in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.kernels import GroupBatch, LayerKV, RaggedBatch, TorchOps


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
        return self.d**-0.5


@dataclass(frozen=True, eq=False)
class Row:
    """A whole sequence's q [n, n_heads, d], k, v [n, n_kv_heads, d]."""

    q: Tensor
    k: Tensor
    v: Tensor


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


def attend(shape: Shape, parts: Sequence[Part], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Each part's output [n_new, n_heads, d]. Pages are drawn at random, and every slot that no query of this step
    may read holds NaN: those past the context, before the window, and all pages of nobody."""
    rng = random.Random(seed)
    size = shape.block_size
    n_pages = sum(-(-part.end // size) for part in parts) + 3
    free = list(range(n_pages))
    rng.shuffle(free)
    layout = TorchOps(dtype).kv_layout(shape.n_kv_heads, shape.d, size)
    [pages] = layout.allocate(1, n_pages)
    k, v = pages.k.fill_(torch.nan), pages.v.fill_(torch.nan)
    tables, first_blocks, slots, positions = [], [], [], []
    query_start = [0]
    for part in parts:
        seen_from = 0 if shape.window is None else max(0, part.begin - shape.window + 1)
        first = seen_from // size
        table = [free.pop() for _ in range(first, (part.end - 1) // size + 1)]
        where = torch.tensor([table[p // size - first] * size + p % size for p in range(seen_from, part.end)])
        k.view(-1, shape.n_kv_heads, shape.d)[where] = part.row.k[seen_from : part.end]
        v.view(-1, shape.n_kv_heads, shape.d)[where] = part.row.v[seen_from : part.end]
        slots.append(where[part.begin - seen_from :])
        tables.append(table)
        first_blocks.append(first)
        positions += range(part.begin, part.end)
        query_start.append(len(positions))
    width = max(map(len, tables))
    group = GroupBatch(
        torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
        torch.tensor(first_blocks, dtype=torch.int32),
        torch.cat(slots),
        size,
    )
    batch = RaggedBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=torch.tensor(positions),
        query_start=tuple(query_start),
        context_len=tuple(part.end for part in parts),
        groups=(group,),
        logits_at=torch.zeros(0, dtype=torch.int64),
    )
    q = torch.cat([part.row.q[part.begin : part.end] for part in parts])
    out = TorchOps(dtype).attention(
        q, batch, LayerKV(pages, 0, layout), scale=shape.scale, window=shape.window, softcap=shape.softcap
    )
    return list(torch.split(out, [part.end - part.begin for part in parts]))


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
