"""The tokenizers of real and toy GGUF files, against references that know nothing of this package's."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from headwater.errors import BadRequest, ModelError
from headwater.gguf_file import GgufFile, StringArray
from headwater.text.tokenizer import Tokenizer, load_tokenizer
from tests.text.toy import BOS, EOS, IM_END, IM_START, SPECIALS, TEMPLATE, VOCAB_SIZE, toy_tokenizer
from tests.text.toy_gguf import bpe_fields, spm_fields, spm_pieces, write_gguf

HAND_PICKED = [
    "", " ", "  ", "\n", "\n\n\n", "\t", "a", "Hello world! 123", "  multiple   spaces", " leading", "trailing ",
    "The capital of France is", "I'm you're she'll they'd we've I'LL", "déjà vu ÉCOLE naïve",
    "3.14159 2024-02-29 1e-10",
    "日本語のテキスト", "中文字符测试", "한국어 문장", "Привет, мир!", "مرحبا بالعالم", "हिन्दी पाठ", "שלום", "ไทย",
    "😀🎉👨‍👩‍👧🇩🇪", "e\u0301 \u00e9 ﬁ ½ ② Ⅷ ٣", "\u00a0\u2003\u200b\ufeff", "▁", "▁▁ ▁a", "\r\n windows \r\n",
    "def f(x):\n    return x**2  # square\n\n\nclass A:\n\tpass\n", '{"key": [1, 2.5, null], "é": "\\u00e9"}',
    "<div class='a'>\n  <p>x</p>\n</div>", "https://example.com/a?b=c&d=%20#e", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "x" * 300, "ab" * 150, "a  7   42 x\n\n1", " " * 31 + "x", "=" * 80, "foo_bar-baz.qux/quux\\corge",
    "#!/bin/sh\necho \"$PATH\" | grep -v '^#'",
]  # fmt: skip

PIECES = [
    "the", " quick", "Brown", " 42", "7", ".", ", ", "\n", "\n\n", "  ", "\t", "é", "ß", "漢", "字", "ы", "😀", "'s",
    "'LL", "(", ")", "_", "::", "->", "=", "0x1F", "%", "\u0301", "ing", "un", "re", " a", "A", "ZZ", "½", "\u00a0",
]  # fmt: skip


def samples() -> Iterator[str]:
    """About 200 varied strings, always the same."""
    yield from HAND_PICKED
    rng = random.Random(20)
    for _ in range(160):
        yield "".join(rng.choices(PIECES, k=rng.randint(1, 25)))


def plain_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False, parse_special=False)


# ---- SmolLM2: byte-level BPE ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm_oracle(smollm_path: Path) -> Any:
    """Transformers' reading of the file, with the pre-tokenizer of the published tokenizer.json: its GGUF reader
    does not know the name "smollm" and would leave digits together."""
    oracle = AutoTokenizer.from_pretrained(smollm_path.parent, gguf_file=smollm_path.name)
    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return oracle


def test_smollm2_encodes_as_transformers_does(smollm: Tokenizer, smollm_oracle: Any) -> None:
    for text in samples():
        ids = smollm.encode(text, add_special_tokens=True, parse_special=True)
        assert ids == smollm_oracle.encode(text), text
        assert smollm.decode(ids) == text


def test_smollm2_special_tokens_as_transformers_does(smollm: Tokenizer, smollm_oracle: Any) -> None:
    for text in [
        "<|im_start|>user\nhi<|im_end|>\n",
        "a<|im_end|><|im_end|> b <|endoftext|>",
        "<|im_start|",
        "<|im_end|>>",
    ]:
        assert smollm.encode(text, add_special_tokens=True, parse_special=True) == smollm_oracle.encode(text)
        literal = plain_ids(smollm, text)
        assert not smollm.special_ids & set(literal)
        assert smollm.decode(literal) == text


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello, we can use", [19556, 28, 392, 416, 722]),
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        ("Hello world! 123", [19556, 905, 17, 216, 33, 34, 35]),
        ("Café déjà vu.", [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]),
        ("  multiple   spaces", [216, 2701, 256, 5600]),
        ("\n", [198]),
    ],
)
def test_smollm2_published_ids(smollm: Tokenizer, text: str, ids: list[int]) -> None:
    assert plain_ids(smollm, text) == ids


def test_smollm2_facts(smollm: Tokenizer) -> None:
    assert smollm.vocab_size == 49152
    assert smollm.bos_id == 1
    assert smollm.eos_ids == {2}
    assert smollm.special_ids == set(range(17))
    assert smollm.is_special(2) and not smollm.is_special(17)
    assert smollm.token_bytes(2) == b"<|im_end|>"
    assert smollm.encode("", add_special_tokens=True, parse_special=True) == []
    assert smollm.chat_template is not None


# ---- Gemma: SentencePiece BPE -----------------------------------------------------------------------


GEMMA_PUBLISHED = [
    ("Hello world! 123", [9259, 1902, 236888, 236743, 236770, 236778, 236800]),
    ("  multiple   spaces", [138, 43819, 139, 35220]),
    ("Café déjà vu.\n\n\n", [160319, 236859, 29234, 11042, 236761, 109]),
    ("日本語のテキスト 😀🧿", [94951, 236945, 95830, 163543, 248979]),
    ("def f(x):\n    return x**2\n", [2063, 517, 236769, 236781, 1473, 107, 140, 2060, 1123, 1018, 236778, 107]),
    (" " * 35 + "x", [167, 140, 236781]),
    ("\t\t<h1>ab</h1>\x00", [255969, 184, 596, 191, 238]),
    ("ሴ▁▁x", [240735, 138, 236781]),
]
"""What the sentencepiece library 0.2.3 gives for the vocabulary, scores and types in the file."""


class NaiveSentencePiece:
    """SentencePiece's BPE as its paper has it, slowly: keep user-defined pieces whole (leftmost, longest), then join
    the neighbours with the best score, leftmost first, until nothing joins; what is no piece becomes bytes."""

    def __init__(self, pieces: list[tuple[str, float, int]]) -> None:
        respelled = [(text.replace(" ", "▁"), score, kind) for text, score, kind in pieces]
        self.ids = {text: i for i, (text, _, _) in enumerate(respelled)}
        self.scores = {text: score for text, score, kind in respelled if kind == 1}
        self.whole = sorted((text for text, _, kind in respelled if kind == 4), key=len, reverse=True)

    def encode(self, text: str, *, prefix: bool = False) -> list[int]:
        text = text.replace(" ", "▁")
        symbols: list[str] = []
        run = ""
        rest = "▁" + text if prefix and text else text
        while rest:
            kept = next((piece for piece in self.whole if rest.startswith(piece)), None)
            if kept is None:
                run, rest = run + rest[0], rest[1:]
                continue
            symbols += [*self.merged(run), kept]
            run, rest = "", rest[len(kept) :]
        symbols += self.merged(run)
        return [i for symbol in symbols for i in self.look_up(symbol)]

    def merged(self, text: str) -> list[str]:
        symbols = list(text)
        while True:
            joins = [(self.scores.get(a + b), -at) for at, (a, b) in enumerate(pairwise(symbols))]
            possible = [(score, at) for score, at in joins if score is not None]
            if not possible:
                return symbols
            at = -max(possible)[1]
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]

    def look_up(self, symbol: str) -> list[int]:
        return [self.ids[symbol]] if symbol in self.ids else [self.ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]


@pytest.fixture(scope="module")
def gemma_reference(gemma_path: Path) -> NaiveSentencePiece:
    metadata = GgufFile(gemma_path).metadata
    tokens, scores, kinds = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type"))
    assert isinstance(tokens, StringArray)
    return NaiveSentencePiece(list(zip(tokens.strings(), scores.tolist(), kinds.tolist(), strict=True)))  # type: ignore[union-attr]


def test_gemma_encodes_as_naive_sentencepiece(gemma: Tokenizer, gemma_reference: NaiveSentencePiece) -> None:
    for text in [*samples(), " " * 75 + "x", "\n" * 40, "\t" * 40 + " "]:
        ids = plain_ids(gemma, text)
        assert ids == gemma_reference.encode(text), text
        assert gemma.decode(ids) == text.replace("▁", " ")


@pytest.mark.parametrize(("text", "ids"), GEMMA_PUBLISHED)
def test_gemma_ids_of_google_sentencepiece(gemma: Tokenizer, text: str, ids: list[int]) -> None:
    assert plain_ids(gemma, text) == ids


def test_gemma_facts(gemma: Tokenizer) -> None:
    assert gemma.vocab_size == 262144
    assert gemma.bos_id == 2
    assert gemma.eos_ids == {1}
    assert gemma.token_bytes(138) == b"  "
    assert gemma.token_bytes(238 + 0xF0) == b"\xf0"
    assert gemma.token_bytes(236743) == b" "
    assert not gemma.is_special(107)  # a newline is text
    assert gemma.is_special(2)


def test_gemma_gets_bos_once(gemma: Tokenizer) -> None:
    alone = gemma.encode("", add_special_tokens=True, parse_special=True)
    plain = gemma.encode("hi", add_special_tokens=True, parse_special=True)
    written = gemma.encode("<bos>hi", add_special_tokens=True, parse_special=True)
    assert (alone, plain[0], plain.count(2)) == ([2], 2, 1)
    assert written == plain
    assert gemma.encode("<bos>hi", add_special_tokens=False, parse_special=True) == plain


# ---- both -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["smollm", "gemma"])
def test_encoding_in_threads_gives_what_it_gives_alone(model: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(model)
    texts = ["<|im_start|>a<bos>" + text for text in HAND_PICKED[:12]]
    modes = [(add, parse) for add in (False, True) for parse in (False, True)]

    def work() -> list[list[int]]:
        return [tokenizer.encode(t, add_special_tokens=a, parse_special=p) for t in texts for a, p in modes]

    alone = work()
    results: list[list[list[int]]] = []
    threads = [threading.Thread(target=lambda: results.extend(work() for _ in range(5))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [alone] * 30


def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"lone surrogate, U\+D83D, at character 2") as caught:
        toy_tokenizer().encode("ab\ud83d", add_special_tokens=False, parse_special=True)
    assert caught.value.field == "prompt"
    with pytest.raises(BadRequest, match="must be a string, not int"):
        toy_tokenizer().encode(5, add_special_tokens=False, parse_special=True)  # type: ignore[arg-type]


# ---- toy files: what the metadata says ----------------------------------------------------------------


def load(tmp_path: Path, fields: dict[str, Any]) -> Tokenizer:
    return load_tokenizer(write_gguf(tmp_path / "toy.gguf", fields))


def test_byte_level_file_equals_the_toy(tmp_path: Path) -> None:
    tokenizer, toy = load(tmp_path, bpe_fields()), toy_tokenizer()
    assert tokenizer.name == "toy"
    for text in [*samples(), "".join(SPECIALS)]:
        for mode in (False, True):
            ids = tokenizer.encode(text, add_special_tokens=True, parse_special=mode)
            assert ids == toy.encode(text, add_special_tokens=False, parse_special=mode)
    assert [tokenizer.token_bytes(i) for i in range(VOCAB_SIZE)] == [toy.token_bytes(i) for i in range(VOCAB_SIZE)]
    assert tokenizer.special_ids == toy.special_ids


@pytest.mark.parametrize(
    ("changes", "prefix"),
    [
        ({}, []),
        ({"add_bos_token": True}, [BOS]),
        ({"pre": "llama-bpe"}, [BOS]),
        ({"pre": "llama-bpe", "add_bos_token": False}, []),
        ({"pre": "llama-bpe", "bos_token_id": None}, []),
    ],
)
def test_bos_is_added_as_the_file_says_or_else_its_kind(
    tmp_path: Path, changes: dict[str, Any], prefix: list[int]
) -> None:
    tokenizer = load(tmp_path, bpe_fields(**changes))
    assert tokenizer.encode("a", add_special_tokens=True, parse_special=True) == [*prefix, 97]


def test_eos_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, bpe_fields(add_eos_token=True))
    assert tokenizer.encode("a", add_special_tokens=True, parse_special=True) == [97, EOS]
    assert tokenizer.encode("a", add_special_tokens=False, parse_special=True) == [97]


def test_llama3_takes_a_piece_that_is_a_token_whole(tmp_path: Path) -> None:
    # No merges lead to "Ġthe" here, but the vocabulary has it.
    tokens = {"pre": "llama-bpe", "merges": ["h e"], "add_bos_token": False}
    the = load(tmp_path, bpe_fields(**tokens)).encode(" the", add_special_tokens=True, parse_special=True)
    assert [toy_tokenizer().token_bytes(i) for i in the] == [b" the"]
    gpt2 = load(tmp_path, bpe_fields(**tokens | {"pre": "gpt-2"}))
    assert len(gpt2.encode(" the", add_special_tokens=True, parse_special=True)) == 3


def test_qwen2_composes_characters_first(tmp_path: Path) -> None:
    decomposed = "e\u0301"
    qwen2, gpt2 = load(tmp_path, bpe_fields(pre="qwen2")), load(tmp_path, bpe_fields())
    assert plain_ids(qwen2, decomposed) == list("é".encode())
    assert plain_ids(gpt2, decomposed) == list(decomposed.encode())


def test_eos_ids_are_all_that_end_an_answer(tmp_path: Path) -> None:
    assert load(tmp_path, bpe_fields()).eos_ids == {EOS}
    assert load(tmp_path, bpe_fields(eot_token_id=IM_END)).eos_ids == {EOS, IM_END}
    chat = {**bpe_fields(), "tokenizer.chat_template": TEMPLATE}
    assert load(tmp_path, chat).eos_ids == {EOS, IM_END}
    other = {**bpe_fields(), "tokenizer.chat_template": "{{ messages[0].content }}"}
    assert load(tmp_path, other).eos_ids == {EOS}
    assert load(tmp_path, bpe_fields(eos_token_id=None)).eos_ids == frozenset()


def test_named_templates_are_read(tmp_path: Path) -> None:
    fields = {
        **bpe_fields(),
        "tokenizer.chat_template": "{{ bos_token }}plain",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "tools{{ eos_token }}",
    }
    tokenizer = load(tmp_path, fields)
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.render_chat(messages) == "<|bos|>plain"
    assert tokenizer.render_chat(messages, tools=[{}]) == "tools<|eos|>"


@pytest.mark.parametrize("prefix", [False, True])
def test_sentencepiece_file_as_the_naive_reference(tmp_path: Path, prefix: bool) -> None:
    user_defined = [] if prefix else ["  ", "   ", "\n\n", "<b>"]
    tokenizer = load(tmp_path, spm_fields(user_defined, add_space_prefix=prefix, add_bos_token=False))
    reference = NaiveSentencePiece(spm_pieces(user_defined))
    rng = random.Random(7)
    for _ in range(300):
        text = "".join(
            rng.choices(["a", "b", "c", " ", "the", "er", "in", "é", "日", "\n", "<b>", "▁"], k=rng.randint(0, 14))
        )
        assert plain_ids(tokenizer, text) == reference.encode(text, prefix=prefix), text


def test_sentencepiece_file_by_default_adds_bos_and_a_space(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, spm_fields(add_space_prefix=None))
    ids = tokenizer.encode("the", add_special_tokens=True, parse_special=True)
    assert [tokenizer.token_bytes(i) for i in ids] == [b"<s>", b" the"]
    # As in llama.cpp, a space also follows a special token.
    ids = tokenizer.encode("</s>the", add_special_tokens=True, parse_special=True)
    assert [tokenizer.token_bytes(i) for i in ids] == [b"<s>", b"</s>", b" the"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (bpe_fields(pre="klingon"), "pre-tokenizer 'klingon'"),
        (bpe_fields(pre=None), "tokenizer.ggml.pre is missing"),
        (bpe_fields(model="bert"), "kind 'bert'.*not supported"),
        (bpe_fields(model=None), "tokenizer.ggml.model is missing"),
        (bpe_fields(model=7), "tokenizer.ggml.model is not a string"),
        (bpe_fields(tokens=None), "tokenizer.ggml.tokens is missing"),
        (bpe_fields(merges=None), "tokenizer.ggml.merges is missing"),
        (bpe_fields(merges=["h e", "lonely"]), "'lonely'.*not two tokens"),
        (bpe_fields(merges=["h 日"]), "do not fit together"),
        (bpe_fields(token_type=[1, 2]), "token_type is not an array of 300"),
        (bpe_fields(eos_token_id=300), "eos_token_id is not a token id below 300"),
        (bpe_fields(add_bos_token=1), "add_bos_token is not a boolean"),
        (bpe_fields(add_eos_token=True, eos_token_id=None), "add_eos_token is true, but"),
        ({**bpe_fields(), "tokenizer.chat_template": 5}, "chat_template is not a string"),
        ({**bpe_fields(), "tokenizer.chat_template": "{% if %}"}, "not valid Jinja"),
        (spm_fields(scores=None), "scores is missing"),
        (spm_fields(scores=[1.0]), "scores is not an array of"),
    ],
)
def test_a_file_that_would_give_wrong_tokens_is_refused(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        load(tmp_path, fields)


def test_missing_and_foreign_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file or folder"):
        load_tokenizer(tmp_path / "none.gguf")
    (tmp_path / "x.gguf").write_bytes(b"not a model at all")
    with pytest.raises(ModelError, match="not a GGUF file"):
        load_tokenizer(tmp_path / "x.gguf")


def test_control_tokens_are_matched_in_text_only_when_parsed(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, bpe_fields())
    assert tokenizer.encode("<|im_start|>", add_special_tokens=False, parse_special=True) == [IM_START]
    literal = plain_ids(tokenizer, "<|im_start|>")
    assert len(literal) > 1
    assert tokenizer.decode(literal) == "<|im_start|>"
