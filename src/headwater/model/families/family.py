"""What a family is: how to read its configuration and where its tensors are called what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headwater.model.settings import Settings
from headwater.model.spec import ModelSpec

SpecReader = Callable[[Settings, "TensorShapes"], ModelSpec]
"""Turns a configuration into a ModelSpec; ModelError names what is missing or not understood."""

TensorShapes = Mapping[str, tuple[int, ...]]
"""The file's tensors, rows first: some facts are only there (a GGUF's vocabulary, whether biases exist)."""


@dataclass(frozen=True, slots=True)
class TensorNames:
    """A file format's names for a family's tensors.

    ``layer`` maps our name of a layer's part to the file's, with {i} for the layer: attn_norm, q, k, v, o,
    q_norm, k_norm, post_attn_norm, ffn_norm, gate, up, down, post_ffn_norm. Weights end in ".weight",
    biases in ".bias". ``ignored`` are regular expressions of tensors that a file may hold and a text decoder
    does not need. ``aliases`` are (other beginning, our beginning) of names. ``norm_offset`` is added to every
    norm weight (Gemma stores w and multiplies by 1 + w).
    ``interleaved_rope``: rows of q and k are in the order of rotation pairs and must be sorted into halves.
    """

    embed: str
    final_norm: str
    head: str
    layer: Mapping[str, str]
    ignored: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    norm_offset: float = 0.0
    interleaved_rope: bool = False


HF_NAMES = TensorNames(
    embed="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    layer={
        "attn_norm": "model.layers.{i}.input_layernorm",
        "q": "model.layers.{i}.self_attn.q_proj",
        "k": "model.layers.{i}.self_attn.k_proj",
        "v": "model.layers.{i}.self_attn.v_proj",
        "o": "model.layers.{i}.self_attn.o_proj",
        "q_norm": "model.layers.{i}.self_attn.q_norm",
        "k_norm": "model.layers.{i}.self_attn.k_norm",
        "ffn_norm": "model.layers.{i}.post_attention_layernorm",
        "gate": "model.layers.{i}.mlp.gate_proj",
        "up": "model.layers.{i}.mlp.up_proj",
        "down": "model.layers.{i}.mlp.down_proj",
    },
    ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq"),
)

GGUF_NAMES = TensorNames(
    embed="token_embd",
    final_norm="output_norm",
    head="output",
    layer={
        "attn_norm": "blk.{i}.attn_norm",
        "q": "blk.{i}.attn_q",
        "k": "blk.{i}.attn_k",
        "v": "blk.{i}.attn_v",
        "o": "blk.{i}.attn_output",
        "q_norm": "blk.{i}.attn_q_norm",
        "k_norm": "blk.{i}.attn_k_norm",
        "post_attn_norm": "blk.{i}.post_attention_norm",
        "ffn_norm": "blk.{i}.ffn_norm",
        "gate": "blk.{i}.ffn_gate",
        "up": "blk.{i}.ffn_up",
        "down": "blk.{i}.ffn_down",
        "post_ffn_norm": "blk.{i}.post_ffw_norm",
    },
)


@dataclass(frozen=True, slots=True)
class Family:
    """One family of decoders. ``hf_types`` are model_type values of config.json, ``gguf_archs`` values of
    general.architecture."""

    name: str
    hf_types: tuple[str, ...]
    gguf_archs: tuple[str, ...]
    read_hf: SpecReader
    read_gguf: SpecReader
    hf_names: TensorNames = HF_NAMES
    gguf_names: TensorNames = GGUF_NAMES
