"""Run a Model on whole sequences: one block table per row, pages in a scrambled order."""

from __future__ import annotations

import torch

from headwater.kernels.ops import GroupBatch, LayerKV, RaggedBatch
from headwater.model.decoder import Model


def whole_batch(sequences: list[list[int]], block_size: int) -> tuple[RaggedBatch, int]:
    """All of several sequences in one batch, logits wanted everywhere; and how many pages that takes."""
    n_blocks = [-(-len(tokens) // block_size) for tokens in sequences]
    n_pages = sum(n_blocks)
    # Reversed, so that reading the store as if it were contiguous cannot pass.
    pages = list(reversed(range(n_pages)))
    tables = torch.zeros(len(sequences), max(n_blocks), dtype=torch.int32)
    slots, positions, starts = [], [], [0]
    for row, tokens in enumerate(sequences):
        own, pages = pages[: n_blocks[row]], pages[n_blocks[row] :]
        tables[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
        slots += [own[p // block_size] * block_size + p % block_size for p in range(len(tokens))]
        positions += range(len(tokens))
        starts.append(starts[-1] + len(tokens))
    group = GroupBatch(
        block_tables=tables,
        first_block=torch.zeros(len(sequences), dtype=torch.int32),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        block_size=block_size,
    )
    batch = RaggedBatch(
        token_ids=torch.tensor([t for tokens in sequences for t in tokens], dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        query_start=tuple(starts),
        context_len=tuple(len(tokens) for tokens in sequences),
        groups=(group,),
        logits_at=torch.arange(starts[-1]),
    )
    return batch, n_pages


def empty_store(model: Model, n_pages: int, block_size: int) -> list[LayerKV]:
    """A store for every layer, in one group, full of NaN: nothing unwritten may be read."""
    spec = model.spec
    layout = model.ops.kv_layout(spec.n_kv_heads, spec.head_dim, block_size)
    layers = [LayerKV(pages, 0, layout) for pages in layout.allocate(spec.n_layers, n_pages)]
    for layer in layers:
        layer.k.fill_(torch.nan)
        layer.v.fill_(torch.nan)
    return layers


def all_logits(model: Model, sequences: list[list[int]], block_size: int = 4) -> list[torch.Tensor]:
    """Logits float32 [len(tokens), vocab_size] of each sequence."""
    batch, n_pages = whole_batch(sequences, block_size)
    logits = model.forward(batch, empty_store(model, n_pages, block_size))
    return list(logits.split([len(tokens) for tokens in sequences]))
