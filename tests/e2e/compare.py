"""Cache on against cache off: what must be equal, and how nearly."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.e2e.engine import Answer, Engine, Loaded

FLOAT32 = 1e-5
"""Of the largest logit."""
BF16 = 2.0
"""Absolute, where the probe says that products are not row-invariant."""


def oracle(
    loaded: Loaded, prompt: list[int], max_tokens: int, *, every_position: bool = False, **params: object
) -> Answer:
    """The request alone in a fresh engine without caching, its prompt in one chunk."""
    n_blocks = 3 * loaded.model.spec.n_layers * (1 + (len(prompt) + max_tokens) // 16)
    engine = Engine(loaded, caching=False, n_blocks=n_blocks, every_position=every_position, audit=False)
    answer = engine.generate(prompt, max_tokens, **params)
    assert engine.model.calls[0].tokens == prompt
    assert answer.n_cached == 0
    return answer


def same_logits(got: Tensor, want: Tensor, loaded: Loaded) -> bool:
    difference = float((got - want).abs().max())
    if loaded.dtype == torch.float32:
        return difference <= FLOAT32 * float(want.abs().max())
    return torch.equal(got, want) if loaded.row_invariant else difference <= BF16


def near_tie(want: Tensor, loaded: Loaded) -> bool:
    """Are the oracle's own top two too close to insist on the first?"""
    top = want.topk(2).values
    if loaded.dtype == torch.float32:
        return float(top[0] - top[1]) < FLOAT32 * float(want.abs().max())
    return not loaded.row_invariant and float(top[0] - top[1]) < 2 * BF16


def assert_same(got: Answer, want: Answer, loaded: Loaded) -> int:
    """Logits and greedy tokens of ``got`` are those of the oracle. Returns how many positions were compared: all
    that ``got`` computed and the oracle kept, up to a near tie that went the other way."""
    assert got.prompt == want.prompt
    end = len(got.prompt) + len(got.tokens)
    for i, (token, expected) in enumerate(zip(got.tokens, want.tokens, strict=False)):
        position = len(got.prompt) + i - 1
        if token != expected:
            assert near_tie(want.logits[position][0], loaded), (
                f"token {i} after {len(got.prompt)}: {token}, without the cache {expected}"
            )
            end = position + 1
            break
    else:
        assert len(got.tokens) == len(want.tokens)
    compared = 0
    for position, many in got.logits.items():
        if position >= end or position not in want.logits:
            continue
        for logits in many:
            reference = want.logits[position][0]
            assert same_logits(logits, reference, loaded), (
                f"logits at {position} (hit {got.n_cached}, prompt {len(got.prompt)}) are off by "
                f"{float((logits - reference).abs().max()):.3g}, the largest is {float(reference.abs().max()):.3g}"
            )
            compared += 1
    assert compared > 0
    return compared
