"""From files to a Model: check everything, then dequantise, fuse, quantise if asked to, and pack layer by layer."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import xxhash

from headwater.config import default_cache_dir
from headwater.errors import ConfigError, ModelError
from headwater.kernels.ops import Linear, Ops
from headwater.model.assemble import Assembler, Pack
from headwater.model.calibrate import random_sequences
from headwater.model.decoder import Model
from headwater.model.digest import weights_digest
from headwater.model.quantize import RECIPE, Int8Matrix, Quantizer
from headwater.model.quantized_file import QuantizedFile
from headwater.model.spec import ModelSpec
from headwater.model.tensors import Matrix, OuterTensors, TensorReader
from headwater.model.weights.open import open_weights
from headwater.types import Progress, silent

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
    quantization: str = "none",
    sample: Callable[[int], Sequence[Sequence[int]]] | None = None,
) -> Model:
    """Load the model at ``path`` into ops' compute dtype, all in the calling thread.

    Give ``max_positions`` where the engine never goes further than that: rotary tables are made no
    longer. ``quantization`` is one of config.QUANTIZATIONS; int8 weights are kept in ``cache_dir`` once they are made.
    They are made by what the model does with sequences of token ids: those that ``sample`` gives for a vocabulary's
    size, else random ones.
    ModelError, before anything is loaded, if a tensor is missing, unknown, unreadable or of the wrong shape.
    """
    source = open_weights(path)
    spec = source.spec
    problem = spec.impossible()
    if problem is not None:
        raise ModelError(f"{path}: {problem}")
    reader = TensorReader(source, ops.dtype if quantization == "none" else torch.float32)
    reader.check()
    cache_dir = cache_dir or default_cache_dir()
    digest = weights_digest(source.files, cache_dir, lambda fraction: progress("hashing weights", fraction))
    assembler = Assembler(spec, ops, min(max_positions or spec.max_positions, spec.max_positions))
    if quantization == "none":
        layers = (reader.layer(i) for i in range(spec.n_layers))
        return assembler.model(reader.outer(), layers, _packs_floats(ops), digest, progress)
    quantizer = Quantizer(spec, ops, quantization)
    sequences = ([] if sample is None else sample(spec.vocab_size)) or random_sequences(spec)
    kept = _kept(cache_dir, digest, quantization, spec, ops.dtype, sequences)
    made = kept.read()
    if made is None:
        made = quantizer.model(reader, sequences, progress)
        if kept.write(made):
            made = kept.read() or made  # memory-mapped, as at every later start
    # Norms are copied, or a page of the file would be mapped for each. The embedding stays in the file: only those of
    # its pages come into memory whose rows are looked up.
    outer = OuterTensors(made.outer.embed, made.outer.final_norm.clone(), made.outer.head)
    made_layers = (layer.with_own_norms() for layer in made.layers)
    return assembler.model(outer, made_layers, _packs_int8(ops), digest, progress)


def _kept(
    cache_dir: Path, digest: bytes, scheme: str, spec: ModelSpec, dtype: torch.dtype, sequences: Sequence[Sequence[int]]
) -> QuantizedFile:
    """Where int8 weights of these files are kept, made by what the model does with ``sequences``; the embedding among
    them is in ``dtype``."""
    embed = str(dtype).removeprefix("torch.")
    read = xxhash.xxh3_128_hexdigest(json.dumps(sequences).encode())
    identity = {"recipe": str(RECIPE), "weights": digest.hex(), "scheme": scheme, "embed": embed, "read": read}
    name = f"{digest.hex()[:32]}-{scheme}-{embed}-{read[:8]}.safetensors"
    return QuantizedFile(cache_dir / "quantized" / name, identity, spec)


def _packs_floats(ops: Ops) -> Pack[Matrix]:
    def pack(matrix: Matrix, out_dtype: torch.dtype | None) -> Linear:
        return ops.pack_linear(matrix.weight, matrix.bias, out_dtype=out_dtype)

    return pack


def _packs_int8(ops: Ops) -> Pack[Int8Matrix]:
    def pack(matrix: Int8Matrix, out_dtype: torch.dtype | None) -> Linear:
        return ops.pack_int8(matrix.weight, matrix.bias, out_dtype=out_dtype)

    return pack
