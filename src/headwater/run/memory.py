"""How the layers are grouped, how large a page is, how many pages fit, and what context that allows.

One pool of equal-byte pages serves all groups: page p of the pool holds, for the group that owns it, the K
and V of ``block_size`` tokens in each of that group's layers. So every group has the same number of layers.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headwater.config import CacheConfig, SchedulerConfig
from headwater.errors import ConfigError
from headwater.kernels.layout import KVLayout
from headwater.model.spec import ModelSpec
from headwater.types import GroupKind, GroupSpec

DEFAULT_POOL_BYTES = 2 << 30
"""The most that the pool takes unasked: a laptop with 16 GB has other things to do."""
DEFAULT_SHARE = 0.25
"""The share of the available memory that the pool takes unasked, if that is less."""


def plan_groups(spec: ModelSpec, block_size: int) -> tuple[GroupSpec, ...]:
    """Layers of one kind (full, or sliding with one window) cut into groups of equal size.

    The size is the greatest common divisor of the kinds' layer counts: Gemma 3 270M with 15 sliding and 3
    full layers has 1 full group and 5 sliding ones, of 3 layers each. Full groups come first.
    """
    if block_size < 1:
        raise ConfigError(f"block_size must be at least 1, got {block_size}")
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(spec.layer_windows):
        kinds.setdefault(window, []).append(layer)
    size = math.gcd(*(len(layers) for layers in kinds.values()))
    groups = []
    for window, layers in sorted(kinds.items(), key=lambda kind: (kind[0] is not None, kind[0] or 0)):
        kind = GroupKind.FULL if window is None else GroupKind.SLIDING
        cuts = [tuple(layers[i : i + size]) for i in range(0, len(layers), size)]
        groups += [GroupSpec(kind, block_size, cut, window) for cut in cuts]
    return tuple(groups)


def page_bytes(groups: Sequence[GroupSpec], layout: KVLayout) -> int:
    """Bytes of one page: a block in all layers of a group."""
    sizes = {len(group.layers) * group.block_size for group in groups}
    if len(sizes) != 1:
        raise ConfigError(
            f"groups share one pool, so their pages must have equal bytes; got {sorted(sizes)} token-layers"
        )
    return sizes.pop() // layout.block_size * layout.block_bytes


def blocks_for(groups: Sequence[GroupSpec], n_tokens: int, max_new: int) -> int:
    """Most blocks of all groups together that one sequence of ``n_tokens`` holds at any moment."""
    return sum(group.peak_blocks(n_tokens, max_new) for group in groups)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What fits. ``max_model_len`` is the true limit of one sequence, in tokens."""

    n_blocks: int
    page_bytes: int
    max_model_len: int

    @property
    def kv_cache_bytes(self) -> int:
        return self.n_blocks * self.page_bytes


def fit_blocks(
    spec: ModelSpec,
    groups: Sequence[GroupSpec],
    layout: KVLayout,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    available_bytes: int,
) -> MemoryPlan:
    """Size the pool: ``cache.n_blocks``, or what ``cache.kv_cache_memory_bytes`` holds, or a modest share of
    ``available_bytes``; never more than ``max_num_seqs`` sequences of the full length can use.

    ConfigError if ``max_model_len`` is more than the model or the pool can do, or if the pool cannot hold even
    one block of a sequence.
    """
    wanted = scheduler.max_model_len
    if wanted is not None and not 1 <= wanted <= spec.max_positions:
        raise ConfigError(f"max_model_len {wanted} is outside 1 to {spec.max_positions}, the model's own limit")
    length = spec.max_positions if wanted is None else wanted
    max_new = scheduler.max_num_batched_tokens
    page = page_bytes(groups, layout)
    if cache.n_blocks is not None and cache.kv_cache_memory_bytes is not None:
        raise ConfigError("num_blocks and kv_cache_memory_bytes both size the pool: give one of them")
    if cache.n_blocks is not None:
        n_blocks = cache.n_blocks
        source = f"n_blocks {n_blocks}"
    else:
        if cache.kv_cache_memory_bytes is not None:
            budget = cache.kv_cache_memory_bytes
            source = f"kv_cache_memory_bytes {budget}"
        else:
            budget = min(DEFAULT_POOL_BYTES, int(available_bytes * DEFAULT_SHARE))
            source = f"{budget} bytes, the default share of the {available_bytes} bytes of memory that are available,"
        n_blocks = min(budget // page, scheduler.max_num_seqs * blocks_for(groups, length, max_new))
    least = blocks_for(groups, min(length, groups[0].block_size), max_new)
    if n_blocks < least:
        raise ConfigError(
            f"{source} gives {max(0, n_blocks)} blocks of {page} bytes; one short sequence needs {least}: "
            f"set kv_cache_memory_bytes to {least * page} or more, or make block_size smaller"
        )
    if n_blocks * page > available_bytes:
        raise ConfigError(
            f"{source} needs {n_blocks * page} bytes, but only {available_bytes} are available: ask for at most "
            f"{available_bytes // page} blocks"
        )
    fitted = _longest(groups, n_blocks, length, max_new)
    if wanted is not None and fitted < wanted:
        needed = blocks_for(groups, wanted, max_new)
        raise ConfigError(
            f"max_model_len {wanted} needs {needed} blocks, but {source} gives {n_blocks}: set max_model_len to "
            f"{fitted} or less, or kv_cache_memory_bytes to {needed * page} or more"
        )
    return MemoryPlan(n_blocks, page, fitted)


def _longest(groups: Sequence[GroupSpec], n_blocks: int, length: int, max_new: int) -> int:
    """The longest sequence, up to ``length``, that ``n_blocks`` hold (blocks grow with tokens); at least 1."""
    return max(1, bisect_right(range(1, length + 1), n_blocks, key=lambda n: blocks_for(groups, n, max_new)))


def available_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still use: the machine's available memory, or less in a container with a limit."""
    available = _machine_available(meminfo)
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if limit.is_file() and used.is_file():
        text = limit.read_text().strip()
        if text != "max":
            taken = int(used.read_text()) - _reclaimable(cgroup / "memory.stat")
            available = min(available, max(0, int(text) - taken))
    return available


def _reclaimable(stat: Path) -> int:
    """Bytes that count as used but are given up for the asking: pages of files, such as the model just read."""
    if stat.is_file():
        for line in stat.read_text().splitlines():
            if line.startswith("inactive_file "):
                return int(line.split()[1])
    return 0


def _machine_available(meminfo: Path) -> int:
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # macOS: all there is
