"""Tiny random models written as Hugging Face folders, for whole engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.text.toy import TEMPLATE, VOCAB_SIZE, write_toy_folder

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "attn_implementation": "eager",
}


def plain_model(seed: int = 7) -> PreTrainedModel:
    """Two layers of full attention."""
    torch.manual_seed(seed)
    config = LlamaConfig(**SIZES, num_hidden_layers=2)
    return randomised(LlamaForCausalLM(config))


def hybrid_model(seed: int = 7) -> PreTrainedModel:
    """Two sliding layers (window 8) for every full one, six in all: three groups of two layers."""
    torch.manual_seed(seed)
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(
        **SIZES, num_hidden_layers=6, head_dim=8, query_pre_attn_scalar=8, sliding_window=8, layer_types=kinds
    )
    return randomised(Gemma3ForCausalLM(config), norm_offset=1.0)


def randomised(model: PreTrainedModel, norm_offset: float = 0.0) -> PreTrainedModel:
    """Every number matters: no norm is 1, no bias 0, and logits are far apart."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.6 - norm_offset, 1.4 - norm_offset)
            else:
                parameter.normal_(0.0, 0.35)
    model.eval()
    return model


def write_folder(path: Path, model: PreTrainedModel) -> Path:
    """Weights and the toy tokenizer with a chat template: what ``headwater serve --model FOLDER`` takes."""
    model.save_pretrained(path)
    return write_toy_folder(path, chat_template=TEMPLATE)
