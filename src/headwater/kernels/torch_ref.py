"""The operations in PyTorch, for any CPU that PyTorch runs on: the reference for native kernels.

Same bits: every operation here treats a token alone or in shapes that depend on its position only
(``tiles.py``), so that a row's result does not change with the batch, the chunk or the blocks; the linear
layers as far as the library allows (``linear.py``; the probe says how far).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from headwater.errors import ConfigError
from headwater.kernels.int8_ref import Int8Linear, quantize_rows
from headwater.kernels.layout import LayerKV, PlainLayout
from headwater.kernels.linear import PackedLinear
from headwater.kernels.ops import Embedding, HeadNorms, Int8Weight, LayerParts, Linear, RaggedBatch
from headwater.kernels.tiles import SPLIT, TileCall, TilePlan, TilePlanner

GRAIN = 32768
"""With so many elements for each thread, PyTorch gives every thread a share (at::internal::GRAIN_SIZE)."""
ONE_THREAD = 16384
"""Up to so many elements, PyTorch runs an elementwise operation in one thread (gelu shares earlier than others)."""


class TorchOps:
    """``Ops`` in PyTorch; ``dtype`` is torch.bfloat16 or torch.float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.notes: list[str] = []

    def kv_layout(
        self, n_kv_heads: int, head_dim: int, block_size: int, kv_dtype: torch.dtype | None = None
    ) -> PlainLayout:
        if kv_dtype not in (None, self.dtype, torch.int8):
            raise ConfigError(f"KV is stored in {self.dtype}, the dtype of the computation, or in int8, not {kv_dtype}")
        return PlainLayout(n_kv_heads, head_dim, block_size, self.dtype, kv_dtype)

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> PackedLinear:
        return PackedLinear(
            weight.to(self.dtype).contiguous(),
            None if bias is None else bias.to(self.dtype),
            self.dtype if out_dtype is None else out_dtype,
        )

    def pack_int8(
        self, weight: Int8Weight, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> Int8Linear:
        return Int8Linear(weight, bias, self.dtype, self.dtype if out_dtype is None else out_dtype)

    def embedding(self, weight: Tensor, head: Linear | None) -> Embedding:
        return partial(F.embedding, weight=weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
        return (wide * scale * weight).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def rope_and_write(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: RaggedBatch,
        kv: LayerKV,
        *,
        n_heads: int,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        n_kv_heads, d = kv.layout.n_kv_heads, kv.layout.head_dim
        q, k, v = torch.split(qkv.view(len(qkv), -1, d), [n_heads, n_kv_heads, n_kv_heads], 1)
        if norms is not None:
            q = self.rms_norm(q.contiguous(), norms.q, norms.eps)
            k = self.rms_norm(k.contiguous(), norms.k, norms.eps)
        key = ("rope", cos.data_ptr(), sin.data_ptr())
        if key not in batch.prepared:
            c, s = cos[batch.positions], sin[batch.positions]
            batch.prepared[key] = torch.cat((c, c), -1)[:, None], torch.cat((-s, s), -1)[:, None]
        full_cos, full_sin = batch.prepared[key]
        both = torch.cat((q, k), 1).float()
        # (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)
        turned: Tensor = both * full_cos + both.roll(d // 2, -1) * full_sin
        slots = batch.groups[kv.group].slot_mapping
        _write(kv.pages.k, kv.pages.k_scale, slots, turned[:, n_heads:])
        _write(kv.pages.v, kv.pages.v_scale, slots, v)
        return turned[:, :n_heads].to(qkv.dtype)

    def attention(
        self,
        q: Tensor,
        batch: RaggedBatch,
        kv: LayerKV,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        n_tokens, n_heads, d = q.shape
        n_kv_heads = kv.layout.n_kv_heads
        plan = self._plan(batch, kv.group, n_heads, n_kv_heads, window)
        group = n_heads // n_kv_heads
        q_rows = q.reshape(n_tokens * n_kv_heads, group * d)
        outs = []
        for call in plan.calls:
            tiles = q_rows.index_select(0, call.q_index).view(call.n_tiles, n_kv_heads, plan.tile * group, d)
            keys = _gather(kv.pages.k, kv.pages.k_scale, call, self.dtype)
            values = _gather(kv.pages.v, kv.pages.v_scale, call, self.dtype)
            if softcap is None:
                out = F.scaled_dot_product_attention(tiles, keys, values, attn_mask=call.mask, scale=scale)
            else:
                out = _capped_attention(tiles, keys, values, call.mask, scale, softcap)
            outs.append(out.transpose(1, 2).reshape(-1, d))
        flat = outs[0] if len(outs) == 1 else torch.cat(outs)
        return flat.index_select(0, plan.out_index).view(n_tokens, n_heads, d)

    def _plan(self, batch: RaggedBatch, group: int, n_heads: int, n_kv_heads: int, window: int | None) -> TilePlan:
        key = ("tiles", group, n_heads, n_kv_heads, window)
        plan = batch.prepared.get(key)
        if plan is None:
            plan = TilePlanner(batch, group, n_heads, n_kv_heads, window, self.dtype).plan()
            batch.prepared[key] = plan
        return plan

    def stack(self, layers: Sequence[LayerParts], final_norm: Tensor) -> None:
        return None

    def gated_act(self, gate_up: Tensor, kind: str) -> Tensor:
        return _whole_rows(_ACTS[kind], gate_up, gate_up.shape[1] // 2)


def _silu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def _gelu_tanh(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


_ACTS: dict[str, Callable[[Tensor], Tensor]] = {"silu": _silu, "gelu_tanh": _gelu_tanh}


def _whole_rows(f: Callable[[Tensor], Tensor], x: Tensor, width: int) -> Tensor:
    """Elementwise ``f`` of x [n, ...] to [n, width], so that no thread's share ends inside a row.

    PyTorch's vector exp and tanh differ in the last bit from the scalar ones used for what is left over at the
    end of a thread's share. With shares of whole rows that is the same elements of every row, or none.
    """
    n, n_threads = x.shape[0], torch.get_num_threads()
    if n * width <= ONE_THREAD or n_threads == 1:
        return f(x)
    # Shares are equal, so they are whole rows if the rows divide evenly. How many threads share is only
    # certain where all do (or where it can be but 1 or 2).
    n_even = n - n % n_threads
    if n_threads > 2 and n_even * width <= n_threads * GRAIN:
        n_even = 0
    if n_even == n:
        return f(x)
    rest = torch.split(x[n_even:], max(1, ONE_THREAD // width))
    return torch.cat([f(part) for part in (x[:n_even], *rest) if len(part)])


def _write(part: Tensor, scales: Tensor | None, slots: Tensor, x: Tensor) -> None:
    """x [n, n_kv_heads, d] to the slots of K or V, quantised per token and head if there are scales."""
    if scales is not None:
        x, scale = quantize_rows(x)
        scales.flatten(0, 1).index_copy_(0, slots, scale)
    part.flatten(0, 1).index_copy_(0, slots, x.to(part.dtype))


def _gather(part: Tensor, scales: Tensor | None, call: TileCall, dtype: torch.dtype) -> Tensor:
    """Keys or values of a call: [n_tiles, n_kv_heads, size, d]."""
    got = part.flatten(0, 1).index_select(0, call.slots)
    if scales is not None:
        got = (got * scales.flatten(0, 1).index_select(0, call.slots)).to(dtype)
    got = got.view(call.n_key_rows, call.size, *got.shape[1:]).transpose(1, 2)
    return got if call.n_key_rows == call.n_tiles else got.expand(call.n_tiles, -1, -1, -1)


def _capped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    """Attention with scores softcap * tanh(score / softcap), in float32, split by split in order."""
    dtype = q.dtype
    q, k, v, mask = q.float(), k.float(), v.float(), mask.float()
    top = q.new_full((*q.shape[:3], 1), float("-inf"))
    total = torch.zeros_like(top)
    out = torch.zeros_like(q)
    for at in range(0, k.shape[2], SPLIT):
        scores = q @ k[:, :, at : at + SPLIT].transpose(-1, -2) * (scale / softcap)
        scores = _rowwise(torch.tanh, scores) * softcap + mask[..., at : at + SPLIT]
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        finite = new_top.masked_fill(new_top == float("-inf"), 0.0)  # a row masked so far: exp(-inf - 0) = 0
        weights = _rowwise(torch.exp, scores - finite)
        # a row of 64 equal numbers is always whole vectors; a single number might not be
        fade = _rowwise(torch.exp, (top - finite).repeat(1, 1, 1, 64))[..., :1]
        total = total * fade + weights.sum(-1, keepdim=True)
        out = out * fade + weights @ v[:, :, at : at + SPLIT]
        top = new_top
    return (out / total).to(dtype)


def _rowwise(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Elementwise ``f`` over contiguous x [..., m] with m a multiple of 64."""
    return _whole_rows(f, x.flatten(0, -2), x.shape[-1]).view_as(x)
