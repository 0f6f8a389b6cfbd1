"""How each named rule cuts text, against the tokenizer.json of the family it stands for."""

from __future__ import annotations

import pytest
from tokenizers import Regex, pre_tokenizers

from headwater.errors import ModelError
from headwater.text.pretokenizer import PRE_TOKENIZERS, find_pre_tokenizer

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PUBLISHED = {
    "llama-bpe": CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt-4o": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""The split pattern of the tokenizer.json of Llama 3, Qwen2, Mistral NeMo and GPT-4o."""

SAMPLES = [
    "Hello world! It's 12345 o'clock, I'LL say.\n\n  def f(x):\n\treturn x**2 # 50%  \r\n",
    "déjà vu ÉCOLE naïve ﬁn ½ ² Ⅷ ٣ 日本語123テキスト한국어 हिन्दी 🎉👨‍👩‍👧 e\u0301",
    "   leading\t\ttabs \u00a0\u2003 and   trailing   ",
    "camelCaseXMLHttp SHOUT'S don't'd --flag=1.5e-10 $100+<=>^~|`",
    "",
    " ",
    "\n",
]


def pieces(rule: pre_tokenizers.PreTokenizer, text: str) -> list[str]:
    return [piece for piece, _ in rule.pre_tokenize_str(text)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_splits_as_the_published_tokenizer(name: str) -> None:
    published = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PUBLISHED[name]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    for sample in SAMPLES:
        assert pieces(PRE_TOKENIZERS[name].build(), sample) == pieces(published, sample)


def test_smollm_splits_as_its_published_tokenizer() -> None:
    published = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for sample in SAMPLES:
        assert pieces(PRE_TOKENIZERS["smollm"].build(), sample) == pieces(published, sample)


def test_gpt2_splits_as_the_librarys_own_rule() -> None:
    for sample in SAMPLES:
        published = pre_tokenizers.ByteLevel(add_prefix_space=False)
        assert pieces(PRE_TOKENIZERS["gpt-2"].build(), sample) == pieces(published, sample)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-2", ["in", "Ġ12345", "$,", "ĠI", "'ll", "ĠI", "'", "LL"]),
        ("smollm", ["in", "Ġ", "1", "2", "3", "4", "5", "$,", "ĠI", "'ll", "ĠI", "'", "LL"]),
        ("llama-bpe", ["in", "Ġ", "123", "45", "$,", "ĠI", "'ll", "ĠI", "'LL"]),
        ("qwen2", ["in", "Ġ", "1", "2", "3", "4", "5", "$,", "ĠI", "'ll", "ĠI", "'LL"]),
        ("default", ["in", "Ġ", "123", "45", "$,", "ĠI", "'", "ll", "ĠI", "'", "LL"]),
    ],
)
def test_digits_and_contractions(name: str, expected: list[str]) -> None:
    found = pieces(PRE_TOKENIZERS[name].build(), "in 12345$, I'll I'LL")
    if name == "default":  # digits in threes from the left, the rest of a run as it is
        assert "".join(found) == "".join(expected)
        assert "'ll" not in found
    else:
        assert found == expected


def test_only_qwen2_composes_characters() -> None:
    assert [name for name, rule in PRE_TOKENIZERS.items() if rule.normalizer() is not None] == ["qwen2"]


def test_an_unknown_name_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"m\.gguf: the pre-tokenizer 'klingon'.*supported: dbrx"):
        find_pre_tokenizer("klingon", "m.gguf")
