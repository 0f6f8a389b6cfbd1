"""The page's files and what guards them."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from headwater.config import ServerConfig, UiConfig
from headwater.serve.access import Access
from headwater.serve.app import create_app
from headwater.serve.ui.routes import TYPES
from tests.serve.harness import ROOT, Server

STATIC = ROOT / "src" / "headwater" / "serve" / "ui" / "static"
POLICY = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "frame-ancestors 'none'",
    "base-uri 'none'",
    "form-action 'none'",
    "require-trusted-types-for 'script'",
)


def inside(ui: UiConfig, **keys: Any) -> TestClient:
    front: Any = SimpleNamespace(access=Access(ServerConfig(**keys)), ui=ui)
    return TestClient(create_app(front))


def test_every_file_is_served_with_its_type_and_under_a_strict_policy(server: Server) -> None:
    for path in [STATIC / "index.html", *STATIC.iterdir()]:
        url = server.url + ("/ui" if path.name == "index.html" else f"/ui/{path.name}")
        answer = httpx.get(url, timeout=30)
        assert answer.status_code == 200 and answer.content == path.read_bytes()
        assert answer.headers["content-type"] == TYPES[path.suffix[1:]]
        policy = answer.headers["content-security-policy"].split("; ")
        assert set(POLICY) <= set(policy) and not any("unsafe" in rule for rule in policy)
        assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", ["nothing.js", "..%2f..%2fapp.py", "%2e%2e", "index.html%00.js"])
def test_no_other_file_is(server: Server, name: str) -> None:
    assert httpx.get(f"{server.url}/ui/{name}", timeout=30).status_code == 404


def test_nothing_comes_from_elsewhere_and_nothing_makes_markup_of_text() -> None:
    for path in STATIC.iterdir():
        source = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"(https?:)?//[a-z0-9-]+\.[a-z]", source), path.name
        for maker in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser", "eval(", "srcdoc"):
            assert maker not in source, path.name
        assert path.suffix != ".html" or not re.search(
            r"\son\w+=|<style|style=|<script(?! type=\"module\" src=)", source
        )


def test_the_page_can_be_switched_off() -> None:
    off = inside(UiConfig(enabled=False))
    for path in ("/ui", "/ui/app.js", "/ui/stream"):
        answer = off.get(path)
        assert answer.status_code == 404 and "--no-ui" in answer.json()["error"]["message"]


def test_with_keys_a_browser_gets_a_page_that_asks_and_nothing_else() -> None:
    closed = inside(UiConfig(), api_keys=("tenant",), admin_key="boss", salt_secret=b"secret of the tests")
    opened = {"Accept": "text/html,application/xhtml+xml"}
    asking = closed.get("/ui", headers=opened)
    assert asking.status_code == 200 and b'<html data-key="needed" lang="en">' in asking.content
    assert "www-authenticate" not in asking.headers
    assert int(asking.headers["content-length"]) == len(asking.content)
    assert closed.get("/ui").status_code == 401  # no browser: plainly told
    assert b"data-key" not in closed.get("/ui", headers={**opened, "Authorization": "Bearer boss"}).content
    assert closed.get("/ui", headers={**opened, "Authorization": "Bearer tenant"}).status_code == 403
    for path in ("/ui/stream", "/admin/view", "/admin/view/blocks/0", "/admin/view/branches/00"):
        assert closed.get(path, headers=opened).status_code == 401
        assert closed.get(path, headers={"Authorization": "Bearer tenant"}).status_code == 403
