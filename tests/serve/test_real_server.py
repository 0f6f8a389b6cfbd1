"""A real server with the real model, as users run it: `headwater serve`."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.serve.harness import Server, events_of, launched, wait_until
from tests.serve.test_disconnect import begin, gone
from tests.serve.ui.browser import browser, complaints
from tests.serve.ui.steps import css, opened, press, row_of, text, until

MODEL = "smollm2-135m"
LIMIT = 1800
CHUNK = 128
VOCAB = 49_152

SYSTEM = (
    "You are the guide of a small museum about rivers. Answer in one short sentence. Be friendly and exact. Never "
    "invent a number. If you do not know, say so. Explain rare words. The museum opens at nine and closes at five."
)
MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What is a headwater?"}]


@pytest.fixture(scope="module")
def real(model_file: Callable[[str], Path]) -> Iterator[Server]:
    command = [sys.executable, "-m", "headwater", "serve", str(model_file(MODEL)), "--port", "0"]
    command += ["--served-model-name", MODEL, "--max-model-len", str(LIMIT), "--max-num-batched-tokens", str(CHUNK)]
    command += ["--kv-cache-memory-bytes", "256MiB", "--threads", "1"]
    command += ["--no-partial-reuse"]  # the article counts in whole blocks
    with launched(command, ready=r"^Serving on (http\S+)") as server:
        yield server
        assert server.stderr() == "" or "loading" in server.stderr()


@pytest.fixture
def client(real: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=real.url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def ids(n: int, seed: int) -> list[int]:
    """Token ids that no other test begins with."""
    return [1000 + (seed * 7919 + i * 31) % 40_000 for i in range(n)]


def counters(server: Server) -> tuple[float, float]:
    metrics = server.metrics()
    return metrics["headwater_prefix_cache_queries_total"], metrics["headwater_prefix_cache_hits_total"]


def cached_of(usage: Any) -> int:
    return usage.prompt_tokens_details.cached_tokens


def test_chat_answers_and_the_second_time_hits_b68(client: openai.OpenAI) -> None:
    answers, cached = [], []
    for stream in (False, True, False, True):
        options = {"stream_options": {"include_usage": True}} if stream else {}
        answer = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=12, temperature=0, stream=stream, **options
        )
        if stream:
            chunks = list(answer)
            assert len(chunks) == chunks[-1].usage.completion_tokens + 1
            answers.append("".join(chunk.choices[0].delta.content for chunk in chunks[:-1]))
            cached.append(cached_of(chunks[-1].usage))
        else:
            answers.append(answer.choices[0].message.content)
            cached.append(cached_of(answer.usage))
            n_prompt = answer.usage.prompt_tokens
    assert answers[0].strip()
    assert answers == [answers[0]] * 4
    assert cached == [0] + [(n_prompt - 1) // 16 * 16] * 3


def test_1712_of_1729_tokens(real: Server) -> None:
    """The article's arithmetic: queries 1727 -> 3456, hits 0 -> 1712, that is 99.02 %."""
    first = ids(1727, 1)
    second = first[:1714] + ids(15, 2)
    before = counters(real)
    assert real.complete(first, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    middle = counters(real)
    usage = real.complete(second, max_tokens=1)["usage"]
    after = counters(real)
    assert (middle[0] - before[0], middle[1] - before[1]) == (1727, 0)
    assert (after[0] - middle[0], after[1] - middle[1]) == (1729, 1712)
    assert 1712 == 107 * 16
    assert f"{(after[1] - middle[1]) / (after[0] - middle[0]):.2%}" == "99.02%"
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (1729, 1712)


def test_the_three_counter_examples_do_not_hit(real: Server) -> None:
    prompt = ids(40, 3)

    def hits(prompt: list[int], **fields: object) -> int:
        answer = real.complete(prompt, max_tokens=1, **fields)
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert hits(prompt) == 0
    assert hits(prompt) == 32
    assert hits([prompt[0] + 1, *prompt[1:]]) == 0  # another first token
    assert hits(prompt, cache_salt="other") == 0  # another salt
    assert httpx.post(real.url + "/reset_prefix_cache").status_code == 200
    assert hits(prompt) == 0  # no longer there


def test_salts_keep_tenants_apart_b05(real: Server) -> None:
    prompt = ids(33, 4)
    hits = [
        real.complete(prompt, max_tokens=1, cache_salt=salt)["usage"]["prompt_tokens_details"]["cached_tokens"]
        for salt in ("a", "b", "a", "b")
    ]
    assert hits == [0, 0, 32, 32]


def test_skipping_the_cache_counts_apart(real: Server) -> None:
    prompt = ids(40, 5)
    real.complete(prompt, max_tokens=1)
    before, bypassed = counters(real), real.metrics()["headwater_prefix_cache_bypassed_requests_total"]
    usage = real.complete(prompt, max_tokens=1, skip_reading_prefix_cache=True)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert counters(real) == before
    assert real.metrics()["headwater_prefix_cache_bypassed_requests_total"] == bypassed + 1


def test_the_sum_of_usage_is_what_the_counters_count_b67(real: Server) -> None:
    before = real.metrics()
    n_prompt = n_cached = n_generated = 0
    for length in (5, 16, 17, 40, 40, 33, 17):
        usage = real.complete(ids(length, 6), max_tokens=3, ignore_eos=True)["usage"]
        n_prompt += usage["prompt_tokens"]
        n_cached += usage["prompt_tokens_details"]["cached_tokens"]
        n_generated += usage["completion_tokens"]
    after = real.metrics()

    def grown(name: str) -> float:
        return after[f"headwater_{name}_total"] - before[f"headwater_{name}_total"]

    assert n_cached > 0
    assert grown("prefix_cache_queries") == n_prompt == grown("prompt_tokens")
    assert grown("prefix_cache_hits") == n_cached
    assert grown("prompt_tokens_computed") == n_prompt - n_cached
    assert grown("generation_tokens") == n_generated == 21


def test_several_at_once_answer_as_one_alone(real: Server) -> None:
    questions = ["What is a river?", "Name a river in Egypt.", "What is a delta?", "Count to five."]

    def body(question: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": question}], "max_tokens": 8, "temperature": 0}

    async def together() -> list[str]:
        async with httpx.AsyncClient(timeout=120) as http:
            path = real.url + "/v1/chat/completions"
            answers = await asyncio.gather(*(http.post(path, json=body(question)) for question in questions))
            return [answer.json()["choices"][0]["message"]["content"] for answer in answers]

    alone = [
        real.post("/v1/chat/completions", body(question)).json()["choices"][0]["message"]["content"]
        for question in questions
    ]
    assert asyncio.run(together()) == alone
    assert len(set(alone)) == 4


def test_seeds_are_kept(client: openai.OpenAI) -> None:
    def text(seed: int) -> str:
        answer = client.completions.create(model=MODEL, prompt="Once", max_tokens=6, temperature=1, seed=seed)
        return answer.choices[0].text

    assert text(5) == text(5) != text(6)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client: openai.OpenAI, stream: bool) -> None:
    whole = client.completions.create(model=MODEL, prompt="One, two, three,", max_tokens=10, temperature=0)
    text = whole.choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    answer = client.completions.create(
        model=MODEL, prompt="One, two, three,", max_tokens=10, temperature=0, stop=[stop], stream=stream
    )
    chunks = list(answer) if stream else [answer]
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[: text.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_token_ids_and_events_match_the_text(real: Server) -> None:
    body = {"prompt": "😀 naïve café", "max_tokens": 6, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    whole = real.complete(**body)["choices"][0]
    *events, done = events_of(real.post("/v1/completions", {**body, "stream": True}).text)
    choices = [event["choices"][0] for event in events]
    assert done == "[DONE]"
    assert [choice["token_ids"] for choice in choices] == [[token] for token in whole["token_ids"]]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert choices[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    again = real.complete(whole["prompt_token_ids"], max_tokens=6, temperature=0, ignore_eos=True)
    assert again["choices"][0]["text"] == whole["text"]


def test_25_token_chat_hits_16_b89(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "Say."}, {"role": "user", "content": "A short B89 question, of a river"}]
    usages = [client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1).usage for _ in range(2)]
    assert 17 <= usages[0].prompt_tokens <= 32
    assert [cached_of(usage) for usage in usages] == [0, 16]


def test_the_limit_shown_is_the_limit_enforced_b90(real: Server) -> None:
    limit = httpx.get(real.url + "/v1/models").json()["data"][0]["max_model_len"]
    assert limit == LIMIT
    prompt = ids(LIMIT * 4, 1)
    answer = real.complete(prompt[: limit - 1], max_tokens=5)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 1
    for length in (limit, limit + 1, 4 * limit):
        assert real.refused({"prompt": prompt[:length], "max_tokens": 5})["code"] == "context_length_exceeded"


@pytest.mark.parametrize("prompt", [[-1], [VOCAB], [2**31], [1.5], [True], []])
def test_ids_outside_the_vocabulary_are_refused_b91(real: Server, prompt: list[object]) -> None:
    real.refused({"prompt": prompt})


def test_stop_ids_outside_the_vocabulary_are_refused_b91(real: Server) -> None:
    real.refused({"prompt": "x", "stop_token_ids": [VOCAB]})
    assert real.complete("x", max_tokens=1, stop_token_ids=[VOCAB - 1])


def test_leaving_in_prefill_keeps_exactly_the_committed_blocks_b94(real: Server) -> None:
    prompt = ids(8 * CHUNK, 8)
    connection = begin(real, prompt=prompt, max_tokens=5)
    wait_until(lambda: real.in_use() >= CHUNK / 16, 30)
    connection.close()
    wait_until(lambda: gone(real), 5)
    n_evictable = real.metrics()['headwater_kv_blocks{state="evictable"}']
    cached = real.complete(prompt, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < 8 * CHUNK
    assert cached % CHUNK == 0
    assert n_evictable >= cached / 16


def test_leaving_in_decode_and_queue_frees_everything_b94(real: Server) -> None:
    connections = [begin(real, prompt=ids(20, 9), max_tokens=1500, stream=True, ignore_eos=True) for _ in range(3)]
    wait_until(lambda: real.running() == 3, 30)
    for connection in connections:
        connection.close()
    wait_until(lambda: gone(real), 5)
    metrics = real.metrics()
    states = [metrics[f'headwater_kv_blocks{{state="{state}"}}'] for state in ("in_use", "evictable", "free")]
    assert states[0] == 0
    assert sum(states) == metrics["headwater_kv_pool_blocks"]


def test_reset_while_running_and_forced_b84(real: Server) -> None:
    prompt = ids(40, 10)
    fields = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    cold = real.complete(prompt, **fields, cache_salt="cold")["choices"][0]["text"]
    answers: list[dict[str, Any]] = []
    running = threading.Thread(target=lambda: answers.append(real.complete(prompt, **fields)))
    running.start()
    wait_until(lambda: real.in_use() > 0, 30)
    refused = httpx.post(real.url + "/reset_prefix_cache", timeout=30)
    assert refused.status_code == 409
    assert refused.json()["error"]["busy_blocks"] >= 3
    forced = httpx.post(real.url + "/reset_prefix_cache?force=true", timeout=30)
    assert (forced.status_code, forced.json()["preempted_requests"]) == (200, 1)
    running.join(120)
    assert answers[0]["choices"][0]["text"] == cold
    assert real.metrics()["headwater_preemptions_total"] >= 1


def test_why_hits_ended_is_counted_once_a_request(real: Server) -> None:
    def stops() -> dict[str, float]:
        start = 'headwater_prefix_cache_stops_total{reason="'
        return {
            name.removeprefix(start).removesuffix('"}'): n
            for name, n in real.metrics().items()
            if name.startswith(start)
        }

    seen = [stops()]
    for prompt in (ids(70, 21), ids(70, 21), ids(40, 21) + ids(30, 22), ids(64, 21)):
        real.complete(prompt, max_tokens=3)
        seen.append(stops())
    grown = [
        {reason: n - before.get(reason, 0.0) for reason, n in after.items() if n != before.get(reason, 0.0)}
        for before, after in itertools.pairwise(seen)
    ]
    assert grown[1:] == [{"partial_block": 1}, {"differs": 1}, {"last_token": 1}]
    assert sum(grown[0].values()) == 1


def test_the_live_page_shows_a_hit_a_blocks_text_and_a_miss_with_its_reason(real: Server) -> None:
    system = SYSTEM + " This is for the page."

    def ask(question: str) -> Any:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        answer = real.post("/v1/chat/completions", {"messages": messages, "max_tokens": 4})
        assert answer.status_code == 200
        return answer.json()

    with browser() as page:
        opened(page, real)
        ask("What is a weir, and who would build one in a river, and why would they do that at all?")
        answer = ask("What is a lock, and who would build one in a river, and why would they do that at all?")
        row = row_of(page, answer)
        assert "differs" in text(page, f"{row} .why")
        assert "% cached" in text(page, f"{row} .line")
        css(page, f"{row} .open").click()
        account = css(page, f"{row} .account").text
        assert " lock" in account and " weir" in account and "message 1 (user), character 9" in account, account
        newest = httpx.get(real.url + "/admin/view", timeout=30).json()
        assert newest["requests"][0]["account"]["stop"]["reason"] == "differs"
        until(lambda: "museum" in text(page, "#tree .text[title*='museum']"))
        page.execute_script("document.getElementById('cells').focus()")
        press(page, "n")
        until(lambda: text(page, "#block-text").strip())
        assert complaints(page) == []
