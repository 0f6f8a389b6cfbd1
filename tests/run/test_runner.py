from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from headwater.errors import EngineError
from headwater.kernels import LayerKV, RaggedBatch
from headwater.model.spec import ModelSpec
from headwater.run.runner import Runner
from headwater.run.sampler import sample
from headwater.step import AddedRow, ContinuedRow, RowSampling, SlotCopy, StepPlan, TableStart
from tests.run.tiny import BLOCK, FULL, HYBRID, Bench, some_tokens

BF16, F32 = torch.bfloat16, torch.float32
each_model = pytest.mark.parametrize("spec", [FULL, HYBRID], ids=["full", "hybrid"])
each_dtype = pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])


def cold(spec: ModelSpec, dtype: torch.dtype, tokens: Sequence[int]) -> Tensor:
    """Logits [n, vocab_size] of all positions, computed at once and alone."""
    bench = Bench(spec, dtype, every_position=True)
    bench.whole("cold", tokens)
    return torch.stack([bench.seen.logits["cold", i] for i in range(len(tokens))])


@each_model
@each_dtype
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_give_the_bits_of_the_whole(spec: ModelSpec, dtype: torch.dtype, chunk: int) -> None:
    tokens = some_tokens(90, seed=1)
    expected = cold(spec, dtype, tokens)
    bench = Bench(spec, dtype, every_position=True)
    row: AddedRow | ContinuedRow = bench.added("r", tokens, min(chunk, 90))
    while True:
        result = bench.run(row)
        done = bench.computed["r"]
        assert bool(result.rows[0].tokens) == (done == 90)
        if done == 90:
            break
        row = bench.continued("r", min(chunk, 90 - done))
    got = torch.stack([bench.seen.logits["r", i] for i in range(90)])
    assert torch.equal(got, expected)
    assert result.rows[0].tokens == (int(expected[-1].argmax()),)


@each_model
@each_dtype
@pytest.mark.parametrize("n_hit", [4, 16, 32, 48])
def test_a_hit_gives_the_bits_of_the_cold_run_beside_misses(spec: ModelSpec, dtype: torch.dtype, n_hit: int) -> None:
    # B27: a hit row and miss rows in one batch, blocks out of order; queries start at the hit.
    shared, tail = some_tokens(48, seed=2), some_tokens(13, seed=3)
    tokens = shared[:n_hit] + tail
    expected = cold(spec, dtype, tokens)
    bench = Bench(spec, dtype)
    bench.run(bench.added("first", shared + some_tokens(5, seed=4), 53))
    hit = bench.added("hit", tokens, len(tail), hit_of="first", n_hit=n_hit)
    strangers = [bench.added(f"miss{i}", some_tokens(n, seed=i), n) for i, n in enumerate([30, 2])]
    result = bench.run(strangers[0], hit, strangers[1], bench.continued("first", 1))
    assert [row.request_id for row in result.rows] == ["first", "miss0", "hit", "miss1"]
    assert torch.equal(bench.seen.logits["hit", len(tokens) - 1], expected[-1])
    assert result.rows[2].tokens == (int(expected[-1].argmax()),)


@each_model
def test_generation_equals_teacher_forcing(spec: ModelSpec) -> None:
    prompt = some_tokens(20, seed=5)
    bench = Bench(spec)
    out = bench.whole("r", prompt, n_generated=25)
    expected = cold(spec, F32, prompt + out[:-1])
    assert out == expected[len(prompt) - 1 :].argmax(-1).tolist()


@each_model
def test_random_batches_give_each_row_what_it_gets_alone(spec: ModelSpec) -> None:
    rng = random.Random(6)
    prompts = {f"r{i}": some_tokens(rng.randint(1, 60), seed=i) for i in range(8)}
    alone = {request_id: Bench(spec).whole(request_id, prompt, 10) for request_id, prompt in prompts.items()}
    bench = Bench(spec, n_blocks=1500)
    out: dict[str, list[int]] = {request_id: [] for request_id in prompts}
    waiting = list(prompts)
    while any(len(tokens) < 11 for tokens in out.values()):
        running = [r for r in prompts if r not in waiting and len(out[r]) < 11]
        rows: list[AddedRow | ContinuedRow] = []
        for request_id in rng.sample(running, rng.randint(min(1, len(running)), len(running))):
            left = len(prompts[request_id]) + len(out[request_id]) - bench.computed[request_id]
            rows.append(bench.continued(request_id, rng.randint(1, left)))
        if waiting and rng.random() < 0.5:
            request_id = waiting.pop()
            prompt = prompts[request_id]
            rows.append(bench.added(request_id, prompt, rng.randint(1, len(prompt))))
        for result in bench.run(*rows).rows:
            assert result.error is None
            out[result.request_id] += result.tokens
    assert {r: tokens[:11] for r, tokens in out.items()} == alone


@each_model
def test_preempted_row_resumes_with_its_own_tokens(spec: ModelSpec) -> None:
    prompt = some_tokens(18, seed=8)
    sampling = RowSampling(temperature=1.0, seed=42)
    straight, resumed = Bench(spec), Bench(spec)

    def go_on(bench: Bench, n: int) -> list[int]:
        return [bench.run(bench.continued("r", 1)).rows[0].tokens[0] for _ in range(n)]

    expected = list(straight.run(straight.added("r", prompt, 18, sampling=sampling)).rows[0].tokens)
    expected += go_on(straight, 9)
    out = list(resumed.run(resumed.added("r", prompt, 18, sampling=sampling)).rows[0].tokens) + go_on(resumed, 4)
    again = resumed.added("r", prompt + out, len(prompt) + len(out), sampling=sampling)
    out += resumed.run(again, removed=["r"]).rows[0].tokens
    assert resumed.runner.n_rows == 1
    assert out + go_on(resumed, 4) == expected


def test_draws_are_keyed_by_the_position_of_the_new_token() -> None:
    prompt, sampling = some_tokens(18, seed=8), RowSampling(temperature=2.0, seed=42)
    bench = Bench(FULL)
    out = list(bench.run(bench.added("r", prompt, 18, sampling=sampling)).rows[0].tokens)
    for _ in range(8):
        out += bench.run(bench.continued("r", 1)).rows[0].tokens
    for i, token in enumerate(out):
        position = 18 + i
        assert sample(bench.seen.logits["r", position - 1][None], [sampling], [position]) == [token]


class Faulty:
    """A model that raises, or gives NaN, whenever a token is in the batch."""

    def __init__(self, inner: Bench, poison: int, nan: bool) -> None:
        self.model, self.poison, self.nan, self.calls = inner.model, poison, nan, 0

    def forward(self, batch: RaggedBatch, kv: Sequence[LayerKV]) -> Tensor:
        self.calls += 1
        found = batch.token_ids == self.poison
        if bool(found.any()) and not self.nan:
            raise ArithmeticError(f"token {self.poison}")
        logits = self.model.forward(batch, kv)
        rows = torch.bucketize(found.nonzero().flatten(), torch.tensor(batch.query_start), right=True) - 1
        for row in rows.tolist():
            logits[batch.logits_at == batch.query_start[row + 1] - 1] = torch.nan
        return logits


@pytest.mark.parametrize("nan", [False, True], ids=["raises", "nan"])
def test_only_the_culprit_fails(nan: bool) -> None:
    poison = 130
    clean = {f"r{i}": [t % 130 for t in some_tokens(9 + i, seed=i)] for i in range(4)}
    expected = {r: Bench(FULL).whole(r, tokens, 3) for r, tokens in clean.items()}
    bench = Bench(FULL)
    faulty = Faulty(bench, poison, nan)
    bench.runner = Runner(faulty, bench.store, bench.groups)
    out: dict[str, list[int]] = {r: [] for r in clean}
    result = bench.run(*(bench.added(r, clean[r], len(clean[r])) for r in ("r0", "r1")))
    for row in result.rows:
        out[row.request_id] += row.tokens
    bad = bench.added("bad", [5, poison, 6, 7], 4)
    result = bench.run(bench.continued("r0", 1), bad, bench.added("r2", clean["r2"], 11), bench.continued("r1", 1))
    assert [row.request_id for row in result.rows] == ["r0", "r1", "bad", "r2"]
    assert result.rows[2].tokens == ()
    assert result.rows[2].error == ("logits are not finite" if nan else "ArithmeticError: token 130")
    assert faulty.calls == (2 if nan else 1 + 1 + 4)
    for row in (result.rows[0], result.rows[1], result.rows[3]):
        out[row.request_id] += row.tokens
    result = bench.run(
        *(bench.continued(r, 1) for r in ("r0", "r1", "r2")), bench.added("r3", clean["r3"], 12), removed=["bad"]
    )
    for row in result.rows:
        assert row.error is None
        out[row.request_id] += row.tokens
    assert bench.runner.n_rows == 4
    assert out == {r: tokens[: len(out[r])] for r, tokens in expected.items()}


def test_a_row_that_failed_alone_can_be_tried_again() -> None:
    bench = Bench(FULL)
    faulty = Faulty(bench, 130, nan=False)
    bench.runner = Runner(faulty, bench.store, bench.groups)
    row = bench.added("r", [1, 130, 2], 2)
    assert bench.run(row).rows[0].error == "ArithmeticError: token 130"
    faulty.poison = 131
    assert bench.run(bench.continued("r", 3)).rows[0].tokens == tuple(Bench(FULL).whole("r", [1, 130, 2]))


def test_copies_are_done_in_every_layer_before_the_first() -> None:
    tokens = some_tokens(10, seed=9)
    expected = cold(FULL, F32, tokens)
    bench = Bench(FULL)
    bench.whole("donor", tokens)
    # The row has two whole blocks of its donor and a copy of the first slot of the third.
    donor = bench.tables["donor"][0].blocks
    own = bench.free.pop()
    row = AddedRow("r", tuple(tokens), 9, 1, (TableStart(0, (*donor[:2], own)),), RowSampling())
    result = bench.runner.execute(StepPlan(1, added=(row,), copies=(SlotCopy(0, donor[2], own, 1),)))
    assert result.rows[0].tokens == (int(expected[-1].argmax()),)
    assert torch.equal(bench.seen.logits["r", 9], expected[-1])
    for layer in bench.store.layers:
        assert (layer.k[own, 2:] == 0).all(), "more than the slots asked for was copied"


def refused(bench: Bench, plan: StepPlan, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        bench.runner.execute(plan)


def test_plans_that_contradict_the_rows_are_refused_whole() -> None:
    bench = Bench(HYBRID)
    bench.run(bench.added("r", some_tokens(10, seed=1), 6))
    no_blocks: tuple[tuple[int, ...], ...] = ((), (), ())
    good = bench.continued("r", 2)
    refused(bench, StepPlan(1, continued=(ContinuedRow("x", 0, 1, no_blocks),)), "does not know it")
    refused(bench, StepPlan(1, continued=(ContinuedRow("r", 5, 1, no_blocks),)), "5 computed tokens, here are 6")
    refused(bench, StepPlan(1, continued=(ContinuedRow("r", 6, 1, ((),)),)), "1 groups, the model has 3")
    refused(bench, StepPlan(1, continued=(ContinuedRow("r", 6, 0, no_blocks),)), "0 new tokens")
    refused(bench, StepPlan(1, continued=(ContinuedRow("r", 6, 5, no_blocks),)), "5 new tokens after 6, 10 are known")
    refused(bench, StepPlan(1, continued=(ContinuedRow("r", 6, 4, no_blocks),)), "cover 8 tokens of 10")
    refused(bench, StepPlan(1, continued=(ContinuedRow("r", 6, 1, ((400,), (), ())),)), "the pool has 400")
    refused(bench, StepPlan(1, continued=(good,), copies=(SlotCopy(0, 1, 400, 1),)), "the pool has 400")
    refused(bench, StepPlan(1, continued=(good,), copies=(SlotCopy(3, 1, 2, 1),)), "group 3, the model has 3")
    refused(bench, StepPlan(1, continued=(good,), copies=(SlotCopy(0, 1, 2, 17),)), "a block of group 0 has")
    refused(bench, StepPlan(1, continued=(good, good)), "twice")
    refused(bench, StepPlan(1, continued=(good,), added=(bench.added("r", [1], 1),)), "twice")
    bench.computed["r"] = 6
    refused(bench, StepPlan(1, added=(bench.added("r", [1], 1),)), "knows it already")
    table = TableStart(0, (1, 2, 3))
    refused(bench, StepPlan(1, added=(AddedRow("n", (1, 2), 0, 1, (table,), RowSampling()),)), "tables for 1 groups")
    late = (TableStart(1, (1, 2)), table, table)
    refused(bench, StepPlan(1, added=(AddedRow("n", (1,) * 9, 8, 1, late, RowSampling()),)), "starts at block 1")
    # Nothing of that was kept: the row goes on as if it had not been.
    bench.computed["r"] = 6
    bench.tables["r"] = [TableStart(0, table.blocks[:2]) for table in bench.tables["r"]]
    bench.run(ContinuedRow("r", 6, 2, no_blocks))
    result = bench.run(bench.continued("r", 2))
    assert result.rows[0].tokens == tuple(Bench(HYBRID).whole("r", some_tokens(10, seed=1)))


def test_removing_an_unknown_row_is_no_error() -> None:
    # The step that should have introduced it may have failed as a whole.
    bench = Bench(FULL)
    assert bench.runner.execute(StepPlan(0, removed=("never",))).rows == ()


def test_result_names_the_step_and_its_times() -> None:
    bench = Bench(FULL)
    plan = StepPlan(17, added=(bench.added("r", some_tokens(BLOCK, seed=1), BLOCK),))
    result = bench.runner.execute(plan)
    assert result.step == 17
    assert result.model_s > 0 and result.sample_s > 0 and result.prepare_s > 0
