"""How near the native kernels come to what this machine can do.

Each product is measured with as many weights of its shape as fill 128 MiB, one after another, as a model's layers
come: what few rows read comes from memory, not from a cache. GB/s counts the packed weight, GFLOP/s two operations
for each weight and row. The ceilings are measured in the same run: the dot instruction with nothing to load, and a
plain sum over memory in huge pages. Times are the first tenth of all calls': other programs only ever add.

examples:
  python benchmarks/kernels.py
  python benchmarks/kernels.py --kinds bf16 w8a8 --rows 1 8 512 --shapes 576x49152
  python benchmarks/kernels.py --parts attention
  python benchmarks/kernels.py --variant avx2 --threads 1
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch

from headwater.config import default_cache_dir
from headwater.kernels import GroupBatch, KVLayout, LayerKV, RaggedBatch
from headwater.kernels.cpu.library import Library, load_library
from headwater.kernels.cpu.variants import VARIANTS
from headwater.kernels.native_attention import NativeAttention
from headwater.kernels.native_linear import TYPES, NativeInt8Linear, NativeLinear
from headwater.kernels.ops import Int8Weight
from headwater.kernels.pages import Arena, huge_tensor

SMOLLM2 = ("576x960", "576x576", "576x3072", "1536x576", "576x49152")
"""in x out: q, k and v; attention's output; gate and up; down; the head."""
MULTIPLIED = {"f32": torch.float32, "bf16": torch.bfloat16, "w8a8": torch.int8, "w8a16": torch.bfloat16}
"""What each kind of product multiplies."""
WORKING_SET = 128 << 20
HADAMARD = 512
"""W8A8's down projection transforms its input so."""

Product = NativeLinear | NativeInt8Linear


@dataclass(frozen=True, slots=True)
class Ceilings:
    """``flops`` by the dtype that is multiplied, and bytes of memory, a second."""

    flops: dict[torch.dtype, float]
    memory: float


def seconds(calls: Sequence[Callable[[], object]], budget_s: float) -> float:
    """Of one call: the first decile over rounds of all of them, for ``budget_s`` and at least two rounds."""
    found: list[float] = []
    began = time.perf_counter()
    while len(found) < 2 * len(calls) or time.perf_counter() - began < budget_s:
        for call in calls:
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
    found.sort()
    return found[len(found) // 10]


def measure_ceilings(library: Library, budget_s: float) -> Ceilings:
    dot = library.bind("hw_ceiling_dot", ctypes.c_int64, [ctypes.c_int32, ctypes.c_int64])
    read = library.bind("hw_ceiling_read", ctypes.c_int64, [ctypes.c_void_p, ctypes.c_int64])
    rounds, part = 20_000, 8 << 20
    flops = {}
    for dtype, number in TYPES.items():
        operations = dot(number, rounds)
        flops[dtype] = operations / seconds([partial(dot, number, rounds)], budget_s)
    memory = huge_tensor((WORKING_SET,), torch.uint8).fill_(1)
    starts = range(memory.data_ptr(), memory.data_ptr() + WORKING_SET, part)
    reads = [partial(read, at, part) for at in starts]
    return Ceilings(flops, part / seconds(reads, budget_s))


def make_products(library: Library, kind: str, k: int, n: int) -> list[Product]:
    """As many of one shape as fill ``WORKING_SET``, at least two."""
    dtype = torch.float32 if kind == "f32" else torch.bfloat16
    arena = Arena()
    count = max(2, WORKING_SET // (n * k * MULTIPLIED[kind].itemsize))
    if not kind.startswith("w8"):
        weight = torch.randn(n, k) / k**0.5
        return [NativeLinear(library, weight, None, dtype, dtype, arena) for _ in range(count)]
    values = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    hadamard = HADAMARD if kind == "w8a8" and k > n and k % HADAMARD == 0 else 0
    stored = Int8Weight(values, torch.full((n,), 0.01), "int8" if kind == "w8a8" else "compute", hadamard)
    return [NativeInt8Linear(library, stored, None, dtype, dtype, arena) for _ in range(count)]


def bench_products(library: Library, ceilings: Ceilings, args: argparse.Namespace) -> None:
    print(f"{'kind':6} {'shape':>11} {'rows':>5} {'us':>9} {'GB/s':>7} {'of memory':>9} {'GFLOP/s':>9} {'of dots':>8}")
    for kind in args.kinds:
        for shape in args.shapes:
            k, n = map(int, shape.split("x"))
            products = make_products(library, kind, k, n)
            for rows in args.rows:
                if n > 10_000 and rows > args.head_rows:
                    continue
                x = torch.randn(rows, k).to(products[0].dtype)
                took = seconds([partial(product, x) for product in products], args.seconds)
                read, done = products[0].bytes / took, products[0].flops(rows) / took
                share = done / ceilings.flops[MULTIPLIED[kind]]
                print(
                    f"{kind:6} {shape:>11} {rows:5} {took * 1e6:9.1f} {read / 1e9:7.1f} {read / ceilings.memory:9.0%} "
                    f"{done / 1e9:9.1f} {share:8.0%}",
                    flush=True,
                )


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """``rows`` sequences of ``CONTEXT`` tokens, the last ``new`` of them queries; ``shared``: over the same blocks but
    for the last one."""

    name: str
    rows: int
    new: int
    shared: bool = False

    def batch(self) -> tuple[RaggedBatch, int]:
        """The batch, and how many blocks it takes."""
        per_row = CONTEXT // BLOCK_SIZE
        rows = torch.arange(self.rows, dtype=torch.int32)[:, None]
        if self.shared:
            tables = torch.arange(per_row, dtype=torch.int32).repeat(self.rows, 1)
            tables[:, -1:] += rows
        else:
            tables = torch.arange(per_row, dtype=torch.int32) + rows * per_row
        positions = torch.arange(CONTEXT - self.new, CONTEXT).repeat(self.rows)
        pages = tables[:, CONTEXT // BLOCK_SIZE - -(-self.new // BLOCK_SIZE) :].long() * BLOCK_SIZE
        slots = (pages[:, :, None] + torch.arange(BLOCK_SIZE)).flatten(1)[:, -self.new :].reshape(-1)
        group = GroupBatch(tables, torch.zeros(self.rows, dtype=torch.int32), slots, BLOCK_SIZE)
        starts = tuple(range(0, self.rows * self.new + 1, self.new))
        none = torch.zeros(0, dtype=torch.int64)
        batch = RaggedBatch(none, positions, starts, (CONTEXT,) * self.rows, (group,), none)
        return batch, int(tables.max()) + 1

    def operations(self, n_heads: int, head_dim: int) -> int:
        """Two for each product of a query's and a key's or value's element."""
        seen = self.rows * (CONTEXT * (CONTEXT + 1) - (CONTEXT - self.new) * (CONTEXT - self.new + 1)) // 2
        return 4 * seen * n_heads * head_dim


CONTEXT, BLOCK_SIZE = 2048, 16
ATTENTION_CASES = (
    AttentionCase("prefill 2048", 1, CONTEXT),
    AttentionCase("hit 2028 + 20", 1, 20),
    AttentionCase("decode 1", 1, 1),
    AttentionCase("decode 8", 8, 1),
    AttentionCase("decode 8, shared", 8, 1, shared=True),
)
ATTENTION_HEADS = ("9/3x64", "4/1x256")
"""Query heads / KV heads x head size: SmolLM2-135M's, Gemma 3 270M's."""
ATTENTION_KINDS = {
    "f32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16, KV int8": (torch.bfloat16, torch.int8),
}


def attention_calls(
    ops: NativeAttention, case: AttentionCase, heads: str, layout: KVLayout
) -> list[Callable[[], object]]:
    """One call for each of as many layers as fill ``WORKING_SET``, at least two."""
    n_heads, n_kv_heads, d = head_sizes(heads)
    batch, n_blocks = case.batch()
    everywhere = every_slot(n_blocks)
    cos, sin = torch.ones(n_blocks * BLOCK_SIZE, d // 2), torch.zeros(n_blocks * BLOCK_SIZE, d // 2)
    q = torch.randn(len(batch.positions), n_heads, d).to(ops.dtype)
    calls: list[Callable[[], object]] = []
    for pages in layout.allocate(max(2, WORKING_SET // (n_blocks * layout.block_bytes)), n_blocks):
        kv = LayerKV(pages, 0, layout)
        qkv = torch.randn(n_blocks * BLOCK_SIZE, (n_heads + 2 * n_kv_heads) * d).to(ops.dtype)
        ops.rope_and_write(qkv, cos, sin, everywhere, kv, n_heads=n_heads)
        calls.append(partial(ops.attention, q, batch, kv, scale=d**-0.5))
    return calls


def bench_attention(library: Library, ceilings: Ceilings, args: argparse.Namespace) -> None:
    """GB/s count the KV of every row, so that what is shared can come to more than memory gives."""
    print(
        f"\n{'kind':14} {'heads':>8} {'case':>17} {'us':>9} {'GB/s':>7} {'of memory':>9} {'GFLOP/s':>9} {'of dots':>8}"
    )
    for kind, (dtype, kv_dtype) in ATTENTION_KINDS.items():
        ops = NativeAttention(library, dtype)
        for heads, case in product(ATTENTION_HEADS, ATTENTION_CASES):
            n_heads, n_kv_heads, d = head_sizes(heads)
            layout = ops.kv_layout(n_kv_heads, d, BLOCK_SIZE, kv_dtype)
            took = seconds(attention_calls(ops, case, heads, layout), args.seconds)
            read = case.rows * CONTEXT // BLOCK_SIZE * layout.block_bytes / took
            done = case.operations(n_heads, d) / took
            print(
                f"{kind:14} {heads:>8} {case.name:>17} {took * 1e6:9.1f} {read / 1e9:7.1f} "
                f"{read / ceilings.memory:9.0%} {done / 1e9:9.1f} {done / ceilings.flops[dtype]:8.0%}",
                flush=True,
            )


def head_sizes(heads: str) -> tuple[int, int, int]:
    """Query heads, KV heads, head size."""
    n_heads, n_kv_heads, head_dim = map(int, heads.replace("/", "x").split("x"))
    return n_heads, n_kv_heads, head_dim


def every_slot(n_blocks: int) -> RaggedBatch:
    """One row that fills ``n_blocks`` from the first."""
    n = n_blocks * BLOCK_SIZE
    tables, first = torch.arange(n_blocks, dtype=torch.int32)[None], torch.zeros(1, dtype=torch.int32)
    group = GroupBatch(tables, first, torch.arange(n), BLOCK_SIZE)
    none = torch.zeros(0, dtype=torch.int64)
    return RaggedBatch(none, torch.arange(n), (0, n), (n,), (group,), none)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = default_cache_dir() / "kernels"
    parser.add_argument("--variant", choices=list(VARIANTS), help="default: the best one that runs here")
    parser.add_argument("--folder", type=Path, default=cache, help=f"of compiled kernels (default {cache})")
    parser.add_argument("--threads", type=int, help="default: PyTorch's")
    parser.add_argument("--parts", nargs="+", choices=["products", "attention"], default=["products", "attention"])
    parser.add_argument("--kinds", nargs="+", choices=list(MULTIPLIED), default=list(MULTIPLIED))
    parser.add_argument("--shapes", nargs="+", default=list(SMOLLM2), metavar="INxOUT", help="default: SmolLM2-135M's")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 128, 512, 2048])
    parser.add_argument("--head-rows", type=int, default=64, help="most rows for over 10,000 outputs (default 64)")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each figure (default 0.3)")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    library = load_library(args.folder, args.variant)
    ceilings = measure_ceilings(library, args.seconds)
    print(f"{library.variant}, {torch.get_num_threads()} threads; memory {ceilings.memory / 1e9:.1f} GB/s; ", end="")
    print("GFLOP/s of dots: " + ", ".join(f"{dtype} {rate / 1e9:.0f}" for dtype, rate in ceilings.flops.items()))
    if "products" in args.parts:
        bench_products(library, ceilings, args)
    if "attention" in args.parts:
        bench_attention(library, ceilings, args)


if __name__ == "__main__":
    main()
