"""The first difference of two prompts: where it is, and what makes it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from headwater.explaining.cause import Cause, Origin, find_origin
from headwater.explaining.prompt import CheckText, Prompt, any_length, read_prompt
from headwater.explaining.same import common_tokens
from headwater.text.common import common_length
from headwater.text.locate import MESSAGE, Place, Span
from headwater.text.tokenizer import Tokenizer

SHOWN_CHARS = 40
"""So much of the text is shown on each side of a difference."""


class Relation(str, Enum):
    """How the tokens of two prompts relate."""

    EQUAL = "equal"
    FIRST_IS_PREFIX = "first_is_prefix"
    SECOND_IS_PREFIX = "second_is_prefix"
    DIFFER = "differ"


@dataclass(frozen=True, slots=True)
class TokenAt:
    index: int
    token_id: int
    text: str


@dataclass(frozen=True, slots=True)
class Side:
    """Where one of the prompts differs first. ``character`` counts in the message's content (or the completion's
    prompt) if ``part`` is "message", else it is None; ``text_character`` counts in the whole rendered text."""

    n_tokens: int
    message: int | None
    role: str | None
    field: str | None
    character: int | None
    part: str
    text_character: int
    token: TokenAt | None
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """``cause`` is None if one prompt begins the other; the sides are None, too, if they are equal. ``namespaces``
    says why even equal tokens would not be shared, "" if they would."""

    relation: Relation
    cause: Cause | None
    sentence: str
    block_size: int
    n_shared_tokens: int
    n_shared_chars: int
    first: Side | None
    second: Side | None
    namespaces: str

    @property
    def n_shared_blocks(self) -> int:
        return self.n_shared_tokens // self.block_size


def compare_bodies(
    first: Any, second: Any, tokenizer: Tokenizer, *, block_size: int, check_text: CheckText = any_length
) -> Comparison:
    """Compare the prompts of two request bodies. Raises BadRequest, naming the field as "first..." or "second..."."""
    one = read_prompt(first, tokenizer, where="first", check_text=check_text)
    two = read_prompt(second, tokenizer, where="second", check_text=check_text)
    return compare(one, two, tokenizer, block_size=block_size)


def compare(one: Prompt, two: Prompt, tokenizer: Tokenizer, *, block_size: int) -> Comparison:
    n_shared = common_tokens(one.token_ids, two.token_ids)
    n_chars = common_length(one.text, two.text)
    relation = _relation(one, two, n_shared)
    namespaces = _namespaces(one, two)
    if relation is Relation.EQUAL:
        said = f"The prompts are equal: {n_shared} tokens."
        return Comparison(relation, None, said, block_size, n_shared, n_chars, None, None, namespaces)
    if relation is not Relation.DIFFER:
        sides = _sides(one, two, n_chars, None, n_shared, tokenizer)
        said = _prefix_sentence(relation, sides, n_shared)
        return Comparison(relation, None, said, block_size, n_shared, n_chars, *sides, namespaces)
    ours, theirs = one.spans(tokenizer)[n_shared], two.spans(tokenizer)[n_shared]
    if _merged(one, two, ours, theirs, n_chars):
        at, origin = min(ours[0], theirs[0]), Origin(Cause.TOKENIZER, None, "")
    else:
        at, origin = n_chars, find_origin(one, two, n_chars)
    sides = _sides(one, two, at, origin.field, n_shared, tokenizer)
    said = _sentence(origin, sides, n_shared)
    return Comparison(relation, origin.cause, said, block_size, n_shared, n_chars, *sides, namespaces)


def _relation(one: Prompt, two: Prompt, n_shared: int) -> Relation:
    ends = (n_shared == len(one.token_ids), n_shared == len(two.token_ids))
    return {
        (True, True): Relation.EQUAL,
        (True, False): Relation.FIRST_IS_PREFIX,
        (False, True): Relation.SECOND_IS_PREFIX,
        (False, False): Relation.DIFFER,
    }[ends]


def _namespaces(one: Prompt, two: Prompt) -> str:
    """The salts themselves are never told."""
    if one.body.get("cache_salt") != two.body.get("cache_salt"):
        return "The requests have different cache_salt: they share no block, however equal their tokens are."
    if one.body.get("model") != two.body.get("model"):
        return "The requests name different models; both are compared as prompts of this one."
    return ""


def _merged(one: Prompt, two: Prompt, ours: Span, theirs: Span, n_chars: int) -> bool:
    """Do the first tokens that differ, of spans ``ours`` and ``theirs``, part where the texts do not yet?

    text     |---- n_chars the same ----|
    one      ....[ ours ][       ]              it ends before the texts part: two has merged it with what follows
    two      ....[ theirs      ]
    """
    return min(ours[1], theirs[1]) < n_chars or n_chars == min(len(one.text), len(two.text))


# ---- sides ------------------------------------------------------------------------------------------


def _sides(
    one: Prompt, two: Prompt, at: int, field: str | None, n_shared: int, tokenizer: Tokenizer
) -> tuple[Side, Side]:
    places = _places(one, two, at)
    made = [
        _side(prompt, place, at, field, n_shared, tokenizer) for prompt, place in zip((one, two), places, strict=True)
    ]
    return made[0], made[1]


def _places(one: Prompt, two: Prompt, at: int) -> tuple[Place, Place]:
    """Where the character is in each; a content that ends where the other's goes on differs at its end."""
    first, second = one.place(at), two.place(at)
    if first.part == MESSAGE and second.part != MESSAGE:
        second = _end_place(two, at) or second
    elif second.part == MESSAGE and first.part != MESSAGE:
        first = _end_place(one, at) or first
    return first, second


def _end_place(prompt: Prompt, at: int) -> Place | None:
    for piece in prompt.pieces:
        if piece.end == at:
            return Place(piece.message, piece.role, piece.offset + piece.end - piece.first, MESSAGE)
    return None


def _side(prompt: Prompt, place: Place, at: int, field: str | None, n_shared: int, tokenizer: Tokenizer) -> Side:
    token = None
    if n_shared < len(prompt.token_ids):
        token_id = prompt.token_ids[n_shared]
        token = TokenAt(n_shared, token_id, tokenizer.token_bytes(token_id).decode("utf-8", errors="replace"))
    if place.part == MESSAGE:
        field = "prompt" if place.message is None else f"messages[{place.message}].content"
    return Side(
        n_tokens=len(prompt.token_ids),
        message=place.message,
        role=place.role,
        field=field,
        character=place.character if place.part == MESSAGE else None,
        part=place.part,
        text_character=at,
        token=token,
        before=prompt.text[max(0, at - SHOWN_CHARS) : at],
        after=prompt.text[at : at + SHOWN_CHARS],
    )


def _prefix_sentence(relation: Relation, sides: tuple[Side, Side], n_shared: int) -> str:
    short, long, side = "first", "second", sides[1]
    if relation is Relation.SECOND_IS_PREFIX:
        short, long, side = "second", "first", sides[0]
    return f"All {n_shared} tokens of the {short} prompt begin the {long} one, which goes on{_where(side)}."


def _sentence(origin: Origin, sides: tuple[Side, Side], n_shared: int) -> str:
    where = _where(sides[0]) if sides[0].part == MESSAGE else _where(sides[1])
    told = {
        Cause.TEXT: "The text differs",
        Cause.TEMPLATE: "The chat template writes different text",
        Cause.TOOL_ORDER: "The same tools are listed in another order",
        Cause.TOOL_KEYS: "The same tools have their JSON keys in another order",
        Cause.TOKENIZER: "The text is the same, but the tokenizer merges it differently with what follows",
    }[origin.cause]
    detail = f": {origin.detail}" if origin.detail else ""
    return f"{told}{where} (token {n_shared}){detail}."


def _where(side: Side) -> str:
    if side.message is not None:
        return f" in message {side.message} ({side.role}), character {side.character}"
    if side.field == "prompt":
        return f" in the prompt, character {side.character}"
    return f" at {side.field}" if side.field else f" at character {side.text_character} of the rendered text"
