"""Qwen2 (biases on q, k, v) and Qwen3 (norms on q and k). Source: arXiv 2407.10671, 2505.09388."""

from __future__ import annotations

from headwater.model.families.common import (
    gguf_rope,
    gguf_sizes,
    hf_rope,
    hf_sizes,
    layer_windows,
    refuse_quantized,
)
from headwater.model.families.family import Family, TensorShapes
from headwater.model.settings import Settings
from headwater.model.spec import ModelSpec

DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
QWEN3_DEFAULTS = {"head_dim": 128}
"""Transformers' defaults for keys that config.json does not mention."""


def read_hf(config: Settings, shapes: TensorShapes) -> ModelSpec:
    """From config.json with model_type qwen2 or qwen3. Layers from max_window_layers on slide, if any do."""
    refuse_quantized(config)
    config.refuse_unless("hidden_act", ("silu",), "an activation other than silu")
    is_qwen3 = config.text("model_type") == "qwen3"
    config = config.with_defaults({**DEFAULTS, **(QWEN3_DEFAULTS if is_qwen3 else {})})
    sizes = hf_sizes(config)
    n_layers = sizes["n_layers"]
    window = config.optional_count("sliding_window") if config.flag("use_sliding_window", False) else None
    first_sliding = config.integer("max_window_layers")
    sliding = [window is not None and i >= first_sliding for i in range(n_layers)]
    return ModelSpec(
        family=config.text("model_type"),
        layer_windows=layer_windows(config, n_layers, window, sliding),
        layer_ropes=(hf_rope(config),) * n_layers,
        act="silu",
        attn_scale=sizes["head_dim"] ** -0.5,
        tied_embeddings=config.flag("tie_word_embeddings", False),
        qkv_bias=config.flag("attention_bias", False) if is_qwen3 else True,
        o_bias=config.flag("attention_bias", False) if is_qwen3 else False,
        qk_norm=is_qwen3,
        **sizes,
    )


def read_gguf(meta: Settings, shapes: TensorShapes) -> ModelSpec:
    """From GGUF architecture qwen2 or qwen3; their rows are in half-split order already."""
    sizes = gguf_sizes(meta, shapes)
    n_layers = sizes["n_layers"]
    return ModelSpec(
        family=meta.prefix.rstrip("."),
        layer_windows=(None,) * n_layers,
        layer_ropes=(gguf_rope(meta),) * n_layers,
        act="silu",
        attn_scale=sizes["head_dim"] ** -0.5,
        tied_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        o_bias="blk.0.attn_output.bias" in shapes,
        qk_norm="blk.0.attn_q_norm.weight" in shapes,
        **sizes,
    )


QWEN = Family(
    name="qwen",
    hf_types=("qwen2", "qwen3"),
    gguf_archs=("qwen2", "qwen3"),
    read_hf=read_hf,
    read_gguf=read_gguf,
)
