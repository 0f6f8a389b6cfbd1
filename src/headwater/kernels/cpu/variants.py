"""The builds of the native kernels, one per kind of CPU, and which of them this CPU and this operating system run."""

from __future__ import annotations

import ctypes
import platform
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from headwater.errors import KernelError

V3 = ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
V4 = (*V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
BF16 = (*V4, "avx512_bf16", "avx512_vnni")


@dataclass(frozen=True, slots=True)
class Variant:
    """One build: ``flags`` for the compiler, and the features of /proc/cpuinfo that its code needs."""

    name: str
    flags: tuple[str, ...]
    needs: tuple[str, ...]


VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant(
            "amx",
            ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
            (*BF16, "amx_tile", "amx_bf16", "amx_int8"),
        ),
        Variant("avx512bf16", ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"), BF16),
        Variant("avx512", ("-march=x86-64-v4",), V4),
        Variant("avx2", ("-march=x86-64-v3",), V3),
        Variant("portable", (), ()),  # what every CPU of the kind has: SSE2, NEON
    )
}
"""Best first."""

COMPUTES_IN_BF16 = ("amx", "avx512bf16")
"""Variants whose products multiply bf16 in hardware."""

ARCH_PRCTL = 158
ARCH_REQ_XCOMP_PERM = 0x1023
XFEATURE_XTILEDATA = 18


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """What the kernel says that the CPU has *and* that programs may use; empty where there is no such file."""
    try:
        text = cpuinfo.read_text(errors="replace")
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def is_x86_64() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def allow_amx() -> bool:
    """Ask Linux to let this process use AMX tiles (Documentation/arch/x86/xstate.rst); True if it does.

    Until a process has asked, its first tile instruction ends it. Asking again does no harm.
    """
    if not (sys.platform.startswith("linux") and is_x86_64()):
        return False
    system = ctypes.CDLL(None)
    return bool(system.syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0)


def obstacle(name: str, features: Iterable[str] | None = None) -> str | None:
    """Why a variant cannot run on this machine, in a few words; None if it can. KernelError for an unknown name."""
    if name not in VARIANTS:
        raise KernelError(f"no kernels are called {name!r}: there are {', '.join(VARIANTS)}")
    variant = VARIANTS[name]
    if variant.needs and not is_x86_64():
        return f"this CPU is {platform.machine()}"
    missing = sorted(set(variant.needs) - set(cpu_features() if features is None else features))
    if missing:
        return f"this CPU has no {', '.join(missing)}"
    if "amx_tile" in variant.needs and not allow_amx():
        return "the operating system does not let programs use AMX"
    return None


def best_variant() -> str:
    """The first variant that runs here; the portable one always does."""
    return next(name for name in VARIANTS if obstacle(name) is None)
