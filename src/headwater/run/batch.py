"""From rows to the packed ragged batch that the model takes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from headwater.kernels.ops import GroupBatch, RaggedBatch
from headwater.step import RowSampling
from headwater.types import GroupSpec, RequestId


@dataclass(slots=True)
class RowTable:
    """A row's block table in one group: ``blocks[j]`` holds logical block ``first + j``. Blocks that slid out stay
    listed; nothing reads them."""

    first: int
    blocks: array[int]

    @property
    def end(self) -> int:
        return self.first + len(self.blocks)


@dataclass(slots=True)
class RowState:
    """What the runner remembers of a row: its known tokens, how many are computed, its tables."""

    request_id: RequestId
    tokens: array[int]
    n_computed: int
    tables: tuple[RowTable, ...]
    sampling: RowSampling


@dataclass(frozen=True, slots=True)
class Chunk:
    """One row's part in a step: positions row.n_computed .. row.n_computed + n_new - 1."""

    row: RowState
    n_new: int

    @property
    def end(self) -> int:
        return self.row.n_computed + self.n_new

    @property
    def samples(self) -> bool:
        return self.end == len(self.row.tokens)


@dataclass(slots=True)
class _GroupRows:
    """One group's part of a batch in the making."""

    spec: GroupSpec
    tables: list[array[int]] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)

    def add(self, table: RowTable, begin: int, end: int) -> None:
        """Positions begin .. end - 1 of a row.

        table.first ... used_from ............... used_to
        slid out        window of ``begin``, new tokens
        """
        size, blocks, first = self.spec.block_size, table.blocks, table.first
        used_from = max(first, self.spec.first_needed(begin) // size)
        used_to = (end - 1) // size + 1
        self.tables.append(blocks[used_from - first : used_to - first])
        self.first.append(used_from)
        for block in range(begin // size, used_to):
            page = blocks[block - first] * size - block * size
            self.slots.extend(range(page + max(begin, block * size), page + min(end, (block + 1) * size)))

    def batch(self) -> GroupBatch:
        width = max(len(table) for table in self.tables)
        tables = np.zeros((len(self.tables), width), dtype=np.int32)
        for row, table in zip(tables, self.tables, strict=True):
            row[: len(table)] = table
        return GroupBatch(
            block_tables=torch.from_numpy(tables),
            first_block=torch.from_numpy(np.array(self.first, dtype=np.int32)),
            slot_mapping=torch.from_numpy(np.array(self.slots, dtype=np.int64)),
            block_size=self.spec.block_size,
        )


def build_batch(chunks: Sequence[Chunk], groups: Sequence[GroupSpec], *, every_position: bool = False) -> RaggedBatch:
    """Pack ``chunks`` (at least one) in order. Logits are wanted at the last token of rows that are sampled, or
    with ``every_position`` at all tokens."""
    tokens = array("q")
    positions: list[int] = []
    query_start = [0]
    logits_at: list[int] = []
    parts = [_GroupRows(group) for group in groups]
    for chunk in chunks:
        begin, end = chunk.row.n_computed, chunk.end
        tokens.extend(chunk.row.tokens[begin:end])
        positions.extend(range(begin, end))
        query_start.append(len(tokens))
        if chunk.samples:
            logits_at.append(len(tokens) - 1)
        for part, table in zip(parts, chunk.row.tables, strict=True):
            part.add(table, begin, end)
    return RaggedBatch(
        token_ids=torch.from_numpy(np.array(tokens)),
        positions=torch.from_numpy(np.array(positions, dtype=np.int64)),
        query_start=tuple(query_start),
        context_len=tuple(chunk.end for chunk in chunks),
        groups=tuple(part.batch() for part in parts),
        logits_at=torch.arange(len(tokens))
        if every_position
        else torch.from_numpy(np.array(logits_at, dtype=np.int64)),
    )
