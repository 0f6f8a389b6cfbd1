"""Gemma 3, text only: sliding and full layers with a rotary embedding each, norms on both sides of
attention and MLP, scaled embeddings. Source: arXiv 2503.19786."""

from __future__ import annotations

import math
from dataclasses import replace

from headwater.model.families.common import (
    gguf_rope,
    gguf_sizes,
    hf_sizes,
    layer_windows,
    refuse_quantized,
    rope_from_params,
)
from headwater.model.families.family import HF_NAMES, Family, TensorShapes
from headwater.model.settings import Settings
from headwater.model.spec import ModelSpec, RopeSpec

GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
PATTERN = 6
"""Every sixth layer attends to everything, unless the configuration says otherwise."""

LAYERS_OF_27B = 62
"""The 27B model scales attention by d_model / n_heads instead of head_dim; GGUF metadata does not say so,
llama.cpp tells it by its number of layers, and so do we."""

DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
}
"""Transformers' defaults, left out of the published multimodal checkpoints' text_config."""


def read_hf(config: Settings, shapes: TensorShapes) -> ModelSpec:
    """From config.json with model_type gemma3_text, or the text_config of gemma3."""
    refuse_quantized(config)
    text = config.section("text_config") or config
    tied = text.flag("tie_word_embeddings", config.flag("tie_word_embeddings", True))
    config = text.with_defaults(DEFAULTS)
    config.refuse_unless("hidden_activation", ("gelu_pytorch_tanh",), "an activation other than gelu_pytorch_tanh")
    # Transformers reads this key and then ignores it; no published Gemma 3 sets it.
    config.refuse_unless("attn_logit_softcapping", (), "capping of attention scores")
    config.refuse_unless("use_bidirectional_attention", (False,), "attention to later tokens")
    sizes = hf_sizes(config)
    n_layers, pattern = sizes["n_layers"], config.count("sliding_window_pattern", PATTERN)
    sliding = [(i + 1) % pattern != 0 for i in range(n_layers)]
    windows = layer_windows(config, n_layers, config.count("sliding_window", 4096), sliding)
    attention_bias = config.flag("attention_bias", False)
    return ModelSpec(
        family="gemma3",
        layer_windows=windows,
        layer_ropes=ropes_of(windows, *hf_ropes(config)),
        act="gelu_tanh",
        attn_scale=config.positive("query_pre_attn_scalar", 256.0) ** -0.5,
        tied_embeddings=tied,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
        post_norms=True,
        embed_scale=math.sqrt(sizes["d_model"]),
        logit_softcap=config.optional_positive("final_logit_softcapping"),
        **sizes,
    )


def hf_ropes(config: Settings) -> tuple[RopeSpec, RopeSpec]:
    """(full layers, sliding layers): rope_parameters per layer type (Transformers 5), or the older
    rope_theta, rope_local_base_freq and rope_scaling, where the scaling is for the full layers only."""
    none = Settings({}, config.where)
    params = config.section("rope_parameters") or none
    full = params.section("full_attention") or config.section("rope_scaling") or none
    local = params.section("sliding_attention") or none
    full_theta = full.positive("rope_theta", config.positive("rope_theta", GLOBAL_THETA))
    local_theta = local.positive("rope_theta", config.positive("rope_local_base_freq", LOCAL_THETA))
    unknown = sorted(set(params.values) - {"full_attention", "sliding_attention"})
    if unknown:
        raise params.error(unknown[0], "is not understood: full_attention and sliding_attention are expected")
    return rope_from_params(full, full_theta, config), rope_from_params(local, local_theta, config)


def read_gguf(meta: Settings, shapes: TensorShapes) -> ModelSpec:
    """From GGUF architecture gemma3. Its norm weights already hold 1 + w."""
    sizes = gguf_sizes(meta, shapes)
    n_layers, window = sizes["n_layers"], meta.count("attention.sliding_window")
    pattern = meta.count("attention.sliding_window_pattern", PATTERN)
    windows = tuple(window if (i + 1) % pattern else None for i in range(n_layers))
    local = RopeSpec(meta.positive("rope.freq_base_swa", LOCAL_THETA))
    scalar = sizes["d_model"] / sizes["n_heads"] if n_layers == LAYERS_OF_27B else sizes["head_dim"]
    return ModelSpec(
        family="gemma3",
        layer_windows=windows,
        layer_ropes=ropes_of(windows, gguf_rope(meta), local),
        act="gelu_tanh",
        attn_scale=scalar**-0.5,
        tied_embeddings="output.weight" not in shapes,
        qk_norm=True,
        post_norms=True,
        embed_scale=math.sqrt(sizes["d_model"]),
        logit_softcap=meta.optional_positive("final_logit_softcapping"),
        **sizes,
    )


def ropes_of(windows: tuple[int | None, ...], full: RopeSpec, local: RopeSpec) -> tuple[RopeSpec, ...]:
    """Each layer's rotary embedding: sliding layers have the local one."""
    return tuple(full if window is None else local for window in windows)


GEMMA = Family(
    name="gemma3",
    hf_types=("gemma3_text", "gemma3"),
    gguf_archs=("gemma3",),
    read_hf=read_hf,
    read_gguf=read_gguf,
    hf_names=replace(
        HF_NAMES,
        layer={
            **HF_NAMES.layer,
            "post_attn_norm": "model.layers.{i}.post_attention_layernorm",
            "ffn_norm": "model.layers.{i}.pre_feedforward_layernorm",
            "post_ffn_norm": "model.layers.{i}.post_feedforward_layernorm",
        },
        norm_offset=1.0,
        aliases=(
            ("language_model.model.", "model."),
            ("model.language_model.", "model."),
            ("language_model.lm_head.", "lm_head."),
        ),
        ignored=(*HF_NAMES.ignored, r"(model\.)?(vision_tower|multi_modal_projector)\..*"),
    ),
)
