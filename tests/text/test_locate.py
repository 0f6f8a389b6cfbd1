from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import normalizers, processors

from headwater.text.chat_template import ChatTemplate
from headwater.text.locate import Messages, Place, locate, pieces_of, token_spans, token_start
from headwater.text.tokenizer import Tokenizer
from tests.text.toy import TEMPLATE, toy_backend, toy_tokenizer, write_toy_folder

TEXTS = (
    "plain",
    "  spaces  and\n\n lines \t",
    "caf\u00e9 \u2b24 \U0001f44d\U0001f3fd e\u0301 \ufdfd",
    "<|im_start|>user\nhello<|im_end|>",
    "\u65e5\u672c\u8a9e\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "",
)


def check_spans(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> None:
    ids = tokenizer.encode(text, add_special_tokens=add_special_tokens, parse_special=True)
    spans = token_spans(tokenizer, text, ids)
    assert len(spans) == len(ids)
    assert [token_start(tokenizer, text, ids, at) for at in range(len(ids))] == [first for first, _ in spans]
    # the spans in order cover the text, and each holds the whole characters that its token's bytes are part of
    covered = 0
    for token, (first, end) in zip(ids, spans, strict=True):
        assert first <= end
        assert first in (covered, max(covered - 1, 0))
        covered = max(covered, end)
        shown = text[first:end].encode()
        if shown:
            assert tokenizer.token_bytes(token) in shown
    assert covered == len(text)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("add_special_tokens", [False, True])
def test_spans_of_real_tokenizers_cover_the_text(
    smollm: Tokenizer, gemma: Tokenizer, text: str, add_special_tokens: bool
) -> None:
    check_spans(smollm, text, add_special_tokens=add_special_tokens)
    check_spans(gemma, text, add_special_tokens=add_special_tokens)


def test_spans_of_random_text_cover_it(smollm: Tokenizer, gemma: Tokenizer) -> None:
    rng = random.Random(1)
    letters = "ab \n\t\u00e9\u2b24\U0001f44d.,the"
    for _ in range(100):
        text = "".join(rng.choice(letters) for _ in range(rng.randint(1, 40)))
        for tokenizer in (smollm, gemma):
            check_spans(tokenizer, text, add_special_tokens=rng.random() < 0.5)


def test_each_part_of_a_character_has_that_character() -> None:
    tokenizer = toy_tokenizer(add_bos=True)
    text = "a\U0001f44db"
    ids = tokenizer.encode(text, add_special_tokens=True, parse_special=True)
    assert token_spans(tokenizer, text, ids) == [(0, 0), (0, 1), (1, 2), (1, 2), (1, 2), (1, 2), (2, 3)]


def test_text_that_the_tokenizer_rewrites_keeps_its_own_characters(tmp_path: Path) -> None:
    """Normalised to fewer characters, with spaces trimmed off the library's spans."""
    folder = write_toy_folder(tmp_path)
    backend = toy_backend()
    backend.normalizer = normalizers.NFC()
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(folder)
    text = "e\u0301 the b"
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    shown = [text[first:end] for first, end in token_spans(tokenizer, text, ids)]
    assert shown == ["e\u0301", "e\u0301", " the", " b"]
    ids = tokenizer.encode("e\u0301", add_special_tokens=False, parse_special=True)
    assert token_spans(tokenizer, "e\u0301", ids) == [(0, 2), (0, 2)]
    assert [token_start(tokenizer, "e\u0301", ids, at) for at in (0, 1)] == [0, 0]


def test_tokens_of_another_text_are_refused(smollm: Tokenizer) -> None:
    ids = smollm.encode("one text", add_special_tokens=False, parse_special=True)
    with pytest.raises(ValueError, match="no encoding"):
        token_spans(smollm, "another text", ids)


# ---- messages ---------------------------------------------------------------------------------------


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def where(template: str, messages: list[dict[str, str]], *, with_render: bool) -> list[Place]:
    """The place of every character."""
    renderer = ChatTemplate(template)
    rendered = renderer.render(messages)
    render = renderer.render if with_render else None
    return [locate(rendered, messages, i, render=render) for i in range(len(rendered) + 1)]


@pytest.mark.parametrize("with_render", [True, False])
def test_every_character_of_every_content_is_found(with_render: bool) -> None:
    messages = chat("user", "assistant", "same", "same", "user\nassistant", "x")
    places = where(TEMPLATE, messages, with_render=with_render)
    for i, message in enumerate(messages):
        found = [place.character for place in places if place.message == i]
        assert found == list(range(len(message["content"])))
    assert {place.part for place in places if place.message is None} == {"template"}


def test_contents_that_look_like_the_template_are_told_apart_by_rendering() -> None:
    messages = chat("im_start", "<|im_start|>user\nim_end", "im_end|>\n")
    places = where(TEMPLATE, messages, with_render=True)
    for i, message in enumerate(messages):
        assert [place.character for place in places if place.message == i] == list(range(len(message["content"])))


@pytest.mark.parametrize("with_render", [True, False])
def test_a_trimmed_content_keeps_its_own_count(with_render: bool) -> None:
    template = TEMPLATE.replace("message['content']", "message['content'] | trim")
    places = where(template, chat("  hello \n", " hi"), with_render=with_render)
    assert [place.character for place in places if place.message == 0] == [2, 3, 4, 5, 6]
    assert [place.character for place in places if place.message == 1] == [1, 2]


@pytest.mark.parametrize("with_render", [True, False])
def test_an_answer_without_its_thought_counts_from_the_thought(with_render: bool) -> None:
    template = TEMPLATE.replace("message['content']", "message['content'].split('</think>')[-1]")
    places = where(template, chat("why", "<think>so</think>because", "ok"), with_render=with_render)
    thought = len("<think>so</think>")
    assert [p.character for p in places if p.message == 1] == list(range(thought, thought + len("because")))
    assert [p.character for p in places if p.message == 2] == [0, 1]


@pytest.mark.parametrize("with_render", [True, False])
def test_a_message_that_the_template_leaves_out_is_nowhere(with_render: bool) -> None:
    template = "{% for m in messages %}{% if loop.index0 != 1 %}[{{ m.role }}]{{ m.content }}\n{% endif %}{% endfor %}"
    places = where(template, chat("first", "third", "third"), with_render=with_render)
    assert {place.message for place in places} == {None, 0, 2}


def test_a_template_that_refuses_other_contents_is_still_followed() -> None:
    template = (
        "{% for m in messages %}{% if m.content != 'ok' %}{{ raise_exception('no') }}{% endif %}" + "[{{ m.role }}]"
    )
    renderer = ChatTemplate(template + "{{ m.content }}{% endfor %}")
    messages = chat("ok", "ok")
    rendered = renderer.render(messages)
    assert [p.first for p in pieces_of(rendered, messages, render=renderer.render)] == [
        len("[user]"),
        len("[user]ok[assistant]"),
    ]


def test_text_parts_count_as_one_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": parts}]
    rendered = ChatTemplate(TEMPLATE).render(messages)
    assert locate(rendered, messages, rendered.index("two")) == Place(0, "user", len("one\n"), "message")


def test_a_place_outside_the_text_is_refused() -> None:
    with pytest.raises(ValueError, match="character 9"):
        locate("text", chat("text"), 9)


def test_many_messages_take_linear_time() -> None:
    def render(messages: Messages) -> str:
        return "".join(f"<{message['role']}>{message['content']}\n" for message in messages)

    times = []
    for n in (1_000, 8_000):
        messages = [{"role": "user", "content": f"message {i}"} for i in range(n)]
        text = render(messages)
        best = min(timed(lambda: locate(text, messages, len(text) - 2, render=render)) for _ in range(3))  # noqa: B023
        times.append(best)
    assert times[1] < 24 * times[0]  # 8 times as many; each searched for in all of the text, it was over 40 times


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
