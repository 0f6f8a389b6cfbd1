"""The canary: hit blocks are computed again in idle time; a flipped bit is found, told and withdrawn, and nothing else.

Models of every family, whole engines, audited after every step.
"""

from __future__ import annotations

import itertools
import logging
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headwater.cache.block import Node
from headwater.engine.verify import HitVerifier, n_scratch_blocks
from headwater.errors import ConfigError
from headwater.run.difference import bits, differences
from headwater.run.memory import plan_groups
from headwater.types import BlockId, Namespace
from tests.bits.numbers import NATIVE, Numbers
from tests.e2e.conftest import LoadTiny
from tests.e2e.engine import Engine, Loaded, other_than, some_tokens
from tests.model.tiny import tiny
from tests.text.toy import toy_tokenizer

F32, BF16 = torch.float32, torch.bfloat16
VOCAB = 97
FAMILIES = ["llama-llama3", "smollm", "mistral-sliding", "qwen2-sliding", "qwen3", "gemma3"]
PROMPT = some_tokens(44, seed=3, vocab=VOCAB)
"""Eleven blocks of four; a second time, ten hit."""


def canary(loaded: Loaded, **options: object) -> Engine:
    n_groups = len(plan_groups(loaded.model.spec, 4))
    options = {"n_blocks": 40 * n_groups, **options}
    engine = Engine(loaded, block_size=4, partial=False, verify_hits=1.0, **options)  # type: ignore[arg-type]
    engine.shuffle_free()
    return engine


def verifier(engine: Engine) -> HitVerifier:
    assert engine.verifier is not None
    return engine.verifier


def work_off(engine: Engine) -> None:
    """All idle work; nothing may change by it but what is withdrawn."""
    while engine.core.idle_work:
        engine.core.work_idle()
        engine.scheduler.audit()
        engine.check_idle()
    assert engine.runner.n_rows <= len(engine.answers)


def nodes(engine: Engine, prompt: list[int]) -> list[Node]:
    chain = engine.cache.chain(Namespace(engine.loaded.model.weights_digest), prompt)
    return engine.cache.index.walk(chain, len(prompt) // 4)


def flip(engine: Engine, block: BlockId, layer: int, part: str, slot: int, seed: int = 0) -> None:
    """One bit of one element of ``slot``."""
    pages = engine.store.layers[layer].pages
    tensor: Tensor = {"K": pages.k, "V": pages.v}[part]
    elements = tensor[block, slot].view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).flatten()
    rng = random.Random(seed)
    elements[rng.randrange(len(elements))] ^= 1 << rng.randrange(15)


# ---- sound stores -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bf16"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_sound_store_gives_no_alarm(
    load_tiny: LoadTiny, kind: str, dtype: torch.dtype, kernels: str, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load_tiny(kind, dtype, kernels)
    assert loaded.row_invariant
    for budget in (7, 64):
        engine = canary(loaded, budget=budget)
        engine.generate(PROMPT, 5)
        others = [engine.submit(some_tokens(9 + i, seed=i, vocab=VOCAB), 3) for i in range(3)]
        answer = engine.submit(PROMPT[:41], 3)
        engine.run()
        assert answer.n_cached == 40 and not any(other.n_cached for other in others)
        counts = verifier(engine).counts
        assert verifier(engine).n_queued == 10 and counts.verified == 0
        before = engine.cache.stats(), list(engine.cache.pool.evictable), list(engine.cache.pool.free)
        work_off(engine)
        assert (counts.verified, counts.differing, counts.skipped, counts.failed, counts.dropped) == (10, 0, 0, 0, 0)
        assert before == (engine.cache.stats(), list(engine.cache.pool.evictable), list(engine.cache.pool.free))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_was_generated_and_what_was_shared_between_tenants_is_checked_too(load_tiny: LoadTiny) -> None:
    engine = canary(load_tiny("gemma3", F32, "torch"))
    first = engine.generate(PROMPT, 8)
    engine.generate([*PROMPT, *first.tokens, 1], 1)  # hits blocks that hold generated tokens
    for salt in ("a", "b"):
        for _ in range(2):
            engine.generate(PROMPT[:9], salt=salt)
    work_off(engine)
    counts = verifier(engine).counts
    assert (counts.verified, counts.differing) == (12 + 2 + 2, 0)
    assert engine.counters["hits_verified"] == 16


# ---- flipped bits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bf16"])
@pytest.mark.parametrize("kind", ["smollm", "qwen2-sliding", "gemma3"])
def test_a_flipped_bit_of_k_or_v_of_any_layer_is_found_and_its_subtree_withdrawn(
    load_tiny: LoadTiny, kind: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load_tiny(kind, dtype, "torch")
    n_layers = loaded.model.spec.n_layers
    groups_seen = set()
    for case, (layer, part) in enumerate(itertools.product(range(n_layers), "KV")):
        engine = canary(loaded)
        place, slot = case % 9, case % 4
        branch = [*PROMPT[:24], *some_tokens(9, seed=9, vocab=VOCAB)]
        branch[24] = other_than(PROMPT[24], VOCAB)
        engine.generate(PROMPT)
        engine.generate(branch)
        engine.generate(PROMPT)
        path, other = nodes(engine, PROMPT), nodes(engine, branch)
        group = engine.store.layers[layer].group
        groups_seen.add(group)
        (block,) = (b for b in path[place].copies if engine.cache.pool.group[b] == group)
        doomed = {*path[place:], *other[place:]} if place < 6 else set(path[place:])
        expected = {b for node in doomed for b in node.copies}
        free = set(engine.cache.pool.free)
        flip(engine, block, layer, part, slot, seed=case)
        caplog.clear()
        work_off(engine)
        assert set(engine.cache.pool.free) - free == expected, "exactly the block and what follows"
        assert engine.counters["withdrawn"] == len(expected)
        counters = engine.counters
        assert counters["hits_differing"] == 1 and counters["hits_verify_failed"] == 0
        assert engine.hit(PROMPT) == 4 * place and engine.hit(branch) == 4 * (min(place, 8) if place < 6 else 8)
        first = caplog.records[0]
        assert first.levelno == logging.ERROR
        at = 4 * place + slot
        assert f"block {block}, tokens {4 * place} to {4 * place + 3};" in first.message
        assert f"layer {layer}: 1 of " in first.message and f"of {part}, at positions {at} to {at}" in first.message
        again = engine.generate(PROMPT)  # computed anew, published anew, sound
        assert again.n_cached == 4 * place
        assert engine.generate(PROMPT).n_cached == 40
        work_off(engine)
        assert engine.counters["hits_differing"] == 1
    assert groups_seen == set(range(len(engine.groups)))


@pytest.mark.parametrize("kind", ["smollm", "gemma3"])
@pytest.mark.parametrize("numbers", [NATIVE[0], NATIVE[4]], ids=lambda numbers: numbers.name)
def test_a_flipped_bit_is_found_in_every_form_in_which_kv_is_stored(
    tmp_path: Path, kind: str, numbers: Numbers, caplog: pytest.LogCaptureFixture
) -> None:
    # Panels of the native kernels, int8, and scales: any bit of a block's memory.
    tiny(kind, head_dim=32).save_pretrained(tmp_path)
    engine = canary(numbers.load(tmp_path, toy_tokenizer()))
    rng = random.Random(4)
    for case in range(12):
        for _ in range(2):
            engine.generate(PROMPT)
        kv = engine.store.layers[rng.randrange(len(engine.store.layers))]
        parts = kv.pages.parts
        assert len(parts) == (2 if numbers.kv_dtype is None else 4)
        node = nodes(engine, PROMPT)[rng.randrange(9)]
        (block,) = (b for b in node.copies if engine.cache.pool.group[b] == kv.group)
        memory = bits(parts[case % len(parts)][block]).flatten()
        assert memory.untyped_storage().data_ptr() == parts[case % len(parts)].untyped_storage().data_ptr()
        memory[rng.randrange(len(memory))] ^= 1 << rng.randrange(7)
        caplog.clear()
        work_off(engine)
        assert engine.counters["hits_differing"] == case + 1
        assert engine.hit(PROMPT) == 4 * (node.depth - 1)
        assert f"block {block}, tokens {4 * (node.depth - 1)} to" in caplog.records[0].message


def test_minus_zero_and_the_bits_of_nan_count(load_tiny: LoadTiny) -> None:
    # Compared as numbers, -0.0 equals 0.0 and NaN differs from itself.
    nan, other_nan = 0x7FC00000, 0x7FC00001
    values = torch.tensor([0, -(2**31), nan, nan, other_nan], dtype=torch.int32).view(torch.float32)
    assert (bits(values) != bits(torch.tensor([0.0, 0.0, float("nan"), 1.0, float("nan")]))).tolist() == [
        False, True, False, True, True,
    ]  # fmt: skip
    engine = canary(load_tiny("smollm", F32, "torch"))
    engine.generate(PROMPT[:5])
    (block,), pages = nodes(engine, PROMPT[:4])[0].copies, engine.store.layers[1].pages
    scratch = engine.cache.n_blocks
    pages.v[scratch], pages.v[block] = 0.0, 0.0
    pages.v[block, 2, 0, 1] = -0.0
    found = [one for one in differences(engine.store, 0, block, scratch) if (one.layer, one.part) == (1, "V")]
    assert [(one.n_different, one.first_slot, one.last_slot) for one in found] == [(1, 2, 2)]


def test_a_fault_before_the_checked_block_is_tracked_down(load_tiny: LoadTiny) -> None:
    # Only block 7 was chosen; block 2, on which it rests, is the wrong one. What is right before it is kept.
    engine = canary(load_tiny("smollm", F32, "torch"))
    engine.generate(PROMPT)
    path = nodes(engine, PROMPT)
    engine.store.layers[0].pages.v[path[2].copies[0], 1] += 1.0
    verifier(engine)._queue[path[7]] = None
    work_off(engine)
    assert engine.counters["hits_differing"] == 2
    assert engine.counters["hits_verified"] == 6  # 7; then 0, 1, 2; and, because of 2, again 0, 1
    assert engine.hit(PROMPT) == 8
    assert [engine.cache.index.is_attached(node) for node in path] == [True] * 2 + [False] * 9


def test_what_was_copied_from_a_wrong_block_is_checked_too(load_tiny: LoadTiny) -> None:
    # Blocks that begin alike may have been copied from one another, slot by slot.
    engine = canary(load_tiny("smollm", F32, "torch"))
    alike = [*PROMPT[:10], other_than(PROMPT[10], VOCAB), 5, 6, 7, 8]
    engine.generate(PROMPT[:17])
    engine.generate(alike)
    wrong, copied = nodes(engine, PROMPT[:12])[2], nodes(engine, alike)[2]
    layout, pages = engine.store.layout, engine.store.layers[1].pages
    flip(engine, wrong.copies[0], 1, "K", 0)
    layout.copy(pages, wrong.copies[0], copied.copies[0], 2)
    verifier(engine)._queue[wrong] = None
    work_off(engine)
    assert engine.counters["hits_differing"] == 2
    assert engine.hit(alike) == engine.hit(PROMPT[:17]) == 8


def test_a_second_copy_of_the_same_content_is_checked_too(load_tiny: LoadTiny) -> None:
    engine = canary(load_tiny("smollm", F32, "torch"))
    engine.generate(PROMPT)
    both = [engine.submit(PROMPT[:17], 12, skip_reading=True) for _ in range(2)]
    while len(both[1].tokens) < 2:
        engine.step()
    node = nodes(engine, PROMPT)[1]
    assert len(node.copies) == 2
    flip(engine, engine.table(both[1])[1], 0, "K", 3)
    engine.generate(PROMPT[:9])
    work_off(engine)
    assert engine.counters["hits_differing"] == 1


# ---- what cannot be checked, and what gets in the way -----------------------------------------------------


def test_blocks_that_are_gone_are_skipped_and_counted(load_tiny: LoadTiny) -> None:
    engine = canary(load_tiny("smollm", F32, "torch"), n_blocks=16)
    for _ in range(2):
        engine.generate(PROMPT)
    strangers = [engine.generate(some_tokens(40, seed=50 + i, vocab=VOCAB)) for i in range(2)]
    assert engine.counters["evictions"] > 10 and not any(answer.n_cached for answer in strangers)
    work_off(engine)
    assert engine.counters["hits_verify_skipped"] == 10 and engine.counters["hits_verified"] == 0


def test_windows_that_slid_out_and_were_evicted_leave_blocks_that_cannot_be_checked(load_tiny: LoadTiny) -> None:
    loaded = load_tiny("gemma3", F32, "torch")  # windows of 5: a full group is held longer than the sliding ones
    n_groups = len(Engine(loaded).groups)
    engine = canary(loaded, n_blocks=12 * n_groups)
    for _ in range(2):
        engine.generate(PROMPT)
    engine.generate(some_tokens(36, seed=70, vocab=VOCAB))
    work_off(engine)
    counters = engine.counters
    assert counters["hits_verify_skipped"] > 0 and counters["hits_differing"] == 0
    assert counters["hits_verify_skipped"] + counters["hits_verified"] == 10


def test_it_works_while_the_pool_is_full_and_evicts_nothing(load_tiny: LoadTiny) -> None:
    engine = canary(load_tiny("smollm", F32, "torch"), n_blocks=11)
    for _ in range(2):
        engine.generate(PROMPT)
    assert engine.cache.stats().free <= 1
    evictions = engine.counters["evictions"]
    order = list(engine.cache.pool.evictable)
    work_off(engine)
    assert engine.counters["hits_verified"] == 10 and engine.counters["evictions"] == evictions
    assert list(engine.cache.pool.evictable) == order


def test_a_reset_in_between_leaves_nothing_to_check(load_tiny: LoadTiny) -> None:
    engine = canary(load_tiny("gemma3", F32, "torch"))
    for _ in range(2):
        engine.generate(PROMPT)
    engine.core.work_idle()
    assert engine.reset().done
    work_off(engine)
    assert engine.counters["hits_verified"] == 1 and engine.counters["hits_verify_skipped"] == 9


def test_requests_go_first_and_a_check_in_between_changes_no_answer(load_tiny: LoadTiny) -> None:
    engine, quiet = (
        canary(load_tiny("gemma3", F32, "torch")),
        Engine(load_tiny("gemma3", F32, "torch"), block_size=4, partial=False),
    )
    engine.generate(PROMPT)
    quiet.generate(PROMPT)
    for i in range(6):
        prompt = [*PROMPT[: 6 * i + 5], *some_tokens(5, seed=i, vocab=VOCAB)]
        answer = engine.submit(prompt, 6)
        n_checked = engine.counters["hits_verified"]
        engine.core.work_idle()
        engine.step()
        engine.core.work_idle()
        assert engine.counters["hits_verified"] == n_checked, "somebody is being served"
        engine.run()
        engine.core.work_idle()
        same = quiet.generate(prompt, 6)
        assert (answer.tokens, answer.n_cached) == (same.tokens, same.n_cached)
    assert 0 < engine.counters["hits_verified"] <= 6


def test_an_abort_leaves_what_it_hit_to_be_checked(load_tiny: LoadTiny) -> None:
    engine = canary(load_tiny("smollm", F32, "torch"))
    engine.generate(PROMPT)
    answer = engine.submit(PROMPT, 20)
    engine.step()
    engine.abort(answer)
    work_off(engine)
    assert engine.counters["hits_verified"] == 10


def test_the_queue_is_bounded_and_the_oldest_give_way(load_tiny: LoadTiny) -> None:
    engine = canary(load_tiny("smollm", F32, "torch"))
    verifier(engine)._max_queued = 4
    for _ in range(2):
        engine.generate(PROMPT)
    assert (verifier(engine).n_queued, verifier(engine).counts.dropped) == (4, 6)
    assert list(verifier(engine)._queue) == nodes(engine, PROMPT)[6:10]
    engine.generate(PROMPT[:17])
    assert verifier(engine).n_queued == 4 and engine.counters["hits_verify_dropped"] == 10


def test_a_check_that_fails_is_counted_and_harms_nothing(
    load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = canary(load_tiny("gemma3", F32, "torch"))
    for _ in range(2):
        engine.generate(PROMPT)

    def broken() -> None:
        raise RuntimeError("no memory")

    engine.model.during = broken
    engine.core.work_idle()  # the row fails
    monkeypatch.setattr(type(engine.cache), "recheck", lambda self, node: broken())
    engine.core.work_idle()  # something unforeseen
    monkeypatch.undo()
    engine.model.during = lambda: None
    assert engine.counters["hits_verify_failed"] == 2 and engine.counters["hits_verified"] == 0
    assert "no memory" in caplog.text
    assert engine.generate(PROMPT, 4).n_cached == 40
    work_off(engine)
    assert engine.counters["hits_verify_failed"] == 2 and engine.counters["hits_differing"] == 0
    assert engine.counters["hits_verified"] == 10  # the two that failed were hit again


# ---- choosing ---------------------------------------------------------------------------------------


def test_about_the_share_is_chosen_and_the_same_with_the_same_seed(load_tiny: LoadTiny) -> None:
    loaded, chosen = load_tiny("smollm", F32, "torch"), []
    for seed in (1, 1, 2):
        engine = canary(loaded)
        verifier(engine)._share, verifier(engine)._rng = 0.25, random.Random(seed)
        for i in range(12):
            prompt = some_tokens(41, seed=400 + i, vocab=VOCAB)
            engine.generate(prompt)
            engine.generate(prompt)
        chosen.append([node.key for node in verifier(engine)._queue])
    assert chosen[0] == chosen[1] != chosen[2]
    assert 15 <= len(chosen[0]) <= 45  # of 120; 30 expected, deviation 5


def test_only_hits_are_chosen(load_tiny: LoadTiny) -> None:
    engine = canary(load_tiny("smollm", F32, "torch"))
    engine.generate(PROMPT)
    engine.generate(PROMPT, skip_reading=True)
    assert not engine.core.idle_work
    engine.core.work_idle()  # nothing to do is no error
    assert engine.counters["hits_verified"] == 0


def test_a_share_that_is_none_and_a_store_without_scratch_are_refused(load_tiny: LoadTiny) -> None:
    engine = Engine(load_tiny("gemma3", F32, "torch"), block_size=4)
    parts = {"cache": engine.cache, "runner": engine.runner, "store": engine.store, "rng": random.Random(0)}
    for share in (0.0, -0.5, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="share"):
            HitVerifier(share, **parts)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"needs {engine.cache.n_blocks + n_scratch_blocks(len(engine.groups))}"):
        HitVerifier(0.5, **parts)  # type: ignore[arg-type]
