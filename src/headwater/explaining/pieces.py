"""Losses by pieces that change by themselves, and by tools that are written in changing ways."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

from headwater.explaining.findings import Kind
from headwater.explaining.loss import Loss, example
from headwater.explaining.same import canonical, exact
from headwater.explaining.seen import Seen
from headwater.explaining.volatile import Atom, Volatile
from headwater.text.common import common_length
from headwater.text.locate import TEMPLATE, Place

MIN_TOKENS = 16
"""A smaller loss behind a piece is not worth moving it."""
MIN_RUN_TOKENS = 64
"""So many equal tokens must follow a piece in what a user wrote, without another piece that differs: numbers and dates
in questions and documents are what the request is about. Or behind a piece in a system prompt that differs in words,
too: it may hold documents."""
CONTEXT_CHARS = 160

Pair = tuple[Atom, Atom]


def piece_losses(seen: Seen, other: Seen, n_common: int, n_shared: int, n_told: int) -> list[Loss]:
    """What ``seen`` lost to pieces that differ from those of ``other``.

    ``n_common`` is how many characters of their masked texts are the same, ``n_shared`` how many tokens ``seen``
    shares with whichever request is best. Pieces that end within the first ``n_told`` tokens are no reason.
    """
    end = seen.masked.source_index(n_common)
    potential = seen.settled.tokens_before(end)
    if potential - n_shared < MIN_TOKENS:
        return []
    pairs = list(_different(seen, other, n_common))
    starts = [seen.settled.tokens_before(ours.first) for ours, _ in pairs] + [potential]
    losses = []
    for i, pair in enumerate(pairs):
        ours = pair[0]
        behind = seen.settled.tokens_before(ours.end)
        if behind < n_told:
            continue
        n_lost = potential - max(behind, n_shared)
        place = seen.settled_place(ours.first)
        if _is_worth_it(seen, place, end, n_lost, starts[i + 1] - max(behind, n_shared)):
            losses.append(_piece_loss(seen, other, pair, place, n_lost))
    return losses


def _is_worth_it(seen: Seen, place: Place, end: int, n_lost: int, n_run: int) -> bool:
    """Whether a piece at ``place`` is a breaker: the texts are the same up to character ``end``, but for pieces;
    ``n_run`` of the lost tokens lie before the next piece that differs.

        system prompt |----- piece ------------------| user
        the same      |-----   -------------------------->      16 tokens of the system prompt, or 64 in all
        the same      |-----   --------->                       documents differ there: 64
    """
    if not seen.is_instruction(place):
        return n_run >= MIN_RUN_TOKENS
    n_behind = seen.settled.tokens_before(end) - seen.settled.tokens_before(seen.instructions_end)
    return n_lost >= MIN_RUN_TOKENS or (n_behind >= 0 and n_lost - n_behind >= MIN_TOKENS)


def _different(seen: Seen, other: Seen, n_common: int) -> Iterator[Pair]:
    """The pieces of both, sign by sign, whose texts are not the same."""
    theirs = {atom.at: atom for atom in other.masked.atoms}
    for atom in seen.masked.atoms:
        if atom.at + atom.width > n_common:
            return
        match = theirs.get(atom.at)
        if match is not None and seen.masked.slice(atom) != other.masked.slice(match):
            yield atom, match


def _piece_loss(seen: Seen, other: Seen, pair: Pair, place: Place, n_lost: int) -> Loss:
    ours, theirs = pair
    kind = _kind(seen, other, pair)
    context = seen.masked.text[max(0, ours.at - CONTEXT_CHARS) : ours.at]
    first, second = ours.first, theirs.first
    if ours.kind is Volatile.JSON:
        same = common_length(seen.masked.slice(ours), other.masked.slice(theirs))
        place = seen.settled_place(first + same)
        first, second = first + same, second + same
    shown = example(
        seen,
        other,
        place,
        (seen.masked.source, first, ours.end),
        (other.masked.source, second, theirs.end),
    )
    return Loss(kind, f"{place.role}:{context}", "", n_lost, shown, context)


def _kind(seen: Seen, other: Seen, pair: Pair) -> Kind:
    kinds = {atom.kind for atom in pair}
    if Volatile.JSON in kinds:
        return _json_kind(seen.masked.slice(pair[0]), other.masked.slice(pair[1]))
    if Volatile.TIME in kinds:
        return Kind.TIME
    return Kind.ID if Volatile.ID in kinds else Kind.COUNTER


def _json_kind(ours: str, theirs: str) -> Kind:
    """JSON that is masked as a whole may differ in how it is written, or in a value that changes by itself."""
    first, second = json.loads(ours), json.loads(theirs)
    if canonical(first) == canonical(second):
        return Kind.JSON
    values = _values(first), _values(second)
    for left, right in zip(*values, strict=False):
        if left != right:
            numbers = all(isinstance(value, int | float) or str(value).isdigit() for value in (left, right))
            if numbers:
                return Kind.COUNTER
            return Kind.TIME if any(mark in str(left) for mark in (":", "/", "-")) and _has_year(left) else Kind.ID
    return Kind.JSON


def _has_year(value: object) -> bool:
    text = str(value)
    return ":" in text or any(text[i : i + 2] in ("19", "20") and text[i : i + 4].isdigit() for i in range(len(text)))


def _values(value: object) -> list[object]:
    """The values in a JSON value, in the order of sorted keys."""
    if isinstance(value, dict):
        return [one for key in sorted(value) for one in _values(value[key])]
    if isinstance(value, list):
        return [one for item in value for one in _values(item)]
    return [value]


def tool_losses(seen: Seen, other: Seen, n_common: int, n_shared: int) -> list[Loss]:
    """What ``seen`` lost because its tools, the same as those of ``other``, are written otherwise."""
    if seen.exact_tools == other.exact_tools or (seen.settled is seen.plain and other.settled is other.plain):
        return []  # the same, or the template does not write them
    ours, theirs = [canonical(tool) for tool in seen.tools], [canonical(tool) for tool in other.tools]
    if Counter(ours) != Counter(theirs):
        return []
    potential = seen.settled.tokens_before(seen.masked.source_index(n_common))
    first = common_length(seen.plain.text, other.plain.text)
    n_lost = potential - max(n_shared, seen.plain.tokens_before(first))
    if n_lost < MIN_TOKENS:
        return []
    place = Place(None, None, first, TEMPLATE)
    shown = example(seen, other, place, (seen.plain.text, first, first), (other.plain.text, first, first))
    group = canonical(sorted(ours))
    losses = []
    if ours != theirs:
        at = next(i for i, (left, right) in enumerate(zip(ours, theirs, strict=True)) if left != right)
        losses.append(Loss(Kind.TOOL_ORDER, group, f"first at tools[{at}]", n_lost, shown))
    if Counter(map(exact, seen.tools)) != Counter(map(exact, other.tools)):
        losses.append(Loss(Kind.TOOL_KEYS, group, "", n_lost, shown))
    return losses
