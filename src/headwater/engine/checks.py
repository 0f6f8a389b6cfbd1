"""Checks of one request's values, the same for HTTP and for ``LLM``: what is refused is refused by name.

The HTTP models have checked types already; those of ``LLM`` are checked here, and ranges and sizes of both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from headwater.errors import BadRequest, NeverFits
from headwater.text.chat_template import OWN_VARIABLES
from headwater.types import SamplingParams

MAX_TEMPERATURE = 2.0
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_TOKENS = 2**31 - 1
MAX_TOP_K = 2**31 - 1
SEED_RANGE = (-(2**63), 2**63 - 1)

KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "temperature": ((int, float), "a number"),
    "top_p": ((int, float), "a number"),
    "top_k": ((int,), "a whole number"),
    "seed": ((int, type(None)), "a whole number or None"),
    "max_tokens": ((int, type(None)), "a whole number or None"),
    "include_stop_str_in_output": ((bool,), "True or False"),
    "ignore_eos": ((bool,), "True or False"),
    "skip_special_tokens": ((bool,), "True or False"),
}
"""The types of a request's values, and how they are called. True is no number."""


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
    """Refuse values of another type or out of range. Raises BadRequest with the field and what it takes."""
    for field, (kinds, called) in KINDS.items():
        value = getattr(params, field)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise BadRequest(f"{field} must be {called}, got {value!r:.40}", field=field)
    _check_range("temperature", params.temperature, 0.0, MAX_TEMPERATURE)
    if not 0.0 < params.top_p <= 1.0:
        raise BadRequest(f"top_p must be greater than 0 and at most 1, got {params.top_p}", field="top_p")
    _check_range("top_k", params.top_k, -1, MAX_TOP_K)
    check_max_tokens(params.max_tokens)
    if params.seed is not None:
        _check_range("seed", params.seed, *SEED_RANGE)
    _check_stops(params.stop)
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise BadRequest(
            f"stop_token_ids may have at most {MAX_STOP_TOKEN_IDS} ids, got {len(params.stop_token_ids)}",
            field="stop_token_ids",
        )
    check_token_ids(params.stop_token_ids, vocab_size=vocab_size, field="stop_token_ids")


def check_template_arguments(names: Collection[str]) -> None:
    """Refuse chat template arguments that have a field of their own."""
    for name in names:
        if name in OWN_VARIABLES:
            raise BadRequest(f"chat_template_kwargs may not set {name}", field="chat_template_kwargs")


def check_max_tokens(max_tokens: int | None, *, field: str = "max_tokens") -> None:
    """Refuse a number of tokens to generate that is out of range; None is no limit."""
    if max_tokens is not None:
        _check_range(field, max_tokens, 1, MAX_TOKENS)


def _check_range(field: str, value: float, low: float, high: float) -> None:
    if not (low <= value <= high):  # NaN is in no range
        raise BadRequest(f"{field} must be from {low} to {high}, got {value!r:.40}", field=field)


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOP_STRINGS:
        raise BadRequest(f"stop may have at most {MAX_STOP_STRINGS} strings, got {len(stops)}", field="stop")
    for i, stop in enumerate(stops):
        if not isinstance(stop, str):
            raise BadRequest(f"stop[{i}] must be a text, got {stop!r:.40}", field="stop")
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise BadRequest(
                f"stop[{i}] must have from 1 to {MAX_STOP_CHARS} characters, it has {len(stop)}", field="stop"
            )
