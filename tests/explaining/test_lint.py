from __future__ import annotations

import random

import pytest

from headwater.explaining.findings import Finding, Kind, Report
from headwater.explaining.lint import lint
from headwater.explaining.log import Line
from headwater.text.tokenizer import Tokenizer
from tests.explaining.planted import (
    LEGITIMATE,
    MORE,
    PLANTED,
    Body,
    Group,
    body,
    conversation,
    memory_in_front,
    mixed,
    prose,
    question,
    tools_tokenizer,
    turn_counter,
)
from tests.text.toy import TEMPLATE, toy_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tools_tokenizer()


def look(tokenizer: Tokenizer, bodies: list[Body]) -> Report:
    return lint([Line("log", i, one) for i, one in enumerate(bodies, 1)], tokenizer)


def name(finding: Finding) -> str:
    if finding.kind is not Kind.TEMPLATE_HISTORY:
        return finding.kind.value
    how = "reasoning" if "reasoning" in finding.detail else "trimmed" if "trimmed" in finding.detail else "?"
    return f"{finding.kind.value}:{how}"


def names(report: Report) -> list[str]:
    return sorted(name(finding) for finding in report.findings)


@pytest.mark.parametrize("seed", range(3))
def test_of_a_thousand_requests_every_planted_breaker_is_named_and_nothing_else(
    tokenizer: Tokenizer, seed: int
) -> None:
    rng = random.Random(seed)
    log = mixed(rng, [plant(rng) for plant in PLANTED.values()], 1000)
    report = look(tokenizer, log)
    assert report.n_requests == 1000
    assert report.bad == []
    assert names(report) == sorted(PLANTED)


@pytest.mark.parametrize("seed", range(3))
def test_a_clean_log_gives_no_finding(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(100 + seed)
    assert names(look(tokenizer, mixed(rng, [make(rng) for make in LEGITIMATE], 300))) == []


@pytest.mark.parametrize("planted", MORE)
@pytest.mark.parametrize("seed", range(3))
def test_a_rarer_breaker_is_named(tokenizer: Tokenizer, planted: str, seed: int) -> None:
    assert names(look(tokenizer, MORE[planted](random.Random(seed)))) == [planted]


@pytest.mark.parametrize("make", LEGITIMATE)
@pytest.mark.parametrize("seed", range(3))
def test_what_is_legitimate_gives_no_finding(tokenizer: Tokenizer, make: Group, seed: int) -> None:
    assert names(look(tokenizer, make(random.Random(seed)))) == []


@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.parametrize("seed", range(3))
def test_a_breaker_alone_is_named(tokenizer: Tokenizer, planted: str, seed: int) -> None:
    rng = random.Random(1000 * seed + len(planted))
    assert names(look(tokenizer, PLANTED[planted](rng))) == [planted]


@pytest.mark.parametrize("seed", range(3))
def test_a_counter_of_turns_costs_each_conversation_its_history(tokenizer: Tokenizer, seed: int) -> None:
    (finding,) = look(tokenizer, turn_counter(random.Random(seed))).findings
    assert finding.kind is Kind.COUNTER
    assert finding.n_requests >= 30  # of 40 that are later turns


@pytest.mark.parametrize("seed", range(3))
def test_a_changing_beginning_of_the_system_prompt_is_one_finding(tokenizer: Tokenizer, seed: int) -> None:
    (finding,) = look(tokenizer, memory_in_front(random.Random(seed))).findings
    assert (finding.kind, finding.n_requests) == (Kind.SYSTEM_CHANGES, 24)


def test_a_history_that_is_cut_once_loses_what_is_kept_once(tokenizer: Tokenizer) -> None:
    """Half of it at once: what is kept is computed once, and the turns after it share it."""
    log = conversation(random.Random(3), "Be short and kind.", 8)
    for turn in log[4:]:
        turn["messages"][1:] = turn["messages"][5:]
    (finding,) = look(tokenizer, log).findings
    assert (finding.kind, finding.n_requests) == (Kind.HISTORY_CUT, 1)


def test_conversations_that_greet_alike_are_no_cut_history(tokenizer: Tokenizer) -> None:
    greeting, rules = ("Hi", "Hello! How can I help you today?"), prose(random.Random(4), 8)
    for asked, later in (("What?", "What?"), (f"Why? {rules}", f"Nothing. {rules}")):
        talks = [body(rules, f"Why? {rules}", "So.", *greeting, asked), body(rules, *greeting, later)]
        assert names(look(tokenizer, talks)) == []


def test_a_turn_that_merges_with_the_next_is_named() -> None:
    """The prompt ends with a space; the answer's first word takes it along."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
    )
    tokenizer = toy_tokenizer(chat_template=template)
    first = body("Be short.", "What flows here?")
    report = look(tokenizer, [first, body("Be short.", "What flows here?", "the river does", "And there?")])
    (finding,) = report.findings
    assert (finding.kind, finding.n_lost_tokens, finding.n_requests) == (Kind.JOINED, 1, 1)
    assert finding.example.ours.startswith(" the river")
    assert names(look(tokenizer, [first, body("Be short.", "What flows here?", "1 river does", "And there?")])) == []


def test_an_example_names_the_exact_place(tokenizer: Tokenizer) -> None:
    rules = prose(random.Random(5), 8)
    log = [
        body(f"Caf\u00e9 \U0001f44d, now {clock}. {rules}", "Why?")
        for clock in ("2024-05-01 10:00", "2024-05-01 11:30")
    ]
    (finding,) = look(tokenizer, log).findings
    shown = finding.example
    assert (shown.where, shown.other) == ("log:2", "log:1")
    assert (shown.message, shown.role, shown.character) == (0, "system", len("Caf\u00e9 \U0001f44d, now "))
    assert (shown.ours, shown.theirs) == ("2024-05-01 11:30", "2024-05-01 10:00")
    assert shown.before.endswith("Caf\u00e9 \U0001f44d, now ")


def test_the_loss_is_what_the_repaired_request_would_share(tokenizer: Tokenizer) -> None:
    rules = prose(random.Random(6), 8)
    clocks = ("2024-05-01 10:00", "2024-05-01 11:30", "2024-05-02 09:15")
    broken = look(tokenizer, [body(f"Now {clock}. {rules}", f"{clock[-2:]} Why?") for clock in clocks])
    mended = look(tokenizer, [body(f"{rules}", f"{clock[-2:]} Why?") for clock in clocks])
    (finding,) = broken.findings
    assert finding.n_requests == 2
    assert mended.findings == []
    repaired = mended.n_shared / 2
    # beside the rules, a repaired prompt shares the few tokens that stand before the time
    assert abs(finding.n_lost_per_request - repaired) < 20 < repaired


def test_two_breakers_of_one_prompt_are_both_named(tokenizer: Tokenizer) -> None:
    rng = random.Random(7)
    lead, rules = prose(rng, 4), prose(rng, 8)
    log = [body(f"Request #{i}. {lead} Today is 2024-05-{i:02}. {rules}", question(rng)) for i in range(1, 20)]
    report = look(tokenizer, log)
    assert names(report) == ["counter", "time"]
    assert report.n_lost_tokens == max(finding.n_lost_tokens for finding in report.findings)


def test_tools_that_the_template_does_not_write_are_no_finding() -> None:
    log = PLANTED["tool_order"](random.Random(1))
    assert names(look(toy_tokenizer(chat_template=TEMPLATE), log)) == []


def test_messages_that_the_template_refuses_are_told(tokenizer: Tokenizer) -> None:
    report = look(tokenizer, [{"messages": [{"role": "user", "content": {"no": "text"}}]}, body("a", "b")])
    assert report.n_requests == 1
    assert [line.line for line in report.bad] == [1]


def test_a_time_that_changes_between_turns_is_a_time_and_no_changed_system_prompt(tokenizer: Tokenizer) -> None:
    rng = random.Random(8)
    rules = prose(rng, 4)
    log = conversation(rng, rules, 6)
    for i, turn in enumerate(log):
        turn["messages"][0]["content"] = f"It is 10:{10 + i}. {rules}"
    assert names(look(tokenizer, log)) == ["time"]
