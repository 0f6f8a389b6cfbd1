"""A model's tensors by their place in the decoder, and reading them from files: everything checked, parts fused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from headwater.errors import ModelError
from headwater.kernels.ops import HeadNorms
from headwater.model.spec import ModelSpec
from headwater.model.weights.source import WeightSource

M = TypeVar("M")
N = TypeVar("N")


@dataclass(frozen=True, slots=True)
class Matrix:
    """A product: ``weight`` [out, in] and ``bias`` [out]. ``hadamard`` > 0: the input first goes through a
    Walsh-Hadamard transform in pieces of so many elements (as in ``Int8Weight``)."""

    weight: Tensor
    bias: Tensor | None = None
    hadamard: int = 0


@dataclass(frozen=True, slots=True)
class LayerTensors(Generic[M]):
    """One layer: products in some form ``M`` and norms (float32, what is multiplied), as in ``layers.LayerWeights``."""

    attn_norm: Tensor
    qkv: M
    o: M
    ffn_norm: Tensor
    gate_up: M
    down: M
    head_norms: HeadNorms | None = None
    post_attn_norm: Tensor | None = None
    post_ffn_norm: Tensor | None = None

    def with_own_norms(self) -> LayerTensors[M]:
        """The same layer with copies of its norms."""

        def own(norm: Tensor | None) -> Tensor | None:
            return None if norm is None else norm.clone()

        norms = self.head_norms
        return replace(
            self,
            attn_norm=self.attn_norm.clone(),
            ffn_norm=self.ffn_norm.clone(),
            head_norms=None if norms is None else HeadNorms(norms.q.clone(), norms.k.clone(), norms.eps),
            post_attn_norm=own(self.post_attn_norm),
            post_ffn_norm=own(self.post_ffn_norm),
        )

    def map(self, f: Callable[[M], N]) -> LayerTensors[N]:
        """The same layer with ``f`` of each product."""
        return LayerTensors(
            self.attn_norm,
            f(self.qkv),
            f(self.o),
            self.ffn_norm,
            f(self.gate_up),
            f(self.down),
            self.head_norms,
            self.post_attn_norm,
            self.post_ffn_norm,
        )


@dataclass(frozen=True, slots=True)
class OuterTensors(Generic[M]):
    """What lies around the layers: ``embed`` [vocab_size, d_model], ``final_norm`` float32 [d_model], ``head``."""

    embed: Tensor
    final_norm: Tensor
    head: M


class TensorReader:
    """Knows which tensors a spec needs, of which shapes, and reads them in ``dtype`` (norms in float32)."""

    def __init__(self, source: WeightSource, dtype: torch.dtype) -> None:
        self.source = source
        self.spec: ModelSpec = source.spec
        self.dtype = dtype
        self._file_names: dict[str, str] = {}
        """Our spelling of a tensor's name -> the file's."""
        for name in source.shapes:
            ours = name
            for other, beginning in source.names.aliases:
                if name.startswith(other):
                    ours = beginning + name.removeprefix(other)
            self._file_names[ours] = name

    # ---- what must be there -------------------------------------------------------------------------

    def needed(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every tensor the model has, as (our name, shape)."""
        spec, names = self.spec, self.source.names
        yield f"{names.embed}.weight", (spec.vocab_size, spec.d_model)
        yield f"{names.final_norm}.weight", (spec.d_model,)
        if not spec.tied_embeddings:
            yield f"{names.head}.weight", (spec.vocab_size, spec.d_model)
        linears = {
            "q": (spec.q_size, spec.d_model, spec.qkv_bias),
            "k": (spec.kv_size, spec.d_model, spec.qkv_bias),
            "v": (spec.kv_size, spec.d_model, spec.qkv_bias),
            "o": (spec.d_model, spec.q_size, spec.o_bias),
            "gate": (spec.d_ff, spec.d_model, spec.mlp_bias),
            "up": (spec.d_ff, spec.d_model, spec.mlp_bias),
            "down": (spec.d_model, spec.d_ff, spec.mlp_bias),
        }
        norms = {"attn_norm": spec.d_model, "ffn_norm": spec.d_model}
        if spec.qk_norm:
            norms |= {"q_norm": spec.head_dim, "k_norm": spec.head_dim}
        if spec.post_norms:
            norms |= {"post_attn_norm": spec.d_model, "post_ffn_norm": spec.d_model}
        for i in range(spec.n_layers):
            for part, size in norms.items():
                yield self._name(i, part), (size,)
            for part, (n_out, n_in, has_bias) in linears.items():
                yield self._name(i, part), (n_out, n_in)
                if has_bias:
                    yield self._name(i, part, "bias"), (n_out,)

    def _name(self, layer: int, part: str, kind: str = "weight") -> str:
        return f"{self.source.names.layer[part].format(i=layer)}.{kind}"

    def check(self) -> None:
        """All that is needed is there, readable, of the right shape; and nothing is there that we do not know."""
        source, where = self.source, self.source.path
        unknown = dict(self._file_names)
        for name, shape in self.needed():
            if name not in self._file_names:
                raise ModelError(f"{where}: tensor {name!r} is missing (needed by family {self.spec.family})")
            file_name = self._file_names[name]
            if source.shapes[file_name] != shape:
                raise ModelError(
                    f"{where}: tensor {file_name!r} has shape {list(source.shapes[file_name])}, "
                    f"the configuration says {list(shape)}"
                )
            source.check_readable(file_name)
            unknown.pop(name)
        ignored = list(source.names.ignored)
        if self.spec.tied_embeddings:
            ignored.append(re.escape(f"{source.names.head}.weight"))
        for name, file_name in unknown.items():
            if not any(re.fullmatch(pattern, name) for pattern in ignored):
                raise ModelError(
                    f"{where}: tensor {file_name!r} is not understood for family {self.spec.family}; "
                    "without it the numbers would be wrong"
                )

    # ---- reading ------------------------------------------------------------------------------------

    def embed(self) -> Tensor:
        return self._weight([f"{self.source.names.embed}.weight"])

    def head(self) -> Matrix:
        name = self.source.names.embed if self.spec.tied_embeddings else self.source.names.head
        return Matrix(self._weight([f"{name}.weight"]))

    def final_norm(self) -> Tensor:
        return self._norm(f"{self.source.names.final_norm}.weight")

    def outer(self) -> OuterTensors[Matrix]:
        """A tied head is the embedding's own tensor."""
        embed = self.embed()
        return OuterTensors(embed, self.final_norm(), Matrix(embed) if self.spec.tied_embeddings else self.head())

    def layer(self, i: int) -> LayerTensors[Matrix]:
        spec = self.spec
        return LayerTensors(
            attn_norm=self._norm(self._name(i, "attn_norm")),
            qkv=self._matrix(i, ("q", "k", "v"), spec.qkv_bias),
            o=self._matrix(i, ("o",), spec.o_bias),
            ffn_norm=self._norm(self._name(i, "ffn_norm")),
            gate_up=self._matrix(i, ("gate", "up"), spec.mlp_bias),
            down=self._matrix(i, ("down",), spec.mlp_bias),
            head_norms=self._head_norms(i) if spec.qk_norm else None,
            post_attn_norm=self._norm(self._name(i, "post_attn_norm")) if spec.post_norms else None,
            post_ffn_norm=self._norm(self._name(i, "post_ffn_norm")) if spec.post_norms else None,
        )

    def _head_norms(self, i: int) -> HeadNorms:
        return HeadNorms(self._norm(self._name(i, "q_norm")), self._norm(self._name(i, "k_norm")), self.spec.norm_eps)

    def _matrix(self, layer: int, parts: tuple[str, ...], has_bias: bool) -> Matrix:
        """One product of the parts' rows, one below the other."""
        weight = self._weight([self._name(layer, part) for part in parts], parts)
        bias = self._weight([self._name(layer, part, "bias") for part in parts], parts) if has_bias else None
        return Matrix(weight, bias)

    def _weight(self, names: list[str], parts: tuple[str, ...] = ()) -> Tensor:
        """Tensors one below the other, in ``dtype``; of another dtype only one chunk is ever held."""
        file_names = [self._file_names[name] for name in names]
        shapes = [self.source.shapes[name] for name in file_names]
        n_rows = [shape[0] for shape in shapes]
        whole = torch.empty((sum(n_rows), *shapes[0][1:]), dtype=self.dtype)
        for i, (name, rows) in enumerate(zip(file_names, torch.split(whole, n_rows), strict=True)):
            self.source.read_into(name, rows)
            if self.source.names.interleaved_rope and parts and parts[i] in ("q", "k"):
                rows.copy_(halves_from_pairs(rows, self.spec.head_dim))
        return whole

    def _norm(self, name: str) -> Tensor:
        """A norm's float32 weight, as it is multiplied."""
        file_name = self._file_names[name]
        out = torch.empty(self.source.shapes[file_name], dtype=torch.float32)
        self.source.read_into(file_name, out)
        return out + self.source.names.norm_offset if self.source.names.norm_offset else out


def halves_from_pairs(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of each head from rotation-pair order to half-split order.

    A head's rows (a0 b0 a1 b1 ...), where a_i and b_i rotate together, become (a0 a1 ... b0 b1 ...).
    """
    n_heads = rows.shape[0] // head_dim
    return rows.reshape(n_heads, head_dim // 2, 2, -1).transpose(1, 2).reshape(rows.shape)
