"""From a folder to a running engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headwater import LLM, BadRequest, ModelError, SamplingParams
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
