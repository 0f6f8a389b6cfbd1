"""What a reader must know before believing a run: each a name and a sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from headwater.bench.findings import CALM, Findings
from headwater.bench.readings import COUNTER_EXAMPLES, FRESH_ROLES, HIT, Reading, Run, machine_of, server_of, whole

LAG_SHARE, LAG_S = 0.1, 0.002
"""The measuring side was late by so much of a request's time to first token, and by more than it should resolve."""

LATE_SHARE = 0.05
"""Of the requests: so many may be measured late by chance."""


@dataclass(frozen=True, slots=True)
class Flag:
    """``grave``: the run does not answer what it was made for."""

    name: str
    text: str
    grave: bool = False


def flags(found: Findings) -> list[Flag]:
    """All that is to be said against the runs, gravest first."""
    several = len(found.runs) > 1
    raised = []
    for run in found.runs:
        where = f"{run.label}: " if several else ""
        told = run.about.get("flags")
        said = [Flag("said by the run", str(text)) for text in told] if isinstance(told, list) else []
        own = chain.from_iterable(check(run) for check in CHECKS)
        raised += [Flag(one.name, where + one.text, one.grave) for one in (*said, *own)]
    raised += _unlike(found.runs)
    return sorted(raised, key=lambda one: not one.grave)


def _good(run: Run, roles: Sequence[str] | frozenset[str], caching_off: bool = False) -> list[Reading]:
    return [one for one in run.readings if one.role in roles and one.measured and one.caching_off == caching_off]


def _warm(run: Run) -> Iterator[Flag]:
    fresh = [one for one in _good(run, FRESH_ROLES) if one.kind == "prefix"]
    warm = [one.cached or 0 for one in fresh if one.hit]
    if warm:
        yield Flag(
            "warm cache",
            f"{len(warm)} of {len(fresh)} requests whose prefix had never been sent in this run hit the cache, with up "
            f"to {max(warm):,} tokens. The cache was already warm (an earlier run, other users), or all prompts begin "
            "alike. What is called cold here is not cold: start the server anew and measure again.",
            grave=True,
        )
    elif any(one.cached for one in fresh):
        most = max(one.cached or 0 for one in fresh)
        yield Flag(
            "common beginning",
            f"Prompts never sent before hit up to {most:,} tokens: the beginning that all prompts share, such as a "
            "chat template's.",
        )


def _warm_start(run: Run) -> Iterator[Flag]:
    starts = run.about.get("starts")
    warm = [one for one in starts if isinstance(one, dict) and one.get("warm")] if isinstance(starts, list) else []
    if warm:
        yield Flag(
            "warm cache",
            f"The server was not fresh ({warm[0].get('warm_why')}): its cache may hold what others left. Controls use "
            "prefixes that nobody can have sent, and their cached tokens are checked; nothing else is called cold.",
        )


def _off_hits(run: Run) -> Iterator[Flag]:
    off = [one for one in run.readings if one.kind == "prefix" and one.caching_off and one.measured]
    hit = [one for one in off if one.hit]
    if hit:
        yield Flag(
            "off is not off",
            f"{len(hit)} of {len(off)} requests to the server without caching reported cached tokens. Its times are "
            "not those of a server that computes everything.",
            grave=True,
        )


def _no_hits(run: Run) -> Iterator[Flag]:
    hits = [one for one in _good(run, (HIT,)) if one.cell.get("interference", CALM) == CALM]
    told = [one for one in hits if one.cached is not None]
    missed = [one for one in told if not one.hit]
    if told and len(missed) == len(told):
        yield Flag(
            "nothing hit",
            f"All {len(told)} requests that repeat a prefix missed the cache: is prefix caching on, and does the "
            "prefix fit? There is no hit to compare with.",
            grave=True,
        )
    elif missed:
        yield Flag("some missed", f"{len(missed)} of {len(told)} requests that repeat a prefix missed the cache.")


def _broken(run: Run) -> Iterator[Flag]:
    broken = [one for one in run.readings if one.error is not None]
    if broken:
        most = max({one.error for one in broken}, key=lambda text: sum(one.error == text for one in broken))
        yield Flag(
            "errors",
            f"{len(broken)} of {len(run.readings)} requests failed and are in no figure. The most frequent error: "
            f"{most}",
            grave=2 * len(broken) > len(run.readings),
        )


def _examples(run: Run) -> Iterator[Flag]:
    for role, what in COUNTER_EXAMPLES.items():
        sent = [one for one in _good(run, (role,)) if one.cached is not None]
        hit = [one for one in sent if one.hit]
        if not hit:
            continue
        text = f"{len(hit)} of {len(sent)} requests of the kind '{what}' hit the cache"
        if role == "evicted":
            yield Flag(
                "eviction not shown",
                f"{text}: what was sent in between did not evict the prefix. That is no fault of the cache; the case "
                "'evicted' is not shown. A smaller pool or more interference would show it.",
            )
        elif role == "other_salt":
            yield Flag(
                "salt ignored",
                f"{text}: the server does not keep prefixes of different salts apart. Between tenants that is a leak; "
                "the figures here are not touched by it.",
            )
        else:
            yield Flag("false hit", f"{text}. It must not: the server reused KV of another identity.", grave=True)


def _lag(run: Run) -> Iterator[Flag]:
    good = [one for one in run.readings if one.measured]
    late = [one for one in good if one.sample.lag_s > max(LAG_S, LAG_SHARE * (one.ttft_s or 0.0))]
    if good and len(late) > LATE_SHARE * len(good):
        lags = np.array([one.sample.lag_s for one in late])
        yield Flag(
            "client lag",
            f"The measuring side was the bottleneck: in {len(late)} of {len(good)} requests its event loop was late by "
            f"more than {LAG_SHARE:.0%} of the time to first token (median {1e3 * float(np.median(lags)):.1f} ms). "
            "Their times are the client's as much as the server's.",
            grave=2 * len(late) > len(good),
        )


def _untold(run: Run) -> Iterator[Flag]:
    good = [one for one in run.readings if one.measured]
    if good and all(one.cached is None for one in good):
        yield Flag(
            "cached tokens unknown",
            "The server tells of no cached tokens, neither by counters nor in its usage: whether anything hit is "
            "inferred from time alone.",
        )


def _no_counters(run: Run) -> Iterator[Flag]:
    good = [one for one in run.readings if one.measured]
    sweep = [one for one in good if one.kind == "prefix"]  # a load's requests overlap: counters are not read for each
    by_usage = any(one.cached_by == "usage" for one in sweep)
    if by_usage and all(one.sample.counters_before is None for one in sweep):
        yield Flag("no counters", "Cached tokens are those of the usage field of each answer; no counters were read.")
    if any(one.gaps_s and not one.per_token for one in good):
        yield Flag(
            "events of several tokens",
            "Some events carried several tokens, or the server does not tell how many: the time between tokens is the "
            "time between events there.",
        )


def _disagree(run: Run) -> Iterator[Flag]:
    both = [
        (one.cached, one.sample.usage.cached_tokens)
        for one in run.readings
        if one.measured and one.cached_by == "counters" and one.sample.usage is not None
    ]
    apart = [(counted, used) for counted, used in both if used is not None and counted != used]
    if apart:
        yield Flag(
            "counters and usage differ",
            f"In {len(apart)} requests the counters and the usage field tell different numbers of cached tokens, such "
            f"as {apart[0][0]} and {apart[0][1]}. The counters' are used.",
        )


def _short(run: Run) -> Iterator[Flag]:
    good = [one for one in run.readings if one.measured and one.kind == "prefix"]
    short = [
        one
        for one in good
        if one.output_tokens is not None and one.output_tokens < (whole(one.sample.request.get("max_tokens")) or 0)
    ]
    if short:
        yield Flag(
            "short answers",
            f"{len(short)} of {len(good)} answers ended before the number of tokens asked for: times of whole requests "
            "compare different amounts of work.",
        )


def _unfinished(run: Run) -> Iterator[Flag]:
    if run.about.get("finished") is False:
        yield Flag("unfinished", "The run was stopped before its end; the figures are those of what it had measured.")


def _unlike(runs: Sequence[Run]) -> Iterator[Flag]:
    """Runs that are compared should differ in one thing."""
    machines = {tuple(about.get(name) for name in ("cpu", "cores", "memory_gib")) for about in map(machine_of, runs)}
    models = {str(server_of(run).get("model")) for run in runs}
    for what, told in (("machine", machines), ("name of the model", models)):
        if len(told) > 1:
            yield Flag(f"different {what}", f"The runs compared here differ in the {what}, not only in the engine.")


CHECKS = (
    _warm,
    _warm_start,
    _off_hits,
    _no_hits,
    _broken,
    _examples,
    _lag,
    _untold,
    _no_counters,
    _disagree,
    _short,
    _unfinished,
)
