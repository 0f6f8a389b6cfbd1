"""Accounts over HTTP: before a request, with its answer and afterwards; the whole server over a fake runner."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

from tests.serve.harness import events_of
from tests.serve.stage import BLOCK, HYBRID, MARK, Stage

Json = dict[str, Any]


def explain(stage: Stage, body: Json, key: str | None = None) -> Json:
    answer = stage.post("/v1/explain", body, key)
    assert answer.status_code == 200, answer.text
    return answer.json()


def kept(stage: Stage, answer: httpx.Response | str, key: str | None = None) -> httpx.Response:
    return stage.get(f"/v1/explain/{answer if isinstance(answer, str) else answer.json()['id']}", key)


def ran(stage: Stage, body: Json, path: str = "/v1/completions") -> tuple[Json, str, Json]:
    """A request's account as its usage has it, its header, and the same account asked for afterwards."""
    answer = stage.post(path, {"max_tokens": 1, **body, "headwater": {"explain": True}})
    assert answer.status_code == 200, answer.text
    told = answer.json()["usage"]["headwater"]["prefix"]
    return told, answer.headers["x-headwater-prefix"], kept(stage, answer).json()


def same(account: Json, *others: Json) -> None:
    """Equal but for what is of its moment or for operators only."""
    passing = {"estimate": None, "elsewhere": None}
    for other in others:
        assert {**other, **passing} == {**account, **passing}


def check(stage: Stage, body: Json, reason: str, header: str, path: str = "/v1/completions") -> Json:
    """What is foreseen is what the request gets: in its usage, its header, and afterwards. Returns the account."""
    foreseen = explain(stage, body)
    assert foreseen["stop"]["reason"] == reason, foreseen
    told, in_header, afterwards = ran(stage, body, path)
    same(foreseen, told, afterwards)
    assert in_header == header
    return foreseen


# ---- every reason -----------------------------------------------------------------------------------


def test_no_record_then_partial_block_then_last_token() -> None:
    stage, body = Stage(), {"prompt": "one two three"}
    told = check(stage, body, "no_record", "hit=0 of=13 stop=no_record")
    assert told["runs"] == [{"first": 0, "tokens": 13, "state": "unknown"}]
    assert told["smallest_reusable_prefix"] == BLOCK
    assert told["estimate"] == {"compute_tokens": 13, "seconds": None}
    told = check(stage, body, "partial_block", "hit=12 of=13 stop=partial_block")
    assert told["runs"][0] == {"first": 0, "tokens": 12, "state": "hit", "blocks": 3, "tier": "memory"}
    assert (told["hit_tokens"], told["copied_tokens"], told["compute_tokens"]) == (12, 0, 1)
    assert told["estimate"]["seconds"] > 0
    told = check(stage, {"prompt": "one two thre"}, "last_token", "hit=8 of=12 stop=last_token")
    assert told["runs"][1] == {"first": 8, "tokens": 4, "state": "held", "blocks": 1, "tier": "memory"}
    assert told["difference"] is None


def test_differs_with_the_tokens_on_both_sides() -> None:
    stage = Stage()
    stage.complete("one two three four five")
    told = check(stage, {"prompt": "one two threw four"}, "differs", "hit=12 of=18 stop=differs")
    assert told["stop"] == {
        "reason": "differs",
        "at_token": 12,
        "sentence": "differs from what is recorded at token 12",
        "evicted_ago_s": None,
        "request": None,
        "option": None,
        "group": None,
    }
    difference = told["difference"]
    assert difference["at_token"] == 12
    assert difference["before"] == {"token_ids": list(b"two thre"), "text": "two thre"}
    assert difference["ours"] == {"token_ids": list(b"w four"), "text": "w four"}
    assert difference["theirs"] == {"token_ids": list(b"e four f"), "text": "e four f"}
    assert difference["message"] is None


def test_evicted_names_the_request_that_needed_the_block() -> None:
    stage, prompt = Stage(n_blocks=12), "a long beginning that will give way"
    stage.complete(prompt)
    pushed = stage.complete("x" * 40).json()["id"]
    told = check(stage, {"prompt": prompt}, "evicted", "hit=8 of=35 stop=evicted")
    assert told["stop"]["request"] == pushed
    assert 0 <= told["stop"]["evicted_ago_s"] < 30
    assert told["stop"]["sentence"].endswith(f" ago for request {pushed}")
    assert [run["state"] for run in told["runs"]] == ["hit", "evicted", "unknown"]


def test_computing() -> None:
    stage, prompt = Stage(budget=16), "computed by somebody else at this very moment, and by us"
    stage.begin("busy", prompt)
    told = explain(stage, {"prompt": prompt})
    assert (told["stop"]["reason"], told["stop"]["request"], told["hit_tokens"]) == ("computing", "busy", 16)
    assert told["stop"]["sentence"] == "request busy is computing what follows from token 16 on now"
    assert [(run["state"], run["tokens"]) for run in told["runs"]] == [("hit", 16), ("computing", 40)]


def test_computing_in_the_answer_of_a_request_that_did_not_wait() -> None:
    stage, prompt = Stage(budget=128), "computed twice at the same time, because nobody waits"
    body = {"prompt": [prompt, prompt], "max_tokens": 1, "headwater": {"explain": True}}
    answer = stage.post("/v1/completions", body)
    first, second = answer.json()["usage"]["headwater"]["prefix"]
    assert (first["stop"]["reason"], second["stop"]["reason"]) == ("no_record", "computing")
    assert second["stop"]["request"] == answer.json()["id"] + "-0"
    assert answer.headers["x-headwater-prefix"] == "hit=0 of=106 stop=no_record,computing"
    same(second, kept(stage, answer).json()["prompts"][1])


def test_other_identity() -> None:
    stage = Stage()
    stage.compute_under_adapter("recorded under an adapter ")
    prompt = "recorded under an adapter and then more"
    told = check(stage, {"prompt": prompt}, "other_identity", "hit=0 of=39 stop=other_identity")
    assert told["difference"] is None


def test_bypassed() -> None:
    stage = Stage()
    stage.complete("one two three")
    body = {"prompt": "one two three", "skip_reading_prefix_cache": True}
    told = check(stage, body, "bypassed", "hit=0 of=13 stop=bypassed")
    assert told["stop"]["option"] == "skip_reading_prefix_cache"
    assert [run["state"] for run in told["runs"]] == ["held", "unknown"]
    stage = Stage(caching=False)
    told = check(stage, {"prompt": "one two three"}, "bypassed", "hit=0 of=13 stop=bypassed")
    assert told["stop"]["option"] == "no_enable_prefix_caching"


def test_a_group_cannot_start_there() -> None:
    stage, prompt = Stage(groups=HYBRID, n_blocks=14), "one two three four five"
    stage.complete(prompt)
    for filler in ("x" * 9, "y" * 9, "z" * 9):  # take the blocks of the sliding group, one after the other
        stage.complete(filler)
        told = explain(stage, {"prompt": prompt})
        if told["stop"]["reason"] == "group_cannot_start":
            break
    told, header, _ = ran(stage, {"prompt": prompt})
    assert told["stop"]["reason"] == "group_cannot_start" and header.endswith(" of=23 stop=group_cannot_start")
    assert told["stop"]["group"] in (0, 1)
    assert told["stop"]["sentence"].startswith(f"layer group {told['stop']['group']} holds too little")


def test_copied_tokens_stand_in_the_header() -> None:
    stage = Stage(partial=True)
    stage.complete("one two three four")
    told = check(stage, {"prompt": "one twig"}, "differs", "hit=4 copied=2 of=8 stop=differs")
    assert [(run["state"], run["tokens"]) for run in told["runs"]] == [("hit", 4), ("copied", 2), ("unknown", 2)]
    assert told["runs"][1] == {"first": 4, "tokens": 2, "state": "copied", "tier": "memory"}


# ---- the differing token ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("common", "ours", "theirs", "n_inside"),
    [("caf", "\u00e9 au lait", "\u00e8 au lait", 1), ("ok ", "\U0001f600.", "\U0001f601.", 3)],
)
def test_a_difference_inside_a_character_shows_both_characters_whole(
    common: str, ours: str, theirs: str, n_inside: int
) -> None:
    """A token is a byte here: the two characters differ in their last one."""
    stage, prompt, recorded = Stage(), f"{common}{ours} and more", f"{common}{theirs} and more"
    stage.complete(recorded)
    told = explain(stage, {"prompt": prompt})
    at, difference = len(common.encode()) + n_inside, told["difference"]
    assert (told["stop"]["reason"], difference["at_token"]) == ("differs", at)
    assert difference["ours"]["token_ids"] == list(prompt.encode()[at : at + 8])
    assert difference["theirs"]["token_ids"] == list(recorded.encode()[at : at + 8])
    assert difference["before"]["text"] == common
    assert (difference["ours"]["text"][0], difference["theirs"]["text"][0]) == (ours[0], theirs[0])


def test_text_cut_inside_a_character_has_no_broken_ones() -> None:
    stage = Stage()
    stage.complete("\u20ac" * 9 + "b")
    told = explain(stage, {"prompt": "\u20ac" * 6 + "a" + "\u20ac" * 9})["difference"]
    assert told["at_token"] == 18
    assert told["before"]["text"] == "\u20ac\u20ac"  # of 8 bytes the first two belong to a third one
    assert told["ours"]["text"] == "a\u20ac\u20ac"
    assert told["theirs"]["text"] == "\u20ac\u20ac"


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a headwater?"}]


def user(content: str, role: str = "user") -> Json:
    return {"messages": [{"role": role, "content": content}]}


def test_a_chats_difference_names_message_and_character() -> None:
    stage = Stage()
    stage.chat(CHAT)
    for at, text in ((0, "that is a headwater?"), (10, "What is a Headwater?"), (17, "What is a headwatxx?")):
        body = {"messages": [CHAT[0], {"role": "user", "content": text}]}
        told = explain(stage, body)["difference"]
        assert told["message"] == {"index": 1, "role": "user", "character": at, "part": "message"}
        assert told["ours"]["text"].startswith(text[at : at + 3])
    told, _, afterwards = ran(stage, body, "/v1/chat/completions")
    same(told, afterwards)
    assert told["difference"]["message"]["character"] == 17


def test_a_special_token_on_one_side_is_named_as_what_it_is() -> None:
    stage = Stage()
    stage.chat(user("short")["messages"])
    told = explain(stage, user("shorter"))["difference"]
    assert told["theirs"]["token_ids"][0] == MARK
    assert told["theirs"]["text"] == "<mark>\n<mark>assis"
    assert told["ours"]["text"].startswith("er<mark>")
    assert told["message"] == {"index": 0, "role": "user", "character": 5, "part": "message"}
    told = explain(stage, user("shor"))["difference"]
    assert told["ours"]["token_ids"][0] == MARK and told["theirs"]["text"].startswith("t<mark>")
    assert (told["message"]["part"], told["message"]["index"]) == ("template", None)
    told = explain(stage, user("short", "system"))["difference"]
    assert (told["at_token"], told["message"]["part"]) == (1, "template")


def test_the_place_is_looked_for_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat of thousands of messages would hold up all other streams."""
    from headwater.serve import front

    stage, seen = Stage(), []
    start = front.token_start

    def noting_start(*args: Any) -> int:
        seen.append(threading.current_thread() is threading.main_thread())
        return start(*args)

    monkeypatch.setattr(front, "token_start", noting_start)
    stage.chat(CHAT)
    assert seen == []  # nothing differs from nothing
    body = {"messages": [CHAT[0], {"role": "user", "content": "What is new?"}]}
    place = {"index": 1, "role": "user", "character": 8, "part": "message"}
    assert explain(stage, body)["difference"]["message"] == place
    assert ran(stage, body, "/v1/chat/completions")[0]["difference"]["message"] == place
    stage = Stage()
    stage.chat(CHAT)
    stream = stage.post("/v1/chat/completions", {**body, "max_tokens": 2, "stream": True})
    assert kept(stage, events_of(stream.text)[0]["id"]).json()["difference"]["message"] == place
    assert seen == [False, False, False]


def test_tokens_that_cannot_be_traced_take_no_answer_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def untraceable(*args: Any) -> int:
        raise ValueError("the tokens are no encoding of this text by this tokenizer")

    stage = Stage()
    stage.chat(CHAT)
    monkeypatch.setattr("headwater.serve.front.token_start", untraceable)
    body = {"messages": [CHAT[0], {"role": "user", "content": "What is new?"}]}
    told, header, afterwards = ran(stage, body, "/v1/chat/completions")
    assert "stop=differs" in header
    assert told["difference"]["message"] is None
    same(told, afterwards)


# ---- the ways to ask --------------------------------------------------------------------------------


def test_nothing_is_run_or_counted() -> None:
    stage = Stage()
    stage.complete("one two three")
    before = stage.get("/metrics").text
    for _ in range(3):
        explain(stage, {"prompt": "one two three"})
        explain(stage, {"messages": CHAT})
    assert stage.get("/metrics").text == before


def test_the_estimate_has_two_digits() -> None:
    stage = Stage()
    stage.core._times.observe(16, 0.123456)
    assert explain(stage, {"prompt": "x" * 16})["estimate"] == {"compute_tokens": 16, "seconds": 0.12}


def test_several_prompts_give_a_list_in_their_order() -> None:
    stage = Stage()
    stage.complete("one two three")
    body = {"prompt": ["one two three", "one twx three", "quite another"]}
    foreseen = explain(stage, body)["prompts"]
    assert [told["hit_tokens"] for told in foreseen] == [12, 4, 0]
    answer = stage.post("/v1/completions", {**body, "max_tokens": 1, "headwater": {"explain": True}})
    told = answer.json()["usage"]["headwater"]["prefix"]
    for one, other, later in zip(told, foreseen, kept(stage, answer).json()["prompts"], strict=True):
        same(other, one, later)
    assert answer.headers["x-headwater-prefix"] == "hit=16 of=39 stop=partial_block,differs"
    same(told[1], kept(stage, answer.json()["id"] + "-1").json())
    assert kept(stage, answer.json()["id"] + "-7").status_code == 404


def test_usage_has_the_account_only_when_it_is_asked_for() -> None:
    stage = Stage()
    for fields in ({}, {"headwater": {"explain": False}}, {"headwater": None}, {"headwater": {}}):
        assert "headwater" not in stage.complete("one", **fields).json()["usage"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    wanted = {"stream": True, "stream_options": options, "headwater": {"explain": True}}
    *events, last, done = events_of(stage.complete("one", **{"max_tokens": 3, **wanted}).text)
    assert done == "[DONE]" and len(events) == 3
    assert not any("headwater" in event["usage"] for event in events)
    assert last["usage"]["headwater"]["prefix"]["n_tokens"] == 3
    for wrong in ({"explian": True}, {"explain": 1}, True):
        error = stage.post("/v1/completions", {"prompt": "one", "headwater": wrong})
        assert (error.status_code, error.json()["error"]["param"]) == (400, "headwater")


def test_an_account_that_would_reach_nobody_is_refused() -> None:
    stage, wanted = Stage(), {"stream": True, "max_tokens": 1, "headwater": {"explain": True}}
    for path, body in (("completions", {"prompt": "one"}), ("chat/completions", {"messages": CHAT})):
        for options in ({}, {"stream_options": {"include_usage": False}}):
            error = stage.post(f"/v1/{path}", {**body, **wanted, **options})
            assert (error.status_code, error.json()["error"]["param"]) == (400, "headwater")
            assert "stream_options.include_usage" in error.json()["error"]["message"]
    assert "headwater" not in Stage(explain_usage=True).complete("one", stream=True).text


def test_without_accounts_asking_for_one_is_refused() -> None:
    stage = Stage(explain=False)
    answer = stage.complete("one two three four")
    assert "x-headwater-prefix" not in answer.headers and "headwater" not in answer.json()["usage"]
    for path, body in (("completions", {"prompt": "one"}), ("chat/completions", {"messages": CHAT})):
        error = stage.post(f"/v1/{path}", {**body, "headwater": {"explain": True}})
        assert (error.status_code, error.json()["error"]["param"]) == (400, "headwater")
        assert "--no-explain" in error.json()["error"]["message"]
    unknown = kept(stage, answer)
    assert unknown.status_code == 404 and "--no-explain" in unknown.json()["error"]["message"]
    assert explain(stage, {"prompt": "one two three four"})["hit_tokens"] == 16


def test_the_server_can_put_it_into_every_usage() -> None:
    stage = Stage(explain_usage=True)
    assert stage.complete("one").json()["usage"]["headwater"]["prefix"]["n_tokens"] == 3
    assert stage.chat(CHAT).json()["usage"]["headwater"]["prefix"]["n_tokens"] > 20


def test_a_stream_has_the_header_before_a_long_prompt_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers may have to go out before the first token, but what is reused is known as soon as the request starts."""
    stage = Stage(budget=16)
    prompt = "a prompt of many steps, far longer than anybody waits for headers. " * 4
    computed: list[int] = []
    step = stage.client.step

    def slow_step() -> None:
        step()
        computed.append(1)
        if len(computed) == 1:
            monkeypatch.setattr("headwater.serve.stream.FIRST_EVENT_WAIT_S", 0.0)

    stage.client.step = slow_step  # type: ignore[method-assign]
    answer = stage.complete(prompt, stream=True, max_tokens=2)
    assert answer.headers["x-headwater-prefix"] == f"hit=0 of={len(prompt)} stop=no_record"
    events = events_of(answer.text)
    assert len(events) == 3 and len(computed) >= len(prompt) // 16
    stream = stage.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2, "stream": True})
    roles = [event["choices"][0]["delta"].get("role") for event in events_of(stream.text)[:-1]]
    assert roles == ["assistant", None]


def test_a_client_that_leaves_has_an_account_too() -> None:
    stage = Stage()

    async def leave(client: httpx.AsyncClient) -> None:
        body = {"prompt": "gone away", "max_tokens": 400, "stream": True}
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        while not any(len(queue) for queue in stage.client._queues.values()):
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    stage.run(leave)
    (one,) = stage.front.accounts.recent(5)
    assert (one.n_prompt, one.n_cached) == (9, 0) and 0 < one.n_generated < 400
    assert kept(stage, one.request_id).json()["stop"]["reason"] == "no_record"


def test_bodies_are_checked_as_those_of_requests() -> None:
    stage = Stage()
    for body, named in (
        ({}, "messages"),
        ({"prompt": "a", "messages": CHAT}, "messages"),
        ({"prompt": "a", "temprature": 1}, "temprature"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a" * 600}, "prompt"),
        ({"prompt": [1, 260]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"prompt": "a", "model": "another"}, "model"),
    ):
        answer = stage.post("/v1/explain", body)
        assert answer.status_code == (404 if named == "model" else 400)
        assert answer.json()["error"]["param"] == named, body
        if len(body.keys() & {"prompt", "messages"}) == 1:
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            assert stage.post(path, body).json() == answer.json()
    for raw in (b"{", b"[]", b"null", b"\xff", b'{"prompt": "\\ud800"}'):
        sent = {"content": raw, "headers": {"content-type": "application/json"}}
        assert stage.run(lambda client, sent=sent: client.post("/v1/explain", **sent)).status_code == 400
    assert stage.run(lambda client: client.post("/v1/explain", content=b"{}")).status_code == 415
    assert stage.get("/v1/explain").status_code == 405


def test_an_unknown_id_is_a_404() -> None:
    stage = Stage()
    for answer_id in ("cmpl-0", "-", "a-b-c", "%00", "x" * 5000):
        assert kept(stage, answer_id).status_code == 404


def test_an_operator_sees_what_other_namespaces_hold() -> None:
    stage = Stage()
    stage.complete("told elsewhere only", cache_salt="a secret salt")
    told = explain(stage, {"prompt": "told elsewhere only"})
    assert [other["hit_tokens"] for other in told["elsewhere"]] == [16] and told["hit_tokens"] == 0
    assert "secret" not in json.dumps(told)
    assert "elsewhere" not in explain(stage, {"prompt": "TOLD nowhere"})


def test_the_recent_ones_are_told_newest_first() -> None:
    stage = Stage()
    for prompt in ("one two three", "one two fourth", ["five six seven", "eight nine"]):
        stage.complete(prompt)
    told = stage.front.recent(3)
    assert [one["n_prompt"] for one in told] == [10, 14, 14]
    assert told[2]["account"]["stop"]["reason"] == "differs" and told[2]["n_cached"] == 8
    assert told[0]["id"].endswith("-1") and told[0]["ttft_s"] > 0 and told[0]["n_generated"] == 1


# ---- keys -------------------------------------------------------------------------------------------


def test_tenants_of_one_namespace_share_lengths_but_not_text_or_ids() -> None:
    stage = Stage("ann", "bob", "admin", derive_salts=False, n_blocks=16)
    prompt, body = "what ann wrote and nobody else", {"prompt": "what ann wrote in a letter"}
    first = stage.complete(prompt, "ann")
    for key, shown in (("ann", True), ("bob", False), ("admin", True)):
        told = explain(stage, body, key)
        assert (told["hit_tokens"], told["difference"]["at_token"]) == (12, 15)
        assert (told["difference"]["theirs"] is not None) == shown
        assert told["difference"]["ours"]["text"] == "in a let"
    second = stage.complete(body["prompt"], "bob", headwater={"explain": True})
    assert second.json()["usage"]["headwater"]["prefix"]["difference"]["theirs"] is None
    assert second.headers["x-headwater-prefix"] == "hit=12 of=26 stop=differs"
    for answer, own in ((first, "ann"), (second, "bob")):
        found = {key: kept(stage, answer, key).status_code for key in ("ann", "bob", "admin")}
        assert found == {key: 200 if key in (own, "admin") else 404 for key in found}
    unknown, hidden = kept(stage, "cmpl-unknown", "bob"), kept(stage, first, "bob")
    assert unknown.text.replace("cmpl-unknown", "X") == hidden.text.replace(first.json()["id"], "X")
    assert kept(stage, second, "bob").json()["difference"]["theirs"] is None
    assert kept(stage, second, "admin").json()["difference"]["theirs"]["text"] == "and nobo"
    stage.complete("x" * 60, "bob")
    for key, named in (("ann", False), ("bob", True), ("admin", True)):
        stop = explain(stage, {"prompt": prompt}, key)["stop"]
        assert stop["reason"] == "evicted" and stop["evicted_ago_s"] is not None
        assert (stop["request"] is not None) == named
        assert ("another request" in stop["sentence"]) != named
    for key in (None, "wrong"):
        assert stage.post("/v1/explain", {"prompt": "a"}, key).status_code == 401
        assert kept(stage, first, key).status_code == 401


def test_b05_tenants_with_salts_of_their_own_cannot_tell_what_another_has_cached() -> None:
    stage, body = Stage("ann", "bob", "admin"), {"prompt": "what ann wrote and nobody else"}
    before = explain(stage, body, "bob")
    stage.complete(body["prompt"], "ann")
    assert explain(stage, body, "ann")["hit_tokens"] == 28
    after = explain(stage, body, "bob")
    assert {**before, "estimate": None} == {**after, "estimate": None}
    assert before["stop"]["reason"] == "no_record" and "elsewhere" not in after
    told = explain(stage, body, "admin")
    assert told["hit_tokens"] == 0 and [other["hit_tokens"] for other in told["elsewhere"]] == [28]
