"""How far a measurement is and how long it still takes, on stderr: a bar in a terminal, some lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

QUIET_S = 20.0
"""Outside a terminal, a line at most this often."""

PRIOR_SHARE = 0.1
"""Of the work: how much weight the estimate has beside what was seen."""


class BenchProgress:
    """Use as a context. Work is given in seconds as estimated beforehand; the time left is what remains of them at the
    pace so far."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[left]}"),
        )
        self._bar = Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        self._task: TaskID | None = None
        self._what = ""
        self._total_s = self._done_s = 0.0
        self._begun = self._told = time.monotonic()

    def __enter__(self) -> BenchProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False)

    def begin(self, total_s: float) -> None:
        """The work begins; so much is to be done."""
        self._total_s, self._done_s, self._begun = total_s, 0.0, time.monotonic()
        self._task = self._bar.add_task(self._what, total=max(total_s, 1e-9), left="")

    def stage(self, what: str) -> None:
        """What is being done now."""
        self._what = what
        if self._task is not None:
            self._bar.update(self._task, description=what)
        if not self._console.is_terminal:
            self._console.print(what, markup=False)

    def advance(self, work_s: float) -> None:
        """So much more of the work is done."""
        self._done_s += work_s
        now = time.monotonic()
        left = f"{duration(self.left_s(now))} left"
        if self._task is not None:
            self._bar.update(self._task, completed=self._done_s, left=left)
        if not self._console.is_terminal and now - self._told > QUIET_S:
            share = self._done_s / self._total_s if self._total_s else 1.0
            self._console.print(f"{min(share, 1):.0%} done, about {left}", markup=False)
            self._told = now

    def left_s(self, now: float) -> float:
        """Seconds that the rest takes at the pace so far, with the estimate counted as some of it: a first request that
        was slow must not be taken for the pace."""
        known_s = PRIOR_SHARE * self._total_s
        pace = (now - self._begun + known_s) / (self._done_s + known_s) if self._total_s else 1.0
        return max(0.0, self._total_s - self._done_s) * pace


def duration(seconds: float) -> str:
    """As people say it: 40 s, 12 min, 2 h 5 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
