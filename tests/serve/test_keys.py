"""A server with keys: what is open, what tenants may, what is the operator's, and whose prefixes are whose (B05)."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from starlette.routing import Route
from starlette.testclient import TestClient

from headwater.config import ServerConfig, UiConfig
from headwater.serve.access import Access
from headwater.serve.app import create_app
from headwater.serve.guard import DRAIN_S, MAX_DRAIN_BYTES, NEEDS, Need
from tests.serve.harness import PROMPT, Server, fake_server, wait_until

ALICE, BOB, ROOT = "alice-key", "bob-key", "root-key"
KEYS = f"keys={ALICE}.{BOB}&admin={ROOT}"
OPEN = {"/health", "/ui/{name}"}
"""Liveness, and the files of the package that the page is made of: the same for everybody, whatever is cached."""

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# ---- every route, by the table ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def app() -> FastAPI:
    """The application without anything behind it: whoever gets past the guard meets an error 500."""
    config = ServerConfig(api_keys=(ALICE, BOB), admin_key=ROOT, salt_secret=b"a secret of the tests")
    front: Any = SimpleNamespace(access=Access(config), ui=UiConfig())
    return create_app(front)


@pytest.fixture(scope="module")
def inside(app: FastAPI) -> TestClient:
    return TestClient(app, raise_server_exceptions=False)


def addresses(app: FastAPI) -> Iterator[tuple[str, str]]:
    """A path for each route, with the path as the route has it."""
    for route in app.routes:
        assert isinstance(route, Route)
        parts = route.path.split("/")
        yield "/".join("1" if part.startswith("{") else part for part in parts), route.path


def test_every_route_stands_in_the_table_and_only_those(app: FastAPI) -> None:
    assert {template for _, template in addresses(app)} == set(NEEDS)
    assert [path for path, need in NEEDS.items() if need is Need.NOTHING] == ["/health", "/ui/{name}"]


@pytest.mark.parametrize("method", METHODS)
def test_a_stranger_gets_401_everywhere_but_for_liveness(app: FastAPI, inside: TestClient, method: str) -> None:
    paths = [path for path, _ in addresses(app)] + [
        "/",
        "/nowhere",
        "/health/",
        "//health",
        "/v1",
        "/v1/models/",
        "/UI",
    ]
    for path in paths:
        for headers in ({}, bearer("wrong")):
            answer = inside.request(method, path, headers=headers, follow_redirects=False)
            if (method, path) == ("GET", "/health"):
                assert answer.status_code == 500  # past the guard
                continue
            if (method, path) == ("GET", "/ui/1"):
                continue  # files of the package, the same for everybody
            assert answer.status_code == 401, (method, path)
            assert answer.headers["www-authenticate"] == 'Bearer realm="headwater"'
            if method != "HEAD":
                error = answer.json()["error"]
                assert (error["type"], error["code"], error["param"]) == (
                    "invalid_request_error",
                    "invalid_api_key",
                    None,
                )


def test_a_tenant_gets_403_for_what_is_the_operators(app: FastAPI, inside: TestClient) -> None:
    forbidden = set()
    for path, template in addresses(app):
        for method in ("GET", "POST"):
            answer = inside.request(method, path, headers=bearer(ALICE))
            assert answer.status_code != 401
            if answer.status_code == 403:
                forbidden.add(template)
    assert forbidden == {path for path, need in NEEDS.items() if need is Need.ADMIN_KEY}
    assert forbidden >= {"/metrics", "/reset_prefix_cache", "/ui", "/ui/stream", "/admin/view"}


def test_nothing_is_closed_to_the_operator(app: FastAPI, inside: TestClient) -> None:
    for path, _ in addresses(app):
        for method in ("GET", "POST"):
            assert inside.request(method, path, headers=bearer(ROOT)).status_code not in (401, 403)


def test_what_is_not_there_is_told_to_those_with_a_key_only(inside: TestClient) -> None:
    assert inside.get("/nowhere", headers=bearer(ALICE)).status_code == 404
    assert inside.put("/health", headers=bearer(ALICE)).status_code == 405
    assert inside.put("/metrics", headers=bearer(ALICE)).status_code == 405


def test_a_route_that_the_table_forgot_is_the_operators() -> None:
    front: Any = SimpleNamespace(access=Access(ServerConfig(api_keys=(ALICE,), admin_key=ROOT, salt_secret=b"x" * 16)))
    app = create_app(front)

    @app.get("/forgotten")
    async def forgotten() -> str:
        return "shown"

    inside = TestClient(app)
    got = [inside.get("/forgotten", headers=headers).status_code for headers in ({}, bearer(ALICE), bearer(ROOT))]
    assert got == [401, 403, 200]


def test_a_page_that_is_opened_gets_the_browsers_own_dialogue(inside: TestClient) -> None:
    opened = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    for path in ("/docs", "/metrics", "/nowhere"):
        assert inside.get(path, headers=opened).headers["www-authenticate"].startswith("Basic realm=")
    assert inside.post("/v1/completions", headers=opened).headers["www-authenticate"].startswith("Bearer")
    assert inside.get("/ui/stream", headers={"Accept": "text/event-stream"}).headers["www-authenticate"][:6] == "Bearer"
    page = inside.get("/ui", headers=opened)  # a form in it asks
    assert (page.status_code, "www-authenticate" in page.headers) == (200, False)
    assert page.content != inside.get("/ui", headers=bearer(ROOT)).content
    assert inside.get("/docs", auth=("anyone", ALICE)).status_code == 200
    assert inside.get("/ui", auth=("anyone", ALICE)).status_code == 403
    assert inside.get("/docs", auth=("anyone", "wrong")).status_code == 401


def test_a_form_of_another_site_cannot_use_a_key_that_the_browser_knows(inside: TestClient) -> None:
    root = ("anyone", ROOT)
    assert inside.post("/reset_prefix_cache?force=true", auth=root).status_code == 401
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        answer = inside.post("/v1/completions", auth=root, content="{}", headers={"Content-Type": kind})
        assert answer.status_code == 401
    json_headers = {"Content-Type": "application/json; charset=utf-8"}
    assert inside.post("/v1/completions", auth=root, content="{}", headers=json_headers).status_code not in (401, 403)


def test_too_many_headers_are_no_way_around(inside: TestClient) -> None:
    many = {f"x-{i}": "1" for i in range(200)}
    assert inside.get("/metrics", headers=many).status_code == 401
    assert inside.get("/metrics", headers={**many, **bearer(ROOT)}).status_code == 431


# ---- a server ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keyed() -> Iterator[Server]:
    with fake_server(f"step_ms=1&max_model_len=1024&{KEYS}") as server:
        yield server


def complete(server: Server, key: str, prompt: str = PROMPT, **fields: Any) -> httpx.Response:
    body = json.dumps({"prompt": prompt, "max_tokens": 1, **fields})
    headers = {"Content-Type": "application/json", **bearer(key)}
    return httpx.post(server.url + "/v1/completions", content=body, headers=headers, timeout=60)


def cached(server: Server, key: str, prompt: str, **fields: Any) -> int:
    answer = complete(server, key, prompt, **fields)
    assert answer.status_code == 200, answer.text
    n: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return n


def derived(key: str, body_salt: str | None) -> str | None:
    """The salt under which the server runs a request."""
    config = ServerConfig(api_keys=(ALICE, BOB), admin_key=ROOT, salt_secret=b"a secret of the tests")
    known = Access(config)
    header = [(b"authorization", f"Bearer {key}".encode())]
    request: Any = SimpleNamespace(scope={"headers": header})
    return known.salt(known.caller(request), body_salt)


def test_liveness_is_open_and_says_no_more(keyed: Server) -> None:
    assert httpx.get(keyed.url + "/health").json() == {"status": "ok"}


def test_the_death_of_the_engine_is_told_to_strangers_without_its_cause() -> None:
    with fake_server(f"step_ms=1&{KEYS}") as server:
        complete(server, ALICE, "#crash " + PROMPT, max_tokens=8)
        wait_until(lambda: httpx.get(server.url + "/health").status_code == 503, 10)
        answer = httpx.get(server.url + "/health")
        assert answer.json()["error"]["message"] == "the engine is not running: the server's log says why"


def test_the_openai_package_works_with_a_key(keyed: Server) -> None:
    with openai.OpenAI(base_url=keyed.url + "/v1", api_key=ALICE, max_retries=0) as client:
        assert client.models.list().data[0].id == "fake"
        answer = client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=3
        )
        assert answer.usage is not None
        stream = client.completions.create(model="fake", prompt="abc", max_tokens=3, stream=True)
        assert "".join(event.choices[0].text for event in stream) == "abc"
    with openai.OpenAI(base_url=keyed.url + "/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as error:
            client.completions.create(model="fake", prompt="abc")
        assert (error.value.status_code, error.value.code) == (401, "invalid_api_key")


def test_a_tenant_hits_its_own_prefixes_only_b05(keyed: Server) -> None:
    prompt = "tenants: " + PROMPT
    assert (cached(keyed, ALICE, prompt), cached(keyed, ALICE, prompt)) == (0, 64)
    assert (cached(keyed, BOB, prompt), cached(keyed, BOB, prompt)) == (0, 64)
    assert (cached(keyed, ROOT, prompt), cached(keyed, ROOT, prompt)) == (0, 64)


def test_sending_the_salt_of_another_tenant_reaches_nothing_b05(keyed: Server) -> None:
    prompt = "salts: " + PROMPT
    assert (cached(keyed, ALICE, prompt, cache_salt="a"), cached(keyed, ALICE, prompt, cache_salt="a")) == (0, 64)
    assert cached(keyed, ALICE, prompt) == 0
    guesses = ["a", "", None, "alice-keya", ALICE, derived(ALICE, "a"), derived(ALICE, None), f"{ALICE}\0a"]
    for salt in guesses:
        assert cached(keyed, BOB, prompt, cache_salt=salt) == 0
        assert cached(keyed, ROOT, prompt, cache_salt=salt) == 0
    assert cached(keyed, BOB, prompt, cache_salt="a") == 64  # its own by now
    assert cached(keyed, ALICE, prompt, cache_salt="a") == 64


def test_salts_of_one_tenant_stay_apart(keyed: Server) -> None:
    prompt = "apart: " + PROMPT
    for salt in ("x", "", None, "\U0001f600", "\ufffd", "None"):
        assert (cached(keyed, ALICE, prompt, cache_salt=salt), cached(keyed, ALICE, prompt, cache_salt=salt)) == (0, 64)


def test_without_derived_salts_tenants_share() -> None:
    with fake_server(f"step_ms=1&derive=0&{KEYS}") as server:
        assert cached(server, ALICE, PROMPT) == 0
        assert cached(server, BOB, PROMPT) == cached(server, ROOT, PROMPT) == 48
        assert cached(server, BOB, PROMPT, cache_salt="a") == 0
        assert cached(server, ALICE, PROMPT, cache_salt="a") == 48


def test_neither_keys_nor_salts_are_shown_anywhere(keyed: Server) -> None:
    salt = "a-salt-nobody-sees"
    shown = [complete(keyed, ALICE, cache_salt=salt).text]
    shown.append(complete(keyed, ALICE, cache_salt=salt, nonsense=1).text)
    shown.append(complete(keyed, ALICE, cache_salt={"x": salt}).text)
    shown.append(complete(keyed, ALICE, cache_salt=salt * 100).text)
    shown.append(complete(keyed, "wrong-key", cache_salt=salt).text)
    for path in ("/metrics", "/openapi.json", "/v1/models", "/version", "/admin/view", "/nowhere"):
        answer = httpx.get(keyed.url + path, headers=bearer(ROOT), timeout=30)
        shown += [answer.text, str(answer.headers)]
    shown.append(keyed.stderr())
    for secret in (ALICE, BOB, ROOT, "wrong-key", salt, str(derived(ALICE, salt)), str(derived(ALICE, None))):
        assert not any(secret in text for text in shown), secret


# ---- nothing of a stranger's body -------------------------------------------------------------------


def connect(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def head(*lines: str) -> bytes:
    return "\r\n".join(["POST /v1/completions HTTP/1.1", "Host: x", *lines, "", ""]).encode()


def received(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


@pytest.mark.parametrize("more", ["Content-Length: 100000000", "Transfer-Encoding: chunked"])
def test_a_stranger_is_answered_before_its_body_comes(keyed: Server, more: str) -> None:
    with connect(keyed) as connection:
        began = time.monotonic()
        connection.sendall(head("Content-Type: application/json", "Expect: 100-continue", more))
        assert connection.recv(13) == b"HTTP/1.1 401 "  # and not 100 Continue, nor after the server waited for a body
        assert time.monotonic() - began < DRAIN_S
        assert b"connection: close" in received(connection).lower()


def test_a_stranger_cannot_make_the_server_read_a_large_body(keyed: Server) -> None:
    n_sent = 0
    with connect(keyed) as connection:
        connection.sendall(head("Content-Type: application/json", "Content-Length: 100000000"))
        try:
            while n_sent < 100_000_000:
                n_sent += connection.send(b" " * 65536)
        except (ConnectionResetError, BrokenPipeError):
            pass
    assert n_sent < 16 * MAX_DRAIN_BYTES  # what the two sockets buffer comes on top
    assert cached(keyed, ALICE, "afterwards") == 0


def test_a_stranger_with_an_ordinary_body_reads_why(keyed: Server) -> None:
    """Also a client that writes all of its body before it reads: a server that closed on unread bytes would have
    taken the answer back."""
    n_body = MAX_DRAIN_BYTES - 65536
    with connect(keyed) as connection:
        connection.sendall(head("Content-Type: application/json", f"Content-Length: {n_body}"))
        for _ in range(n_body // 65536):
            connection.sendall(b" " * 65536)
            time.sleep(0.01)
        assert b'"invalid_api_key"' in received(connection)
    answer = complete(keyed, "wrong", "x" * 500_000)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
