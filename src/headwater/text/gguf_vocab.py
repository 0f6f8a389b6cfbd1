"""The tokenizer in a GGUF file: ``tokenizer.ggml.*``, as a backend of the `tokenizers` library.

Two kinds: "gpt2" (byte-level BPE with merges) and "llama" (SentencePiece BPE with scores, as in Llama 2
and Gemma). Sources: docs/gguf.md of ggml-org/ggml; src/llama-vocab.cpp of ggml-org/llama.cpp for what the
fields mean; bpe_model.cc of google/sentencepiece for the order of merges.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from headwater.errors import ModelError
from headwater.gguf_file import GgufFile, StringArray
from headwater.text.chat_template import ChatTemplate
from headwater.text.parts import TokenizerParts, turn_end_ids
from headwater.text.pretokenizer import PreTokenizer, find_pre_tokenizer
from headwater.text.spelling import SPACE_MARK, byte_alphabet, byte_level_bytes, piece_bytes

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Token types of the GGUF specification; 5 is unused, 6 is a byte. USER_DEFINED ones are text that is always
kept whole, such as a run of newlines."""

PREFIX = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"


class _Fields:
    """Typed access to the tokenizer's metadata; a missing or mistyped field is a ModelError that names it."""

    def __init__(self, file: GgufFile) -> None:
        self.path = file.path
        self._values = file.metadata

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def text(self, key: str) -> str:
        value = self._values.get(key)
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def strings(self, key: str) -> list[str]:
        value = self._values.get(key)
        if not isinstance(value, StringArray):
            raise self._wrong(key, "an array of strings")
        return value.strings()

    def numbers(self, key: str, count: int) -> list[float]:
        value = self._values.get(key)
        if not isinstance(value, np.ndarray) or len(value) != count:
            raise self._wrong(key, f"an array of {count} numbers, one for each token")
        numbers: list[float] = value.tolist()
        return numbers

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "a boolean")
        return value

    def token_id(self, key: str, n_tokens: int) -> int | None:
        """An id in 0 .. n_tokens - 1, or None where the file does not name one."""
        value = self._values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < n_tokens:
            raise self._wrong(key, f"a token id below {n_tokens}")
        return value

    def _wrong(self, key: str, wanted: str) -> ModelError:
        state = "is not" if key in self._values else "is missing; it must be"
        return ModelError(f"{self.path}: the metadata field {key} {state} {wanted}")


def read_gguf(path: Path) -> TokenizerParts:
    """The tokenizer of a GGUF file. Raises ModelError for one that this package would get wrong."""
    fields = _Fields(GgufFile(path))
    kind = fields.text(f"{PREFIX}model")
    tokens = fields.strings(f"{PREFIX}tokens")
    types = _types(fields, len(tokens))
    if kind == "gpt2":
        if f"{PREFIX}pre" not in fields:
            raise ModelError(
                f"{path}: the file does not say how its vocabulary cuts text (tokenizer.ggml.pre is missing), and "
                "guessing would give wrong tokens; convert the model again with a current converter"
            )
        pre = find_pre_tokenizer(fields.text(f"{PREFIX}pre"), str(path))
        backend = _byte_level(path, tokens, fields.strings(f"{PREFIX}merges"), pre)
        token_bytes = _byte_level_table(tokens, types)
        add_bos = pre.add_bos
        _keep_whole(backend, tokens, types)
    elif kind == "llama":
        backend = _sentencepiece(fields, tokens, types)
        token_bytes = tuple(piece_bytes(token) for token in tokens)
        add_bos = True
    else:
        raise ModelError(
            f"{path}: the tokenizer kind {kind!r} (tokenizer.ggml.model) is not supported; gpt2 and llama are"
        )
    return _assemble(fields, backend, tokens, types, token_bytes, add_bos)


def _types(fields: _Fields, n_tokens: int) -> list[int]:
    key = f"{PREFIX}token_type"
    return [int(kind) for kind in fields.numbers(key, n_tokens)] if key in fields else [NORMAL] * n_tokens


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    """Ids by text; of two tokens with one text, the first."""
    vocabulary: dict[str, int] = {}
    for i, token in enumerate(tokens):
        vocabulary.setdefault(token, i)
    return vocabulary


# ---- byte-level BPE -----------------------------------------------------------------------------


def _byte_level(path: Path, tokens: Sequence[str], merges: Sequence[str], pre: PreTokenizer) -> tokenizers.Tokenizer:
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        left, gap, right = merge.partition(" ")
        if not (left and gap and right):
            raise ModelError(f"{path}: the merge {merge!r} (tokenizer.ggml.merges) is not two tokens")
        pairs.append((left, right))
    try:
        model = models.BPE(_vocabulary(tokens), pairs, ignore_merges=pre.ignore_merges)
    except Exception as error:  # the library raises bare Exception: a merge of tokens that do not exist
        raise ModelError(f"{path}: the vocabulary and its merges do not fit together: {error}") from error
    backend = tokenizers.Tokenizer(model)
    normalizer = pre.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    return backend


def _byte_level_table(tokens: Sequence[str], types: Sequence[int]) -> tuple[bytes, ...]:
    """Bytes of each token; control and user-defined ones are written as they read, not in the byte alphabet."""
    alphabet = byte_alphabet()
    literal = (UNKNOWN, CONTROL, USER_DEFINED)
    return tuple(
        token.encode("utf-8") if kind in literal else byte_level_bytes(token, alphabet)
        for token, kind in zip(tokens, types, strict=True)
    )


# ---- SentencePiece BPE --------------------------------------------------------------------------


def _sentencepiece(fields: _Fields, tokens: Sequence[str], types: Sequence[int]) -> tokenizers.Tokenizer:
    scores = fields.numbers(f"{PREFIX}scores", len(tokens))
    unknown = fields.token_id(f"{PREFIX}unknown_token_id", len(tokens))
    space_prefix = fields.flag(f"{PREFIX}add_space_prefix", default=True)
    if not space_prefix:
        # Files write a user-defined run of spaces as spaces; SentencePiece looks for it among the marks.
        tokens = [token.replace(" ", SPACE_MARK) for token in tokens]
    vocabulary = _vocabulary(tokens)
    model = models.BPE(
        vocabulary,
        _merges(vocabulary, tokens, types, scores),
        unk_token=None if unknown is None else tokens[unknown],
        byte_fallback=True,
        fuse_unk=True,
    )
    backend = tokenizers.Tokenizer(model)
    mark = normalizers.Replace(" ", SPACE_MARK)
    # With the prefix, the text's start and whatever follows a special token get a space, as in llama.cpp.
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), mark]) if space_prefix else mark
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()])
    _keep_whole(backend, tokens, types, marked=not space_prefix)
    return backend


def _merges(
    vocabulary: dict[str, int], tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """The merges that SentencePiece's scores imply, best first.

    SentencePiece joins, of all neighbours whose joint text is a piece, those with the best score, the
    leftmost first. A merge list says the same by rank: pieces by falling score, and each piece from every
    pair of pieces that it can be cut into (their order among each other is the one of `transformers`,
    the longer left part first).
    """
    mergeable = [i for i, kind in enumerate(types) if kind == NORMAL]
    mergeable.sort(key=lambda i: -scores[i])
    merges: list[tuple[str, str]] = []
    for i in mergeable:
        piece = tokens[i]
        for at in range(len(piece) - 1, 0, -1):
            left = piece[:at]
            if left in vocabulary:
                right = piece[at:]
                if right in vocabulary:
                    merges.append((left, right))
    return merges


# ---- both ---------------------------------------------------------------------------------------


def _keep_whole(
    backend: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int], *, marked: bool = False
) -> None:
    """Tokens that text is never merged across: control and unknown ones (special), and user-defined ones.

    With ``marked``, user-defined ones that hold SentencePiece's space mark are looked for in the text after
    its spaces have become marks; all others in the text as it came.
    """
    typed = [(token, kind) for token, kind in zip(tokens, types, strict=True) if token]
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token, kind in typed if kind in (CONTROL, UNKNOWN)]
    )
    backend.add_tokens(
        [
            AddedToken(token, normalized=marked and SPACE_MARK in token, special=False)
            for token, kind in typed
            if kind == USER_DEFINED
        ]
    )


def _assemble(
    fields: _Fields,
    backend: tokenizers.Tokenizer,
    tokens: Sequence[str],
    types: Sequence[int],
    token_bytes: tuple[bytes, ...],
    add_bos: bool,
) -> TokenizerParts:
    named = {
        name: fields.token_id(f"{PREFIX}{name}_token_id", len(tokens))
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
    }
    special_ids = {i for i, kind in enumerate(types) if kind in (CONTROL, UNKNOWN)}
    special_ids.update(i for i in (named["bos"], named["eos"]) if i is not None)
    variables = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    template = _chat_template(
        fields, {variables[name]: tokens[i] for name, i in named.items() if name in variables and i is not None}
    )
    eos_ids = {i for i in (named["eos"], named["eot"], named["eom"]) if i is not None}
    eos_ids |= turn_end_ids(template, [(tokens[i], i) for i in special_ids])
    return TokenizerParts(
        name=fields.path.stem,
        backend=backend,
        token_bytes=token_bytes,
        special_ids=frozenset(special_ids),
        bos_id=named["bos"],
        eos_ids=frozenset(eos_ids),
        prefix_ids=_added(fields, "bos", named["bos"], default=add_bos),
        suffix_ids=_added(fields, "eos", named["eos"], default=False),
        chat_template=template,
    )


def _added(fields: _Fields, name: str, token_id: int | None, *, default: bool) -> tuple[int, ...]:
    """The token to add around every prompt, if the file (or else its kind) says so."""
    key = f"{PREFIX}add_{name}_token"
    if not fields.flag(key, default):
        return ()
    if token_id is None:
        if key in fields:
            raise ModelError(f"{fields.path}: {key} is true, but {PREFIX}{name}_token_id does not say which token")
        return ()
    return (token_id,)


def _chat_template(fields: _Fields, special_tokens: dict[str, str]) -> ChatTemplate | None:
    """``tokenizer.chat_template``, and those named in ``tokenizer.chat_templates``, each under its own key."""
    sources: dict[str, str] = {}
    if f"{TEMPLATE}s" in fields:
        sources = {name: fields.text(f"{TEMPLATE}.{name}") for name in fields.strings(f"{TEMPLATE}s")}
    if TEMPLATE in fields:
        sources["default"] = fields.text(TEMPLATE)
    return ChatTemplate(sources, special_tokens=special_tokens) if sources else None
