from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headwater.kernels.cpu.library import Library
from headwater.kernels.native_rowwise import NativeRowwise
from headwater.kernels.torch_ref import TorchOps

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
DIMS = pytest.mark.parametrize("dim", [1, 3, 15, 16, 64, 65, 576, 640, 1000])
EPS = 1e-5
ROUNDING = {torch.bfloat16: 2**-8, torch.float32: 1e-6}
"""One rounding of the result, and what float sums cost."""


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0, spread: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread).to(dtype)


def close(got: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact, rtol=ROUNDING[dtype], atol=1e-30)


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + EPS) * weight.double()


@DTYPES
@DIMS
def test_rms_norm_is_the_formula(library: Library, dtype: torch.dtype, dim: int) -> None:
    x, weight = numbers(5, dim, dtype=dtype), numbers(dim, dtype=torch.float32, seed=1)
    close(NativeRowwise(library, dtype).rms_norm(x, weight, EPS), exact_norm(x, weight), dtype)


@DTYPES
@DIMS
def test_add_rms_norm_rounds_the_sum_first(library: Library, dtype: torch.dtype, dim: int) -> None:
    x, residual = numbers(5, dim, dtype=dtype), numbers(5, dim, dtype=dtype, seed=1, spread=3.0)
    weight = numbers(dim, dtype=torch.float32, seed=2)
    out, total = NativeRowwise(library, dtype).add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, TorchOps(dtype).add_rms_norm(x, residual, weight, EPS)[1])
    close(out, exact_norm(total, weight), dtype)
    assert torch.equal(out, NativeRowwise(library, dtype).rms_norm(total, weight, EPS))


def exact_act(gate_up: Tensor, kind: str) -> Tensor:
    gate, up = gate_up.double().chunk(2, -1)
    act = torch.nn.functional.silu(gate) if kind == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
    return act * up


@DTYPES
@pytest.mark.parametrize("dim", [1, 3, 16, 65, 1536])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_gated_act_is_the_formula(library: Library, dtype: torch.dtype, dim: int, kind: str) -> None:
    gate_up = numbers(7, 2 * dim, dtype=dtype, spread=2.0)
    got = NativeRowwise(library, dtype).gated_act(gate_up, kind)
    assert got.dtype == dtype
    # relative to |gate| * |up|: far below zero both functions vanish
    size = gate_up.double()[:, :dim].abs() * gate_up.double()[:, dim:].abs()
    wrong = (got.double() - exact_act(gate_up, kind)).abs()
    assert (wrong <= ROUNDING[dtype] * exact_act(gate_up, kind).abs() + 2e-7 * size).all()


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_gated_act_far_from_zero(library: Library, kind: str) -> None:
    gate = torch.tensor([-3e38, -1e4, -200.0, -90.0, -0.0, 0.0, 90.0, 1e4, 3e38])
    got = NativeRowwise(library, torch.float32).gated_act(torch.cat((gate, torch.ones(9)))[None], kind)[0]
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, torch.where(gate > 0, gate, 0.0), rtol=1e-6, atol=1e-4)


@DTYPES
def test_a_nan_stays_in_its_row(library: Library, dtype: torch.dtype) -> None:
    x = numbers(3, 70, dtype=dtype)
    x[1, 69] = float("nan")
    ops = NativeRowwise(library, dtype)
    normed = ops.rms_norm(x, torch.ones(70), EPS)
    assert torch.isnan(normed[1]).all() and torch.isfinite(normed[[0, 2]]).all()
    for kind in ("silu", "gelu_tanh"):
        acted = ops.gated_act(x, kind)
        assert torch.isnan(acted).nonzero().tolist() == [[1, 34]]


@pytest.mark.parametrize("n_threads", [1, 2, 3])
@DTYPES
@pytest.mark.parametrize("dim", [60, 576])
def test_a_row_has_the_same_bits_in_any_company(library: Library, dtype: torch.dtype, dim: int, n_threads: int) -> None:
    ops, before = NativeRowwise(library, dtype), torch.get_num_threads()
    x, residual = numbers(301, dim, dtype=dtype), numbers(301, dim, dtype=dtype, seed=1)
    weight = numbers(dim, dtype=torch.float32, seed=2)

    def all_of(rows: slice) -> list[Tensor]:
        return [
            ops.rms_norm(x[rows], weight, EPS),
            *ops.add_rms_norm(x[rows], residual[rows], weight, EPS),
            ops.gated_act(x[rows], "silu"),
            ops.gated_act(x[rows], "gelu_tanh"),
        ]

    try:
        torch.set_num_threads(1)
        alone = [torch.cat(parts) for parts in zip(*(all_of(slice(i, i + 1)) for i in range(301)), strict=True)]
        torch.set_num_threads(n_threads)
        for rows in (slice(0, 301), slice(3, 300), slice(17, 24)):
            for one, many in zip(alone, all_of(rows), strict=True):
                assert torch.equal(one[rows].view(torch.uint8), many.view(torch.uint8))
    finally:
        torch.set_num_threads(before)


@DTYPES
def test_equal_values_have_equal_bits_wherever_they_stand(library: Library, dtype: torch.dtype) -> None:
    # 37 columns end in a partial vector on every kind of CPU
    gate_up = torch.full((2, 74), 0.3).to(dtype)
    assert len(NativeRowwise(library, dtype).gated_act(gate_up, "gelu_tanh").unique()) == 1


@DTYPES
def test_no_rows(library: Library, dtype: torch.dtype) -> None:
    ops = NativeRowwise(library, dtype)
    assert ops.rms_norm(torch.empty((0, 8), dtype=dtype), torch.ones(8), EPS).shape == (0, 8)
    assert ops.gated_act(torch.empty((0, 8), dtype=dtype), "silu").shape == (0, 4)


def test_variants_agree_up_to_rounding(library: Library) -> None:
    x, weight = numbers(9, 576, dtype=torch.float32), numbers(576, dtype=torch.float32, seed=1)
    torch.testing.assert_close(
        NativeRowwise(library, torch.float32).rms_norm(x, weight, EPS),
        TorchOps(torch.float32).rms_norm(x, weight, EPS),
        rtol=1e-6,
        atol=1e-6,
    )
