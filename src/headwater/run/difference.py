"""Where two blocks of the store do not hold the same bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.run.store import KVStore
from headwater.types import BlockId

PARTS = ("K", "V", "scale of K", "scale of V")
"""What a layout reads of a block, in its order."""


@dataclass(frozen=True, slots=True)
class Difference:
    """In one layer, one of ``PARTS``: how many elements differ, and in which slots of the block."""

    layer: int
    part: str
    n_different: int
    n_elements: int
    first_slot: int
    last_slot: int


def differences(store: KVStore, group: int, one: BlockId, other: BlockId) -> list[Difference]:
    """All differences between two blocks of ``group``, layer after layer; bits are compared, not numbers."""
    found = []
    for layer, kv in enumerate(store.layers):
        if kv.group != group:
            continue
        both = (kv.layout.read(kv.pages, block, kv.layout.block_size) for block in (one, other))
        for part, a, b in zip(PARTS, *both, strict=False):  # without scales, two of the four
            different = bits(a) != bits(b)
            if different.any():
                slots = different.flatten(1).any(1).nonzero().flatten().tolist()
                found.append(Difference(layer, part, int(different.sum()), a.numel(), slots[0], slots[-1]))
    return found


def bits(x: Tensor) -> Tensor:
    """The same elements as integers: NaN equals itself, and 0.0 is not -0.0."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])
