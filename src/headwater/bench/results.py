"""A folder of results: ``run.json``, what was asked of whom, and ``results.jsonl``, a line for every request.

Lines are written as requests end, each in one piece, so that a killed measurement loses at most the request in
flight; half a line at the end of the file is what such a kill may leave, and is passed over.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from headwater.errors import BenchError

RESULTS, RUN = "results.jsonl", "run.json"


class Usage(msgspec.Struct, frozen=True):
    """What the server says that a request used; None where it does not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One request: a line of results.jsonl. Seconds; the times of events count from the sending of the request."""

    kind: str
    """The workload: prefix, load."""
    cell: dict[str, Any]
    """The conditions, such as {"prefix": 512, "output": 32, "caching": "on", "interference": "none"}."""
    role: str
    """prime, hit, control, off, first_differs, other_salt, evicted, warm_up, interference; request in a load."""
    repeat: int
    attempt: int = 0
    """Counts resumptions: what belongs to one trial has equal cell, repeat and attempt."""
    request: dict[str, Any]
    """{"prompt_tokens": as sent, "max_tokens": as asked}"""
    scheduled_s: float | None = None
    """When a load's schedule would have sent it, on the clock of ``started_s``."""
    started_s: float
    """After the measurement began, or was resumed."""
    events_s: list[float]
    """One for every event that carried tokens."""
    tokens_per_event: list[int] | None = None
    """None: the server does not tell, and counts do not decide."""
    ttft_s: float | None = None
    e2e_s: float | None = None
    """To the last event that carried tokens."""
    usage: Usage | None = None
    counters_before: dict[str, float] | None = None
    counters_after: dict[str, float] | None = None
    server_timing: dict[str, float] | None = None
    """queue_s, prefill_s, decode_s by the server's own clock, those that it tells."""
    lag_s: float = 0.0
    """The longest that the client's event loop was late while the request ran."""
    error: str | None = None
    server: str = ""
    label: str = ""


class ResultsWriter:
    """Appends lines to the results of ``folder``; half a line that a kill left there is cut off first."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / RESULTS
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _cut_half_line(self._path)
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise BenchError(f"{self._path} cannot be written: {error.strerror or error}") from None

    def __enter__(self) -> ResultsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, sample: Sample) -> None:
        """Append a line. Raises BenchError when the disk does not take all of it."""
        line = msgspec.json.encode(sample) + b"\n"
        try:
            n_written = self._file.write(line)
        except OSError as error:
            raise BenchError(f"{self._path} cannot be written: {error.strerror or error}") from None
        if n_written != len(line):
            raise BenchError(f"{self._path} took {n_written} of {len(line)} bytes: is the disk full?")


def _cut_half_line(path: Path) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        os.truncate(path, whole)


def read_samples(folder: Path) -> list[Sample]:
    """All whole lines. Raises BenchError, naming the line, for one that is no sample; half a last line is no error."""
    path = folder / RESULTS
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BenchError(f"{path} cannot be read: {error.strerror or error}") from None
    samples = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        try:
            samples.append(msgspec.json.decode(line, type=Sample))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BenchError(f"{path}, line {number} is no result: {error}; remove that line to go on") from None
    return samples


def read_run(folder: Path) -> dict[str, Any]:
    """The contents of run.json. Raises BenchError when there is none that can be read."""
    path = folder / RUN
    try:
        run = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise BenchError(f"{folder} holds no results: there is no {RUN} in it") from None
    except (OSError, ValueError) as error:
        raise BenchError(f"{path} cannot be read: {error}") from None
    if not isinstance(run, dict):
        raise BenchError(f"{path} must hold a JSON object")
    return run


def write_run(folder: Path, run: dict[str, Any]) -> None:
    """Write run.json whole or not at all: a kill leaves the old one or the new one."""
    path = folder / RUN
    try:
        folder.mkdir(parents=True, exist_ok=True)
        half = path.with_suffix(".json.half")
        half.write_text(json.dumps(run, indent=1) + "\n")
        half.replace(path)
    except OSError as error:
        raise BenchError(f"{path} cannot be written: {error.strerror or error}") from None
