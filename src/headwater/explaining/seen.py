"""One request of a log, with what the lint needs to compare it with others."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

from headwater.errors import BadRequest
from headwater.explaining.conversations import SYSTEM_ROLES, split_system
from headwater.explaining.log import Line
from headwater.explaining.prompt import Messages, read_prompt
from headwater.explaining.same import canonical, exact
from headwater.explaining.volatile import Masked, Masker
from headwater.text.locate import MESSAGE, Piece, Place, pieces_of, place_in
from headwater.text.messages import plain_messages
from headwater.text.tokenizer import Tokenizer


class TokenisedText:
    """A text with its tokens: how many lie before a character."""

    def __init__(self, text: str, token_ids: list[int], token_lengths: Sequence[int]) -> None:
        """``token_lengths`` are those of all tokens of the vocabulary, in bytes."""
        self.text = text
        self.token_ids = token_ids
        self._token_lengths = token_lengths

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(map(self._token_lengths.__getitem__, self.token_ids)))

    def tokens_before(self, character: int) -> int:
        """How many tokens end at or before the character."""
        return bisect_right(self._ends, len(self.text[:character].encode("utf-8", "surrogatepass")))


class Seen:
    """A request that was rendered and tokenised.

    ``plain`` is its text as rendered; ``settled`` the text with its tools in canonical order (the same one for most),
    and ``masked`` that text with the pieces masked that change by themselves.
    """

    def __init__(self, line: Line, tokenizer: Tokenizer, token_lengths: Sequence[int], masker: Masker) -> None:
        """Raises BadRequest, NoChatTemplate."""
        self.line = line
        self.tokenizer = tokenizer
        self.prompt = read_prompt(line.body, tokenizer)
        self.messages: Messages = self.prompt.messages or ()
        self.tools: list[Any] = line.body.get("tools") or []
        self.exact_tools = exact(self.tools)
        self.plain = TokenisedText(self.prompt.text, self.prompt.token_ids, token_lengths)
        self.settled = self._settle(tokenizer, token_lengths)
        contents = [str(message["content"]) for message in plain_messages(self.messages)] if self.messages else []
        self.contents = contents or [self.prompt.text]
        self.masked: Masked = masker.mask(self.settled.text, self.contents)

    def _settle(self, tokenizer: Tokenizer, token_lengths: Sequence[int]) -> TokenisedText:
        if len(self.tools) == 0 or self.prompt.rerender is None:
            return self.plain
        self._settled_tools = [json.loads(text) for text in sorted(canonical(tool) for tool in self.tools)]
        if exact(self._settled_tools) == self.exact_tools:
            return self.plain
        text = self.prompt.rerender(self.messages, {"tools": self._settled_tools})
        if text == self.plain.text:
            return self.plain
        token_ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
        return TokenisedText(text, token_ids, token_lengths)

    @cached_property
    def settled_pieces(self) -> list[Piece]:
        """Where the messages' contents are in the settled text."""
        rerender = self.prompt.rerender
        if self.settled is self.plain or rerender is None:
            return self.prompt.pieces
        changed = {"tools": self._settled_tools}
        return pieces_of(self.settled.text, self.messages, render=lambda messages: rerender(messages, changed))

    def settled_place(self, character: int) -> Place:
        if self.prompt.messages is None:
            return Place(None, None, character, MESSAGE)
        return place_in(self.settled_pieces, character)

    def is_instruction(self, place: Place) -> bool:
        """Is the place in what is written for all users: a system prompt, or what the template writes around it?"""
        if place.message is not None:
            return self.messages[place.message].get("role") in SYSTEM_ROLES
        first = next((p.first for p in self.settled_pieces if p.role not in SYSTEM_ROLES), 0)
        return self.prompt.messages is not None and place.character < first

    @cached_property
    def instructions_end(self) -> int:
        """The character of the settled text at which the system prompt ends; 0 without one."""
        n_system = len(split_system(self.messages)[0])
        return max((piece.end for piece in self.settled_pieces if piece.message < n_system), default=0)

    def without_answer(self) -> str | None:
        """The text without the beginning of the answer that is to come; None if the template refuses that."""
        if self.prompt.rerender is None:
            return None
        try:
            return self.prompt.rerender(self.messages, {"add_generation_prompt": False})
        except BadRequest:
            return None

    @property
    def asks_for_answer(self) -> bool:
        return self.line.body.get("add_generation_prompt") is not False
