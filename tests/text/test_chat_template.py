"""Chat templates against Transformers' rendering, and their bounds."""

from __future__ import annotations

import json
import threading
from datetime import datetime
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from headwater.errors import BadRequest, ModelError, NoChatTemplate
from headwater.text import sandbox
from headwater.text.chat_template import ChatTemplate
from headwater.text.tokenizer import Tokenizer
from tests.text.toy import TEMPLATE, toy_backend, toy_tokenizer

USER = [{"role": "user", "content": "Hi <b>&\"' é 日本 😀\n  "}]
CHAT = [
    {"role": "system", "content": "  Be brief. "},
    *USER,
    {"role": "assistant", "content": "Yes?  "},
    {"role": "user", "content": "Why?"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "It's <hot> & é",
            "parameters": {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "number"}}},
        },
    }
]
CALLS: list[dict[str, Any]] = [
    *USER,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"z": 1, "a": "é<"}}}],
    },
    {"role": "tool", "content": "12 °C"},
]


def transformers_with(source: str) -> Any:
    """Transformers' tokenizer with this chat template."""
    build: Any = PreTrainedTokenizerFast
    return build(tokenizer_object=toy_backend(), bos_token="<|bos|>", eos_token="<|eos|>", chat_template=source)


def ours_with(source: str) -> ChatTemplate:
    return ChatTemplate(source, special_tokens={"bos_token": "<|bos|>", "eos_token": "<|eos|>"})


TEMPLATES = {
    "chatml": TEMPLATE,
    "bos and strip": (
        "{{ bos_token }}{% for m in messages %}[{{ m.role | upper }}] {{ m.content | trim }}{{ eos_token }}{% endfor %}"
    ),
    "whitespace control": """
        {%- for m in messages %}
            {%- if loop.first and m.role == 'system' %}
                {{- 'SYS: ' + m.content }}
                {%- continue %}
            {%- endif %}
            {% if loop.index0 > 6 %}{% break %}{% endif %}
            {{ loop.index }}/{{ loop.length }}/{{ loop.last }}/{{ loop.previtem.role if loop.previtem else 'none' }}
            {{- m['content'] }}
        {% endfor %}
    """,
    "namespace and macro": (
        "{% macro turn(role, text) %}<{{ role }}>{{ text }}</{{ role }}>{% endmacro %}"
        "{% set ns = namespace(system='', n=0) %}"
        "{% for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content ~ '!' %}"
        "{% else %}{% set ns.n = ns.n + 1 %}{{ turn(m.role, m.content) }}{% endif %}{% endfor %}"
        "{{ ns.system }}{{ ns.n }}"
    ),
    "tools": (
        "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{{ tool.function | tojson(indent=2) }}{% endfor %}"
        "{% endif %}"
        "{% for m in messages %}{{ m.role }}:{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name }}"
        "({{ c.function.arguments | tojson }}){% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
        "{% endfor %}{% endif %}{{ m.content }}{% endfor %}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}\n  {% generation %}\n{{ m.content }}\n"
        "  {% endgeneration %}\n{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "slices and tests": (
        "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
        "{% for m in rest[::-1] %}{{ m.role }}{% if m.content is string and 'H' in m.content %}H{% endif %}"
        "{{ m.content.split('?')[0].strip() }}{{ m.name is defined }}{% endfor %}{{ messages | length }}"
        "{{ messages | map(attribute='role') | join(',') }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    ),
    "captured": (
        "{% set text %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}{{ text }}{{ text | length }}"
    ),
    "undefined": (
        "{{ nothing }}{{ bos_token }}{% if missing %}x{% endif %}{{ documents is none }}{{ add_generation_prompt }}"
    ),
    "arithmetic": "{{ (messages | length + 1) % 3 }}{{ '=' * 5 }}{{ 2 ** 3 }}{{ [1] + [2] }}{{ 'a' + 'b' ~ 3 }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_renders_as_transformers_does(name: str, with_tools: bool, add_generation_prompt: bool) -> None:
    source, tools = TEMPLATES[name], TOOLS if with_tools else None
    oracle, ours = transformers_with(source), ours_with(source)
    for messages in (USER, CHAT, CALLS):
        expected = oracle.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt, flavour="plum"
        )
        assert ours.render(messages, tools, add_generation_prompt, flavour="plum") == expected


def test_smollm2_renders_as_transformers_does(smollm: Tokenizer) -> None:
    template = smollm.chat_template
    assert template is not None
    oracle = transformers_with(template.sources["default"])
    for messages in (USER, CHAT):
        for prompt in (False, True):
            expected = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            assert smollm.render_chat(messages, add_generation_prompt=prompt) == expected
    text = smollm.render_chat(USER)
    ids = smollm.encode(text, add_special_tokens=False, parse_special=True)
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 3, 2)  # <|im_start|> thrice, <|im_end|> twice
    assert smollm.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("ending", ["Once upon", "Once upon a ", "Once  \n"])
@pytest.mark.parametrize("name", ["chatml", "bos and strip"])
def test_continue_final_message_as_transformers_does(name: str, ending: str) -> None:
    messages = [*USER, {"role": "assistant", "content": ending}]
    oracle, ours = transformers_with(TEMPLATES[name]), ours_with(TEMPLATES[name])
    expected = oracle.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert ours.render(messages, add_generation_prompt=False, continue_final_message=True) == expected
    assert messages[-1]["content"] == ending


def test_continue_final_message_needs_the_message_in_the_text() -> None:
    with pytest.raises(BadRequest, match="leaves the last message out"):
        ChatTemplate("x").render(USER, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(BadRequest, match="exclude each other"):
        ChatTemplate(TEMPLATE).render(USER, continue_final_message=True)


# ---- messages -----------------------------------------------------------------------------------

ECHO = "{% for m in messages %}{{ m | tojson }}{% endfor %}"


def echo(messages: Any) -> Any:
    return json.loads(ChatTemplate(ECHO).render(messages))


def test_text_parts_are_joined_with_a_newline() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert echo([{"role": "user", "content": parts}]) == {"role": "user", "content": "one\ntwo"}
    assert echo([{"role": "user", "content": []}])["content"] == ""


def test_tool_call_arguments_become_an_object_and_missing_content_empty() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}
    seen = echo([message])
    assert seen["content"] == ""
    assert "refusal" not in seen
    assert seen["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}  # the caller's own is as it was


DEEP: list[Any] = []
for _ in range(2000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("messages", "field", "words"),
    [
        ([], "messages", "at least one"),
        ("hello", "messages", "list"),
        ([["user"]], "messages[0]", "object"),
        ([{"content": "x"}], "messages[0].role", "non-empty string"),
        ([{"role": 5, "content": "x"}], "messages[0].role", "non-empty string"),
        ([{"role": "user"}], "messages[0].content", "missing"),
        ([USER[0], {"role": "user", "content": None}], "messages[1].content", "missing"),
        ([{"role": "user", "content": 5}], "messages[0].content", "string or a list"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type", "'image_url'"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0]", "type"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text", "string"),
        ([{"role": "user", "content": "x", "name": {1, 2}}], "messages[0]", "set"),
        ([{"role": "user", "content": "x", "deep": DEEP}], "messages[0]", "deep"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
            "not JSON",
        ),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls", "list"),
    ],
)
def test_wrong_messages_are_refused_by_name(messages: Any, field: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words) as caught:
        ChatTemplate(ECHO).render(messages)
    assert caught.value.field == field


# ---- arguments ----------------------------------------------------------------------------------


def test_arguments_reach_the_template() -> None:
    template = ChatTemplate("{{ enable_thinking }}{{ nested.a[0] }}")
    assert template.render(USER, enable_thinking=False, nested={"a": ["x"]}) == "Falsex"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"messages": []}, "chat_template_kwargs.messages"),
        ({"documents": []}, "chat_template_kwargs.documents"),
        ({"x": object()}, "chat_template_kwargs.x"),
        ({"tools": 5}, "tools"),
        ({"tools": ["f"]}, "tools"),
        ({"add_generation_prompt": "no"}, "add_generation_prompt"),
        ({"continue_final_message": 1}, "continue_final_message"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        ChatTemplate(ECHO).render(USER, **arguments)
    assert caught.value.field == field


def test_a_tool_use_template_serves_when_tools_are_given() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools"})
    assert template.render(USER) == "plain"
    assert template.render(USER, tools=TOOLS) == "tools"
    assert ChatTemplate({"rag": "only"}).render(USER) == "only"
    with pytest.raises(BadRequest, match="rag, tool_use"):
        ChatTemplate({"tool_use": "tools", "rag": "r"}).render(USER)


def test_a_model_without_template_says_so() -> None:
    with pytest.raises(NoChatTemplate, match="model toy has no chat template"):
        toy_tokenizer().render_chat(USER)


def test_gemma_base_has_no_template(gemma: Tokenizer) -> None:
    assert gemma.chat_template is None


def test_the_clock_is_the_given_one() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2024, 2, 29))
    assert template.render(USER) == "29 Feb 2024"


# ---- refusals and bounds --------------------------------------------------------------------------


def test_the_templates_own_refusal_is_the_message() -> None:
    with pytest.raises(BadRequest, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(USER)


@pytest.mark.parametrize(
    "source",
    [
        "{{ missing.attribute.deeper }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[99].content }}",
        "{{ 1 // 0 }}",
        "{{ messages | tojson(indent=messages) }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include 'other' %}",
    ],
)
def test_what_fails_in_a_template_is_the_requests_fault(source: str) -> None:
    with pytest.raises(BadRequest, match="chat template") as caught:
        ChatTemplate(source).render(USER)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in [1, 1] recursive %}{% if loop.depth0 < 60 %}{{ loop([1, 1]) }}{% endif %}{% endfor %}",
        "{% for a in range(10 ** 9) %}{% endfor %}",
        "{{ 'x' * 10 ** 9 }}",
        "{{ 9 ** 99999999 }}",
        "{% set ns = namespace(x=3) %}{% for a in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{% set ns = namespace(x=3) %}{% for a in range(60) %}{% set ns.x = ns.x ** 9 %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for a in range(60) %}{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for a in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
        "{% set ns.x = y %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for a in range(60) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"
        "{% endfor %}",
        "{% for a in range(99999) %}{{ messages[0].content * 100 }}{% endfor %}",
    ],
)
def test_endless_work_and_huge_output_are_bounded(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 20_000)
    with pytest.raises(BadRequest, match=r"more than \d+ (loop|characters)|at most \d+ are allowed|Range too big"):
        ChatTemplate(source).render(USER)


def test_the_output_limit_is_exact() -> None:
    template = ChatTemplate("{{ messages[0].content }}", max_chars=5)
    assert template.render([{"role": "user", "content": "12345"}]) == "12345"
    with pytest.raises(BadRequest, match="more than 5 characters"):
        template.render([{"role": "user", "content": "123456"}])


def test_the_budget_of_steps_is_per_rendering_and_per_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 30)
    template = ChatTemplate("{% for a in range(20) %}{{ a }}{% endfor %}")
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(50):
                template.render(USER)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_template_that_is_no_jinja_is_the_models_fault() -> None:
    with pytest.raises(ModelError, match="line 2"):
        ChatTemplate("ok\n{% for %}")
