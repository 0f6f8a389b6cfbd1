"""The report's tables: plain text in cells, so that HTML and Markdown say the same."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwater.bench import stats, words
from headwater.bench.findings import METRICS, PAIRS, ROLES, Cell, Findings, typical
from headwater.bench.readings import (
    CONTROL,
    COUNTER_EXAMPLES,
    HIT,
    OFF,
    PRIME,
    Reading,
    Run,
    arguments_of,
    server_of,
)

NAMES = {OFF: "off", CONTROL: "control", HIT: "hit", PRIME: "prime"}
PHASES = ("queue_s", "prefill_s", "decode_s")


@dataclass(frozen=True)
class Table:
    """``name`` is an anchor; all rows are as long as ``head``."""

    name: str
    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def sweep_tables(found: Findings) -> list[Table]:
    """All tables about sweeps that have a row."""
    tables = [_counter_examples(found), *(_medians(found, metric) for metric in METRICS), _across(found)]
    tables += [_quantiles(found), _tokens(found), _throughput(found), _split(found), _growth(found)]
    return [table for table in tables if table.rows]


def _where(cell: Cell) -> tuple[str, ...]:
    return cell.label, cell.interference, f"{cell.prefix:,}", f"{cell.output:,}"


WHERE = ("engine", "interference", "prefix", "out")


def _medians(found: Findings, metric: str) -> Table:
    rows = []
    for cell in found.cells:
        sides = [found.sides.get((cell, role, metric)) for role in ROLES]
        if any(side is not None for side in sides):
            medians = [words.median(side.estimate if side is not None else None) for side in sides]
            compared = [words.ratio(found.one(cell, metric, *pair)) for pair in PAIRS]
            rows.append((*_where(cell), *medians, *compared))
    head = (*WHERE, *(f"{NAMES[role]}, ms" for role in ROLES), *(f"{NAMES[a]} / {NAMES[b]}" for a, b in PAIRS))
    note = "Medians with their 95 % intervals; ratios of medians, only where the difference holds for the whole report."
    if metric == "itl":
        per_token = all(one.per_token for some in found.by_role.values() for one in some if one.gaps_s)
        note += " One figure per request: the median of its gaps" + (
            ", each between two tokens." if per_token else ", which are between events, not all of one token."
        )
    return Table(metric, METRICS[metric].capitalize(), head, tuple(rows), note)


def _across(found: Findings) -> Table:
    rows = [
        (
            METRICS[one.metric],
            NAMES[one.role],
            *_where(one.cell)[1:],
            f"{one.cell.label} / {one.other.label}",
            words.median(one.found.a.estimate),
            words.median(one.found.b.estimate),
            words.ratio(one.found),
        )
        for one in found.across
    ]
    head = ("metric", "request", *WHERE[1:], "a / b", "a, ms", "b, ms", "ratio")
    return Table("across", "Beside each other", head, tuple(rows))


def _quantiles(found: Findings) -> Table:
    rows = []
    for (cell, role), readings in found.by_role_sorted():
        if role not in ROLES:
            continue
        for metric in ("ttft", "e2e"):
            side = found.sides.get((cell, role, metric))
            if side is not None:
                rows.append((*_where(cell), NAMES[role], METRICS[metric], *_quantile_cells(side.estimate)))
        gaps = np.sort(np.array([gap for one in readings if one.measured for gap in one.gaps_s]))
        if len(gaps):
            rows.append((*_where(cell), NAMES[role], "gaps of all requests", *_quantile_cells(stats.estimate(gaps))))
    head = (*WHERE, "request", "metric", "n", "median, ms", "P95, ms", "P99, ms")
    note = f"P95 from {stats.MIN_P95} samples on, P99 from {stats.MIN_P99}: fewer do not have one."
    return Table("quantiles", "Quantiles", head, tuple(rows), note)


def _quantile_cells(one: stats.Estimate) -> tuple[str, ...]:
    return f"{one.n:,}", words.ms(one.median), words.p95(one), words.p99(one)


def _tokens(found: Findings) -> Table:
    rows = []
    sizes = {run.label: block_size(run) for run in found.runs}
    for cell in found.cells:
        for role in ROLES:
            told = [one for one in found.by_role.get((cell, role), []) if one.measured and one.cached is not None]
            if not told:
                continue
            cached = [one.cached or 0 for one in told]
            size = sizes.get(cell.label)
            blocks = words.count(float(np.median([n // size for n in cached]))) if size else "-"
            prompt = typical(one.prompt_tokens for one in told)
            share = float(np.median(cached)) / prompt if prompt else 0.0
            by = ", ".join(sorted({one.cached_by or "" for one in told}))
            counts = (words.count(prompt), _range(cached), words.count(typical(one.computed for one in told)))
            rows.append((*_where(cell), NAMES[role], *counts, f"{share:.2%}", blocks, by))
    head = (*WHERE, "request", "prompt", "cached", "computed", "cached share", "KV blocks shared", "told by")
    note = (
        "Tokens of a request: medians (and range). KV blocks shared: whole blocks that the request pointed at instead "
        "of filling its own; they save memory while another request uses them too. A share of tokens is no share of "
        "time."
    )
    return Table("tokens", "Cached and computed tokens", head, tuple(rows), note)


def block_size(run: Run) -> int | None:
    """Tokens of a KV block, as the run knows it."""
    for about in (server_of(run), arguments_of(run)):
        size = about.get("block_size")
        if isinstance(size, int) and size > 0:
            return size
    return None


def _range(numbers: Sequence[int]) -> str:
    low, high, middle = min(numbers), max(numbers), float(np.median(numbers))
    return f"{middle:,.0f}" if low == high else f"{middle:,.0f} ({low:,}-{high:,})"


def _throughput(found: Findings) -> Table:
    rows = []
    for cell in found.cells:
        for role in ROLES:
            good = [one for one in found.by_role.get((cell, role), []) if one.measured]
            cells = [_rate(rates) for rates in (map(input_rate, good), map(output_rate, good))]
            if good:
                rows.append((*_where(cell), NAMES[role], *cells))
    head = (*WHERE, "request", "input, tokens/s", "output, tokens/s")
    note = (
        "One request at a time. Input: prompt tokens over the time to first token, cached ones included. Output: "
        "tokens after the first over the time after it."
    )
    return Table("throughput", "Tokens per second", head, tuple(rows), note)


def input_rate(one: Reading) -> float | None:
    return one.prompt_tokens / one.ttft_s if one.prompt_tokens and one.ttft_s else None


def output_rate(one: Reading) -> float | None:
    if one.output_tokens is None or one.ttft_s is None or one.e2e_s is None or one.e2e_s <= one.ttft_s:
        return None
    return (one.output_tokens - 1) / (one.e2e_s - one.ttft_s)


def _rate(rates: Iterable[float | None]) -> str:
    told = np.sort(np.array([one for one in rates if one is not None]))
    if not len(told):
        return "-"
    one = stats.estimate(told)
    if one.low is None or one.high is None:
        return f"{one.median:,.0f} [{words.TOO_SMALL}] n={one.n}"
    return f"{one.median:,.0f} [{one.low:,.0f}, {one.high:,.0f}] n={one.n}"


def _split(found: Findings) -> Table:
    rows = []
    for cell in found.cells:
        for role in ROLES:
            told = [one for one in found.by_role.get((cell, role), []) if one.measured and one.sample.server_timing]
            if not told:
                continue
            parts = [typical((one.sample.server_timing or {}).get(phase) for one in told) for phase in PHASES]
            rest = typical(
                one.e2e_s - sum((one.sample.server_timing or {}).values()) for one in told if one.e2e_s is not None
            )
            shown = ["-" if part is None else words.ms(part) for part in (*parts, rest)]
            rows.append((*_where(cell), NAMES[role], f"{len(told):,}", *shown))
    head = (*WHERE, "request", "n", "queue, ms", "prefill, ms", "decode, ms", "the rest, ms")
    note = "Medians of what the server's own clocks say; the rest is HTTP, tokenizer and client."
    return Table("split", "Where a request's time goes", head, tuple(rows), note)


def _growth(found: Findings) -> Table:
    rows = [
        (
            label,
            f"{1e6 * line.slope:,.1f} [{1e6 * line.slope_low:,.1f}, {1e6 * line.slope_high:,.1f}]",
            f"{words.ms(line.intercept)} [{words.ms(line.intercept_low)}, {words.ms(line.intercept_high)}]",
            f"{line.n:,}",
        )
        for label, line in found.lines.items()
    ]
    head = ("engine", "a token of prefill, µs", "a request, ms", "n")
    note = (
        "The line of time to first token over computed tokens, without interference: weighted median of the slopes "
        "between all pairs of requests, so that a few wild ones do not bend it. Attention makes long prompts dearer "
        "per token than the line says."
    )
    return Table("growth", "The growth line", head, tuple(rows), note)


def _counter_examples(found: Findings) -> Table:
    rows = []
    for one in found.examples:
        n = len(one.told)
        held = "not told" if not n else "held" if not one.n_hit else "not shown" if one.role == "evicted" else "BROKEN"
        sent = f"{n + one.untold:,}"
        rows.append((one.label, COUNTER_EXAMPLES[one.role], sent, f"{one.n_hit:,}", f"{one.most_cached:,}", held))
    head = ("engine", "must not hit", "sent", "hit", "most tokens cached", "")
    return Table("counter-examples", "The counter-examples", head, tuple(rows))


def run_tables(runs: Sequence[Run]) -> list[Table]:
    """Machine, versions and exact commands, a table for each run."""
    return [
        Table(f"run-{i}", f"{run.label} ({run.folder.name})", ("", ""), tuple(_about(run)))
        for i, run in enumerate(runs, 1)
    ]


def _about(run: Run) -> Iterator[tuple[str, str]]:
    yield "requests", f"{len(run.readings):,}"
    yield "server", ", ".join(dict.fromkeys(one.sample.server for one in run.readings))
    for name, value in run.about.items():
        if name in ("command", "starts", "flags", "format", "nonce", "n_drawers"):
            continue
        yield from _flat(name, value)
    command = run.about.get("command")
    if command:
        yield "command", _command(command)
    starts = run.about.get("starts")
    for start in starts if isinstance(starts, list) else []:
        if isinstance(start, dict) and start.get("command"):
            conditions = f"caching {start.get('caching')}, interference {start.get('interference')}"
            yield f"server started ({conditions})", _command(start["command"])


def _command(words_of_it: object) -> str:
    if isinstance(words_of_it, list):
        return shlex.join(str(word) for word in words_of_it)
    return str(words_of_it)


def _flat(name: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        told: Mapping[str, Any] = value
        for key, inner in told.items():
            yield from _flat(f"{name}: {key}", inner)
    elif value is not None:
        yield name, str(value)
