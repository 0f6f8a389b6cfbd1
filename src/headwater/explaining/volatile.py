"""Pieces of text that change by themselves: times, ids, numbers, and how JSON is written.

``Masker`` puts one sign in place of each, so that texts that differ in such pieces only become equal.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from headwater.explaining.same import canonical

SIGN = "\ue000"
JSON_SIGN = "\ue001"
"""Private characters of Unicode: no text means them."""

MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sep(?:t(?:ember)?)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)\.?"
)
DAY = r"(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day|(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)(?=,?\.? (?:\d|" + MONTH + r"))"
NTH = r"\d{1,2}(?:st|nd|rd|th)?"
ZONE = r"(?: ?(?:Z\b|UTC|GMT|CES?T|[ECMP][SD]T|[+-]\d{2}:?\d{2}))?"
CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?: ?[AaPp]\.?[Mm]\b\.?)?" + ZONE
TIMES = (
    r"\b\d{4}[-/.]\d{1,2}[-/.]\d{1,2}(?:[T ,]{1,2}" + CLOCK + r")?",
    r"\b" + CLOCK,
    r"\b\d{1,2} ?[AaPp][Mm]\b",
    r"\b\d{1,2}[./-]\d{1,2}[./-]\d{2,4}\b",
    r"\b" + NTH + r" (?:of )?" + MONTH + r"(?:,? \d{4})?\b",
    r"\b" + MONTH + r" " + NTH + r"\b(?:,? \d{4}\b)?",
    r"\b" + MONTH + r" \d{4}\b",
    r"\b(?:" + DAY + r")",
    r"\b1[5-9]\d{8}(?:\d{9}|\d{6}|\d{3})?(?:\.\d+)?\b",
    r"\b(?:19|20)\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])(?:[T_-]?\d{4}(?:\d\d)?Z?)?\b",
    r"(?<!\d)\d{4} ?[\u5e74\ub144] ?\d{1,2} ?[\u6708\uc6d4](?: ?\d{1,2} ?[\u65e5\uc77c])?",
)
"""The last one is a date in Chinese, Japanese or Korean."""
NAMED_ID = (
    r"(?i:(?:session|request|req|trace|span|conversation|chat|thread|correlation|run|build|user|tenant|account|order|"
    r"ticket|job|task|message)[ _-]?(?:id|key|token|no\.|number)|nonce|uuid|guid|checksum|sha256|md5)[\"']?"
    r"(?: ?[:=#] ?| is )[\"']?(?P<named>[^\s\"',;<>|)\]}]{3,})"
)
SHORT_ID = (
    r"(?i:session|request|trace|span|conversation|thread|correlation|run|build|ticket|job)[\"']?"
    r" ?[:=#] ?[\"']?(?P<short>(?=[a-z_-]{0,32}\d)(?=\d{0,32}[A-Za-z])[A-Za-z0-9_-]{4,32})\b"
)
"""Short ones need a name before them, and a letter and a digit."""
IDS = (
    r"\b[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}\b",
    r"\b(?:0x)?[0-9a-f]{8,}\b(?<!\d{8})|\b[0-9A-F]{8,}\b(?=.)(?<=[A-F\d])",
    r"\b(?=[A-Za-z_-]{0,64}\d)(?=[\d_-]{0,64}[A-Za-z])[A-Za-z0-9](?:[A-Za-z0-9_-]{6,254}[A-Za-z0-9])=*",
)
NUMBER = r"\d+(?:[.,]\d+)*"

PIECES = re.compile(f"{NAMED_ID}|{SHORT_ID}|(?P<time>{'|'.join(TIMES)})|(?P<id>{'|'.join(IDS)})|(?P<number>{NUMBER})")
WORTH_A_LOOK = re.compile(r"\d|day\b|[0-9a-fA-F]{8}|(?i:id|key|token|number|nonce|uuid|guid|checksum)[\"' ]{0,2}[:=#i]")
JOINS_TIMES = re.compile(r"[\s,|(-]{0,3}(?:at|of|@|T)?[\s,|(-]{0,3}")
JSON_START = re.compile(r"[{\[]")
MIN_JSON_CHARS = 16
MAX_JSON_DEPTH = 64
MAX_JSON_STARTS = 256
"""Places in one message where JSON is tried; code has many brackets that begin none."""


class Volatile(str, Enum):
    """What kind of piece it is."""

    TIME = "time"
    ID = "id"
    NUMBER = "number"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class Atom:
    """A piece [first, end) of a text; ``at`` is where its sign stands in the masked text, ``width`` its length."""

    at: int
    width: int
    first: int
    end: int
    kind: Volatile


@dataclass(frozen=True)
class Masked:
    """A text with its pieces masked."""

    source: str
    text: str
    atoms: tuple[Atom, ...]

    def source_index(self, at: int) -> int:
        """The character of the source that stands at ``at``; inside a masked piece, that piece's first."""
        before = bisect_right(self.atoms, at, key=lambda atom: atom.at) - 1
        if before < 0:
            return at
        atom = self.atoms[before]
        past = at - (atom.at + atom.width)
        return atom.first if past < 0 else atom.end + past

    def slice(self, atom: Atom) -> str:
        return self.source[atom.first : atom.end]


class Masker:
    """Masks texts; lines that come again are looked up."""

    def __init__(self) -> None:
        self._lines: dict[str, list[tuple[int, int, Volatile]]] = {}
        self._json: dict[str, list[tuple[str, str]]] = {}

    def mask(self, source: str, contents: Sequence[str] = ()) -> Masked:
        """``contents`` are the texts in it that may hold JSON."""
        parts: list[str] = []
        atoms: list[Atom] = []
        at = done = 0
        for raw, written in [found for content in contents for found in self._json_in(content)]:
            found = source.find(raw, done)
            if found < 0:
                continue  # the template has rewritten it
            at = self._plain(source, done, found, at, parts, atoms)
            sign = JSON_SIGN + self.mask_line(written) + JSON_SIGN
            atoms.append(Atom(at, len(sign), found, found + len(raw), Volatile.JSON))
            parts.append(sign)
            at += len(sign)
            done = found + len(raw)
        self._plain(source, done, len(source), at, parts, atoms)
        return Masked(source, "".join(parts), tuple(atoms))

    def mask_line(self, text: str) -> str:
        """The masked text alone; JSON in it is not looked for."""
        parts: list[str] = []
        self._plain(text, 0, len(text), 0, parts, [])
        return "".join(parts)

    def _plain(self, source: str, first: int, end: int, at: int, parts: list[str], atoms: list[Atom]) -> int:
        """Mask [first, end), which has no JSON; returns where the masked text then ends."""
        for line in source[first:end].splitlines(keepends=True):
            done = 0
            for start, stop, kind in self._pieces(line):
                parts.append(line[done:start])
                at += start - done
                atoms.append(Atom(at, 1, first + start, first + stop, kind))
                parts.append(SIGN)
                at += 1
                done = stop
            parts.append(line[done:])
            at += len(line) - done
            first += len(line)
        return at

    def _pieces(self, line: str) -> list[tuple[int, int, Volatile]]:
        found = self._lines.get(line)
        if found is None:
            found = self._lines[line] = _find_pieces(line) if WORTH_A_LOOK.search(line) else []
        return found

    def _json_in(self, content: str) -> list[tuple[str, str]]:
        found = self._json.get(content)
        if found is None:
            found = self._json[content] = _find_json(content)
        return found


def _find_pieces(line: str) -> list[tuple[int, int, Volatile]]:
    found: list[tuple[int, int, Volatile]] = []
    for match in PIECES.finditer(line):
        name = match.lastgroup or "number"
        first, end = match.span(name)
        kind = Volatile.ID if name in ("named", "short") else Volatile(name)
        if found and kind is Volatile.TIME is found[-1][2] and JOINS_TIMES.fullmatch(line, found[-1][1], first):
            found[-1] = (found[-1][0], end, kind)  # "Monday, " and "June 3" are one date
        else:
            found.append((first, end, kind))
    return found


def _find_json(content: str) -> list[tuple[str, str]]:
    """The objects and lists that a text holds, the outermost ones: as they are written there, and in canonical form."""
    decoder = json.JSONDecoder()
    found: list[tuple[str, str]] = []
    at = n_tried = 0
    while n_tried < MAX_JSON_STARTS and (start := JSON_START.search(content, at)) is not None:
        n_tried += 1
        first = start.start()
        try:
            value, end = decoder.raw_decode(content, first)
        except (ValueError, RecursionError):
            at = first + 1
            continue
        if end - first >= MIN_JSON_CHARS and _is_shallow(value) and _is_worth_it(value):
            found.append((content[first:end], canonical(value)))
        at = end
    return found


def _is_shallow(value: object, depth: int = 0) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return True
    return depth < MAX_JSON_DEPTH and all(_is_shallow(inner, depth + 1) for inner in value)


def _is_worth_it(value: object) -> bool:
    """Whether it could be written in more than one way that matters."""
    return bool(value) and (isinstance(value, dict) or (isinstance(value, list) and any(map(_is_worth_it, value))))
