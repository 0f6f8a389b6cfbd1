"""Checks of one request's values, the same for HTTP and for ``LLM``: what is refused is refused by name.

Types are checked by who calls (the HTTP models, Python's own); ranges and sizes here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from headwater.errors import BadRequest, NeverFits
from headwater.types import SamplingParams

MAX_TEMPERATURE = 2.0
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_TOKENS = 2**31 - 1
MAX_TOP_K = 2**31 - 1
SEED_RANGE = (-(2**63), 2**63 - 1)


def check_prompt(token_ids: Sequence[object], *, vocab_size: int, max_model_len: int, field: str = "prompt") -> None:
    """Refuse an empty prompt, ids outside the vocabulary, and a prompt that leaves no room for a token.

    Raises BadRequest, or NeverFits when only the length is wrong.
    """
    if not token_ids:
        raise BadRequest(f"{field} is empty: at least one token is needed", field=field)
    check_length(len(token_ids), max_model_len=max_model_len, field=field)
    check_token_ids(token_ids, vocab_size=vocab_size, field=field)


def check_length(n_tokens: int, *, max_model_len: int, field: str = "prompt") -> None:
    """Refuse a prompt after which not even one token fits."""
    if n_tokens >= max_model_len:
        raise NeverFits(
            f"{field} has {n_tokens} tokens, but prompt and output together may have at most {max_model_len} "
            f"(max_model_len): send at most {max_model_len - 1} tokens",
            field=field,
        )


def check_token_ids(token_ids: Sequence[object], *, vocab_size: int, field: str) -> None:
    """Refuse anything that is not an integer from 0 to vocab_size - 1 (True is not 1 here)."""
    for i, token in enumerate(token_ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise BadRequest(
                f"{field}[{i}] must be a token id from 0 to {vocab_size - 1}, got {token!r:.40}", field=field
            )


def check_sampling(params: SamplingParams, *, vocab_size: int) -> None:
    """Refuse values out of range. Raises BadRequest with the field and its range."""
    _check_range("temperature", params.temperature, 0.0, MAX_TEMPERATURE)
    if not 0.0 < params.top_p <= 1.0:
        raise BadRequest(f"top_p must be greater than 0 and at most 1, got {params.top_p}", field="top_p")
    _check_range("top_k", params.top_k, -1, MAX_TOP_K)
    if params.max_tokens is not None:
        _check_range("max_tokens", params.max_tokens, 1, MAX_TOKENS)
    if params.seed is not None:
        _check_range("seed", params.seed, *SEED_RANGE)
    _check_stops(params.stop)
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise BadRequest(
            f"stop_token_ids may have at most {MAX_STOP_TOKEN_IDS} ids, got {len(params.stop_token_ids)}",
            field="stop_token_ids",
        )
    check_token_ids(params.stop_token_ids, vocab_size=vocab_size, field="stop_token_ids")


def _check_range(field: str, value: float, low: float, high: float) -> None:
    if not (low <= value <= high) or math.isnan(value):
        raise BadRequest(f"{field} must be from {low} to {high}, got {value}", field=field)


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOP_STRINGS:
        raise BadRequest(f"stop may have at most {MAX_STOP_STRINGS} strings, got {len(stops)}", field="stop")
    for i, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise BadRequest(
                f"stop[{i}] must have from 1 to {MAX_STOP_CHARS} characters, it has {len(stop)}", field="stop"
            )
