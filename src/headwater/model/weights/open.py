"""Opening a model, whichever format it is in."""

from __future__ import annotations

from pathlib import Path

from headwater.errors import ModelError
from headwater.model.weights.gguf import GgufWeights
from headwater.model.weights.safetensors import SafetensorsWeights
from headwater.model.weights.source import WeightSource


def open_weights(path: Path) -> WeightSource:
    """A .gguf file or a Hugging Face folder. ModelError says what is wrong with it."""
    if path.is_dir():
        return SafetensorsWeights(path)
    if not path.exists():
        raise ModelError(f"{path}: no such file or folder")
    return GgufWeights(path)
