"""Weights of a Hugging Face folder: config.json and safetensors, whole or sharded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
from safetensors import SafetensorError
from torch import Tensor

from headwater.errors import ModelError
from headwater.model.families.registry import family_of_hf
from headwater.model.settings import Settings

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = ("F32", "F16", "BF16", "F64")


class SafetensorsWeights:
    """A WeightSource over a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        config_file = path / "config.json"
        ggufs = sorted(file.name for file in path.glob("*.gguf"))
        if ggufs and not config_file.exists():
            raise ModelError(f"{path}: no config.json here; to use a GGUF file name it: {path / ggufs[0]}")
        self._config = Settings(read_json(config_file), str(config_file))
        self.family = family_of_hf(self._config)
        self.names = self.family.hf_names
        weight_files = self._weight_files()
        self.files = (config_file, *weight_files)
        self._handles: dict[str, Any] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        for file in weight_files:
            for name, (shape, dtype, handle) in open_shard(file).items():
                if name in shapes:
                    raise ModelError(f"{file}: tensor {name!r} is in another file of {path} too")
                shapes[name], self._dtypes[name], self._handles[name] = shape, dtype, handle
        self.shapes: Mapping[str, tuple[int, ...]] = shapes
        self.spec = self.family.read_hf(self._config, shapes)

    def _weight_files(self) -> tuple[Path, ...]:
        """The whole file, or the shards that the index names, in order of name."""
        if (self.path / WHOLE).exists():
            return (self.path / WHOLE,)
        index_file = self.path / INDEX
        if not index_file.exists():
            found = sorted(p.name for p in self.path.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".safetensors"))
            hint = f"; found {', '.join(found)}, which are not read" if found else ""
            raise ModelError(f"{self.path}: no {WHOLE} and no {INDEX}{hint}")
        weight_map = Settings(read_json(index_file), str(index_file)).section("weight_map")
        if weight_map is None:
            raise ModelError(f"{index_file}: weight_map is missing")
        shards = sorted({weight_map.text(name) for name in weight_map.values})
        for shard in shards:
            if Path(shard).name != shard:
                raise ModelError(f"{index_file}: {shard!r} is not a plain file name")
            if not (self.path / shard).exists():
                raise ModelError(f"{self.path}: shard {shard!r} is missing, {INDEX} names it")
        return tuple(self.path / shard for shard in shards)

    def check_readable(self, name: str) -> None:
        if self._dtypes[name] not in DTYPES:
            raise ModelError(
                f"{self.path}: tensor {name!r} is of type {self._dtypes[name]}; readable are {', '.join(DTYPES)}"
            )

    def read_into(self, name: str, out: Tensor) -> None:
        self.check_readable(name)
        out.copy_(self._handles[name].get_tensor(name))


def open_shard(file: Path) -> dict[str, tuple[tuple[int, ...], str, Any]]:
    """Name -> (shape, dtype, handle) of one memory-mapped safetensors file."""
    try:
        handle: Any = safetensors.safe_open(file, framework="pt")
        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (it is not a mapping)
        return {name: (tuple(part.get_shape()), part.get_dtype(), handle) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: not a complete safetensors file: {error}") from error


def read_json(file: Path) -> dict[str, object]:
    """A JSON object; ModelError names the file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{file} is missing") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds {type(value).__name__}, an object is needed")
    return value
