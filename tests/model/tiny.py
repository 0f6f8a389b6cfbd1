"""Small random models of every family, made by Transformers, and written as safetensors or GGUF."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 2000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}


def gemma_config(**changes: Any) -> Gemma3TextConfig:
    sizes = SIZES | {"num_hidden_layers": 7, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 5}
    return Gemma3TextConfig(**(sizes | changes))


CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 300.0}),
    "llama-biases": lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama-wide-heads": lambda: LlamaConfig(**SIZES, head_dim=16, tie_word_embeddings=True),
    "llama-linear": lambda: LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}
    ),
    "llama-llama3": lambda: LlamaConfig(**SIZES | {"head_dim": 32}, rope_parameters=dict(LLAMA3)),
    "smollm": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mistral-sliding": lambda: MistralConfig(**SIZES, sliding_window=6),
    "mistral-full": lambda: MistralConfig(**SIZES, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**SIZES, sliding_window=6),
    "qwen2-sliding": lambda: Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=2),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "qwen3-biases": lambda: Qwen3Config(**SIZES, head_dim=8, attention_bias=True),
    "gemma3": lambda: gemma_config(),
    "gemma3-scaled": lambda: gemma_config(rope_parameters={k: dict(v) for k, v in GEMMA_ROPES.items()}),
    "gemma3-softcap": lambda: gemma_config(final_logit_softcapping=4.0),
}
CLASSES: dict[type, Any] = {
    LlamaConfig: LlamaForCausalLM,
    MistralConfig: MistralForCausalLM,
    Qwen2Config: Qwen2ForCausalLM,
    Qwen3Config: Qwen3ForCausalLM,
    Gemma3TextConfig: Gemma3ForCausalLM,
}


def tiny(kind: str, **changes: Any) -> PreTrainedModel:
    """A model of ``kind`` whose every number matters: norms, biases and all are random. ``changes`` to its
    configuration."""
    config = CONFIGS[kind]()
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(7)
    model: PreTrainedModel = CLASSES[type(config)](config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(-0.4, 0.4) if kind.startswith("gemma") else parameter.uniform_(0.6, 1.4)
            else:
                parameter.normal_(0.0, 0.3)
    return model


def sequences() -> list[list[int]]:
    """Three token sequences of 23, 1 and 10 tokens."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (23, 1, 10)]


def oracle_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Transformers' logits float32 [len(tokens), vocab]."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
}
LLAMA_NORMS = {"post_attention_layernorm": "ffn_norm"}
GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def head_size(model: PreTrainedModel) -> int:
    config = model.config
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def gguf_tensors(model: PreTrainedModel, arch: str) -> Iterator[tuple[str, np.ndarray]]:
    """Name and float32 values as llama.cpp's converter stores them for ``arch``."""
    config = model.config
    head_dim = head_size(model)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, kind = name.rsplit(".", 1)
        values = tensor.float().numpy()
        if stem in GGUF_NAMES:
            new = GGUF_NAMES[stem]
        else:
            _, _, layer, part = stem.split(".", 3)
            new = f"blk.{layer}." + (GGUF_NAMES | (GEMMA_NORMS if arch == "gemma3" else LLAMA_NORMS))[part]
        if arch == "gemma3" and "norm" in new:
            values = values + 1
        if arch == "llama" and new.endswith(("attn_q", "attn_k")):
            values = permuted(values, values.shape[0] // head_dim)
        yield f"{new}.{kind}", values


def permuted(values: np.ndarray, n_heads: int) -> np.ndarray:
    """llama.cpp's order of q and k rows: pairs that rotate together are neighbours."""
    rows = values.shape[0]
    return values.reshape(n_heads, 2, rows // n_heads // 2, -1).swapaxes(1, 2).reshape(values.shape)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    arch: str,
    *,
    extra: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    quantise: gguf.GGMLQuantizationType | None = None,
) -> None:
    """The model as GGUF; ``extra`` metadata (without the prefix) and ``tensors`` add to or replace what it has.
    ``quantise`` is applied to every matrix."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_size(model))
    writer.add_value_length(head_size(model))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for key, value in (extra or {}).items():
        {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}[type(value)](f"{arch}.{key}", value)
    for name, values in (dict(gguf_tensors(model, arch)) | (tensors or {})).items():
        if quantise is not None and values.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(values, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
