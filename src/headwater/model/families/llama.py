"""Llama, Mistral and SmolLM2: the plain decoder. Source: arXiv 2302.13971, 2310.06825."""

from __future__ import annotations

from dataclasses import replace

from headwater.model.families.common import (
    gguf_rope,
    gguf_sizes,
    hf_rope,
    hf_sizes,
    layer_windows,
    refuse_quantized,
)
from headwater.model.families.family import GGUF_NAMES, Family, TensorShapes
from headwater.model.settings import Settings
from headwater.model.spec import ModelSpec

MISTRAL_DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}
"""Transformers' defaults for keys that config.json does not mention; a null sliding_window means none."""


def read_hf(config: Settings, shapes: TensorShapes) -> ModelSpec:
    """From config.json with model_type llama or mistral."""
    refuse_quantized(config)
    config.refuse_unless("hidden_act", ("silu",), "an activation other than silu")
    window = None
    if config.text("model_type") == "mistral":
        config = config.with_defaults(MISTRAL_DEFAULTS)
        window = config.optional_count("sliding_window")
    sizes = hf_sizes(config)
    n_layers = sizes["n_layers"]
    windows = layer_windows(config, n_layers, window, [window is not None] * n_layers)
    if set(windows) - {window}:
        raise config.error("layer_types", "mixes kinds of layers, which this model_type does not do in Transformers")
    attention_bias = config.flag("attention_bias", False)
    return ModelSpec(
        family=config.text("model_type"),
        layer_windows=windows,
        layer_ropes=(hf_rope(config),) * n_layers,
        act="silu",
        attn_scale=sizes["head_dim"] ** -0.5,
        tied_embeddings=config.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias", False),
        **sizes,
    )


def read_gguf(meta: Settings, shapes: TensorShapes) -> ModelSpec:
    """From GGUF architecture llama (Mistral and SmolLM2 files say so too)."""
    sizes = gguf_sizes(meta, shapes)
    n_layers = sizes["n_layers"]
    window = meta.optional_count("attention.sliding_window")
    return ModelSpec(
        family="llama",
        layer_windows=(window,) * n_layers,
        layer_ropes=(gguf_rope(meta),) * n_layers,
        act="silu",
        attn_scale=sizes["head_dim"] ** -0.5,
        tied_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        o_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        **sizes,
    )


LLAMA = Family(
    name="llama",
    hf_types=("llama", "mistral"),
    gguf_archs=("llama",),
    read_hf=read_hf,
    read_gguf=read_gguf,
    # llama.cpp's converter stores this architecture's q and k for rotation of neighbouring pairs.
    # rope_freqs is read as RopeSpec.freq_factors (Llama 3.1's stretch, worked out by the converter).
    gguf_names=replace(GGUF_NAMES, interleaved_rope=True, ignored=(r"rope_freqs\.weight",)),
)
