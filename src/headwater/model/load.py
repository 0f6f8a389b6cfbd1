"""From files to a Model: check everything, then dequantise, fuse and pack tensor by tensor."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from headwater.errors import ConfigError, ModelError
from headwater.kernels.ops import HeadNorms, Linear, Ops
from headwater.model.decoder import Model, OuterWeights
from headwater.model.digest import weights_digest
from headwater.model.layers import DecoderLayer, LayerWeights, rope_table
from headwater.model.progress import Progress, silent
from headwater.model.pull import default_cache_dir
from headwater.model.spec import ModelSpec
from headwater.model.weights.open import open_weights
from headwater.model.weights.source import WeightSource

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def cpu_has_bf16() -> bool:
    """Does this CPU compute in bf16 (AVX512_BF16, AMX, ARM's bf16)? Emulation in float32 does not count."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        # On ARM oneDNN says yes only where the instructions are; on x86 AVX512 without bf16 is enough for it.
        return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def resolve_dtype(name: str) -> torch.dtype:
    """The compute dtype for "auto", "bfloat16" or "float32". Auto is bf16 where the CPU computes in it."""
    if name == "auto":
        return torch.bfloat16 if cpu_has_bf16() else torch.float32
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}; it must be auto, {' or '.join(DTYPES)}")
    return DTYPES[name]


def load_model(
    path: Path,
    ops: Ops,
    progress: Progress = silent,
    *,
    cache_dir: Path | None = None,
    max_positions: int | None = None,
) -> Model:
    """Load the model at ``path`` into ops' compute dtype, all in the calling thread.

    Give ``max_positions`` where the engine never goes further than that: rotary tables are made no
    longer. ModelError, before anything is loaded, if a tensor is missing, unknown, unreadable or of the
    wrong shape.
    """
    source = open_weights(path)
    problem = source.spec.impossible()
    if problem is not None:
        raise ModelError(f"{path}: {problem}")
    loader = _Loader(source, ops)
    loader.check()
    digest = weights_digest(
        source.files, cache_dir or default_cache_dir(), lambda fraction: progress("hashing weights", fraction)
    )
    return loader.model(digest, progress, min(max_positions or source.spec.max_positions, source.spec.max_positions))


class _Loader:
    """Knows which tensors a spec needs, of which shapes, and makes layers of them."""

    def __init__(self, source: WeightSource, ops: Ops) -> None:
        self.source = source
        self.spec: ModelSpec = source.spec
        self.ops = ops
        self._file_names: dict[str, str] = {}
        """Our spelling of a tensor's name -> the file's."""
        for name in source.shapes:
            ours = name
            for other, beginning in source.names.aliases:
                if name.startswith(other):
                    ours = beginning + name.removeprefix(other)
            self._file_names[ours] = name

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
                yield self.name(i, part), (size,)
            for part, (n_out, n_in, has_bias) in linears.items():
                yield self.name(i, part), (n_out, n_in)
                if has_bias:
                    yield self.name(i, part, "bias"), (n_out,)

    def name(self, layer: int, part: str, kind: str = "weight") -> str:
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

    def model(self, digest: bytes, progress: Progress, max_positions: int) -> Model:
        spec, names, ops = self.spec, self.source.names, self.ops
        tables = {rope: rope_table(rope, spec.head_dim, max_positions) for rope in dict.fromkeys(spec.layer_ropes)}
        embed = self.weight([f"{names.embed}.weight"])
        head = ops.pack_linear(
            embed if spec.tied_embeddings else self.weight([f"{names.head}.weight"]), out_dtype=torch.float32
        )
        layers = []
        for i in range(spec.n_layers):
            progress("loading weights", i / spec.n_layers)
            layers.append(DecoderLayer(spec, i, self.layer(i), tables[spec.layer_ropes[i]], ops))
        progress("loading weights", 1.0)
        outer = OuterWeights(embed, self.norm(f"{names.final_norm}.weight"), head)
        return Model(spec, ops, outer, layers, digest)

    def layer(self, i: int) -> LayerWeights:
        spec = self.spec
        return LayerWeights(
            attn_norm=self.norm(self.name(i, "attn_norm")),
            qkv=self.linear(i, ("q", "k", "v"), spec.qkv_bias),
            o=self.linear(i, ("o",), spec.o_bias),
            ffn_norm=self.norm(self.name(i, "ffn_norm")),
            gate_up=self.linear(i, ("gate", "up"), spec.mlp_bias),
            down=self.linear(i, ("down",), spec.mlp_bias),
            head_norms=self.head_norms(i) if spec.qk_norm else None,
            post_attn_norm=self.norm(self.name(i, "post_attn_norm")) if spec.post_norms else None,
            post_ffn_norm=self.norm(self.name(i, "post_ffn_norm")) if spec.post_norms else None,
        )

    def head_norms(self, i: int) -> HeadNorms:
        return HeadNorms(self.norm(self.name(i, "q_norm")), self.norm(self.name(i, "k_norm")), self.spec.norm_eps)

    def linear(self, layer: int, parts: tuple[str, ...], has_bias: bool) -> Linear:
        """One packed product of the parts' rows, one below the other."""
        weight = self.weight([self.name(layer, part) for part in parts], parts)
        bias = self.weight([self.name(layer, part, "bias") for part in parts], parts) if has_bias else None
        return self.ops.pack_linear(weight, bias)

    def weight(self, names: list[str], parts: tuple[str, ...] = ()) -> Tensor:
        """Tensors one below the other, in the compute dtype; only one chunk is ever held in float32."""
        file_names = [self._file_names[name] for name in names]
        shapes = [self.source.shapes[name] for name in file_names]
        n_rows = [shape[0] for shape in shapes]
        whole = torch.empty((sum(n_rows), *shapes[0][1:]), dtype=self.ops.dtype)
        for i, (name, rows) in enumerate(zip(file_names, torch.split(whole, n_rows), strict=True)):
            self.source.read_into(name, rows)
            if self.source.names.interleaved_rope and parts and parts[i] in ("q", "k"):
                rows.copy_(halves_from_pairs(rows, self.spec.head_dim))
        return whole

    def norm(self, name: str) -> Tensor:
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
