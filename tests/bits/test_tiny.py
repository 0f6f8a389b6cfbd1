"""The whole matrix on tiny models of every family."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bits.matrix import CELLS, Cell, Matrix, Tally, Workload
from tests.bits.numbers import NATIVE, TORCH, Numbers
from tests.bits.pairwise import pairwise
from tests.e2e.engine import Loaded
from tests.model.tiny import VOCAB, tiny
from tests.text.toy import toy_tokenizer

FAMILIES = ["llama-llama3", "smollm", "mistral-sliding", "qwen2-sliding", "qwen3", "gemma3"]


NUMBERS = (*NATIVE, *TORCH)
WORK = Workload.make(block_size=4, hits=[0, 4, 8, 12, 16, 19, 68, 71], n_shared=72, n_own=5, n_cold=70, vocab=VOCAB)
SHORT = Workload.make(block_size=4, hits=[0, 8, 19, 71], n_shared=72, n_own=5, n_cold=6, vocab=VOCAB)
"""For chunks of one token: a prompt of 70 would be most of the work."""
EFFECTIVE = [cell for cell in CELLS if cell.chunk != 512]
"""No prompt here has 512 tokens: it would be the whole, once more."""
ALL = os.environ.get("HEADWATER_BITS") == "all"
"""As `make bits` sets it: the whole matrix in every kind of numbers."""
CASES = [(kind, numbers) for kind in FAMILIES for numbers in NUMBERS]
if not ALL:
    # Another window and other norms are in gemma3; PyTorch's int8 products take their time.
    few = {"smollm": set(NUMBERS), "gemma3": set(NUMBERS) - {TORCH[2]}}
    CASES = [(kind, numbers) for kind, numbers in CASES if numbers.name == "bf16" or numbers in few.get(kind, ())]
PAIRS = [Cell(*case) for case in pairwise(((7, 64, 1), (0, 1, 3, 8), (1, 2, 4), (False, True), (False, True)), seed=3)]

LoadNumbers = Callable[[str, Numbers], Loaded]


@pytest.fixture(scope="module")
def load_numbers(tmp_path_factory: pytest.TempPathFactory) -> LoadNumbers:
    folders: dict[str, Path] = {}

    def get(kind: str, numbers: Numbers) -> Loaded:
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp(kind)
            # Heads of 32: less is too little for the native attention.
            tiny(kind, head_dim=32).save_pretrained(folders[kind])
        return numbers.load(folders[kind], toy_tokenizer(), cache_dir=folders[kind] / "cache")

    return get


@pytest.mark.parametrize(("kind", "numbers"), CASES, ids=lambda value: getattr(value, "name", value))
def test_the_same_bits_in_every_cell(load_numbers: LoadNumbers, kind: str, numbers: Numbers) -> None:
    cells = EFFECTIVE if numbers.name == "bf16" or ALL else PAIRS
    loaded = load_numbers(kind, numbers)
    assert loaded.row_invariant, "the start-up probe says that bits are not kept"
    long, short = Matrix(loaded, WORK), Matrix(loaded, SHORT)
    total = Tally()
    for cell in cells:
        total += (short if cell.chunk == 1 else long).run(cell)
    assert total.cells == len(cells)
    assert total.hit_tokens >= 92 * len(cells) and total.copied_tokens == 6 * len(cells)
    assert total.resumed_hit_tokens > 0 and total.preemptions > len(cells) // 2
    assert total.logits > 60 * len(cells) and total.kv_bytes > 0


def test_without_partial_reuse(load_numbers: LoadNumbers) -> None:
    for kind in ("smollm", "gemma3"):
        matrix = Matrix(load_numbers(kind, NUMBERS[0]), WORK, partial=False)
        total = Tally()
        for cell in PAIRS[:4]:
            total += matrix.run(cell)
        assert total.copied_tokens == 0 and total.hit_tokens > 0


def test_the_pairs_are_all_pairs() -> None:
    for one in (7, 64, 1):
        assert {cell.n_strangers for cell in PAIRS if cell.chunk == one} == {0, 1, 3, 8}
        assert {cell.threads for cell in PAIRS if cell.chunk == one} == {1, 2, 4}
    assert 12 <= len(PAIRS) <= 16 and len(CELLS) == 5 * 4 * 3 * 2 * 2
