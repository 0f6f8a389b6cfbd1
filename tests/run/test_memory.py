from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headwater.config import CacheConfig, SchedulerConfig
from headwater.errors import ConfigError
from headwater.kernels.layout import PlainLayout
from headwater.model.spec import ModelSpec
from headwater.run.memory import MemoryPlan, available_memory, blocks_for, fit_blocks, page_bytes, plan_groups
from headwater.types import GroupKind, GroupSpec
from tests.run.tiny import FULL, HYBRID, make_spec

SMOLLM2 = replace(make_spec([None] * 30), d_model=576, n_heads=9, n_kv_heads=3, head_dim=64, max_positions=8192)
GEMMA3 = replace(
    make_spec(([512] * 5 + [None]) * 3), d_model=640, n_heads=4, n_kv_heads=1, head_dim=256, max_positions=32768
)
BF16 = torch.bfloat16


def layout(spec: ModelSpec, dtype: torch.dtype) -> PlainLayout:
    return PlainLayout(spec.n_kv_heads, spec.head_dim, 16, dtype)


def kinds(groups: tuple[GroupSpec, ...]) -> list[tuple[str, int | None, tuple[int, ...]]]:
    return [(group.kind.value, group.window, group.layers) for group in groups]


def test_groups_of_the_two_real_models() -> None:
    assert kinds(plan_groups(SMOLLM2, 16)) == [("full", None, tuple(range(30)))]
    assert kinds(plan_groups(GEMMA3, 16)) == [
        ("full", None, (5, 11, 17)),
        ("sliding", 512, (0, 1, 2)),
        ("sliding", 512, (3, 4, 6)),
        ("sliding", 512, (7, 8, 9)),
        ("sliding", 512, (10, 12, 13)),
        ("sliding", 512, (14, 15, 16)),
    ]


@pytest.mark.parametrize("windows", [[8] * 4, [8, None, None, 8, 16, 16], [8] * 22 + [None] * 4, [8] * 29 + [None] * 5])
def test_groups_have_equal_pages_and_every_layer_once(windows: list[int | None]) -> None:
    groups = plan_groups(make_spec(windows), 4)
    assert len({len(group.layers) for group in groups}) == 1
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    for group in groups:
        assert {windows[layer] for layer in group.layers} == {group.window}
        assert (group.kind is GroupKind.FULL) == (group.window is None)


def test_page_bytes() -> None:
    assert page_bytes(plan_groups(SMOLLM2, 16), layout(SMOLLM2, BF16)) == 30 * 2 * 16 * 3 * 64 * 2
    assert page_bytes(plan_groups(GEMMA3, 16), layout(GEMMA3, torch.float32)) == 3 * 2 * 16 * 1 * 256 * 4


def test_blocks_of_one_sequence() -> None:
    full = (GroupSpec(GroupKind.FULL, 4),)
    assert [blocks_for(full, n, 8) for n in (1, 4, 5, 100)] == [1, 1, 2, 25]
    sliding = (GroupSpec(GroupKind.SLIDING, 4, window=9),)
    # The query at c sees c-8 .. c; with 8 new tokens that is c-8 .. c+7: 16 positions touch at most 5 blocks.
    assert [blocks_for(sliding, n, 8) for n in (4, 16, 20, 1000)] == [1, 4, 5, 5]


def fit(cache: CacheConfig, scheduler: SchedulerConfig, available: int = 16 << 30) -> MemoryPlan:
    return fit_blocks(SMOLLM2, plan_groups(SMOLLM2, 16), layout(SMOLLM2, BF16), cache, scheduler, available)


def test_default_is_modest() -> None:
    plan = fit(CacheConfig(), SchedulerConfig())
    assert (2 << 30) - plan.page_bytes < plan.kv_cache_bytes <= 2 << 30
    assert plan.max_model_len == 8192
    small = fit(CacheConfig(), SchedulerConfig(), available=2 << 30)
    assert (1 << 29) - plan.page_bytes < small.kv_cache_bytes <= 1 << 29


def test_never_more_than_all_sequences_can_use() -> None:
    plan = fit(CacheConfig(kv_cache_memory_bytes=8 << 30), SchedulerConfig(max_num_seqs=2, max_model_len=1000))
    assert plan.n_blocks == 2 * 63
    assert plan.max_model_len == 1000


def test_number_of_blocks_given() -> None:
    assert fit(CacheConfig(n_blocks=100), SchedulerConfig()).n_blocks == 100


def test_limit_is_fitted_to_the_pool() -> None:
    plan = fit(CacheConfig(n_blocks=100), SchedulerConfig())
    assert plan.max_model_len == 1600
    gemma = plan_groups(GEMMA3, 16)
    fitted = fit_blocks(
        GEMMA3, gemma, layout(GEMMA3, BF16), CacheConfig(n_blocks=500), SchedulerConfig(), 16 << 30
    ).max_model_len
    assert blocks_for(gemma, fitted, 1024) <= 500 < blocks_for(gemma, fitted + 1, 1024)


@pytest.mark.parametrize(
    ("cache", "scheduler", "words"),
    [
        (CacheConfig(kv_cache_memory_bytes=1000), SchedulerConfig(), "kv_cache_memory_bytes to 368640 or more"),
        (CacheConfig(n_blocks=0), SchedulerConfig(), "gives 0 blocks"),
        (CacheConfig(n_blocks=9, kv_cache_memory_bytes=1 << 30), SchedulerConfig(), "give one of them"),
        (
            CacheConfig(n_blocks=10**9),
            SchedulerConfig(),
            "only 17179869184 are available: ask for at most 46603 blocks",
        ),
        (CacheConfig(n_blocks=10), SchedulerConfig(max_model_len=161), "max_model_len to 160 or less"),
        (CacheConfig(), SchedulerConfig(max_model_len=8193), "outside 1 to 8192"),
        (CacheConfig(), SchedulerConfig(max_model_len=0), "outside 1 to 8192"),
    ],
)
def test_what_cannot_be_says_what_to_set(cache: CacheConfig, scheduler: SchedulerConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        fit(cache, scheduler)


def test_no_memory_at_all() -> None:
    with pytest.raises(ConfigError, match="default share"):
        fit(CacheConfig(), SchedulerConfig(), available=0)


def test_unequal_pages_are_refused() -> None:
    groups = (GroupSpec(GroupKind.FULL, 4, (0, 1)), GroupSpec(GroupKind.SLIDING, 4, (2,), window=8))
    with pytest.raises(ConfigError, match="equal bytes"):
        page_bytes(groups, layout(FULL, BF16))
    with pytest.raises(ConfigError, match="block_size must be at least 1"):
        plan_groups(HYBRID, 0)


def test_available_memory_heeds_the_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       16000000 kB\nMemAvailable:    8000 kB\n")
    cgroup = tmp_path / "cgroup"
    cgroup.mkdir()
    assert available_memory(meminfo, cgroup) == 8000 * 1024
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("500\n")
    assert available_memory(meminfo, cgroup) == 8000 * 1024
    (cgroup / "memory.max").write_text("100500\n")
    assert available_memory(meminfo, cgroup) == 100_000
    (cgroup / "memory.stat").write_text("anon 300\ninactive_file 200\n")  # pages of files are given up for the asking
    assert available_memory(meminfo, cgroup) == 100_200
    (cgroup / "memory.stat").unlink()
    (cgroup / "memory.max").write_text("400\n")
    assert available_memory(meminfo, cgroup) == 0
    assert available_memory() > 0
