"""Which implementation of ``Ops`` serves on this machine."""

from __future__ import annotations

from pathlib import Path

import torch

from headwater.config import default_cache_dir
from headwater.errors import ConfigError, KernelError
from headwater.kernels.cpu.library import load_library
from headwater.kernels.fast import FastOps
from headwater.kernels.native import NativeOps
from headwater.kernels.ops import Ops
from headwater.kernels.torch_ref import TorchOps
from headwater.types import Progress, silent

PRICE = "PyTorch's kernels serve instead: decoding takes several times as long"


def make_ops(
    dtype: torch.dtype,
    *,
    kernels: str = "auto",
    numerics: str = "exact",
    folder: Path | None = None,
    compiler: str | None = None,
    progress: Progress = silent,
) -> Ops:
    """The operations for compute ``dtype``: ``kernels`` and ``numerics`` are of config.KERNELS and config.NUMERICS.

    Native kernels are compiled into ``folder`` (None: the user's cache folder) unless they are there, by ``compiler``
    (None: the first found). With "auto", PyTorch's take their place where that fails, and the notes say so;
    a variant asked for by name is given or refused with ConfigError.
    """
    ops = _exact(dtype, kernels, folder or default_cache_dir() / "kernels", compiler, progress)
    return FastOps(ops) if numerics == "fast" else ops


def _exact(dtype: torch.dtype, kernels: str, folder: Path, compiler: str | None, progress: Progress) -> Ops:
    if kernels == "torch":
        return TorchOps(dtype)
    try:
        library = load_library(folder, None if kernels == "auto" else kernels, progress, compiler=compiler)
    except KernelError as error:
        if kernels != "auto":
            raise ConfigError(f"kernels={kernels}: {error}") from error
        ops = TorchOps(dtype)
        ops.notes.append(f"no native kernels: {error}. {PRICE}")
        return ops
    return NativeOps(library, dtype)
