"""The report of one or several folders of results: ``report.html`` (one file, nothing from elsewhere), ``report.md``
and the plots as PNG beside it."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jinja2
from matplotlib.figure import Figure

from headwater.bench import plots
from headwater.bench.findings import Findings, find
from headwater.bench.flags import Flag, flags
from headwater.bench.load_report import find_loads, load_flags, load_plots, load_sentences, load_tables
from headwater.bench.readings import Run, read_runs
from headwater.bench.stats import MIN_INTERVAL, MIN_P95, MIN_P99
from headwater.bench.tables import Table, run_tables, sweep_tables
from headwater.bench.verdict import Verdict, verdict
from headwater.errors import BenchError

HTML, MARKDOWN = "report.html", "report.md"

READING = (
    "Hit: the prefix was sent before, and only a new question follows it. Control: a prefix of the same length that "
    "nobody had sent, to the same server in the same minutes. Off: the same request to a server started without "
    "prefix caching.",
    "Hit against control is the fair comparison: same server, same minutes, shuffled order. Off is another start of "
    "the server and differs in more than caching.",
    "A figure is a median with the interval that holds the true median with 95 % (from the bootstrap, never narrower "
    f"than the order statistics allow); below {MIN_INTERVAL} samples there is none. P95 needs {MIN_P95} samples, P99 "
    f"{MIN_P99}.",
    "A ratio is given only where the two intervals do not overlap and the difference holds among all comparisons of "
    "this report together (Holm's correction at 5 %): of reports about servers between which there is no difference, "
    "fewer than 1 in 20 names one. 'No difference shown' is not 'there is none'.",
    "What hit is not what is saved: hits save the prefill of the tokens that hit, nothing else. They do not make "
    "decoding faster, they save memory only while requests share them at once, and they need equal tokens from "
    "the first one on.",
)

LOAD_READING = (
    "Requests of a load wait for each other and are no independent samples: the figures are quantiles of this one "
    f"load, without intervals. P95 needs {MIN_P95} samples, P99 {MIN_P99}.",
    "In a closed load a slow server is asked less; an open one goes on asking. Compare loads of one kind only, and "
    "repeat them before calling one faster.",
    "Cached tokens are a share of the prompts, not of time or memory.",
)


@dataclass(frozen=True)
class Plot:
    """Drawn when first looked at."""

    name: str
    about: str
    draw: Callable[[], Figure]

    @cached_property
    def png(self) -> bytes:
        return plots.png(self.draw())

    @property
    def base64(self) -> str:
        return base64.b64encode(self.png).decode()


@dataclass(frozen=True)
class Report:
    """Everything that the templates show."""

    title: str
    verdict: Verdict
    flags: Sequence[Flag]
    plots: Sequence[Plot]
    tables: Sequence[Table]
    runs: Sequence[Table]
    reading: Sequence[str]


def make_report(folders: Sequence[Path]) -> Report:
    """Read the folders and work everything out. Raises BenchError where one holds no results."""
    return report_of(read_runs(folders))


def report_of(runs: Sequence[Run]) -> Report:
    found, loads = find(runs), find_loads(runs)
    raised = [*flags(found), *load_flags(loads)]
    drawn = {**plots.sweep_plots(found), **load_plots(loads)}
    return Report(
        title=_title(found),
        verdict=verdict(found, raised, load_sentences(loads)),
        flags=raised,
        plots=[Plot(name, about, draw) for name, (about, draw) in drawn.items()],
        tables=[*sweep_tables(found), *load_tables(loads)],
        runs=run_tables(runs),
        reading=(*(READING if found.cells else ()), *(LOAD_READING if loads else ())),
    )


def _title(found: Findings) -> str:
    return ("What prefix caching buys: " if found.cells else "Under load: ") + ", ".join(found.labels)


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write all files into ``folder``, which is made if need be; returns them. Raises BenchError when it cannot."""
    contents: dict[str, bytes] = {f"{plot.name}.png": plot.png for plot in report.plots}
    contents[HTML] = as_html(report).encode()
    contents[MARKDOWN] = as_markdown(report).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise BenchError(f"the report cannot be written into {folder}: {error.strerror or error}") from None
    return [folder / name for name in contents]


def as_html(report: Report) -> str:
    return _environment(autoescape=True).get_template("report.html.j2").render(_fields(report))


def as_markdown(report: Report) -> str:
    return _environment(autoescape=False).get_template("report.md.j2").render(_fields(report))


def _fields(report: Report) -> Mapping[str, object]:
    return {name: getattr(report, name) for name in ("title", "verdict", "flags", "plots", "tables", "runs", "reading")}


def _environment(*, autoescape: bool) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=autoescape,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters["md"] = as_plain_markdown
    return environment


def as_plain_markdown(text: str) -> str:
    """``text`` as Markdown that shows it as it is: one line, no markup, no HTML, no link."""
    line = " ".join(text.split())
    return re.sub(r"([\\`*_\[\]<>|#$~&])", r"\\\1", line).replace("://", r"\://").replace("www.", r"www\.")
