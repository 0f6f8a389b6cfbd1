from __future__ import annotations

from collections.abc import Callable, Iterator
from ctypes import c_int32, c_int64, c_void_p

import pytest
import torch
from torch import Tensor

from headwater.errors import KernelError
from headwater.kernels.cpu.library import Library
from headwater.kernels.int8_ref import Int8Linear, hadamard, quantize_rows
from headwater.kernels.native_linear import NativeInt8Linear, NativeLinear
from headwater.kernels.native_rowwise import NativeRowwise
from headwater.kernels.ops import Int8Weight
from headwater.kernels.pages import Arena

BF16, F32 = torch.bfloat16, torch.float32
KINDS = ("f32", "bf16", "w8a8", "w8a8 of f32", "w8a8 hadamard", "w8a16", "w8a16 of f32", "w8a16 hadamard")
SHAPES = ((45, 96), (64, 1312), (33, 7), (160, 64))
"""(out, in): part of a panel; K in several chunks of every kind; K in part of a step; whole panels and steps."""


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    n = torch.get_num_threads()
    yield
    torch.set_num_threads(n)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def int8_weight(kind: str, n: int, k: int) -> Int8Weight:
    values = (random(1, n, k) * 40).round().clamp(-127, 127).to(torch.int8)
    size = (k & -k) if "hadamard" in kind else 0  # the largest power of two that divides k
    return Int8Weight(values, random(2, n).abs(), "int8" if "w8a8" in kind else "compute", size)


def compute_dtype(kind: str) -> torch.dtype:
    return F32 if "f32" in kind else BF16


def layer(library: Library, kind: str, n: int, k: int, out_dtype: torch.dtype = F32) -> NativeLinear | NativeInt8Linear:
    bias, dtype = random(3, n), compute_dtype(kind)
    if kind.startswith("w8"):
        return NativeInt8Linear(library, int8_weight(kind, n, k), bias, dtype, out_dtype)
    return NativeLinear(library, random(1, n, k), bias, dtype, out_dtype)


def apart(x: Tensor, gap: int, fill: float) -> Tensor:
    """The same rows with ``gap`` elements of ``fill`` before and after each."""
    wide = torch.full((x.shape[0], x.shape[1] + 2 * gap), fill, dtype=x.dtype)
    wide[:, gap : gap + x.shape[1]] = x
    return wide[:, gap : gap + x.shape[1]]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["f32", "bf16", "w8a16", "w8a16 of f32", "w8a16 hadamard"])
def test_product_is_near_the_float64_one(library: Library, kind: str, shape: tuple[int, int]) -> None:
    n, k = shape
    x = random(4, 37, k).to(compute_dtype(kind))
    got = layer(library, kind, n, k)(x)
    weight, given = random(1, n, k).to(x.dtype).double(), x
    if kind.startswith("w8"):
        stored = int8_weight(kind, n, k)
        weight = stored.values.double() * stored.scale[:, None].double()
        given = hadamard(x, stored.hadamard).to(x.dtype) if stored.hadamard else x
    expected = given.double() @ weight.t() + random(3, n)
    room = given.double().abs() @ weight.abs().t() + random(3, n).abs()
    assert ((got - expected).abs() <= room * 2e-6).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["w8a8", "w8a8 of f32", "w8a8 hadamard"])
def test_int8_product_has_the_bits_of_the_reference(library: Library, kind: str, shape: tuple[int, int]) -> None:
    n, k = shape
    x = random(4, 61, k).to(compute_dtype(kind))
    x[3] = 0
    x[4] *= 1e-30
    x[5] = 7  # all of the row rounds to 127
    expected = Int8Linear(int8_weight(kind, n, k), random(3, n), x.dtype, F32)(x)
    assert same_bits(layer(library, kind, n, k)(x), expected)


def test_activations_are_rounded_to_even_as_the_reference_does(library: Library) -> None:
    x = torch.arange(-254, 255).view(1, -1) / 2  # every half between -127 and 127
    values, scale = quantize_rows(x)
    identity = Int8Weight(torch.eye(509, dtype=torch.int8), torch.ones(509), "int8")
    assert same_bits(NativeInt8Linear(library, identity, None, F32, F32)(x), values * scale)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_result_is_the_float32_one_rounded(library: Library, kind: str) -> None:
    x = random(4, 50, 96).to(compute_dtype(kind))
    wide, narrow = layer(library, kind, 45, 96)(x), layer(library, kind, 45, 96, BF16)(x)
    assert narrow.dtype == BF16
    assert same_bits(narrow, wide.to(BF16))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_row_keeps_its_bits_in_any_company(library: Library, kind: str, shape: tuple[int, int]) -> None:
    linear = layer(library, kind, *shape)
    x = random(4, 512, shape[1]).to(linear.dtype)
    torch.set_num_threads(1)
    alone = torch.cat([linear(row[None]) for row in x])
    for count in (*range(1, 71), 191, 193, 512):
        torch.set_num_threads((1, 2, 4)[count % 3])
        at = (count * 37) % (513 - count)
        rows = x[at : at + count]
        assert same_bits(linear(rows), alone[at : at + count]), count
        assert same_bits(linear(apart(rows, count % 5, 1.0)), alone[at : at + count]), count
    order = torch.randperm(512, generator=torch.Generator().manual_seed(5))
    assert same_bits(linear(x[order]), alone[order])


@pytest.mark.parametrize("kind", ["bf16", "w8a8", "w8a16"])
def test_row_keeps_its_bits_at_a_real_size(load_variant: Callable[[str], Library], kind: str) -> None:
    # 600,000 elements: library products were caught at 1e-4 to 1e-5 of them, in this shape
    library = load_variant("amx")
    linear = layer(library, kind, 576, 1536)
    x = random(4, 512, 1536).to(BF16)
    whole = linear(x)
    parts = [linear(part) for count in (1, 31, 224, 256) for part in [x[count - 1 :][:count] if count > 1 else x[:1]]]
    for count, part in zip((1, 31, 224, 256), parts, strict=True):
        assert same_bits(part, whole[count - 1 :][:count])
    assert same_bits(torch.cat([linear(row[None]) for row in x]), whole)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_number_stays_in_its_row(library: Library, kind: str, bad: float) -> None:
    for n, k in SHAPES:
        linear = layer(library, kind, n, k)
        x = random(4, 70, k).to(linear.dtype)
        clean = linear(x)
        for where in (0, 15, 16, 33, 69):
            dirty = x.clone()
            dirty[where, k // 2] = bad
            got = linear(apart(dirty, 3, bad))
            others = torch.arange(70) != where
            assert same_bits(got[others], clean[others]), where
            assert not got[where].isfinite().all()


@pytest.mark.parametrize("kind", ["w8a8", "w8a8 hadamard"])
def test_row_that_is_not_finite_gives_nan_in_int8(library: Library, kind: str) -> None:
    x = random(4, 3, 96).to(BF16)
    x[0, 5], x[1, 6] = float("nan"), float("inf")
    got = layer(library, kind, 45, 96)(x)
    assert got[:2].isnan().all()
    assert got[2].isfinite().all()


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rows_come_back_as_they_were_packed(library: Library, source: torch.dtype, dtype: torch.dtype) -> None:
    weight = random(1, 101, 2 * 77).to(source)[:, 77:]  # rows apart
    weight[7, 3] = float("nan")
    linear = NativeLinear(library, weight, None, dtype, F32)
    ids = torch.tensor([100, 0, 31, 32, 7, 7, *range(90)])
    assert torch.equal(linear.rows(ids).nan_to_num(5.0), weight.to(dtype)[ids].nan_to_num(5.0))
    assert linear.rows(ids[:0]).shape == (0, 77)


def test_rows_of_an_int8_weight_are_values_times_scale(library: Library) -> None:
    weight = int8_weight("w8a16", 45, 96)
    linear = NativeInt8Linear(library, weight, None, BF16, F32)
    ids = torch.tensor([44, 3, 0])
    assert torch.equal(linear.rows(ids), (weight.values.float() * weight.scale[:, None]).to(BF16)[ids])


@pytest.mark.parametrize("bad", [101, -1, 1 << 40])
def test_row_that_is_none_is_refused(library: Library, bad: int) -> None:
    linear = NativeLinear(library, random(1, 101, 8), None, BF16, F32)
    with pytest.raises(KernelError, match=f"row {bad} of a weight with 101 rows"):
        linear.rows(torch.tensor([3, bad]))


def test_vocabulary_of_262144(load_variant: Callable[[str], Library]) -> None:
    weight = random(1, 262_144, 24)
    arena = Arena()
    linear = NativeLinear(load_variant("amx"), weight, None, BF16, F32, arena)
    ids = torch.tensor([0, 131_071, 262_143])
    assert torch.equal(linear.rows(ids), weight.to(BF16)[ids])
    x = random(4, 3, 24).to(BF16)
    expected = x.double() @ weight.to(BF16).double().t()
    assert torch.allclose(linear(x).double(), expected, atol=1e-4)


def test_activations_that_are_not_side_by_side_are_copied(library: Library) -> None:
    linear = layer(library, "bf16", 45, 96)
    x = random(4, 10, 96).to(BF16)
    assert same_bits(linear(x.t().contiguous().t()), linear(x))
    assert linear(x[:0]).shape == (0, 45)
    assert same_bits(linear(x[:1].expand(4, 96)), linear(x[:1]).expand(4, 45).contiguous())


@pytest.mark.parametrize(
    "x", [torch.zeros(2, 95, dtype=BF16), torch.zeros(2, 96), torch.zeros(96, dtype=BF16)], ids=["size", "dtype", "1d"]
)
def test_other_activations_are_refused(library: Library, x: Tensor) -> None:
    with pytest.raises(KernelError, match=r"bfloat16 \[n, 96\] was given"):
        layer(library, "bf16", 45, 96)(x)


@pytest.mark.parametrize(
    ("values", "size", "why"),
    [
        (torch.zeros(1, 65_600, dtype=torch.int8), 0, "at most 65536"),
        (torch.zeros(1, 96, dtype=torch.int8), 64, "whole pieces of 64"),
        (torch.zeros(1, 96, dtype=torch.int8), 3, "whole pieces of 3"),
        (torch.zeros(1, 4, dtype=torch.uint8), 0, "not torch.uint8"),
    ],
)
def test_int8_weight_that_cannot_be_multiplied_is_refused(
    library: Library, values: Tensor, size: int, why: str
) -> None:
    weight = Int8Weight(values, torch.ones(1), "int8", size)
    with pytest.raises(KernelError, match=why):
        NativeInt8Linear(library, weight, None, BF16, F32)


@pytest.mark.parametrize(
    ("shape", "dtype", "why"), [((3, 4), torch.float16, "not in torch.float16"), ((0, 4), BF16, r"not \[0, 4\]")]
)
def test_weight_that_cannot_be_multiplied_is_refused(
    library: Library, shape: tuple[int, int], dtype: torch.dtype, why: str
) -> None:
    with pytest.raises(KernelError, match=why):
        NativeLinear(library, torch.zeros(shape), None, dtype, F32)


def test_sizes_for_a_benchmark(library: Library) -> None:
    linear = NativeLinear(library, random(1, 45, 96), None, BF16, F32)
    assert linear.flops(3) == 2 * 3 * 45 * 96
    assert linear.bytes == 64 * 96 * 2 + 3 * 64 * 4  # whole panels, three values a column
    assert (linear.in_features, linear.out_features, linear.dtype, linear.out_dtype) == (96, 45, BF16, F32)


@pytest.mark.parametrize("n_rows", [1, 33, 70, 600])
@pytest.mark.parametrize("kind", KINDS)
def test_gated_product_has_the_bits_of_product_and_activation(library: Library, kind: str, n_rows: int) -> None:
    dtype, f = compute_dtype(kind), 96
    product = layer(library, kind, 2 * f, 160, dtype)
    x = (random(4, n_rows, 160) * 3).to(dtype)
    x[n_rows // 2] = torch.nan  # one row that is no number, and stays alone
    ops = NativeRowwise(library, dtype)
    run = library.bind("hw_gated_linear", None, [c_void_p, c_void_p, c_int64, c_int64, c_int32, c_void_p])
    for gate, act in ((1, "silu"), (2, "gelu_tanh")):
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = torch.full((n_rows + 1, f), 7.0, dtype=dtype)
            run(product.address, x.data_ptr(), x.stride(0) * x.itemsize, n_rows, gate, out.data_ptr())
            assert same_bits(out[:-1], ops.gated_act(product(x), act))
            assert (out[-1] == 7.0).all()
            assert out[:-1].isfinite().all(1).sum() == n_rows - 1
