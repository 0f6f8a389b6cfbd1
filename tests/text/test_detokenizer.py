"""Streaming text against the text of the same ids decoded at once (B96)."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headwater.text.detokenizer import Detokenizer
from headwater.text.tokenizer import Tokenizer
from tests.text.toy import EOS, IM_START, VOCAB_SIZE, toy_tokenizer

REPLACED = "\ufffd"
TOY = toy_tokenizer()

byte_ids = st.integers(0, 255)
any_ids = st.lists(st.one_of(byte_ids, st.integers(0, VOCAB_SIZE + 3)), max_size=40)


def stream(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True) -> list[str]:
    decoder = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*(decoder.push(i) for i in ids), decoder.finish()]


@given(any_ids, st.booleans())
@example([0xF0, 0x9F, EOS, 0x98, 0x80], True)
@example([0xF0, 0x9F, EOS, 0x98, 0x80], False)
@example([0xED, 0xA0, 0x80, 0xC0, 0x80, 0xF4, 0x90, 0x80, 0x80], True)
def test_B96_stream_equals_the_whole_toy(ids: list[int], skip: bool) -> None:
    whole = b"".join(TOY.token_bytes(i) for i in ids if not (skip and TOY.is_special(i))).decode(errors="replace")
    assert "".join(stream(TOY, ids, skip=skip)) == whole
    assert TOY.decode(ids, skip_special_tokens=skip) == whole


@pytest.mark.parametrize("model", ["smollm", "gemma"])
def test_B96_stream_equals_the_whole_real_vocabularies(model: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(model)
    partial = [i for i in range(tokenizer.vocab_size) if not is_utf8(tokenizer.token_bytes(i))]
    assert len(partial) > 100  # bytes, and parts of characters in between

    @given(st.lists(st.one_of(st.sampled_from(partial), st.integers(0, tokenizer.vocab_size - 1)), max_size=40))
    def check(ids: list[int]) -> None:
        for skip in (True, False):
            assert "".join(stream(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)

    check()


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@given(st.text(max_size=20))
def test_each_character_comes_with_its_last_byte(text: str) -> None:
    pieces = stream(TOY, list(text.encode()))
    expected = [piece for char in text for piece in [""] * (len(char.encode()) - 1) + [char]]
    assert pieces == [*expected, ""]


def test_B96_a_character_over_two_tokens_comes_in_one_event() -> None:
    assert stream(TOY, [0xF0, 0x9F, 0x98, 0x80]) == ["", "", "", "😀", ""]


def test_B96_end_of_text_inside_a_character_gives_one_replacement() -> None:
    assert stream(TOY, [0x61, 0xF0, 0x9F]) == ["a", "", "", REPLACED]


def test_B96_invalid_byte_then_ascii() -> None:
    assert stream(TOY, [0x61, 0xFF, 0x62]) == ["a", REPLACED, "b", ""]
    assert stream(TOY, [0xF0, 0x9F, 0x62]) == ["", "", REPLACED + "b", ""]


def test_special_tokens_are_skipped_or_shown() -> None:
    ids = [0x61, IM_START, 0x62]
    assert stream(TOY, ids) == ["a", "", "b", ""]
    assert stream(TOY, ids, skip=False) == ["a", "<|im_start|>", "b", ""]


def test_ids_that_only_pad_the_embedding_have_no_text() -> None:
    assert stream(TOY, [0x61, VOCAB_SIZE, 10**6, 0x62]) == ["a", "", "", "b", ""]


def test_a_negative_id_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        Detokenizer(TOY).push(-1)


def test_the_first_space_is_kept(gemma: Tokenizer) -> None:
    ids = gemma.encode(" Paris", add_special_tokens=False, parse_special=False)
    assert stream(gemma, ids)[0] == " Paris"
