from __future__ import annotations

import gc
import mmap
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from headwater.kernels.pages import HUGE_PAGE, LINE, Arena, huge_tensor
from tests.memory import mapped_bytes, resident_bytes

ONLY_LINUX = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="only Linux has huge pages to ask for")


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 1 << 20), (HUGE_PAGE + 1,)])
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32])
def test_tensor_is_zeros_that_can_be_written(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = huge_tensor(shape, dtype)
    assert torch.equal(tensor, torch.zeros(shape, dtype=dtype))
    assert torch.equal(tensor.fill_(3), torch.full(shape, 3, dtype=dtype))


@ONLY_LINUX
def test_large_tensor_begins_on_a_huge_page_and_asks_for_them() -> None:
    tensor = huge_tensor((5 * HUGE_PAGE + 100,), torch.uint8)
    assert tensor.data_ptr() % HUGE_PAGE == 0
    maps = Path("/proc/self/smaps").read_text().split("VmFlags:")
    start = f"{tensor.data_ptr():x}-"
    assert any(start in before and " hg" in after.split("\n")[0] for before, after in pairwise(maps))


@ONLY_LINUX
def test_memory_costs_nothing_until_touched_and_goes_with_its_last_tensor() -> None:
    size = 512 * HUGE_PAGE
    most = size - size // 8  # earlier tests' memory may go meanwhile
    gc.collect()
    before, resident = mapped_bytes(), resident_bytes()
    tensor = huge_tensor((512, HUGE_PAGE), torch.uint8)
    assert mapped_bytes() - before >= most
    assert resident_bytes() - resident < size // 4
    part = tensor[3:5].view(torch.float32)
    del tensor
    gc.collect()
    part.fill_(1.0)  # still there
    assert mapped_bytes() - before >= most
    del part
    gc.collect()
    assert mapped_bytes() - before < size // 4


def test_no_memory_is_a_runtime_error() -> None:
    with pytest.raises(RuntimeError, match="memory"):
        huge_tensor((1 << 55,), torch.uint8)


def test_systems_without_huge_pages_get_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    tensor = huge_tensor((3, HUGE_PAGE), torch.uint8)
    assert tensor.shape == (3, HUGE_PAGE)
    assert not tensor.any()


def test_pieces_of_an_arena_are_zeros_and_never_overlap() -> None:
    arena = Arena(1 << 20)
    shapes = [(3, 5), (7,), (0, 4), (1 << 19,), (1 << 18,), (1 << 22,), (100, 100), ()]
    pieces = [arena.take(shape, torch.float32) for shape in shapes]
    for number, (piece, shape) in enumerate(zip(pieces, shapes, strict=True)):
        assert piece.shape == shape
        assert piece.data_ptr() % LINE == 0 or piece.numel() == 0
        assert not piece.any()
        piece.fill_(number + 1)
    for number, piece in enumerate(pieces):
        assert (piece == number + 1).all()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_small_pieces_of_an_arena_share_pages() -> None:
    arena = Arena()
    resident = resident_bytes()
    pieces = [arena.take((100_000,), torch.uint8).fill_(1) for _ in range(100)]
    assert resident_bytes() - resident < 100 * 100_000 + 2 * HUGE_PAGE
    assert len(pieces) == 100
