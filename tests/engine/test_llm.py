"""LLM, in process, on the fake core; tests/engine/test_llm_real.py has the real thing."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from headwater.config import EngineConfig, ModelConfig
from headwater.engine.llm import LLM
from headwater.engine.messages import Outputs
from headwater.engine.options import engine_config
from headwater.errors import BadRequest, ConfigError, EngineError, NeverFits, NoChatTemplate
from headwater.types import SamplingParams
from tests.serve.fake_core import VOCAB, ByteTokenizer, FakeCore, build_core


def core(settings: str = "") -> FakeCore:
    return build_core(EngineConfig(model=ModelConfig(model=f"fake?step_ms=0&{settings}")), lambda what, fraction: None)


def llm(settings: str = "", *, has_template: bool = True) -> LLM:
    return LLM.over(core(settings), ByteTokenizer(has_template=has_template))  # type: ignore[arg-type]


FOUR = SamplingParams(max_tokens=4)


def test_one_text() -> None:
    (output,) = llm().generate("abc", FOUR)
    assert (output.prompt, output.prompt_token_ids, output.finished) == ("abc", [97, 98, 99], True)
    (answer,) = output.outputs
    assert (answer.text, answer.token_ids) == ("abca", [97, 98, 99, 97])
    assert (answer.finish_reason, answer.stop_reason) == ("length", None)


def test_outputs_keep_the_order_of_the_prompts_whoever_ends_first() -> None:
    params = [SamplingParams(max_tokens=n) for n in (9, 1, 5, 3, 7, 2)]
    outputs = llm().generate([letter * 3 for letter in "abcdef"], params)
    texts = [output.outputs[0].text for output in outputs]
    assert texts == ["a" * 9, "b", "c" * 5, "d" * 3, "e" * 7, "f" * 2]
    assert len({output.request_id for output in outputs}) == 6


@pytest.mark.parametrize("prompts", [[97, 98], [[97, 98]], ([97, 98],)])
def test_token_ids(prompts: list[int]) -> None:
    (output,) = llm().generate(prompts, FOUR)
    assert (output.prompt, output.outputs[0].text) == (None, "abab")


def test_texts_and_ids_may_mix_and_no_prompts_are_no_outputs() -> None:
    outputs = llm().generate(["ab", [99]], FOUR)
    assert [output.outputs[0].text for output in outputs] == ["abab", "cccc"]
    assert llm().generate([], FOUR) == []


def test_a_second_time_hits_and_reset_forgets() -> None:
    one = llm()
    cached = [one.generate("x" * 40, FOUR)[0].num_cached_tokens for _ in range(2)]
    assert cached == [0, 32]
    assert one.reset_prefix_cache() == 2
    assert one.generate("x" * 40, FOUR)[0].num_cached_tokens == 0
    assert one.generate("x" * 40, FOUR, cache_salt="s")[0].num_cached_tokens == 0


def test_stop_may_be_a_lone_string_or_a_list() -> None:
    for stop in ("c", ["zz", "c"], ("c",)):
        (output,) = llm().generate("abc", SamplingParams(max_tokens=9, stop=stop))  # type: ignore[arg-type]
        assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("ab", "c")


def test_chat() -> None:
    messages = [{"role": "user", "content": "hi"}]
    (output,) = llm().chat(messages, SamplingParams(max_tokens=8))
    assert output.prompt == "user: hi\nassistant: "
    assert output.outputs[0].text == "user: hi"
    assert len(llm().chat([messages, messages], FOUR)) == 2
    assert llm().chat(messages, FOUR, add_generation_prompt=False)[0].prompt == "user: hi\n"
    with pytest.raises(NoChatTemplate):
        llm(has_template=False).chat(messages)


@pytest.mark.parametrize(
    ("prompts", "params", "error", "message"),
    [
        ("", FOUR, BadRequest, "prompt is empty"),
        (["ok", ""], FOUR, BadRequest, r"prompts\[1\] is empty"),
        ([[1], [VOCAB]], FOUR, BadRequest, rf"prompts\[1\]\[0\] must be a token id from 0 to {VOCAB - 1}"),
        ([[True]], FOUR, BadRequest, "must be a token id"),
        ("x" * 4096, FOUR, NeverFits, "at most 4095 tokens"),
        ("x", SamplingParams(temperature=-1), BadRequest, "temperature must be from 0.0 to 2.0"),
        ("x", SamplingParams(top_p=0), BadRequest, "top_p must be"),
        ("x", SamplingParams(temperature=float("nan")), BadRequest, "temperature must be"),
        ("x", SamplingParams(max_tokens=0), BadRequest, "max_tokens must be"),
        ("x", [FOUR, FOUR], BadRequest, "2 sampling_params for 1 prompts"),
        ("x", {"max_tokens": 4}, BadRequest, "sampling_params must be SamplingParams"),
        ("x", SamplingParams(temperature="hot"), BadRequest, "temperature must be a number, got 'hot'"),  # type: ignore[arg-type]
        ("x", SamplingParams(temperature=10**400), BadRequest, "temperature must be from 0.0 to 2.0, got 1000"),
        ("x", SamplingParams(top_k=1.5), BadRequest, "top_k must be a whole number, got 1.5"),  # type: ignore[arg-type]
        ("x", SamplingParams(seed=True), BadRequest, "seed must be a whole number or None, got True"),
        ("x", SamplingParams(max_tokens=1.5), BadRequest, "max_tokens must be a whole number"),  # type: ignore[arg-type]
        ("x", SamplingParams(ignore_eos=1), BadRequest, "ignore_eos must be True or False"),  # type: ignore[arg-type]
        ("x", SamplingParams(stop=b"x"), BadRequest, r"stop\[0\] must be a text, got 120"),  # type: ignore[arg-type]
        (None, FOUR, BadRequest, "prompts must be a text, token ids, or a list of either, got None"),
        ({"prompt": "x"}, FOUR, BadRequest, "prompts must be a text, token ids"),
        (b"abc", FOUR, BadRequest, "prompts must be a text, token ids"),
        (["ok", None], FOUR, BadRequest, r"prompts\[1\] must be a text or a list of token ids, got None"),
        (["ok", b"abc"], FOUR, BadRequest, r"prompts\[1\] must be a text or a list of token ids"),
    ],
)
def test_what_cannot_be_answered_is_refused_before_anything_runs(
    prompts: object, params: object, error: type[Exception], message: str
) -> None:
    fake = core()
    with pytest.raises(error, match=message):
        LLM.over(fake, ByteTokenizer()).generate(prompts, params)  # type: ignore[arg-type]
    assert not fake.busy


@pytest.mark.parametrize("fields", [{"cache_salt": 5}, {"priority": "x"}, {"priority": float("nan")}])
def test_a_salt_and_a_priority_of_another_type_are_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=f"{next(iter(fields))} must be"):
        llm().generate("abc", FOUR, **fields)


def test_a_template_argument_with_a_field_of_its_own_is_refused() -> None:
    with pytest.raises(BadRequest, match="may not set add_generation_prompt"):
        llm().chat([{"role": "user", "content": "x"}], FOUR, chat_template_kwargs={"add_generation_prompt": True})


def test_ctrl_c_waits_for_the_end_of_the_step_and_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = core()
    one = LLM.over(fake, ByteTokenizer())  # type: ignore[arg-type]
    whole_steps: list[bool] = []
    step = fake.step

    def interrupted() -> Outputs:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)  # where Python would run the handler
        outputs = step()
        whole_steps.append(True)
        return outputs

    monkeypatch.setattr(fake, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one.generate("abc", SamplingParams(max_tokens=50))
    assert whole_steps == [True]
    assert not fake.busy
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):  # in the last step
        one.generate("abc", SamplingParams(max_tokens=1))
    monkeypatch.undo()
    assert one.generate("abc", FOUR)[0].outputs[0].text == "abca"


def test_a_request_that_fails_raises_and_leaves_nothing_running() -> None:
    fake = core()
    one = LLM.over(fake, ByteTokenizer())  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="this row failed"):
        one.generate(["abc" * 20, "#fail"], SamplingParams(max_tokens=50))
    assert not fake.busy
    assert one.generate("abc", FOUR)[0].outputs[0].text == "abca"


def test_a_closed_llm_answers_nothing() -> None:
    with llm() as one:
        assert one.info.model == "fake"
        assert one.stats().counters == {}
    with pytest.raises(EngineError, match="closed"):
        one.generate("abc")


def test_options() -> None:
    config = engine_config("m", {"max_model_len": 99, "num_blocks": 7, "dtype": "float32", "seed": None})
    assert (config.model.model, config.model.dtype, config.model.seed) == ("m", "float32", 0)
    assert (config.scheduler.max_model_len, config.cache.n_blocks) == (99, 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_length": 5}, "unknown option 'max_model_length': did you mean 'max_model_len'?"),
        ({"zzz": 5}, "unknown option 'zzz'$"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"max_num_seqs": "8"}, "max_num_seqs must be a whole number, got '8'"),
        ({"max_num_seqs": True}, "max_num_seqs must be a whole number"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching must be True or False"),
        ({"threads": 2**31}, "threads must be at most 2147483647, got 2147483648"),
        (
            {"num_blocks": 10**4000},
            "num_blocks must be at most 2147483647, got 1000000000000000000000000000000000000000$",
        ),
        ({"served_model_name": "\udcff"}, "served_model_name must be valid UTF-8"),
        ({"verify_hits": 1.5}, "verify_hits must be at most 1, got 1.5"),
        ({"verify_hits": float("nan")}, "verify_hits must be at least 0, got nan"),
        ({"verify_hits": "0.5"}, "verify_hits must be a number, got '0.5'"),
        ({"verify_hits": True}, "verify_hits must be a number"),
        ({"dtype": "float17"}, "dtype must be one of auto, bfloat16, float32"),
        ({"prefix_caching_hash_algo": "md5"}, "prefix_caching_hash_algo must be one of sha256"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        engine_config("m", options)


@pytest.mark.parametrize("model", [None, 5, b"m.gguf", "\udcff.gguf"])
def test_a_model_that_is_no_text_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="model must be"):
        engine_config(model, {})
