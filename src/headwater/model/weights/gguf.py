"""Weights of a GGUF file. The ``gguf`` package knows the block formats and dequantises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quant_shape_to_byte_shape
from torch import Tensor

from headwater.errors import ModelError
from headwater.gguf_file import GgufFile, TensorInfo
from headwater.model.families.registry import family_of_gguf
from headwater.model.settings import Settings
from headwater.model.spec import ModelSpec, RopeSpec

CHUNK_ELEMENTS = 1 << 20
"""Elements dequantised at a time: their float32 copy stays in the processor's cache."""

ROPE_FREQS = "rope_freqs.weight"


class GgufWeights:
    """A WeightSource over one .gguf file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: tuple[Path, ...] = (path,)
        self._file = GgufFile(path)
        settings = Settings(self._file.metadata, str(path))
        if settings.integer("split.count", 1) > 1:
            raise settings.error(
                "split.count", "says that this is one of several parts: join them (gguf-split --merge)"
            )
        architecture = settings.text("general.architecture")
        self.family = family_of_gguf(architecture, str(path))
        self.names = self.family.gguf_names
        self.shapes: Mapping[str, tuple[int, ...]] = {name: info.shape for name, info in self._file.tensors.items()}
        spec = self.family.read_gguf(Settings(self._file.metadata, str(path), f"{architecture}."), self.shapes)
        self.spec: ModelSpec = self._with_rope_freqs(spec)

    def _with_rope_freqs(self, spec: ModelSpec) -> ModelSpec:
        """Llama 3.1's stretch comes as a tensor of divisors, one per rotated pair."""
        if ROPE_FREQS not in self.shapes:
            return spec
        expected = (spec.head_dim // 2,)
        if self.shapes[ROPE_FREQS] != expected:
            raise ModelError(
                f"{self.path}: tensor {ROPE_FREQS!r} has shape {self.shapes[ROPE_FREQS]}, {expected} is needed"
            )
        factors = torch.empty(expected, dtype=torch.float32)
        self.read_into(ROPE_FREQS, factors)
        if not bool((factors > 0).all()):
            raise ModelError(f"{self.path}: tensor {ROPE_FREQS!r} must hold positive divisors")
        if any(rope.linear_factor != 1.0 for rope in spec.layer_ropes):
            raise ModelError(f"{self.path}: tensor {ROPE_FREQS!r} and rope.scaling.type linear exclude each other")
        values = tuple(factors.tolist())
        ropes: dict[RopeSpec, RopeSpec] = {rope: replace(rope, freq_factors=values) for rope in spec.layer_ropes}
        return replace(spec, layer_ropes=tuple(ropes[rope] for rope in spec.layer_ropes))

    def check_readable(self, name: str) -> None:
        info = self._file.tensors[name]
        self._file.bytes_of(info, self._n_bytes(info))
        kind = self._kind(info)
        try:
            dequantize(np.zeros((1, quant_shape_to_byte_shape(info.shape[-1:], kind)[-1]), np.uint8), kind)
        except NotImplementedError as error:
            raise self._unsupported(info, kind.name) from error

    def read_into(self, name: str, out: Tensor) -> None:
        info = self._file.tensors[name]
        kind, n_columns = self._kind(info), info.shape[-1] if info.shape else 1
        data = self._file.bytes_of(info, self._n_bytes(info))
        rows = data.reshape(-1, quant_shape_to_byte_shape((n_columns,), kind)[-1])
        target = out.view(-1, n_columns)
        step = max(1, CHUNK_ELEMENTS // n_columns)
        for start in range(0, len(rows), step):
            try:
                values = dequantize(rows[start : start + step], kind)
            except NotImplementedError as error:
                raise self._unsupported(info, kind.name) from error
            # A copy where the type was float32 already: PyTorch warns of read-only memory.
            target[start : start + step].copy_(torch.from_numpy(np.require(values, np.float32, ["C", "W"])))

    def _kind(self, info: TensorInfo) -> gguf.GGMLQuantizationType:
        try:
            return gguf.GGMLQuantizationType(info.type_id)
        except ValueError as error:
            raise self._unsupported(info, f"number {info.type_id}") from error

    def _n_bytes(self, info: TensorInfo) -> int:
        """Size in the file; rows are whole numbers of blocks."""
        kind = self._kind(info)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if not info.shape or info.shape[-1] % block:
            raise ModelError(
                f"{self.path}: tensor {info.name!r} of shape {info.shape} cannot be of type {kind.name}, whose blocks "
                f"hold {block} elements"
            )
        n_elements = 1
        for size in info.shape:
            n_elements *= size
        return n_elements // block * block_bytes

    def _unsupported(self, info: TensorInfo, kind: str) -> ModelError:
        return ModelError(f"{self.path}: tensor {info.name!r} is of GGML type {kind}, which cannot be read here")
