"""The machine that a measurement was made on, for the report."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import version
from pathlib import Path


def describe() -> dict[str, object]:
    """What matters for a figure: processor, cores that may be used, memory, system, versions."""
    return {
        "cpu": _cpu(),
        "cores": _cores(),
        "memory_gib": _memory_gib(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "headwater": version("headwater"),
    }


def _cpu() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None  # no Linux
    return found[1] if found else platform.processor() or platform.machine()


def _cores() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None  # the system does not tell it this way
