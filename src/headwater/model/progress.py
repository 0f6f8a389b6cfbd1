"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Called with (what is being done, fraction done 0..1)."""


def silent(what: str, fraction: float) -> None:
    """A Progress that tells nobody."""
