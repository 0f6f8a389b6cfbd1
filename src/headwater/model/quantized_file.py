"""Quantised weights kept on disk, so that only the first start makes them: one safetensors file in the cache folder.

The file's metadata says what it was made of and how, and has a digest of every tensor and one of itself: a damaged,
half-written or foreign file is told apart and made again. Written beside and renamed: it is there whole or not at all.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from headwater.kernels.ops import HeadNorms, Int8Weight
from headwater.model.quantize import Int8Matrix, ModelTensors
from headwater.model.spec import ModelSpec
from headwater.model.tensors import LayerTensors, OuterTensors

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 22
MAX_HEADER_BYTES = 1 << 26
ABANDONED_S = 86_400.0
DTYPES = {"I8": torch.int8, "F32": torch.float32, "BF16": torch.bfloat16}
"""By their names in safetensors."""
OWN_DIGEST = "metadata digest"
"""The entry of the metadata that covers all the others."""
PRODUCTS = ("qkv", "o", "gate_up", "down")
NORMS = ("attn_norm", "ffn_norm", "post_attn_norm", "post_ffn_norm")


class QuantizedFile:
    """The file at ``path`` of the weights that ``identity`` names (what of, by which scheme and recipe)."""

    def __init__(self, path: Path, identity: Mapping[str, str], spec: ModelSpec) -> None:
        self.path = path
        self._identity = dict(identity)
        self._spec = spec

    def read(self) -> ModelTensors[Int8Matrix] | None:
        """The model, its tensors memory-mapped. None if there is no file, or, with a line in the log, if it is not what
        was kept there."""
        if not self.path.exists():
            return None
        try:
            with open(self.path, "rb") as file:
                header = _Header.of(file)
                problem = self._problem(file, header)
            if problem is None:
                return _model(_Mapped(self.path, header), self._spec)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            problem = f"{type(error).__name__}: {error}"
        logger.warning("%s is not what was kept there (%s): it is made again", self.path, problem)
        return None

    def write(self, model: ModelTensors[Int8Matrix]) -> bool:
        """Keep ``model``; False, with a line in the log, where that is not possible (it only saves time)."""
        tensors = dict(_named(model))
        products = dict(_products(model))
        metadata = {
            **self._identity,
            "hadamard": json.dumps({name: matrix.weight.hadamard for name, matrix in products.items()}),
            "activations": model.outer.head.weight.activations,
            "digests": json.dumps({name: _digest_of(tensor) for name, tensor in tensors.items()}),
        }
        metadata[OWN_DIGEST] = _digest_of_metadata(metadata)
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._remove_abandoned()
            save_file(tensors, temporary, metadata)
            with open(temporary, "rb") as written:
                os.fsync(written.fileno())
            os.replace(temporary, self.path)
        except (OSError, SafetensorError) as error:
            logger.warning(
                "%s: the int8 weights cannot be kept (%s): the next start makes them again", self.path, error
            )
            with suppress(OSError):
                temporary.unlink()
            return False
        return True

    def _remove_abandoned(self) -> None:
        """What a process that was killed while it wrote has left."""
        for file in self.path.parent.glob(f".{self.path.name}.*"):
            if time.time() - file.stat().st_mtime > ABANDONED_S:
                file.unlink(missing_ok=True)

    def _problem(self, file: BinaryIO, header: _Header) -> str | None:
        """What is wrong with the file, as a phrase. Every byte of every tensor is read, but not kept in memory."""
        for key, value in self._identity.items():
            if header.metadata.get(key) != value:
                return f"{key} is {header.metadata.get(key)!r:.80}, expected {value!r}"
        if header.metadata.get(OWN_DIGEST) != _digest_of_metadata(header.metadata):
            return "what it says of itself has changed"
        digests = json.loads(header.metadata["digests"])
        if header.entries.keys() != digests.keys():
            return "other tensors than were kept"
        for name, entry in header.entries.items():
            file.seek(entry.begin)
            if digests[name] != _digest(_chunks(file, entry.n_bytes), f"{entry.dtype} {list(entry.shape)}"):
                return f"tensor {name} has changed"
        return None


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor of the file; ``begin`` counts from the file's first byte."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class _Header:
    """A safetensors file's: its length in 8 bytes, then JSON."""

    metadata: Mapping[str, str]
    entries: Mapping[str, _Entry]

    @classmethod
    def of(cls, file: BinaryIO) -> _Header:
        """ValueError, KeyError or TypeError if it is none."""
        length = int.from_bytes(file.read(8), "little")
        parsed: dict[str, Any] = json.loads(file.read(min(length, MAX_HEADER_BYTES)))
        start = file.tell()
        metadata = parsed.pop("__metadata__", {})
        entries = {}
        for name, entry in parsed.items():
            first, end = entry["data_offsets"]
            entries[name] = _Entry(entry["dtype"], tuple(entry["shape"]), start + first, end - first)
        return cls(metadata, entries)


class _Mapped:
    """The tensors of a file, each mapped when it is asked for and unmapped when nobody holds it any more."""

    def __init__(self, path: Path, header: _Header) -> None:
        self._path = path
        self._entries = header.entries
        self.metadata = header.metadata

    def __getitem__(self, name: str) -> Tensor:
        """KeyError for a tensor that is not there."""
        entry = self._entries[name]
        # Mode c: pages are the file's own until somebody writes, which nobody does.
        data = np.memmap(self._path, np.uint8, "c", entry.begin, (entry.n_bytes,))
        return torch.from_numpy(data).view(DTYPES[entry.dtype]).view(entry.shape)

    def get(self, name: str) -> Tensor | None:
        return self[name] if name in self._entries else None


def _chunks(file: BinaryIO, n_bytes: int) -> Iterator[bytes]:
    while n_bytes > 0:
        chunk = file.read(min(CHUNK_BYTES, n_bytes))
        if not chunk:
            return  # the file is shorter than it says: the digest will not match
        yield chunk
        n_bytes -= len(chunk)


def _digest(chunks: Iterator[bytes] | list[Any], described: str) -> str:
    whole = xxhash.xxh3_128(described.encode())
    for chunk in chunks:
        whole.update(chunk)
    return whole.hexdigest()


def _digest_of_metadata(metadata: Mapping[str, str]) -> str:
    told = {key: value for key, value in metadata.items() if key != OWN_DIGEST}
    return xxhash.xxh3_128_hexdigest(json.dumps(told, sort_keys=True).encode())


def _digest_of(tensor: Tensor) -> str:
    names = {dtype: name for name, dtype in DTYPES.items()}
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return _digest([data], f"{names[tensor.dtype]} {list(tensor.shape)}")


# ---- names ----------------------------------------------------------------------------------------------


def _products(model: ModelTensors[Int8Matrix]) -> Iterator[tuple[str, Int8Matrix]]:
    yield "head", model.outer.head
    for i, layer in enumerate(model.layers):
        for part in PRODUCTS:
            yield f"layers.{i}.{part}", getattr(layer, part)


def _named(model: ModelTensors[Int8Matrix]) -> Iterator[tuple[str, Tensor]]:
    yield "embed", model.outer.embed
    yield "final_norm", model.outer.final_norm
    for name, matrix in _products(model):
        yield f"{name}.values", matrix.weight.values
        yield f"{name}.scale", matrix.weight.scale
        if matrix.bias is not None:
            yield f"{name}.bias", matrix.bias
    for i, layer in enumerate(model.layers):
        for part in NORMS:
            norm = getattr(layer, part)
            if norm is not None:
                yield f"layers.{i}.{part}", norm
        if layer.head_norms is not None:
            yield f"layers.{i}.q_norm", layer.head_norms.q
            yield f"layers.{i}.k_norm", layer.head_norms.k


def _model(tensors: _Mapped, spec: ModelSpec) -> ModelTensors[Int8Matrix]:
    """The tensors in their places. KeyError for one that is missing."""
    layers = _Layers(tensors, spec)
    for _ in layers:  # every one is there
        pass
    return ModelTensors(OuterTensors(tensors["embed"], tensors["final_norm"], layers.product("head")), layers)


class _Layers(Sequence[LayerTensors[Int8Matrix]]):
    """Layers, mapped anew each time that one is asked for: whoever goes through them holds one at a time."""

    def __init__(self, tensors: _Mapped, spec: ModelSpec) -> None:
        self._tensors = tensors
        self._spec = spec
        self._hadamard: dict[str, int] = json.loads(tensors.metadata["hadamard"])
        self._activations: Any = tensors.metadata["activations"]

    def __len__(self) -> int:
        return self._spec.n_layers

    def __getitem__(self, i: Any) -> Any:
        if not 0 <= i < len(self):
            raise IndexError(i)
        at, spec, tensors = f"layers.{i}", self._spec, self._tensors
        norms = HeadNorms(tensors[f"{at}.q_norm"], tensors[f"{at}.k_norm"], spec.norm_eps) if spec.qk_norm else None
        return LayerTensors(
            attn_norm=tensors[f"{at}.attn_norm"],
            qkv=self.product(f"{at}.qkv"),
            o=self.product(f"{at}.o"),
            ffn_norm=tensors[f"{at}.ffn_norm"],
            gate_up=self.product(f"{at}.gate_up"),
            down=self.product(f"{at}.down"),
            head_norms=norms,
            post_attn_norm=tensors[f"{at}.post_attn_norm"] if spec.post_norms else None,
            post_ffn_norm=tensors[f"{at}.post_ffn_norm"] if spec.post_norms else None,
        )

    def product(self, name: str) -> Int8Matrix:
        tensors = self._tensors
        values, scale = tensors[f"{name}.values"], tensors[f"{name}.scale"]
        weight = Int8Weight(values, scale, self._activations, self._hadamard[name])
        return Int8Matrix(weight, tensors.get(f"{name}.bias"))
