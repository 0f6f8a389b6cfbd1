"""``headwater top``: the essentials of the live page in a terminal."""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headwater.errors import ConfigError, EngineError

Json = dict[str, Any]

N_BRANCHES = 8
N_REQUESTS = 8
BAR = 60
SPARKS = "▁▂▃▄▅▆▇█"
N_SPARKS = 60
BUCKET_S = 5.0
TIMEOUT_S = 10.0

TIME, QUERIES, HITS, COPIED, COMPUTED, GENERATED = range(6)
"""Places in a sample, as serve/ui/history.py has them."""


def run(arguments: argparse.Namespace) -> int:
    """Show it once, or until q or Ctrl-C."""
    if not arguments.url.startswith(("http://", "https://")):
        raise ConfigError(f"--url must begin with http:// or https://, got {arguments.url!r:.80}")
    out = Console(highlight=False, emoji=False, markup=False)
    if arguments.once or not out.is_terminal:
        out.print(screen(fetch(arguments.url, arguments.admin_key), arguments.url))
        return 0
    view = fetch(arguments.url, arguments.admin_key)  # a first failure ends the command; later ones are waited out
    with _keys() as pressed, Live(screen(view, arguments.url), console=out, screen=True, auto_refresh=False) as live:
        while not pressed(arguments.interval):
            try:
                view, trouble = fetch(arguments.url, arguments.admin_key), ""
            except EngineError as error:
                trouble = str(error)
            live.update(screen(view, arguments.url, trouble, "q leaves"), refresh=True)
    return 0


def fetch(url: str, admin_key: str | None) -> Json:
    """The server's picture. Raises EngineError, saying what to do, when there is none."""
    headers = {} if admin_key is None else {"Authorization": f"Bearer {admin_key}"}
    request = urllib.request.Request(url.rstrip("/") + "/admin/view", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            view: Json = json.load(response)
            return view
    except urllib.error.HTTPError as error:
        hint = ": give the server's admin key with --admin-key" if error.code in (401, 403) else ""
        raise EngineError(f"{url} answered {error.code} ({_message(error)}){hint}") from None
    except (OSError, ValueError) as error:
        raise EngineError(
            f"no Headwater server answers at {url} ({error}): start one, or say where with --url"
        ) from None


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):  # not this server's own words
        return error.reason


@contextmanager
def _keys() -> Iterator[Any]:
    """A function that waits so many seconds and says whether q was pressed. Ctrl-C ends the command as everywhere."""
    if sys.platform == "win32" or not sys.stdin.isatty():
        yield lambda wait_s: time.sleep(wait_s)
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)

    def pressed(wait_s: float) -> bool:
        ready, _, _ = select.select([sys.stdin], [], [], wait_s)
        return bool(ready) and b"q" in os.read(sys.stdin.fileno(), 1024).lower()

    try:
        yield pressed
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


# ---- the screen -------------------------------------------------------------------------------------


def screen(view: Json, url: str, trouble: str = "", hint: str = "") -> RenderableType:
    """Everything, as something that rich can print."""
    parts: list[RenderableType] = [_head(view, url, hint)]
    if trouble:
        parts.append(Text(f"{trouble}; this is the last that was heard", style="yellow"))
    parts += [Text(), _figures(view), Text(), _pool(view)]
    if view["tree"]["n_branches"]:
        parts += [Text(), _branches(view)]
    if view["requests"]:
        parts += [Text(), _requests(view)]
    return Group(*parts)


def _head(view: Json, url: str, hint: str) -> Text:
    at = time.strftime("%H:%M:%S", time.localtime(view["time"]))
    text = Text.assemble(
        ("Headwater ", "bold"), f"{_plain(view['model'])} at {_plain(url)}  ", (at, "dim"), no_wrap=True
    )
    return text.append(f"  {hint}", style="dim") if hint else text


def _figures(view: Json) -> Table:
    counters, samples = view["counters"], view["samples"]
    queries = counters.get("prefix_queries", 0.0)
    reused = counters.get("prefix_hits", 0.0) + counters.get("copied_tokens", 0.0)
    table = Table.grid(padding=(0, 2))
    table.add_row(
        "reused", Text(_share(reused, queries), style="bold cyan"), f"{reused:,.0f} of {queries:,.0f} prompt tokens"
    )
    running, waiting = counters.get("running", 0.0), counters.get("waiting", 0.0)
    table.add_row("requests", Text(f"{running:.0f}", style="bold"), f"running, {waiting:.0f} waiting")
    for name, columns in (("cached/s", (HITS, COPIED)), ("computed/s", (COMPUTED,)), ("generated/s", (GENERATED,))):
        rates = _rates(samples, columns, view["time"])
        table.add_row(name, Text(f"{rates[-1]:,.0f}", style="bold"), Text(sparkline(rates), style="cyan"))
    return table


def _rates(samples: list[list[float]], columns: tuple[int, ...], now_s: float) -> list[float]:
    """Growth per second of the columns' sum, in the last N_SPARKS stretches of BUCKET_S seconds."""
    values, i, at = [], 0, 0.0
    for k in range(N_SPARKS, -1, -1):
        while i < len(samples) and samples[i][TIME] <= now_s - k * BUCKET_S:
            at = sum(samples[i][column] for column in columns)
            i += 1
        values.append(at if i else sum(samples[0][column] for column in columns) if samples else 0.0)
    return [max(0.0, after - before) / BUCKET_S for before, after in pairwise(values)]


def sparkline(values: list[float]) -> str:
    """A line of blocks; the highest value fills its cell, zero leaves it empty."""
    most = max(values, default=0.0)
    return "".join(" " if not value else SPARKS[int(value / most * 7.99)] for value in values)


def _pool(view: Json) -> Text:
    counts, n_blocks = view["counts"], view["n_blocks"]
    in_use = counts["in_use"] + counts["shared"] + counts["fenced"]
    parts = (
        (in_use, "█", "blue", "in use"),
        (counts["evictable"], "▓", "cyan", "cached"),
        (counts["free"], "░", "bright_black", "free"),
    )
    text, drawn = Text("pool  ", no_wrap=True), 0
    for n, mark, colour, _ in parts:
        cells = min(BAR - drawn, max(1, round(n / n_blocks * BAR)) if n else 0)
        text.append(mark * cells, style=colour)
        drawn += cells
    text.append("\n      ")
    for n, mark, colour, name in parts:
        text.append(f"{mark} ", style=colour).append(f"{n:,} {name}   ")
    return text


def _branches(view: Json) -> Table:
    table = Table(box=None, padding=(0, 1), expand=True)
    table.add_column("prefixes", ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column("tokens held", justify="right")
    table.add_column("hits", justify="right")
    levels: dict[str | None, int] = {None: -1}
    for row in view["tree"]["rows"][:N_BRANCHES]:
        level = levels[row["id"]] = levels.get(row["parent"], -1) + 1
        name = Text("  " * level + _branch_name(row), style="bold" if row["parent"] is None else "")
        table.add_row(name, f"{row['tokens_held_in_all']:,}", f"{row['hits']:,}")
    return table


def _plain(text: str) -> str:
    """One line without anything that a terminal would obey."""
    return "".join(character if character.isprintable() else "\u00b7" for character in " ".join(text.split()))


def _branch_name(row: Json) -> str:
    if row["parent"] is None:
        return f"{'salted ' if row['salted'] else ''}namespace {row['id'][:12]}"
    if row["text"] is None:
        return f"{row['tokens']} tokens from token {row['start']} on"
    return _plain(row["text"])


def _requests(view: Json) -> Table:
    table = Table(box=None, padding=(0, 1), expand=True)
    for name in ("requests", "prompt", "cached", "out", "first token"):
        table.add_column(name, justify="left" if name == "requests" else "right", no_wrap=True)
    table.add_column("why the hit ended there", ratio=1, no_wrap=True, overflow="ellipsis")
    for request in view["requests"][:N_REQUESTS]:
        account, first_s = request.get("account"), request["ttft_s"]
        table.add_row(
            time.strftime("%H:%M:%S", time.localtime(request["arrived"])),
            f"{request['n_prompt']:,}",
            Text(_share(request["n_cached"], request["n_prompt"]), style="cyan"),
            f"{request['n_generated']:,}",
            "" if first_s is None else f"{first_s * 1000:,.0f} ms",
            Text("" if account is None else _plain(account["stop"]["sentence"])),
        )
    return table


def _share(part: float, whole: float) -> str:
    return f"{100 * part // whole:.0f} %" if whole else "-"
