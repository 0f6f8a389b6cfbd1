"""Every family against Transformers in float32: the logits of all positions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headwater.kernels.torch_ref import TorchOps
from headwater.model.decoder import Model
from headwater.model.load import load_model
from tests.model.dense import all_logits, empty_store, whole_batch
from tests.model.tiny import CONFIGS, LLAMA3, oracle_logits, sequences, tiny, write_gguf

TOLERANCE = 1e-5


def load(path: Path, dtype: torch.dtype = torch.float32) -> Model:
    return load_model(path, TorchOps(dtype))


def assert_same_logits(model: Model, oracle: torch.nn.Module) -> None:
    for tokens, got in zip(sequences(), all_logits(model, sequences()), strict=True):
        want = oracle_logits(oracle, tokens)
        assert got.dtype == torch.float32
        assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_of_every_position_equal_transformers(kind: str, tmp_path: Path) -> None:
    oracle = tiny(kind)
    oracle.save_pretrained(tmp_path)
    assert_same_logits(load(tmp_path), oracle)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_sharded_safetensors_are_the_same_model(kind: str, tmp_path: Path) -> None:
    oracle = tiny(kind)
    oracle.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_same_logits(load(tmp_path), oracle)


GGUF_CASES = {
    "llama": ("llama", {"rope.freq_base": 300.0, "rope.dimension_count": 8}),
    "llama-biases": ("llama", {}),
    "llama-wide-heads": ("llama", {}),
    "llama-linear": ("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 3.0}),
    "smollm": ("llama", {"rope.scaling.type": "none"}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma3-scaled": (
        "gemma3",
        {
            "rope.freq_base": 2000.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 2.0,
            "rope.freq_base_swa": 100.0,
            "attention.sliding_window": 5,
        },
    ),
}


@pytest.mark.parametrize("kind", GGUF_CASES)
def test_gguf_of_the_same_weights_gives_the_same_logits(kind: str, tmp_path: Path) -> None:
    oracle = tiny(kind)
    if kind.startswith("gemma"):
        oracle = rescaled_like_gguf(oracle)
    arch, metadata = GGUF_CASES[kind]
    write_gguf(tmp_path / "m.gguf", oracle, arch, extra=metadata)
    assert_same_logits(load(tmp_path / "m.gguf"), oracle)


def rescaled_like_gguf(oracle: torch.nn.Module) -> torch.nn.Module:
    """GGUF cannot say query_pre_attn_scalar: it is head_dim there."""
    for layer in oracle.model.layers:
        layer.self_attn.scaling = oracle.config.head_dim**-0.5
    return oracle


def test_gguf_rope_factors_stretch_as_llama3_does(tmp_path: Path) -> None:
    oracle = tiny("llama-llama3")
    stretched = oracle.model.rotary_emb.inv_freq
    plain = 1.0 / (LLAMA3["rope_theta"] ** (torch.arange(0, 32, 2).float() / 32))
    factors = (plain / stretched).numpy()
    assert factors.min() == 1.0 and 1.0 < factors.max() <= 4.0
    write_gguf(
        tmp_path / "m.gguf", oracle, "llama", extra={"rope.freq_base": 500.0}, tensors={"rope_freqs.weight": factors}
    )
    assert_same_logits(load(tmp_path / "m.gguf"), oracle)


def test_gemma_gguf_without_hints_has_gemmas_own_ropes_and_every_sixth_layer_full(tmp_path: Path) -> None:
    oracle = rescaled_like_gguf(tiny("gemma3"))
    metadata = {"attention.sliding_window": 5, "rope.freq_base": 1e6}
    write_gguf(tmp_path / "m.gguf", oracle, "gemma3", extra=metadata)
    model = load(tmp_path / "m.gguf")
    assert model.spec.layer_windows == (5, 5, 5, 5, 5, None, 5)
    assert_same_logits(model, oracle)


def test_multimodal_gemma_folder_is_read_as_its_text_model(tmp_path: Path) -> None:
    oracle = tiny("gemma3")
    oracle.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in weights.items()}
    renamed["vision_tower.something.weight"] = torch.zeros(2, 2)
    save_file(renamed, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    outer = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    assert_same_logits(load(tmp_path), oracle)


def test_tied_weights_ignore_a_head_in_the_file(tmp_path: Path) -> None:
    oracle = tiny("smollm")
    oracle.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"lm_head.weight": torch.ones_like(oracle.lm_head.weight)}, tmp_path / "model.safetensors")
    assert_same_logits(load(tmp_path), oracle)


@pytest.mark.parametrize("kind", ["llama-biases", "qwen3", "gemma3"])
def test_bf16_stays_near_transformers_in_bf16(kind: str, tmp_path: Path) -> None:
    oracle = tiny(kind)
    oracle.to(torch.bfloat16).save_pretrained(tmp_path)
    model = load(tmp_path, torch.bfloat16)
    wide = tiny(kind)
    wide.load_state_dict({name: tensor.float() for name, tensor in oracle.state_dict().items()})
    for tokens, got in zip(sequences(), all_logits(model, sequences()), strict=True):
        want = oracle_logits(wide, tokens)
        theirs = (oracle_logits(oracle, tokens).float() - want).abs().max()
        # bf16 has 8 bits; be no further from float32 than Transformers' bf16 is, give or take.
        assert (got - want).abs().max() <= 2 * theirs + 0.01 * want.abs().max()


def test_logits_only_where_asked_and_none_when_not(tmp_path: Path) -> None:
    tiny("gemma3").save_pretrained(tmp_path)
    model = load(tmp_path)
    batch, n_pages = whole_batch(sequences(), 4)
    everything = model.forward(batch, empty_store(model, n_pages, 4))
    wanted = torch.tensor([33, 0, 22, 23])
    store = empty_store(model, n_pages, 4)
    some = model.forward(replace(batch, logits_at=wanted, prepared={}), store)
    assert some.shape == (4, 97)
    assert (some - everything[wanted]).abs().max() <= TOLERANCE * everything.abs().max()
    none = model.forward(replace(batch, logits_at=torch.tensor([], dtype=torch.int64), prepared={}), store)
    assert none.shape == (0, 97) and none.dtype == torch.float32


def test_a_forward_without_logits_still_writes_every_layer(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    model = load(tmp_path)
    batch, n_pages = whole_batch([list(range(8))], 4)
    store = empty_store(model, n_pages, 4)
    model.forward(replace(batch, logits_at=torch.tensor([], dtype=torch.int64)), store)
    assert all(layer.k.isfinite().all() and layer.v.isfinite().all() for layer in store)


def test_shorter_rotary_tables_change_nothing_below_their_end(tmp_path: Path) -> None:
    oracle = tiny("gemma3")
    oracle.save_pretrained(tmp_path)
    model = load_model(tmp_path, TorchOps(torch.float32), max_positions=23)
    assert model.layers[0].rope.cos.shape == (23, 8)
    assert model.spec.max_positions == 128
    assert_same_logits(model, oracle)


def test_weights_are_packed_fused_and_named_for_the_probe(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    model = load(tmp_path)
    shapes = {(linear.in_features, linear.out_features) for linear in model.linears}
    assert shapes == {(48, 97), (48, 48 + 2 * 16), (48, 48), (48, 160), (80, 48)}
    assert len(model.linears) == 1 + 4 * 3
