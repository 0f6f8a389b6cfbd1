from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from headwater.errors import ConfigError
from headwater.kernels import HeadNorms, LayerKV, RaggedBatch, TorchOps
from headwater.kernels.cpu.library import Library
from headwater.kernels.cpu.variants import best_variant
from headwater.kernels.native_attention import NativeAttention
from headwater.kernels.panel_layout import PanelLayout
from tests.kernels.paged import Part, Row, Shape, as_stored, attend, make_row, naive, paged_batch, poison, write
from tests.memory import resident_bytes

BF16, F32, INT8 = torch.bfloat16, torch.float32, torch.int8
SHAPES = {
    "smollm2": Shape(9, 3, 64),
    "gemma-full": Shape(4, 1, 256),
    "gemma-sliding": Shape(4, 1, 256, window=512),
    "mha-32-block-4": Shape(4, 4, 32, block_size=4),
    "gqa-8-window-100-block-32": Shape(8, 1, 96, window=100, block_size=32),
    "window-16-block-48": Shape(8, 2, 128, window=16, block_size=48),
    "window-7-block-1": Shape(3, 1, 32, window=7, block_size=1),
    "window-1": Shape(2, 2, 64, window=1),
    "softcap": Shape(4, 2, 64, softcap=2.0, block_size=32),
    "softcap-window-block-24": Shape(3, 1, 96, window=100, softcap=2.0, block_size=24),
    "many-heads-per-kv-head": Shape(130, 1, 32),
}
KINDS = {"bf16": (BF16, BF16), "f32": (F32, F32), "bf16-int8": (BF16, INT8), "f32-int8": (F32, INT8)}
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
each_kind = pytest.mark.parametrize(("dtype", "kv_dtype"), KINDS.values(), ids=KINDS)
each_dtype = pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])


@pytest.fixture(scope="module")
def best(load_variant: Callable[[str], Library]) -> Library:
    """The first variant that runs here: for what does not depend on the arithmetic."""
    return load_variant(best_variant())


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@each_shape
@each_kind
def test_equals_dense_attention_in_float64_over_fragmented_poisoned_pages(
    library: Library, shape: Shape, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    parts = [
        Part(make_row(shape, end, seed=end, dtype=dtype), begin, end)
        for begin, end in [(0, 5), (129, 130), (400, 615), (1060, 1100), (47, 64), (511, 514)]
    ]
    outs = attend(shape, parts, dtype, ops=NativeAttention(library, dtype), kv_dtype=kv_dtype)
    for part, out in zip(parts, outs, strict=True):
        for position in {part.begin, (part.begin + part.end) // 2, part.end - 1}:
            expected = naive(shape, as_stored(part.row, kv_dtype), position)
            error = (out[position - part.begin].double() - expected).abs().max()
            assert error <= (1e-2 if dtype is BF16 else 5e-6) * max(1.0, float(expected.abs().max()))


@each_shape
@each_kind
def test_same_bits_in_any_chunks_company_and_blocks(
    library: Library, shape: Shape, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    ops = NativeAttention(library, dtype)
    n = 580
    row = make_row(shape, n, seed=1, dtype=dtype)
    whole = attend(shape, [Part(row, 0, n)], dtype, seed=1, ops=ops, kv_dtype=kv_dtype)[0]
    rng = random.Random(2)
    for chunk, n_trials in ((1, 3), (7, 2), (64, 1)):
        for begin in [*rng.sample(range(0, n, chunk), n_trials), (n - 1) // chunk * chunk]:
            part = Part(row, begin, min(n, begin + chunk))
            strangers = [
                Part(make_row(shape, end, seed=end, dtype=dtype), max(0, end - rng.randint(1, 70)), end)
                for end in rng.sample(range(1, 700), rng.randint(0, 2))
            ]
            batch = [*strangers, part]
            rng.shuffle(batch)
            out = attend(shape, batch, dtype, seed=begin, ops=ops, kv_dtype=kv_dtype)[batch.index(part)]
            assert torch.equal(out, whole[part.begin : part.end]), (chunk, begin, len(strangers))


@each_kind
def test_same_bits_with_any_number_of_threads(
    library: Library, dtype: torch.dtype, kv_dtype: torch.dtype, threads: None
) -> None:
    ops = NativeAttention(library, dtype)
    for shape in (SHAPES["smollm2"], SHAPES["gemma-sliding"]):
        row = make_row(shape, 1100, seed=1, dtype=dtype)
        # 1,100 queries go tile by tile, or with many threads split by split; 20 and 1 split by split
        for part in (Part(row, 0, 1100), Part(row, 1080, 1100), Part(row, 1099, 1100)):
            outs = []
            for n_threads in (1, 2, 4, 13):
                torch.set_num_threads(n_threads)
                outs.append(attend(shape, [part], dtype, ops=ops, kv_dtype=kv_dtype)[0])
            assert all(torch.equal(out, outs[0]) for out in outs)


def prefixed(shape: Shape, n_shared: int, ranges: list[tuple[int, int]], dtype: torch.dtype) -> list[Part]:
    """Rows that agree in the first ``n_shared`` tokens."""
    head = make_row(shape, n_shared, seed=0, dtype=dtype)
    parts = []
    for i, (begin, end) in enumerate(ranges):
        tail = make_row(shape, end - n_shared, seed=1 + i, dtype=dtype)
        pairs = zip((head.q, head.k, head.v), (tail.q, tail.k, tail.v), strict=True)
        parts.append(Part(Row(*(torch.cat(pair) for pair in pairs)), begin, end))
    return parts


SHARING = {
    "smollm2": Shape(9, 3, 64),
    "window": Shape(4, 1, 128, window=1100),
    "block-48": Shape(8, 1, 32, block_size=48, softcap=3.0),
    "block-8": Shape(2, 2, 32, block_size=8),
}


@pytest.mark.parametrize("shape", SHARING.values(), ids=SHARING)
@each_kind
def test_rows_over_the_same_blocks_have_the_bits_that_they_have_alone(
    library: Library, shape: Shape, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    ranges = [(1600 + i, 1601 + i) for i in range(6)] + [(1580, 1600), (1584, 1630), (1540, 1541), (1900, 1901)]
    parts = prefixed(shape, 1536, ranges, dtype)
    together = NativeAttention(library, dtype)
    apart = NativeAttention(library, dtype, share_prefixes=False)
    outs = attend(shape, parts, dtype, ops=together, kv_dtype=kv_dtype, shared=1536)
    singly = attend(shape, parts, dtype, ops=apart, kv_dtype=kv_dtype, shared=1536)
    for part, out, other in zip(parts, outs, singly, strict=True):
        [alone] = attend(shape, [part], dtype, ops=together, kv_dtype=kv_dtype, seed=3)
        assert torch.equal(out, alone)
        assert torch.equal(other, alone)


def test_rows_that_share_all_but_the_last_block_of_a_split_keep_their_own(best: Library) -> None:
    shape = Shape(2, 1, 32)
    parts = prefixed(shape, 496, [(600, 601), (600, 601)], F32)
    outs = attend(shape, parts, F32, ops=NativeAttention(best, F32), shared=496)
    for part, out in zip(parts, outs, strict=True):
        assert (out[0].double() - naive(shape, part.row, 600)).abs().max() < 5e-6


@each_kind
def test_a_row_that_is_all_nan_harms_no_other_and_is_seen(
    library: Library, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    shape = SHAPES["smollm2"]
    ops = NativeAttention(library, dtype)
    good = make_row(shape, 40, seed=1, dtype=dtype)
    bad = Row(*(torch.full_like(x, torch.nan) for x in (good.q, good.k, good.v)))
    [alone] = attend(shape, [Part(good, 20, 40)], dtype, ops=ops, kv_dtype=kv_dtype)
    parts = [Part(bad, 13, 30), Part(good, 20, 40), Part(bad, 29, 30)]
    first, middle, last = attend(shape, parts, dtype, ops=ops, kv_dtype=kv_dtype)
    assert torch.equal(middle, alone)
    assert first.isnan().all() and last.isnan().all()


@pytest.mark.parametrize("shape", [Shape(9, 3, 64), Shape(4, 2, 32, window=20, block_size=4)], ids=["full", "window"])
@each_kind
def test_tokens_that_are_no_numbers_harm_nobody_who_does_not_see_them(
    library: Library, shape: Shape, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    # 0 x NaN is NaN: position 39 and before must not multiply what comes after them in their own chunk.
    ops = NativeAttention(library, dtype)
    good = make_row(shape, 90, seed=1, dtype=dtype)
    bad = Row(good.q, good.k.clone(), good.v.clone())
    bad.k[40], bad.v[40] = torch.nan, torch.nan
    bad.v[41] = torch.inf if kv_dtype is not INT8 else torch.nan
    [expected] = attend(shape, [Part(good, 0, 90)], dtype, ops=ops, kv_dtype=kv_dtype)
    [out] = attend(shape, [Part(bad, 0, 90)], dtype, ops=ops, kv_dtype=kv_dtype)
    assert torch.equal(out[:40], expected[:40])
    assert out[40:45].isnan().all()
    if shape.window is not None:
        assert torch.equal(out[61:], expected[61:])


# ---- rotation and the write --------------------------------------------------------------------------------------


def written(
    ops: NativeAttention | TorchOps, shape: Shape, kv_dtype: torch.dtype, norms: HeadNorms | None
) -> tuple[Tensor, list[tuple[Tensor, ...]], RaggedBatch]:
    """The rotated q of two rows at odd places, all blocks as they are read, the batch."""
    generator = torch.Generator().manual_seed(3)
    tables = [[5, 2, 7, 1, 0, 9, 4], [3, 8, 6, 10, 11, 12, 13]]
    ranges = [(0, 5 * shape.block_size - 1), (shape.block_size + 1, 4 * shape.block_size)]
    batch = paged_batch(tables, [0, 0], ranges, shape.block_size)
    width = (shape.n_heads + 2 * shape.n_kv_heads) * shape.d
    qkv = torch.randn((len(batch.positions), width), generator=generator).to(ops.dtype)
    angles = torch.rand((max(batch.context_len), shape.d // 2), generator=generator) * 100
    layout = ops.kv_layout(shape.n_kv_heads, shape.d, shape.block_size, kv_dtype)
    [pages] = layout.allocate(1, 14)
    kv = LayerKV(pages, 0, layout)
    q = ops.rope_and_write(qkv, angles.cos(), angles.sin(), batch, kv, n_heads=shape.n_heads, norms=norms)
    return q, [layout.read(pages, block, shape.block_size) for block in range(14)], batch


@pytest.mark.parametrize("block_size", [1, 4, 16, 24, 32, 48])
@each_kind
def test_q_and_store_have_the_bits_of_the_reference(
    library: Library, dtype: torch.dtype, kv_dtype: torch.dtype, block_size: int
) -> None:
    shape = Shape(6, 2, 96, block_size=block_size)
    q, blocks, _ = written(NativeAttention(library, dtype), shape, kv_dtype, None)
    expected_q, expected, _ = written(TorchOps(dtype), shape, kv_dtype, None)
    assert torch.equal(q, expected_q)
    for block, reference in zip(blocks, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(block, reference, strict=True))


@each_kind
def test_head_norms_agree_with_the_reference(library: Library, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    shape = Shape(4, 2, 64)
    generator = torch.Generator().manual_seed(1)
    norms = HeadNorms(torch.rand(64, generator=generator) + 1, torch.rand(64, generator=generator) + 1, 1e-6)
    q, blocks, _ = written(NativeAttention(library, dtype), shape, kv_dtype, norms)
    expected_q, expected, _ = written(TorchOps(dtype), shape, kv_dtype, norms)
    # sums in another order: the last bit of what is rounded may differ, or of int8 the last whole number
    tolerance = 0.05 if dtype is BF16 else 1e-5
    torch.testing.assert_close(q, expected_q, atol=tolerance, rtol=0)
    for block, reference in zip(blocks, expected, strict=True):
        for got, want in zip(block, reference, strict=True):
            close = 1 if got.dtype is INT8 else tolerance
            assert (got.double() - want.double()).abs().max() <= close


@each_kind
def test_a_token_is_written_with_the_same_bits_alone_and_by_many_threads(
    library: Library, dtype: torch.dtype, kv_dtype: torch.dtype, threads: None
) -> None:
    shape = Shape(4, 2, 64)
    ops = NativeAttention(library, dtype)
    norms = HeadNorms(torch.full((64,), 1.5), torch.full((64,), 0.7), 1e-6)
    torch.set_num_threads(1)
    q, blocks, _ = written(ops, shape, kv_dtype, norms)
    torch.set_num_threads(4)
    for _ in range(20):  # two tokens in one dword of V, by two threads
        other_q, other, _ = written(ops, shape, kv_dtype, norms)
        assert torch.equal(q, other_q)
        for block, same in zip(blocks, other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(block, same, strict=True))


# ---- the layout --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [4, 16, 48])
@each_kind
def test_copy_moves_the_first_slots_and_no_others(
    best: Library, dtype: torch.dtype, kv_dtype: torch.dtype, block_size: int
) -> None:
    shape = Shape(2, 2, 32, block_size=block_size)
    ops = NativeAttention(best, dtype)
    layout = ops.kv_layout(2, 32, block_size, kv_dtype)
    [pages] = layout.allocate(1, 3)
    row = make_row(shape, 2 * block_size, seed=1, dtype=dtype)
    batch = paged_batch([[2, 0]], [0], [(0, 2 * block_size)], block_size)
    write(ops, LayerKV(pages, 0, layout), batch, row.k, row.v)
    source, target = layout.read(pages, 2, block_size), layout.read(pages, 0, block_size)
    for n in (1, 3, block_size - 1, block_size):
        layout.copy(pages, 2, 0, n)
        for moved, old, new in zip(layout.read(pages, 0, block_size), target, source, strict=True):
            assert torch.equal(moved[:n], new[:n])
            assert torch.equal(moved[n:], old[n:])
    if kv_dtype is not INT8:
        assert torch.equal(source[0], row.k[:block_size])
        assert torch.equal(source[1], row.v[:block_size])
        assert torch.equal(layout.read(pages, 2, 3)[1], row.v[:3])


def test_int8_takes_half_of_the_memory_and_pages_cost_nothing_before_they_are_written() -> None:
    layouts = [PanelLayout(3, 64, 16, BF16, kv_dtype) for kv_dtype in (INT8, BF16)]
    assert layouts[0].block_bytes / layouts[1].block_bytes == pytest.approx(0.53, abs=2e-3)
    for layout in layouts:
        before = resident_bytes()
        pages = layout.allocate(4, 50_000)
        assert sum(part.nbytes for layer in pages for part in layer.parts) == 4 * 50_000 * layout.block_bytes
        assert resident_bytes() - before < 100 << 20


@pytest.mark.parametrize("head_dim", [0, 16, 48, 80, 288])
def test_other_head_sizes_are_refused_with_a_hint(head_dim: int) -> None:
    with pytest.raises(ConfigError, match=f"not {head_dim}: the PyTorch operations"):
        PanelLayout(2, head_dim, 16, BF16, BF16)


def test_other_dtypes_and_foreign_stores_are_refused(best: Library) -> None:
    ops = NativeAttention(best, BF16)
    with pytest.raises(ConfigError, match="float16"):
        ops.kv_layout(2, 64, 16, torch.float16)
    layout = TorchOps(BF16).kv_layout(2, 64, 16)
    [pages] = layout.allocate(1, 2)
    poison(pages)
    batch = paged_batch([[0]], [0], [(0, 1)], 16)
    with pytest.raises(ConfigError, match="own layout"):
        ops.attention(torch.zeros(1, 2, 64, dtype=BF16), batch, LayerKV(pages, 0, layout), scale=1.0)
