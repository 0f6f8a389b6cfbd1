"""How attention over the paged store is cut, so that a query's bits depend on its position alone.

Queries go in tiles of ``T`` absolute positions (tile i: positions i*T .. i*T + T - 1), always all T of them:
positions that are not in this step are filled up and thrown away. A tile reads the keys

        start ............ needed_from ............ last query | ........... start + size
        masked (window)    read from the store                   masked, never read

where ``start`` and ``size`` follow from the tile's position and the window only. Every product therefore
has the same shape for the same query, whatever the chunk, the batch or the physical blocks. Masked places
are filled from a slot that is in use (a stale or foreign slot is never read: 0 x NaN is NaN).

Sizes of 1,024 keys and more are worked through in splits of 512, one after another, and a split that is
masked as a whole changes nothing (its weights are exactly 0): such tiles may share a call with longer ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headwater.kernels.ops import RaggedBatch

SPLIT = 512
"""Keys per split."""
START_ALIGN = 256
"""A window's first key is rounded down to a multiple of this."""
MAX_TILE_ROWS = 32
"""Query positions x query heads of one KV head in a tile: one block of the attention kernel."""
MAX_MASK = 1 << 23
MAX_SLOTS = 1 << 14

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TileCall:
    """One call of the attention kernel over ``n_tiles`` tiles.

    ``q_index`` int64 [n_tiles * n_kv_heads * T]: rows of q seen as [n_tokens * n_kv_heads, group * d].
    ``slots`` int64 [n_key_rows * size]: rows of the store seen as [n_slots, n_kv_heads * d]; one key row per
    tile, or one for all. ``mask`` [n_tiles, 1, T * group, size]: 0 or -inf, in the compute dtype.
    """

    n_tiles: int
    n_key_rows: int
    size: int
    q_index: Tensor
    slots: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class TilePlan:
    """All calls of a step for the layers of one group and window.

    ``out_index`` int64 [n_tokens * n_heads]: where the head vector of each token is among the calls' outputs,
    laid end to end as [n_tiles * T * group * n_kv_heads, d].
    """

    tile: int
    calls: tuple[TileCall, ...]
    out_index: Tensor


@dataclass(slots=True)
class _Tiles:
    """Tiles of one step, one per element: row, first position, first and last query, start and size of the keys."""

    row: Ints
    first: Ints
    q_from: Ints
    q_to: Ints
    start: Ints
    size: Ints

    def take(self, index: Ints) -> _Tiles:
        return _Tiles(*(a[index] for a in (self.row, self.first, self.q_from, self.q_to, self.start, self.size)))

    def __len__(self) -> int:
        return len(self.row)


def tile_positions(group: int) -> int:
    """T: the largest power of two with T * group <= MAX_TILE_ROWS, at least 1."""
    return 1 << max(0, (MAX_TILE_ROWS // group).bit_length() - 1)


def padded_size(n_keys: Ints) -> Ints:
    """Size class of a tile: 128, 256, 512, 768, then multiples of 512."""
    long = -(-n_keys // SPLIT) * SPLIT
    short = np.select([n_keys <= 128, n_keys <= 256, n_keys <= 512], [128, 256, 512], 768)
    return np.where(n_keys <= 768, short, long).astype(np.int64)


def _enumerate(batch: RaggedBatch, tile: int, window: int | None) -> _Tiles:
    starts = np.asarray(batch.query_start, dtype=np.int64)
    ends = np.asarray(batch.context_len, dtype=np.int64)
    begins = ends - np.diff(starts)
    first_tile = begins // tile
    n_tiles = np.where(ends > begins, (ends - 1) // tile - first_tile + 1, 0)
    row = np.repeat(np.arange(len(ends), dtype=np.int64), n_tiles)
    within = np.arange(len(row), dtype=np.int64) - np.repeat(np.cumsum(n_tiles) - n_tiles, n_tiles)
    first = (first_tile[row] + within) * tile
    start = np.zeros_like(first)
    if window is not None:
        start = np.maximum(0, first - window + 1) // START_ALIGN * START_ALIGN
    return _Tiles(
        row=row,
        first=first,
        q_from=np.maximum(first, begins[row]),
        q_to=np.minimum(first + tile, ends[row]) - 1,
        start=start,
        size=padded_size(first + tile - start),
    )


def _shape_class(size: int) -> int:
    """Tiles of one class may share a call: the same size, or whole splits within a factor of two."""
    return size if size < 2 * SPLIT else -(size // SPLIT - 1).bit_length()


def _groups(tiles: _Tiles, rows_per_tile: int) -> Iterator[tuple[_Tiles, bool]]:
    """Tiles that go in one call each, and whether they share one row of keys."""
    shared: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for i, (row, start, size) in enumerate(
        zip(tiles.row.tolist(), tiles.start.tolist(), tiles.size.tolist(), strict=True)
    ):
        shared[row, start, _shape_class(size)].append(i)
    alone: dict[int, list[int]] = defaultdict(list)
    for (_, _, shape), members in shared.items():
        if len(members) == 1:
            alone[shape] += members
            continue
        size = int(tiles.size[members].max())
        most = max(1, MAX_MASK // (rows_per_tile * size))
        for i in range(0, len(members), most):
            yield tiles.take(np.asarray(members[i : i + most])), True
    for members in alone.values():
        most = max(1, MAX_SLOTS // int(tiles.size[members].max()))
        for i in range(0, len(members), most):
            yield tiles.take(np.asarray(members[i : i + most])), False


class TilePlanner:
    """Builds the TilePlan of a batch for layers of one group, with one window and given head counts."""

    def __init__(
        self,
        batch: RaggedBatch,
        group_index: int,
        n_heads: int,
        n_kv_heads: int,
        window: int | None,
        dtype: torch.dtype,
    ) -> None:
        self._window = window
        self._n_kv_heads = n_kv_heads
        self._group = n_heads // n_kv_heads
        self._tile = tile_positions(self._group)
        self._dtype = dtype
        part = batch.groups[group_index]
        self._block_size = part.block_size
        self._tables = part.block_tables.numpy().astype(np.int64)
        self._first_block = part.first_block.numpy().astype(np.int64)
        self._query_start = np.asarray(batch.query_start, dtype=np.int64)
        self._context = np.asarray(batch.context_len, dtype=np.int64)
        self._tiles = _enumerate(batch, self._tile, window)

    def plan(self) -> TilePlan:
        n_tokens = int(self._query_start[-1])
        where = np.zeros(n_tokens, dtype=np.int64)  # token -> tile place
        calls: list[TileCall] = []
        offset = 0
        for tiles, shared in _groups(self._tiles, self._tile * self._group):
            places = tiles.first[:, None] + np.arange(self._tile)
            tokens = self._tokens(tiles, places)
            valid = (places >= tiles.q_from[:, None]) & (places <= tiles.q_to[:, None])
            where[tokens[valid]] = offset + np.flatnonzero(valid)
            offset += places.size
            calls.append(self._call(tiles, places, tokens, shared))
        # output row of (token, head h = kv * group + g): (place * group + g) * n_kv_heads + kv
        g = np.arange(self._group)[None, None, :]
        kv = np.arange(self._n_kv_heads)[None, :, None]
        out = (where[:, None, None] * self._group + g) * self._n_kv_heads + kv
        return TilePlan(self._tile, tuple(calls), torch.from_numpy(out.reshape(-1)))

    def _tokens(self, tiles: _Tiles, places: Ints) -> Ints:
        """Packed token of each place; places outside this step repeat the tile's nearest query."""
        begin = self._context[tiles.row] - np.diff(self._query_start)[tiles.row]
        inside = np.clip(places, tiles.q_from[:, None], tiles.q_to[:, None])
        return inside - begin[:, None] + self._query_start[tiles.row][:, None]

    def _call(self, tiles: _Tiles, places: Ints, tokens: Ints, shared: bool) -> TileCall:
        size = int(tiles.size.max())
        q_index = tokens[:, None, :] * self._n_kv_heads + np.arange(self._n_kv_heads)[None, :, None]
        if shared:
            keys = _Tiles(
                tiles.row[:1], tiles.first[:1], tiles.q_from.min(keepdims=True), tiles.q_to.max(keepdims=True),
                tiles.start[:1], tiles.size[:1],
            )  # fmt: skip
        else:
            keys = tiles
        return TileCall(
            n_tiles=len(tiles),
            n_key_rows=len(keys),
            size=size,
            q_index=torch.from_numpy(q_index.reshape(-1)),
            slots=torch.from_numpy(self._slots(keys, size).reshape(-1)),
            mask=self._mask(tiles, places, size),
        )

    def _slots(self, keys: _Tiles, size: int) -> Ints:
        position = keys.start[:, None] + np.arange(size)
        last = keys.q_to[:, None]
        needed_from = (
            np.zeros_like(last) if self._window is None else np.maximum(0, keys.q_from - self._window + 1)[:, None]
        )
        position = np.where((position >= needed_from) & (position <= last), position, last)
        block = position // self._block_size - self._first_block[keys.row][:, None]
        pages: Ints = self._tables[keys.row[:, None], block]
        return pages * self._block_size + position % self._block_size

    def _mask(self, tiles: _Tiles, places: Ints, size: int) -> Tensor:
        at = torch.from_numpy(places)[:, :, None]
        key = torch.from_numpy(tiles.start[:, None] + np.arange(size))[:, None, :]
        hidden = key > at
        if self._window is not None:
            hidden |= key <= at - self._window
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, float("-inf"))
        n_tiles = len(tiles)
        return (
            mask[:, None, :, None, :]
            .expand(n_tiles, 1, self._tile, self._group, size)
            .reshape(n_tiles, 1, self._tile * self._group, size)
        )
