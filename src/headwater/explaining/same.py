"""How far two things are the same."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from headwater.text.common import common_length

FIRST_FIELDS = ("role", "content")
"""Of a message, looked at before its other fields: their order is the one in which they are rendered."""


def common_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two lists of ids have in common at their beginning."""
    left, right = array("q", a), array("q", b)
    return common_length(left.tobytes(), right.tobytes()) // left.itemsize


def exact(value: Any) -> str:
    """JSON text that differs when anything in ``value`` does, the order of keys too."""
    return json.dumps(value, ensure_ascii=False)


def canonical(value: Any) -> str:
    """JSON text that is the same whatever the order of keys."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def first_difference(a: Any, b: Any, path: str = "") -> str | None:
    """The path of the first field in which two JSON values differ, such as "messages[1].tool_calls[0].id"; None if
    they are the same. Of two objects whose keys have different orders, the object itself."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        keys = list(dict.fromkeys([key for key in FIRST_FIELDS if key in a or key in b] + [*a, *b]))
        for key in keys:
            inner = f"{path}.{key}" if path else str(key)
            if (key in a) != (key in b):
                return inner
            found = first_difference(a[key], b[key], inner)
            if found is not None:
                return found
        return path if list(a) != list(b) else None
    if isinstance(a, list) and isinstance(b, list):
        for i, (left, right) in enumerate(zip(a, b, strict=False)):
            found = first_difference(left, right, f"{path}[{i}]")
            if found is not None:
                return found
        return f"{path}[{min(len(a), len(b))}]" if len(a) != len(b) else None
    return None if type(a) is type(b) and a == b else path
