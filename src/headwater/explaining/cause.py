"""What makes two rendered prompts differ at a character: the messages, the tools, or the template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from headwater.errors import BadRequest
from headwater.explaining.prompt import Body, Messages, Prompt
from headwater.explaining.same import canonical, exact, first_difference
from headwater.text.common import common_length

ARGUMENTS = ("chat_template_kwargs", "add_generation_prompt", "continue_final_message")
THOUGHT = "<think>"

REASONING_REMOVED = "its reasoning is removed"
SPACES_TRIMMED = "spaces at its ends are trimmed"


class Cause(str, Enum):
    """Where a first difference comes from."""

    TEXT = "text"
    TEMPLATE = "template"
    TOOL_ORDER = "tool_order"
    TOOL_KEYS = "tool_keys"
    TOKENIZER = "tokenizer"


@dataclass(frozen=True, slots=True)
class Origin:
    """``field`` is the path of the request's field that makes the difference, None where none does."""

    cause: Cause
    field: str | None
    detail: str


def find_origin(one: Prompt, two: Prompt, at: int) -> Origin:
    """Why the rendered texts part at character ``at``."""
    if one.messages is None or two.messages is None:
        return Origin(Cause.TEXT, "prompt" if one.messages is None and two.messages is None else None, "")
    return _from_tools(one, two, at) or _from_arguments(one, two, at) or _from_messages(one, two, at)


def tool_cause(ours: list[Any], theirs: list[Any]) -> Cause:
    """How two lists of tools differ that are not the same JSON text."""
    mine, others = [canonical(tool) for tool in ours], [canonical(tool) for tool in theirs]
    if mine == others:
        return Cause.TOOL_KEYS
    return Cause.TOOL_ORDER if Counter(mine) == Counter(others) else Cause.TEXT


def _from_tools(one: Prompt, two: Prompt, at: int) -> Origin | None:
    """Tried out: with the other request's tools, does the common beginning get longer?"""
    ours, theirs = one.body.get("tools") or [], two.body.get("tools") or []
    if exact(ours) == exact(theirs) or not _helps(one, two, at, "tools"):
        return None
    cause = tool_cause(ours, theirs)
    field = first_difference(ours, theirs, "tools")
    return Origin(cause, field, "" if cause is not Cause.TEXT else f"the lists of tools differ at {field}")


def _from_arguments(one: Prompt, two: Prompt, at: int) -> Origin | None:
    for name in ARGUMENTS:
        ours, theirs = one.body.get(name), two.body.get(name)
        if exact(ours) != exact(theirs) and _helps(one, two, at, name):
            path = name
            if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
                path = first_difference(ours, theirs, name) or name
            return Origin(Cause.TEMPLATE, path, f"the requests differ in {path}")
    return None


def _helps(one: Prompt, two: Prompt, at: int, name: str) -> bool:
    """Is the common beginning longer with ``name`` as the second request has it?"""
    if one.messages is None or one.rerender is None:
        return False
    try:
        text = one.rerender(one.messages, {name: two.body.get(name)})
    except BadRequest:
        return False  # what the second request asks for does not go with the first one's messages
    return common_length(text, two.text) > at


def _from_messages(one: Prompt, two: Prompt, at: int) -> Origin:
    ours, theirs = list(one.messages or ()), list(two.messages or ())
    path = first_difference(ours, theirs, "messages")
    if path is None:
        return Origin(Cause.TEMPLATE, None, "it writes something that changes by itself, such as the date")
    first_other = _index(path)
    owners = [owner for owner in (_owner(one, at), _owner(two, at)) if owner is not None]
    if owners and min(owners) < first_other:
        index = min(owners)
        return Origin(Cause.TEMPLATE, f"messages[{index}].content", rewriting(one, two, index))
    if _is_default_system(one, two, at) or _is_default_system(two, one, at):
        return Origin(Cause.TEMPLATE, path, "it writes a system prompt of its own where the messages have none")
    for shorter, longer in ((ours, theirs), (theirs, ours)):
        if first_other == len(shorter) < len(longer) and longer[first_other].get("role") == "assistant":
            detail = "it begins an answer that is to come with other text than an answer in the history"
            return Origin(Cause.TEMPLATE, path, detail)
    return Origin(Cause.TEXT, path, "")


def _index(path: str) -> int:
    """Which message a path such as "messages[3].content" is about."""
    return int(path[path.index("[") + 1 : path.index("]")])


def _owner(prompt: Prompt, at: int) -> int | None:
    """The message that the character belongs to, its end included; None where that is the template's text."""
    for piece in prompt.pieces:
        if piece.first <= at <= piece.end:
            return piece.message
    return None


def _is_default_system(without: Prompt, other: Prompt, at: int) -> bool:
    """Is there, in the prompt without a system message, one that the template has written?"""
    if _first_role(without.messages) == "system" or _first_role(other.messages) != "system":
        return False
    first = next((piece.first for piece in without.pieces), len(without.text))
    return at < first and "system" in without.text[:first].lower()


def _first_role(messages: Messages | None) -> object:
    return messages[0].get("role") if messages else None


def rewriting(one: Prompt, two: Prompt, message: int) -> str:
    """How the template shows the same message differently in two prompts."""
    first, second = shown(one, message), shown(two, message)
    what = f"it rewrites message {message} once other messages follow"
    if (THOUGHT in first) != (THOUGHT in second) or _lost_a_thought(one.body, message, first, second):
        return f"{what}: {REASONING_REMOVED}"
    if first != second and first.strip() == second.strip():
        return f"{what}: {SPACES_TRIMMED}"
    return what


def _lost_a_thought(body: Body, message: int, first: str, second: str) -> bool:
    """A thought that is a field of its own, shown in one of the texts only."""
    messages = body.get("messages") or []
    fields = messages[message] if message < len(messages) else {}
    thought = fields.get("reasoning_content") or fields.get("reasoning")
    return isinstance(thought, str) and (thought.strip() in first) != (thought.strip() in second)


def shown(prompt: Prompt, message: int) -> str:
    """What the text shows of a message: from the first to the last piece of its content."""
    pieces = [piece for piece in prompt.pieces if piece.message == message]
    return prompt.text[pieces[0].first : pieces[-1].end] if pieces else ""
