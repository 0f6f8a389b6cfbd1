"""The wire format of streams, parsed strictly (B98), and characters that span tokens (B96)."""

from __future__ import annotations

import pytest

from tests.serve.harness import Server, events_of


def stream(server: Server, path: str = "/v1/completions", **fields: object) -> list[object]:
    response = server.post(path, {"stream": True, **fields})
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events_of(response.text)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "abc"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}]}),
    ],
)
@pytest.mark.parametrize("include_usage", [True, False])
def test_framing_b98(server: Server, path: str, body: dict[str, object], include_usage: bool) -> None:
    *events, done = stream(server, path, max_tokens=4, stream_options={"include_usage": include_usage}, **body)
    assert done == "[DONE]"
    if include_usage:
        *events, usage = events
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 4
        assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert len(events) == 4
    assert all(len(event["choices"]) == 1 and "usage" not in event for event in events)
    heads = [{key: event[key] for key in ("id", "object", "created", "model")} for event in events]
    assert heads == [heads[0]] * 4


def test_an_event_for_every_token_while_a_stop_string_is_held_back(server: Server) -> None:
    *events, _ = stream(server, prompt="ababac", max_tokens=6, stop="abac")
    assert len(events) == 6
    assert "".join(event["choices"][0]["text"] for event in events) == "ab"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_character_split_over_tokens_comes_once_whole_b96(server: Server) -> None:
    *events, _ = stream(server, prompt=[0xF0, 0x9F, 0x98, 0x80], max_tokens=5)
    assert [event["choices"][0]["text"] for event in events] == ["", "", "", "😀", "\ufffd"]


def test_invalid_bytes_stream_as_in_the_whole_answer_b96(server: Server) -> None:
    prompt = [0xF0, 0x9F, 0x41, 0xFF, 0x42, 0xC3]
    *events, _ = stream(server, prompt=prompt, max_tokens=6)
    whole = server.complete(prompt, max_tokens=6)
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]


def test_eos_is_an_event_too(server: Server) -> None:
    *events, _ = stream(server, prompt=[97, 256], max_tokens=5)
    assert [event["choices"][0]["text"] for event in events] == ["a", ""]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["choices"][0]["stop_reason"] is None


def test_ignore_eos(server: Server) -> None:
    *events, _ = stream(server, prompt=[97, 256], max_tokens=5, ignore_eos=True)
    assert len(events) == 5


def test_a_refusal_before_the_first_event_is_a_plain_error(server: Server) -> None:
    response = server.post("/v1/completions", {"prompt": [1] * 512, "stream": True})
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"


def test_a_row_that_fails_mid_stream_is_an_error_event_without_done_b98(server: Server) -> None:
    *events, last = stream(server, prompt="#fail", max_tokens=8)
    assert len(events) == 2
    assert last["error"]["message"] == "this row failed"
    assert last["error"]["type"] == "server_error"
    server.check_alive()


def test_a_row_that_fails_is_a_500_when_not_streaming(server: Server) -> None:
    error = server.refused({"prompt": "#fail"}, status=500)
    assert error["message"] == "this row failed"


def test_one_failing_prompt_of_several_fails_the_request_and_frees_the_rest(server: Server) -> None:
    error = server.refused({"prompt": ["#fail", "good " * 20], "max_tokens": 400}, status=500)
    assert error["message"] == "this row failed"
    assert server.running() == 0
