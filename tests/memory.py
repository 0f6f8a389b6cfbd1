"""How much memory this process has, as the system counts it (Linux)."""

from __future__ import annotations

import mmap
from pathlib import Path


def mapped_bytes() -> int:
    """Of address space."""
    return _pages(0)


def resident_bytes() -> int:
    return _pages(1)


def _pages(field: int) -> int:
    return int(Path("/proc/self/statm").read_text().split()[field]) * mmap.PAGESIZE
