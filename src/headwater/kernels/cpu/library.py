"""A loaded library of native kernels."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch  # first: the kernels then find PyTorch's OpenMP runtime loaded, and share its threads

from headwater.errors import KernelError
from headwater.kernels.cpu.build import build
from headwater.kernels.cpu.variants import best_variant, obstacle
from headwater.types import Progress, silent

SUFFIX = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
"""How the C functions of a compute dtype end."""


class Library:
    """The native kernels of one variant. A call releases the interpreter lock.

    Raises KernelError if this machine cannot run the variant or the file cannot be loaded.
    """

    def __init__(self, variant: str, path: Path) -> None:
        why_not = obstacle(variant)  # for AMX this also asks the operating system to allow it
        if why_not is not None:
            raise KernelError(f"the kernels {variant!r} do not run here: {why_not}")
        self.variant = variant
        self.path = path
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelError(f"{path}: the kernels cannot be loaded: {error}") from error
        with contextlib.suppress(OSError):  # only tells build.py that somebody uses it
            os.utime(path)

    def bind(self, name: str, restype: Any, argtypes: Sequence[Any]) -> Callable[..., Any]:
        """The C function ``name``, with its ctypes result and arguments. KernelError if there is none."""
        try:
            function = self._library[name]  # one of its own: two users may bind it with different types
        except AttributeError as error:
            raise KernelError(f"{self.path}: no function {name}") from error
        function.restype = restype
        function.argtypes = list(argtypes)
        return function


def load_library(
    folder: Path, variant: str | None = None, progress: Progress = silent, *, compiler: str | None = None
) -> Library:
    """Build (unless built) and load a variant; None: the best one that runs here. Raises KernelError."""
    name = best_variant() if variant is None else variant
    why_not = obstacle(name)
    if why_not is not None:
        raise KernelError(f"the kernels {name!r} do not run here: {why_not}")
    return Library(name, build(name, folder, progress, compiler=compiler))
