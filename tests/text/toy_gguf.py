"""Small GGUF files that hold nothing but a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf

from headwater.text.spelling import SPACE_MARK
from tests.text.toy import BOS, EOS, IM_END, MERGES, PAD, SPECIALS, VOCAB_SIZE, toy_backend

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def write_gguf(path: Path, fields: Mapping[str, Any]) -> Path:
    """``fields``: metadata by key; None leaves a key out."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def bpe_fields(**changes: Any) -> dict[str, Any]:
    """The toy tokenizer as metadata; ``changes`` replace fields by the part of their key after tokenizer.ggml."""
    backend = toy_backend()
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [backend.id_to_token(i) for i in range(VOCAB_SIZE)],
        "token_type": [CONTROL if BOS <= i <= PAD else NORMAL for i in range(VOCAB_SIZE)],
        "merges": list(MERGES),
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


SPM_TEXTS = ("▁t", "he", "▁the", "in", "er", "re", "aa", "aaa", "▁a", "ab", "abc", "bc", "é")


def spm_pieces(user_defined: Sequence[str] = ()) -> list[tuple[str, float, int]]:
    """Pieces with score and type: specials, bytes, user-defined ones, merges by falling score, characters."""
    pieces = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL), ("<end_of_turn>", 0.0, CONTROL)]
    pieces += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    pieces += [(text, -1000.0, USER_DEFINED) for text in user_defined]
    chars = [SPACE_MARK, *"abcdefghijklmnopqrstuvwxyzé.,!"]
    texts = list(dict.fromkeys([*SPM_TEXTS, *chars]))
    return pieces + [(text, -float(rank), NORMAL) for rank, text in enumerate(texts)]


def spm_fields(user_defined: Sequence[str] = (), **changes: Any) -> dict[str, Any]:
    pieces = spm_pieces(user_defined)
    fields = {
        "model": "llama",
        "pre": "default",
        "tokens": [text for text, _, _ in pieces],
        "scores": [score for _, score, _ in pieces],
        "token_type": [kind for _, _, kind in pieces],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_space_prefix": False,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


__all__ = ["IM_END", "SPECIALS", "bpe_fields", "spm_fields", "spm_pieces", "write_gguf"]
