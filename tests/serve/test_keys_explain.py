"""What explain tells a tenant of others: nothing, where prefixes are apart; where shared, lengths and reasons only."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import httpx
import pytest

from headwater.cache.account import Viewer
from headwater.engine.messages import Explain, Submit
from headwater.types import SamplingParams
from tests.serve.stage import Stage

ALICE, BOB, ROOT = "alice-key", "bob-key", "root-key"
SYSTEM = "You keep the secret 4711 of Alice and tell it nobody, "
UNKNOWN = "Nobody has ever sent this to any server, not even Alice."


@pytest.fixture(scope="module")
def apart() -> Stage:
    return Stage(ALICE, BOB, ROOT)


@pytest.fixture(scope="module")
def shared() -> Stage:
    return Stage(ALICE, BOB, ROOT, derive_salts=False)


def ask(stage: Stage, key: str, path: str, body: Any = None) -> httpx.Response:
    return stage.get(path, key) if body is None else stage.post(path, body, key)


def complete(stage: Stage, key: str, prompt: str, **fields: Any) -> httpx.Response:
    answer = ask(stage, key, "/v1/completions", {"prompt": prompt, "max_tokens": 2, "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    return answer


def explained(stage: Stage, key: str, prompt: str, **fields: Any) -> dict[str, Any]:
    answer = ask(stage, key, "/v1/explain", {"prompt": prompt, **fields})
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    del told["estimate"]  # of steps, whosever they were
    return told


def test_what_another_tenant_has_cached_is_as_if_nobody_had_sent_it(apart: Stage) -> None:
    prompt = SYSTEM + "and so on"
    complete(apart, ALICE, prompt)
    complete(apart, ALICE, prompt, cache_salt="a")
    assert explained(apart, ALICE, prompt)["hit_tokens"] > 40
    unknown = UNKNOWN[: len(prompt)].ljust(len(prompt), ".")
    for salt in (None, "", "a"):
        assert explained(apart, BOB, prompt, cache_salt=salt) == explained(apart, BOB, unknown, cache_salt=salt)
    assert "elsewhere" not in explained(apart, BOB, prompt)
    told = complete(apart, BOB, prompt, headwater={"explain": True})
    assert told.headers["x-headwater-prefix"] == f"hit=0 of={len(prompt)} stop=no_record"
    assert told.json()["usage"]["headwater"]["prefix"]["difference"] is None


def test_only_the_operator_walks_other_namespaces(apart: Stage) -> None:
    complete(apart, ALICE, "elsewhere: " + SYSTEM)
    told = explained(apart, ROOT, "elsewhere: " + SYSTEM)
    assert [other["hit_tokens"] for other in told["elsewhere"]] == [64]
    assert "elsewhere" not in explained(apart, ALICE, "elsewhere: " + SYSTEM)


@pytest.mark.parametrize("prompt", ["finished: " + SYSTEM, ["first " + SYSTEM, "second " + SYSTEM]])
def test_the_account_of_anothers_answer_is_as_if_there_were_none(apart: Stage, prompt: Any) -> None:
    reply_id = complete(apart, ALICE, prompt).json()["id"]
    assert ask(apart, ALICE, f"/v1/explain/{reply_id}").status_code == 200
    assert ask(apart, ROOT, f"/v1/explain/{reply_id}").status_code == 200
    for asked in (reply_id, f"{reply_id}-0", f"{reply_id}-1"):
        others = ask(apart, BOB, f"/v1/explain/{asked}")
        nobodys = asked.replace(reply_id, "cmpl-" + "0" * 32)
        none = ask(apart, BOB, f"/v1/explain/{nobodys}")
        assert others.status_code == none.status_code == 404
        assert others.text.replace(asked, nobodys) == none.text
        assert {**others.headers, "date": ""} == {**none.headers, "date": ""}


def test_in_one_namespace_the_text_of_others_and_their_requests_stay_hidden(shared: Stage) -> None:
    complete(shared, ALICE, SYSTEM + "her number is 4712 and her word is river.")
    mine = SYSTEM + "her number is 9, I think"
    told = explained(shared, BOB, mine)
    assert told["hit_tokens"] == len(SYSTEM + "her number is ") // 4 * 4
    assert told["stop"]["reason"] == "differs"
    assert told["difference"]["ours"]["text"] == "9, I thi"
    assert told["difference"]["theirs"] is None
    assert explained(shared, ALICE, mine)["difference"]["theirs"]["text"].startswith("4712")
    assert explained(shared, ROOT, mine)["difference"]["theirs"]["text"].startswith("4712")
    reply = complete(shared, BOB, mine, headwater={"explain": True})
    assert reply.json()["usage"]["headwater"]["prefix"]["difference"]["theirs"] is None
    kept = ask(shared, BOB, f"/v1/explain/{reply.json()['id']}")
    assert kept.json()["difference"]["theirs"] is None
    for text in (reply.text, kept.text, json.dumps(told)):
        assert "4712" not in text
        assert "52, 55, 49, 50" not in text  # as token ids


def test_what_a_tenant_sent_itself_leads_to_no_more_of_others(shared: Stage) -> None:
    """Having sent the beginning of a record does not show what another one sent after it."""
    secret = "Alpha beta gamma delta: the password is swordfish!"
    complete(shared, ALICE, secret)
    n_hidden = 0
    for n in range(20, 36):
        complete(shared, BOB, secret[:n])
        theirs = explained(shared, BOB, secret[:n] + "########")["difference"]["theirs"]
        alices = explained(shared, ALICE, secret[:n] + "########")["difference"]["theirs"]
        assert alices["text"].startswith(secret[n : n + 4])
        n_hidden += theirs is None
        assert theirs is None or theirs["text"][:1] != secret[n]
    assert n_hidden > 4


def test_anothers_request_is_not_named_as_the_one_that_evicted() -> None:
    stage = Stage(ALICE, BOB, ROOT, derive_salts=False, n_blocks=24)
    complete(stage, ALICE, SYSTEM)
    evictor = complete(stage, BOB, "x" * 80).json()["id"]
    alices, bobs, roots = (explained(stage, key, SYSTEM)["stop"] for key in (ALICE, BOB, ROOT))
    assert alices["reason"] == bobs["reason"] == roots["reason"] == "evicted"
    assert (alices["request"], bobs["request"], roots["request"]) == (None, evictor, evictor)
    assert evictor not in json.dumps(alices)


def calls_of(work: Callable[[], object]) -> int:
    """How many functions ``work`` calls, built-in ones too: a clock without noise."""
    n_calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal n_calls
        n_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return n_calls


def test_explain_does_the_same_work_whatever_another_tenant_has_cached() -> None:
    prompt = list((SYSTEM * 4).encode())

    def calls(sent: Sequence[tuple[str, list[int]]], viewer: Viewer) -> int:
        core = Stage(n_blocks=1024).core
        for i, (salt, ids) in enumerate(sent):
            core.submit(Submit(str(i), ids, SamplingParams(temperature=0.0, max_tokens=1), salt, sender="alice"))
            while core.busy:
                core.step()
        message = Explain(1, [*prompt, 1], viewer, cache_salt="of bob")
        core.call(message)  # what is only done the first time
        return calls_of(lambda: core.call(message))

    others = [[1], prompt, prompt[:70], [*prompt, 2, 2, 2, 2], prompt[::-1]]
    bob, operator = Viewer("bob", operator=False), Viewer("root", operator=True)
    nothing = calls([("other", ids[::-1]) for ids in others], bob)
    assert nothing > 10
    assert calls([("of alice", ids) for ids in others], bob) == nothing
    assert calls([(str(i), ids) for i, ids in enumerate(others * 3)], bob) == nothing
    # so that this clock is known to tick: it does differ for the operator, and for what one has cached oneself
    assert calls([("of alice", prompt)], operator) > calls([("of alice", [1])], operator)
    assert calls([("of bob", prompt)], bob) > nothing


def test_errors_and_logs_tell_nothing_of_others(apart: Stage, caplog: pytest.LogCaptureFixture) -> None:
    complete(apart, ALICE, "errors: " + SYSTEM, cache_salt="a-salt-nobody-sees")
    bodies: list[Any] = [
        {},
        {"prompt": "x", "messages": []},
        {"prompt": "errors: " + SYSTEM, "cache_salt": ["a-salt-nobody-sees"]},
        {"prompt": "errors: " + SYSTEM, "cache_salt": "a-salt-nobody-sees" * 100},
        {"prompt": [-1], "cache_salt": "a-salt-nobody-sees"},
        {"prompt": "x" * 4000, "cache_salt": "a-salt-nobody-sees"},
        {"first": {"prompt": "x", "cache_salt": "a-salt-nobody-sees"}, "second": 5},
        {"first": "a-salt-nobody-sees", "second": {"prompt": "x"}},
    ]
    for path in ("/v1/explain", "/v1/explain/diff"):
        for body in bodies:
            answer = ask(apart, BOB, path, body)
            assert 400 <= answer.status_code < 500
            assert "nobody-sees" not in answer.text
    pair = {
        "first": {"prompt": "x", "cache_salt": "nobody-sees-1"},
        "second": {"prompt": "y", "cache_salt": "nobody-sees-2"},
    }
    assert "nobody-sees" not in ask(apart, BOB, "/v1/explain/diff", pair).text
    assert "nobody-sees" not in caplog.text
