"""The server of one start while it runs, with all that is needed to measure it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from headwater.bench.clients import Clients
from headwater.bench.counters import Metrics, Scrape
from headwater.bench.plan import Plan, Start
from headwater.bench.server import ServerFacts, StartedServer, api_base, facts, free_port, started
from headwater.bench.session import Session
from headwater.bench.settings import Settings
from headwater.errors import ConfigError


@dataclass
class Site:
    """A server that answers now. ``process`` None: it is not ours."""

    base_url: str
    facts: ServerFacts
    clients: Clients
    metrics: Metrics | None
    first: Scrape | None
    process: StartedServer | None = None
    n_blocks: int | None = None
    """Blocks of the pool that it was started with, if interference is to evict from it."""

    @property
    def alive(self) -> bool:
        return self.process is None or self.process.alive

    @property
    def gauges(self) -> Mapping[str, float]:
        return self.first.gauges if self.first is not None else {}


@contextlib.contextmanager
def running(session: Session, start: Start, plan: Plan) -> Iterator[Site]:
    """The server for ``start``: started, or the one that runs. Nothing has been asked of it but its models."""
    settings = session.settings
    with contextlib.ExitStack() as stack:
        process, n_blocks = None, None
        if settings.url is not None:
            base_url, command = api_base(settings.url), None
        else:
            port = free_port()
            base_url, command = f"http://127.0.0.1:{port}{settings.api_path}", settings.command(start, port, plan)
            n_blocks = settings.pool_blocks(plan)
            session.progress.stage(f"starting the server: {start.name}")
            log = session.log_of(start)
            process = stack.enter_context(started(command, base_url, log, settings.start_limit_s))
        found = facts(base_url, session.headers, settings.served_model)
        metrics = stack.enter_context(Metrics(base_url, session.headers))
        first = metrics.scrape()
        counted = first is not None and first.exporter is not None
        clients = stack.enter_context(Clients(base_url, session.headers))
        site = Site(base_url, found, clients, metrics if counted else None, first, process, n_blocks)
        _check_limit(found, plan, start, settings)
        _note_start(session, site, start, command)
        _note_blocks(session, site, plan)
        yield site


def _check_limit(found: ServerFacts, plan: Plan, start: Start, settings: Settings) -> None:
    if found.max_model_len is None or plan.longest <= found.max_model_len:
        return
    sizes = f"prefix {max(plan.prefixes)} + question {plan.question_tokens} + output {max(plan.outputs)}"
    what_to_do = "give shorter --prefixes or --outputs, or serve with a larger context"
    if start.interference == "evicting" and settings.url is None:
        what_to_do = (
            f"its pool of {settings.pool_blocks(plan)} blocks, made small to be flooded, may be what limits it: "
            "give more --evicting-blocks, or shorter --prefixes or --outputs"
        )
    raise ConfigError(
        f"{sizes} = {plan.longest} tokens, but {found.model} takes {found.max_model_len} ({start.name}): {what_to_do}"
    )


def _note_start(session: Session, site: Site, start: Start, command: list[str] | None) -> None:
    """Put into run.json who answers, and whether its cache is as fresh as it should be."""
    run, found, first = session.run, site.facts, site.first
    exporter = first.exporter if first is not None else None
    run["server"] = {
        **msgspec.to_builtins(found),
        "exporter": exporter,
        "pool_blocks": site.gauges.get("pool_blocks"),
    }
    warm, why = _warmth(first)
    run["starts"].append(
        {
            "caching": start.caching,
            "interference": start.interference,
            "attempt": session.attempt,
            "command": command,
            "start_s": round(site.process.start_s, 2) if site.process is not None else None,
            "warm": warm,
            "warm_why": why,
            "pool_blocks": site.gauges.get("pool_blocks"),
        }
    )
    if warm:
        session.flag(f"the server was not fresh ({why}): its cache may be warm, and nothing here is called cold")
    if exporter is None:
        session.flag("the server exports no counters that are known here: cached tokens are those of its usage field")
    session.save()


def _note_blocks(session: Session, site: Site, plan: Plan) -> None:
    """Reuse is by whole blocks: say where a prefix is not made of them."""
    block_size = round(site.gauges.get("block_size", 0))
    uneven = [prefix for prefix in plan.prefixes if block_size and prefix % block_size]
    if uneven:
        session.flag(
            f"the server's blocks have {block_size} tokens: of prefixes of {', '.join(map(str, uneven))} tokens, "
            f"{', '.join(str(prefix // block_size * block_size) for prefix in uneven)} at most can hit by whole blocks"
        )


def _warmth(first: Scrape | None) -> tuple[bool | None, str]:
    """Whether a server that should be fresh has served before; None: it does not tell."""
    if first is None or first.exporter is None:
        return None, "no counters"
    for name, what in (
        ("queries", "tokens had been looked up"),
        ("hits", "tokens had hit"),
        ("generation_tokens", "tokens had been generated"),
    ):
        if first.counters.get(name):
            return True, f"{first.counters[name]:.0f} {what} before the first request"
    if first.gauges.get("blocks_evictable"):
        return True, f"{first.gauges['blocks_evictable']:.0f} blocks were cached before the first request"
    return False, "its counters were at zero"


def pool_tokens(session: Session, site: Site, start: Start, plan: Plan) -> float:
    """Tokens in the pool that interference is to evict from; 0: it is not known.

    ``start`` is what ``site`` runs as: if it has no such pool, a later one will, made for ``plan``.
    """
    settings = session.settings
    if settings.url is not None:
        n_blocks = site.gauges.get("pool_blocks", 0.0)
    elif start.interference == "evicting" and site.n_blocks is not None:
        n_blocks = site.n_blocks
    else:
        n_blocks = settings.pool_blocks(plan)
    return n_blocks * site.gauges.get("block_size", settings.block_size)
