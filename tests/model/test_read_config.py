"""config.json, older and newer spellings, and folders that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headwater.errors import ModelError
from headwater.kernels.torch_ref import TorchOps
from headwater.model.families.registry import family_of_hf
from headwater.model.load import load_model
from headwater.model.settings import Settings
from headwater.model.spec import Llama3Scaling, ModelSpec, RopeSpec
from tests.model.tiny import tiny

BASE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "vocab_size": 100,
}


def read(**changes: Any) -> ModelSpec:
    config = Settings({**BASE, **changes}, "config.json")
    return family_of_hf(config).read_hf(config, {})


def test_plain_llama_defaults() -> None:
    spec = read()
    assert (spec.n_kv_heads, spec.head_dim, spec.norm_eps, spec.tied_embeddings) == (4, 16, 1e-6, False)
    assert spec.layer_ropes == (RopeSpec(10_000.0),) * 4
    assert spec.layer_windows == (None,) * 4
    assert spec.attn_scale == 0.25


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_theta": 5e5}, RopeSpec(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeSpec(5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, RopeSpec(5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeSpec(1e4, linear_factor=2.0)),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            RopeSpec(5e5, llama3=Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        ),
    ],
)
def test_both_spellings_of_rotary_parameters(changes: dict[str, Any], rope: RopeSpec) -> None:
    assert set(read(**changes).layer_ropes) == {rope}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (4096,) * 4),
        ({"sliding_window": None}, (None,) * 4),
        ({"sliding_window": 7}, (7,) * 4),
    ],
)
def test_mistral_windows(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read(model_type="mistral", num_key_value_heads=2, **changes).layer_windows == windows


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 7}, (None,) * 4),
        ({"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3}, (None, None, None, 7)),
        ({"use_sliding_window": True, "sliding_window": 7}, (None,) * 4),
        (
            {"use_sliding_window": True, "sliding_window": 7, "layer_types": ["sliding_attention"] * 4},
            (7,) * 4,
        ),
    ],
)
def test_qwen2_windows(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    spec = read(model_type="qwen2", num_key_value_heads=2, **changes)
    assert spec.layer_windows == windows
    assert (spec.qkv_bias, spec.o_bias, spec.qk_norm) == (True, False, False)


GEMMA = {"model_type": "gemma3_text", "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 32}


def test_gemma_in_the_older_spelling() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    spec = read(**GEMMA, rope_theta=5e5, rope_local_base_freq=77.0, rope_scaling=scaling, sliding_window_pattern=2)
    assert spec.layer_windows == (32, None, 32, None)
    assert spec.layer_ropes == (RopeSpec(77.0), RopeSpec(5e5, linear_factor=8.0)) * 2
    assert (spec.embed_scale, spec.attn_scale, spec.tied_embeddings) == (8.0, 256**-0.5, True)


def test_gemma_multimodal_text_config_has_transformers_defaults() -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    config = Settings({"model_type": "gemma3", "text_config": text}, "config.json")
    spec = family_of_hf(config).read_hf(config, {})
    assert (spec.n_heads, spec.n_kv_heads, spec.head_dim, spec.vocab_size) == (8, 4, 256, 262_208)
    assert spec.layer_windows[:6] == (1024,) * 5 + (None,)
    assert spec.max_positions == 131_072


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, r"model_type is 'mamba'; supported are llama, mistral, qwen2, qwen3, gemma3"),
        ({"model_type": None}, "model_type is missing"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"hidden_size": "64"}, "hidden_size is '64', an integer is needed"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 63}, "not a multiple"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, it must be from 1"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000"),
        ({"head_dim": -16}, "head_dim is -16"),
        ({"rope_theta": 0}, "rope_theta is 0.0, it must be above 0"),
        (GEMMA | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0.0"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type is 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 3.0}}, "mscale is not understood"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', an object is needed"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window is missing"),
        ({"layer_types": ["full_attention"]}, "layer_types must list 4"),
        ({"layer_types": ["full_attention"] * 3 + ["conv"]}, "layer_types has conv"),
        (GEMMA | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (GEMMA | {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        (GEMMA | {"rope_parameters": {"rope_theta": 1e6}}, "rope_theta is not understood"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(**changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny("llama").save_pretrained(tmp_path)
    return tmp_path


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def load(folder: Path) -> None:
    load_model(folder, TorchOps(torch.float32))


def test_impossible_numbers_are_refused_before_any_tensor(folder: Path) -> None:
    change_config(folder, num_key_value_heads=4)
    with pytest.raises(ModelError, match="6 query heads cannot share 4 KV heads"):
        load(folder)
    change_config(folder, num_key_value_heads=2, num_hidden_layers=0)
    with pytest.raises(ModelError, match="num_hidden_layers is 0"):
        load(folder)


def test_fewer_layers_in_the_configuration_than_in_the_file(folder: Path) -> None:
    change_config(folder, num_hidden_layers=2)
    with pytest.raises(ModelError, match=r"'model\.layers\.2\..*' is not understood"):
        load(folder)


def test_missing_wrong_and_unreadable_tensors_are_named(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    file = folder / "model.safetensors"
    save_file({k: v for k, v in weights.items() if k != name}, file)
    with pytest.raises(ModelError, match=f"'{name}' is missing"):
        load(folder)
    save_file(weights | {name: torch.zeros(3, 48)}, file)
    with pytest.raises(ModelError, match=rf"'{name}' has shape \[3, 48\].*\[80, 48\]"):
        load(folder)
    save_file(weights | {name: torch.zeros(80, 48, dtype=torch.int8)}, file)
    with pytest.raises(ModelError, match=f"'{name}' is of type I8"):
        load(folder)
    save_file(weights | {"model.layers.0.self_attn.sinks": torch.zeros(6)}, file)
    with pytest.raises(ModelError, match=r"sinks' is not understood"):
        load(folder)


@pytest.mark.parametrize("end", [0, 5, 200, -1])
def test_truncated_safetensors_names_the_file(folder: Path, end: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:end])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load(folder)


def test_folders_that_lack_something_say_what(folder: Path) -> None:
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        load(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="an object is needed"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load(folder)
    (folder / "some.gguf").touch()
    with pytest.raises(ModelError, match=r"some\.gguf"):
        load(folder)
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin"):
        load(folder)


def test_shards_that_are_missing_or_outside_are_refused(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path, max_shard_size="40KB")
    index_file = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    shard = sorted(set(index["weight_map"].values()))[1]
    (tmp_path / shard).rename(tmp_path / "away")
    with pytest.raises(ModelError, match=f"'{shard}' is missing"):
        load(tmp_path)
    outside = {k: "../away" if v == shard else v for k, v in index["weight_map"].items()}
    index_file.write_text(json.dumps({"weight_map": outside}))
    with pytest.raises(ModelError, match="not a plain file name"):
        load(tmp_path)
    index_file.write_text("{}")
    with pytest.raises(ModelError, match="weight_map is missing"):
        load(tmp_path)
