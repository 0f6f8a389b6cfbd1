"""``headwater bench step``"""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING

from rich.console import Console

from headwater.cli.loading import LoadingBar
from headwater.engine.threads import settle_threads
from headwater.errors import ConfigError

if TYPE_CHECKING:
    from headwater.engine.breakdown import Breakdown


BAR = 40
"""Characters of a part that takes all the time."""


def step(arguments: argparse.Namespace) -> int:
    """Load a model in this process, drive it through the cases, and show where the time of a step goes."""
    settle_threads(os.environ)
    from headwater.cli.serve import config_of
    from headwater.engine.breakdown import CASES, StepBench  # here: they import torch, or a web server
    from headwater.engine.build import build_engine

    chosen = [case for case in CASES if not arguments.only or arguments.only in case.name]
    if not chosen:
        names = ", ".join(case.name for case in CASES)
        raise ConfigError(f"no case has {arguments.only!r} in its name; there are: {names}")
    config = config_of(arguments)
    done = []
    with LoadingBar() as bar:
        built = build_engine(config, bar.report)
        bench = StepBench(built, seed=arguments.seed or 0)
        for i, case in enumerate(chosen):
            bar.report(case.name, i / len(chosen))
            done.append(bench.run(case, arguments.repeats))
    if arguments.json:
        print(json.dumps([_plain(one) for one in done], indent=1))
        return 0
    out = Console(highlight=False, soft_wrap=True)
    for note in built.core.info.notes:
        out.print(note, markup=False)
    how = f"{built.core.info.dtype}, {built.core.info.threads} threads, medians of {arguments.repeats} runs"
    out.print(f"{how}; ms of a step (of a whole prompt in prefills) without clocks, then of its parts with them")
    for one in done:
        _show(out, one)
    return 0


def _show(out: Console, one: Breakdown) -> None:
    """The case, then its parts, largest first, with a bar for each one's share."""
    spread = f"({_ms(one.least_s)} to {_ms(one.most_s)})"
    out.print(f"\n{one.case.name}: {_ms(one.whole_s)} ms {spread}", markup=False)
    total = sum(one.parts_s.values())
    for part, seconds in sorted(one.parts_s.items(), key=lambda item: -item[1]):
        bar = "#" * round(BAR * seconds / total)
        out.print(f"  {part:18}{_ms(seconds):>10}  {seconds / total:4.0%}  {bar}", markup=False)


def _plain(one: Breakdown) -> dict[str, object]:
    ms = {"ms": one.whole_s, "least_ms": one.least_s, "most_ms": one.most_s}
    parts = {part: round(1e3 * seconds, 4) for part, seconds in one.parts_s.items()}
    return {"case": one.case.name, **{name: round(1e3 * s, 4) for name, s in ms.items()}, "parts_ms": parts}


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"
