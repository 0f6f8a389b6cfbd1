"""The verdict: what the figures say, in sentences for somebody who meets prefix caching for the first time.

The sentences refuse what is usually read into such figures: that what hit is what is saved, that decoding got faster,
that the hit rate is memory, that equal meaning would hit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headwater.bench import words
from headwater.bench.findings import CALM, Cell, CellComparison, Findings, typical
from headwater.bench.flags import Flag
from headwater.bench.readings import CONTROL, COUNTER_EXAMPLES, HIT, OFF
from headwater.bench.stats import MIN_INTERVAL, Comparison, Outcome


@dataclass(frozen=True, slots=True)
class Verdict:
    """``headline`` is one of the few below with its figures; ``sentences`` follow in the order of reading."""

    headline: str
    sentences: tuple[str, ...]


CANNOT_SAY = "This run cannot say what prefix caching buys"
GAIN = "Where the prefix was cached, the first token came sooner"
SLOWER = "Where the prefix was cached, the first token came later"
MIXED = "Where the prefix was cached, the first token came sooner in some conditions and later in others"
NO_DIFFERENCE = "No difference shown between cached and fresh prefixes"
NOTHING = "No sweep was measured"


def verdict(found: Findings, raised: list[Flag], under_load: tuple[str, ...] = ()) -> Verdict:
    """What a report says first. ``under_load``: a sentence for each load."""
    if not found.cells:
        return Verdict(under_load[0], under_load[1:]) if under_load else Verdict(NOTHING + ".", ())
    labels = [label for label in found.labels if _cells(found, label)]
    per_label = [_of_label(found, label, raised) for label in labels]
    if len(per_label) == 1:
        return Verdict(per_label[0].headline, (*per_label[0].sentences, *under_load))
    headlines = [f"{label}: {one.headline}" for label, one in zip(labels, per_label, strict=True)]
    sentences = [f"{label}: {text}" for label, one in zip(labels, per_label, strict=True) for text in one.sentences]
    return Verdict(" ".join(headlines), (*_across(found), *sentences, *under_load))


def _cells(found: Findings, label: str) -> list[Cell]:
    return [cell for cell in found.cells if cell.label == label]


def _of_label(found: Findings, label: str, raised: list[Flag]) -> Verdict:
    calm = [cell for cell in _cells(found, label) if cell.interference == CALM]
    first = [(cell, one) for cell in calm if (one := found.one(cell, "ttft", HIT, CONTROL)) is not None]
    several = len(found.runs) > 1
    grave = [one for one in raised if one.grave and (not several or one.text.startswith(f"{label}: "))]
    tested = [(cell, one) for cell, one in first if one.outcome is not Outcome.TOO_FEW]
    if grave:
        reasons = ", ".join(dict.fromkeys(one.name for one in grave))
        return Verdict(f"{CANNOT_SAY}: {reasons}.", (*(one.text for one in grave), *_examples(found, label)))
    if not tested:
        most = max((min(one.a.n, one.b.n) for _, one in first), default=0)
        return Verdict(
            f"{CANNOT_SAY}: {words.TOO_SMALL}.",
            (
                f"No condition has more than {words.plural(most, 'sample')} on both sides, and fewer than "
                f"{MIN_INTERVAL} decide nothing: one slow moment of the machine would look like a result. "
                "Repeat more often.",
                *_examples(found, label),
            ),
        )
    sentences = (
        *_hit_share(found, tested),
        *_decode(found, calm),
        *_whole(found, calm),
        *_cost(found, calm),
        *_evicted(found, label),
        *_examples(found, label),
        *_growth(found, label),
    )
    return Verdict(_headline(tested), sentences)


def _headline(tested: list[tuple[Cell, Comparison]]) -> str:
    sooner = [(cell, one) for cell, one in tested if one.outcome is Outcome.DIFFERENT and _below(one)]
    later = [(cell, one) for cell, one in tested if one.outcome is Outcome.DIFFERENT and not _below(one)]
    if sooner and later:
        return f"{MIXED}: sooner in {len(sooner)}, later in {len(later)} of {len(tested)}."
    if later:
        return f"{SLOWER} in {len(later)} of {len(tested)} conditions: {_figures(*later[-1])}."
    if not sooner:
        bound = max((one.least for _, one in tested if one.least is not None), default=None)
        said = f"{NO_DIFFERENCE}, in {words.plural(len(tested), 'condition')}."
        if bound is not None and bound > 0:
            said += (
                f" That is not proof of none: with this noise and so many repeats, what takes more than "
                f"{words.times(bound)} of the time would not have been told apart."
            )
        return said
    rest = len(tested) - len(sooner)
    said = f"{GAIN}: {_figures(*max(sooner, key=lambda pair: (pair[0].prefix, -pair[0].output)))}."
    if rest:
        said += f" In {rest} of {len(tested)} conditions no difference was shown."
    return said


def _below(one: Comparison) -> bool:
    return one.a.estimate.median < one.b.estimate.median


def _figures(cell: Cell, one: Comparison) -> str:
    """Both medians in words, and their ratio."""
    return (
        f"with {cell.prefix:,} shared tokens after {words.ms(one.a.estimate.median)} ms instead of "
        f"{words.ms(one.b.estimate.median)} ms, {words.ratio(one)} of the time (medians of {one.a.n} and {one.b.n})"
    )


def _hit_share(found: Findings, tested: list[tuple[Cell, Comparison]]) -> Iterator[str]:
    """A share of tokens is not a share of time, nor of memory."""
    shown = [(cell, one) for cell, one in tested if one.ratio is not None and _below(one)]
    if not shown:
        return
    cell, one = max(shown, key=lambda pair: (pair[0].prefix, -pair[0].output))
    hits = [reading for reading in found.by_role.get((cell, HIT), []) if reading.measured]
    cached, prompt = typical(h.cached for h in hits), typical(h.prompt_tokens for h in hits)
    if cached is None or not prompt or one.ratio is None:
        return
    yield (
        f"There, {cached:,.0f} of {prompt:,.0f} prompt tokens came from the cache ({cached / prompt:.1%}), and the "
        f"wait for the first token fell by {1 - one.ratio:.0%}. These are two figures: a request has a cost of its "
        "own, and what is new attends to all that is cached. Nor is the share of hits a share of memory saved: a "
        "cached prefix takes its memory once, and saves it only while several requests use it at once."
    )


def _decode(found: Findings, calm: list[Cell]) -> Iterator[str]:
    """Prefix caching does not make decoding faster."""
    compared = [one for cell in calm if (one := found.one(cell, "itl", HIT, CONTROL)) is not None]
    compared = [one for one in compared if one.outcome is not Outcome.TOO_FEW]
    if not compared:
        return
    faster = [one for one in compared if one.outcome is Outcome.DIFFERENT]
    why = "each further token still reads the KV of the whole history, cached or not"
    if not faster:
        yield f"Time between tokens: no difference shown. Prefix caching does not make decoding faster: {why}."
        return
    yield (
        f"Time between tokens: it differed in {len(faster)} of {len(compared)} conditions. Look for the cause "
        f"elsewhere before crediting the cache: {why}."
    )


def _whole(found: Findings, calm: list[Cell]) -> Iterator[str]:
    """What is left of the gain over the whole request, by output length."""
    if not calm:
        return
    prefix = max(cell.prefix for cell in calm)
    row = sorted((cell for cell in calm if cell.prefix == prefix), key=lambda cell: cell.output)
    compared = [(cell, one) for cell in row if (one := found.one(cell, "e2e", HIT, CONTROL)) is not None]
    parts = [f"{words.plural(cell.output, 'token')} out: {words.ratio(one)}" for cell, one in compared]
    if parts:
        told = "; ".join(parts)
        said = f"Whole requests with {prefix:,} shared tokens, as a share of the time without a hit: {told}."
        if any(one.outcome is Outcome.DIFFERENT and _below(one) for _, one in compared):
            said += " The longer the answer, the less of the gain is left of the whole."
        yield said


def _cost(found: Findings, calm: list[Cell]) -> Iterator[str]:
    """What caching costs those who do not hit."""
    compared = [one for cell in calm if (one := found.one(cell, "ttft", CONTROL, OFF)) is not None]
    compared = [one for one in compared if one.outcome is not Outcome.TOO_FEW]
    if not compared:
        return
    slower = [one for one in compared if one.outcome is Outcome.DIFFERENT and not _below(one)]
    sooner = [one for one in compared if one.outcome is Outcome.DIFFERENT and _below(one)]
    if not slower and not sooner:
        yield "A prefix that misses: no difference shown between caching on and off."
        return
    yield (
        f"A prefix that misses: with caching on, the first token came later in {len(slower)} and sooner in "
        f"{len(sooner)} of {len(compared)} conditions. On and off are different starts of the server, which differ in "
        "more than caching; repeat the sweep before believing it."
    )


def _evicted(found: Findings, label: str) -> Iterator[str]:
    """With interference that evicts, a repeat is as good as new."""
    cells = [cell for cell in _cells(found, label) if cell.interference != CALM]
    repeats = [one for cell in cells for one in found.by_role.get((cell, HIT), []) if one.measured]
    told = [one for one in repeats if one.cached is not None and one.prompt_tokens]
    if told:
        kept = sum(1 for one in told if one.hit)
        yield (
            f"With other prefixes in between, {kept} of {len(told)} repeated prefixes still hit: a cached prefix is "
            "worth something only as long as it is not evicted."
        )


def _examples(found: Findings, label: str) -> Iterator[str]:
    """Reuse is of equal tokens from the first one on, within one identity."""
    examples = [one for one in found.examples if one.label == label and one.told]
    if examples:
        parts = [f"{COUNTER_EXAMPLES[one.role]}: {one.n_hit} of {len(one.told)} hit" for one in examples]
        yield (
            f"What must not hit ({'; '.join(parts)}). Only equal tokens from the first one on are reused, under the "
            "same identity, while they are there: not equal meaning, and not equal text after another beginning."
        )


def _growth(found: Findings, label: str) -> Iterator[str]:
    line = found.lines.get(label)
    if line is None:
        return
    yield (
        f"Over all requests, the first token took {words.ms(line.intercept)} ms [{words.ms(line.intercept_low)}, "
        f"{words.ms(line.intercept_high)}] and {1e6 * line.slope:,.0f} µs [{1e6 * line.slope_low:,.0f}, "
        f"{1e6 * line.slope_high:,.0f}] more for each token computed (n={line.n}). The first is the price of a "
        "request, the second that of a token of prefill; a hit saves only the second."
    )


def _across(found: Findings) -> Iterator[str]:
    """Engines beside each other."""
    by_pair: dict[tuple[str, str, str], list[CellComparison]] = {}
    for one in found.across:
        if one.metric == "ttft" and one.cell.interference == CALM and one.found.outcome is not Outcome.TOO_FEW:
            by_pair.setdefault((one.cell.label, one.other.label, one.role), []).append(one)
    for (a, b, role), compared in by_pair.items():
        shown = [one for one in compared if one.found.outcome is Outcome.DIFFERENT]
        sooner = [one for one in shown if _below(one.found)]
        what = "a cached prefix" if role == HIT else "a fresh prefix"
        yield (
            f"First token after {what}: {a} sooner than {b} in {len(sooner)}, later in {len(shown) - len(sooner)} of "
            f"{len(compared)} conditions; in the others no difference was shown."
        )
