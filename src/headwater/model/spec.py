"""What a decoder is, in numbers: everything the layers need to know besides the weights."""

from __future__ import annotations

from dataclasses import dataclass

ACTIVATIONS = ("silu", "gelu_tanh")


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Rotary scaling of Llama 3.1: long wavelengths are stretched, short ones kept, in between blended.

    Source: the reference implementation in meta-llama/llama-models, as in Transformers' "llama3".
    ``original_positions`` is the context length before the stretch.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of one kind of layer; half-split layout over the whole head.

    inv_freq[i] = theta ** (-2i / head_dim), then divided by ``linear_factor``, blended by ``llama3``, or
    divided element by element by ``freq_factors`` (as GGUF stores the latter); at most one of the three.
    """

    theta: float
    linear_factor: float = 1.0
    llama3: Llama3Scaling | None = None
    freq_factors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer. Sizes are in elements, ``max_positions`` in tokens.

    ``layer_windows[i]`` is the number of keys that a query of layer i sees, itself included; None: all.
    ``layer_ropes[i]`` is layer i's rotary embedding. ``attn_scale`` multiplies q.k; ``embed_scale``
    multiplies the embeddings (rounded to the compute dtype first, as Transformers does). With
    ``post_norms`` (Gemma) the outputs of attention and MLP are normed before they join the residual.
    """

    family: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    layer_windows: tuple[int | None, ...]
    layer_ropes: tuple[RopeSpec, ...]
    act: str
    attn_scale: float
    tied_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    embed_scale: float | None = None
    logit_softcap: float | None = None

    @property
    def q_size(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.n_kv_heads * self.head_dim

    def impossible(self) -> str | None:
        """What cannot be true of these numbers, as a phrase; None if they are sound."""
        sizes = ("n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff", "vocab_size", "max_positions")
        for name in sizes:
            if getattr(self, name) < 1:
                return f"{name} is {getattr(self, name)}"
        if self.n_heads % self.n_kv_heads:
            return f"{self.n_heads} query heads cannot share {self.n_kv_heads} KV heads evenly"
        if self.head_dim % 2:
            return f"head_dim {self.head_dim} is odd, rotary embeddings need pairs"
        if not len(self.layer_windows) == len(self.layer_ropes) == self.n_layers:
            return f"{len(self.layer_windows)} windows and {len(self.layer_ropes)} ropes for {self.n_layers} layers"
        if any(window is not None and window < 1 for window in self.layer_windows):
            return f"a sliding window of {min(w for w in self.layer_windows if w is not None)} tokens"
        if self.act not in ACTIVATIONS:
            return f"activation {self.act!r} is not one of {', '.join(ACTIVATIONS)}"
        return None
