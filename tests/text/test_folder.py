"""Tokenizers of Hugging Face folders against Transformers reading the same folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from headwater.errors import ModelError
from headwater.text.detokenizer import Detokenizer
from headwater.text.tokenizer import Tokenizer, load_tokenizer
from tests.text.toy import BOS, EOS, IM_END, PAD, TEMPLATE, VOCAB_SIZE, toy_backend, toy_tokenizer, write_toy_folder

TEXTS = ["", "the end", "<|im_start|>user\nthe<|im_end|>", "<|bos|>x", "a <|eos|> b", "é 日本 😀  12\n\n"]
USER = [{"role": "user", "content": "Hi"}]


def edit(file: Path, **changes: Any) -> None:
    """Replace fields of a JSON file; None removes one."""
    value = json.loads(file.read_text()) if file.exists() else {}
    value.update(changes)
    file.write_text(json.dumps({key: item for key, item in value.items() if item is not None}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_toy_folder(tmp_path / "model", chat_template=TEMPLATE)


def test_the_toy_folder_is_the_toy(folder: Path) -> None:
    read, toy = load_tokenizer(folder), toy_tokenizer()
    assert (read.name, read.vocab_size, read.bos_id) == ("model", VOCAB_SIZE, BOS)
    assert read.eos_ids == {EOS, IM_END}
    assert read.special_ids == toy.special_ids
    assert [read.token_bytes(i) for i in range(VOCAB_SIZE)] == [toy.token_bytes(i) for i in range(VOCAB_SIZE)]
    for text in TEXTS:
        for mode in (False, True):
            ours = read.encode(text, add_special_tokens=True, parse_special=mode)
            assert ours == toy.encode(text, add_special_tokens=True, parse_special=mode)


def test_the_toy_folder_adds_bos_if_asked(tmp_path: Path) -> None:
    ours = load_tokenizer(write_toy_folder(tmp_path, add_bos=True))
    assert ours.encode("a", add_special_tokens=True, parse_special=True) == [BOS, 97]
    assert ours.encode("a", add_special_tokens=False, parse_special=True) == [97]


POST_PROCESSORS: Mapping[str, Any] = {
    "none": None,
    "byte level": processors.ByteLevel(trim_offsets=False),
    "bos": processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)]),
    "bos and eos": processors.TemplateProcessing(
        single="<|bos|> $A <|eos|>", special_tokens=[("<|bos|>", BOS), ("<|eos|>", EOS)]
    ),
}


@pytest.mark.parametrize("processor", POST_PROCESSORS)
@pytest.mark.parametrize("add_bos", [None, False, True])
def test_special_tokens_around_a_prompt_as_transformers_does(
    folder: Path, processor: str, add_bos: bool | None
) -> None:
    backend = toy_backend()
    if POST_PROCESSORS[processor] is not None:
        backend.post_processor = POST_PROCESSORS[processor]
    backend.save(str(folder / "tokenizer.json"))
    edit(folder / "tokenizer_config.json", add_bos_token=add_bos)  # beside a tokenizer.json it counts for nothing
    oracle, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    for text in TEXTS:
        expected = oracle.encode(text)
        if expected[:2] == [BOS, BOS]:
            expected = expected[1:]  # the one difference: no second BOS before one that is written
        assert ours.encode(text, add_special_tokens=True, parse_special=True) == expected
        bare = oracle.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False, parse_special=True) == bare


def test_chat_as_transformers_does(folder: Path) -> None:
    oracle: Any = AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder)
    text = ours.render_chat(USER)
    assert text == oracle.apply_chat_template(USER, tokenize=False, add_generation_prompt=True)
    ids = ours.encode(text, add_special_tokens=False, parse_special=True)
    assert ids == oracle.apply_chat_template(USER, add_generation_prompt=True)["input_ids"]


def test_truncation_and_padding_left_from_training_are_off(folder: Path) -> None:
    backend = toy_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=16, pad_id=PAD, pad_token="<|pad|>")
    backend.save(str(folder / "tokenizer.json"))
    ours = load_tokenizer(folder)
    assert ours.encode("zzzzzzzz", add_special_tokens=True, parse_special=True) == [122] * 8


def test_tokens_that_only_the_config_adds(folder: Path) -> None:
    decoder = {
        str(VOCAB_SIZE): {"content": "<think>", "special": False},
        str(EOS): {"content": "<|eos|>", "special": True},
    }
    edit(folder / "tokenizer_config.json", added_tokens_decoder=decoder)
    ours = load_tokenizer(folder)
    for mode in (False, True):
        assert ours.encode("a<think>b", add_special_tokens=True, parse_special=mode) == [97, VOCAB_SIZE, 98]
    assert ours.vocab_size == VOCAB_SIZE + 1
    assert ours.decode([VOCAB_SIZE]) == "<think>"  # not special: it is text
    edit(folder / "tokenizer_config.json", added_tokens_decoder={"999": {"content": "<think>"}})
    with pytest.raises(ModelError, match="'<think>' the id 999"):
        load_tokenizer(folder)


def test_added_tokens_are_literal_text_whatever_their_characters(folder: Path) -> None:
    # In the byte-level alphabet é stands for the byte E9.
    edit(folder / "tokenizer_config.json", added_tokens_decoder={str(VOCAB_SIZE): {"content": "<é>"}})
    assert load_tokenizer(folder).token_bytes(VOCAB_SIZE) == "<é>".encode()


def test_additional_special_tokens_are_special(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", additional_special_tokens=["Ġthe"])
    the = 256 + 5 + 2
    assert load_tokenizer(folder).is_special(the)
    edit(folder / "tokenizer_config.json", additional_special_tokens=None)
    assert not load_tokenizer(folder).is_special(the)


def test_named_tokens_written_as_objects_or_in_the_map(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", bos_token={"content": "<|bos|>", "lstrip": False}, eos_token=None)
    edit(folder / "special_tokens_map.json", eos_token={"content": "<|im_end|>"})
    ours = load_tokenizer(folder)
    assert ours.bos_id == BOS
    assert ours.eos_ids == {EOS, IM_END}


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ([EOS, 7], {"eos_token_id": 9}, {EOS, 7}),
        (7, None, {EOS, 7}),
        (None, {"eos_token_id": [9, 8]}, {EOS, 9, 8}),
        (None, None, {EOS}),
    ],
)
def test_more_ids_that_end_an_answer(folder: Path, generation: Any, config: Any, expected: set[int]) -> None:
    edit(folder / "tokenizer_config.json", chat_template=None)
    (folder / "generation_config.json").unlink()
    if generation is not None:
        edit(folder / "generation_config.json", eos_token_id=generation)
    if config is not None:
        edit(folder / "config.json", **config)
    assert load_tokenizer(folder).eos_ids == expected


def test_the_templates_turn_end_ends_an_answer(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert load_tokenizer(folder).eos_ids == {EOS, IM_END}


def test_chat_template_sources(folder: Path) -> None:
    def rendered(**arguments: Any) -> str:
        return load_tokenizer(folder).render_chat(USER, **arguments)

    tools = [{"type": "function"}]
    named = [{"name": "default", "template": "config"}, {"name": "tool_use", "template": "config tools"}]
    edit(folder / "tokenizer_config.json", chat_template=named)
    assert (rendered(), rendered(tools=tools)) == ("config", "config tools")
    edit(folder / "chat_template.json", chat_template="json")
    assert (rendered(), rendered(tools=tools)) == ("json", "config tools")
    (folder / "chat_template.jinja").write_text("{{ bos_token }}jinja é", "utf-8")
    assert rendered() == "<|bos|>jinja é"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("file tools")
    assert rendered(tools=tools) == "file tools"


def test_without_a_template_there_is_none(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template=None)
    assert load_tokenizer(folder).chat_template is None


# ---- SentencePiece spelling -------------------------------------------------------------------------


def sentencepiece_folder(path: Path, decoder: decoders.Decoder, *, prepend: bool) -> Path:
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "ab",
        "▁ab",
        "é",
    ]
    merges = [("a", "b"), ("▁", "a"), ("▁", "ab"), ("▁a", "b")]
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    steps = [normalizers.Prepend("▁")] if prepend else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in pieces[:3]])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    path.mkdir()
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return path


LLAMA2 = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]


def test_sentencepiece_folder_gives_exact_bytes(tmp_path: Path) -> None:
    ours = load_tokenizer(sentencepiece_folder(tmp_path / "m", decoders.Sequence(LLAMA2), prepend=True))
    ids = ours.encode("ab 日 é", add_special_tokens=True, parse_special=True)
    assert ids[0] == 1
    assert b"".join(ours.token_bytes(i) for i in ids[1:]) == " ab 日 é".encode()
    # The library strips the first space; here text continues a prompt, and the space belongs to it.
    decoder = Detokenizer(ours)
    assert "".join([*(decoder.push(i) for i in ids), decoder.finish()]) == " ab 日 é"


def test_metaspace_decoder_is_known(tmp_path: Path) -> None:
    ours = load_tokenizer(sentencepiece_folder(tmp_path / "m", decoders.Metaspace(), prepend=False))
    assert ours.decode(ours.encode("a ab", add_special_tokens=True, parse_special=True)) == "a ab"


# ---- refusals ---------------------------------------------------------------------------------------


def test_a_folder_with_sentencepiece_only_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"tokenizer\.model, but no tokenizer\.json; convert"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)


def word_piece() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))


def no_decoder() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


@pytest.mark.parametrize(
    ("backend", "words"), [(word_piece, "WordPiece is not supported"), (no_decoder, "decoder Whitespace")]
)
def test_tokenizers_of_other_kinds_are_refused(tmp_path: Path, backend: Any, words: str) -> None:
    backend().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match=words):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json: cannot be read"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json: cannot be read"),
        ("tokenizer_config.json", "[]", "must be a JSON object"),
        ("tokenizer_config.json", '{"eos_token": "<nope>"}', "eos_token '<nope>' is not in the vocabulary"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "not valid Jinja"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}', "added_tokens_decoder"),
        ("generation_config.json", '{"eos_token_id": true}', "eos_token_id must be"),
        ("generation_config.json", '{"eos_token_id": ["2"]}', "eos_token_id must be"),
    ],
)
def test_broken_files_are_named(folder: Path, file: str, content: str, words: str) -> None:
    (folder / file).write_text(content)
    with pytest.raises(ModelError, match=words):
        load_tokenizer(folder)


def test_smollm2_saved_as_a_folder_is_the_same_tokenizer(tmp_path: Path, smollm: Tokenizer) -> None:
    smollm._backend.save(str(tmp_path / "tokenizer.json"))
    edit(tmp_path / "tokenizer_config.json", bos_token="<|im_start|>", eos_token="<|im_end|>")
    ours = load_tokenizer(tmp_path)
    assert ours.special_ids == smollm.special_ids
    assert [ours.token_bytes(i) for i in range(49152)] == [smollm.token_bytes(i) for i in range(49152)]
