from __future__ import annotations

import random

import pytest
import torch

from headwater.kernels import GroupBatch, RaggedBatch
from headwater.kernels.tiles import TilePlanner, padded_size, tile_positions
from tests.kernels.paged import Part, Row, Shape, as_stored, attend, make_row, naive

BF16, F32 = torch.bfloat16, torch.float32
SHAPES = {
    "smollm2": Shape(9, 3, 64),
    "gemma-full": Shape(4, 1, 256),
    "gemma-sliding": Shape(4, 1, 256, window=512),
    "mha-32": Shape(4, 4, 32, block_size=4),
    "gqa-128-window-30": Shape(8, 2, 128, window=30, block_size=8),
    "window-smaller-than-a-tile": Shape(2, 2, 32, window=3, block_size=4),
    "window-1": Shape(2, 1, 32, window=1, block_size=4),
    "softcap": Shape(4, 2, 64, softcap=2.0),
    "softcap-window": Shape(4, 2, 64, window=100, softcap=2.0),
    "many-heads-per-kv-head": Shape(40, 1, 32),
}
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
each_dtype = pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])


@each_shape
@each_dtype
def test_equals_dense_attention_in_float64_over_fragmented_poisoned_pages(shape: Shape, dtype: torch.dtype) -> None:
    # B27: queries start at the hit, keys come through the table, hit and miss rows share a batch.
    parts = [
        Part(make_row(shape, end, seed=end, dtype=dtype), begin, end)
        for begin, end in [(0, 5), (129, 130), (400, 700), (1060, 1100), (47, 64)]
    ]
    for part, out in zip(parts, attend(shape, parts, dtype), strict=True):
        for position in {part.begin, (part.begin + part.end) // 2, part.end - 1}:
            expected = naive(shape, part.row, position)
            error = (out[position - part.begin].double() - expected).abs().max()
            # bf16: weights and results are rounded to 8 bits, relative to the largest value around
            assert error <= (1e-2 if dtype is BF16 else 5e-6) * max(1.0, float(expected.abs().max()))


@each_dtype
def test_int8_kv_is_quantised_on_write_and_widened_on_read(dtype: torch.dtype) -> None:
    shape = SHAPES["gqa-128-window-30"]
    parts = [Part(make_row(shape, end, seed=end, dtype=dtype), begin, end) for begin, end in [(0, 5), (90, 130)]]
    for part, out in zip(parts, attend(shape, parts, dtype, kv_dtype=torch.int8), strict=True):
        for position in (part.begin, part.end - 1):
            expected = naive(shape, as_stored(part.row, torch.int8), position)
            error = (out[position - part.begin].double() - expected).abs().max()
            assert error <= (1e-2 if dtype is BF16 else 5e-6) * max(1.0, float(expected.abs().max()))


@each_shape
@each_dtype
def test_same_bits_in_any_chunks_company_and_blocks(shape: Shape, dtype: torch.dtype) -> None:
    n = 600
    row = make_row(shape, n, seed=1, dtype=dtype)
    whole = attend(shape, [Part(row, 0, n)], dtype, seed=1)[0]
    rng = random.Random(2)
    for chunk in (1, 7, 16, 64):
        begins = list(range(0, n, chunk))
        for begin in begins if chunk > 16 else rng.sample(begins, 12):
            part = Part(row, begin, min(n, begin + chunk))
            strangers = [
                Part(make_row(shape, end, seed=end, dtype=dtype), max(0, end - rng.randint(1, 70)), end)
                for end in rng.sample(range(1, 900), rng.randint(0, 3))
            ]
            batch = [*strangers, part]
            rng.shuffle(batch)
            out = attend(shape, batch, dtype, seed=begin)[batch.index(part)]
            assert torch.equal(out, whole[part.begin : part.end]), (chunk, begin, len(strangers))


@each_dtype
def test_same_bits_for_long_contexts_beside_longer_ones(dtype: torch.dtype) -> None:
    # Tiles of several whole splits share a call that is as long as the longest: masked splits change nothing.
    shape = Shape(4, 2, 64)
    ends = [1030, 1500, 2050, 2100, 2600]
    parts = [Part(make_row(shape, end, seed=end, dtype=dtype), end - 1, end) for end in ends]
    together = attend(shape, parts, dtype)
    for part, out in zip(parts, together, strict=True):
        assert torch.equal(attend(shape, [part], dtype)[0], out)
        long_chunk = Part(part.row, part.end - 300, part.end)
        assert torch.equal(attend(shape, [long_chunk], dtype)[0][-1], out[0])


@each_dtype
def test_same_bits_with_one_thread_and_two(dtype: torch.dtype) -> None:
    threads = torch.get_num_threads()
    try:
        for shape in (SHAPES["smollm2"], SHAPES["gemma-sliding"], SHAPES["softcap"]):
            row = make_row(shape, 700, seed=1, dtype=dtype)
            torch.set_num_threads(1)
            one = attend(shape, [Part(row, 0, 700)], dtype)[0]
            torch.set_num_threads(2)
            two = attend(shape, [Part(row, 0, 700)], dtype)[0]
            last = attend(shape, [Part(row, 699, 700)], dtype)[0]
            assert torch.equal(one, two)
            assert torch.equal(one[-1:], last)
    finally:
        torch.set_num_threads(threads)


def test_a_row_that_is_all_nan_harms_no_other() -> None:
    shape = SHAPES["smollm2"]
    good = make_row(shape, 40, seed=1, dtype=BF16)
    bad = Row(*(torch.full_like(x, torch.nan) for x in (good.q, good.k, good.v)))
    alone = attend(shape, [Part(good, 20, 40)], BF16)[0]
    assert torch.equal(attend(shape, [Part(bad, 13, 30), Part(good, 20, 40), Part(bad, 29, 30)], BF16)[1], alone)


def test_sizes_follow_from_the_position_only_and_cover_it() -> None:
    sizes = padded_size(torch.arange(1, 5000).numpy())
    assert all(size >= n for n, size in enumerate(sizes.tolist(), 1))
    assert set(sizes.tolist()) == {128, 256, 512, 768, *range(1024, 5121, 512)}


@pytest.mark.parametrize(("group", "tile"), [(1, 32), (2, 16), (3, 8), (4, 8), (8, 4), (9, 2), (32, 1), (71, 1)])
def test_tile_fills_one_block_of_the_kernel(group: int, tile: int) -> None:
    assert tile_positions(group) == tile


@pytest.mark.parametrize("window", [None, 3, 100, 512])
def test_shapes_follow_from_the_position_whatever_the_chunk(window: int | None) -> None:
    # What makes the bits equal by construction, also where a library is more forgiving than it promises.
    group = 4
    tile = tile_positions(group)
    rng = random.Random(5)
    seen: dict[int, tuple[int, int]] = {}  # position -> place in its tile, key size
    for _ in range(60):
        ends = [rng.randint(1, 2000) for _ in range(3)]
        batch = bare_batch([(max(0, end - rng.choice([1, 5, 64, 600])), end) for end in ends])
        plan = TilePlanner(batch, 0, group, 1, window, F32).plan()
        size_at = [call.size for call in plan.calls for _ in range(call.n_tiles * tile)]
        places = (plan.out_index[::group] // group).tolist()
        for position, place in zip(batch.positions.tolist(), places, strict=True):
            size = size_at[place]
            here = (place % tile, size if size < 1024 else 1024)  # whole splits may be added to whole splits
            assert size < 1024 or size % 512 == 0
            assert seen.setdefault(position, here) == here
    assert all(place == position % tile for position, (place, _) in seen.items())


def bare_batch(ranges: list[tuple[int, int]]) -> RaggedBatch:
    """Rows with queries begin .. end - 1, all in block 0: only shapes matter."""
    positions = [p for begin, end in ranges for p in range(begin, end)]
    starts = [0]
    for begin, end in ranges:
        starts.append(starts[-1] + end - begin)
    n = len(ranges)
    part = GroupBatch(
        torch.zeros((n, 200), dtype=torch.int32), torch.zeros(n, dtype=torch.int32), torch.tensor(positions), 16
    )
    none = torch.zeros(0, dtype=torch.int64)
    ends = tuple(end for _, end in ranges)
    return RaggedBatch(none, torch.tensor(positions), tuple(starts), ends, (part,), none)
