"""EngineCore over the fake runner: text, ends, refusals, failures, figures."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from headwater.cache.prefix import PrefixCache
from headwater.config import CacheConfig, SchedulerConfig
from headwater.engine.core import EngineCore, IdleWork, Verifier, VerifyCounts
from headwater.engine.messages import Delta, EngineInfo, ResetCache, Submit
from headwater.sched.scheduler import Scheduler
from headwater.types import FinishReason, GroupKind, GroupSpec, Namespace, SamplingParams
from tests.sched.fake_runner import FakeRunner, oracle
from tests.sched.harness import Clock

EOS, MARK, VOCAB = 256, 257, 258


def byte_tokenizer() -> Any:
    """Token i is the byte i; 256 is EOS and 257 a mark, both special."""
    return SimpleNamespace(
        vocab_size=VOCAB,
        eos_ids=frozenset({EOS}),
        special_ids=frozenset({EOS, MARK}),
        token_bytes=lambda i: bytes((i,)) if i < 256 else {EOS: b"<eos>", MARK: b"<mark>"}[i],
    )


@dataclass
class Engine:
    n_blocks: int = 64
    budget: int = 64
    max_seqs: int = 8
    max_model_len: int = 200
    max_waiting: int = 4096
    groups: tuple[GroupSpec, ...] = (GroupSpec(GroupKind.FULL, 4),)
    caching: bool = True
    partial: bool = True
    rng_seed: int = 1
    verifier: Verifier | None = None
    idle: tuple[IdleWork, ...] = ()
    script: dict[str, bytes | list[int]] = field(default_factory=dict)
    """What a request's output tokens are, where the test decides."""

    def __post_init__(self) -> None:
        clock = Clock()
        config = CacheConfig(enable_prefix_caching=self.caching, partial_reuse=self.partial)
        self.cache = PrefixCache(self.groups, self.n_blocks, config=config, clock=clock)
        config = SchedulerConfig(self.max_seqs, self.budget, self.max_model_len, self.max_waiting)
        self.sched = Scheduler(self.cache, config, max_model_len=self.max_model_len, clock=clock)
        self.runner = FakeRunner(self.groups, self.n_blocks, vocab_size=VOCAB - 2)
        self.prompts: dict[str, list[int]] = {}
        self.params: dict[str, SamplingParams] = {}
        self.deltas: dict[str, list[Delta]] = {}
        info = EngineInfo(
            "m", "f", self.sched.max_model_len, VOCAB, 4, self.n_blocks, len(self.groups), 4, "float32", 0, 1,
            self.caching, "sha256", self.max_seqs, self.budget, True,
        )  # fmt: skip
        self.core = EngineCore(
            self.runner,
            self.sched,
            self.cache,
            byte_tokenizer(),
            info,
            namespace=Namespace(b"weights"),
            rng=random.Random(self.rng_seed),
            clock=clock,
            verifier=self.verifier,
            idle=self.idle,
        )

    def submit(self, r: str, prompt: list[int] | bytes, *, out: bytes | list[int] | None = None, **kw: Any) -> None:
        params = SamplingParams(**{"temperature": 0.0, **kw.pop("params", {})})
        self.prompts[r], self.params[r] = list(prompt), params
        if out is not None:
            self.script[r] = out
            self.runner.next_token = self._scripted
        self.deltas[r] = self.core.submit(Submit(r, list(prompt), params, **kw))

    def _scripted(self, r: str, position: int) -> int:
        out = self.script[r]
        at = position - len(self.prompts[r])
        return out[at] if at < len(out) else 0x2E

    def step(self) -> list[Delta]:
        outputs = self.core.step()
        for delta in outputs.deltas:
            assert delta.request_id in self.deltas
            self.deltas[delta.request_id].append(delta)
        self.sched.audit()
        return outputs.deltas

    def run(self, limit: int = 1000) -> None:
        for _ in range(limit):
            if not self.core.busy:
                stats = self.cache.stats()
                assert stats.in_use == stats.fenced == stats.logical_blocks == 0
                assert self.sched.n_running == self.sched.n_waiting == 0
                return
            self.step()
        raise AssertionError("still busy")

    def text(self, r: str) -> str:
        return "".join(delta.text for delta in self.deltas[r])

    def tokens(self, r: str) -> list[int]:
        return [token for delta in self.deltas[r] for token in delta.token_ids]

    def last(self, r: str) -> Delta:
        return self.deltas[r][-1]

    def check(self, r: str) -> None:
        """Greedy output is that of the oracle, cut where the request ended."""
        tokens = self.tokens(r)
        assert tokens == oracle(self.prompts[r], len(tokens), vocab_size=VOCAB - 2)


def say(out: bytes | list[int], **params: Any) -> tuple[Engine, Delta]:
    engine = Engine()
    engine.submit("r", b"prompt", out=out, params=params)
    engine.run()
    assert all(delta.finish_reason is None for delta in engine.deltas["r"][:-1])
    return engine, engine.last("r")


# ---- text and ends ------------------------------------------------------------------------------


def test_one_delta_per_token_and_length_ends_it() -> None:
    engine, last = say(b"abcdefgh", max_tokens=5)
    assert [(d.token_ids, d.text) for d in engine.deltas["r"]] == [([ord(c)], c) for c in "abcde"]
    assert (last.finish_reason, last.stop_reason, last.error) == (FinishReason.LENGTH, None, None)


def test_a_character_split_over_tokens_is_held_back() -> None:
    engine, _ = say("a😀b".encode(), max_tokens=6)
    assert [d.text for d in engine.deltas["r"]] == ["a", "", "", "", "😀", "b"]
    engine, _ = say("a😀".encode()[:3], max_tokens=3)
    assert [d.text for d in engine.deltas["r"]] == ["a", "", "\ufffd"]


def test_eos_ends_without_text_and_without_a_stop_reason() -> None:
    engine, last = say([*b"ab", EOS, *b"cd"], max_tokens=9)
    assert (engine.text("r"), engine.tokens("r")) == ("ab", [*b"ab", EOS])
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, None)


def test_eos_shows_only_when_asked_for() -> None:
    engine, _ = say([*b"ab", EOS], max_tokens=9, skip_special_tokens=False)
    assert engine.text("r") == "ab"
    engine, _ = say([*b"ab", EOS], max_tokens=9, skip_special_tokens=False, include_stop_str_in_output=True)
    assert engine.text("r") == "ab<eos>"


def test_ignore_eos_goes_on() -> None:
    engine, last = say([*b"ab", EOS, *b"cd"], max_tokens=5, ignore_eos=True)
    assert engine.text("r") == "abcd" and last.finish_reason is FinishReason.LENGTH
    _, last = say([*b"ab", EOS, *b"cd"], max_tokens=5, ignore_eos=True, stop_token_ids=(EOS,))
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, EOS)


def test_stop_token_ids() -> None:
    engine, last = say(b"abXcd", max_tokens=9, stop_token_ids=(ord("X"), ord("Y")))
    assert (engine.text("r"), last.stop_reason) == ("ab", ord("X"))
    engine, last = say(b"abXcd", max_tokens=9, stop_token_ids=(ord("X"),), include_stop_str_in_output=True)
    assert (engine.text("r"), last.finish_reason) == ("abX", FinishReason.STOP)


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one STOP")])
def test_a_stop_string_over_several_tokens_never_leaks(include: bool, text: str) -> None:
    engine, last = say(b"one STOP two", max_tokens=50, stop=("STOP",), include_stop_str_in_output=include)
    assert engine.text("r") == text
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, "STOP")
    assert [d.text for d in engine.deltas["r"]][4:7] == ["", "", ""]  # S, T, O are held back
    assert engine.last("r").usage.n_generated == len("one STOP")  # type: ignore[union-attr]


def test_what_only_began_a_stop_string_comes_out_at_the_end() -> None:
    engine, last = say(b"one STO", max_tokens=7, stop=("STOP",))
    assert (engine.text("r"), last.finish_reason) == ("one STO", FinishReason.LENGTH)
    engine, last = say([*b"one STO", EOS], max_tokens=50, stop=("STOP",))
    assert (engine.text("r"), last.finish_reason, last.stop_reason) == ("one STO", FinishReason.STOP, None)


def test_a_stop_string_wins_over_the_length_at_the_same_token() -> None:
    engine, last = say(b"ab!", max_tokens=3, stop=("!",))
    assert (engine.text("r"), last.finish_reason, last.stop_reason) == ("ab", FinishReason.STOP, "!")


def test_a_stop_that_only_the_flushed_bytes_complete() -> None:
    engine, last = say(b"ab\xf0", max_tokens=3, stop=("b\ufffd",))
    assert (engine.text("r"), last.finish_reason) == ("a", FinishReason.STOP)


def test_the_context_limit_ends_it() -> None:
    engine = Engine(max_model_len=10)
    engine.submit("r", b"12345678", params={"max_tokens": None})
    engine.submit("s", b"123456789", params={"max_tokens": 5})
    engine.run()
    assert (len(engine.tokens("r")), len(engine.tokens("s"))) == (2, 1)
    assert engine.last("r").finish_reason is engine.last("s").finish_reason is FinishReason.LENGTH


# ---- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "kw", "kind", "says"),
    [
        ([], {}, "bad_request", "at least one token"),
        ([1, VOCAB], {}, "bad_request", f"prompt: {VOCAB} is no token id"),
        ([-1], {}, "bad_request", "prompt: -1"),
        ([2**31], {}, "bad_request", "prompt"),
        ([2**33], {}, "bad_request", "prompt"),
        ([1], {"params": {"stop_token_ids": (VOCAB,)}}, "bad_request", "stop_token_ids"),
        ([1], {"params": {"max_tokens": 0}}, "bad_request", "at least one token must be asked for"),
        ([1], {"params": {"stop": ("",)}}, "bad_request", "empty"),
        ([1] * 200, {}, "never_fits", "at most 200 tokens"),
        ([1] * 800, {}, "never_fits", "800 tokens"),
    ],
)
def test_refusals_are_one_delta_and_harm_nobody(prompt: list[int], kw: dict[str, Any], kind: str, says: str) -> None:
    engine = Engine()
    engine.submit("good", b"hello", params={"max_tokens": 4})
    engine.submit("bad", prompt, **kw)
    (delta,) = engine.deltas["bad"]
    assert (delta.finish_reason, delta.error_kind) == (FinishReason.ERROR, kind)
    assert says in str(delta.error)
    engine.run()
    engine.check("good")
    assert engine.core.stats().counters["requests_refused"] == 1


def test_b90_around_the_limit() -> None:
    engine = Engine(n_blocks=10, max_model_len=1000)
    limit = engine.core.info.max_model_len
    assert limit == 41
    engine.submit("fits", [7] * (limit - 1), params={"max_tokens": 5})
    for r, n in [("a", limit), ("b", limit + 1), ("c", 4 * limit)]:
        engine.submit(r, [7] * n, params={"max_tokens": 5})
        assert engine.last(r).error_kind == "never_fits"
    engine.run()
    engine.submit("next", b"next", params={"max_tokens": 2})
    engine.run()
    assert len(engine.tokens("fits")) == 1 and len(engine.tokens("next")) == 2


def test_a_full_queue_refuses() -> None:
    engine = Engine(max_waiting=1)
    engine.submit("a", b"a")
    engine.submit("b", b"b")
    assert engine.last("b").error_kind == "overloaded"
    engine.run()
    assert engine.last("a").finish_reason is FinishReason.LENGTH


def test_a_repeated_id_does_not_disturb_the_first() -> None:
    engine = Engine()
    engine.submit("a", b"hello", params={"max_tokens": 4})
    refusal = engine.core.submit(Submit("a", [1], SamplingParams()))
    assert refusal[0].error_kind == "bad_request"
    engine.run()
    engine.check("a")
    assert len(engine.tokens("a")) == 4


# ---- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
def test_a_step_that_fails_ends_its_rows_and_the_engine_goes_on(late: bool) -> None:
    engine = Engine(max_seqs=2)
    for r in "abc":
        engine.submit(r, [ord(r)] * 9, params={"max_tokens": 6})
    engine.step()
    engine.runner.faults.raise_late, engine.runner.faults.raise_early = late, not late
    deltas = engine.step()
    assert sorted(d.request_id for d in deltas) == ["a", "b"]
    for delta in deltas:
        assert (delta.finish_reason, delta.error_kind, delta.token_ids) == (FinishReason.ERROR, "internal", [])
        assert "injected" in str(delta.error) and delta.timing is not None
    engine.run()
    engine.check("c")
    engine.submit("again", [ord("a")] * 9, params={"max_tokens": 6})
    engine.run()
    engine.check("again")
    assert engine.core.stats().counters["requests_finished_error"] == 2


def test_a_row_that_fails_ends_alone() -> None:
    engine = Engine()
    for r in "abc":
        engine.submit(r, [ord(r)] * 9, params={"max_tokens": 6})
    engine.step()
    engine.runner.faults.bad_rows = {"b"}
    engine.run()
    assert engine.last("b").error == "injected: this row failed"
    assert len(engine.tokens("b")) == 1
    for r in "ac":
        engine.check(r)
        assert len(engine.tokens(r)) == 6


@pytest.mark.parametrize("n_steps", [0, 1, 2, 6])
def test_abort_at_any_moment(n_steps: int) -> None:
    engine = Engine(budget=4)
    engine.submit("r", b"0123456789", params={"max_tokens": 20})
    for _ in range(n_steps):
        engine.step()
    assert engine.core.abort("r") and not engine.core.abort("r")
    assert not engine.core.busy
    engine.run()
    engine.submit("s", b"0123456789", params={"max_tokens": 4})
    engine.run()
    engine.check("s")
    assert engine.core.stats().counters["requests_finished_abort"] == 1


# ---- the cache seen from outside --------------------------------------------------------------------


@pytest.mark.parametrize(("partial", "copied", "stop"), [(False, 0, "partial_block"), (True, 1, "last_token")])
def test_usage_reason_and_counters(partial: bool, copied: int, stop: str) -> None:
    engine = Engine(partial=partial)
    for r in ("cold", "warm"):
        engine.submit(r, b"0123456789", params={"max_tokens": 3})
        engine.run()
    for r, cached in (("cold", 0), ("warm", 8 + copied)):  # the answer has filled the prompt's last block
        for n, delta in enumerate(engine.deltas[r], start=1):
            usage = delta.usage
            assert usage is not None
            assert (usage.n_prompt, usage.n_cached, usage.n_computed, usage.n_generated) == (10, cached, 10 - cached, n)
    assert [d.prefix_stop for d in engine.deltas["cold"]] == ["no_record", None, None]
    assert [d.prefix_stop for d in engine.deltas["warm"]] == [stop, None, None]
    counters = engine.core.stats().counters
    assert (counters["prefix_queries"], counters["prefix_hits"], counters["copied_tokens"]) == (20, 8, copied)
    assert (counters["prompt_tokens"], counters["prompt_tokens_computed"]) == (20, 12 - copied)
    assert counters["generation_tokens"] == 6
    assert counters["requests_finished_length"] == 2


def test_salts_do_not_share() -> None:
    engine = Engine()
    for r, salt in [("a", "x"), ("b", "y"), ("c", None), ("d", ""), ("e", "x")]:
        engine.submit(r, b"0123456789", cache_salt=salt, params={"max_tokens": 1})
        engine.run()
    assert [engine.last(r).usage.n_cached for r in "abcde"] == [0, 0, 0, 0, 8]  # type: ignore[union-attr]


def test_bypassed_requests_count_apart() -> None:
    engine = Engine()
    engine.submit("a", b"0123456789", params={"max_tokens": 1})
    engine.run()
    engine.submit("b", b"0123456789", params={"max_tokens": 1}, skip_reading_prefix_cache=True)
    engine.run()
    assert engine.last("b").prefix_stop == "bypassed"
    counters = engine.core.stats().counters
    assert (counters["prefix_queries"], counters["prefix_hits"], counters["bypassed_requests"]) == (10, 0, 1)

    off = Engine(caching=False)
    for r in "ab":
        off.submit(r, b"0123456789", params={"max_tokens": 1})
        off.run()
        assert off.last(r).usage.n_cached == 0  # type: ignore[union-attr]
    assert off.core.stats().counters["prefix_queries"] == 0
    assert off.core.stats().counters["bypassed_requests"] == 2


def test_the_same_text_with_and_without_reuse() -> None:
    rng = random.Random(5)
    prompts = [[1, 2, 3, 4] * rng.randrange(4) + [rng.randrange(9)] * rng.randrange(1, 6) for _ in range(30)]
    texts = []
    for caching in (True, False):
        engine = Engine(caching=caching, n_blocks=24, budget=7)
        for i, prompt in enumerate(prompts):
            engine.submit(f"r{i}", prompt, params={"max_tokens": 8})
            engine.step()
        engine.run()
        texts.append([engine.text(f"r{i}") for i in range(len(prompts))])
        assert (engine.core.stats().counters["prefix_hits"] > 0) is caching
    assert texts[0] == texts[1]


def test_b84_reset_is_refused_while_requests_run_and_force_preempts() -> None:
    engine = Engine()
    engine.submit("warm", b"0123456789", params={"max_tokens": 1})
    engine.run()
    engine.submit("r", b"0123456789", params={"max_tokens": 9})
    engine.step()
    engine.step()
    refused = engine.core.reset(ResetCache(1))
    assert (refused.call_id, refused.done, refused.n_busy, refused.n_preempted) == (1, False, 3, 0)
    assert engine.last("r").usage.n_cached == 8  # type: ignore[union-attr]
    done = engine.core.reset(ResetCache(2, force=True))
    assert (done.call_id, done.done, done.n_busy, done.n_cleared, done.n_preempted) == (2, True, 0, 2, 1)
    engine.run()
    engine.check("r")
    assert len(engine.tokens("r")) == 9
    counters = engine.core.stats().counters
    assert (counters["resumed_queries"], counters["resumed_hits"]) == (12, 0)
    idle = engine.core.reset(ResetCache(3))
    assert idle.done and idle.n_cleared > 0 and engine.core.reset(ResetCache(4)).n_cleared == 0
    engine.submit("after", b"0123456789", params={"max_tokens": 1})
    engine.run()
    assert engine.last("after").usage.n_cached == 0  # type: ignore[union-attr]


def test_gauges_show_sharing() -> None:
    engine = Engine()
    engine.submit("warm", b"0123456789", params={"max_tokens": 1})
    engine.run()
    for r in "abc":
        engine.submit(r, b"0123456789", params={"max_tokens": 3})
    engine.step()
    gauges = engine.core.stats().gauges
    assert gauges["running"] == 3 and gauges["waiting"] == 0
    assert (gauges["logical_blocks"], gauges["physical_blocks"], gauges["blocks_in_use"]) == (9, 5, 5)
    assert gauges["blocks_in_use"] + gauges["blocks_evictable"] + gauges["blocks_free"] == gauges["blocks_total"] == 64
    assert gauges["kv_usage"] == 5 / 64 and gauges["min_reusable_tokens"] == 4


def test_steps_are_told_once() -> None:
    engine = Engine(budget=6)
    engine.submit("r", b"0123456789", params={"max_tokens": 2})
    assert [tokens for _, _, tokens in engine.core.step().stats.steps] == [6]
    assert [tokens for _, _, tokens in engine.core.step().stats.steps] == [4]
    assert engine.core.stats().steps == []


# ---- time and seeds ---------------------------------------------------------------------------------


def test_timing_is_on_the_last_delta_and_its_phases_follow_one_another() -> None:
    engine = Engine(max_seqs=1)
    for r in "ab":
        engine.submit(r, b"0123", params={"max_tokens": 3})
    engine.run()
    for r in "ab":
        assert [d.timing is not None for d in engine.deltas[r]] == [False, False, True]
    timing = engine.last("b").timing
    assert timing is not None
    assert timing.queue_s > 0 and timing.prefill_s > 0 and timing.decode_s > 0
    rest_s = timing.e2e_s - timing.queue_s - timing.prefill_s - timing.decode_s
    assert 0 <= rest_s <= 3  # from the last token to the delta: a few looks at the clock


def test_a_seed_is_drawn_once_at_arrival() -> None:
    outs = []
    for _ in range(2):
        engine = Engine()
        engine.submit("seeded", b"hello", params={"temperature": 1.0, "seed": 5, "max_tokens": 6})
        engine.submit("drawn", b"hello", params={"temperature": 1.0, "max_tokens": 6})
        engine.submit("drawn2", b"hello", params={"temperature": 1.0, "max_tokens": 6})
        for _ in range(2):
            engine.step()
        engine.sched.preempt_all()
        engine.run()
        outs.append([engine.tokens(r) for r in ("seeded", "drawn", "drawn2")])
    assert outs[0] == outs[1]  # the engine's own generator started the same
    assert len({tuple(out) for out in outs[0]}) == 3
    other = Engine(rng_seed=2)
    other.submit("seeded", b"hello", params={"temperature": 1.0, "seed": 5, "max_tokens": 6})
    other.submit("drawn", b"hello", params={"temperature": 1.0, "max_tokens": 6})
    other.run()
    assert other.tokens("seeded") == outs[0][0] and other.tokens("drawn") != outs[0][1]


def test_a_preempted_request_says_everything_once() -> None:
    engine = Engine(n_blocks=8)
    for r in "abc":
        engine.submit(r, [ord(r)] * 8, params={"max_tokens": 12})
    engine.run()
    assert engine.core.stats().counters["preemptions"] > 0
    for r, n in itertools.product("abc", [12]):
        engine.check(r)
        assert len(engine.deltas[r]) == len(engine.tokens(r)) == n
        assert [d.prefix_stop is not None for d in engine.deltas[r]] == [True] + [False] * (n - 1)
        assert {d.usage.n_cached for d in engine.deltas[r]} == {0}  # type: ignore[union-attr]


class Chore:
    """Idle work that says when it was done."""

    def __init__(self, name: str, done: list[str], n: int) -> None:
        self._name, self._done, self._left = name, done, n
        self.counts = VerifyCounts()

    @property
    def pending(self) -> bool:
        return self._left > 0

    def work(self) -> None:
        self._left -= 1
        self._done.append(self._name)


def test_idle_work_is_done_piece_by_piece_the_check_of_hits_first_and_never_beside_requests() -> None:
    done: list[str] = []
    engine = Engine(verifier=Chore("check", done, 2), idle=(Chore("a", done, 1), Chore("b", done, 1)))
    assert engine.core.hits_to_verify and engine.core.idle_work
    engine.submit("r", b"abc", params={"max_tokens": 1})
    engine.core.work_idle()
    assert done == []
    engine.run()
    while engine.core.idle_work:
        engine.core.work_idle()
    assert done == ["check", "check", "a", "b"]
    assert not engine.core.hits_to_verify
