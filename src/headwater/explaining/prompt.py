"""From the body of a completions or chat request to the prompt that the model would get."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from headwater.errors import BadRequest
from headwater.text.locate import MESSAGE, Piece, Place, Span, pieces_of, place_in, token_spans
from headwater.text.messages import plain
from headwater.text.tokenizer import Tokenizer

Body = Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]

NOT_UNDERSTOOD = ("chat_template", "documents", "functions", "truncate_prompt_tokens", "prompt_embeds")
"""Fields that would change the prompt in ways that are not followed here; null and empty ones ask for nothing."""


@dataclass(frozen=True)
class Prompt:
    """``text`` is what the template has made of the messages, or the prompt of a completion; ``messages`` is None for
    the latter. ``rerender`` renders other messages with some fields of the body changed."""

    body: Body
    text: str
    token_ids: list[int]
    messages: Messages | None
    rerender: Callable[[Messages, Body], str] | None

    def render(self, messages: Messages) -> str:
        """Other messages, rendered the same way. Raises BadRequest."""
        if self.rerender is None:
            raise BadRequest("the prompt of a completion has no messages", field="messages")
        return self.rerender(messages, {})

    def spans(self, tokenizer: Tokenizer) -> list[Span]:
        return token_spans(tokenizer, self.text, self.token_ids)

    @cached_property
    def pieces(self) -> list[Piece]:
        """Where the messages' contents are in the text; none for a completion."""
        return [] if self.messages is None else pieces_of(self.text, self.messages, render=self.render)

    def place(self, character: int) -> Place:
        """What the character of that index in the text belongs to."""
        if self.messages is None:
            return Place(None, None, character, MESSAGE)
        return place_in(self.pieces, character)


CheckText = Callable[[str, str], None]
"""Raises BadRequest for a text, the value of the field of that name, that is too long to be encoded."""


def any_length(text: str, field: str) -> None:
    """Refuses nothing."""


def read_prompt(body: Any, tokenizer: Tokenizer, *, where: str = "", check_text: CheckText = any_length) -> Prompt:
    """The prompt of a body with ``messages`` or ``prompt``; all that does not change the prompt is left alone.

    ``where`` goes before the field's name in errors. Raises BadRequest, NoChatTemplate.
    """
    if not isinstance(body, Mapping):
        raise BadRequest(f"{where or 'the body'} must be a JSON object: the body of a request", field=where or None)
    for name in NOT_UNDERSTOOD:
        if body.get(name):
            raise BadRequest(f"{_path(where, name)} is not understood here: leave it out", field=_path(where, name))
    try:
        if body.get("messages") is not None:
            return _chat(body, tokenizer, check_text)
        if body.get("prompt") is not None:
            return _completion(body, tokenizer, check_text)
    except BadRequest as error:
        if not where:
            raise
        named = _path(where, error.field) if error.field else where
        raise type(error)(f"{where}: {error}", field=named) from error
    raise BadRequest(f"{where or 'the body'} has neither messages nor prompt", field=where or None)


def render_chat(tokenizer: Tokenizer, fields: Body, messages: Any) -> str:
    """The template's text for ``messages`` under the other fields of a body."""
    arguments = fields.get("chat_template_kwargs") or {}
    if not isinstance(arguments, Mapping):
        raise BadRequest("chat_template_kwargs must be an object", field="chat_template_kwargs")
    for name in ("tools", "add_generation_prompt", "continue_final_message"):
        if name in arguments:
            raise BadRequest(f"chat_template_kwargs may not set {name!r}", field=f"chat_template_kwargs.{name}")
    return tokenizer.render_chat(
        messages,
        tools=fields.get("tools") or None,
        add_generation_prompt=_flag(fields, "add_generation_prompt", not fields.get("continue_final_message")),
        continue_final_message=_flag(fields, "continue_final_message", False),
        **arguments,
    )


def _chat(body: Body, tokenizer: Tokenizer, check_text: CheckText) -> Prompt:
    messages = body["messages"]
    if isinstance(messages, list):
        messages = [_as_served(message) for message in messages]
    text = render_chat(tokenizer, body, messages)
    check_text(text, "messages")
    special = _flag(body, "add_special_tokens", False)
    token_ids = tokenizer.encode(text, add_special_tokens=special, parse_special=True)

    def rerender(others: Messages, changed: Body) -> str:
        return render_chat(tokenizer, {**body, **changed}, others)

    return Prompt(body, text, token_ids, messages, rerender)


def _as_served(message: Any) -> Any:
    """ "developer" is the newer name of "system"; templates know the older one."""
    if isinstance(message, Mapping) and message.get("role") == "developer":
        return {**message, "role": "system"}
    return message


def _completion(body: Body, tokenizer: Tokenizer, check_text: CheckText) -> Prompt:
    prompt = plain(body["prompt"], "prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        check_text(prompt, "prompt")
        special = _flag(body, "add_special_tokens", True)
        token_ids = tokenizer.encode(prompt, add_special_tokens=special, parse_special=True)
        return Prompt(body, prompt, token_ids, None, None)
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise BadRequest("prompt must be one text or one list of token ids", field="prompt")
    ids: list[int] = [token for token in prompt if isinstance(token, int)]
    for token in ids:
        if not 0 <= token < tokenizer.vocab_size:
            raise BadRequest(
                f"prompt has the token id {token}; ids go up to {tokenizer.vocab_size - 1}", field="prompt"
            )
    return Prompt(body, tokenizer.decode(ids, skip_special_tokens=False), ids, None, None)


def _flag(body: Body, name: str, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false, not {value!r:.40}", field=name)
    return value


def _path(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
