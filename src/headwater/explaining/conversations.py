"""Which requests are turns of one conversation: a later one repeats the messages of an earlier one and adds some."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from headwater.explaining.prompt import Messages
from headwater.explaining.same import canonical
from headwater.text.common import common_length

SYSTEM_ROLES = ("system", "developer")
THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
NOT_TOLD = ("reasoning", "reasoning_content", "annotations", "refusal", "audio")
"""Fields of a message that clients may drop when they send it back."""

MIN_TELLING_CHARS = 40
"""A first message of so many characters marks a conversation even under another system prompt."""
KEPT_ENDS = 8
"""So many requests that end with the same messages are looked at, the last ones."""


def split_system(messages: Messages) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """The system messages at the beginning, and the rest."""
    n = next((i for i, one in enumerate(messages) if one.get("role") not in SYSTEM_ROLES), len(messages))
    return list(messages[:n]), list(messages[n:])


def _essence(message: Mapping[str, Any]) -> str:
    """What stays the same when clients or templates take away spaces and thoughts."""
    kept = {name: value for name, value in message.items() if name not in NOT_TOLD and value not in (None, [])}
    content = kept.get("content")
    if isinstance(content, str):
        kept["content"] = THOUGHT.sub("", content).strip()
    if "tool_calls" in kept:
        kept["tool_calls"] = re.sub(r"\s", "", canonical(kept["tool_calls"]))
    return canonical(kept)


class _Node:
    __slots__ = ("children", "ends")

    def __init__(self) -> None:
        self.children: dict[str, _Node] = {}
        self.ends: list[int] = []


class Conversations:
    """A tree of messages; a request's place is where its messages after the system prompt end."""

    def __init__(self) -> None:
        self._root = _Node()
        self._systems: dict[int, tuple[str, str]] = {}
        self._places: dict[str, tuple[int, int]] = {}

    def cut_from(self, messages: Messages) -> tuple[int, int] | None:
        """The request that ``messages`` may go on from without its first ones, and how many those are: the last one
        that had the first of ``messages`` further on (whether the others follow there is not looked at), or None."""
        _, rest = split_system(messages)
        return self._places.get(_essence(rest[0])) if rest else None

    def add(self, request: int, messages: Messages, tools: object) -> int | None:
        """Note a request; returns the one that it goes on from, None if there is none.

        Of several, one with the same system prompt and tools is taken, or else the last one.
        """
        system, rest = split_system(messages)
        keys = (canonical(system), canonical(tools))
        node, before = self._root, list[int]()
        first = _text(rest[0]) if rest else ""
        for n, message in enumerate(rest):
            if n and node.ends:
                usable = [i for i in node.ends if n > 1 or self._is_alike(keys[0], self._systems[i][0], first)]
                before = usable or before
            essence = _essence(message)
            if n:
                self._places[essence] = (request, n)
            node = node.children.setdefault(essence, _Node())
        node.ends = [*node.ends, request][-KEPT_ENDS:]
        self._systems[request] = keys
        same = [i for i in before if self._systems[i] == keys]
        return same[-1] if same else before[-1] if before else None

    @staticmethod
    def _is_alike(ours: str, theirs: str, first: str) -> bool:
        """Whether one message alone shows that two requests are turns of a conversation."""
        if ours == theirs or len(first) >= MIN_TELLING_CHARS:
            return True
        kept = common_length(ours, theirs)
        kept += common_length(ours[kept:][::-1], theirs[kept:][::-1])
        return 2 * kept >= min(len(ours), len(theirs))


def is_end_and_beginning(end: Messages, beginning: Messages) -> bool:
    """Whether the last messages of one request are the first ones of another: two or more, and no mere greeting."""
    n = min(len(end), len(beginning))
    same = [_essence(one) == _essence(other) for one, other in zip(end, beginning, strict=False)]
    return n > 1 and all(same) and sum(len(_text(one)) for one in end[:n]) >= MIN_TELLING_CHARS


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else canonical(content)


def system_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """The texts of the system messages at the beginning."""
    return "\n".join(_text(message) for message in split_system(messages)[0])
