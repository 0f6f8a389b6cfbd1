"""A model's tokenizer: text to token ids and back."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from headwater.errors import BadRequest, ModelError, NoChatTemplate
from headwater.text.chat_template import ChatTemplate
from headwater.text.folder import read_folder
from headwater.text.gguf_vocab import read_gguf
from headwater.text.parts import TokenizerParts


class Tokenizer:
    """Encodes and decodes; safe to use from several threads at once.

    ``special_ids`` are the tokens that are no text (BOS, turn marks, ...), ``eos_ids`` those that end an
    answer: the model's EOS, its end-of-turn tokens, and what its generation config adds. ``vocab_size``
    counts tokens with ids 0 .. vocab_size - 1; the model's embedding may have more rows.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self.name = parts.name
        self.bos_id = parts.bos_id
        self.eos_ids = parts.eos_ids
        self.special_ids = parts.special_ids
        self.chat_template: ChatTemplate | None = parts.chat_template
        self._backend = parts.backend
        self._token_bytes = parts.token_bytes
        self._prefix = list(parts.prefix_ids)
        self._suffix = list(parts.suffix_ids)
        self._literal: tokenizers.Tokenizer | None = None
        self._lock = threading.Lock()

    @classmethod
    def from_gguf(cls, path: Path) -> Tokenizer:
        """The tokenizer in a GGUF file's metadata. Raises ModelError."""
        return cls(read_gguf(path))

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """The tokenizer of a Hugging Face folder (tokenizer.json). Raises ModelError."""
        return cls(read_folder(path))

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """What the model wants before every prompt: BOS, for some models."""
        return tuple(self._prefix)

    @property
    def n_suffix_ids(self) -> int:
        """How many tokens the model wants after every prompt; nearly always 0."""
        return len(self._suffix)

    @property
    def vocab_size(self) -> int:
        return len(self._token_bytes)

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
        """Token ids of ``text``.

        ``add_special_tokens`` adds what the model wants around every prompt (BOS, for some models), but no
        second BOS where the text begins with one. ``parse_special`` takes the text of a special token, such
        as "<|im_end|>", as that token; without it, as ordinary text. Chat: (False, True), the template has
        written everything. Completions, as in vLLM: (True, True).

        Does not hold the interpreter lock while it works. Time is proportional to n log n of the text's
        length; limits on length are the caller's. Raises BadRequest for text with a lone surrogate.
        """
        if not isinstance(text, str):
            raise BadRequest(f"a prompt must be a string, not {type(text).__name__}", field="prompt")
        backend = self._backend if parse_special else self._literal_backend()
        try:
            # The batch call, unlike the single one, releases the interpreter lock.
            ids = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError as error:
            raise BadRequest(_why_not_text(text), field="prompt") from error
        if add_special_tokens:
            if self._prefix and ids[: len(self._prefix)] != self._prefix:
                ids = self._prefix + ids
            ids = ids + self._suffix
        return list(ids)

    def encode_spans(self, text: str, *, parse_special: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """``encode`` with nothing added, and for each token the characters of ``text`` it covers, [first, end), as the
        library counts them. Raises BadRequest."""
        backend = self._backend if parse_special else self._literal_backend()
        try:
            encoding = backend.encode_batch([text], add_special_tokens=False)[0]
        except TypeError as error:
            raise BadRequest(_why_not_text(text), field="prompt") from error
        return list(encoding.ids), list(encoding.offsets)

    def _literal_backend(self) -> tokenizers.Tokenizer:
        """The same tokenizer, taking special tokens as text; made when first asked for, over the same vocabulary.

        The library's switch for this belongs to the whole object, and turning it would change encodings that run
        in other threads.
        """
        with self._lock:
            if self._literal is None:
                backend = self._backend
                literal = tokenizers.Tokenizer(backend.model)
                if backend.normalizer is not None:
                    literal.normalizer = backend.normalizer
                if backend.pre_tokenizer is not None:
                    literal.pre_tokenizer = backend.pre_tokenizer
                # In the order of their ids, so that each gets its own again.
                literal.add_tokens([token for _, token in sorted(backend.get_added_tokens_decoder().items())])
                literal.encode_special_tokens = True
                self._literal = literal
            return self._literal

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of the tokens: their bytes joined and decoded as UTF-8, what is not UTF-8 replaced by U+FFFD."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        joined = b"".join([self.token_bytes(i) for i in token_ids if i not in skipped])
        return joined.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact text of one token in UTF-8; it may be part of a character.

        Ids from vocab_size on are rows that only pad the model's embedding: they have no text. Raises
        ValueError for a negative id.
        """
        if token_id < 0:
            raise ValueError(f"token id {token_id} is negative")
        return self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special_ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **chat_template_kwargs: Any,
    ) -> str:
        """``ChatTemplate.render`` with this model's template; raises NoChatTemplate where it has none."""
        if self.chat_template is None:
            raise NoChatTemplate(
                f"model {self.name} has no chat template, so it cannot answer chat requests; use /v1/completions",
                field="messages",
            )
        return self.chat_template.render(
            messages, tools, add_generation_prompt, continue_final_message, **chat_template_kwargs
        )


def _why_not_text(text: str) -> str:
    """What is wrong with a str that the encoder refuses."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"the text holds a lone surrogate, U+{ord(text[error.start]):04X}, at character {error.start}"
    return "the text cannot be encoded"


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer of a model: a .gguf file or a Hugging Face folder. Raises ModelError."""
    path = Path(path)
    try:
        if path.is_dir():
            return Tokenizer.from_folder(path)
        if path.is_file():
            return Tokenizer.from_gguf(path)
    except (KeyError, TypeError, ValueError, RecursionError, SyntaxError) as error:
        # Files of a shape that nobody writes: which of their many fields is odd is in the chained error.
        raise ModelError(f"{path}: the tokenizer's files are damaged: {type(error).__name__}: {error}") from error
    raise ModelError(f"{path}: no such file or folder")
