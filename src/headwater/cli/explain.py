"""``headwater explain``: what breaks the common beginning of the requests in a log, without a server."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from headwater.cli.loading import LoadingBar
from headwater.cli.status import OVER_THE_LIMIT
from headwater.config import ModelConfig
from headwater.errors import ConfigError
from headwater.explaining.findings import Finding, Kind, Report
from headwater.explaining.lint import lint
from headwater.explaining.log import read_log
from headwater.model.resolve import resolve_tokenizer
from headwater.text.tokenizer import Tokenizer, load_tokenizer

NOTHING_READ = 1
"""The exit status when no request could be read; 0: looked through, whatever was found."""

QUIET_S = 2.0
"""A bar is shown for what takes longer."""
MAX_BAD_SHOWN = 10


def run(arguments: argparse.Namespace) -> int:
    """Read the files, look through them, print what was found."""
    lines, bad = read_log(arguments.files)
    tokenizer = _tokenizer(arguments) if lines else None
    if tokenizer is not None:
        with _LateBar() as bar:
            report = lint(lines, tokenizer, bad=bad, progress=bar.report)
    else:
        report = Report(0, 0, 0, [], bad)
    for line in report.bad[:MAX_BAD_SHOWN]:
        print(f"skipped {line}", file=sys.stderr)
    if len(report.bad) > MAX_BAD_SHOWN:
        print(f"skipped {len(report.bad) - MAX_BAD_SHOWN} more lines", file=sys.stderr)
    if not report.n_requests:
        print("headwater: error: no request could be read", file=sys.stderr)
        return NOTHING_READ
    shown = report.findings[: arguments.top]
    if arguments.json:
        print(json.dumps(as_json(report, shown), ensure_ascii=False, indent=2))
    else:
        show(report, shown, Console(highlight=False, soft_wrap=True))
    too_many = arguments.fail_over is not None and report.n_lost_tokens > arguments.fail_over
    return OVER_THE_LIMIT if too_many else 0


def _tokenizer(arguments: argparse.Namespace) -> Tokenizer:
    if arguments.tokenizer is not None:
        path: Path = arguments.tokenizer
        if not path.exists():
            raise ConfigError(f"--tokenizer {path}: no such file or folder")
        return load_tokenizer(path)
    name = arguments.model or ModelConfig().model
    with LoadingBar() as bar:
        path = resolve_tokenizer(name, ModelConfig(cache_dir=arguments.model_cache_dir).cache_path, bar.report)
    return load_tokenizer(path)


class _LateBar:
    """A progress bar on a terminal's stderr, once the work has taken QUIET_S."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bars.add_task("", total=1.0)
        self._began_s = time.monotonic()

    def __enter__(self) -> _LateBar:
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def report(self, what: str, fraction: float) -> None:
        if time.monotonic() - self._began_s < QUIET_S:
            return
        self._bars.start()
        self._bars.update(self._task, description=what, completed=fraction)


# ---- what is printed --------------------------------------------------------------------------------


def as_json(report: Report, shown: list[Finding]) -> dict[str, Any]:
    return {
        "requests": report.n_requests,
        "skipped_lines": [asdict(line) for line in report.bad],
        "prompt_tokens": report.n_tokens,
        "shared_tokens": report.n_shared,
        "lost_tokens": report.n_lost_tokens,
        "findings": [
            {
                "kind": finding.kind.value,
                "title": finding.title,
                "detail": finding.detail or None,
                "requests": finding.n_requests,
                "lost_tokens": finding.n_lost_tokens,
                "lost_tokens_per_request": round(finding.n_lost_per_request, 1),
                "example": asdict(finding.example),
                "advice": finding.advice,
            }
            for finding in shown
        ],
    }


def show(report: Report, shown: list[Finding], out: Console) -> None:
    skipped = f", {len(report.bad)} lines skipped" if report.bad else ""
    share = report.n_shared / report.n_tokens if report.n_tokens else 0.0
    out.print(
        f"{report.n_requests} requests{skipped}, {report.n_tokens} prompt tokens, of which {report.n_shared} "
        f"({share:.0%}) begin an earlier prompt"
    )
    if not report.findings:
        out.print("Nothing breaks their common beginnings.")
        return
    n = len(report.findings)
    could = f"{n} finding{'s' if n > 1 else ''}: {report.n_lost_tokens} more tokens could be shared"
    out.print(could + (f"; the {len(shown)} most costly" if len(shown) < n else ""))
    for i, finding in enumerate(shown, 1):
        _show_finding(i, finding, out)


def _show_finding(number: int, finding: Finding, out: Console) -> None:
    out.print()
    out.print(Text(f"{number}. {finding.title}", style="bold"))
    out.print(
        f"   {finding.n_lost_tokens} tokens lost: {finding.n_lost_per_request:.0f} for each of "
        f"{finding.n_requests} requests"
    )
    if finding.detail:
        out.print(Text(f"   {finding.detail}"))
    example = finding.example
    out.print(Text(f"   {_place(finding)}, at {example.where} beside {example.other}:"))
    before = _quoted(example.before)
    out.print(Text.assemble("     ", (f"...{before}", "dim"), (_quoted(example.ours), "bold red")))
    out.print(Text.assemble("     ", (f"...{before}", "dim"), (_quoted(example.theirs), "bold green")))
    out.print(Text(f"   {finding.advice}"))


def _place(finding: Finding) -> str:
    example = finding.example
    if finding.kind in (Kind.TOOL_ORDER, Kind.TOOL_KEYS):
        return f"in the tools as the template writes them, character {example.character} of the prompt"
    if example.message is None:
        return f"in the template's text, character {example.character} of the prompt"
    return f"in message {example.message} ({example.role}), character {example.character}"


def _quoted(text: str) -> str:
    """On one line, with nothing in it that a terminal would obey."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
