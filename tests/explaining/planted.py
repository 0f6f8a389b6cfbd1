"""Logs of chat requests, made from a seed, with breakers of their common beginnings planted in them.

Each group is one application: its own system prompt, its own users. A clean log has the same applications, with
whatever legitimately differs: questions, numbers and dates in them, documents, conversations of several turns.
"""

from __future__ import annotations

import copy
import json
import random
import uuid
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from headwater.text.chat_template import ChatTemplate
from headwater.text.parts import TokenizerParts
from headwater.text.tokenizer import Tokenizer
from tests.text.toy import toy_tokenizer

Body = dict[str, Any]
Group = Callable[[random.Random], list[Body]]

TEMPLATE = """\
{%- if tools %}<|im_start|>system
You may call these tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' and '</think>' in content and loop.index0 < ns.last %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- elif loop.index0 < ns.last %}
{%- set content = content.rstrip() %}
{%- endif %}<|im_start|>{{ message.role }}
{{ content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Renders tools, takes reasoning out of answers before the last question, and trims the ends of earlier messages."""

WORDS = [
    "river",
    "stone",
    "light",
    "garden",
    "window",
    "paper",
    "number",
    "letter",
    "winter",
    "summer",
    "market",
    "village",
    "engine",
    "bridge",
    "castle",
    "forest",
    "silver",
    "copper",
    "winding",
    "narrow",
    "ancient",
    "modern",
    "gentle",
    "simple",
    "careful",
    "honest",
    "quick",
    "steady",
    "answer",
    "question",
    "reason",
    "method",
    "record",
    "detail",
    "follow",
    "explain",
    "describe",
    "compare",
    "measure",
    "improve",
    "protect",
    "deliver",
    "collect",
    "prepare",
    "support",
]


def tools_tokenizer() -> Tokenizer:
    """The toy tokenizer with TEMPLATE."""
    return toy_tokenizer(chat_template=TEMPLATE)


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    """A tokenizer with another chat template."""
    table = tuple(tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size))
    return Tokenizer(
        TokenizerParts(
            name=tokenizer.name,
            backend=tokenizer._backend,
            token_bytes=table,
            special_ids=tokenizer.special_ids,
            bos_id=tokenizer.bos_id,
            eos_ids=tokenizer.eos_ids,
            prefix_ids=tokenizer.prefix_ids,
            suffix_ids=(),
            chat_template=ChatTemplate(template),
        )
    )


def prose(rng: random.Random, n_sentences: int) -> str:
    return " ".join(
        " ".join(rng.choice(WORDS) for _ in range(rng.randint(6, 12))).capitalize() + "." for _ in range(n_sentences)
    )


def question(rng: random.Random) -> str:
    return rng.choice(
        (
            prose(rng, 1),
            f"What is {rng.randint(2, 999)} times {rng.randint(2, 999)}?",
            f"What happened on {rng.randint(1, 28)} May {rng.randint(1800, 2020)}? {prose(rng, 1)}",
            f"Look at order {rng.randint(10000, 99999)}. {prose(rng, 2)}",
        )
    )


def answer(rng: random.Random) -> str:
    return prose(rng, rng.randint(1, 3))


def body(system: str, *turns: str, tools: list[Any] | None = None) -> Body:
    """Turns alternate between user and assistant, and begin and end with the user."""
    messages = [{"role": "system", "content": system}]
    messages += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    made: Body = {"messages": messages, "temperature": 0}
    return made if tools is None else {**made, "tools": tools}


def conversation(rng: random.Random, system: str, n_turns: int, *, said: Callable[[], str] | None = None) -> list[Body]:
    """The requests of one conversation, each with the history so far."""
    turns: list[str] = [question(rng) + " " + prose(rng, 1)]
    made = [body(system, *turns)]
    for _ in range(n_turns - 1):
        turns += [said() if said else answer(rng), question(rng)]
        made.append(body(system, *turns))
    return made


# ---- what is legitimate -----------------------------------------------------------------------------


def same_prompt(rng: random.Random, n: int = 40) -> list[Body]:
    system = prose(rng, 12)
    return [body(system, question(rng)) for _ in range(n)]


def conversations(rng: random.Random, n: int = 8) -> list[Body]:
    system = prose(rng, 10)
    return [one for _ in range(n) for one in conversation(rng, system, rng.randint(2, 6))]


def documents(rng: random.Random, n: int = 25) -> list[Body]:
    """Retrieval: a document with numbers and dates, then a question about it."""
    system = prose(rng, 6)
    papers = [f"Document {i} of {datetime(2024, 1, 1 + i):%Y-%m-%d}: {prose(rng, 12)}" for i in range(6)]
    return [body(system, f"{rng.choice(papers)}\n\n{question(rng)}") for _ in range(n)]


def documents_in_system(rng: random.Random, n: int = 60) -> list[Body]:
    """Retrieval into the system prompt: the documents' heads differ in numbers and dates, the documents in words."""
    rules = prose(rng, 3)
    papers = [
        f"[{i}] (guide.pdf, page {rng.randint(1, 300)}, updated {datetime(2024, 1, 1 + i):%Y-%m-%d})\n{prose(rng, 6)}"
        for i in range(25)
    ]
    return [body(f"{rules}\n\nSources:\n" + "\n\n".join(rng.sample(papers, 3)), question(rng)) for _ in range(n)]


def time_at_the_end(rng: random.Random, n: int = 40) -> list[Body]:
    """The time is where it should be, and users ask the same few questions."""
    rules, asked = prose(rng, 8), ["Where is my parcel?", "When are you open?"]
    start = datetime(2024, 5, 1)
    return [body(f"{rules}\nNow: {start + timedelta(minutes=7 * i)}", rng.choice(asked)) for i in range(n)]


def with_tools(rng: random.Random, n: int = 25) -> list[Body]:
    system, tools = prose(rng, 8), make_tools(rng)
    return [body(system, question(rng), tools=copy.deepcopy(tools)) for _ in range(n)]


def fixed_values(rng: random.Random, n: int = 25) -> list[Body]:
    """Numbers, a date and an id that never change."""
    system = f"Version 3 of 2024-05-01, build {uuid.UUID(int=rng.getrandbits(128))}. {prose(rng, 8)}"
    return [body(system, question(rng)) for _ in range(n)]


def edited_once(rng: random.Random, n: int = 110) -> list[Body]:
    """Somebody edits the prompt: version 1 becomes version 2, once."""
    rules = prose(rng, 8)
    return [body(f"Prompt version {1 + (i > n // 2)}. {rules}", question(rng)) for i in range(n)]


def retries(rng: random.Random, n: int = 12) -> list[Body]:
    system = prose(rng, 8)
    return [again for _ in range(n) for again in [body(system, question(rng))] * 2]


def few_shot(rng: random.Random, n: int = 25) -> list[Body]:
    """Examples, then a sum with other numbers, then a short instruction that is always the same."""
    shots = "\n".join(f"Q: {i} plus {i + 3}? A: {2 * i + 3}" for i in range(2, 12))
    system = prose(rng, 2)
    asked = [(rng.randint(10, 99), rng.randint(10, 99)) for _ in range(n)]
    return [body(system, f"{shots}\nQ: {a} plus {b}? Say the number only.") for a, b in asked]


def forms(rng: random.Random, n: int = 25) -> list[Body]:
    """The same form with other numbers and dates in it: they are what the request is about."""
    system = prose(rng, 6)
    made = []
    for i in range(n):
        rows = [
            f"Item {rng.randint(1000, 9999)}: {rng.randint(1, 90)} pieces, {rng.random() * 99:.2f} EUR"
            for _ in range(12)
        ]
        text = f"Invoice {20000 + i} of {datetime(2024, 1, 1 + i):%d.%m.%Y}\n" + "\n".join(rows)
        made.append(body(system, text))
    return made


def agents(rng: random.Random, n: int = 5) -> list[Body]:
    """Tool calls and their results, with times in them, in a history that only grows."""
    system, tools = prose(rng, 8), make_tools(rng)
    made = []
    for _ in range(n):
        one = body(system, question(rng) + " " + prose(rng, 1), tools=tools)
        made.append(copy.deepcopy(one))
        for step in range(4):
            call = {"name": tools[0]["function"]["name"], "arguments": json.dumps({"where": prose(rng, 1), "n": step})}
            asked = {"id": f"call_{rng.getrandbits(40):010x}", "type": "function", "function": call}
            result = f"{datetime(2024, 5, 1, 8, rng.randint(0, 59))}: {prose(rng, 2)}"
            one["messages"] += [
                {"role": "assistant", "content": None, "tool_calls": [asked]},
                {"role": "tool", "tool_call_id": asked["id"], "content": result},
            ]
            made.append(copy.deepcopy(one))
    return made


LEGITIMATE: tuple[Group, ...] = (
    same_prompt,
    conversations,
    documents,
    documents_in_system,
    time_at_the_end,
    with_tools,
    fixed_values,
    edited_once,
    retries,
    few_shot,
    forms,
    agents,
)


# ---- what breaks the beginning ----------------------------------------------------------------------


def make_tools(rng: random.Random) -> list[Any]:
    return [
        {
            "type": "function",
            "function": {
                "name": f"{rng.choice(WORDS)}_{i}",
                "description": prose(rng, 2),
                "parameters": {"type": "object", "properties": {"where": {"type": "string"}, "n": {"type": "integer"}}},
            },
        }
        for i in range(rng.randint(4, 6))
    ]


def _front(rng: random.Random, make: Callable[[int], str], n: int = 30) -> list[Body]:
    """A system prompt with a changing piece near its beginning."""
    lead, rules = prose(rng, 1), prose(rng, 10)
    return [body(f"{lead} {make(i)}\n{rules}", question(rng)) for i in range(n)]


def times(rng: random.Random) -> list[Body]:
    start = datetime(2024, rng.randint(1, 12), rng.randint(1, 28), 8, 0, 0)
    form = rng.choice(
        (
            "Current time: %Y-%m-%dT%H:%M:%SZ.",
            "Today is %A, %B %d, %Y, %I:%M %p.",
            "It is %d/%m/%Y %H:%M.",
            "Now: %d %b %Y %H:%M:%S.",
        )
    )
    return _front(rng, lambda i: (start + timedelta(minutes=97 * i)).strftime(form))


def ids(rng: random.Random) -> list[Body]:
    forms: tuple[Callable[[], str], ...] = (
        lambda: f"Session {uuid.UUID(int=rng.getrandbits(128))}.",
        lambda: f"Trace: {rng.getrandbits(160):040x}.",
        lambda: "Request id: " + "".join(rng.choice("abcdefghijkmnpqrstuvwxyz") for _ in range(10)) + ".",
        lambda: f"[req_{''.join(rng.choice('ABCDEFGHabcdefgh23456789') for _ in range(14))}7x]",
    )
    form = rng.choice(forms)
    return _front(rng, lambda i: form())


def counters(rng: random.Random) -> list[Body]:
    start = rng.randint(1, 5000)
    form = rng.choice(("Request #{}.", "You are worker {} today.", "There are {} open tickets."))
    return _front(rng, lambda i: form.format(start + i))


def tool_order(rng: random.Random) -> list[Body]:
    system, tools = prose(rng, 8), make_tools(rng)
    made = []
    for _ in range(30):
        shuffled = copy.deepcopy(tools)
        rng.shuffle(shuffled)
        made.append(body(system, question(rng), tools=shuffled))
    return made


def _shuffled_keys(rng: random.Random, value: Any) -> Any:
    if isinstance(value, dict):
        items = [(key, _shuffled_keys(rng, inner)) for key, inner in value.items()]
        rng.shuffle(items)
        return dict(items)
    return [_shuffled_keys(rng, item) for item in value] if isinstance(value, list) else value


def tool_keys(rng: random.Random) -> list[Body]:
    system, tools = prose(rng, 8), make_tools(rng)
    return [body(system, question(rng), tools=_shuffled_keys(rng, tools)) for _ in range(30)]


def json_text(rng: random.Random) -> list[Body]:
    """A settings object in the system prompt, written in changing order or with changing spaces."""
    settings = {name: {"limit": i, "name": name} for i, name in enumerate(rng.sample(WORDS, 6))}
    rules = prose(rng, 8)
    made = []
    for _ in range(30):
        if rng.random() < 0.5:
            text = json.dumps(_shuffled_keys(rng, settings))
        else:
            text = json.dumps(settings, indent=rng.choice((None, 1, 2)))
        made.append(body(f"Settings:\n{text}\n{rules}", question(rng)))
    return made


def reasoning(rng: random.Random) -> list[Body]:
    """Answers come back with their thoughts, which the template takes out of the history."""
    system = prose(rng, 6)
    made = []
    for _ in range(6):
        made += conversation(rng, system, 4, said=lambda: f"<think>\n{prose(rng, 3)}\n</think>\n\n{answer(rng)}")
    return made


def trailing_spaces(rng: random.Random) -> list[Body]:
    """Questions end with spaces, which the template trims once another message follows."""
    system = prose(rng, 6)
    made = []
    for _ in range(8):
        turns = [question(rng) + " " + prose(rng, 1) + "  \n"]
        made.append(body(system, *turns))
        for _ in range(3):
            turns += [answer(rng), question(rng) + "  \n"]
            made.append(body(system, *turns))
    return made


def system_changes(rng: random.Random) -> list[Body]:
    """The state of the work is kept in the system prompt, which so changes with every turn."""
    rules = prose(rng, 3)
    made = []
    for _ in range(8):
        for turn in conversation(rng, rules, 5):
            turn["messages"][0]["content"] = f"{rules}\nState: {prose(rng, 1)}"
            made.append(turn)
    return made


def client_history(rng: random.Random) -> list[Body]:
    """The client takes spaces away from answers in its history, but one turn late."""
    made = []
    system = prose(rng, 6)
    for _ in range(6):
        log = conversation(rng, system, 4, said=lambda: f"  {answer(rng)}")
        for turn in log[2:]:
            turn["messages"][2]["content"] = turn["messages"][2]["content"].lstrip()
        made += log
    return made


def tools_change(rng: random.Random) -> list[Body]:
    """Every turn of a conversation brings one more tool."""
    system, tools = prose(rng, 8), make_tools(rng)
    made = []
    for _ in range(6):
        for i, turn in enumerate(conversation(rng, system, 4)):
            made.append({**turn, "tools": tools[i:] + tools[:1]})
    return made


def turn_counter(rng: random.Random) -> list[Body]:
    """Counts the turns of each conversation: first ones share their number, and still each loses its history."""
    rules, made = prose(rng, 3), []
    for _ in range(8):
        for i, turn in enumerate(conversation(rng, rules, 6), 1):
            turn["messages"][0]["content"] = f"Turn {i} of 20. {rules}"
            made.append(turn)
    return made


def memory_in_front(rng: random.Random) -> list[Body]:
    """What is remembered of a user stands in front of the rules, and grows with every turn."""
    rules, made = prose(rng, 6), []
    for _ in range(8):
        for turn in conversation(rng, rules, 4):
            turn["messages"][0]["content"] = f"Memory: {prose(rng, 1)}\n{rules}"
            made.append(turn)
    return made


def history_cut(rng: random.Random) -> list[Body]:
    """Only the last five messages are sent."""
    rules, made = prose(rng, 6), []
    for _ in range(6):
        for turn in conversation(rng, rules, 6):
            turn["messages"][1:] = turn["messages"][1:][-5:]
            made.append(turn)
    return made


def front_of_question(rng: random.Random) -> list[Body]:
    """A counter at the beginning of what the user wrote, before the same long task."""
    system, task = prose(rng, 2), prose(rng, 12)
    return [body(system, f"Run {100 + i}. {task}\n{question(rng)}") for i in range(30)]


PLANTED: dict[str, Group] = {
    "time": times,
    "id": ids,
    "counter": counters,
    "tool_order": tool_order,
    "tool_keys": tool_keys,
    "json": json_text,
    "template_history:reasoning": reasoning,
    "template_history:trimmed": trailing_spaces,
    "system_changes": system_changes,
}

MORE: dict[str, Group] = {
    "client_history": client_history,
    "history_cut": history_cut,
    "tools_change": tools_change,
    "counter": front_of_question,
}


def mixed(rng: random.Random, groups: list[list[Body]], n: int) -> list[Body]:
    """The groups side by side, each in its own order, filled up to ``n`` with legitimate requests."""
    total = sum(map(len, groups))
    while total < n:
        more = rng.choice(LEGITIMATE)(rng)[: n - total]
        groups = [*groups, more]
        total += len(more)
    turns = [i for i, group in enumerate(groups) for _ in group]
    rng.shuffle(turns)
    left = [iter(group) for group in groups]
    return [next(left[i]) for i in turns][:n]


def write(path: Path, bodies: list[Body]) -> Path:
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    return path
