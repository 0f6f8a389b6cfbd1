"""Progress of what takes its time, on stderr: a bar in a terminal, a few lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

QUIET_S = 2.0
"""Outside a terminal, each stage is told when it begins, and again after so many seconds."""


class LoadingBar:
    """Use as a context; ``report`` with what is being done and how far it is, 0 to 1."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
        )
        self._bars = Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        self._task: TaskID | None = None
        self._what = ""
        self._told_s = time.monotonic()

    def __enter__(self) -> LoadingBar:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.done()

    def report(self, what: str, fraction: float) -> None:
        if self._task is None:
            self._task = self._bars.add_task(what, total=1.0)
        self._bars.update(self._task, description=what, completed=fraction)
        now = time.monotonic()
        if not self._console.is_terminal and (what != self._what or now - self._told_s > QUIET_S):
            self._console.print(f"{what} ({fraction:.0%})" if 0 < fraction < 1 else what, highlight=False)
            self._told_s = now
        self._what = what

    def done(self) -> None:
        """Take the bar away."""
        self._bars.stop()
