"""POST /v1/explain/diff over HTTP, on a tokenizer whose template renders tools."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest

from tests.explaining.planted import body, make_tools, tools_tokenizer
from tests.serve.stage import BLOCK, Stage

PATH = "/v1/explain/diff"


@pytest.fixture
def stage() -> Stage:
    return staged()


def staged(*keys: str) -> Stage:
    stage = Stage(*keys)
    tokenizer: Any = tools_tokenizer()
    stage.front._tokenizer = tokenizer
    return stage


def diff(stage: Stage, first: Any, second: Any) -> dict[str, Any]:
    answer = stage.post(PATH, {"first": first, "second": second})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_first_difference_of_two_chats(stage: Stage) -> None:
    told = diff(stage, body("rules", "go left"), body("rules", "go right"))
    assert (told["relation"], told["cause"]) == ("differ", "text")
    assert told["shared_blocks"] == told["shared_tokens"] // BLOCK
    first, second = told["first"], told["second"]
    assert first["message"] == second["message"] == {"index": 1, "role": "user"}
    assert (first["field"], first["character"]) == ("messages[1].content", 3)
    assert first["token"]["index"] == told["shared_tokens"]
    assert (first["after"][:4], second["after"][:5]) == ("left", "right")


def test_equal_and_prefix_are_answers(stage: Stage) -> None:
    equal = diff(stage, body("a", "b"), body("a", "b"))
    assert (equal["relation"], equal["cause"], equal["first"]) == ("equal", None, None)
    assert diff(stage, {"prompt": "ab"}, {"prompt": "abc"})["relation"] == "first_is_prefix"
    assert diff(stage, {"prompt": "abc"}, {"prompt": "ab"})["relation"] == "second_is_prefix"


def test_what_generation_refuses_is_compared(stage: Stage) -> None:
    tools = make_tools(random.Random(1))
    told = diff(stage, body("a", "b", tools=tools), body("a", "b", tools=tools[::-1]))
    assert told["cause"] == "tool_order"
    assert stage.post("/v1/chat/completions", body("a", "b", tools=tools)).status_code == 400


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"first": {"prompt": "a"}}, "second"),
        ({"first": {"prompt": "a"}, "second": "b"}, "second"),
        ({"first": {"prompt": "a"}, "second": {"promt": "b"}}, "second"),
        ({"first": {"messages": [{"role": "user"}]}, "second": {"prompt": "b"}}, "first.messages[0].content"),
        ({"first": {"prompt": "a"}, "second": {"prompt": "b"}, "third": {}}, "third"),
        ({"first": {"prompt": "a" * 100_000}, "second": {"prompt": "b"}}, "first.prompt"),
    ],
)
def test_a_wrong_body_is_a_400_that_names_the_field(stage: Stage, asked: Any, field: str) -> None:
    answer = stage.post(PATH, asked)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_another_model_is_a_404(stage: Stage) -> None:
    other = {"model": "gpt", "prompt": "a"}
    assert stage.post(PATH, {"first": other, "second": {"prompt": "a"}}).status_code == 404


def test_it_needs_a_key_once_there_are_keys() -> None:
    stage = staged("alice", "root")
    asked = {"first": {"prompt": "a"}, "second": {"prompt": "b"}}
    assert [stage.post(PATH, asked, key).status_code for key in (None, "mallory", "alice", "root")] == [
        401,
        401,
        200,
        200,
    ]


def test_the_event_loop_is_free_while_long_prompts_are_compared(stage: Stage) -> None:
    """Other requests are answered although the text thread is busy."""
    stage.front._check_text = lambda text, field: None  # type: ignore[method-assign]
    long = {"prompt": "the river " * 30_000}

    async def both(client: httpx.AsyncClient) -> tuple[bool, int]:
        asked = asyncio.create_task(client.post(PATH, json={"first": long, "second": {"prompt": "x"}}))
        await asyncio.sleep(0.01)
        health = await client.get("/health")
        done_before = asked.done()
        return done_before, health.status_code + (await asked).status_code

    assert stage.run(both) == (False, 400)
