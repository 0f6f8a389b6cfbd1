"""What is refused, by which name; each refusal is followed by a good request (B90, B91, B93)."""

from __future__ import annotations

import time

import httpx
import pytest

from tests.serve.fake_core import VOCAB
from tests.serve.harness import Server

LIMIT = 512


# ---- fields ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.5),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**31),
        ("max_tokens", 10**30),
        ("max_tokens", "5"),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("seed", "x"),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a"] * 17),
        ("stop", "x" * 1025),
        ("stop", 5),
        ("stop", [5]),
        ("stop_token_ids", [VOCAB]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", ["x"]),
        ("stop_token_ids", [1] * 129),
        ("n", 0),
        ("n", 2),
        ("n", 10_000),
        ("n", True),
        ("best_of", 2),
        ("echo", True),
        ("suffix", "x"),
        ("logprobs", 0),
        ("logprobs", 5),
        ("prompt_logprobs", 0),
        ("logit_bias", {str(VOCAB): 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"x": 1}),
        ("allowed_token_ids", []),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("repetition_penalty", 1.1),
        ("min_p", 0.1),
        ("min_tokens", 1),
        ("response_format", {"type": "json_object"}),
        ("guided_regex", "("),
        ("guided_regex", "(a+)+$"),
        ("guided_json", {"$ref": "#"}),
        ("structured_outputs", {"regex": "("}),
        ("priority", 2**31),
        ("priority", 0.5),
        ("cache_salt", 5),
        ("cache_salt", "s" * 1025),
        ("stream", "yes"),
        ("stream", 1),
        ("stream_options", {"include_usage": True}),
        ("ignore_eos", "no"),
        ("model", 7),
        ("return_token_ids", "yes"),
    ],
)
def test_a_bad_value_is_refused_by_its_field_b91_b93(server: Server, field: str, value: object) -> None:
    error = server.refused({"prompt": "abc", field: value})
    assert error["param"] == field
    assert field in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", []),
        ("messages", None),
        ("messages", "hello"),
        ("messages", ["hello"]),
        ("messages", [{"role": "user"}]),
        ("messages", [{"content": "x"}]),
        ("messages", [{"role": "wizard", "content": "x"}]),
        ("messages", [{"role": "user", "content": 5}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ("messages", [{"role": "user", "content": "x", "colour": "red"}]),
        ("messages", [{"role": "user", "content": "x"}] * 4097),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("top_logprobs", 3),
        ("logprobs", True),
        ("chat_template", "{{ messages }}"),
        ("chat_template_kwargs", {"messages": []}),
        ("chat_template_kwargs", 5),
        ("continue_final_message", True),
        ("max_completion_tokens", "many"),
        ("max_completion_tokens", 0),
        ("max_completion_tokens", 2**31),
        ("chat_template_kwargs", {"continue_final_message": True}),
        ("chat_template_kwargs", {"documents": []}),
        ("messages", [{"role": "user", "content": None}]),
        ("messages", [{"role": None, "content": "x"}]),
        ("messages", [{"role": "user", "content": "x", "colour": None}]),
        ("messages", [{"role": "assistant", "content": "x", "refusal": "no"}]),
        ("messages", [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]),
        ("modalities", ["audio"]),
    ],
)
def test_a_bad_chat_value_is_refused_by_its_field(server: Server, field: str, value: object) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], field: value}
    error = server.refused(body, "/v1/chat/completions")
    assert error["param"] == field
    assert field in error["message"]


def test_the_place_in_a_message_is_named(server: Server) -> None:
    parts = [{"type": "text", "text": "x"}, {"type": "image_url"}]
    error = server.refused({"messages": [{"role": "user", "content": parts}]}, "/v1/chat/completions")
    assert error["message"].startswith("messages[0].content[1].type: ")


@pytest.mark.parametrize(
    ("field", "near"), [("max_token", "max_tokens"), ("temprature", "temperature"), ("cache-salt", "cache_salt")]
)
def test_an_unknown_field_comes_with_the_nearest_known_one(server: Server, field: str, near: str) -> None:
    error = server.refused({"prompt": "abc", field: 1})
    assert error["message"] == f"unknown field '{field}': did you mean '{near}'?"
    assert error["param"] == field


def test_an_unknown_field_like_nothing(server: Server) -> None:
    assert server.refused({"prompt": "abc", "zzz": 1})["message"] == "unknown field 'zzz'"
    assert len(server.refused({"prompt": "abc", "z" * 100_000: 1})["message"]) < 200


def test_an_unknown_field_within_stream_options(server: Server) -> None:
    error = server.refused({"prompt": "abc", "stream": True, "stream_options": {"include_usages": True}})
    assert error["param"] == "stream_options"
    assert "stream_options.include_usages" in error["message"]


def test_null_is_the_default_everywhere(server: Server) -> None:
    fields = ["model", "temperature", "top_p", "top_k", "seed", "stop", "stream", "stream_options", "n", "logprobs"]
    fields += ["logit_bias", "user", "cache_salt", "priority", "echo", "suffix", "best_of", "presence_penalty"]
    assert server.complete("abc", **dict.fromkeys(fields))["usage"]["completion_tokens"] == 16


def test_null_is_the_default_inside_too(server: Server) -> None:
    response = server.post(
        "/v1/completions", {"prompt": "abc", "stream": True, "stream_options": {"include_usage": None}}
    )
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("field", ["max_tokens", "top_k", "seed", "priority", "temperature", "n", "stop_token_ids"])
def test_an_enormous_number_is_not_repeated_in_full_b93(server: Server, field: str) -> None:
    number = int("7" * 4000)
    error = server.refused({"prompt": "abc", field: [number] if field == "stop_token_ids" else number})
    assert error["param"] == field
    assert len(error["message"]) < 200


def test_max_tokens_is_checked_even_where_the_newer_name_wins(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 0, "max_completion_tokens": 5}
    assert server.refused(body, "/v1/chat/completions")["param"] == "max_tokens"


def test_neutral_values_and_documented_no_ops_are_accepted(server: Server) -> None:
    answer = server.complete(
        "abc",
        n=1,
        best_of=1,
        echo=False,
        presence_penalty=0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        logit_bias={},
        min_p=0,
        user="somebody",
        metadata={"a": "b"},
        response_format={"type": "text"},
    )
    assert answer["usage"]["completion_tokens"] == 16


def test_the_salt_is_in_no_message_and_no_log(server: Server) -> None:
    number = 4711_0815_4711
    secret = f"tell-nobody-{number}"
    server.complete("abc", cache_salt=secret)
    for body in (
        {"cache_salt": number},
        {"cache_salt": [secret]},
        {"cache_salt": secret * 100},
        {"cache_salt": secret, "seed": "x"},
    ):
        assert str(number) not in str(server.refused({"prompt": "abc", **body}))
    assert str(number) not in server.stderr()
    assert str(number) not in httpx.get(server.url + "/metrics").text


# ---- prompts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        "",
        [],
        [-1],
        [VOCAB],
        [2**31],
        [2**64],
        [1.5],
        [1.0],
        [True],
        [None],
        [{}],
        [1, "a"],
        ["a", 1],
        ["a", [1]],
        [[1], 2],
        [[]],
        [[1], []],
        [""],
        [[1, [2]]],
        {"text": "x"},
        5,
        ["a"] * 257,
    ],
)
def test_a_bad_prompt_is_refused_b91(server: Server, prompt: object) -> None:
    error = server.refused({"prompt": prompt})
    assert str(error["param"]).startswith("prompt")
    assert len(error["message"]) < 300


def test_the_bad_id_is_named_b91(server: Server) -> None:
    error = server.refused({"prompt": [[1, 2], [3, VOCAB]]})
    assert error["message"] == f"prompt[1][1] must be a token id from 0 to {VOCAB - 1}, got {VOCAB}"


@pytest.mark.parametrize("kind", ["ids", "text", "chat"])
def test_prompt_lengths_around_the_limit_b90(server: Server, kind: str) -> None:
    frame = len("user: \nassistant: ") if kind == "chat" else 0
    path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"

    def body(length: int) -> dict[str, object]:
        text = "x" * (length - frame)
        if kind == "chat":
            return {"messages": [{"role": "user", "content": text}], "max_tokens": 5}
        return {"prompt": [7] * length if kind == "ids" else text, "max_tokens": 5}

    fits = server.post(path, body(LIMIT - 1))
    assert fits.status_code == 200
    assert fits.json()["choices"][0]["finish_reason"] == "length"
    assert fits.json()["usage"]["total_tokens"] == LIMIT
    for length in (LIMIT, LIMIT + 1, 4 * LIMIT, 100 * LIMIT):
        error = server.refused(body(length), path)
        assert error["code"] == "context_length_exceeded"
        assert str(LIMIT) in error["message"]


def test_the_limit_is_the_one_that_models_shows_b90(server: Server) -> None:
    assert httpx.get(server.url + "/v1/models").json()["data"][0]["max_model_len"] == LIMIT


# ---- bodies, headers, paths --------------------------------------------------------------------------


def raw(server: Server, content: bytes, **headers: str) -> httpx.Response:
    headers = {"content-type": "application/json", **headers}
    return httpx.post(server.url + "/v1/completions", content=content, headers=headers, timeout=60)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"prompt": "a", "seed": ' + b"9" * 10_000 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": [' + b"9" * 10_000 + b"]}",
    ],
)
def test_a_body_that_is_no_good_json_object_is_a_400_b93(server: Server, content: bytes) -> None:
    response = raw(server, content)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert len(response.text) < 1000
    server.check_alive()


def test_another_content_type_is_a_415(server: Server) -> None:
    headers = {"content-type": "text/plain"}
    response = httpx.post(server.url + "/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert response.status_code == 415
    assert "application/json" in response.json()["error"]["message"]


def test_a_50_mib_body_is_a_413_in_bounded_time_b93(server: Server) -> None:
    start = time.monotonic()
    response = raw(server, b'{"prompt": "' + b"x" * (50 * 2**20) + b'"}')
    assert response.status_code == 413
    assert response.json()["error"]["message"]
    assert time.monotonic() - start < 20
    server.check_alive()


def test_a_text_far_over_the_limit_is_refused_without_tokenising_it_b93(server: Server) -> None:
    start = time.monotonic()
    response = raw(server, b'{"prompt": "' + b"x" * (7 * 2**20) + b'"}')
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert time.monotonic() - start < 20
    server.check_alive()


@pytest.mark.parametrize("field", ["stop", "stop_token_ids", "messages", "prompt"])
def test_a_million_bad_items_are_refused_in_bounded_time_b93(server: Server, field: str) -> None:
    start = time.monotonic()
    path = "/v1/chat/completions" if field == "messages" else "/v1/completions"
    content = b'{"%s": [%s null]}' % (field.encode(), b"1.5," * 1_900_000)
    response = httpx.post(server.url + path, content=content, headers={"content-type": "application/json"}, timeout=60)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    assert time.monotonic() - start < 10
    server.check_alive()


def test_300_headers_are_a_431_b93(server: Server) -> None:
    response = raw(server, b'{"prompt": "a"}', **{f"x-{i}": "y" for i in range(300)})
    assert response.status_code == 431
    server.check_alive()


def test_a_1_mib_header_is_a_4xx_b93(server: Server) -> None:
    try:
        response = raw(server, b'{"prompt": "a"}', x="y" * 2**20)
    except (httpx.WriteError, httpx.ReadError):  # the server hung up while the header was still being sent
        pass
    else:
        assert 400 <= response.status_code < 500
    server.check_alive()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405), ("PUT", "/v1/models", 405)],
)
def test_wrong_paths_and_methods_have_the_envelope(server: Server, method: str, path: str, status: int) -> None:
    response = httpx.request(method, server.url + path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_reset_with_a_bad_force_is_a_400(server: Server) -> None:
    response = httpx.post(server.url + "/reset_prefix_cache?force=perhaps")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "force"


def test_the_api_is_described(server: Server) -> None:
    described = httpx.get(server.url + "/openapi.json").json()
    assert "cache_salt" in described["components"]["schemas"]["CompletionRequest"]["properties"]
    assert "Message" in described["components"]["schemas"]
    assert httpx.get(server.url + "/docs").status_code == 200
