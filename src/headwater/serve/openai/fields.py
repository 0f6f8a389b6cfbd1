"""Reading a request body: every field is honoured, refused by name, or one of the few documented no-ops."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, ValidationError, model_validator
from pydantic_core import ErrorDetails, from_json

from headwater.errors import BadRequest

NO_OPS = ("user", "safety_identifier", "metadata", "prompt_cache_key")
"""Fields that are accepted and change nothing: they speak to a provider's bookkeeping, not to a model."""

NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "web_search_options": (),
    "verbosity": (),
    "chat_template": (),
    "documents": ([],),
    "continue_final_message": (False,),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "kv_transfer_params": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "prompt_cache_retention": (),
}
"""Fields that other servers know and this one does not have yet, with the values that ask for nothing.

null always asks for nothing. Any other value is refused by the field's name."""

NEVER_SHOWN = ("cache_salt", "first", "second")
"""Fields whose values appear in no message, log or metric: a salt, and bodies to compare, which may hold one."""

SHOWN_CHARS = 60

T = TypeVar("T")

Many = Annotated[list[T], FailFast()]
"""A list whose first bad item ends the check: a million bad ones would make a million error objects."""

M = TypeVar("M", bound="Fields")


class Fields(BaseModel):
    """Base of all request models: strict types, no unknown fields, no NaN; null is the default of every field."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """What `NEUTRAL` is to a body, for an object inside it."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_asks_for_nothing(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if not cls._asks_for_nothing(name, value)}

    @classmethod
    def _asks_for_nothing(cls, name: str, value: object) -> bool:
        if value is None:
            return name in cls.model_fields or name in cls.neutral
        return _is_neutral(value, cls.neutral.get(name, ()))


def parse_fields(model: type[M], body: bytes) -> M:
    """Decode and check one request body. Raises BadRequest, naming the field."""
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise BadRequest(f"the body must be a JSON object, not {_json_type(data)}")
    for name in data:
        if name not in model.model_fields:
            _check_foreign(name, data[name], model)
    known = {name: value for name, value in data.items() if name in model.model_fields}
    try:
        return model.model_validate(known)
    except ValidationError as invalid:
        raise _as_bad_request(invalid) from None


def _check_foreign(name: str, value: object, model: type[Fields]) -> None:
    """Refuse a field that ``model`` does not have, unless its value asks for nothing."""
    if name in NO_OPS or (name in NEUTRAL and (value is None or _is_neutral(value, NEUTRAL[name]))):
        return
    if name in NEUTRAL:
        harmless = " or ".join(["leave it out", *(f"send {_shown(neutral)}" for neutral in NEUTRAL[name])])
        raise BadRequest(f"{name} is not supported: {harmless}", field=name)
    raise BadRequest(unknown_field(name, [*model.model_fields, *NO_OPS, *NEUTRAL]), field=name[:SHOWN_CHARS])


def _is_neutral(value: object, neutral: Iterable[object]) -> bool:
    # bool is an int in Python: without the test of types, logprobs: 0 would pass for logprobs: false
    return any(value == harmless and isinstance(value, bool) == isinstance(harmless, bool) for harmless in neutral)


def unknown_field(name: str, known: Iterable[str]) -> str:
    """The message for a field nobody knows, with the nearest known one."""
    near = difflib.get_close_matches(name[:SHOWN_CHARS], list(known), n=1)
    return f"unknown field {name[:SHOWN_CHARS]!r}" + (f": did you mean {near[0]!r}?" if near else "")


def _as_bad_request(invalid: ValidationError) -> BadRequest:
    details = invalid.errors(include_url=False)[0]
    path = details["loc"]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    top = str(path[0]) if path else None
    if details["type"] == "missing":
        return BadRequest(f"{where} is required", field=top)
    if details["type"] == "extra_forbidden":
        return BadRequest(f"unknown field {where[: 2 * SHOWN_CHARS]!r}", field=top)
    return BadRequest(f"{where}: {_reason(details)}", field=top)


def _reason(details: ErrorDetails) -> str:
    message = details["msg"][0].lower() + details["msg"][1:]
    value = details["input"]
    top = details["loc"][0] if details["loc"] else ""
    if isinstance(value, (str, int, float)) and top not in NEVER_SHOWN:
        return f"{message}, got {_shown(value)}"
    return message


def _shown(value: object) -> str:
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."


def _json_type(value: object) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return names[type(value)]
