"""Where in a conversation a token or a character of the rendered prompt comes from."""

from __future__ import annotations

import re
import uuid
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from headwater.errors import BadRequest
from headwater.text.common import common_length
from headwater.text.messages import plain_messages
from headwater.text.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]

MESSAGE, TEMPLATE = "message", "template"

HEAD_CHARS = 48
"""So much of the template's text on either side of a content must be there for the content to be recognised."""


def token_spans(tokenizer: Tokenizer, text: str, token_ids: Sequence[int]) -> list[Span]:
    """For each token the characters of ``text`` that it covers, [first, end).

    A token that is part of a character gets that whole character, and so do its other parts; one that stands for
    nothing in the text (a BOS that was added) gets an empty span. ``token_ids`` must be an encoding of ``text``, with
    or without what the model wants around it; otherwise ValueError.
    """
    pieces = [tokenizer.token_bytes(token) for token in token_ids]
    first, end = _within(tokenizer, text.encode("utf-8", "surrogatepass"), token_ids, pieces)
    if end is not None:
        return [(0, 0)] * first + _byte_spans(text, pieces[first:end]) + [(len(text), len(text))] * (len(pieces) - end)
    return _library_spans(tokenizer, text, list(token_ids))


def token_start(tokenizer: Tokenizer, text: str, token_ids: Sequence[int], at: int) -> int:
    """The first character that token number ``at`` covers: `token_spans` of that one token, in a tenth of the time."""
    pieces = [tokenizer.token_bytes(token) for token in token_ids]
    data = text.encode("utf-8", "surrogatepass")
    first, end = _within(tokenizer, data, token_ids, pieces)
    if end is None:
        return _library_spans(tokenizer, text, list(token_ids))[at][0]
    n_bytes = sum(map(len, pieces[first : min(at, end)]))
    return len(data[:n_bytes].decode("utf-8", "ignore"))  # without the character that the token lies inside of


def _within(
    tokenizer: Tokenizer, data: bytes, token_ids: Sequence[int], pieces: Sequence[bytes]
) -> tuple[int, int | None]:
    """The tokens whose bytes are ``data``, [first, end); the end is None where there are no such tokens."""
    around = len(tokenizer.prefix_ids)
    starts = [0, around] if around and tuple(token_ids[:around]) == tokenizer.prefix_ids else [0]
    for first in starts:
        for end in (len(pieces), len(pieces) - tokenizer.n_suffix_ids):
            if first <= end and b"".join(pieces[first:end]) == data:
                return first, end
    return 0, None


def _byte_spans(text: str, pieces: Sequence[bytes]) -> list[Span]:
    # byte:   0   1   2   3   4          "a", U+00E9 (2 bytes), "b"
    # starts: 0   1       3   4(end)     starts[c] is the first byte of character c
    # a token of bytes [2, 4) covers the characters of bytes 2 and 3: [1, 3)
    if text.isascii():
        ends = list(accumulate(map(len, pieces)))
        return list(zip([0, *ends], ends, strict=False))
    starts = list(accumulate((len(char.encode("utf-8", "surrogatepass")) for char in text), initial=0))
    spans = []
    at = 0
    for piece in pieces:
        first = bisect_right(starts, at) - 1
        at += len(piece)
        spans.append((first, bisect_right(starts, at - 1)) if piece else (first, first))
    return spans


def _library_spans(tokenizer: Tokenizer, text: str, token_ids: list[int]) -> list[Span]:
    """As the tokenizer's library tells them, where the tokens' bytes are not those of the text: it was normalised, a
    space was put before it, or a character is unknown."""
    for parse_special in (True, False):
        ids, spans = tokenizer.encode_spans(text, parse_special=parse_special)
        for first in {0, len(tokenizer.prefix_ids)}:
            if token_ids[first : first + len(ids)] == ids and len(token_ids) - first - len(ids) in (
                0,
                tokenizer.n_suffix_ids,
            ):
                after = len(token_ids) - first - len(ids)
                return [(0, 0)] * first + _without_gaps(text, spans) + [(len(text), len(text))] * after
    raise ValueError("the tokens are no encoding of this text by this tokenizer")


def _without_gaps(text: str, spans: Sequence[Span]) -> list[Span]:
    """No character is left out: spaces that the library trims off a token's span are that token's, and what a
    normaliser has merged into the character before belongs to the tokens of that one.

    e  U+0301  _  t  h  e        the library:  [0, 1) [0, 1) [3, 6)
    0  1       2  3  4  5                      [0, 2) [0, 2) [2, 6)
    """
    closed: list[Span] = []
    covered = n_settled = 0
    for first, end in [*spans, (len(text), len(text))]:
        if first > covered:
            gap = text[covered:first]
            merged = covered + len(gap.rstrip()) if closed else covered
            while len(closed) > n_settled and closed[n_settled][1] != covered:
                n_settled += 1
            closed[n_settled:] = [(begin, merged) for begin, _ in closed[n_settled:]]
            first = merged
        closed.append((first, max(first, end)))
        covered = max(covered, end)
    return closed[:-1]


# ---- messages ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """Where a character of the rendered text comes from.

    In a message, ``part`` is "message" and ``character`` the index in its content (several text parts joined by line
    breaks). Else ``part`` is "template", ``message`` and ``role`` are None and ``character`` is the index in the
    rendered text.
    """

    message: int | None
    role: str | None
    character: int
    part: str


@dataclass(frozen=True, slots=True)
class Piece:
    """A message's content, or a part of it, in the rendered text: [first, end), from ``offset`` in the content."""

    message: int
    role: str
    first: int
    end: int
    offset: int


def locate(
    rendered: str, messages: Messages, character: int, *, render: Callable[[Messages], str] | None = None
) -> Place:
    """Which message, and where in its content, the character of that index in ``rendered`` belongs to.

    The end of the text is a place, too. With ``render``, which renders other messages the same way, the answer
    holds for contents that look like the template's own text; without it, contents are looked for in their order.
    """
    if not 0 <= character <= len(rendered):
        raise ValueError(f"character {character} of a text of {len(rendered)}")
    return place_in(pieces_of(rendered, messages, render=render), character)


def place_in(pieces: Sequence[Piece], character: int) -> Place:
    """`locate`, for many characters of one text."""
    for piece in pieces:
        if piece.first <= character < piece.end:
            return Place(piece.message, piece.role, piece.offset + character - piece.first, MESSAGE)
    return Place(None, None, character, TEMPLATE)


def pieces_of(rendered: str, messages: Messages, *, render: Callable[[Messages], str] | None = None) -> list[Piece]:
    """Where the messages' contents are in the rendered text, in its order; what the template left out is not there."""
    plain = plain_messages(messages)
    skeleton = None if render is None else _skeleton(messages, render)
    if skeleton is None:
        return _by_order(rendered, plain)
    return _by_skeleton(rendered, plain, skeleton)


@dataclass(frozen=True, slots=True)
class _Skeleton:
    """The template's own text: before each message whose content it writes (by index), and after the last one."""

    before: list[tuple[int, str]]
    after: str

    def following(self, n: int) -> str:
        """The text behind the n-th content that is written."""
        return self.before[n + 1][1] if n + 1 < len(self.before) else self.after


def _skeleton(messages: Messages, render: Callable[[Messages], str]) -> _Skeleton | None:
    """None where the template does not write contents in order, at most once (it may refuse other contents, too)."""
    run = uuid.uuid4().hex
    marked = [{**message, "content": f"q{run}n{i}q"} for i, message in enumerate(messages)]
    try:
        text = render(marked)
    except BadRequest:
        return None
    before: list[tuple[int, str]] = []
    at, last = 0, -1
    for mark in re.finditer(f"q{run}n([0-9]+)q", text):  # in one pass: there may be thousands
        message = int(mark[1])
        if message <= last:
            return None
        before.append((message, text[at : mark.start()]))
        at, last = mark.end(), message
    return _Skeleton(before, text[at:])


def _by_skeleton(rendered: str, plain: Sequence[Mapping[str, Any]], skeleton: _Skeleton) -> list[Piece]:
    pieces: list[Piece] = []
    at = 0
    for n, (i, before) in enumerate(skeleton.before):
        start = _after(rendered, before, at)
        if start is None:
            return _by_order(rendered, plain)
        content: str = plain[i]["content"]
        end = _end_of(rendered, content, start, skeleton.following(n))
        pieces += _shown(rendered, content, start, end, i, plain[i]["role"])
        at = end
    return pieces


def _after(rendered: str, before: str, at: int) -> int | None:
    """Where the content begins that follows the template's text ``before``. That text may be another than for
    a marked content (a date, a thought that it leaves open): then its last characters decide."""
    if rendered.startswith(before, at):
        return at + len(before)
    tail = before[-HEAD_CHARS:]
    while tail:
        found = rendered.find(tail, at)
        if found >= 0:
            return found + len(tail)
        tail = tail[tail.find("\n", 0, -1) + 1 :] if "\n" in tail[:-1] else ""
    return None


def _end_of(rendered: str, content: str, start: int, following: str) -> int:
    head = following[:HEAD_CHARS]
    for shown in (content, content.strip(), content.lstrip(), content.rstrip()):
        end = start + len(shown)
        if rendered.startswith(shown, start) and rendered.startswith(head, end):
            return end
    found = rendered.find(head, start) if head else len(rendered)
    return found if found >= 0 else len(rendered)


def _shown(rendered: str, content: str, start: int, end: int, message: int, role: str) -> list[Piece]:
    """The pieces of ``content`` in [start, end): all of it, or what a template that rewrites has left."""
    text = rendered[start:end]
    if not text:
        return []
    offset = content.rfind(text)  # the last one: what is cut off is a thought before the answer, or spaces
    if text == content or offset >= 0:
        return [Piece(message, role, start, end, max(offset, 0))]
    same = common_length(text, content)
    pieces = [Piece(message, role, start, start + same, 0)] if same else []
    tail = common_length(text[same:][::-1], content[same:][::-1])
    if tail:
        pieces.append(Piece(message, role, end - tail, end, len(content) - tail))
    return pieces


def _by_order(rendered: str, plain: Sequence[Mapping[str, Any]]) -> list[Piece]:
    """Without knowing the template: each content after the one before, behind its role's name if that is written."""
    pieces: list[Piece] = []
    at = 0
    for i, message in enumerate(plain):
        found = _find(rendered, message, at)
        if found is None:
            continue
        later = _find(rendered, plain[i + 1], at) if i + 1 < len(plain) else None
        if later is not None and later[0] <= found[0]:
            header = rendered[at : later[0]].lower()
            if message["role"].lower() not in header and plain[i + 1]["role"].lower() in header:
                continue  # left out by the template: what was found is an equal text further on
        start, end, offset = found
        pieces.append(Piece(i, message["role"], start, end, offset))
        at = end
    return pieces


def _find(rendered: str, message: Mapping[str, Any], at: int) -> tuple[int, int, int] | None:
    """The first place from ``at`` on where the content is: its beginning, its end, and where in the content that is."""
    content: str = message["content"]
    answer = content.rpartition("</think>")[2]
    header = rendered.lower().find(message["role"].lower(), at)
    for shown in (content, content.strip(), answer, answer.strip()):
        if not shown:
            continue
        starts = [header + len(message["role"]), at] if header >= 0 else [at]
        for start in starts:
            found = rendered.find(shown, start)
            if found >= 0:
                return found, found + len(shown), content.rfind(shown)
    return None
