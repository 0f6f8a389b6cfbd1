"""Which OpenMP runtime PyTorch uses: the native kernels must use the same one.

Two runtimes are two pools of threads that wait for each other's cores; and ``torch.set_num_threads`` would
reach only one of them. The kernels are therefore linked against the very file that PyTorch has loaded.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch


class _SymbolInfo(ctypes.Structure):
    """Dl_info of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def torch_openmp() -> Path | None:
    """The file of PyTorch's OpenMP runtime; None if PyTorch was built without one."""
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        library = Path(torch.__file__).parent / "lib" / name
        if library.is_file():
            # Seen from this library, the name means what PyTorch itself calls.
            return _file_of(ctypes.CDLL(str(library)), "omp_get_max_threads")
    return _file_of(ctypes.CDLL(None), "omp_get_max_threads")


def _file_of(library: ctypes.CDLL, symbol: str) -> Path | None:
    """The file in which ``library`` finds a function."""
    try:
        function = getattr(library, symbol)
    except AttributeError:
        return None
    dladdr = ctypes.CDLL(None).dladdr
    dladdr.argtypes = (ctypes.c_void_p, ctypes.POINTER(_SymbolInfo))
    info = _SymbolInfo()
    if not dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(info)) or info.file is None:
        return None
    file: bytes = info.file
    return Path(file.decode()).resolve()
