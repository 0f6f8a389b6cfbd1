from __future__ import annotations

import pytest

from headwater.bench.client import Ask
from headwater.bench.clients import Clients
from headwater.bench.dialect import learn
from headwater.bench.prompts import Drawer, Vocabulary, as_prompt, learn_vocabulary
from headwater.errors import BenchError
from tests.bench.fake_server import fake_server


@pytest.mark.parametrize(
    ("options", "by_ids"),
    [
        ((), True),
        (("--bos", "1"), True),
        (("--text-only",), False),
        (("--text-only", "--bos", "1", "--long-words", "river,water,milk,man,yesterday"), False),
    ],
)
def test_prompts_have_exactly_the_length_asked_for(options: tuple[str, ...], by_ids: bool) -> None:
    with fake_server(*options) as url, Clients(f"{url}/v1") as clients:
        dialect = learn(clients.ask, "fake")
        assert dialect.token_ids == by_ids
        drawer = Drawer(learn_vocabulary(clients.ask, dialect), "seed")
        for n in (16, 129, 512):
            prefix = drawer.prefix(n)
            for pieces in (prefix, (*drawer.with_other_first(prefix),), (*prefix, *drawer.question(17))):
                answer = clients.ask(Ask(body=dialect.body(as_prompt(pieces), 1)))
                assert answer.usage is not None
                assert answer.usage.prompt_tokens == n + len(pieces) - len(prefix)


def test_what_a_server_takes_is_found_out() -> None:
    with fake_server() as url, Clients(f"{url}/v1") as clients:
        everything = learn(clients.ask, "fake")
    assert everything.ignore_eos and everything.usage and everything.counts_by_event and everything.cache_salt
    options = ("--strict", "--salt", "refused", "--no-counts", "--text-only")
    with fake_server(*options) as url, Clients(f"{url}/v1") as clients:
        least = learn(clients.ask, "fake")
        assert not (least.ignore_eos or least.usage or least.counts_by_event or least.cache_salt or least.token_ids)
        assert learn_vocabulary(clients.ask, least).exact is False
        body = least.body("a b", 1)
    assert set(body) == {"model", "prompt", "max_tokens", "temperature", "stream"}


def test_a_server_that_answers_nothing_is_an_error() -> None:
    with (
        fake_server("--fault", "http500@1+") as url,
        Clients(f"{url}/v1") as clients,
        pytest.raises(BenchError, match="it broke"),
    ):
        learn(clients.ask, "fake")


def test_fresh_means_fresh() -> None:
    ids = Vocabulary(range(1000, 30_000), range(1000, 30_000), 0)
    drawer, same, other = Drawer(ids, "a"), Drawer(ids, "a"), Drawer(ids, "b")
    first = drawer.prefix(64)
    assert first == same.prefix(64)
    assert len({first[:4], drawer.prefix(64)[:4], drawer.prefix(64)[:4], other.prefix(64)[:4]}) == 4
    changed = drawer.with_other_first(first)
    assert changed[0] != first[0] and changed[1:] == first[1:]


def test_one_word_to_begin_with_is_too_few() -> None:
    with pytest.raises(BenchError, match="no second word"):
        Drawer(Vocabulary(["a"], ["b", "c"], 0), "x").with_other_first(("a", "b"))
