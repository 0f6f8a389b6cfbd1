from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headwater.kernels import TorchOps
from headwater.kernels.linear import RULES, STRICT, PackedLinear, RowRule
from headwater.kernels.probe import ROW_COUNTS, probe_row_invariance

BF16, F32 = torch.bfloat16, torch.float32
each_dtype = pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])


def weight(n_out: int, n_in: int, seed: int = 0) -> Tensor:
    return torch.randn(n_out, n_in, generator=torch.Generator().manual_seed(seed)) * n_in**-0.5


def rows(n: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(1)).to(dtype)


@each_dtype
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 2, 3, 31, 32, 33, 65])
def test_product_and_bias(dtype: torch.dtype, rule: RowRule, n: int) -> None:
    w, bias, x = weight(80, 48).to(dtype), torch.randn(80).to(dtype), rows(n, 48, dtype)
    linear = TorchOps(dtype).pack_linear(w, bias)
    linear.rows = rule
    expected = x.double() @ w.double().T + bias.double()
    tolerance = {"rtol": 1e-2, "atol": 2e-2} if dtype is BF16 else {"rtol": 1e-5, "atol": 1e-5}
    out = linear(x)
    assert out.dtype is dtype
    torch.testing.assert_close(out.double(), expected, **tolerance)


def test_weights_are_taken_in_the_compute_dtype() -> None:
    linear = TorchOps(BF16).pack_linear(weight(8, 16))
    assert linear(rows(3, 16, BF16)).dtype is BF16


@each_dtype
@pytest.mark.parametrize(("n_in", "n_out"), [(576, 960), (1536, 576), (1024, 640), (2048, 640)])
def test_strict_rule_keeps_bits_on_real_shapes(dtype: torch.dtype, n_in: int, n_out: int) -> None:
    # The shapes of SmolLM2 135M and Gemma 3 270M with the longest sums.
    if dtype is BF16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("no bf16 products on this CPU")
    linear = TorchOps(dtype).pack_linear(weight(n_out, n_in))
    x = rows(600, n_in, dtype)
    whole = linear.apply(x, STRICT)
    for count in (1, 2, 3, 5, 8, 17, 32, 33, 64, 200):
        for at in range(0, 600 - count, max(count, 7)):
            assert torch.equal(linear.apply(x[at : at + count], STRICT), whole[at : at + count]), (count, at)


class OneRowDiffers(PackedLinear):
    """As measured on some CPUs: one row alone gets another order of the sums, which shows in few elements."""

    def raw(self, x: Tensor) -> Tensor:
        out = super().raw(x)
        if len(x) == 1:
            out.view(-1)[:: max(1, out.numel() // 2)] *= 1.01
        return out


class ManyRowsDiffer(PackedLinear):
    """More than 32 rows get another order."""

    def raw(self, x: Tensor) -> Tensor:
        out = super().raw(x)
        if len(x) > 32:
            out[:, ::500] *= 1.01
        return out


class Hopeless(PackedLinear):
    """Every row count differs from every other."""

    def raw(self, x: Tensor) -> Tensor:
        return super().raw(x) * (1.0 + len(x) / 64)


@pytest.mark.parametrize(
    ("kind", "rule", "holds"),
    [(OneRowDiffers, {1, 2}, True), (ManyRowsDiffer, {3, 4}, True), (Hopeless, {4}, False)],
)
def test_probe_chooses_the_freest_rule_that_holds(kind: type[PackedLinear], rule: set[int], holds: bool) -> None:
    linear, twin = kind(weight(700, 64)), kind(weight(700, 64))
    report = probe_row_invariance([linear, twin], budget_s=60)
    assert report.row_invariant is holds
    assert len(report.shapes) == 1
    assert RULES.index(report.shapes[0].rule) in rule
    assert linear.rows == twin.rows == report.shapes[0].rule
    assert ("not row-invariant" in report.line()) is not holds


def test_probe_out_of_time_keeps_the_strict_rule_and_still_finds_what_is_broken() -> None:
    sound, hopeless = PackedLinear(weight(700, 64)), Hopeless(weight(650, 64))
    report = probe_row_invariance([sound, hopeless], budget_s=0)
    assert sound.rows == STRICT
    assert [shape.row_invariant for shape in report.shapes] == [True, False]
    assert not report.row_invariant


def test_probe_looks_at_enough() -> None:
    # A difference in 1e-5 of the elements must be seen: at least 1e6 compared in all, and single rows among them.
    report = probe_row_invariance([PackedLinear(weight(576, 64))], budget_s=60)
    assert report.shapes[0].n_compared >= 1_000_000
    assert {1, 2, 3, 5, 7, 8, 9, 16, 17, 64} <= set(ROW_COUNTS)


def test_probe_of_nothing() -> None:
    assert probe_row_invariance([]).row_invariant
