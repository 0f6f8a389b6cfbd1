"""How byte-level vocabularies cut text before merging, by the name a GGUF file gives (``tokenizer.ggml.pre``).

Only names whose rule is known are listed: another rule gives other tokens, and a model fed with wrong
tokens answers fluent nonsense. Sources: the tokenizer.json of the model family that each name stands
for; for the names, and for "default", llama.cpp (src/llama-vocab.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tokenizers import Regex, normalizers, pre_tokenizers

from headwater.errors import ModelError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """``splits`` are applied in order, each to the pieces that the one before left; what matches is a piece,
    and so is what lies between. ``ignore_merges``: a piece that is itself a token is taken whole. ``add_bos``
    holds where the file does not say."""

    splits: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        return pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(split), behavior="isolated") for split in self.splits),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_SMOLLM = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3_SPLIT = rf"{_WORD}|\p{{N}}{{1,3}}{_REST}"
_LLAMA3 = PreTokenizer((_LLAMA3_SPLIT,), ignore_merges=True, add_bos=True)
_QWEN2_SPLIT = rf"{_WORD}|\p{{N}}{_REST}"

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {
        "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
        "gpt-2": PreTokenizer((_GPT2,)),
        "phi-2": PreTokenizer((_GPT2,)),
        "smollm": _SMOLLM,
        "starcoder": _SMOLLM,
        "llama-bpe": _LLAMA3,
        "llama3": _LLAMA3,
        "llama-v3": _LLAMA3,
        "smaug-bpe": PreTokenizer((_LLAMA3_SPLIT,)),
        "dbrx": PreTokenizer((_LLAMA3_SPLIT,)),
        "qwen2": PreTokenizer((_QWEN2_SPLIT,), nfc=True),
        "deepseek-r1-qwen": PreTokenizer((_QWEN2_SPLIT,)),
        "tekken": PreTokenizer((rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}{_CASED_REST}",), ignore_merges=True, add_bos=True),
        "gpt-4o": PreTokenizer((rf"{_CASED[0]}{_CONTRACTION}|{_CASED[1]}{_CONTRACTION}|\p{{N}}{{1,3}}{_CASED_REST}",)),
    }
)


def find_pre_tokenizer(name: str, where: str) -> PreTokenizer:
    """The rule called ``name``. ``where`` begins the message of the ModelError for an unknown one."""
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ModelError(
            f"{where}: the pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported, and guessing would give wrong "
            f"tokens; supported: {known}. Serve the model's Hugging Face folder instead."
        )
    return PRE_TOKENIZERS[name]
