"""``make bits``: the whole matrix on both real models, in every kind of numbers, with a table of what was compared.

    python -m tests.bits [--model NAME]... [--numbers NAME]... [--pairs]

Exit status 1 if bits differ where the start-up probe promises that they do not.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as in the engine process; read when OpenMP is loaded

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from headwater.model.pull import pull
from tests.bits.matrix import CELLS, FACTORS, Cell, Tally
from tests.bits.numbers import NATIVE, TORCH, Numbers
from tests.bits.pairwise import pairwise
from tests.bits.real import RealMatrix

MODELS = ("smollm2-135m", "gemma3-270m")
NUMBERS = {numbers.name: numbers for numbers in (*NATIVE, *TORCH[:1])}
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Options of glibc's ``mallopt``."""
N_SHARED, N_COLD = 640, 530
"""Longer than Gemma's windows of 512 tokens, so that they start in the middle; and a cold prompt that 512 cut."""


def model_path(name: str) -> Path:
    folder = os.environ.get("HEADWATER_TEST_MODELS")
    return Path(folder) / f"{name}.gguf" if folder else pull(name)


def keep_freed_memory() -> None:
    """Half a gigabyte of logits comes and goes with every long chunk: handed back to the system, it would take
    most of the time to get it again. (glibc; elsewhere nothing happens.)"""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1)):
            mallopt(option, value)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bits", description="Compare bits over the whole matrix.")
    parser.add_argument("--model", action="append", choices=MODELS, help="default: both")
    parser.add_argument("--numbers", action="append", choices=list(NUMBERS), help="default: all")
    parser.add_argument("--pairs", action="store_true", help="only so many cells that every two levels meet")
    return parser.parse_args()


def run(model: str, numbers: Numbers, cells: list[Cell], console: Console) -> tuple[Tally | None, str, float]:
    """What was compared, the verdict, and seconds."""
    began = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bars:
        task = bars.add_task(f"{model}, {numbers.name}: loading", total=len(cells))

        def told(cell: Cell) -> None:
            bars.update(task, description=f"{model}, {numbers.name}: {cell}", advance=1)

        matrix = RealMatrix(model_path(model), numbers, n_shared=N_SHARED, n_cold=N_COLD)
        try:
            total = matrix.run(cells, told)
        except AssertionError as error:
            console.print(f"[red]{model}, {numbers.name}: {error}", highlight=False, markup=True)
            return None, "DIFFERS" if matrix.promised else "differs", time.perf_counter() - began
    return total, "same bits" if matrix.promised else "nearly (bits not promised)", time.perf_counter() - began


def main() -> int:
    chosen, console = arguments(), Console()
    keep_freed_memory()
    cells = [Cell(*case) for case in pairwise(FACTORS, seed=1)] if chosen.pairs else CELLS
    table = Table("model", "numbers", "result", "cells", "requests", "logits", "KV compared", "hit tokens", "copied",
                  "resumed hits", "preemptions", "seconds", title="Same bits")  # fmt: skip
    failed = False
    for model in chosen.model or MODELS:
        for name in chosen.numbers or NUMBERS:
            total, verdict, seconds = run(model, NUMBERS[name], cells, console)
            failed = failed or verdict == "DIFFERS"
            figures = [] if total is None else [
                f"{total.cells:,}", f"{total.requests:,}", f"{total.logits:,}", f"{total.kv_bytes / 2**20:,.0f} MiB",
                f"{total.hit_tokens:,}", f"{total.copied_tokens:,}", f"{total.resumed_hit_tokens:,}",
                f"{total.preemptions:,}",
            ]  # fmt: skip
            table.add_row(model, name, verdict, *(figures or [""] * 8), f"{seconds:.0f}")
            console.print(f"{model}, {name}: {verdict}, {seconds:.0f} s", highlight=False)
    Console(width=max(console.width, 140)).print(table)  # whole, also in a log
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
