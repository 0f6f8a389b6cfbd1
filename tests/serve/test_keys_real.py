"""Tenants on the real model: what one has computed, another neither reuses nor notices (B05)."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.serve.harness import Server, launched

ALICE, BOB, ROOT = "alice-key-of-the-real-test", "bob-key-of-the-real-test", "root-key-of-the-real-test"
N_PROMPT = 481
N_HIT = 480


@pytest.fixture(scope="module")
def real(model_file: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("keys")
    (folder / "keys").write_text(f"# tenants\n{ALICE}\n{BOB}\n")
    (folder / "secret").write_text("a secret of the real tests")
    (folder / "keys").chmod(0o600)
    command = [sys.executable, "-m", "headwater", "serve", str(model_file("smollm2-135m")), "--port", "0"]
    command += ["--served-model-name", "smollm2-135m", "--max-model-len", "1024", "--kv-cache-memory-bytes", "128MiB"]
    command += ["--threads", "1", "--api-key-file", str(folder / "keys"), "--admin-key", ROOT]
    command += ["--salt-secret-file", str(folder / "secret")]
    with launched(command, ready=r"^Serving on (http\S+)") as server:
        yield server
        for secret in (ALICE, BOB, ROOT, "a secret of the real tests"):
            assert secret not in server.stderr()


class Told(NamedTuple):
    """What a caller can learn from one answer."""

    n_cached: int
    seconds: float
    text: str


def ids(seed: int) -> list[int]:
    """A prompt that no other test begins with."""
    return [1000 + (seed * 7919 + i * 31) % 40_000 for i in range(N_PROMPT)]


def ask(server: Server, key: str, prompt: list[int], **fields: Any) -> Told:
    began = time.perf_counter()
    answer = httpx.post(
        server.url + "/v1/completions",
        content=json.dumps({"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
        timeout=120,
    )
    seconds = time.perf_counter() - began
    assert answer.status_code == 200, answer.text
    told = answer.json()
    n_cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
    return Told(n_cached, seconds, told["choices"][0]["text"])


def test_a_tenant_that_sends_anothers_salt_has_no_hit_and_no_gain_in_time_b05(real: Server) -> None:
    cold, stolen, own = [], [], []
    for seed in range(3):
        cold.append(ask(real, ALICE, ids(seed), cache_salt="a"))
        own.append(ask(real, ALICE, ids(seed), cache_salt="a"))
        stolen.append(ask(real, BOB, ids(seed), cache_salt="a"))
    assert [told.n_cached for told in cold + stolen] == [0] * 6
    assert [told.n_cached for told in own] == [N_HIT] * 3
    assert [told.text for told in cold] == [told.text for told in stolen] == [told.text for told in own]
    # Ten times apart on an idle machine: a hit computes one token of 481.
    own_s, stolen_s = (statistics.median(told.seconds for told in some) for some in (own, stolen))
    assert stolen_s > 2 * own_s


def test_the_admin_key_has_prefixes_of_its_own(real: Server) -> None:
    prompt = ids(10)
    assert ask(real, ALICE, prompt).n_cached == 0
    assert (ask(real, ROOT, prompt).n_cached, ask(real, ROOT, prompt).n_cached) == (0, N_HIT)
    assert ask(real, BOB, prompt).n_cached == 0


def test_what_the_metrics_count_shows_no_key_or_salt(real: Server) -> None:
    ask(real, ALICE, ids(11), cache_salt="the-salt-of-alice")
    refused = httpx.get(real.url + "/metrics", headers={"Authorization": f"Bearer {ALICE}"})
    assert refused.status_code == 403
    shown = httpx.get(real.url + "/metrics", headers={"Authorization": f"Bearer {ROOT}"})
    assert "headwater_prefix_cache_hits_total" in shown.text
    for secret in (ALICE, BOB, ROOT, "the-salt-of-alice"):
        assert secret not in shown.text


def test_the_server_says_who_may_ask_and_shows_no_key(real: Server) -> None:
    for path in ("/metrics", "/v1/models", "/version", "/ui", "/admin/view", "/nowhere"):
        assert httpx.get(real.url + path).status_code == 401
    assert httpx.get(real.url + "/health").json() == {"status": "ok"}
