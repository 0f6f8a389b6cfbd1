"""Where a step's time goes: the parts add up, the engine is as it was afterwards."""

from __future__ import annotations

import time

import pytest

from headwater.engine.breakdown import GLUE, Breakdown, Case, Laps, StepBench, clocked
from headwater.engine.build import BuiltEngine, build_engine
from headwater.engine.options import engine_config
from headwater.engine.request_state import Answer
from headwater.errors import EngineError
from headwater.run import runner as runner_module
from tests.e2e.models import plain_model, write_folder

PARTS = {
    GLUE, "schedule", "prepare", "model, the rest", "products", "norms", "rotate, write KV", "attention", "activation",
    "sample", "apply", "publish", "detokenise",
}  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuiltEngine:
    folder = write_folder(tmp_path_factory.mktemp("model"), plain_model())
    options = {"max_model_len": 128, "num_blocks": 64, "dtype": "float32", "max_num_batched_tokens": 32}
    return build_engine(engine_config(str(folder), options), lambda what, fraction: None)


def test_laps_book_time_on_the_part_that_is_open_and_no_other() -> None:
    laps = Laps()
    inner = laps.timed("inner", lambda: time.sleep(0.02))

    def work() -> None:
        time.sleep(0.01)
        inner()
        time.sleep(0.01)

    began = time.perf_counter()
    laps.timed("outer", work)()
    whole = time.perf_counter() - began
    assert laps.seconds["inner"] >= 0.02
    assert 0.02 <= laps.seconds["outer"] < whole - 0.02
    assert sum(laps.seconds.values()) == pytest.approx(whole, abs=0.005)


def test_laps_book_the_time_of_what_raises() -> None:
    laps = Laps()

    def fail() -> None:
        time.sleep(0.01)
        raise KeyError("x")

    with pytest.raises(KeyError):
        laps.timed("failing", fail)()
    assert laps.seconds["failing"] >= 0.01


@pytest.mark.parametrize(
    "case",
    [Case("decode", 3, 40, n_decode=4), Case("cold", 1, 80), Case("cached", 2, 80, cached=64)],
    ids=lambda case: case.name,
)
def test_every_part_is_seen_and_nothing_stays_behind(built: BuiltEngine, case: Case) -> None:
    before = dict(vars(built.core)), dict(vars(built.model.ops)), Answer.push, runner_module.sample
    done: Breakdown = StepBench(built).run(case, 2)
    assert 0 < done.least_s <= done.whole_s <= done.most_s
    assert set(done.parts_s) - {"publish"} == PARTS - {"publish"}
    assert all(seconds >= 0 for seconds in done.parts_s.values())
    after = dict(vars(built.core)), dict(vars(built.model.ops)), Answer.push, runner_module.sample
    assert before[0].keys() == after[0].keys() and before[1:] == after[1:]
    assert not built.core.busy
    built.cache.audit(())


def test_cached_tokens_are_not_computed(built: BuiltEngine) -> None:
    computed = built.scheduler.accounting
    before = computed.tokens_computed
    StepBench(built, seed=1).run(Case("cached", 1, 80, cached=64), 1)
    # three runs (one to warm up, one without clocks, one with), each: 65 tokens first, then 16 new ones
    assert computed.tokens_computed - before == 3 * (65 + 16)


def test_clocks_go_also_when_the_measured_thing_fails(built: BuiltEngine) -> None:
    step = built.core.step

    def measure() -> None:
        with clocked(built):
            assert built.core.step != step
            raise RuntimeError

    with pytest.raises(RuntimeError):
        measure()
    assert built.core.step == step


def test_a_case_that_does_not_fit_is_refused(built: BuiltEngine) -> None:
    with pytest.raises(EngineError, match="needs 601 tokens a request"):
        StepBench(built).run(Case("long", 1, 600), 1)
