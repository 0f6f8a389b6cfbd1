"""`headwater bench prefix`: what prefix caching buys, measured from server start to the last repeat."""

from __future__ import annotations

import datetime
import secrets
import time
from pathlib import Path
from typing import Any

import msgspec

from headwater.bench import machine
from headwater.bench.acquaint import get_to_know, measurer_of, sweep_of
from headwater.bench.counters import cached_tokens
from headwater.bench.measure import Measurer, ServerGone
from headwater.bench.plan import Plan, Start, done_trials, floods
from headwater.bench.progress import BenchProgress
from headwater.bench.results import RESULTS, ResultsWriter, read_run, read_samples
from headwater.bench.server import api_base, facts
from headwater.bench.session import Known, Session
from headwater.bench.settings import QUICK_S, Settings
from headwater.bench.site import Site, running
from headwater.errors import BenchError, ConfigError

FORMAT = 1
MOST_RESTARTS = 2
"""How often a server that died is started again."""


def run_prefix(settings: Settings, folder: Path, headers: dict[str, str], command: list[str]) -> dict[str, Any]:
    """Measure into a new ``folder``; returns what run.json holds. ``command`` is kept there as what was typed.

    Raises ConfigError and BenchError; KeyboardInterrupt leaves the folder ready to be resumed.
    """
    settings.check()
    if (folder / RESULTS).exists() and (folder / RESULTS).stat().st_size:
        raise ConfigError(
            f"{folder} holds results already: go on with them by --resume {folder}, or name another folder"
        )
    if settings.url is not None:
        facts(api_base(settings.url), headers, settings.served_model)  # before a folder is made for nothing
    run = {
        "format": FORMAT,
        "kind": "prefix",
        "label": settings.label or settings.describe(),
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "arguments": msgspec.to_builtins(settings),
        "machine": machine.describe(),
        "nonce": secrets.token_hex(8),
        "sessions": 0,
        "starts": [],
        "flags": [],
        "finished": False,
    }
    return _run(settings, folder, headers, run)


def resume_prefix(folder: Path, headers: dict[str, str]) -> dict[str, Any]:
    """Go on with a sweep that was stopped, that failed in parts, or that ran out of time.

    Raises BenchError when there is none in ``folder``, or it is complete.
    """
    run = read_run(folder)
    if run.get("kind") != "prefix":
        raise BenchError(f"{folder} holds no prefix sweep but {run.get('kind')!r}")
    try:
        complete = "plan" in run and not _not_done(folder, run, msgspec.convert(run["plan"], Plan))
        settings = msgspec.convert(run["arguments"], Settings)
    except (KeyError, msgspec.ValidationError) as error:
        raise BenchError(f"the arguments in {folder}/run.json cannot be read: {error}") from None
    if complete:
        raise BenchError(f"the sweep in {folder} is complete: draw its report with headwater bench report {folder}")
    return _run(settings, folder, headers, run)


def _run(settings: Settings, folder: Path, headers: dict[str, str], run: dict[str, Any]) -> dict[str, Any]:
    attempt = run["sessions"]
    run["sessions"] += 1
    with ResultsWriter(folder) as writer, BenchProgress() as progress:
        session = Session(settings, folder, headers, run, progress, writer, attempt)
        session.save()
        try:
            _all_starts(session)
        except (KeyboardInterrupt, BenchError):
            if (folder / RESULTS).stat().st_size:
                progress.say(
                    f"stopped; what was measured is in {folder}. Go on: headwater bench prefix --resume {folder}"
                )
            raise
        run["finished"] = True
        session.save()
    return run


def _all_starts(session: Session) -> None:
    settings, run = session.settings, session.run
    plan = msgspec.convert(run["plan"], Plan) if "plan" in run else settings.plan()
    deadline_s = session.begun_s + QUICK_S if settings.quick else None
    if settings.start_command is not None and not settings.quick and session.attempt == 0:
        _rehearse(session, plan)
    restarts = 0
    left = _not_done(session.folder, run, plan)
    while left:
        start = left[0]
        try:
            with running(session, start, plan) as site:
                if session.known is None:
                    session.known = get_to_know(session, site, start, plan, deadline_s)
                    plan = session.known.plan
                    left = _not_done(session.folder, run, plan)
                if left:
                    _sweep(session, session.known, site, left[0], deadline_s, left)
                    left.pop(0)
        except ServerGone as gone:
            restarts += 1
            if settings.url is not None or restarts > MOST_RESTARTS:
                raise BenchError(f"{gone}; {_log(session, start)}") from None
            session.flag(f"the server ({start.name}) ended in the middle and was started again: {gone}")
            session.attempt = run["sessions"]
            run["sessions"] += 1
            session.save()
    _tell_failures(session, plan)


def _rehearse(session: Session, plan: Plan) -> None:
    """Start each server of a command once: what is wrong with it shows now, and not after an hour."""
    for start in plan.starts[1:]:
        with running(session, start, plan):
            pass
    session.run["starts"].clear()


def _tell_failures(session: Session, plan: Plan) -> None:
    failed = sum(sample.error is not None for sample in read_samples(session.folder))
    if failed:
        session.flag(f"{failed} requests failed; their errors are in {RESULTS}")
    if failed and _not_done(session.folder, session.run, plan):
        session.progress.say(f"repeat those that failed: headwater bench prefix --resume {session.folder}")


def _not_done(folder: Path, run: dict[str, Any], plan: Plan) -> list[Start]:
    """The starts that still have something to measure."""
    done = done_trials(read_samples(folder), plan, salts=run.get("abilities", {}).get("cache_salt", False))
    return [
        start
        for start in plan.starts
        if not all((cell, repeat) in done for repeat in range(plan.repeats) for cell in plan.cells(start, repeat))
    ]


def _log(session: Session, start: Start) -> str:
    if session.settings.url is not None:
        return "start it again, then resume"
    return f"its output is in {session.log_of(start)}"


def _sweep(
    session: Session, known: Known, site: Site, start: Start, deadline_s: float | None, left: list[Start]
) -> None:
    """Warm up, then all rounds of a start."""
    measurer = measurer_of(session, site, known.dialect)
    drawer = session.drawer(known.vocabulary)
    sweep = sweep_of(session, known.plan, start, measurer, drawer, known.costs, site)
    if floods(start) and not sweep.pool_tokens:
        raise ConfigError(
            "the server does not tell how large its pool is, so that nobody knows what floods it: "
            "leave out --interference evicting, or start it by --start-command with {num_blocks} in it"
        )
    session.progress.stage(f"warming up: {start.name}")
    sweep.warm_up()
    session.progress.stage(start.name)
    n_rounds = sweep.run(_share_of_time(known, start, left, deadline_s, sweep.pool_tokens))
    if n_rounds < known.plan.repeats:
        session.flag(f"{start.name}: time was up after {n_rounds} of {known.plan.repeats} repeats")
    session.progress.advance(known.costs.start_s)
    if floods(start):
        _check_evicted(session, measurer)


def _share_of_time(
    known: Known, start: Start, left: list[Start], deadline_s: float | None, pool_tokens: float
) -> float | None:
    """Until when a start's rounds may last, the other starts that are left having their share of the time too."""
    if deadline_s is None:
        return None
    costs = {one: known.costs.round(known.plan, one, pool_tokens) for one in left}
    time_s = deadline_s - time.monotonic() - (len(left) - 1) * known.costs.start_s
    return time.monotonic() + time_s * costs[start] / sum(costs.values())


def _check_evicted(session: Session, measurer: Measurer) -> None:
    """Interference that was to evict must have: say so where it did not."""
    asked = [sample for sample in measurer.samples if sample.role in ("hit", "evicted") and sample.error is None]
    told = [(sample, found[0]) for sample in asked if (found := cached_tokens(sample)) is not None]
    kept = [sample for sample, n_cached in told if n_cached >= session.settings.block_size]
    session.run["evicted"] = {"asked": len(asked), "told": len(told), "still_cached": len(kept)}
    if kept:
        session.flag(
            f"interference did not evict: {len(kept)} of {len(told)} prefixes were still cached after it; "
            "a smaller pool (--evicting-blocks) would be flooded sooner"
        )
    if asked and not told:
        session.flag("whether the interference evicted is not known: the server tells no cached tokens")
    session.save()
