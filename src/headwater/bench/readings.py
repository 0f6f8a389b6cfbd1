"""What a report reads off a folder of results: each line of results.jsonl as one Reading, run.json as it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headwater.bench.counters import cached_tokens
from headwater.bench.results import Sample, Usage, read_run, read_samples
from headwater.errors import BenchError

HIT, CONTROL, OFF, PRIME = "hit", "control", "off", "prime"
FRESH_ROLES = frozenset({PRIME, CONTROL})
"""Requests whose prefix no server can have seen: what is cached of them was there before the run."""

COUNTER_EXAMPLES = {
    "first_differs": "first token differs, all others equal",
    "other_salt": "equal tokens, another salt",
    "evicted": "equal tokens, evicted before",
}
CHANCE_SHARE = 0.1
"""Of a prompt: no more of it cached than this is no hit of its prefix, but the few tokens with which all prompts begin
(a chat template's, or by chance the same one)."""

REQUEST = "request"


@dataclass(frozen=True)
class Reading:
    """One request, as far as it was measured. None: not told.

    ``gaps_s`` are the seconds between successive events that carried tokens; ``per_token`` says that each carried one.
    ``cached`` counts prompt tokens; ``cached_by`` says who told, "counters" or "usage".
    """

    label: str
    sample: Sample
    error: str | None
    gaps_s: tuple[float, ...]
    per_token: bool
    prompt_tokens: int | None
    output_tokens: int | None
    cached: int | None
    cached_by: str | None

    @property
    def kind(self) -> str:
        return self.sample.kind

    @property
    def role(self) -> str:
        return self.sample.role

    @property
    def cell(self) -> Mapping[str, Any]:
        return self.sample.cell

    @property
    def ttft_s(self) -> float | None:
        return self.sample.ttft_s

    @property
    def e2e_s(self) -> float | None:
        return self.sample.e2e_s

    @property
    def itl_s(self) -> float | None:
        """The median gap of this request: one figure per request, because gaps of one request are not independent."""
        return float(np.median(self.gaps_s)) if self.gaps_s else None

    @property
    def computed(self) -> int | None:
        if self.prompt_tokens is None or self.cached is None:
            return None
        return self.prompt_tokens - self.cached

    @property
    def hit(self) -> bool:
        """More was cached than the beginning that all prompts share."""
        return (self.cached or 0) > CHANCE_SHARE * (self.prompt_tokens or 0)

    @property
    def caching_off(self) -> bool:
        return self.cell.get("caching") == "off" or self.role == OFF

    @property
    def measured(self) -> bool:
        return self.error is None and self.ttft_s is not None


@dataclass(frozen=True)
class Run:
    """One folder: who was measured, and what came out."""

    label: str
    folder: Path
    about: Mapping[str, Any]
    readings: Sequence[Reading]


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """All folders, each label made unique by its folder's name. Raises BenchError where one holds no results."""
    found: list[Run] = []
    for folder in folders:
        about = read_run(folder)
        by_label: dict[str, list[Sample]] = {}
        for sample in read_samples(folder):
            by_label.setdefault(sample.label or sample.server or folder.name, []).append(sample)
        for label, samples in by_label.items():
            taken = any(run.label == label for run in found)
            name = f"{label} ({folder.name})" if taken else label
            found.append(Run(name, folder, about, [reading(name, sample) for sample in samples]))
    if not found:
        raise BenchError(f"{', '.join(map(str, folders))}: no request was measured yet, so there is nothing to report")
    return found


def reading(label: str, sample: Sample) -> Reading:
    """One line of results.jsonl."""
    usage = sample.usage or Usage()
    # A load's requests overlap: a difference of counters would belong to several.
    alone = sample.kind == "prefix"
    seen = sample if alone else msgspec.structs.replace(sample, counters_before=None, counters_after=None)
    cached, by = cached_tokens(seen) or (None, None)
    return Reading(
        label=label,
        sample=sample,
        error=sample.error,
        gaps_s=tuple(later - earlier for earlier, later in pairwise(sample.events_s)),
        per_token=one_each(sample.tokens_per_event, len(sample.events_s), usage.completion_tokens),
        prompt_tokens=usage.prompt_tokens or whole(sample.request.get("prompt_tokens")),
        output_tokens=usage.completion_tokens,
        cached=cached,
        cached_by=by,
    )


def whole(value: object) -> int | None:
    """A whole number out of JSON; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def one_each(per_event: Sequence[int] | None, n_events: int, n_output: int | None) -> bool:
    """Whether each event carried one token: told by the server, or as many events as tokens."""
    return all(n == 1 for n in per_event) if per_event else n_events == n_output


def values(readings: Iterable[Reading], metric: str) -> list[float]:
    """The ``ttft``, ``itl`` or ``e2e`` of the measured requests, in seconds."""
    found = (getattr(one, f"{metric}_s") for one in readings if one.measured)
    return [float(one) for one in found if one is not None]


def server_of(run: Run) -> Mapping[str, Any]:
    """What run.json says of the server; nothing where it says nothing."""
    return _mapping(run.about.get("server"))


def machine_of(run: Run) -> Mapping[str, Any]:
    return _mapping(run.about.get("machine"))


def arguments_of(run: Run) -> Mapping[str, Any]:
    return _mapping(run.about.get("arguments"))


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
