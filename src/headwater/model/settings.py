"""Typed reading of a model's configuration, from config.json or from GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping

from headwater.errors import ModelError


class Settings:
    """Values by key, with errors that say where they are from.

    ``where`` names the file; ``prefix`` is put before every key (GGUF's architecture). A JSON null counts
    as absent. All getters raise ModelError for a value of another type, and, unless
    a default is given, for an absent one.
    """

    def __init__(self, values: Mapping[str, object], where: str, prefix: str = "") -> None:
        self.values = values
        self.where = where
        self.prefix = prefix

    def with_defaults(self, defaults: Mapping[str, object]) -> Settings:
        """The same with values for keys that are not there at all; a null stays a null."""
        return Settings({**defaults, **self.values}, self.where, self.prefix)

    def raw(self, key: str) -> object | None:
        return self.values.get(self.prefix + key)

    def error(self, key: str, problem: str) -> ModelError:
        return ModelError(f"{self.where}: {self.prefix + key} {problem}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.raw(key)
        if value is None:
            if default is None:
                raise self.error(key, "is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"is {_shown(value)}, an integer is needed")
        return value

    def count(self, key: str, default: int | None = None, *, at_most: int = 2**31 - 1) -> int:
        """An integer of at least 1."""
        value = self.integer(key, default)
        if not 1 <= value <= at_most:
            raise self.error(key, f"is {value}, it must be from 1 to {at_most}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.number(key, default)
        if not 0 < value < math.inf:
            raise self.error(key, f"is {value}, it must be above 0")
        return value

    def optional_count(self, key: str) -> int | None:
        return None if self.raw(key) is None else self.count(key)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.raw(key)
        if value is None:
            if default is None:
                raise self.error(key, "is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"is {_shown(value)}, a number is needed")
        return float(value)

    def optional_positive(self, key: str) -> float | None:
        return None if self.raw(key) is None else self.positive(key)

    def text(self, key: str, default: str | None = None) -> str:
        value = self.raw(key)
        if value is None:
            if default is None:
                raise self.error(key, "is missing")
            return default
        if not isinstance(value, str):
            raise self.error(key, f"is {_shown(value)}, a string is needed")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"is {_shown(value)}, true or false is needed")
        return value

    def section(self, key: str) -> Settings | None:
        """A nested object; None if absent."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, f"is {_shown(value)}, an object is needed")
        return Settings(value, f"{self.where}: {self.prefix + key}")

    def refuse_unless(self, key: str, allowed: tuple[object, ...], what: str) -> None:
        """ModelError if the key is present with a value that would change the arithmetic in a way not built here."""
        value = self.raw(key)
        if value is not None and not (isinstance(value, bool | int | float | str) and value in allowed):
            raise self.error(key, f"is {_shown(value)}: {what} is not supported")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
