"""The request bodies of the OpenAI API, with vLLM's extensions. Ranges are checked by `engine/checks.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from headwater.engine.checks import check_max_tokens, check_template_arguments
from headwater.errors import BadRequest
from headwater.serve.openai.fields import Fields, Many
from headwater.types import SamplingParams

MAX_PROMPTS = 256
"""Prompts in one completion request."""

MAX_MESSAGES = 4096

MAX_SALT_CHARS = 1024

PRIORITY_RANGE = (-(2**31), 2**31 - 1)


def _texts(value: object) -> object:
    """A lone text is a list of one."""
    return [value] if isinstance(value, str) else _list_or_text(value)


def _parts(value: object) -> object:
    """A lone text is a message of one part."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else _list_or_text(value)


def _list_or_text(value: object) -> object:
    if not isinstance(value, list):
        raise PydanticCustomError("text_or_list", "input should be a string or a list")
    return value


class StreamOptions(Fields):
    include_usage: bool = False
    """One more event at the end: the usage, with empty choices."""
    continuous_usage_stats: bool = False
    """Usage so far in every event (vLLM)."""


class HeadwaterFields(Fields):
    """What only this server knows."""

    explain: bool = False
    """Put the account of what was reused, and why no more, into the usage."""


class GenerationFields(Fields):
    """What both endpoints take."""

    model: str | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """How many of the likeliest tokens are drawn from; 0 or -1: all."""
    seed: int | None = None
    stop: Annotated[Many[str], BeforeValidator(_texts, json_schema_input_type=str | list[str])] = []  # noqa: RUF012
    stop_token_ids: Many[int] = []  # noqa: RUF012
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(default=None, repr=False)
    """Requests share cached prefixes only with requests of the same salt."""
    priority: int = 0
    """Lower runs first."""
    return_token_ids: bool = False
    headwater: HeadwaterFields = HeadwaterFields()
    skip_reading_prefix_cache: bool = False

    def sampling(self, max_tokens: int | None) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            max_tokens=max_tokens,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
        )

    def check(self) -> None:
        """What neither types nor the sampling parameters' ranges say. Raises BadRequest."""
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options needs stream: true", field="stream_options")
        if self.headwater.explain and self.stream and not (self.stream_options and self.stream_options.include_usage):
            raise BadRequest(
                "headwater.explain puts the account into the usage: a stream needs stream_options.include_usage for it",
                field="headwater",
            )
        if self.cache_salt is not None and len(self.cache_salt) > MAX_SALT_CHARS:
            raise BadRequest(f"cache_salt may have at most {MAX_SALT_CHARS} characters", field="cache_salt")
        low, high = PRIORITY_RANGE
        if not low <= self.priority <= high:
            raise BadRequest(f"priority must be from {low} to {high}, got {self.priority!r:.40}", field="priority")


class CompletionRequest(GenerationFields):
    """POST /v1/completions"""

    prompt: str | list[Any]
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    max_tokens: int | None = 16
    add_special_tokens: bool = True

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several; token ids are not checked yet. Raises BadRequest."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise BadRequest("prompt is empty: at least one token is needed", field="prompt")
        first = self.prompt[0]
        if not isinstance(first, (str, list)):
            return [self.prompt]
        if len(self.prompt) > MAX_PROMPTS:
            raise BadRequest(f"prompt may have at most {MAX_PROMPTS} prompts, got {len(self.prompt)}", field="prompt")
        for i, one in enumerate(self.prompt):
            if type(one) is not type(first):
                raise BadRequest(f"prompt[{i}] must be of the same kind as prompt[0]", field="prompt")
        return self.prompt


class TextPart(Fields):
    type: Literal["text"]
    text: str


class Message(Fields):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Many[TextPart], BeforeValidator(_parts, json_schema_input_type=str | list[TextPart])]
    name: str | None = None

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "refusal": (),
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "tool_calls": ([],),
        "reasoning": (),
        "reasoning_content": (),
    }
    """What clients' message objects carry along when an answer is sent back as the next turn's history."""

    def for_template(self) -> dict[str, str]:
        """As a chat template takes it: parts joined by line breaks, "developer" under its older name."""
        text = "\n".join(part.text for part in self.content)
        message = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.name is not None:
            message["name"] = self.name
        return message


class ChatRequest(GenerationFields):
    """POST /v1/chat/completions"""

    messages: Many[Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """The newer name of max_tokens; it wins where both are sent."""
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    """The template writes the special tokens itself."""
    chat_template_kwargs: dict[str, Any] = {}  # noqa: RUF012

    def check(self) -> None:
        super().check()
        if not self.messages:
            raise BadRequest("messages is empty: at least one message is needed", field="messages")
        if len(self.messages) > MAX_MESSAGES:
            raise BadRequest(
                f"messages may have at most {MAX_MESSAGES} messages, got {len(self.messages)}", field="messages"
            )
        check_max_tokens(self.max_tokens)
        check_max_tokens(self.max_completion_tokens, field="max_completion_tokens")
        check_template_arguments(self.chat_template_kwargs)

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
