"""LLM with the real model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headwater import LLM, BadRequest, ConfigError, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def llm(model_file: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(str(model_file("smollm2-135m")), max_model_len=512, kv_cache_memory_bytes=2**26, threads=1) as llm:
        yield llm


def test_generate_and_hit(llm: LLM) -> None:
    prompt = "A headwater is where a river begins. It is far away from the mouth of the river, and often it is"
    cold, warm = llm.generate(prompt, GREEDY)[0], llm.generate(prompt, GREEDY)[0]
    assert cold.outputs[0].text
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens == (len(warm.prompt_token_ids) - 1) // 16 * 16 > 0
    assert (cold.prefix_stop, warm.prefix_stop) == ("no_record", "partial_block")


def test_a_batch_answers_as_one_alone(llm: LLM) -> None:
    prompts = ["The Nile", "One, two, three,", "Water is"]
    together = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
    alone = [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in prompts]
    if llm.info.row_invariant:
        assert together == alone


def test_chat(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}], GREEDY)
    assert output.outputs[0].text.strip()
    assert output.prompt is not None
    assert "<|im_start|>" in output.prompt


def test_limits(llm: LLM) -> None:
    assert llm.info.max_model_len == 512
    with pytest.raises(BadRequest, match="at most 511 tokens"):
        llm.generate([[5] * 512])


def test_an_option_that_the_model_cannot_have_is_refused(model_file: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(str(model_file("smollm2-135m")), max_model_len=100_000, threads=1)
