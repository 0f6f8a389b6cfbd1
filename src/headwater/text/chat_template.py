"""A model's chat template: from messages to the text of a prompt.

Source of the language and its variables: the Hugging Face chat template convention
(`apply_chat_template` of huggingface/transformers).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any

import jinja2

from headwater.errors import BadRequest, ModelError
from headwater.text.messages import plain, plain_messages
from headwater.text.sandbox import MAX_CHARS, BoundedEnvironment

DEFAULT, TOOL_USE = "default", "tool_use"

OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message", "documents"})
"""Variables of a template that have a field of their own in the API."""


class ChatTemplate:
    """``source`` is one Jinja template, or several by name; ``default`` serves, ``tool_use`` when tools are given.

    ``special_tokens`` are the variables such as ``bos_token``. ``now`` is the clock of ``strftime_now``.
    Raises ModelError for a template that is not valid Jinja.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        *,
        special_tokens: Mapping[str, str] = MappingProxyType({}),
        now: Callable[[], datetime] = datetime.now,
        max_chars: int = MAX_CHARS,
    ) -> None:
        self.sources: Mapping[str, str] = MappingProxyType(
            {DEFAULT: source} if isinstance(source, str) else dict(source)
        )
        if not self.sources:
            raise ModelError("the model names no chat template at all")
        self._special_tokens = dict(special_tokens)
        self._max_chars = max_chars
        self._environment = BoundedEnvironment(now)
        self._templates = {name: self._compile(name, text) for name, text in self.sources.items()}

    def _compile(self, name: str, text: str) -> jinja2.Template:
        try:
            return self._environment.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"the model's chat template ({name}) is not valid Jinja, line {error.lineno}: {error.message}"
            ) from error

    def mentions(self, text: str) -> bool:
        """Does any of the templates contain ``text``?"""
        return any(text in source for source in self.sources.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **chat_template_kwargs: Any,
    ) -> str:
        """The prompt text; encode it with its special tokens parsed and none added, for it holds them already.

        ``continue_final_message`` leaves the last message open, for the model to go on with.
        Raises BadRequest: wrong messages, arguments that this method has itself, and whatever the template
        refuses, with the template's own words.
        """
        for flag, value in (
            ("add_generation_prompt", add_generation_prompt),
            ("continue_final_message", continue_final_message),
        ):
            if not isinstance(value, bool):
                raise BadRequest(f"{flag} must be true or false, not {value!r}", field=flag)
        if continue_final_message and add_generation_prompt:
            raise BadRequest(
                "continue_final_message and add_generation_prompt exclude each other: the one goes on with the last "
                "message, the other starts a new one",
                field="continue_final_message",
            )
        for name in chat_template_kwargs:
            if name in OWN_VARIABLES:
                raise BadRequest(f"chat_template_kwargs may not set {name!r}", field=f"chat_template_kwargs.{name}")
        chat = plain_messages(messages)
        mark = _open_end(chat) if continue_final_message else None
        variables = {
            **self._special_tokens,
            **{name: plain(value, f"chat_template_kwargs.{name}") for name, value in chat_template_kwargs.items()},
            "messages": chat,
            "tools": _plain_tools(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(self._pick(tools), variables)
        return text if mark is None else _cut_at(mark, text)

    def _pick(self, tools: object) -> jinja2.Template:
        if tools and TOOL_USE in self._templates:
            return self._templates[TOOL_USE]
        if DEFAULT in self._templates:
            return self._templates[DEFAULT]
        if len(self._templates) == 1:
            return next(iter(self._templates.values()))
        names = ", ".join(sorted(self._templates))
        raise BadRequest(f"the model has chat templates for {names} only, and no default one", field="messages")

    def _run(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        self._environment.begin()
        chunks: list[str] = []
        n_chars = 0
        try:
            for chunk in template.generate(variables):
                chunks.append(chunk)
                n_chars += len(chunk)
                if n_chars > self._max_chars:
                    raise BadRequest(
                        f"the chat template gives more than {self._max_chars} characters", field="messages"
                    )
        except BadRequest:
            raise
        except jinja2.TemplateError as error:
            raise BadRequest(f"the chat template refuses these messages: {error}", field="messages") from error
        except RecursionError as error:
            raise BadRequest("the chat template refuses these messages: it nests too deep", field="messages") from error
        except Exception as error:
            # A template is a program that the client's messages drive: a TypeError in it is about those messages.
            raise BadRequest(
                f"the chat template fails on these messages: {type(error).__name__}: {error}", field="messages"
            ) from error
        return "".join(chunks)


def _plain_tools(tools: Any) -> list[Any] | None:
    if tools is None:
        return None
    plain_tools = plain(tools, "tools")
    if not isinstance(plain_tools, list) or not all(isinstance(tool, dict) for tool in plain_tools):
        raise BadRequest("tools must be a list of objects", field="tools")
    return plain_tools


def _open_end(chat: list[dict[str, Any]]) -> str:
    """Append a mark to the last message's content, so that the rendered text can be cut there; returns the mark."""
    mark = uuid.uuid4().hex + " "
    chat[-1]["content"] += mark
    return mark


def _cut_at(mark: str, text: str) -> str:
    """``text`` up to the mark. Where the template stripped the message (the mark's own space is gone), the
    spaces at the end of the message are stripped too, as it would have done without the mark."""
    at = text.rfind(mark.strip())
    if at < 0:
        raise BadRequest(
            "continue_final_message: the chat template leaves the last message out", field="continue_final_message"
        )
    kept = text[:at]
    return kept if text.startswith(mark, at) else kept.rstrip()
