from __future__ import annotations

from collections import Counter

from headwater.bench.plan import Cell, Costs, Plan, Start, done_trials, fit, floods
from headwater.bench.results import Sample

ON, OFF = Start("on", "none"), Start("off", "none")
EVICTING = Start("on", "evicting")


def plan(repeats: int = 20, seed: int = 0) -> Plan:
    starts = (EVICTING, Start("off", "evicting"), ON, OFF)
    return Plan(prefixes=(128, 512, 2048), outputs=(1, 32, 256), starts=starts, repeats=repeats, seed=seed)


def test_every_round_has_each_cell_once_in_an_order_of_its_own() -> None:
    rounds = [plan().cells(ON, repeat) for repeat in range(20)]
    for cells in rounds:
        assert Counter((cell.prefix, cell.output) for cell in cells) == Counter(
            (prefix, output) for prefix in (128, 512, 2048) for output in (1, 32, 256)
        )
    assert len({tuple(cells) for cells in rounds}) > 15
    firsts = Counter(cells[0] for cells in rounds)
    assert max(firsts.values()) < 8


def test_the_seed_decides_the_order() -> None:
    assert plan().cells(ON, 3) == plan().cells(ON, 3)
    assert plan().cells(ON, 3) != plan(seed=1).cells(ON, 3)


def test_roles() -> None:
    def roles(prefix: int, output: int, start: Start, salts: bool = True) -> tuple[str, ...]:
        return plan().roles(Cell(prefix, output, start.caching, start.interference), salts=salts)

    assert roles(128, 1, ON) == ("prime", "hit", "control")
    assert roles(512, 1, ON) == ("prime", "hit", "control", "first_differs", "other_salt")
    assert roles(512, 1, ON, salts=False) == ("prime", "hit", "control", "first_differs")
    assert roles(512, 1, EVICTING) == ("prime", "hit", "control", "evicted")
    assert roles(512, 1, OFF) == ("prime", "off")


def test_the_pool_holds_the_longest_request_and_the_flood_fills_it() -> None:
    n_blocks = plan().pool_blocks(16)
    assert n_blocks * 16 > 2048 + 17 + 256
    assert plan().n_flood(n_blocks * 16) * (2048 + 17) > 1.15 * n_blocks * 16
    assert floods(EVICTING)
    assert not floods(Start("off", "evicting"))
    assert not floods(ON)


COSTS = Costs(start_s=5.0, request_s=0.01, prompt_token_s=0.0003, output_token_s=0.012)


def test_the_estimate_is_the_sum_of_its_requests() -> None:
    one = Plan(prefixes=(100,), outputs=(11,), starts=(ON,), repeats=2, seed=0)
    cold = 0.01 + 117 * 0.0003 + 10 * 0.012
    hit = 0.01 + 17 * 0.0003 + 10 * 0.012
    examples = 2 * cold
    assert abs(COSTS.sweep(one, 0) - (5.0 + 2 * (2 * cold + hit + examples))) < 1e-9


def pool(plan: Plan) -> float:
    return plan.pool_blocks(16) * 16


def test_a_plan_is_cut_to_its_time() -> None:
    starts = (EVICTING, ON, OFF)
    quick = Plan(prefixes=(128, 512, 2048), outputs=(1, 32), starts=starts, repeats=10, seed=0)
    fitted = fit(quick, COSTS, pool, 160)
    assert 5 <= fitted.repeats < 10
    assert COSTS.sweep(fitted, 3500) - COSTS.start_s <= 160
    assert fit(quick, COSTS, pool, 10_000).repeats == 10
    slow = Costs(start_s=5.0, request_s=0.05, prompt_token_s=0.002, output_token_s=0.04)
    fitted = fit(quick, slow, pool, 160)  # seven times slower
    assert fitted.prefixes in ((128,), (128, 512)) and fitted.repeats >= 5
    slower = Costs(start_s=5.0, request_s=0.3, prompt_token_s=0.002, output_token_s=0.4)
    assert fit(quick, slower, pool, 160).outputs == (1,)
    assert fit(quick, slower, pool, 1).repeats == 1


def test_a_trial_is_done_when_all_its_requests_of_one_attempt_are() -> None:
    one = Plan(prefixes=(16,), outputs=(1,), starts=(ON,), repeats=1, seed=0)
    cell = Cell(16, 1, "on", "none")

    def sample(role: str, attempt: int = 0, error: str | None = None) -> Sample:
        return Sample(
            kind="prefix",
            cell=cell.as_dict(),
            role=role,
            repeat=0,
            attempt=attempt,
            request={},
            started_s=0.0,
            events_s=[],
            error=error,
        )

    roles = one.roles(cell, salts=True)
    whole = [sample(role) for role in roles]
    assert done_trials(whole, one, salts=True) == {(cell, 0)}
    for i, role in enumerate(roles):
        rest = whole[:i] + whole[i + 1 :]
        assert done_trials(rest, one, salts=True) == set()
        assert done_trials([*rest, sample(role, attempt=1)], one, salts=True) == set()  # another prefix
        assert done_trials([*rest, sample(role, error="no")], one, salts=True) == set()
    assert done_trials(whole[:-1] if roles[-1] == "other_salt" else whole, one, salts=False) == {(cell, 0)}
    warm_up = Sample(
        kind="prefix", cell={"caching": "on"}, role="warm_up", repeat=0, request={}, started_s=0, events_s=[]
    )
    assert done_trials([warm_up], one, salts=True) == set()
