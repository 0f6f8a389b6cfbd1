"""The two real models on real text against Transformers' arithmetic in float32.

The oracle is built here from published numbers and from weights that the ``gguf`` package dequantises,
named and ordered by this file: it shares no reading of metadata and no decoder with what is tested.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import pytest
import torch
from gguf.quants import dequantize
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from headwater.gguf_file import GgufFile
from headwater.kernels.torch_ref import TorchOps
from headwater.model.decoder import Model
from headwater.model.load import load_model
from headwater.text.tokenizer import load_tokenizer
from tests.model.dense import empty_store, whole_batch
from tests.model.tiny import GEMMA_NORMS, GGUF_NAMES, LLAMA_NORMS

N_PROMPT, N_NEW, BATCH = 10, 64, 5
NEAR_TIE = 1e-5
PROMPTS = [
    "The history of the printing press begins long before Gutenberg set his first type in Mainz.",
    "Water boils at a lower temperature on a mountain because the pressure of the air is less.",
    "She opened the old wooden door and found a room that nobody had entered for years.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)",
    "To make bread you need flour, water, salt and yeast, and above all a little patience.",
    "The committee met on Tuesday to discuss the budget for the coming year and its risks.",
    "Photosynthesis is the process by which plants turn light into chemical energy they can store.",
    "Once upon a time a fox lived at the edge of a forest with her three cubs.",
    "Q: What is the capital of Australia? A: The capital of Australia is Canberra, not Sydney.",
    "In mathematics, a prime number is a natural number greater than one with no other divisors.",
    "Dear Mr. Thompson, thank you for your letter of March 3rd concerning the repair of the roof.",
    "Les enfants jouaient dans le jardin pendant que leur grand-mère préparait le repas du soir.",
    "The stock market fell sharply on Monday after the central bank raised its interest rates again.",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377",
    "A river begins where rain gathers, and a headwater is where many of its streams begin.",
    'import numpy as np\nimport pandas as pd\n\ndata = pd.read_csv("measurements.csv")\nprint(data.head())',
    "The violin has four strings, usually tuned in perfect fifths, and is played with a bow.",
    "Our solar system has eight planets; the four inner ones are small and made of rock.",
    "Der Zug nach München fährt heute von Gleis sieben und hat zwanzig Minuten Verspätung.",
    "He counted the coins twice, put them back into the tin, and wrote the sum on paper.",
]

LONG_TEXT = " ".join(PROMPTS) * 3


def smollm2_config() -> LlamaConfig:
    """config.json of HuggingFaceTB/SmolLM2-135M-Instruct."""
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )


def gemma3_config() -> Gemma3TextConfig:
    """config.json of google/gemma-3-270m."""
    return Gemma3TextConfig(
        vocab_size=262_144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=32_768,
        query_pre_attn_scalar=256,
        rms_norm_eps=1e-6,
        sliding_window=512,
        layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 3,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        tie_word_embeddings=True,
        attn_implementation="eager",
    )


@dataclass
class Pair:
    oracle: PreTrainedModel
    model: Model
    encode: Callable[[str], list[int]]


@pytest.fixture(scope="module", params=["smollm2-135m", "gemma3-270m"])
def pair(request: pytest.FixtureRequest, model_file: Callable[[str], Path]) -> Iterator[Pair]:
    path = model_file(request.param)
    with torch.device("meta"):
        oracle: PreTrainedModel = (
            LlamaForCausalLM(smollm2_config())
            if request.param.startswith("smol")
            else Gemma3ForCausalLM(gemma3_config())
        )
    # Rotary tables are no parameters: build the small module again where numbers are real.
    oracle.model.rotary_emb = type(oracle.model.rotary_emb)(oracle.config)
    if isinstance(oracle, Gemma3ForCausalLM):
        oracle.model.embed_tokens.embed_scale = torch.tensor(640**0.5)
    oracle.load_state_dict(dequantised(path, oracle), strict=True, assign=True)
    oracle.tie_weights()
    tokenizer = load_tokenizer(path)
    model = load_model(path, TorchOps(torch.float32), max_positions=2048)
    yield Pair(oracle.eval(), model, lambda text: tokenizer.encode(text, add_special_tokens=True, parse_special=False))
    gc.collect()


def dequantised(path: Path, oracle: PreTrainedModel) -> dict[str, Tensor]:
    """Transformers' state dict: the reverse of what llama.cpp's converter did."""
    file, is_gemma = GgufFile(path), isinstance(oracle, Gemma3ForCausalLM)
    parts = GGUF_NAMES | (GEMMA_NORMS if is_gemma else LLAMA_NORMS)
    state: dict[str, Tensor] = {}
    for name in oracle.state_dict():
        stem = name.removesuffix(".weight")
        if stem == "lm_head":
            stem = "model.embed_tokens"
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        info = file.tensors[f"{parts[stem]}.weight" if stem in parts else f"blk.{layer}.{parts[part]}.weight"]
        kind = gguf.GGMLQuantizationType(info.type_id)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        n_elements = int(torch.tensor(info.shape).prod())
        data = file.bytes_of(info, n_elements // block * block_bytes).reshape(*info.shape[:-1], -1)
        values = torch.from_numpy(dequantize(data, kind).copy())
        if is_gemma and "norm" in name:
            values -= 1
        if not is_gemma and ("q_proj" in name or "k_proj" in name):
            values = values.view(-1, 32, 2, 576).transpose(1, 2).reshape(values.shape)
        state[name] = state["model.embed_tokens.weight"] if name == "lm_head.weight" else values
    return state


@torch.inference_mode()
def greedy(oracle: PreTrainedModel, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """Transformers' greedy tokens [n, N_NEW], and whether its own top two were near a tie there."""
    chosen, ties, past, tokens = [], [], None, prompts
    for _ in range(N_NEW):
        out = oracle(tokens, past_key_values=past, use_cache=True, logits_to_keep=1)
        past, logits = out.past_key_values, out.logits[:, -1]
        top = logits.topk(2).values
        ties.append(top[:, 0] - top[:, 1] < NEAR_TIE * logits.abs().amax(-1))
        tokens = logits.argmax(-1, keepdim=True)
        chosen.append(tokens)
    return torch.cat(chosen, 1), torch.stack(ties, 1)


def argmax_after(model: Model, rows: list[list[int]], first: int) -> Tensor:
    """Our greedy choice [n, len - first] after each token from index ``first`` on, all rows of one length."""
    batch, n_pages = whole_batch(rows, 16)
    length = len(rows[0])
    wanted = torch.cat([torch.arange(first, length) + row * length for row in range(len(rows))])
    logits = model.forward(replace(batch, logits_at=wanted), empty_store(model, n_pages, 16))
    return logits.argmax(-1).view(len(rows), length - first)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")  # its new name is unknown to older versions
def test_greedy_tokens_of_20_prompts_equal_transformers(pair: Pair) -> None:
    assert len(PROMPTS) == 20
    prompts = torch.tensor([pair.encode(text)[:N_PROMPT] for text in PROMPTS])
    want, ties = greedy(pair.oracle, prompts)
    n_compared = 0
    for at in range(0, len(PROMPTS), BATCH):
        rows = torch.cat([prompts[at : at + BATCH], want[at : at + BATCH, :-1]], 1)
        got = argmax_after(pair.model, rows.tolist(), N_PROMPT - 1)
        # From a near tie on, the two may rightly go different ways.
        still = ~ties[at : at + BATCH].cummax(1).values
        assert torch.equal(got[still], want[at : at + BATCH][still])
        n_compared += int(still.sum())
    assert n_compared > 0.9 * 20 * N_NEW


def test_a_text_longer_than_the_window_has_the_logits_of_transformers(pair: Pair) -> None:
    tokens = pair.encode(LONG_TEXT)[:700]
    assert len(tokens) == 700
    wanted = torch.arange(0, 700, 23)
    with torch.inference_mode():
        want = pair.oracle(torch.tensor([tokens]), logits_to_keep=wanted).logits[0]
    batch, n_pages = whole_batch([tokens], 16)
    got = pair.model.forward(replace(batch, logits_at=wanted), empty_store(pair.model, n_pages, 16))
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
