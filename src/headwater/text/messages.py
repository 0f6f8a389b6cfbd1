"""OpenAI chat messages made plain: what a chat template may see, or a BadRequest that says where it went wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headwater.errors import BadRequest

Json = None | bool | int | float | str | list[Any] | dict[str, Any]

MAX_DEPTH = 64
"""Nesting of objects and lists in a message, a tool or a template argument."""
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


def plain(value: Any, where: str, depth: int = 0) -> Json:
    """A deep copy of ``value`` out of JSON's own types, so that a template can reach nothing else.

    ``where`` names the field in the BadRequest for another type or for too much nesting.
    """
    if depth > MAX_DEPTH:
        raise BadRequest(f"{where} is nested more than {MAX_DEPTH} levels deep", field=where)
    if value is None:
        return None
    if type(value) in (bool, int, float, str):
        scalar: bool | int | float | str = value
        return scalar
    if isinstance(value, Mapping):
        return {_key(key, where): plain(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return [plain(item, where, depth + 1) for item in value]
    raise BadRequest(f"{where} holds a {type(value).__name__}, which is not a JSON value", field=where)


def _key(key: Any, where: str) -> str:
    if type(key) is not str:
        raise BadRequest(f"{where} has the key {key!r}, which is not a string", field=where)
    return key


def plain_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages as templates expect them; the caller's own are not touched.

    ``content`` becomes one string: text parts are joined with a newline, as in vLLM; None (a message that
    only calls tools) becomes "". The ``arguments`` of a tool call, JSON in a string in OpenAI's protocol,
    become an object. Other fields pass through.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise BadRequest("messages must be a list with at least one message", field="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadRequest(f"{where} must be an object with role and content", field=where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadRequest(f"{where}.role must be a non-empty string", field=f"{where}.role")
    rest = {key: value for key, value in message.items() if key != "content" and value is not None}
    result = plain(rest, where)
    if not isinstance(result, dict):
        raise BadRequest(f"{where} must be an object with role and content", field=where)
    if "tool_calls" in result:
        result["tool_calls"] = _tool_calls(result["tool_calls"], f"{where}.tool_calls")
    result["content"] = _content(message.get("content"), f"{where}.content", optional="tool_calls" in result)
    return result


def _content(content: Any, where: str, *, optional: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        if optional:
            return ""
        raise BadRequest(f"{where} is missing", field=where)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise BadRequest(f"{where} must be a string or a list of text parts", field=where)
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise BadRequest(f'{where} must be an object with a type, such as {{"type": "text", "text": ...}}', field=where)
    if part["type"] not in TEXT_PARTS:
        raise BadRequest(f"{where} has type {part['type']!r}; this model takes text only", field=f"{where}.type")
    if not isinstance(part.get("text"), str):
        raise BadRequest(f"{where}.text must be a string", field=f"{where}.text")
    text: str = part["text"]
    return text


def _tool_calls(calls: Any, where: str) -> list[Any]:
    if not isinstance(calls, list):
        raise BadRequest(f"{where} must be a list", field=where)
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            field = f"{where}[{i}].function.arguments"
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except (ValueError, RecursionError) as error:
                raise BadRequest(f"{field} is not JSON: {error}", field=field) from error
    return calls
