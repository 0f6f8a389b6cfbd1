"""Quantised weights kept on disk, so that only the first start makes them: one safetensors file in the cache folder.

The file's metadata says what it was made of and how, and has a digest of every tensor: a damaged, half-written or
foreign file is told apart and made again. Written beside and renamed: it is there whole or not at all.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors
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
PRODUCTS = ("qkv", "o", "gate_up", "down")
NORMS = ("attn_norm", "ffn_norm", "post_attn_norm", "post_ffn_norm")


class QuantizedFile:
    """The file at ``path`` of the weights that ``identity`` names (what of, by which scheme and recipe)."""

    def __init__(self, path: Path, identity: Mapping[str, str], spec: ModelSpec) -> None:
        self.path = path
        self._identity = dict(identity)
        self._spec = spec

    def read(self) -> ModelTensors[Int8Matrix] | None:
        """The model, its tensors memory-mapped; None, with a line in the log, if the file is not what it should be, and
        None if there is none."""
        if not self.path.exists():
            return None
        try:
            with safetensors.safe_open(self.path, framework="pt") as handle:
                metadata = handle.metadata() or {}
                problem = self._problem(metadata)
                if problem is None:
                    tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (no mapping)
                    return _model(tensors, json.loads(metadata["hadamard"]), metadata["activations"], self._spec)
        except (SafetensorError, OSError, ValueError, KeyError) as error:
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
        temporary: Path | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
            os.close(descriptor)
            temporary = Path(name)
            save_file(tensors, temporary, metadata)
            with open(temporary, "rb") as written:
                os.fsync(written.fileno())
            os.replace(temporary, self.path)
        except (OSError, SafetensorError) as error:
            logger.warning(
                "%s: the int8 weights cannot be kept (%s): the next start makes them again", self.path, error
            )
            if temporary is not None:
                with suppress(OSError):
                    temporary.unlink()
            return False
        return True

    def _problem(self, metadata: Mapping[str, str]) -> str | None:
        """What is wrong with the file, as a phrase. Every byte of every tensor is read, but not kept in memory."""
        for key, value in self._identity.items():
            if metadata.get(key) != value:
                return f"{key} is {metadata.get(key)!r:.80}, expected {value!r}"
        digests = json.loads(metadata["digests"])
        with open(self.path, "rb") as file:
            header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            begin = file.tell()
            header.pop("__metadata__", None)
            if header.keys() != digests.keys():
                return "other tensors than were kept"
            for name, entry in header.items():
                first, end = entry["data_offsets"]
                file.seek(begin + first)
                described = f"{entry['dtype']} {entry['shape']}"
                if digests[name] != _digest(_chunks(file, end - first), described):
                    return f"tensor {name} has changed"
        return None


def _chunks(file: Any, n_bytes: int) -> Iterator[bytes]:
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


DTYPES = {"torch.int8": "I8", "torch.float32": "F32", "torch.bfloat16": "BF16"}
"""As safetensors writes them."""


def _digest_of(tensor: Tensor) -> str:
    import torch

    data = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return _digest([data], f"{DTYPES[str(tensor.dtype)]} {list(tensor.shape)}")


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


def _model(
    tensors: Mapping[str, Tensor], hadamard: Mapping[str, int], activations: Any, spec: ModelSpec
) -> ModelTensors[Int8Matrix]:
    """The tensors in their places. KeyError for one that is missing."""

    def product(name: str) -> Int8Matrix:
        values, scale = tensors[f"{name}.values"], tensors[f"{name}.scale"]
        return Int8Matrix(Int8Weight(values, scale, activations, hadamard[name]), tensors.get(f"{name}.bias"))

    def layer(at: str) -> LayerTensors[Int8Matrix]:
        norms = HeadNorms(tensors[f"{at}.q_norm"], tensors[f"{at}.k_norm"], spec.norm_eps) if spec.qk_norm else None
        return LayerTensors(
            attn_norm=tensors[f"{at}.attn_norm"],
            qkv=product(f"{at}.qkv"),
            o=product(f"{at}.o"),
            ffn_norm=tensors[f"{at}.ffn_norm"],
            gate_up=product(f"{at}.gate_up"),
            down=product(f"{at}.down"),
            head_norms=norms,
            post_attn_norm=tensors[f"{at}.post_attn_norm"] if spec.post_norms else None,
            post_ffn_norm=tensors[f"{at}.post_ffn_norm"] if spec.post_norms else None,
        )

    outer = OuterTensors(tensors["embed"], tensors["final_norm"], product("head"))
    return ModelTensors(outer, tuple(layer(f"layers.{i}") for i in range(spec.n_layers)))
