"""Tokens that one request did not share, and the breaker that is to blame."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.explaining.findings import Example, Kind
from headwater.explaining.seen import Seen
from headwater.text.locate import Place

SHOWN_CHARS = 32


@dataclass(frozen=True, slots=True)
class Loss:
    """``group`` is the same for losses by one breaker; ``context`` as in `Finding`."""

    kind: Kind
    group: str
    detail: str
    n_tokens: int
    example: Example
    context: str | None = None


def example(seen: Seen, other: Seen, place: Place, ours: tuple[str, int, int], theirs: tuple[str, int, int]) -> Example:
    """``ours`` and ``theirs``: a text and the piece [first, end) of it that differs. Long pieces are cut, short ones
    are shown with what follows."""
    text, first, _ = ours
    return Example(
        where=str(seen.line),
        other=str(other.line),
        message=place.message,
        role=place.role,
        character=place.character,
        before=text[max(0, first - SHOWN_CHARS) : first],
        ours=_shown(*ours),
        theirs=_shown(*theirs),
    )


def _shown(text: str, first: int, end: int) -> str:
    return text[first : min(max(end, first + SHOWN_CHARS // 2), first + 2 * SHOWN_CHARS)]
