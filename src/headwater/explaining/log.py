"""A log of requests, one JSON object a line."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.errors import ConfigError

WRAPPERS = ("body", "request")
"""Keys under which logs and batch files keep the body of a request."""


@dataclass(frozen=True, slots=True)
class Line:
    """One request; ``line`` counts from 1."""

    file: str
    line: int
    body: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that holds no request, and why."""

    file: str
    line: int
    why: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.why}"


def read_log(paths: Sequence[Path]) -> tuple[list[Line], list[BadLine]]:
    """All requests in the order of the files, and the lines that are none; blank lines are neither.

    A line is the body of a request, or an object that has one as ``body`` or ``request``. Raises ConfigError for a
    file that cannot be read.
    """
    good: list[Line] = []
    bad: list[BadLine] = []
    for path in paths:
        try:
            data = path.read_bytes().removeprefix(BOM_UTF8)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
        for number, raw in enumerate(data.split(b"\n"), 1):
            if not raw.strip():
                continue
            read = _body(raw)
            if isinstance(read, str):
                bad.append(BadLine(str(path), number, read))
            else:
                good.append(Line(str(path), number, read))
    return good, bad


def _body(raw: bytes) -> Mapping[str, Any] | str:
    """The body of a request, or what is wrong with the line."""
    try:
        value = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return f"not UTF-8: {error.reason} at byte {error.start}"
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    if not isinstance(value, dict):
        return "not a JSON object"
    for holder in (value, *(value.get(name) for name in WRAPPERS)):
        if isinstance(holder, dict) and (holder.get("messages") is not None or holder.get("prompt") is not None):
            return holder
    return "neither messages nor prompt in it, nor in a body"
