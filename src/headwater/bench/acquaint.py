"""Getting to know a server before it is measured: what it understands, and how fast it is."""

from __future__ import annotations

import time

import msgspec

from headwater.bench.counters import cached_tokens
from headwater.bench.dialect import Dialect, learn
from headwater.bench.measure import Measurer, Stamp
from headwater.bench.plan import Costs, Plan, Start, done_trials, fit
from headwater.bench.progress import duration
from headwater.bench.prompts import Drawer, Vocabulary, learn_vocabulary
from headwater.bench.results import read_samples
from headwater.bench.session import Known, Session
from headwater.bench.settings import QUICK_S
from headwater.bench.site import Site, pool_tokens
from headwater.bench.sweep import Sweep, probe

PAIR_TOKENS = 256
"""The prefix with which it is found out whether a running server caches."""


def get_to_know(session: Session, site: Site, start: Start, plan: Plan, deadline_s: float | None) -> Known:
    """Learn how to ask the server and what that costs, and settle the plan."""
    session.progress.stage("finding out what the server understands")
    dialect = learn(site.clients.ask, site.facts.model)
    vocabulary = learn_vocabulary(site.clients.ask, dialect)
    session.run["abilities"] = {**msgspec.to_builtins(dialect), "exact_lengths": vocabulary.exact}
    _flag_inabilities(session, dialect, vocabulary)
    if not dialect.token_ids:
        dialect = msgspec.structs.replace(dialect, extra_tokens=vocabulary.extra)
    drawer, measurer = session.drawer(vocabulary), measurer_of(session, site, dialect)
    if session.settings.url is not None and "plan" not in session.run:
        start = _found_caching(session, measurer, drawer, plan, start)
        plan = msgspec.structs.replace(
            plan, starts=tuple(Start(start.caching, one.interference) for one in plan.starts)
        )
    session.progress.stage("measuring how fast the server is")
    no_costs = Costs(0.0, 0.0, 0.0, 0.0)
    sweep_of(session, plan, start, measurer, drawer, no_costs, site).warm_up()
    start_s = site.process.start_s if site.process is not None else 0.0
    costs = probe(plan, measurer, drawer, start, start_s)
    if deadline_s is not None and "plan" not in session.run:
        fitted = fit(plan, costs, lambda cut: pool_tokens(session, site, start, cut), deadline_s - time.monotonic())
        if (fitted.prefixes, fitted.outputs) != (plan.prefixes, plan.outputs):
            session.flag(
                f"quick: this machine is too slow for everything in {QUICK_S:.0f} s; measured are prefixes of "
                f"{', '.join(map(str, fitted.prefixes))} and outputs of {', '.join(map(str, fitted.outputs))} tokens"
            )
        plan = fitted
    session.run["plan"] = msgspec.to_builtins(plan)
    session.run["costs"] = msgspec.to_builtins(costs)
    _tell_duration(session, plan, costs, pool_tokens(session, site, start, plan), dialect)
    return Known(dialect, vocabulary, costs, plan)


def _flag_inabilities(session: Session, dialect: Dialect, vocabulary: Vocabulary) -> None:
    if not dialect.token_ids:
        session.flag("the server takes no token ids: prompts are English words, one token each")
    if not vocabulary.exact:
        session.flag("the server tells no prompt lengths: a word is taken for a token, lengths are not exact")
    if not dialect.ignore_eos:
        session.flag("the server refuses ignore_eos: answers may end before their number of tokens")
    if not dialect.cache_salt:
        session.flag("the server refuses cache_salt: the counter-example with another salt is not run")
    if not dialect.counts_by_event:
        session.flag(
            "events do not tell how many tokens they carry: ITL is by token only where as many events as tokens came"
        )


def _found_caching(session: Session, measurer: Measurer, drawer: Drawer, plan: Plan, start: Start) -> Start:
    """Whether a running server caches, by a prefix sent twice."""
    prefix = drawer.prefix(min(PAIR_TOKENS, max(plan.prefixes)))
    for _ in range(2):
        pieces = (*prefix, *drawer.question(plan.question_tokens))
        sample = measurer.measure({"interference": start.interference}, "warm_up", 0, pieces, 1)
    told = cached_tokens(sample)
    session.flag(
        "the server at --url runs already: it could not be started anew, so caching off was not measured, and its "
        "cache held whatever others had left there"
    )
    if told is None:
        session.flag("the server does not tell whether anything was cached: taken to be with caching on")
    return Start("off" if told is not None and told[0] == 0 else "on", start.interference)


def _tell_duration(session: Session, plan: Plan, costs: Costs, flood: float, dialect: Dialect) -> None:
    done = done_trials(read_samples(session.folder), plan, salts=dialect.cache_salt)
    left_s = costs.sweep(plan, flood) - sum(costs.trial(plan, cell) for cell, _ in done)
    session.run["estimate_s"] = round(left_s, 1)
    session.save()
    session.progress.say(
        f"{len(plan.starts)} server starts, {plan.repeats} repeats of {len(plan.prefixes)} prefixes x "
        f"{len(plan.outputs)} outputs each: about {duration(left_s)}"
        + (f" for what is left ({len(done)} trials are done)" if done else "")
        + f". Results go to {session.folder} as they come; Ctrl-C stops, --resume {session.folder} goes on."
    )
    session.progress.begin(left_s)


def measurer_of(session: Session, site: Site, dialect: Dialect) -> Measurer:
    name = " ".join(part for part in (site.facts.owned_by, site.facts.version) if part)
    stamp = Stamp(session.begun_s, session.attempt, name or "unknown", session.run["label"])
    return Measurer(
        site.clients,
        site.metrics,
        dialect,
        session.writer,
        stamp,
        alive=lambda: site.alive,
        stall_s=session.settings.stall_s,
    )


def sweep_of(
    session: Session,
    plan: Plan,
    start: Start,
    measurer: Measurer,
    drawer: Drawer,
    costs: Costs,
    site: Site,
) -> Sweep:
    done = done_trials(read_samples(session.folder), plan, salts=measurer.dialect.cache_salt)
    pool = pool_tokens(session, site, start, plan)
    return Sweep(plan, start, measurer, drawer, costs, pool, done, session.progress.advance)
