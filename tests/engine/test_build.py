"""From a folder to a running engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headwater import LLM, BadRequest, ConfigError, ModelError, SamplingParams
from headwater.engine.build import check_verifiable, check_verify_options
from headwater.engine.options import engine_config
from tests.e2e.models import plain_model, write_folder
from tests.text.toy import VOCAB_SIZE

SMALL = {"max_model_len": 64, "num_blocks": 16, "dtype": "float32"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path, plain_model())


def test_a_token_without_an_embedding_is_refused_where_it_is_used_not_at_the_start(folder: Path) -> None:
    # As published with Gemma 3's text models: the tokenizer knows <image_soft_token>, the embedding does not.
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": VOCAB_SIZE, "content": "<|image|>"})
    file.write_text(json.dumps(tokenizer))
    with LLM(folder, **SMALL) as llm:
        assert any("1 tokens of the tokenizer have no embedding" in note for note in llm.info.notes)
        with pytest.raises(BadRequest, match=str(VOCAB_SIZE)):
            llm.generate("a<|image|>b")
        assert llm.generate("ab", SamplingParams(temperature=0.0, max_tokens=2))[0].outputs[0].token_ids


@pytest.mark.parametrize("damage", [{"chat_template": [{"name": "default"}]}, {"extra_special_tokens": 5}])
def test_damaged_tokenizer_files_are_a_model_error(folder: Path, damage: dict[str, object]) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **damage}))
    with pytest.raises(ModelError, match="tokenizer's files are damaged"):
        LLM(folder, **SMALL)


def test_hits_are_verified_when_the_caller_says_so_and_the_pool_is_as_large_as_asked(folder: Path) -> None:
    with LLM(folder, **SMALL, verify_hits=1) as llm:
        assert llm.info.n_blocks == SMALL["num_blocks"]
        prompts = [list(range(1, 50)), list(range(1, 40))]
        for prompt in prompts:
            llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=2))
        assert llm.verify_hits(limit=1) == {"verified": 1, "differing": 0, "skipped": 0, "failed": 0}
        # The other whole block, and the one whose beginning was copied.
        assert llm.verify_hits() == {"verified": 2, "differing": 0, "skipped": 0, "failed": 0}
        llm.generate([prompts[0]], SamplingParams(temperature=0.0, max_tokens=2))
        llm.reset_prefix_cache()
        assert llm.verify_hits()["skipped"] == 3
        assert llm.verify_hits() == dict.fromkeys(("verified", "differing", "skipped", "failed"), 0)


def test_without_the_option_there_is_nothing_to_verify(folder: Path) -> None:
    with LLM(folder, **SMALL) as llm:
        for _ in range(2):
            llm.generate([[*range(1, 40)]], SamplingParams(temperature=0.0, max_tokens=2))
        assert not any(llm.verify_hits().values())


def test_verifying_hits_is_refused_where_bits_are_not_kept() -> None:
    wanted = engine_config("m", {"verify_hits": 0.01})
    check_verifiable(wanted, row_invariant=True)
    check_verifiable(engine_config("m", {}), row_invariant=False)
    with pytest.raises(ConfigError, match="verify_hits compares bits, and the matrix products"):
        check_verifiable(wanted, row_invariant=False)
    fast = replace(wanted, model=replace(wanted.model, numerics="fast"))
    with pytest.raises(ConfigError, match="numerics 'fast'"):
        check_verify_options(fast)


def test_hits_cannot_be_verified_without_caching() -> None:
    config = engine_config("m", {"verify_hits": 0.5, "enable_prefix_caching": False})
    with pytest.raises(ConfigError, match="without prefix caching there are none"):
        check_verify_options(config)
