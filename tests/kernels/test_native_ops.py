"""The native operations as a whole, and the choice of the quicker product."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from headwater.errors import ConfigError
from headwater.kernels import GroupBatch, LayerKV, RaggedBatch, TorchOps
from headwater.kernels import fast as fast_module
from headwater.kernels.cpu.library import Library
from headwater.kernels.fast import ROWS, FastOps, which_wins
from headwater.kernels.layout import KVLayout, PlainLayout
from headwater.kernels.linear import PackedLinear
from headwater.kernels.native import NativeOps
from headwater.kernels.ops import Linear, Ops

BF16, F32 = torch.bfloat16, torch.float32


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def attend(ops: Ops, head_dim: int) -> tuple[Tensor, KVLayout]:
    """One row of 20 tokens, 4 heads over 2."""
    n, layout = 20, ops.kv_layout(2, head_dim, 16)
    group = GroupBatch(
        torch.tensor([[2, 0]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32),
        torch.tensor([*range(32, 48), *range(4)]), 16,
    )  # fmt: skip
    batch = RaggedBatch(torch.zeros(n, dtype=torch.int64), torch.arange(n), (0, n), (n,), (group,), torch.tensor([19]))
    kv = LayerKV(layout.allocate(1, 3)[0], 0, layout)
    angle = torch.outer(torch.arange(n).float(), torch.arange(1, head_dim // 2 + 1).float().reciprocal())
    qkv = numbers(n, 8 * head_dim).to(ops.dtype)
    q = ops.rope_and_write(qkv, angle.cos(), angle.sin(), batch, kv, n_heads=4)
    return ops.attention(q, batch, kv, scale=head_dim**-0.5), layout


def test_what_fits_is_attended_natively(library: Library) -> None:
    ops = NativeOps(library, F32)
    out, layout = attend(ops, 64)
    assert not isinstance(layout, PlainLayout)
    assert ops.notes == [f"native kernels: {library.variant}"]
    torch.testing.assert_close(out, attend(TorchOps(F32), 64)[0], rtol=1e-4, atol=1e-4)


def test_heads_that_do_not_fit_are_attended_by_pytorch_and_a_line_says_so(library: Library) -> None:
    ops = NativeOps(library, F32)
    out, layout = attend(ops, 24)
    ops.kv_layout(2, 24, 16)
    assert isinstance(layout, PlainLayout)
    assert torch.equal(out, attend(TorchOps(F32), 24)[0])
    assert len(ops.notes) == 2 and "attention runs in PyTorch" in ops.notes[1]
    with pytest.raises(ConfigError):
        ops.kv_layout(2, 24, 16, torch.int8)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_products_come_in_the_dtype_asked_for(library: Library, dtype: torch.dtype) -> None:
    ops, weight, x = NativeOps(library, dtype), numbers(70, 48), numbers(3, 48, seed=1).to(dtype)
    for out_dtype in (None, F32):
        got = ops.pack_linear(weight, numbers(70), out_dtype=out_dtype)(x)
        assert got.dtype == (out_dtype or dtype)
        exact = x.double() @ weight.to(dtype).double().t() + numbers(70).double()
        torch.testing.assert_close(got.double(), exact, rtol=1e-2, atol=1e-2 if dtype == BF16 else 1e-4)


# ---- numerics fast ----------------------------------------------------------------------------------


class Sleepy:
    """Takes ``seconds`` for a call of ``slow`` rows and more, next to nothing for fewer."""

    def __init__(self, seconds: float, slow: int = 0) -> None:
        self.in_features, self.out_features, self.dtype = 8, 4, F32
        self._seconds, self._slow = seconds, slow
        self.n_calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.n_calls += 1
        if len(x) >= self._slow:
            time.sleep(self._seconds)
        return x.new_zeros((len(x), 4))


def test_the_quicker_product_wins_row_count_by_row_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_module, "SHAPE_S", 60.0)
    assert which_wins(Sleepy(0.002, 64), Sleepy(0.001), F32) == (False, False, False, True, True)


def test_the_time_on_one_shape_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_module, "SHAPE_S", 0.0)
    own, library = Sleepy(0.0), Sleepy(0.0)
    assert which_wins(own, library, F32) == (False,) * len(ROWS)
    assert own.n_calls == library.n_calls == 0


@pytest.mark.parametrize("wins", [(False,) * 5, (True,) * 5, (False, False, True, True, False)])
def test_each_call_goes_to_the_winner(library: Library, monkeypatch: pytest.MonkeyPatch, wins: tuple[bool]) -> None:
    timed: list[Linear] = []
    monkeypatch.setattr(fast_module, "which_wins", lambda own, *rest: (timed.append(own), wins)[1])
    used: list[int] = []
    raw = PackedLinear.raw
    monkeypatch.setattr(PackedLinear, "raw", lambda self, x: (used.append(len(x)), raw(self, x))[1])
    ops = FastOps(NativeOps(library, F32))
    weight = numbers(64, 32)
    for linear in (ops.pack_linear(weight), ops.pack_linear(weight)):
        for n in (1, 4, 5, 16, 17, 64, 65, 256, 257, 300):
            x = numbers(n, 32, seed=n)
            torch.testing.assert_close(linear(x), x @ weight.t(), rtol=1e-4, atol=1e-4)
    of = {1: 0, 4: 1, 5: 2, 16: 2, 17: 3, 64: 3, 65: 4, 256: 4, 257: 4, 300: 4}
    assert used == 2 * [n for n, i in of.items() if wins[i]]
    assert len(timed) == 1  # the second of a shape is not timed again
    assert f"in {int(any(wins))} of 1 shapes" in ops.notes[-1] and "equal bits are not promised" in ops.notes[-1]


def test_fast_without_native_kernels_is_the_library_without_a_row_rule() -> None:
    ops = FastOps(TorchOps(F32))
    linear = ops.pack_linear(numbers(6, 8))
    assert isinstance(linear, PackedLinear)
    assert (linear.rows.least, linear.rows.most) == (1, None)
