from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from headwater.kernels import GroupBatch, LayerKV, RaggedBatch, TorchOps

BF16, F32 = torch.bfloat16, torch.float32
each_dtype = pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
ROWS = (1, 2, 3, 7, 16, 17, 100, 255, 333)


def batch_at(positions: Tensor, slots: Tensor) -> RaggedBatch:
    n = len(positions)
    group = GroupBatch(torch.zeros((1, 1), dtype=torch.int32), torch.zeros(1, dtype=torch.int32), slots, 4)
    ids = torch.zeros(n, dtype=torch.int64)
    return RaggedBatch(ids, positions, (0, n), (n,), (group,), torch.zeros(0, dtype=torch.int64))


@each_dtype
@pytest.mark.parametrize("d", [64, 100, 576])
def test_rms_norm_against_float64(dtype: torch.dtype, d: int) -> None:
    x, w = (torch.randn(9, d, generator=torch.Generator().manual_seed(1)) * 3).to(dtype), torch.rand(d) + 0.5
    residual = torch.randn(9, d).to(dtype)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w.double()
    tolerance = {"rtol": 5e-3, "atol": 1e-3} if dtype is BF16 else {"rtol": 1e-5, "atol": 1e-6}
    ops = TorchOps(dtype)
    torch.testing.assert_close(ops.rms_norm(x, w, 1e-5).double(), expected, **tolerance)
    normed, total = ops.add_rms_norm(x, residual, w, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, ops.rms_norm(total, w, 1e-5))


@each_dtype
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_rows_keep_their_bits_in_any_company(dtype: torch.dtype, threads: int) -> None:
    ops = TorchOps(dtype)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "rms_norm": lambda x: ops.rms_norm(x, torch.linspace(0.5, 2, x.shape[1]), 1e-6),
        "silu": lambda x: ops.gated_act(x, "silu"),
        "gelu_tanh": lambda x: ops.gated_act(x, "gelu_tanh"),
    }
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for width in (192, 3072, 4096):  # halves with and without whole vectors
            x = (torch.randn(512, width, generator=torch.Generator().manual_seed(width)) * 2).to(dtype)
            for name, f in functions.items():
                whole = f(x)
                for n in ROWS:
                    for at in (0, 1, 100):
                        assert torch.equal(f(x[at : at + n]), whole[at : at + n]), (name, width, n, at)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("kind", "reference"), [("silu", torch.nn.functional.silu), ("gelu_tanh", None)])
def test_gated_act_formula(kind: str, reference: Callable[[Tensor], Tensor] | None) -> None:
    x = torch.randn(5, 64)
    act = reference or (lambda gate: torch.nn.functional.gelu(gate, approximate="tanh"))
    torch.testing.assert_close(TorchOps(F32).gated_act(x, kind), act(x[:, :32]) * x[:, 32:])


def one_layer(ops: TorchOps, n_blocks: int, n_kv_heads: int, d: int) -> LayerKV:
    layout = ops.kv_layout(n_kv_heads, d, 4)
    return LayerKV(layout.allocate(1, n_blocks)[0], 0, layout)


@each_dtype
def test_rope_is_the_formula_of_transformers_and_writes_where_told(dtype: torch.dtype) -> None:
    n, n_heads, n_kv_heads, d = 6, 4, 2, 32
    q, k, v = (torch.randn(n, heads, d).to(dtype) for heads in (n_heads, n_kv_heads, n_kv_heads))
    angles = torch.arange(50.0)[:, None] / 100.0 ** (torch.arange(0, d, 2) / d)
    positions = torch.tensor([0, 3, 49, 7, 8, 20])
    slots = torch.tensor([9, 2, 15, 4, 1, 12])
    ops = TorchOps(dtype)
    kv = one_layer(ops, 4, n_kv_heads, d)
    kv.k.fill_(7.0)
    kv.v.fill_(7.0)
    qkv = torch.cat((q, k, v), 1).view(n, -1)
    out = ops.rope_and_write(qkv, angles.cos(), angles.sin(), batch_at(positions, slots), kv, n_heads=n_heads)

    full = torch.cat((angles, angles), -1)[positions]
    expected_q, expected_k = apply_rotary_pos_emb(
        q.float().transpose(0, 1)[None], k.float().transpose(0, 1)[None], full.cos()[None], full.sin()[None]
    )
    assert torch.equal(out, expected_q[0].transpose(0, 1).to(dtype))
    assert torch.equal(kv.k.view(16, n_kv_heads, d)[slots], expected_k[0].transpose(0, 1).to(dtype))
    assert torch.equal(kv.v.view(16, n_kv_heads, d)[slots], v)
    untouched = [slot for slot in range(16) if slot not in slots.tolist()]
    assert (kv.k.view(16, -1)[untouched] == 7.0).all()
    assert (kv.v.view(16, -1)[untouched] == 7.0).all()


def test_rope_keeps_two_tables_of_one_batch_apart() -> None:
    # Gemma 3: sliding and full layers turn by different tables in the same step.
    x = torch.randn(3, 1, 8)
    batch = batch_at(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2]))
    kv = one_layer(TorchOps(F32), 1, 1, 8)
    outs = []
    for theta in (10.0, 1000.0, 10.0):
        angles = torch.arange(5.0)[:, None] / theta ** (torch.arange(0, 8, 2) / 8)
        cos, sin = angles.cos(), angles.sin()
        outs.append(
            (TorchOps(F32).rope_and_write(x.repeat(1, 3, 1).view(3, -1), cos, sin, batch, kv, n_heads=1), cos, sin)
        )
    assert torch.equal(outs[0][0], outs[2][0])
    assert not torch.equal(outs[0][0], outs[1][0])
