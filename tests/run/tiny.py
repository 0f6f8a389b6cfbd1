"""A small random decoder, and a plain scheduler for it: tables handed out from a shuffled pool."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from headwater.kernels import Ops, TorchOps
from headwater.kernels.ops import LayerWeights
from headwater.model.decoder import Model, OuterWeights
from headwater.model.layers import DecoderLayer, rope_table
from headwater.model.spec import ModelSpec, RopeSpec
from headwater.run.memory import plan_groups
from headwater.run.runner import LogitsObserver, Runner
from headwater.run.store import KVStore
from headwater.step import AddedRow, ContinuedRow, RowSampling, StepPlan, StepResult, TableStart
from headwater.types import GroupSpec, RequestId

VOCAB = 131
BLOCK = 4


def make_spec(windows: Sequence[int | None]) -> ModelSpec:
    return ModelSpec(
        family="llama",
        n_layers=len(windows),
        d_model=64,
        n_heads=4,
        n_kv_heads=2,
        head_dim=16,
        d_ff=96,
        vocab_size=VOCAB,
        max_positions=512,
        norm_eps=1e-5,
        layer_windows=tuple(windows),
        layer_ropes=(RopeSpec(1000.0),) * len(windows),
        act="silu",
        attn_scale=0.25,
        tied_embeddings=False,
    )


FULL = make_spec([None] * 3)
HYBRID = make_spec([10, 10, None, 10, 10, None])


def make_model(spec: ModelSpec, dtype: torch.dtype) -> Model:
    ops: Ops = TorchOps(dtype)
    generator = torch.Generator().manual_seed(7)

    def weight(n_out: int, n_in: int) -> Tensor:
        return torch.randn(n_out, n_in, generator=generator) * 1.5 * n_in**-0.5

    def norm() -> Tensor:
        return torch.rand(spec.d_model, generator=generator) + 0.5

    layers = []
    for i in range(spec.n_layers):
        weights = LayerWeights(
            attn_norm=norm(),
            qkv=ops.pack_linear(weight(spec.q_size + 2 * spec.kv_size, spec.d_model)),
            o=ops.pack_linear(weight(spec.d_model, spec.q_size)),
            ffn_norm=norm(),
            gate_up=ops.pack_linear(weight(2 * spec.d_ff, spec.d_model)),
            down=ops.pack_linear(weight(spec.d_model, spec.d_ff)),
        )
        table = rope_table(spec.layer_ropes[i], spec.head_dim, spec.max_positions)
        layers.append(DecoderLayer(spec, i, weights, table, ops))
    embed = weight(spec.vocab_size, spec.d_model).to(dtype) * 8
    head = ops.pack_linear(weight(VOCAB, spec.d_model), out_dtype=torch.float32)
    return Model(spec, ops, OuterWeights(ops.embedding(embed, None), norm(), head), layers, b"\0" * 32)


class Seen(LogitsObserver):
    """Keeps the last logits seen after each (request, position)."""

    def __init__(self, every_position: bool = False) -> None:
        self.every_position = every_position
        self.logits: dict[tuple[RequestId, int], Tensor] = {}

    def saw(self, request_ids: Sequence[RequestId], positions: Sequence[int], logits: Tensor) -> None:
        assert len(request_ids) == len(positions) == len(logits)
        for request_id, position, row in zip(request_ids, positions, logits, strict=True):
            self.logits[request_id, position] = row.clone()


class Bench:
    """A runner over a tiny model with a hand that gives out blocks. Rows are driven one step at a time."""

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype = torch.float32, *, every_position: bool = False, n_blocks: int = 400
    ) -> None:
        self.groups: tuple[GroupSpec, ...] = plan_groups(spec, BLOCK)
        self.model = make_model(spec, dtype)
        self.store = KVStore(self.groups, n_blocks, self.model.ops.kv_layout(spec.n_kv_heads, spec.head_dim, BLOCK))
        self.seen = Seen(every_position)
        self.runner = Runner(self.model, self.store, self.groups, observer=self.seen)
        self.free = list(range(n_blocks))
        random.Random(3).shuffle(self.free)
        self.tables: dict[RequestId, list[TableStart]] = {}
        self.computed: dict[RequestId, int] = {}
        self.n_steps = 0

    def added(
        self,
        request_id: RequestId,
        tokens: Sequence[int],
        n_new: int,
        *,
        hit_of: RequestId | None = None,
        n_hit: int = 0,
        sampling: RowSampling | None = None,
    ) -> AddedRow:
        """A new row; with ``hit_of`` its first ``n_hit`` tokens (whole blocks) are that row's blocks. A sliding group
        starts at the first block that is needed."""
        tables = []
        for g, group in enumerate(self.groups):
            first = group.first_needed(n_hit) // BLOCK
            shared: tuple[int, ...] = ()
            if hit_of is not None:
                other = self.tables[hit_of][g]
                shared = other.blocks[first - other.first : n_hit // BLOCK - other.first]
            n_fresh = -(-(n_hit + n_new) // BLOCK) - first - len(shared)
            tables.append(TableStart(first, shared + tuple(self.free.pop() for _ in range(n_fresh))))
        self.tables[request_id] = tables
        self.computed[request_id] = n_hit
        return AddedRow(request_id, tuple(tokens), n_hit, n_new, tuple(tables), sampling or RowSampling())

    def continued(self, request_id: RequestId, n_new: int) -> ContinuedRow:
        begin = self.computed[request_id]
        new = []
        for g, table in enumerate(self.tables[request_id]):
            n_fresh = -(-(begin + n_new) // BLOCK) - table.first - len(table.blocks)
            fresh = tuple(self.free.pop() for _ in range(max(0, n_fresh)))
            self.tables[request_id][g] = TableStart(table.first, table.blocks + fresh)
            new.append(fresh)
        return ContinuedRow(request_id, begin, n_new, tuple(new))

    def run(self, *rows: AddedRow | ContinuedRow, removed: Sequence[RequestId] = ()) -> StepResult:
        plan = StepPlan(
            self.n_steps,
            added=tuple(row for row in rows if isinstance(row, AddedRow)),
            continued=tuple(row for row in rows if isinstance(row, ContinuedRow)),
            removed=tuple(removed),
        )
        self.n_steps += 1
        result = self.runner.execute(plan)
        errors = {row.request_id for row in result.rows if row.error is not None}
        for row in rows:
            if row.request_id not in errors:
                self.computed[row.request_id] += row.n_new
        return result

    def whole(self, request_id: RequestId, tokens: Sequence[int], n_generated: int = 0) -> list[int]:
        """Compute a row in one step, then generate greedily; the tokens generated."""
        out = list(self.run(self.added(request_id, tokens, len(tokens))).rows[0].tokens)
        for _ in range(n_generated):
            out += self.run(self.continued(request_id, 1)).rows[0].tokens
        return out


def some_tokens(n: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(n)]
