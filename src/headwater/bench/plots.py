"""The report's plots. Colours are Okabe and Ito's, told apart by the colour-blind, and every series has a marker of its
own besides; axes have units, legends have n."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from headwater.bench import stats
from headwater.bench.findings import CALM, METRICS, ROLES, Cell, Findings, grown, labelled
from headwater.bench.readings import CONTROL, HIT, OFF

BLUE, ORANGE, GREEN, PURPLE, BLACK, SKY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#000000", "#56B4E9"
STYLES = {OFF: (BLACK, "s", "caching off"), CONTROL: (ORANGE, "o", "control: fresh prefix"), HIT: (BLUE, "^", "hit")}
SERIES = ((BLUE, "o"), (ORANGE, "s"), (GREEN, "^"), (PURPLE, "D"), (BLACK, "v"), (SKY, "P"))
AXES = {"ttft": "time to first token, ms", "itl": "time between tokens, ms", "e2e": "whole request, ms"}
PANEL = (3.9, 3.1)
"""Inches of one panel."""
DPI = 110
MANY = 2000
"""A logarithmic axis that reaches this many times its lowest value has ticks at powers of ten only."""
SHOWN_CHARS = 40
"""Of a name."""

MARGIN = 1.15
"""Of a logarithmic axis, beyond its highest and lowest points."""

SHIFT = 1.06
"""Roles are drawn a little beside each other, or their intervals would hide one another."""


def png(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    out = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(out, format="png")
    return out.getvalue()


Drawing = tuple[str, Callable[[], Figure]]
"""What a plot shows, and how to draw it."""


def sweep_plots(found: Findings) -> dict[str, Drawing]:
    """The plots for what the sweeps hold, by name."""
    plots: dict[str, Drawing] = {}
    if not found.cells:
        return plots
    for metric in METRICS:
        if any(key[2] == metric for key in found.sides):
            about = f"{METRICS[metric].capitalize()} against the shared prefix: medians with 95 % intervals."
            plots[metric] = (about, partial(by_prefix, found, metric))
    if len({cell.output for cell in found.cells}) > 1:
        plots["dilution"] = (
            "What is left of the gain over the whole request, by output length. Filled: a difference was shown; "
            "hollow, at 1: none was.",
            partial(dilution, found),
        )
    if found.lines:
        plots["growth"] = (
            "Time to first token against the tokens that were computed: the slope is the price of a token of prefill, "
            "the intercept that of a request.",
            partial(growth, found),
        )
    return plots


def by_prefix(found: Findings, metric: str) -> Figure:
    """A row for each label and interference, a column for each output length."""
    rows = list(labelled(found.cells))
    outputs = sorted(
        {cell.output for cell in found.cells if any((cell, role, metric) in found.sides for role in ROLES)}
    )
    figure, panels = panels_of(len(rows), len(outputs))
    for (key, cells), row in zip(rows, panels, strict=True):
        for output, axes in zip(outputs, row, strict=True):
            _prefix_panel(axes, found, metric, [cell for cell in cells if cell.output == output])
            axes.set_title(_title(key, f"{output:,} out"), fontsize=8)
            axes.set_ylabel(AXES[metric])
            axes.set_xlabel("shared prefix, tokens")
    if metric != "itl":
        _same_range([axes for row in panels for axes in row if axes.lines])
    return figure


def _same_range(panels: Sequence[Axes]) -> None:
    """Logarithmic panels beside each other begin and end alike: a gain of a tenth must not look like one of half."""
    ends = [axes.get_ylim() for axes in panels]
    for axes in panels:
        axes.set_ylim(min(low for low, _ in ends) / MARGIN, max(high for _, high in ends) * MARGIN)


def _prefix_panel(axes: Axes, found: Findings, metric: str, cells: Sequence[Cell]) -> None:
    cells = sorted(cells, key=lambda cell: cell.prefix)
    for i, role in enumerate(ROLES):
        color, marker, name = STYLES[role]
        if role == HIT and cells and cells[0].interference != CALM:
            name = "repeat, after others"
        sides = [(cell.prefix, side) for cell in cells if (side := found.sides.get((cell, role, metric))) is not None]
        if sides:
            x = [prefix * SHIFT ** (i - 1) for prefix, _ in sides]
            label = f"{name} ({_n([side for _, side in sides])})"
            _points(axes, x, [side.estimate for _, side in sides], color, marker, label)
    if metric == "itl":
        axes.set_ylim(0, 1.2 * axes.get_ylim()[1])
    else:
        axes.set_yscale("log")
    _plain(axes, sorted({cell.prefix for cell in cells}))
    if axes.lines:
        axes.legend(fontsize=7, frameon=False)


def _points(
    axes: Axes, x: Sequence[float], estimates: Sequence[stats.Estimate], color: str, marker: str, label: str
) -> None:
    """Medians in ms, joined, with their intervals; a median without an interval is hollow."""
    y = [1e3 * one.median for one in estimates]
    below = [1e3 * (one.median - (one.median if one.low is None else one.low)) for one in estimates]
    above = [1e3 * ((one.median if one.high is None else one.high) - one.median) for one in estimates]
    filled = all(one.low is not None for one in estimates)
    axes.errorbar(
        x, y, yerr=(below, above), color=color, marker=marker, markersize=4, capsize=3, linewidth=1.2, label=label,
        markerfacecolor=color if filled else "none",
    )  # fmt: skip


def dilution(found: Findings) -> Figure:
    """Hit / control of the whole request against the output's length, a line for each prefix."""
    rows = list(labelled(found.cells))
    figure, panels = panels_of(1, len(rows))
    for (key, cells), axes in zip(rows, panels[0], strict=True):
        axes.axhline(1, color="#888888", linewidth=0.8)
        for prefix, (color, marker) in zip(sorted({cell.prefix for cell in cells}), cycle(SERIES), strict=False):
            row = sorted((cell for cell in cells if cell.prefix == prefix), key=lambda cell: cell.output)
            found_here = [(cell, found.one(cell, "e2e", HIT, CONTROL)) for cell in row]
            compared = [(cell, one) for cell, one in found_here if one is not None]
            shown = [(cell, one) for cell, one in compared if one.ratio is not None]
            n = _n([side for _, one in compared for side in (one.a, one.b)])
            for i, (cell, one) in enumerate(shown):
                low, high = one.ratio_low or 0.0, one.ratio_high or 0.0
                y = one.ratio or 0.0
                axes.errorbar(
                    [cell.output], [y], yerr=([y - low], [high - y]), color=color, marker=marker, capsize=3,
                    label=f"{prefix:,} shared ({n})" if i == 0 else None,
                )  # fmt: skip
            hollow = [cell.output for cell, one in compared if one.ratio is None]
            axes.plot(
                hollow, [1.0] * len(hollow), linestyle="none", marker=marker, color=color, markerfacecolor="none",
                label=None if shown else f"{prefix:,} shared ({n})",
            )  # fmt: skip
        axes.set_title(_title(key, ""), fontsize=8)
        axes.set_ylabel("whole request, hit / control")
        axes.set_xlabel("output, tokens")
        axes.set_ylim(bottom=0)
        _plain(axes, sorted({cell.output for cell in cells}))
        if axes.lines:
            axes.legend(fontsize=7, frameon=False)
    return figure


def growth(found: Findings) -> Figure:
    """All requests, and the line through them."""
    labels = list(found.lines)
    figure, panels = panels_of(1, len(labels))
    for label, axes in zip(labels, panels[0], strict=True):
        x, y = grown(found, label)
        line = found.lines[label]
        axes.plot(
            x, [1e3 * one for one in y], linestyle="none", marker=".", color=BLUE, alpha=0.35, label=f"n={len(x)}"
        )
        ends = [0.0, max(x)]
        told = f"{1e3 * line.intercept:.0f} ms + {1e6 * line.slope:,.0f} µs per token"
        axes.plot(ends, [1e3 * line.at(one) for one in ends], color=ORANGE, linewidth=1.5, label=told)
        axes.set_title(shortened(label), fontsize=8)
        axes.set_xlabel("computed tokens of the prompt")
        axes.set_ylabel(AXES["ttft"])
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=7, frameon=False)
    return figure


def panels_of(n_rows: int, n_columns: int) -> tuple[Figure, list[list[Axes]]]:
    """An empty figure in the style of all, and its panels by row."""
    n_rows, n_columns = max(1, n_rows), max(1, n_columns)
    figure = Figure(figsize=(PANEL[0] * n_columns, PANEL[1] * n_rows), dpi=DPI, layout="constrained")
    grid = figure.subplots(n_rows, n_columns, squeeze=False)
    for axes in grid.flat:
        axes.grid(True, color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        axes.xaxis.label.set_size(8)
        axes.yaxis.label.set_size(8)
    return figure, [list(row) for row in grid]


def _plain(axes: Axes, ticks: Sequence[int]) -> None:
    """A logarithmic x with ticks where something was measured, and numbers without powers of ten."""
    axes.set_xscale("log")
    axes.set_xticks(list(ticks), [f"{tick:,}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    if axes.get_yscale() == "log":
        plain_ticks(axes.yaxis)


def plain_ticks(axis: Axis) -> None:
    """A logarithmic axis with ticks at 1, 2 and 5 (where that is too many at 1), and numbers without powers of ten."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < MANY * low else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}" if y >= 1 else f"{y:g}"))
    axis.set_minor_locator(NullLocator())


def _n(sides: Sequence[stats.Side]) -> str:
    """``n=10``, or ``n=9-10``."""
    numbers = sorted({side.n for side in sides})
    if not numbers:
        return "n=0"
    return f"n={numbers[0]}" if len(numbers) == 1 else f"n={numbers[0]}-{numbers[-1]}"


def _title(key: tuple[str, str], rest: str) -> str:
    label, interference = key
    return f"{shortened(label)}\n" + ", ".join(part for part in (f"interference: {interference}", rest) if part)


def shortened(label: str) -> str:
    """Of a name that somebody else chose: one line, and no formula (matplotlib reads $...$)."""
    shown = "".join(char if char.isprintable() else " " for char in label)
    plain = " ".join(shown.split()).replace("$", r"\$")
    return plain if len(plain) <= SHOWN_CHARS else plain[: SHOWN_CHARS - 1] + "…"
