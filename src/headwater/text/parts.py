"""What a loader found out about a tokenizer: the seam between file formats and ``Tokenizer``."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import tokenizers

from headwater.text.chat_template import ChatTemplate

TURN_ENDS = frozenset({"<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endofturn|>"})
"""Names under which chat models know the token that ends a turn."""


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """``token_bytes[i]`` is the exact text of token i in UTF-8, which may be part of a character."""

    name: str
    """How messages name the model."""
    backend: tokenizers.Tokenizer
    """Encodes; adds no BOS or EOS, never truncates or pads."""
    token_bytes: tuple[bytes, ...]
    special_ids: frozenset[int]
    bos_id: int | None
    eos_ids: frozenset[int]
    prefix_ids: tuple[int, ...]
    """What the model wants before every prompt (BOS, or nothing)."""
    suffix_ids: tuple[int, ...]
    """What the model wants after every prompt (nearly always nothing)."""
    chat_template: ChatTemplate | None


def turn_end_ids(template: ChatTemplate | None, specials: Collection[tuple[str, int]]) -> set[int]:
    """Special tokens that end a turn in this model's own chat template.

    Base vocabularies often name only the end of a document as EOS, while the template closes each turn
    with another token; a chat answer must end there too.
    """
    if template is None:
        return set()
    return {i for text, i in specials if text in TURN_ENDS and template.mentions(text)}
