"""The official client against a real server process (the model is a fake that repeats its prompt)."""

from __future__ import annotations

import openai
import pytest

MESSAGES = [
    {"role": "system", "content": "You are a river guide who knows every spring."},
    {"role": "user", "content": "Where does it begin?"},
]


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=12, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "system: You "
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    *tokens, usage = chunks
    assert [chunk.choices[0].delta.role for chunk in tokens] == ["assistant"] + [None] * 11
    assert "".join(chunk.choices[0].delta.content or "" for chunk in tokens) == "system: You "
    assert [chunk.choices[0].finish_reason for chunk in tokens] == [None] * 11 + ["length"]
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 12
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat_without_max_tokens_goes_to_the_context_limit(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=MESSAGES)
    assert answer.usage is not None
    assert answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"


def test_max_completion_tokens_wins(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=9, max_completion_tokens=3)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_an_answer_can_be_sent_back_as_the_next_turns_history(client: openai.OpenAI) -> None:
    question = {"role": "user", "content": "hi"}
    message = client.chat.completions.create(model="fake", messages=[question], max_tokens=3).choices[0].message
    for history in (message, message.to_dict(), message.model_dump()):
        answer = client.chat.completions.create(model="fake", messages=[question, history, question], max_tokens=25)
        assert answer.choices[0].message.content == "user: hi\nassistant: use\nu"


def test_text_parts_are_joined_by_line_breaks(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    answer = client.chat.completions.create(model="fake", messages=[{"role": "user", "content": parts}], max_tokens=13)
    assert answer.choices[0].message.content == "user: one\ntwo"


def test_developer_is_the_system(client: openai.OpenAI) -> None:
    messages = [{"role": "developer", "content": "hi"}]
    answer = client.chat.completions.create(model="fake", messages=messages, max_tokens=8)
    assert answer.choices[0].message.content == "system: "


def test_add_generation_prompt(client: openai.OpenAI) -> None:
    lengths = []
    for add in (True, False):
        answer = client.chat.completions.create(
            model="fake", messages=MESSAGES, max_tokens=1, extra_body={"add_generation_prompt": add}
        )
        assert answer.usage is not None
        lengths.append(answer.usage.prompt_tokens)
    assert lengths[0] - lengths[1] == len("assistant: ")


@pytest.mark.parametrize("stream", [False, True])
def test_completion(client: openai.OpenAI, stream: bool) -> None:
    answer = client.completions.create(model="fake", prompt="abc", max_tokens=5, stream=stream)
    chunks = list(answer) if stream else [answer]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abcab"
    assert len(chunks) == (5 if stream else 1)


def test_completion_defaults_to_16_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="abc")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_several_prompts_are_several_choices(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=["abc", "xy"], max_tokens=4)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "abca"), (1, "xyxy")]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 8)


def test_several_prompts_of_ids_stream_with_their_index(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="fake", prompt=[[97, 98], [120]], max_tokens=3, stream=True)
    texts = {0: "", 1: ""}
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "aba", 1: "xxx"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "included", "text"), [("quick", False, "The "), (["zzz", "brown", "quick"], True, "The quick")]
)
def test_stop_strings(client: openai.OpenAI, stream: bool, stop: str | list[str], included: bool, text: str) -> None:
    answer = client.completions.create(
        model="fake",
        prompt="The quick brown fox",
        max_tokens=19,
        stop=stop,
        stream=stream,
        extra_body={"include_stop_str_in_output": included},
    )
    chunks = list(answer) if stream else [answer]
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    last = chunks[-1].choices[0]
    assert last.finish_reason == "stop"
    assert last.model_extra is not None
    assert last.model_extra["stop_reason"] == "quick"
    if stream:  # an event for every token, also while "quic" is held back
        assert len(chunks) == len("The quick")


def test_stop_token_ids(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="fake", prompt="abcdef", max_tokens=6, extra_body={"stop_token_ids": [ord("d")]}
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra is not None
    assert answer.choices[0].model_extra["stop_reason"] == ord("d")


def test_errors_are_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        client.chat.completions.create(model="fake", messages=MESSAGES, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="other") as missing:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model="fake", messages=MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}]
        )


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "fake"
    assert model.model_extra is not None
    assert model.model_extra["max_model_len"] == 512
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_are_always_told_b68(client: openai.OpenAI, stream: bool) -> None:
    prompt = f"B68 {stream}: forty-eight characters and some more of them here"
    cached = []
    for _ in range(2):
        options = {"stream_options": {"include_usage": True}} if stream else {}
        answer = client.completions.create(model="fake", prompt=prompt, max_tokens=2, stream=stream, **options)
        usage = (list(answer)[-1] if stream else answer).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, 48]


def test_salts_keep_prefixes_apart_b05(client: openai.OpenAI) -> None:
    def cached(**extra: str) -> int:
        answer = client.completions.create(
            model="fake", prompt="B05: a secret of more than thirty-two characters", max_tokens=1, extra_body=extra
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert [cached(cache_salt="a"), cached(cache_salt="b"), cached(cache_salt=""), cached()] == [0, 0, 0, 0]
    assert [cached(cache_salt="a"), cached(cache_salt="b"), cached(cache_salt=""), cached()] == [32, 32, 32, 32]


def test_skip_reading_prefix_cache(client: openai.OpenAI) -> None:
    for extra in ({}, {"skip_reading_prefix_cache": True}):
        answer = client.completions.create(
            model="fake", prompt="skip reading, although this is known", max_tokens=1, extra_body=extra
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_return_token_ids_completion(client: openai.OpenAI, stream: bool) -> None:
    answer = client.completions.create(
        model="fake", prompt="ab", max_tokens=3, stream=stream, extra_body={"return_token_ids": True}
    )
    choices = [chunk.choices[0].model_extra or {} for chunk in (answer if stream else [answer])]
    assert choices[0]["prompt_token_ids"] == [97, 98]
    assert all("prompt_token_ids" not in choice for choice in choices[1:])
    assert [token for choice in choices for token in choice["token_ids"]] == [97, 98, 97]


@pytest.mark.parametrize("stream", [False, True])
def test_return_token_ids_chat(client: openai.OpenAI, stream: bool) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=3, stream=stream, extra_body={"return_token_ids": True}
    )
    chunks = list(answer) if stream else [answer]
    assert (chunks[0].model_extra or {})["prompt_token_ids"][:6] == list(b"system")
    ids = [(chunk.choices[0].model_extra or {})["token_ids"] for chunk in chunks]
    assert [token for some in ids for token in some] == list(b"sys")


def test_continuous_usage(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="fake",
        prompt="ab",
        max_tokens=3,
        stream=True,
        stream_options={"continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
    )
    assert [chunk.usage.completion_tokens for chunk in stream if chunk.usage is not None] == [1, 2, 3]
