"""Memory in huge pages, as tensors: what is streamed through at every step (weights, KV) reads twice as fast from it.

With 4 KiB pages a core's prefetchers stop at every page's end and its address cache is soon full; one 2 MiB page has
512 times the reach. Linux gives them to memory that is aligned to them and asks before it is first touched
(``madvise(2)``, MADV_HUGEPAGE); where a system has no such thing, the memory is ordinary.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
LINE = 64
"""Bytes of a cache line."""


def huge_tensor(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros on the CPU; a page of it costs memory when it is first touched, and all of it is given back
    with the last tensor that shares its storage. RuntimeError if there is no room for it."""
    size = prod(shape) * dtype.itemsize
    if size < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(tuple(shape), dtype=dtype)
    whole = -(-size // HUGE_PAGE) * HUGE_PAGE
    try:
        # one page more than needed: somewhere in it is a multiple of HUGE_PAGE to begin at
        pages = mmap.mmap(-1, whole + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise RuntimeError(f"no memory for a tensor of {size / 2**20:.0f} MiB: {error}") from error
    # the tensor holds the mapping, and the mapping is undone when nobody holds it
    start = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % HUGE_PAGE
    with suppress(OSError):  # a kernel built without huge pages: slower, and nothing else
        pages.madvise(mmap.MADV_HUGEPAGE, start, whole)
    return torch.frombuffer(pages, dtype=dtype, count=prod(shape), offset=start).view(tuple(shape))


class Arena:
    """Hands out memory for things that live as long as each other, from a few large huge-page tensors.

    A tensor of its own for each would round each up to whole huge pages: megabytes lost on every layer's every
    weight. Each piece begins on a cache line and keeps the tensor that it was cut from alive.
    """

    def __init__(self, chunk_bytes: int = 64 << 20) -> None:
        self._chunk_bytes = chunk_bytes
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros of that shape. RuntimeError if there is no room for them."""
        size = prod(shape) * dtype.itemsize
        if size > len(self._free):
            self._free = huge_tensor((max(size, self._chunk_bytes),), torch.uint8)  # what was left stays untouched
        piece = self._free[:size]
        self._free = self._free[-(-size // LINE) * LINE :]
        return piece.view(dtype).view(tuple(shape))
