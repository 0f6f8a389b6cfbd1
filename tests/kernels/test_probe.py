"""The probe of products other than PyTorch's: it sees what breaks the promise, and tells what it had no time for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headwater.kernels.cpu.library import Library
from headwater.kernels.int8_ref import Int8Linear, quantize_rows
from headwater.kernels.native_linear import NativeInt8Linear, NativeLinear
from headwater.kernels.ops import Int8Weight
from headwater.kernels.probe import FEW, OWN_COUNTS, probe_row_invariance

F32, BF16 = torch.float32, torch.bfloat16


class Product:
    """Rows times a weight, one element of 64 at a time: the same order for every row. ``spoil`` changes a result."""

    def __init__(
        self, out_features: int = 500, in_features: int = 4, spoil: Callable[[Tensor, int], None] | None = None
    ) -> None:
        self.in_features, self.out_features, self.dtype = in_features, out_features, F32
        self._spoil = spoil
        self._weight = torch.randn((in_features, out_features), generator=torch.Generator().manual_seed(1))

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.zeros((len(x), self.out_features))
        for i in range(self.in_features):
            out += x[:, i : i + 1] * self._weight[i]
        if self._spoil is not None:
            self._spoil(out, len(x))
        return out


def rarely(counts: set[int]) -> Callable[[Tensor, int], None]:
    """Changes 1e-5 of the elements, wherever a random number says so, in calls of so many rows."""
    random = torch.Generator().manual_seed(3)

    def spoil(out: Tensor, n: int) -> None:
        if n in counts:
            out[torch.rand(out.shape, generator=random) < 1e-5] += 1.0

    return spoil


def test_an_invariant_product_passes_and_nothing_is_left_out() -> None:
    report = probe_row_invariance([Product(), Product()], budget_s=600)
    (shape,) = report.shapes
    assert report.row_invariant and shape.n_unchecked == 0 and shape.n_different == 0
    assert shape.n_compared >= 400_000 * len(OWN_COUNTS)
    assert report.line() == "equal bits with and without the cache: checked on this CPU"


def test_every_row_count_from_1_to_33_is_asked() -> None:
    assert {*range(1, 34), 64, 100, 512} == set(OWN_COUNTS)
    assert len(OWN_COUNTS) == len(set(OWN_COUNTS))


@pytest.mark.parametrize("counts", [{1}, {13}, {29}, {64}, {512}])
def test_a_difference_in_one_element_of_100_000_at_one_row_count_is_seen(counts: set[int]) -> None:
    report = probe_row_invariance([Product(), Product(out_features=501, spoil=rarely(counts))], budget_s=600)
    assert not report.row_invariant
    assert [shape.row_invariant for shape in report.shapes] == [True, False]
    assert "not row-invariant here: 1 of 2 shapes" in report.line()


def test_out_of_time_single_rows_are_compared_all_the_same_and_the_rest_is_told() -> None:
    def one_row_differs(out: Tensor, n: int) -> None:
        if n == 1:
            out[0, 0] += 1.0

    report = probe_row_invariance([Product(), Product(spoil=one_row_differs, out_features=501)], budget_s=0)
    assert [shape.row_invariant for shape in report.shapes] == [True, False]
    assert [shape.n_unchecked for shape in report.shapes] == [len(OWN_COUNTS)] * 2
    sound = probe_row_invariance([Product()], budget_s=0)
    assert sound.shapes[0].n_compared == FEW * 500
    assert f"no time for {len(OWN_COUNTS)} of {len(OWN_COUNTS)} row counts" in sound.line()


def test_products_of_one_shape_but_other_kinds_are_probed_each() -> None:
    values, scale = quantize_rows(torch.randn((64, 32), generator=torch.Generator().manual_seed(0)))
    weight = Int8Weight(values, scale[:, 0], "int8")
    reference = Int8Linear(weight, None, F32, F32)
    report = probe_row_invariance([Product(64, 32), reference], budget_s=0.5)
    assert sorted(shape.kind for shape in report.shapes) == ["Int8Linear", "Product"]


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_the_native_products_pass(library: Library, dtype: torch.dtype) -> None:
    weight = torch.randn((96, 130), generator=torch.Generator().manual_seed(0))
    values, scale = quantize_rows(weight)
    products = [
        NativeLinear(library, weight, None, dtype, F32),
        NativeInt8Linear(library, Int8Weight(values, scale[:, 0], "int8"), None, dtype, F32),
        NativeInt8Linear(library, Int8Weight(values[:64], scale[:64, 0], "compute"), None, dtype, F32),
    ]
    report = probe_row_invariance(products, budget_s=3)
    assert len(report.shapes) == 3 and report.row_invariant
