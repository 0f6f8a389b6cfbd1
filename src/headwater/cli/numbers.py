"""Numbers on the command line, with their limits."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

Number = TypeVar("Number", int, float)


def whole(minimum: float, maximum: float) -> Callable[[str], int]:
    """For an option's ``type``: a whole number within limits."""
    return _within(int, "whole number", minimum, maximum)


def number(minimum: float, maximum: float) -> Callable[[str], float]:
    """For an option's ``type``: a number within limits."""
    return _within(float, "number", minimum, maximum)


def _within(kind: Callable[[str], Number], called: str, minimum: float, maximum: float) -> Callable[[str], Number]:
    def number(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no {called}") from None
        if not value >= minimum:  # NaN is no number
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, got {value}")
        if value > maximum:
            raise argparse.ArgumentTypeError(f"must be at most {maximum}, got {value!r:.40}")
        return value

    return number


def each(one: Callable[[str], int]) -> Callable[[str], tuple[int, ...]]:
    """For an option's ``type``: several numbers with commas between them, no two alike, in ascending order."""

    def several(text: str) -> tuple[int, ...]:
        values = [one(part.strip()) for part in text.split(",")]
        if len(set(values)) != len(values):
            raise argparse.ArgumentTypeError(f"{text!r} has a number twice")
        return tuple(sorted(values))

    return several


def choices(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """For an option's ``type``: some of ``known``, with commas between them."""

    def several(text: str) -> tuple[str, ...]:
        given = [part.strip() for part in text.split(",")]
        for part in given:
            if part not in known:
                raise argparse.ArgumentTypeError(f"{part!r} is none of {', '.join(known)}")
        return tuple(word for word in known if word in given)

    return several
