"""A request that was read and checked, and has become tokens."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.serve.front import ChatText
from headwater.serve.openai.protocol import GenerationFields
from headwater.types import SamplingParams


@dataclass(frozen=True)
class Prepared:
    """``prompts`` are token ids, one list for each prompt; ``chat`` is what they were made of in a chat."""

    asked: GenerationFields
    sampling: SamplingParams
    prompts: list[list[int]]
    chat: ChatText | None = None
