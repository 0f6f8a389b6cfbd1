"""Mission 1 (a prefix, not a substring, not a meaning) and 2 (the chain), through the whole engine."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.cache.extras import MediaSpan
from headwater.errors import CacheError
from headwater.text.chat_template import ChatTemplate
from headwater.types import Namespace
from tests.cache.cache_model import BASE, make_cache, span
from tests.e2e.compare import assert_same, oracle
from tests.e2e.engine import Answer, Engine, Loaded, some_tokens

VOCAB = 300
SYSTEM = "You answer questions about rivers, and you answer them in one short and friendly sentence."


@pytest.fixture
def engine(plain: Loaded) -> Engine:
    return Engine(plain)


def ids(loaded: Loaded, text: str, *, parse_special: bool = True) -> list[int]:
    return loaded.tokenizer.encode(text, add_special_tokens=False, parse_special=parse_special)


def ask(engine: Engine, text: str) -> Answer:
    return engine.generate(ids(engine.loaded, text))


def chat(engine: Engine, user: str, **kwargs: Any) -> Answer:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]
    return ask(engine, engine.loaded.tokenizer.render_chat(messages, **kwargs))


def common(a: list[int], b: list[int]) -> int:
    """Number of equal tokens from position 0."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# ---- mission 1 ----------------------------------------------------------------------------------


def test_what_is_compared_is_token_ids_after_template_and_tokenizer(engine: Engine) -> None:
    # mission 1: ids that the model is fed, after chat template and tokenizer, from position 0
    first, second = chat(engine, "Where does the Nile end?"), chat(engine, "Where does the Rhine end?")
    assert engine.model.calls[0].tokens == first.prompt
    shared = common(first.prompt, second.prompt)
    assert second.n_cached == shared // 16 * 16 >= 64
    assert second.prompt[: second.n_cached] + engine.model.calls[-1].tokens == second.prompt
    # The same ids by another way, without template or text, are the same prompt.
    again = engine.generate(list(second.prompt))
    assert again.n_cached == (len(second.prompt) - 1) // 16 * 16


def test_equal_text_in_the_middle_after_another_history_never_hits(engine: Engine) -> None:
    # mission 1: a substring is no prefix
    middle = some_tokens(64, seed=1, vocab=VOCAB)
    engine.generate(some_tokens(16, seed=2, vocab=VOCAB) + middle)
    answer = engine.generate(some_tokens(16, seed=3, vocab=VOCAB) + middle)
    assert answer.n_cached == 0
    assert engine.generate(middle).n_cached == 0, "nor does it as the beginning"
    assert engine.counters["prefix_hits"] == 0


def test_a_paraphrase_never_hits(engine: Engine) -> None:
    # mission 1 and 9: "same meaning is reused" is a misreading
    first = ask(engine, "What is the way to reset my password, please? I forgot it and cannot sign in any more.")
    second = ask(engine, "How do I reset my password, please? I forgot it and cannot sign in any more.")
    assert min(len(first.prompt), len(second.prompt)) > 48
    assert second.n_cached == 0


@pytest.mark.parametrize(
    ("before", "after"),
    [("request 17: ", "request 42: "), ("09:15:00 ", "19:15:00 "), ("", "x")],
    ids=["request id", "clock", "one more token"],
)
def test_one_different_token_at_the_start_makes_every_later_block_miss(engine: Engine, before: str, after: str) -> None:
    # mission 1
    first, second = ask(engine, before + SYSTEM), ask(engine, after + SYSTEM)
    assert common(first.prompt, second.prompt) < 16
    assert second.n_cached == 0
    assert second.stop == "differs"


def test_punctuation_counts(engine: Engine) -> None:
    # mission 1: everything up to the block of the comma, nothing after it
    first = ask(engine, SYSTEM)
    second = ask(engine, SYSTEM.replace("rivers,", "rivers;"))
    at = common(first.prompt, second.prompt)
    assert 16 < at < len(first.prompt) - 32
    assert second.n_cached == at // 16 * 16


@pytest.mark.parametrize("parse_special", [True, False], ids=["another special token", "the same as text"])
def test_special_tokens_count(engine: Engine, plain: Loaded, parse_special: bool) -> None:
    # mission 1: a special token is one id, and neither another one nor its own spelling
    text = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
    engine.generate(ids(plain, text))
    other = text.replace("<|im_start|>", "<|bos|>") if parse_special else text
    assert engine.generate(ids(plain, other, parse_special=parse_special)).n_cached == 0
    assert engine.generate(ids(plain, "<|bos|>" + text)).n_cached == 0
    assert engine.generate(ids(plain, text)).n_cached > 0


TOOLS_TEMPLATE = (
    "<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
)


def test_the_order_of_a_tools_json_counts(engine: Engine) -> None:
    # mission 1: equal objects, written in another order, are other tokens
    template = ChatTemplate(TOOLS_TEMPLATE)
    messages = [{"role": "user", "content": SYSTEM}]
    weather = {"name": "weather", "description": "the weather of a place", "parameters": {"place": "a text"}}
    turned = dict(reversed(weather.items()))
    clock = {"name": "clock", "description": "the time of a place", "parameters": {}}
    assert weather == turned
    first = ask(engine, template.render(messages, [weather, clock]))
    for tools in ([turned, clock], [clock, weather]):
        answer = ask(engine, template.render(messages, tools))
        assert sorted(answer.prompt) == sorted(first.prompt) or len(answer.prompt) != len(first.prompt)
        assert answer.n_cached == common(first.prompt, answer.prompt) // 16 * 16 <= 16
    assert ask(engine, template.render(messages, [weather, clock])).n_cached > 64


def test_the_templates_version_counts(engine: Engine) -> None:
    # mission 1: a template that starts another way leaves nothing to reuse, though the messages are the same
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Where does the Nile end?"}]
    assert engine.loaded.tokenizer.chat_template is not None
    old = engine.loaded.tokenizer.chat_template.sources["default"]
    ask(engine, ChatTemplate(old).render(messages))
    assert ask(engine, ChatTemplate("{# version 2 #}" + old).render(messages)).n_cached > 64, "a comment is no token"
    assert ask(engine, ChatTemplate("<|bos|>" + old).render(messages)).n_cached == 0
    assert ask(engine, ChatTemplate(old.replace("\n", " ")).render(messages)).n_cached == 0


# ---- mission 2 ----------------------------------------------------------------------------------


def keys(tokens: list[int], namespace: Namespace = BASE, extras: tuple[MediaSpan, ...] = ()) -> list[bytes]:
    chain = make_cache().chain(namespace, tokens, extras)
    return list(chain.keys(chain.n_units))


def test_a_key_depends_on_parent_tokens_and_extras_and_on_nothing_else() -> None:
    # mission 2: H1 = hash(tokens1, extra), Hi = hash(H(i-1), tokens_i, extra); relations, not integers
    base = keys(span(1, 16))
    assert len(set(base)) == 4
    assert keys(span(1, 16)) == base
    assert keys(span(1, 20))[:4] == base, "what follows does not matter"
    for i in range(16):
        changed = keys([*span(1, i), 99, *span(i + 2, 16)])
        assert [a == b for a, b in zip(base, changed, strict=True)] == [block < i // 4 for block in range(4)]
    with_media = keys(span(1, 16), extras=(MediaSpan(b"picture", 9, 2),))
    assert [a == b for a, b in zip(base, with_media, strict=True)] == [True, True, False, False]


def test_the_same_block_after_another_history_has_another_identity() -> None:
    # mission 2
    assert not set(keys([1, 2, 3, 4, 5, 6, 7, 8])) & set(keys([9, 9, 9, 9, 5, 6, 7, 8]))


def test_1_to_8_and_9999_5678_share_nothing(plain: Loaded) -> None:
    # mission 2, B = 4
    engine = Engine(plain, block_size=4)
    engine.generate([1, 2, 3, 4, 5, 6, 7, 8, 20])
    answer = engine.generate([9, 9, 9, 9, 5, 6, 7, 8, 20])
    assert answer.n_cached == 0
    assert_same(answer, oracle(plain, answer.prompt, 1), plain)
    assert engine.generate([1, 2, 3, 4, 5, 6, 7, 8, 20]).n_cached == 8


def test_a_partial_block_has_no_identity(plain: Loaded) -> None:
    # mission 2
    chain = make_cache().chain(BASE, span(1, 7))
    assert chain.n_units == 1
    with pytest.raises(CacheError, match="only 1 units are full"):
        chain.keys(2)
    engine = Engine(plain, block_size=4)
    engine.generate(span(1, 7))
    assert [engine.generate([*span(1, 7), token]).n_cached for token in (50, 51)] == [4, 4]


def test_another_salt_changes_the_first_block_and_through_the_chain_all() -> None:
    # mission 2
    salts = [None, "", "a", "b"]
    all_keys = [keys(span(1, 16), Namespace(b"weights", salt=salt)) for salt in salts]
    assert len({key for chain in all_keys for key in chain}) == 4 * len(salts)


def test_position_needs_no_field_of_its_own(plain: Loaded) -> None:
    # mission 2: the same four tokens at four places are four contents, by the chain alone
    assert len(set(keys([5] * 16))) == 4
    engine = Engine(plain, block_size=4)
    first = engine.generate([5] * 17)
    assert first.n_cached == 0, "a prompt does not hit its own blocks"
    second = engine.generate([5] * 13)
    assert second.n_cached == 12
    assert_same(second, oracle(plain, [5] * 13, 1), plain)
