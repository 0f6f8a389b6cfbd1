"""Would these tests notice? Each break is a real fault of some engine; the comparison with cache off must catch it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from headwater.cache.group import GroupHit
from headwater.cache.lookup import Lookup
from headwater.cache.prefix import PrefixCache
from headwater.types import Namespace
from tests.e2e.compare import assert_same, oracle
from tests.e2e.engine import Engine, Loaded, some_tokens

VOCAB = 300
PROMPT = some_tokens(30, seed=1, vocab=VOCAB)
Break = Callable[[Engine, pytest.MonkeyPatch], None]


def differential(loaded: Loaded, break_it: Break, patch: pytest.MonkeyPatch, *, audit: bool) -> None:
    """What the other files do, in small: a prompt, and others that share some of it."""
    engine = Engine(loaded, block_size=4, audit=audit)
    engine.shuffle_free()
    break_it(engine, patch)
    assert engine.generate(PROMPT, 2).n_cached == 0
    for shared in (12, 30):
        answer = engine.generate([*PROMPT[:shared], *range(7, 14)], 3)
        assert answer.n_cached >= shared // 4 * 4
        assert_same(answer, oracle(loaded, answer.prompt, 3), loaded)
    engine.generate(PROMPT, 2, salt="a")
    assert engine.generate(PROMPT, 2, salt="b").n_cached == 0


def altered(patch: pytest.MonkeyPatch, change: Callable[[PrefixCache, Lookup], Lookup]) -> None:
    """Change every look-up that hits."""
    lookup = PrefixCache.lookup

    def wrong(self: PrefixCache, *args: Any, **kwargs: Any) -> Lookup:
        found = lookup(self, *args, **kwargs)
        return change(self, found) if found.n_hit else found

    patch.setattr(PrefixCache, "lookup", wrong)


def one_block_too_many(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    def more(cache: PrefixCache, found: Lookup) -> Lookup:
        other = next(block for block in cache.pool.evictable if block not in found.tables[0].blocks)
        tables = tuple(GroupHit(table.first, (*table.blocks, other)) for table in found.tables)
        return replace(found, n_hit=found.n_hit + 4, tables=tables)

    altered(patch, more)


def a_wrong_block(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    def swapped(cache: PrefixCache, found: Lookup) -> Lookup:
        other = next(block for block in cache.pool.evictable if block not in found.tables[0].blocks)
        return replace(found, tables=(GroupHit(0, (*found.tables[0].blocks[:-1], other)),))

    altered(patch, swapped)


def positions_start_at_0(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    engine.model.lie_about_positions = True


def the_salt_is_ignored(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    chain = PrefixCache.chain
    patch.setattr(PrefixCache, "chain", lambda self, namespace, *rest: chain(self, Namespace(namespace.weights), *rest))


def hits_are_kept_at_0(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    altered(patch, lambda cache, found: cache.lookup(found.chain, bypass="broken"))


BREAKS = [
    one_block_too_many,
    a_wrong_block,
    positions_start_at_0,
    the_salt_is_ignored,
    hits_are_kept_at_0,
]


def nothing(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Break nothing."""


def test_the_check_passes_when_nothing_is_broken(plain: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    differential(plain, nothing, monkeypatch, audit=True)


@pytest.mark.parametrize("break_it", BREAKS, ids=lambda b: b.__name__)
def test_the_comparison_catches(plain: Loaded, monkeypatch: pytest.MonkeyPatch, break_it: Break) -> None:
    with pytest.raises(AssertionError) as caught:
        differential(plain, break_it, monkeypatch, audit=False)
    if break_it in (the_salt_is_ignored, hits_are_kept_at_0):
        assert "n_cached" in str(caught.value)
    else:
        assert "logits at" in str(caught.value) or "without the cache" in str(caught.value)


def test_a_window_that_is_forgotten_is_caught(hybrid: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    # A sliding group that starts in the middle, with a block of another place of the same prefix in its window.
    def shifted(cache: PrefixCache, found: Lookup) -> Lookup:
        pool = cache.pool
        tables = list(found.tables)
        last = tables[1]
        same = [b for b in pool.evictable if pool.group[b] == 1 and b not in last.blocks]
        tables[1] = GroupHit(last.first, (*last.blocks[:-1], same[0]))
        return replace(found, tables=tuple(tables))

    altered(monkeypatch, shifted)
    engine = Engine(hybrid, block_size=4, audit=False)
    engine.generate(PROMPT, 2)
    answer = engine.generate([*PROMPT, 7, 8], 3)
    assert answer.n_cached == 28
    with pytest.raises(AssertionError, match=r"logits at|without the cache"):
        assert_same(answer, oracle(hybrid, answer.prompt, 3), hybrid)
