"""Keys, callers and derived salts, without a server."""

from __future__ import annotations

import base64
import itertools
import re
from typing import Any

import pytest
from starlette.requests import Request

from headwater.cache.account import Viewer
from headwater.config import ServerConfig
from headwater.engine.messages import Explain, Submit
from headwater.errors import ConfigError
from headwater.serve.access import MAX_KEY_CHARS, Access, Caller
from headwater.serve.errors import ApiError
from headwater.serve.openai.prepared import Prepared
from headwater.serve.openai.protocol import ChatRequest, CompletionRequest
from headwater.types import Namespace, SamplingParams

SECRET = b"sixteen bytes or more"


def access(*api_keys: str, **more: Any) -> Access:
    return Access(ServerConfig(api_keys=api_keys, **{"salt_secret": SECRET if api_keys else None, **more}))


def request(*headers: tuple[str, str | bytes]) -> Request:
    raw = [(name.lower().encode(), value if isinstance(value, bytes) else value.encode()) for name, value in headers]
    return Request({"type": "http", "method": "GET", "path": "/", "headers": raw})


def bearer(key: str) -> Request:
    return request(("Authorization", f"Bearer {key}"))


def refused(access: Access, request: Request) -> str:
    with pytest.raises(ApiError) as error:
        access.caller(request)
    assert (error.value.status, error.value.code) == (401, "invalid_api_key")
    return str(error.value)


# ---- keys that are no keys --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("", "is empty"),
        ("se cret", "white space as character 3"),
        ("secret ", "white space as character 7"),
        ("\tsecret", "white space as character 1"),
        ("secret\n", "a line break as character 7"),
        ("secret\r\nx-admin: yes", "a line break as character 7"),
        ("secret\x00", "a control character as character 7"),
        ("secret\x7f", "a control character"),
        ("sécret", "not ASCII"),
        ("secret\u2028", "a line break"),
        ("se\ud800cret", "not ASCII"),
        ("secret,other", "a comma"),
        ("k" * (MAX_KEY_CHARS + 1), "at most 512"),
    ],
)
@pytest.mark.parametrize("place", ["api", "admin"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key: str, why: str, place: str) -> None:
    with pytest.raises(ConfigError) as error:
        access("good", key) if place == "api" else access("good", admin_key=key)
    message = str(error.value)
    assert why in message
    assert ("API key 2" if place == "api" else "the admin key") in message
    assert not re.search("cret|other|kkkk", message)


def test_equal_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match="API key 1 and API key 3 are equal") as error:
        access("alpha", "beta", "alpha")
    assert "alpha" not in str(error.value)
    with pytest.raises(ConfigError, match="API key 2 and the admin key are equal"):
        access("alpha", "beta", admin_key="beta")


def test_the_longest_key_and_every_visible_character_work() -> None:
    visible = "".join(chr(c) for c in range(0x21, 0x7F) if c != ord(","))
    known = access(visible, "k" * MAX_KEY_CHARS)
    assert known.caller(bearer(visible)) != known.caller(bearer("k" * MAX_KEY_CHARS))


def test_what_cannot_be_derived_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is none"):
        access(derive_salts=True)
    with pytest.raises(ConfigError, match="from a secret"):
        access("alpha", "beta", salt_secret=None)
    with pytest.raises(ConfigError, match="no API key"):
        access(salt_secret=SECRET)  # a forgotten key would leave the server open


# ---- who asks ---------------------------------------------------------------------------------------


def test_without_keys_everybody_is_the_operator() -> None:
    open_to_all = access()
    assert open_to_all.caller(request()) == open_to_all.operator(bearer("anything")) == Caller("", operator=True)


def test_each_key_is_a_caller_of_its_own() -> None:
    known = access("alpha", "beta", admin_key="root")
    callers = [known.caller(bearer(key)) for key in ("alpha", "beta", "root")]
    assert [caller.operator for caller in callers] == [False, False, True]
    assert len({caller.sender for caller in callers}) == 3
    assert all(re.fullmatch("[0-9a-f]{16}", caller.sender) for caller in callers)


def test_a_sender_stays_the_same_after_a_restart_with_the_same_secret_only() -> None:
    sender = access("alpha", "beta").caller(bearer("alpha")).sender
    assert access("gamma", "alpha").caller(bearer("alpha")).sender == sender
    assert access("alpha", "beta", salt_secret=b"another secret").caller(bearer("alpha")).sender != sender


@pytest.mark.parametrize(
    "headers",
    [
        [("Authorization", "Bearer alpha")],
        [("authorization", "bearer   alpha ")],
        [("x-api-key", "alpha")],
        [("X-Api-Key", "alpha"), ("Authorization", "Bearer alpha")],
        [("Authorization", "Basic " + base64.b64encode(b"anybody:alpha").decode())],
        [("Authorization", "Basic " + base64.b64encode(b"proxy:other").decode()), ("x-api-key", "alpha")],
    ],
)
def test_a_key_may_come_in_these_headers(headers: list[tuple[str, str]]) -> None:
    known = access("alpha", "beta")
    assert known.caller(request(*headers)) == known.caller(bearer("alpha"))


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("Authorization", "")],
        [("Authorization", "alpha")],
        [("Authorization", "Bearer")],
        [("Authorization", "Bearer ")],
        [("Authorization", "Bearer\talpha")],
        [("Authorization", "Bearer alpha beta")],
        [("Authorization", "Bearer alph")],
        [("Authorization", "Bearer alphaa")],
        [("Authorization", "Bearer ALPHA")],
        [("Authorization", "Bearer alpha,beta")],
        [("Authorization", b"Bearer \xe4lpha")],
        [("Authorization", b"Bearer alpha\x00")],
        [("Authorization", "Token alpha")],
        [("Authorization", "Basic alpha")],
        [("Authorization", "Basic " + base64.b64encode(b"alpha").decode())],
        [("x-api-key", "")],
        [("x-api-key", "Bearer alpha")],
        [("api-key", "alpha")],
        [("Cookie", "api_key=alpha")],
        [("Authorization", "Bearer alpha"), ("Authorization", "Bearer beta")],
        [("Authorization", "Bearer alpha"), ("x-api-key", "wrong")],
        [("x-api-key", "alpha"), ("x-api-key", "beta")],
    ],
)
def test_anything_else_is_nobody(headers: list[tuple[str, str]]) -> None:
    message = refused(access("alpha", "beta", admin_key="root"), request(*headers))
    assert "alpha" not in message
    assert "wrong" not in message


def test_operators_only() -> None:
    known = access("alpha", admin_key="root")
    assert known.operator(bearer("root")).operator
    with pytest.raises(ApiError, match="send the admin key") as error:
        known.operator(bearer("alpha"))
    assert (error.value.status, error.value.code) == (403, "admin_key_required")
    with pytest.raises(ApiError, match="--admin-key") as error:
        access("alpha").operator(bearer("alpha"))
    assert error.value.status == 403


def test_an_admin_key_alone_closes_the_server_too() -> None:
    only = Access(ServerConfig(admin_key="root"))
    assert only.caller(bearer("root")).operator
    refused(only, request())
    assert not only.derives_salts


# ---- salts ------------------------------------------------------------------------------------------


def test_salts_are_derived_by_default_with_two_keys_the_admin_key_being_one() -> None:
    assert [a.derives_salts for a in (access(), access("a"), access("a", "b"), access("a", admin_key="r"))] == [
        False,
        False,
        True,
        True,
    ]
    assert access("a", derive_salts=True).derives_salts
    assert not access("a", "b", derive_salts=False).derives_salts


def test_underived_salts_are_those_of_the_body() -> None:
    shared = access("a", "b", derive_salts=False)
    for salt in (None, "", "team"):
        assert shared.salt(shared.caller(bearer("a")), salt) == salt


def test_no_two_keys_and_body_salts_meet_b05() -> None:
    keys = ["a", "ab", "b", "S", "-", "a-", "aS", "None", "abc"]
    known = access(*keys)
    bodies = [None, "", "-", "S", "b", "c", "bc", "None", "\ud800", "\udfff", "\\ud800", "\ufffd", "?", "x\0", "x"]
    bodies += [frame + text for frame, text in itertools.product(("S\x01" + "\0" * 7, "\x02" + "\0" * 7), ("b", "c"))]
    # what a tenant would have to send to reach another one, if it could choose what is mixed
    callers = {key: known.caller(bearer(key)) for key in keys}
    bodies += [str(known.salt(caller, body)) for caller in callers.values() for body in (None, "", "c")]
    derived = {known.salt(caller, body) for caller in callers.values() for body in bodies}
    assert len(derived) == len(keys) * len(set(bodies))
    assert all(isinstance(salt, str) and salt.isascii() for salt in derived)


def test_derived_salts_are_the_same_after_a_restart_with_the_same_secret_only() -> None:
    def salt(known: Access, body: str | None = "team") -> str | None:
        return known.salt(known.caller(bearer("alpha")), body)

    assert salt(access("alpha", "beta")) == salt(access("gamma", "alpha", admin_key="root"))
    assert salt(access("alpha", "beta")) != salt(access("alpha", "beta", salt_secret=b"another secret"))
    # golden: block keys on disk and in routers depend on these
    assert salt(access("alpha", "beta")) == "0df89e0020d601e1d555c5d9daebb896e37f6d892557f73d145241e47b2437ef"
    assert salt(access("alpha", "beta"), None) == "612b564cff16e8bb6ec634053f2af3b3cb31fef35338176d5bbea14ba86e16bc"


def test_a_caller_from_elsewhere_gets_no_salt() -> None:
    with pytest.raises(KeyError):
        access("alpha", "beta").salt(Caller("", operator=True), "x")


# ---- nothing shows a key ----------------------------------------------------------------------------


def reachable(thing: object, seen: set[int]) -> list[object]:
    """Everything that can be reached from an object through its members."""
    if id(thing) in seen:
        return []
    seen.add(id(thing))
    inside: list[object] = []
    if isinstance(thing, dict):
        inside = [*thing.keys(), *thing.values()]
    elif isinstance(thing, (list, tuple, set, frozenset)):
        inside = list(thing)
    elif hasattr(thing, "__dict__"):
        inside = list(vars(thing).values())
    inside += [getattr(thing, name) for name in getattr(type(thing), "__slots__", ()) if hasattr(thing, name)]
    return [thing, *(found for one in inside for found in reachable(one, seen))]


def test_no_key_is_kept_so_none_can_be_compared_piece_by_piece() -> None:
    """What is compared are digests under a secret of this process: how much of a key is right changes nothing."""
    known = access("alpha-key", "beta-key", admin_key="root-key")
    kept = [thing for thing in reachable(known, set()) if isinstance(thing, (str, bytes))]
    assert len(kept) > 6
    assert not any(b"-key" in (thing.encode() if isinstance(thing, str) else thing) for thing in kept)
    again = access("alpha-key", "beta-key", admin_key="root-key")
    assert known._by_digest.keys().isdisjoint(again._by_digest)


def test_repr_shows_neither_keys_nor_secret() -> None:
    config = ServerConfig(api_keys=("alpha-key",), admin_key="root-key", salt_secret=b"the-secret")
    shown = repr(config) + repr(Access(config)) + repr(Access(config).caller(bearer("alpha-key")))
    assert not re.search("alpha|root|the-secret", shown)


def test_repr_of_a_request_shows_no_salt() -> None:
    """Of everything that carries a salt from the body to the engine: one of them in a traceback must not tell it."""
    salt = "the-salt"
    body = {"prompt": "x", "cache_salt": salt}
    asked = CompletionRequest.model_validate(body)
    chat = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], "cache_salt": salt})
    submit = Submit("id", [1, 2], SamplingParams(), cache_salt=salt, sender="s")
    explain = Explain(7, [1, 2], Viewer("s", operator=False), cache_salt=salt)
    assert [asked.cache_salt, chat.cache_salt, submit.cache_salt, explain.cache_salt] == [salt] * 4
    for one in (asked, chat, submit, explain, Namespace(b"w", salt=salt), Prepared(asked, SamplingParams(), [[1]])):
        assert salt not in f"{one} {one!r} {[one]}"
    assert repr(submit).startswith("Submit(request_id='id', prompt_token_ids=[1, 2], ")
