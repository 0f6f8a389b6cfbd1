"""An error that nobody foresaw: a 500 in the envelope or an error event, logged, and the server lives on."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import pytest

from headwater.engine.client import EngineClient
from headwater.serve.app import create_app
from headwater.serve.front import Front
from tests.engine.test_client import started
from tests.serve.fake_core import ByteTokenizer
from tests.serve.harness import PYTHON_PATH, events_of


class BrokenTokenizer(ByteTokenizer):
    def encode(self, text: str, **options: Any) -> list[int]:
        if "break" in text:
            raise ZeroDivisionError("a secret detail")
        return super().encode(text, **options)


def answers(
    monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], front_type: type[Front] = Front
) -> list[httpx.Response]:
    """The answer to ``body``, and to a good request after it."""
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)

    async def main() -> list[httpx.Response]:
        async with started() as client:
            app = create_app(front_type(client, BrokenTokenizer(), "fake"))  # type: ignore[arg-type]
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                return [await http.post("/v1/completions", json=one) for one in (body, {"prompt": "good"})]

    return asyncio.run(main())


def test_an_unforeseen_error_is_a_500_without_its_details(monkeypatch: pytest.MonkeyPatch) -> None:
    broken, good = answers(monkeypatch, {"prompt": "break"})
    assert broken.status_code == 500
    assert broken.json()["error"]["type"] == "server_error"
    assert "secret" not in broken.text
    assert good.status_code == 200


class BreaksLater(Front):
    def __init__(self, client: EngineClient, *more: Any) -> None:
        super().__init__(client, *more)
        stream = client.stream

        async def breaking(submits: Any) -> Any:
            n = 0
            async for delta in stream(submits):
                yield delta
                n += 1
                if n == 2 and submits[0].prompt_token_ids == [120]:
                    raise ZeroDivisionError("a secret detail")

        client.stream = breaking  # type: ignore[method-assign]


def test_an_unforeseen_error_mid_stream_is_an_event_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        broken, good = answers(monkeypatch, {"prompt": "x", "stream": True}, BreaksLater)
    *tokens, last = events_of(broken.text)
    assert len(tokens) == 2
    assert last["error"]["type"] == "server_error"
    assert "secret" not in broken.text
    assert "ZeroDivisionError" in caplog.text
    assert good.status_code == 200
