from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from headwater.errors import BadRequest
from headwater.explaining.cause import Cause
from headwater.explaining.diff import Comparison, Relation, Side, compare_bodies
from headwater.text.tokenizer import Tokenizer
from tests.explaining.planted import body, make_tools, tools_tokenizer
from tests.text.toy import TEMPLATE, toy_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tools_tokenizer()


def diff(tokenizer: Tokenizer, first: Any, second: Any) -> Comparison:
    return compare_bodies(first, second, tokenizer, block_size=4)


def sides(found: Comparison) -> tuple[Side, Side]:
    assert found.first is not None and found.second is not None
    return found.first, found.second


def test_equal(tokenizer: Tokenizer) -> None:
    found = diff(tokenizer, body("a", "b"), {**body("a", "b"), "temperature": 1, "seed": 3})
    assert (found.relation, found.cause, found.first) == (Relation.EQUAL, None, None)
    assert found.n_shared_blocks == found.n_shared_tokens // 4 > 0


def test_a_text_names_message_character_and_token(tokenizer: Tokenizer) -> None:
    found = diff(tokenizer, body("rules", "go left"), body("rules", "go right"))
    first, second = sides(found)
    assert (found.relation, found.cause) == (Relation.DIFFER, Cause.TEXT)
    assert (first.message, first.role, first.field, first.character) == (1, "user", "messages[1].content", 3)
    assert first.before.endswith("go ") and first.after.startswith("left") and second.after.startswith("right")
    assert first.token is not None and first.token.index == found.n_shared_tokens
    assert tokenizer.decode([first.token.token_id]) == first.token.text


def test_a_content_that_goes_on_differs_at_its_end(tokenizer: Tokenizer) -> None:
    short, long = body("rules", "go"), body("rules", "go on")
    for pair in ((short, long), (long, short)):
        first, second = sides(diff(tokenizer, *pair))
        assert (first.message, first.character) == (second.message, second.character) == (1, 2)


def test_a_difference_inside_a_character_is_that_character(tokenizer: Tokenizer) -> None:
    found = diff(tokenizer, body("rules", "x \U0001f44d y"), body("rules", "x \U0001f44e y"))
    first, second = sides(found)
    assert (first.character, first.after[0], second.after[0]) == (2, "\U0001f44d", "\U0001f44e")
    rendered = tokenizer.render_chat(body("rules", "x \U0001f44d y")["messages"])
    before = tokenizer.encode(rendered[: first.text_character], add_special_tokens=False, parse_special=True)
    same_bytes = found.n_shared_tokens - len(before)
    assert same_bytes == 3  # of four: the tokens part within the character


def test_a_conversation_begins_its_next_turn(tokenizer: Tokenizer) -> None:
    found = diff(tokenizer, body("rules", "go"), body("rules", "go", "left", "why"))
    assert (found.relation, found.cause) == (Relation.FIRST_IS_PREFIX, None)
    assert sides(found)[0].token is None
    assert sides(found)[1].message == 2
    swapped = diff(tokenizer, body("rules", "go", "left", "why"), body("rules", "go"))
    assert swapped.relation is Relation.SECOND_IS_PREFIX


def test_the_order_of_tools_and_of_their_keys(tokenizer: Tokenizer) -> None:
    tools = make_tools(random.Random(1))
    turned = [dict(reversed(tool.items())) for tool in tools]
    renamed = copy.deepcopy(tools)
    renamed[2]["function"]["name"] = "other"
    asked = [body("rules", "go", tools=given) for given in (tools, tools[::-1], turned, renamed)]
    assert diff(tokenizer, asked[0], asked[1]).cause is Cause.TOOL_ORDER
    assert diff(tokenizer, asked[0], asked[2]).cause is Cause.TOOL_KEYS
    found = diff(tokenizer, asked[0], asked[3])
    assert (found.cause, sides(found)[0].field) == (Cause.TEXT, "tools[2].function.name")


def test_tools_that_are_not_written_make_no_difference() -> None:
    tools = make_tools(random.Random(1))
    plain = toy_tokenizer(chat_template=TEMPLATE)
    found = diff(plain, body("rules", "go", tools=tools), body("rules", "go", tools=tools[::-1]))
    assert found.relation is Relation.EQUAL


def test_a_template_that_removes_reasoning(tokenizer: Tokenizer) -> None:
    thought = "<think>\nhm\n</think>\n\nleft"
    messages = body("rules", "go", thought, "why")["messages"]
    before = {"messages": messages[:3], "add_generation_prompt": False}
    found = diff(tokenizer, before, {"messages": messages})
    assert found.cause is Cause.TEMPLATE
    assert sides(found)[0].field == "messages[2].content"
    assert "reasoning is removed" in found.sentence


def test_a_template_that_trims(tokenizer: Tokenizer) -> None:
    found = diff(tokenizer, body("rules", "go  "), body("rules", "go  ", "left", "why"))
    assert found.cause is Cause.TEMPLATE
    assert "trimmed" in found.sentence and sides(found)[0].message == 1


def test_a_system_prompt_of_the_template_s_own(smollm: Tokenizer) -> None:
    without = body("x", "go")
    without["messages"] = without["messages"][1:]
    found = diff(smollm, body("Be short.", "go"), without)
    assert found.cause is Cause.TEMPLATE and "system prompt of its own" in found.sentence


def test_arguments_of_the_template() -> None:
    template = TEMPLATE + "{% if think %}<think>{% endif %}"
    tokenizer = toy_tokenizer(chat_template=template)
    asked = [{**body("rules", "go"), "chat_template_kwargs": {"think": think}} for think in (True, False)]
    other = [{**one, "messages": [*one["messages"], {"role": "user", "content": "x"}]} for one in asked]
    found = diff(tokenizer, asked[0], other[1])
    assert found.relation is Relation.DIFFER
    found = diff(tokenizer, {**asked[0], "add_generation_prompt": False}, {**asked[0], "add_generation_prompt": True})
    assert (found.cause, sides(found)[0].field) == (Cause.TEMPLATE, "add_generation_prompt")


def test_a_role(tokenizer: Tokenizer) -> None:
    other = body("rules", "go")
    other["messages"][1]["role"] = "assistant"
    found = diff(tokenizer, body("rules", "go"), other)
    assert (found.cause, sides(found)[0].field) == (Cause.TEXT, "messages[1].role")


def test_the_same_text_that_merges_with_what_follows(tokenizer: Tokenizer) -> None:
    found = diff(tokenizer, {"prompt": "a t"}, {"prompt": "a the"})
    first, second = sides(found)
    assert (found.relation, found.cause) == (Relation.DIFFER, Cause.TOKENIZER)
    assert first.token is not None and second.token is not None
    assert (first.token.text, second.token.text, first.character, first.field) == (" t", " the", 1, "prompt")


def test_the_same_text_in_other_tokens(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.encode(char, add_special_tokens=False, parse_special=True)[0] for char in "the"]
    found = diff(tokenizer, {"prompt": "the"}, {"prompt": ids})
    assert (found.cause, found.n_shared_chars) == (Cause.TOKENIZER, 3)


def test_tool_calls_are_compared_as_they_are(tokenizer: Tokenizer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    one = body("rules", "go")
    one["messages"].append({"role": "assistant", "content": None, "tool_calls": [call]})
    assert diff(tokenizer, one, copy.deepcopy(one)).relation is Relation.EQUAL


def test_salts_are_told_to_differ_but_not_shown(tokenizer: Tokenizer) -> None:
    found = diff(tokenizer, {**body("a", "b"), "cache_salt": "pepper"}, {**body("a", "b"), "cache_salt": "thyme"})
    assert found.relation is Relation.EQUAL
    assert "cache_salt" in found.namespaces and "pepper" not in repr(found)


@pytest.mark.parametrize(
    ("second", "field"),
    [
        ({}, "second"),
        ([], "second"),
        ({"prompt": 3}, "second.prompt"),
        ({"prompt": [1, 10**6]}, "second.prompt"),
        ({"prompt": ["a", "b"]}, "second.prompt"),
        ({"messages": []}, "second.messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "second.messages[0].content"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": [3]}, "second.tools"),
        ({"messages": [{"role": "user", "content": "a"}], "chat_template": "x"}, "second.chat_template"),
        ({"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": 1}, "second.add_generation_prompt"),
        ({"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": 1}, "second.chat_template_kwargs"),
        ({"prompt": "lone \ud800"}, "second.prompt"),
    ],
)
def test_a_body_that_makes_no_prompt_is_refused_by_name(tokenizer: Tokenizer, second: Any, field: str) -> None:
    with pytest.raises(BadRequest) as refused:
        diff(tokenizer, {"prompt": "a"}, second)
    assert refused.value.field == field
