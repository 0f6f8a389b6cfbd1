"""`headwater bench load`: many requests at once, as they arrive, against a server that runs."""

from __future__ import annotations

import datetime
import queue
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from headwater.bench import arrivals, machine, mixes
from headwater.bench.client import Answer, Ask
from headwater.bench.clients import Clients
from headwater.bench.counters import Metrics, Scrape
from headwater.bench.dialect import Dialect, learn
from headwater.bench.load_settings import LoadSettings
from headwater.bench.mixes import Item
from headwater.bench.progress import BenchProgress
from headwater.bench.prompts import Drawer, Vocabulary, learn_vocabulary
from headwater.bench.results import RESULTS, ResultsWriter, Sample, write_run
from headwater.bench.server import ServerFacts, api_base, facts
from headwater.bench.trace import TraceScale, read_trace
from headwater.errors import BenchError, ConfigError

LEAD_S = 2.0
"""A request is handed to the measuring process so long before it is due, so that it leaves on time."""

SCRAPE_EVERY_S = 0.5
"""How often the shared blocks are looked at."""

MOST_UNREACHABLE = 5
"""So many requests in a row that could not even connect: the server is gone."""


def run_load(
    settings: LoadSettings, folder: Path, headers: dict[str, str], command: list[str], given: frozenset[str]
) -> dict[str, Any]:
    """Measure into a new ``folder``; returns what run.json holds. ``given``: the settings that the caller named.

    Raises ConfigError and BenchError, before anything is sent where that can be known. KeyboardInterrupt leaves all
    that was answered in the folder.
    """
    settings.check(given)
    if (folder / RESULTS).exists() and (folder / RESULTS).stat().st_size:
        raise ConfigError(f"{folder} holds results already: name another folder with --out")
    if settings.file is not None and not Path(settings.file).is_file():
        raise ConfigError(f"there is no file {settings.file}")
    base_url = api_base(settings.url)
    found = facts(base_url, headers, settings.served_model)
    with ExitStack() as stack:
        progress = stack.enter_context(BenchProgress())
        clients = stack.enter_context(Clients(base_url, headers))
        metrics = stack.enter_context(Metrics(base_url, headers))
        first = metrics.scrape()
        progress.stage("finding out what the server understands")
        dialect = learn(clients.ask, found.model)
        vocabulary = learn_vocabulary(clients.ask, dialect)
        if not dialect.token_ids:
            dialect = msgspec.structs.replace(dialect, extra_tokens=vocabulary.extra)
        run = _about(settings, found, dialect, command, first)
        items = _fitting(settings, make_items(settings, run["seed"], vocabulary, dialect), found, run)
        writer = stack.enter_context(ResultsWriter(folder))
        write_run(folder, run)
        load = Load(settings, items, clients, metrics, writer, progress, run)
        try:
            load.send_all()
            run["finished"] = load.n_answered == len(items)
        except (KeyboardInterrupt, BenchError):
            progress.say(f"stopped; what was answered is in {folder}. Its report: headwater bench report {folder}")
            raise
        finally:
            run["sharing"] = load.sharing
            run["counters"] = {"before": load.counters_before, "after": _counters(metrics.scrape())}
            write_run(folder, run)
    return run


def _about(
    settings: LoadSettings, found: ServerFacts, dialect: Dialect, command: list[str], first: Scrape | None
) -> dict[str, Any]:
    name = " ".join(part for part in (found.owned_by, found.version) if part)
    flags = []
    if first is not None and first.counters.get("queries"):
        flags.append(
            f"the server was not fresh: {first.counters['queries']:,.0f} tokens had been looked up before the first "
            "request, so its cache may have been warm"
        )
    if first is None or first.exporter is None:
        flags.append("the server exports no counters that are known here: cached tokens are those of its usage field")
    if not dialect.ignore_eos:
        flags.append("the server refuses ignore_eos: answers may end before their number of tokens")
    gauges = first.gauges if first is not None else {}
    return {
        "format": 1,
        "kind": "load",
        "label": settings.label or settings.url,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "arguments": msgspec.to_builtins(settings),
        "load": settings.describe(),
        "machine": machine.describe(),
        "server": {**msgspec.to_builtins(found), "name": name or "unknown", "pool_blocks": gauges.get("pool_blocks")},
        "abilities": msgspec.to_builtins(dialect),
        "seed": settings.seed if settings.seed is not None else secrets.randbits(31),
        "flags": flags,
        "finished": False,
    }


def make_items(settings: LoadSettings, seed: int, vocabulary: Vocabulary, dialect: Dialect) -> list[Item]:
    """All requests of the workload, in order, with their times where the arrival has some."""
    items = _workload(settings, seed, vocabulary, dialect)
    if settings.how == "closed":
        return [replace(item, at_s=None) for item in items]
    if settings.how == "trace":
        return items
    if settings.rate is None:
        raise ConfigError(f"--arrival {settings.how} needs --rate")
    make = partial(arrivals.poisson, seed=seed) if settings.how == "poisson" else arrivals.fixed
    return [replace(item, at_s=at) for item, at in zip(items, make(len(items), settings.rate), strict=True)]


def _workload(settings: LoadSettings, seed: int, vocabulary: Vocabulary, dialect: Dialect) -> list[Item]:
    drawer = Drawer(vocabulary, f"load/{seed}")
    if settings.workload == "herd":
        sizes = (settings.herds, settings.clients, settings.prefix_tokens, settings.turn_tokens, settings.output)
        return mixes.herds(*sizes, drawer, dialect)
    if settings.workload in ("mix", "chat"):
        shape = mixes.Shape(
            settings.conversations,
            min(settings.systems, settings.conversations) if settings.workload == "mix" else 1,
            settings.turns,
            settings.system_tokens,
            settings.turn_tokens,
            settings.output,
        )
        return mixes.conversations(shape, drawer, dialect)
    file = Path(settings.file or "")
    if settings.workload == "jsonl":
        return mixes.read_requests(file, settings.output, dialect, settings.requests)
    lines, scale = read_trace(file, settings.requests), TraceScale(settings.length_scale)
    return mixes.trace_items(lines, scale, settings.time_scale, seed, vocabulary, dialect)


def _fitting(settings: LoadSettings, items: list[Item], found: ServerFacts, run: dict[str, Any]) -> list[Item]:
    """Those that the server's context can hold; all of them, or ConfigError, unless the others may be left out."""
    limit = found.max_model_len
    if limit is None:
        return items
    sizes = [(item.prompt_tokens or 0) + item.max_tokens for item in items]
    n_long = sum(size > limit for size in sizes)
    if not n_long:
        return items
    told = f"{n_long} of {len(items)} requests are longer than the {limit} tokens that {found.model} takes"
    if settings.workload != "trace":
        raise ConfigError(f"{told} (the longest has {max(sizes)}): make them shorter")
    if not settings.skip_too_long:
        fits = settings.length_scale * limit / max(sizes)
        raise ConfigError(
            f"{told} (the longest has {max(sizes)}): all fit with --length-scale {fits * 0.99:.2g}, or leave those out "
            "with --skip-too-long"
        )
    if n_long == len(items):
        raise ConfigError(f"{told}: none is left")
    run["flags"].append(f"{told} and were left out")
    return [item for item, size in zip(items, sizes, strict=True) if size <= limit]


def _counters(scrape: Scrape | None) -> Mapping[str, float] | None:
    return scrape.counters if scrape is not None and scrape.exporter is not None else None


@dataclass
class Load:
    """One load in progress."""

    settings: LoadSettings
    items: Sequence[Item]
    clients: Clients
    metrics: Metrics
    writer: ResultsWriter
    progress: BenchProgress
    run: Mapping[str, Any]
    n_answered: int = 0
    sharing: dict[str, float] = field(default_factory=dict)
    counters_before: Mapping[str, float] | None = None
    _origin: float = 0.0
    _counted: bool = False
    _answers: queue.SimpleQueue[tuple[int, Future[Answer]]] = field(default_factory=queue.SimpleQueue)
    _ended: dict[int, float] = field(default_factory=dict)
    """By index, when a request's answer ended."""
    _due: dict[int, float] = field(default_factory=dict)
    _n_unreachable: int = 0

    def send_all(self) -> None:
        """Send every request when it is due, and write each answer as it ends."""
        before = self.metrics.scrape()
        self.counters_before, self._counted = _counters(before), before is not None and before.exporter is not None
        self.progress.begin(float(len(self.items)))
        self.progress.stage(self.settings.describe())
        self._origin = time.monotonic() + (0.2 if self.settings.how != "closed" else 0.0)
        waiting, running, scraped = list(range(len(self.items))), 0, 0.0
        while waiting or running:
            now = time.monotonic()
            if self._time_is_up(now):
                waiting = []
            sent = self._submit(waiting, running, now)
            waiting = [index for index in waiting if index not in sent] if sent else waiting
            running += len(sent)
            if now - scraped > SCRAPE_EVERY_S:
                self._see_sharing()
                scraped = now
            running -= self._take_answers(self._pause(waiting, now))

    def _time_is_up(self, now: float) -> bool:
        limit = self.settings.duration_s
        return limit is not None and now - self._origin > limit

    def _submit(self, waiting: Sequence[int], running: int, now: float) -> set[int]:
        """Hand over what may go: the indices sent."""
        sent: set[int] = set()
        closed = self.settings.how == "closed"
        for index in waiting:
            item = self.items[index]
            if closed and running + len(sent) >= self.settings.at_once:
                break
            if item.at_s is not None and self._origin + item.at_s > now + LEAD_S:
                break
            if all(one in self._ended for one in item.after):
                self._send(index, item, now)
                sent.add(index)
        return sent

    def _send(self, index: int, item: Item, now: float) -> None:
        planned = self._origin + item.at_s if item.at_s is not None else now + item.lead_s
        after = max((self._ended[one] for one in item.after), default=0.0)
        self._due[index] = max(planned, after)
        at_s = self._due[index] if item.at_s is not None or item.lead_s else None
        ask = Ask(body=item.body(), path=item.path, at_s=at_s, stall_s=self.settings.stall_s)
        future = self.clients.submit(ask)
        future.add_done_callback(lambda done: self._answers.put((index, done)))

    def _pause(self, waiting: Sequence[int], now: float) -> float:
        """Seconds until something may be due by the clock; answers come earlier by themselves."""
        if not waiting or self.settings.how == "closed":
            return SCRAPE_EVERY_S
        at_s = self.items[waiting[0]].at_s or 0.0
        return min(SCRAPE_EVERY_S, max(0.005, self._origin + at_s - LEAD_S - now))

    def _take_answers(self, wait_s: float) -> int:
        """Write the answers that have come, waiting for the first one; returns how many."""
        n = 0
        try:
            index, future = self._answers.get(timeout=wait_s)
            while True:
                self._write(index, future.result())
                n += 1
                index, future = self._answers.get_nowait()
        except queue.Empty:
            return n

    def _write(self, index: int, answer: Answer) -> None:
        item = self.items[index]
        self._ended[index] = answer.sent_s + (answer.e2e_s or 0.0)
        self.n_answered += 1
        self.progress.advance(1.0)
        self.writer.write(
            Sample(
                kind="load",
                cell={"workload": self.settings.workload, "load": self.settings.describe(), "group": item.group},
                role="request",
                repeat=index,
                request={"prompt_tokens": item.prompt_tokens, "max_tokens": item.max_tokens},
                scheduled_s=self._due[index] - self._origin,
                started_s=answer.sent_s - self._origin,
                events_s=answer.events_s,
                tokens_per_event=answer.tokens_per_event,
                ttft_s=answer.ttft_s,
                e2e_s=answer.e2e_s,
                usage=answer.usage,
                server_timing=answer.server_timing,
                lag_s=answer.lag_s,
                error=answer.error,
                server=str(self.run["server"]["name"]),
                label=str(self.run["label"]),
            )
        )
        self._n_unreachable = self._n_unreachable + 1 if answer.unreachable else 0
        if self._n_unreachable >= MOST_UNREACHABLE:
            raise BenchError(f"the server is gone: {self._n_unreachable} requests in a row got no connection")

    def _see_sharing(self) -> None:
        """Keep the moment at which sharing saved most blocks: table entries over the blocks behind them."""
        scrape = self.metrics.scrape() if self._counted else None
        if scrape is None or not {"logical_blocks", "physical_blocks"} <= scrape.gauges.keys():
            return
        logical, physical = scrape.gauges["logical_blocks"], scrape.gauges["physical_blocks"]
        if not self.sharing or logical - physical > self.sharing["saved_blocks"]:
            self.sharing = {
                "saved_blocks": logical - physical,
                "logical_blocks": logical,
                "physical_blocks": physical,
            }


def default_folder(now: datetime.datetime) -> Path:
    """Where results go that were not told where."""
    return Path(f"bench-load-{now:%Y%m%d-%H%M%S}")
