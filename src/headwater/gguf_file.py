"""A GGUF file, memory-mapped: metadata and where each tensor's bytes lie. No dequantising here.

Source: the GGUF specification, version 3 (docs/gguf.md of ggml-org/ggml). The reader of the ``gguf``
package makes a NumPy object per token string and needs 2 s for a vocabulary of 49,152 and 12 s for one
of 262,144; this one walks the lengths only (0.1 s) and decodes strings when asked.

Every offset and count in the file is checked against its end before it is used, so that a truncated or
hostile file is a ModelError and not a crash.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import cast

import numpy as np
import numpy.typing as npt

from headwater.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4

STRING, ARRAY = 8, 9
SCALARS: Mapping[int, str] = MappingProxyType(
    {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
)
"""Scalar value types of the specification, as struct formats (little endian)."""


class StringArray:
    """An array of strings in the mapped file, decoded on request."""

    __slots__ = ("_data", "_spans")

    def __init__(self, data: mmap.mmap, spans: list[tuple[int, int]]) -> None:
        self._data = data
        self._spans = spans

    def __len__(self) -> int:
        return len(self._spans)

    def raw(self) -> list[bytes]:
        """Every string's bytes."""
        data = self._data
        return [data[start:end] for start, end in self._spans]

    def strings(self) -> list[str]:
        """Every string; bytes that are not UTF-8 become the replacement character."""
        return [raw.decode("utf-8", errors="replace") for raw in self.raw()]


Value = bool | int | float | str | StringArray | npt.NDArray[np.generic] | tuple[object, ...]
"""A metadata value: a scalar, a string, an array of strings or of numbers, or (rarely) an array of arrays."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. ``shape`` is in PyTorch's order (rows first): the file's order reversed.

    ``type_id`` is the number of the GGML type. ``offset`` counts bytes from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


class _Cursor:
    """Reads forward through the mapped file and refuses to leave it."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.at = 0

    def take(self, n_bytes: int, what: str) -> int:
        """Move past ``n_bytes`` bytes; returns where they start."""
        start = self.at
        if n_bytes > len(self.data) - start:
            raise ModelError(
                f"{self.path}: the file ends inside {what} ({n_bytes} bytes needed at byte {start}, the file has "
                f"{len(self.data)}): truncated or not a GGUF file"
            )
        self.at = start + n_bytes
        return start

    def number(self, fmt: str, what: str) -> int:
        value = struct.unpack_from(fmt, self.data, self.take(struct.calcsize(fmt), what))[0]
        return int(value)

    def string(self, what: str) -> str:
        n_bytes = self.number("<Q", what)
        start = self.take(n_bytes, what)
        try:
            return self.data[start : start + n_bytes].decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path}: {what} is not UTF-8: {error}") from error

    def value(self, type_id: int, what: str, depth: int = 0) -> Value:
        if type_id in SCALARS:
            fmt = SCALARS[type_id]
            scalar = struct.unpack_from(fmt, self.data, self.take(struct.calcsize(fmt), what))[0]
            return cast("bool | int | float", scalar)
        if type_id == STRING:
            return self.string(what)
        if type_id != ARRAY or depth > 2:
            raise ModelError(f"{self.path}: {what} has value type {type_id}, unknown to the GGUF specification")
        element, n_elements = self.number("<I", what), self.number("<Q", what)
        if element in SCALARS:
            dtype = np.dtype(SCALARS[element])
            start = self.take(n_elements * dtype.itemsize, what)
            numbers: npt.NDArray[np.generic] = np.frombuffer(self.data, dtype, n_elements, start).copy()
            return numbers
        if element == STRING:
            return StringArray(self.data, self.spans(n_elements, what))
        # Each element needs at least 12 bytes (type and count), so a huge count is refused before the loop.
        if n_elements > len(self.data) // 12:
            self.take(n_elements * 12, what)
        return tuple(self.value(element, what, depth + 1) for _ in range(n_elements))

    def spans(self, n_strings: int, what: str) -> list[tuple[int, int]]:
        """[start, end) of each string of an array, walking the lengths only."""
        if n_strings > len(self.data) // 8:
            self.take(n_strings * 8, what)
        unpack, data, size, at = struct.Struct("<Q").unpack_from, self.data, len(self.data), self.at
        spans: list[tuple[int, int]] = []
        append = spans.append
        for _ in range(n_strings):
            start = at + 8
            at = start + unpack(data, at)[0] if start <= size else size + 1
            if at > size:
                raise ModelError(f"{self.path}: the file ends inside {what}: truncated or not a GGUF file")
            append((start, at))
        self.at = at
        return spans


class GgufFile:
    """One memory-mapped GGUF file.

    ``metadata`` maps keys to values as in the specification. ``tensors`` maps names to TensorInfo.
    Raises ModelError: not a GGUF file, a version or byte order that is not understood, truncated.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelError(f"{path}: cannot be read: {error}") from error
        cursor = _Cursor(self._map, path)
        if self._map[: len(MAGIC)] != MAGIC:
            raise ModelError(f"{path}: not a GGUF file (it starts with {self._map[:4]!r}, not {MAGIC!r})")
        cursor.take(len(MAGIC), "the magic number")
        version = cursor.number("<I", "the version")
        if version not in VERSIONS:
            raise ModelError(f"{path}: GGUF version {version} (or big-endian) is not supported; versions 2 and 3 are")
        n_tensors, n_values = cursor.number("<Q", "the tensor count"), cursor.number("<Q", "the metadata count")
        metadata: dict[str, Value] = {}
        for i in range(n_values):
            key = cursor.string(f"the name of metadata entry {i}")
            metadata[key] = cursor.value(cursor.number("<I", f"metadata {key!r}"), f"metadata {key!r}")
        self.metadata: Mapping[str, Value] = MappingProxyType(metadata)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(self._tensors(cursor, n_tensors))

    def _tensors(self, cursor: _Cursor, n_tensors: int) -> dict[str, TensorInfo]:
        found: list[tuple[str, tuple[int, ...], int, int]] = []
        for i in range(n_tensors):
            name = cursor.string(f"the name of tensor {i}")
            n_dims = cursor.number("<I", f"tensor {name!r}")
            if n_dims > MAX_DIMS:
                raise ModelError(f"{self.path}: tensor {name!r} has {n_dims} dimensions, more than {MAX_DIMS}")
            dims = [cursor.number("<Q", f"tensor {name!r}") for _ in range(n_dims)]
            type_id = cursor.number("<I", f"tensor {name!r}")
            found.append((name, tuple(reversed(dims)), type_id, cursor.number("<Q", f"tensor {name!r}")))
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{self.path}: general.alignment is {alignment!r}, not a positive integer")
        data_start = -(-cursor.at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, type_id, offset in found:
            if name in tensors:
                raise ModelError(f"{self.path}: tensor {name!r} occurs twice")
            tensors[name] = TensorInfo(name, shape, type_id, data_start + offset)
        return tensors

    def bytes_of(self, info: TensorInfo, n_bytes: int) -> npt.NDArray[np.uint8]:
        """The tensor's bytes in the mapping, read-only, not copied."""
        if info.offset + n_bytes > len(self._map):
            raise ModelError(
                f"{self.path}: tensor {info.name!r} needs bytes {info.offset} to {info.offset + n_bytes}, the file "
                f"has {len(self._map)}: truncated"
            )
        return np.frombuffer(self._map, dtype=np.uint8, count=n_bytes, offset=info.offset)
