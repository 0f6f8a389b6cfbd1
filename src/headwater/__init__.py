"""Headwater: an LLM serving engine whose heart is automatic prefix caching, with every hit proven.

    from headwater import LLM, SamplingParams

Names are loaded when first used, so that ``import headwater.cache`` needs no tensor library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headwater.engine.llm import LLM, CompletionOutput, RequestOutput
    from headwater.errors import (
        BadRequest,
        CacheError,
        ConfigError,
        EngineDead,
        EngineError,
        HeadwaterError,
        ModelError,
        NeverFits,
        NoChatTemplate,
        Overloaded,
    )
    from headwater.types import SamplingParams

    __version__: str

__all__ = [
    "LLM",
    "BadRequest",
    "CacheError",
    "CompletionOutput",
    "ConfigError",
    "EngineDead",
    "EngineError",
    "HeadwaterError",
    "ModelError",
    "NeverFits",
    "NoChatTemplate",
    "Overloaded",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

_HOMES = {
    "headwater.engine.llm": ("LLM", "CompletionOutput", "RequestOutput"),
    "headwater.types": ("SamplingParams",),
    "headwater.errors": (
        "BadRequest",
        "CacheError",
        "ConfigError",
        "EngineDead",
        "EngineError",
        "HeadwaterError",
        "ModelError",
        "NeverFits",
        "NoChatTemplate",
        "Overloaded",
    ),
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("headwater")
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'headwater' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
