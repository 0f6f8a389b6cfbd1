from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.serve.harness import Server, fake_server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A quick fake, for tests that leave it as it was."""
    with fake_server("step_ms=1&max_model_len=512") as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client
