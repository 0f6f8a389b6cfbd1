"""Memory for KV ahead of need: what is touched, when, and that nothing in use is written to."""

from __future__ import annotations

import sys

import pytest
import torch

from headwater.cache.prefix import PrefixCache
from headwater.config import CacheConfig
from headwater.engine.ahead import MemoryAhead
from headwater.kernels.layout import KVLayout, PlainLayout
from headwater.kernels.panel_layout import PanelLayout
from headwater.run.memory import page_bytes
from headwater.run.store import KVStore
from headwater.types import GroupKind, GroupSpec, Namespace
from tests.memory import resident_bytes

GROUPS = (GroupSpec(GroupKind.FULL, 16, tuple(range(24))),)
LAYOUT = PanelLayout(2, 64, 16, torch.bfloat16, torch.bfloat16)
PAGE = page_bytes(GROUPS, LAYOUT)
MIB = 1 << 20


def make(n_blocks: int, ahead_blocks: int, layout: KVLayout = LAYOUT) -> tuple[PrefixCache, KVStore, MemoryAhead]:
    cache, store = PrefixCache(GROUPS, n_blocks, config=CacheConfig()), KVStore(GROUPS, n_blocks, layout)
    return cache, store, MemoryAhead(cache, store, ahead_bytes=ahead_blocks * page_bytes(GROUPS, layout))


def use(cache: PrefixCache, first_token: int, n_blocks: int) -> list[int]:
    """A request that takes that many blocks, which nobody has; publishes them and ends."""
    chain = cache.chain(Namespace(b"weights"), range(first_token, first_token + 16 * n_blocks))
    holding = cache.claim(chain, cache.lookup(chain), "r")
    cache.allocate(holding, len(chain))
    blocks = list(holding.tables[0].blocks)
    cache.publish(chain, holding, len(chain))
    cache.release(holding)
    cache.audit([])
    return blocks


def test_so_much_beyond_what_was_used_is_touched_in_pieces_and_no_more() -> None:
    cache, _, ahead = make(100, 20)
    assert ahead.pending
    ahead.work()
    assert 0 < ahead.n_touched < 20, "a piece"
    ahead.work_all()
    assert (ahead.n_touched, ahead.pending) == (20, False)
    assert use(cache, 0, 15) == list(range(15))
    assert ahead.pending
    ahead.work_all()
    assert ahead.n_touched == 35
    use(cache, 1000, 30)  # further than was touched
    ahead.work_all()
    assert ahead.n_touched == 65
    use(cache, 2000, 55)  # the whole pool: from here on nothing is new
    ahead.work_all()
    assert (ahead.n_touched, ahead.pending) == (100, False)
    use(cache, 3000, 55)
    assert not ahead.pending


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("native", [True, False])
def test_no_block_that_was_ever_given_out_is_written_to(native: bool, kv_dtype: torch.dtype) -> None:
    layout: KVLayout = (
        PanelLayout(2, 64, 16, torch.bfloat16, kv_dtype) if native else PlainLayout(2, 64, 16, torch.bfloat16, kv_dtype)
    )
    cache, store, ahead = make(64, 10, layout)
    ahead.work_all()
    parts = [part for layer in store.layers for part in layer.pages.parts]
    for part in parts:
        part.fill_(1)  # finite whatever is in it; what is touched from here on becomes 0
    assert use(cache, 0, 25) == list(range(25)), "15 of them were not touched yet"
    ahead.work_all()
    assert ahead.n_touched == 35
    for part in parts:
        assert (part[:25] == 1).all()
        assert (part[25:35] == 0).all()
        assert (part[35:] == 1).all()


def test_blocks_given_back_are_used_again_before_new_memory() -> None:
    cache, _, ahead = make(64, 10)
    for _ in range(3):
        chain = cache.chain(Namespace(b"weights"), range(16 * 12))
        holding = cache.claim(chain, cache.lookup(chain), "r")
        cache.allocate(holding, len(chain))
        cache.release(holding)  # never published: free
        ahead.work_all()
        assert (cache.n_used_ever, ahead.n_touched) == (12, 22)
    cache.audit([])


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc how much memory the process has")
def test_touching_takes_the_memory_that_the_request_then_need_not_wait_for() -> None:
    n_blocks = 64 * MIB // PAGE
    before = resident_bytes()
    _, store, ahead = make(4 * n_blocks, n_blocks)
    assert resident_bytes() - before < 16 * MIB, "address space only"
    ahead.work_all()
    touched = resident_bytes()
    assert touched - before > 56 * MIB
    for layer in store.layers:
        layer.k[:n_blocks] = 1.0
        layer.v[:n_blocks] = 1.0
    assert resident_bytes() - touched < 8 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc how much memory the process has")
def test_the_first_block_costs_one_huge_page_and_not_one_for_each_layer() -> None:
    store = KVStore(GROUPS, 256 * MIB // PAGE, LAYOUT)
    before = resident_bytes()
    for layer in store.layers:  # 24 layers, K and V
        layer.k[0] = 1.0
        layer.v[0] = 1.0
    assert resident_bytes() - before < 6 * MIB
