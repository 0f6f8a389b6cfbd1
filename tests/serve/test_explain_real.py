"""Every reason that one group of layers can have, for real: the default model, asked beforehand, told in the answer's
usage and header, and asked again afterwards. (test_explain_hybrid.py has the one that takes several groups.)"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from headwater.cli.top import fetch, screen
from headwater.text.tokenizer import Tokenizer, load_tokenizer
from tests.serve.explain_core import ADAPTED
from tests.serve.harness import Server, events_of, launched, wait_until
from tests.serve.ui.browser import browser, complaints
from tests.serve.ui.steps import css, opened, text, until

Json = dict[str, Any]

MODEL = "smollm2-135m"

SYSTEM = "You are the guide of a small museum about rivers. Answer in one short sentence, and never invent a number."

SAID: dict[str, str] = {}
"""What the tests of this module heard: reason -> the last sentence that told it."""

MORE = " And how long does it take until it reaches the sea, if nobody builds a dam on its way?"


@pytest.fixture(scope="module")
def real(model_file: Callable[[str], Path]) -> Iterator[Server]:
    with launched([sys.executable, "-m", "tests.serve.explain_core", str(model_file(MODEL))]) as server:
        yield server


@pytest.fixture(scope="module")
def tokenizer(model_file: Callable[[str], Path]) -> Tokenizer:
    return load_tokenizer(model_file(MODEL))


def ids(n: int, seed: int) -> list[int]:
    """Token ids that no other test begins with."""
    return [1000 + (seed * 7919 + i * 31) % 40_000 for i in range(n)]


def explain(server: Server, body: Json) -> Json:
    answer = server.post("/v1/explain", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def lasting(account: Json) -> Json:
    """Without what is of its moment, or for operators only."""
    kept = {name: value for name, value in account.items() if name not in ("estimate", "elsewhere")}
    return kept | {"stop": account["stop"] | {"evicted_ago_s": None, "sentence": None}}


def check(server: Server, body: Json, reason: str, path: str = "/v1/completions") -> Json:
    """Foreseen, told in the usage, in the header and of the stream, and kept: one account. Returns it."""
    foreseen = explain(server, body)
    assert foreseen["stop"]["reason"] == reason, foreseen
    answer = server.post(path, {**body, "max_tokens": 1, "headwater": {"explain": True}})
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    told = usage["headwater"]["prefix"]
    afterwards = httpx.get(f"{server.url}/v1/explain/{answer.json()['id']}").json()
    assert lasting(told) == lasting(foreseen) == lasting(afterwards)
    fields = dict(field.split("=") for field in answer.headers["x-headwater-prefix"].split())
    assert (fields["of"], fields["stop"]) == (str(usage["prompt_tokens"]), reason)
    n_cached = int(fields["hit"]) + int(fields.get("copied", 0))
    assert n_cached == usage["prompt_tokens_details"]["cached_tokens"]
    assert told["compute_tokens"] == usage["prompt_tokens"] - n_cached
    SAID[reason] = told["stop"]["sentence"]
    until(lambda: SAID[reason] in in_the_terminal(server))
    return foreseen


def in_the_terminal(server: Server) -> str:
    """What `headwater top` shows now."""
    out = Console(width=300, file=io.StringIO(), color_system=None)
    out.print(screen(fetch(server.url, None), server.url))
    return out.file.getvalue()


def test_no_record_partial_block_and_last_token(real: Server) -> None:
    prompt = ids(40, 1)
    server_is_new = explain(real, {"prompt": prompt, "cache_salt": "never used"})
    assert server_is_new["stop"]["reason"] == "no_record"
    check(real, {"prompt": prompt, "cache_salt": "no record"}, "no_record")
    told = check(real, {"prompt": [*prompt[:32], 7], "cache_salt": "no record"}, "partial_block")
    assert told["runs"][0] == {"first": 0, "tokens": 32, "state": "hit", "blocks": 2, "tier": "memory"}
    told = check(real, {"prompt": [*prompt[:32], 7, 8, 9], "cache_salt": "no record"}, "partial_block")
    assert (told["hit_tokens"], told["copied_tokens"], told["compute_tokens"]) == (32, 0, 3)
    told = check(real, {"prompt": prompt[:32], "cache_salt": "no record"}, "last_token")
    assert (told["hit_tokens"], told["copied_tokens"]) == (16, 15)
    assert 0 < told["estimate"]["seconds"] < 60


def test_differs_at_the_very_token_with_both_texts(real: Server, tokenizer: Tokenizer) -> None:
    recorded, prompt = "The river is long. " * 12 + "It ends here.", "The river is long. " * 12 + "It began here."
    ours, theirs = (tokenizer.encode(text, add_special_tokens=True, parse_special=True) for text in (prompt, recorded))
    at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    own = {"cache_salt": "differs"}
    real.complete(recorded + " And so on, until the sea takes it, far away from where it began.", max_tokens=1, **own)
    told = check(real, {"prompt": prompt + " And so on, until the sea takes it, far away from.", **own}, "differs")
    difference = told["difference"]
    assert difference["at_token"] == at
    assert (difference["ours"]["token_ids"][0], difference["theirs"]["token_ids"][0]) == (ours[at], theirs[at])
    assert difference["before"]["token_ids"] == ours[at - 8 : at]
    assert difference["ours"]["text"].startswith(" began here.")
    assert difference["theirs"]["text"].startswith(" ends here.")
    assert told["stop"]["sentence"] == f"differs from what is recorded at token {at}"


def test_differs_inside_a_multi_byte_character(real: Server, tokenizer: Tokenizer) -> None:
    """Some characters take several tokens: these two share all but the last one."""
    ours, theirs = "\u16a0", "\u16a1"
    encoded = [tokenizer.encode("rune: " + c, add_special_tokens=True, parse_special=True) for c in (ours, theirs)]
    at = next(i for i, (a, b) in enumerate(zip(*encoded, strict=True)) if a != b)
    assert at > len(tokenizer.encode("rune: ", add_special_tokens=True, parse_special=True)) - 1
    assert b"".join(map(tokenizer.token_bytes, encoded[0][:at])) != b"rune: "  # inside the character
    rest, own = " is a letter of an old alphabet, and so it was carved into wood.", {"cache_salt": "runes"}
    real.complete("rune: " + theirs + rest, max_tokens=1, **own)
    told = check(real, {"prompt": "rune: " + ours + rest, **own}, "differs")["difference"]
    assert told["at_token"] == at
    assert (told["ours"]["token_ids"][0], told["theirs"]["token_ids"][0]) == (encoded[0][at], encoded[1][at])
    assert told["before"]["text"] == "rune: "
    assert told["ours"]["text"].startswith(ours + " is") and told["theirs"]["text"].startswith(theirs + " is")


def test_a_chats_message_and_a_special_token_of_its_template(real: Server, tokenizer: Tokenizer) -> None:
    path, own = "/v1/chat/completions", {"cache_salt": "chats"}

    def body(question: str) -> Json:
        return {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}], **own}

    real.post(path, {**body("Where does the water of a river come from?" + MORE), "max_tokens": 1})
    told = check(real, body("Where does the sand of a river come from?" + MORE), "differs", path)["difference"]
    assert told["message"] == {"index": 1, "role": "user", "character": 14, "part": "message"}
    assert (told["ours"]["text"][:5], told["theirs"]["text"][:6]) == (" sand", " water")
    told = check(real, body("Where does the water of a river"), "differs", path)["difference"]
    end = tokenizer.encode("<|im_end|>", add_special_tokens=False, parse_special=True)
    assert told["ours"]["token_ids"][:1] == end and told["ours"]["text"].startswith("<|im_end|>\n")
    assert told["theirs"]["text"].startswith(" come from?")
    assert (told["message"]["index"], told["message"]["part"]) == (None, "template")


def test_evicted_how_long_ago_and_for_whom(real: Server) -> None:
    prompt, own = ids(200, 2), {"cache_salt": "evicted"}
    real.complete(prompt, max_tokens=1, **own)
    pushed = [
        real.post("/v1/completions", {"prompt": ids(650, 3 + i), "max_tokens": 1, "cache_salt": "pushes"}).json()["id"]
        for i in range(2)
    ]
    told = check(real, {"prompt": prompt, **own}, "evicted")
    assert told["stop"]["request"] in pushed
    assert 0 <= told["stop"]["evicted_ago_s"] < 60
    assert told["stop"]["sentence"].endswith(f"ago for request {told['stop']['request']}")


def test_computing_now(real: Server) -> None:
    """Two equal prompts that start in one step; they do if the engine is in the midst of another one when they come."""
    stop = threading.Event()

    def keep_busy() -> None:
        body = {"prompt": ids(8, 10), "max_tokens": 600, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", real.url + "/v1/completions", json=body, timeout=60) as answer:
            for _ in answer.iter_lines():
                if stop.is_set():
                    return

    busy = threading.Thread(target=keep_busy)
    busy.start()
    try:
        wait_until(lambda: real.running() > 0, 10)
        for attempt in range(20):
            prompt, own = ids(60, 20 + attempt), {"cache_salt": f"computing {attempt}"}
            body = {"prompt": [prompt, prompt], "max_tokens": 1, "headwater": {"explain": True}, **own}
            answer = real.post("/v1/completions", body)
            first, second = answer.json()["usage"]["headwater"]["prefix"]
            if second["stop"]["reason"] == "computing":
                break
    finally:
        stop.set()
        busy.join()
    assert (first["stop"]["reason"], second["stop"]["reason"]) == ("no_record", "computing")
    assert second["stop"]["request"] == answer.json()["id"] + "-0"
    assert second["runs"][0] == {"first": 0, "tokens": 48, "state": "computing", "blocks": 3}
    assert answer.headers["x-headwater-prefix"] == "hit=0 of=120 stop=no_record,computing"
    assert httpx.get(f"{real.url}/v1/explain/{answer.json()['id']}").json()["prompts"][1] == second


def test_other_identity(real: Server) -> None:
    told = check(real, {"prompt": [*ADAPTED, 7, 8, 9]}, "other_identity")
    assert (told["hit_tokens"], told["difference"]) == (0, None)


def test_bypassed_by_which_option(real: Server) -> None:
    told = check(real, {"prompt": ids(40, 7), "skip_reading_prefix_cache": True}, "bypassed")
    assert told["stop"]["option"] == "skip_reading_prefix_cache"


def test_a_stream_of_a_long_prompt_has_the_header(real: Server) -> None:
    body = {"prompt": ids(650, 8), "max_tokens": 3, "stream": True, "cache_salt": "stream"}
    answer = real.post("/v1/completions", body)
    assert answer.headers["x-headwater-prefix"] == "hit=0 of=650 stop=no_record"
    assert len(events_of(answer.text)) == 4


def test_explaining_leaves_the_metrics_and_the_hits_as_they_were(real: Server) -> None:
    prompt, own = ids(50, 9), {"cache_salt": "quiet"}
    real.complete(prompt, max_tokens=1, **own)
    before = real.metrics()
    for _ in range(20):
        told = explain(real, {"prompt": prompt, **own})
    after = real.metrics()
    assert {name for name, value in before.items() if after[name] != value} == set()
    usage = real.complete(prompt, max_tokens=1, **own)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == told["hit_tokens"] + told["copied_tokens"]


def test_the_page_says_every_reason(real: Server) -> None:
    if not SAID:
        pytest.skip("no other test of this module ran: there is nothing that the page could say")
    with browser() as page:
        opened(page, real)
        until(lambda: css(page, "#requests-more").is_displayed())
        css(page, "#requests-more").click()
        until(lambda: all(sentence in text(page, "#request-list") for sentence in SAID.values()))
        assert complaints(page) == []
