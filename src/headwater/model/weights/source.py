"""Where weights come from: one interface over the file formats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor

from headwater.model.families.family import Family, TensorNames
from headwater.model.spec import ModelSpec


class WeightSource(Protocol):
    """An opened model: what it is, and its tensors, memory-mapped."""

    path: Path
    files: tuple[Path, ...]
    """All files whose content decides the numbers: weights and configuration."""
    family: Family
    names: TensorNames
    spec: ModelSpec
    shapes: Mapping[str, tuple[int, ...]]
    """Every tensor of the files, rows first."""

    def check_readable(self, name: str) -> None:
        """ModelError, naming the tensor, if it lies outside its file or is of a type that cannot be read."""
        ...

    def read_into(self, name: str, out: Tensor) -> None:
        """Dequantise or convert into ``out``, of the tensor's shape, float32 or bfloat16. ModelError as above."""
        ...
