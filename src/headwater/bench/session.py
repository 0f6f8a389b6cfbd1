"""One run of `headwater bench prefix` over a folder, and what it has found out so far."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwater.bench.dialect import Dialect
from headwater.bench.plan import Costs, Plan, Start
from headwater.bench.progress import BenchProgress
from headwater.bench.prompts import Drawer, Vocabulary
from headwater.bench.results import ResultsWriter, write_run
from headwater.bench.settings import Settings


@dataclass
class Known:
    """What is found out once and holds for all starts of a session."""

    dialect: Dialect
    vocabulary: Vocabulary
    costs: Costs
    plan: Plan


@dataclass
class Session:
    """One run of the command over a folder; a resumption is another."""

    settings: Settings
    folder: Path
    headers: dict[str, str]
    run: dict[str, Any]
    progress: BenchProgress
    writer: ResultsWriter
    attempt: int
    begun_s: float = field(default_factory=time.monotonic)
    known: Known | None = None

    def flag(self, text: str) -> None:
        """What a reader must know: said now, and kept."""
        if text not in self.run["flags"]:
            self.run["flags"].append(text)
            self.progress.say(f"note: {text}")
            self.save()

    def save(self) -> None:
        write_run(self.folder, self.run)

    def drawer(self, vocabulary: Vocabulary) -> Drawer:
        """Fresh prompts, different in every session and for every start."""
        self.run["n_drawers"] = self.run.get("n_drawers", 0) + 1
        self.save()
        return Drawer(vocabulary, f"{self.run['nonce']}/{self.attempt}/{self.run['n_drawers']}")

    def log_of(self, start: Start) -> Path:
        """Where the output of the server for ``start`` goes."""
        return self.folder / f"server-caching-{start.caching}-interference-{start.interference}.log"
