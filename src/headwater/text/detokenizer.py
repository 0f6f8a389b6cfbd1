"""From token ids to text, one token at a time."""

from __future__ import annotations

import codecs

from headwater.text.tokenizer import Tokenizer


class Detokenizer:
    """Text of a growing list of tokens, given out as soon as its characters are complete.

    The pieces of all ``push`` and the final ``finish``, joined, are ``tokenizer.decode`` of the same ids:
    both are the UTF-8 decoding, errors replaced, of the tokens' bytes. A token that ends inside a
    character gives "" (or what came before that character); bytes that can no longer become a character
    give one U+FFFD per maximal part, as in `bytes.decode(errors="replace")` (Unicode 16, section 3.9, D93b).

    The first token keeps its leading space: generated text continues a prompt.
    Costs about a microsecond per token.
    """

    __slots__ = ("_decode", "_skipped", "_token_bytes")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        """The text that this token completes, "" where it completes none (or is a skipped special token)."""
        if token_id in self._skipped:
            return ""
        return self._decode(self._token_bytes(token_id))

    def finish(self) -> str:
        """No token follows: an incomplete character becomes one U+FFFD; "" where none is open."""
        return self._decode(b"", True)
