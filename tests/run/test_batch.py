from __future__ import annotations

import random
from array import array

import torch

from headwater.run.batch import Chunk, RowState, RowTable, build_batch
from headwater.step import RowSampling
from headwater.types import GroupKind, GroupSpec

FULL = GroupSpec(GroupKind.FULL, 4, (0,))
SLIDING = GroupSpec(GroupKind.SLIDING, 4, (1,), window=6)


def row(name: str, n_known: int, n_computed: int, *tables: tuple[int, list[int]]) -> RowState:
    tokens = array("q", [100 * ord(name) + i for i in range(n_known)])
    return RowState(
        name, tokens, n_computed, tuple(RowTable(first, array("i", blocks)) for first, blocks in tables), RowSampling()
    )


def test_design_example_two_tokens_after_a_hit() -> None:
    # Design section 4: table [7, 19, 23], I and J at positions 8 and 9 go to slots 0 and 1 of block 23.
    batch = build_batch([Chunk(row("a", 10, 8, (0, [7, 19, 23])), 2)], [FULL])
    assert batch.token_ids.tolist() == [9708, 9709]
    assert batch.positions.tolist() == [8, 9]
    assert batch.groups[0].slot_mapping.tolist() == [92, 93]
    assert batch.groups[0].block_tables.tolist() == [[7, 19, 23]]
    assert (batch.query_start, batch.context_len) == ((0, 2), (10,))
    assert batch.logits_at.tolist() == [1]


def test_rows_are_packed_in_order_and_only_complete_ones_want_logits() -> None:
    chunks = [
        Chunk(row("a", 9, 8, (0, [1, 2, 3]), (0, [4, 5, 6])), 1),
        Chunk(row("b", 20, 2, (0, [7, 8, 9, 10, 11]), (0, [12, 13, 14, 15, 16])), 5),
        Chunk(row("c", 3, 0, (0, [17]), (0, [18])), 3),
    ]
    batch = build_batch(chunks, [FULL, SLIDING])
    assert batch.query_start == (0, 1, 6, 9)
    assert batch.context_len == (9, 7, 3)
    assert batch.positions.tolist() == [8, 2, 3, 4, 5, 6, 0, 1, 2]
    assert batch.logits_at.tolist() == [0, 8]
    full, sliding = batch.groups
    assert full.block_tables.tolist() == [[1, 2, 3], [7, 8, 0], [17, 0, 0]]
    assert full.first_block.tolist() == [0, 0, 0]
    assert full.slot_mapping.tolist() == [12, 30, 31, 32, 33, 34, 68, 69, 70]
    # Position 8 with window 6 reads from position 3: still block 0.
    assert sliding.block_tables.tolist() == [[4, 5, 6], [12, 13, 0], [18, 0, 0]]
    everything = build_batch(chunks, [FULL, SLIDING], every_position=True)
    assert everything.logits_at.tolist() == list(range(9))


def test_blocks_before_the_window_are_left_out() -> None:
    # Position 13 reads 8 .. 13: blocks 2 and 3.
    batch = build_batch([Chunk(row("a", 14, 13, (1, [5, 6, 7])), 1)], [SLIDING])
    assert batch.groups[0].block_tables.tolist() == [[6, 7]]
    assert batch.groups[0].first_block.tolist() == [2]
    assert batch.groups[0].slot_mapping.tolist() == [7 * 4 + 1]


def test_slots_of_random_rows() -> None:
    rng = random.Random(1)
    for _ in range(50):
        n_known = rng.randint(1, 40)
        n_computed = rng.randint(0, n_known - 1)
        n_new = rng.randint(1, n_known - n_computed)
        first = rng.randint(0, n_computed // 4)
        blocks = rng.sample(range(100), -(-n_known // 4) - first)
        batch = build_batch([Chunk(row("r", n_known, n_computed, (first, blocks)), n_new)], [FULL])
        expected = [blocks[p // 4 - first] * 4 + p % 4 for p in range(n_computed, n_computed + n_new)]
        assert batch.groups[0].slot_mapping.tolist() == expected


def test_dtypes() -> None:
    batch = build_batch([Chunk(row("a", 3, 0, (0, [1])), 2)], [FULL])
    part = batch.groups[0]
    assert batch.token_ids.dtype == batch.positions.dtype == batch.logits_at.dtype == part.slot_mapping.dtype
    assert batch.token_ids.dtype == torch.int64
    assert part.block_tables.dtype == part.first_block.dtype == torch.int32
    assert batch.logits_at.shape == (0,)
