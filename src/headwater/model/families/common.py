"""Readings that several families share: rotary embeddings, windows, the plain sizes."""

from __future__ import annotations

from typing import TypedDict

from headwater.model.families.family import TensorShapes
from headwater.model.settings import Settings
from headwater.model.spec import Llama3Scaling, RopeSpec

DEFAULT_THETA = 10_000.0
ROPE_TYPES = ("default", "linear", "llama3")
ROPE_KEYS = {
    "default": set[str](),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}
"""What each kind of rotary scaling may say; anything more is refused rather than passed over."""

MAX_LAYERS = 10_000
"""No model has as many; a damaged file could say anything."""


class Sizes(TypedDict):
    """The part of a ModelSpec that both formats spell out plainly."""

    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    vocab_size: int
    max_positions: int
    norm_eps: float


def hf_sizes(config: Settings) -> Sizes:
    """Sizes from config.json. ``head_dim`` defaults to hidden_size / num_attention_heads."""
    d_model, n_heads = config.count("hidden_size"), config.count("num_attention_heads")
    if config.raw("head_dim") is None and d_model % n_heads:
        raise config.error("hidden_size", f"{d_model} is not a multiple of num_attention_heads {n_heads}")
    return Sizes(
        n_layers=config.count("num_hidden_layers", at_most=MAX_LAYERS),
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=config.count("num_key_value_heads", n_heads),
        head_dim=config.count("head_dim", d_model // n_heads),
        d_ff=config.count("intermediate_size"),
        vocab_size=config.count("vocab_size"),
        max_positions=config.count("max_position_embeddings"),
        norm_eps=config.positive("rms_norm_eps", 1e-6),
    )


def gguf_sizes(meta: Settings, shapes: TensorShapes) -> Sizes:
    """Sizes from GGUF metadata; the vocabulary is what the embedding table has rows for."""
    d_model, n_heads = meta.count("embedding_length"), meta.count("attention.head_count")
    embed = shapes.get("token_embd.weight")
    if embed is None or len(embed) != 2:
        raise meta.error("embedding_length", "has no tensor token_embd.weight of two dimensions to go with it")
    if meta.raw("attention.key_length") is None and d_model % n_heads:
        raise meta.error("embedding_length", f"{d_model} is not a multiple of the head count {n_heads}")
    head_dim = meta.count("attention.key_length", d_model // n_heads)
    meta.refuse_unless("attention.value_length", (head_dim,), "values of another length than keys")
    meta.refuse_unless("rope.dimension_count", (head_dim,), "rotating a part of the head")
    meta.refuse_unless("expert_count", (0,), "a mixture of experts")
    return Sizes(
        n_layers=meta.count("block_count", at_most=MAX_LAYERS),
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=meta.count("attention.head_count_kv", n_heads),
        head_dim=head_dim,
        d_ff=meta.count("feed_forward_length"),
        vocab_size=embed[0],
        max_positions=meta.count("context_length"),
        norm_eps=meta.positive("attention.layer_norm_rms_epsilon"),
    )


def hf_rope(config: Settings) -> RopeSpec:
    """One rotary embedding for all layers, from rope_parameters (Transformers 5) or rope_theta and rope_scaling."""
    params = config.section("rope_parameters") or config.section("rope_scaling") or Settings({}, config.where)
    partial = params.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise config.error("partial_rotary_factor", f"is {partial}: rotating a part of the head is not supported")
    theta = params.positive("rope_theta", config.positive("rope_theta", DEFAULT_THETA))
    return rope_from_params(params, theta, config)


def rope_from_params(params: Settings, theta: float, config: Settings) -> RopeSpec:
    """A RopeSpec from one set of Transformers' rope parameters.

    ModelError for a kind that is not built here (dynamic, yarn, longrope, ...) and for parameters that the
    kind does not have.
    """
    kind = params.text("rope_type", params.text("type", "default"))
    if kind not in ROPE_TYPES:
        raise params.error("rope_type", f"is {kind!r}; supported are {', '.join(ROPE_TYPES)}")
    known = ROPE_KEYS[kind] | {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    # Transformers tolerates a factor of a "default" rope and writes the original length at times: no effect there.
    harmless = {"original_max_position_embeddings"}
    for key in params.values:
        if key not in known | harmless and params.raw(key) is not None:
            raise params.error(key, f"is not understood for rotary embeddings of type {kind!r}")
    if kind == "linear":
        return RopeSpec(theta, linear_factor=params.positive("factor"))
    if kind == "llama3":
        original = params.count(
            "original_max_position_embeddings",
            config.count("original_max_position_embeddings", config.count("max_position_embeddings")),
        )
        low, high = params.positive("low_freq_factor"), params.positive("high_freq_factor")
        if high <= low:
            raise params.error("high_freq_factor", f"is {high}, it must be above low_freq_factor {low}")
        return RopeSpec(theta, llama3=Llama3Scaling(params.positive("factor"), low, high, original))
    return RopeSpec(theta)


def gguf_rope(meta: Settings) -> RopeSpec:
    """The rotary embedding of GGUF metadata, without what a tensor rope_freqs.weight may add."""
    theta = meta.positive("rope.freq_base", DEFAULT_THETA)
    kind = meta.text("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise meta.error("rope.scaling.type", f"is {kind!r}; supported are none and linear")
    factor = meta.positive("rope.scaling.factor", meta.positive("rope.scale_linear", 1.0)) if kind == "linear" else 1.0
    return RopeSpec(theta, linear_factor=factor)


def layer_windows(config: Settings, n_layers: int, window: int | None, sliding: list[bool]) -> tuple[int | None, ...]:
    """Each layer's window from layer_types if given, else from ``sliding``, the family's rule."""
    types = config.raw("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != n_layers:
            raise config.error("layer_types", f"must list {n_layers} layers")
        unknown = sorted({str(kind) for kind in types} - {"full_attention", "sliding_attention"})
        if unknown:
            raise config.error("layer_types", f"has {', '.join(unknown)}; supported: full_attention, sliding_attention")
        sliding = [kind == "sliding_attention" for kind in types]
    if any(sliding) and window is None:
        raise config.error("sliding_window", "is missing although layers slide")
    return tuple(window if slides else None for slides in sliding)


def refuse_quantized(config: Settings) -> None:
    """Quantised checkpoints (GPTQ, AWQ, FP8, ...) hold tensors of another meaning."""
    quantization = config.section("quantization_config")
    if quantization is not None:
        method = quantization.text("quant_method", "unknown")
        raise config.error("quantization_config", f"is of method {method!r}; supported: none, or a GGUF file")
