"""The account of one look-up: block by block what is in memory, where the hit ends, why, and what differs there.

    0 ...... n_hit ...... n_hit + n_copy ................................ n_tokens
    | HIT    | COPIED     | HELD, EVICTED, COMPUTING: recorded | UNKNOWN |

An account is as pure as a look-up, and stays inside its own namespace: what other callers have cached under another
salt changes neither the answer nor the work that it takes. (``elsewhere`` is the one exception, for operators.)

Lengths and reasons may be told to everybody in a namespace. The tokens on the other side of a difference may be told
only to those who sent them, and a request's id only to its sender (or to the operator): ``Account.seen_by`` is that
rule.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING

from headwater.cache.block import Node
from headwater.cache.extras import shared_extras
from headwater.cache.group import longest_hit
from headwater.cache.key import TOKEN_BYTES, token_ids
from headwater.cache.lookup import Lookup, Stop, StopReason

if TYPE_CHECKING:
    from headwater.cache.index import PrefixIndex
    from headwater.cache.key import TokenChain

SHOWN_TOKENS = 8
"""Tokens that are shown on each side of the place of a difference."""

MAX_CANDIDATES = 16
"""Records that are tried, where several share the longest beginning, for one whose tokens the viewer may see."""

MAX_COMPARED_ELSEWHERE = 10_000
"""Nodes of other namespaces that one account compares at most."""

MAX_ELSEWHERE = 16
"""Other namespaces that are told, those with the longest hits."""


class State(str, Enum):
    """Of tokens of a prompt: what becomes of them, or became."""

    HIT = "hit"
    """Whole blocks, shared."""
    COPIED = "copied"
    """Slots copied from a block that begins alike."""
    COMPUTING = "computing"
    """Another request is computing them now."""
    HELD = "held"
    """In memory behind the stop, of no use from there."""
    EVICTED = "evicted"
    """Recorded, but no block holds them any more."""
    UNKNOWN = "unknown"
    """No record."""


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens ``first_token .. first_token + n_tokens - 1`` are all in one state."""

    first_token: int
    n_tokens: int
    state: State


@dataclass(frozen=True, slots=True)
class Viewer:
    """Who reads an account. ``sender``: as in the requests it sends; ``operator``: it may see everything."""

    sender: str
    operator: bool

    def may_see(self, senders: Collection[str]) -> bool:
        """Whether it may see what these senders sent."""
        return self.operator or self.sender in senders


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a prompt leaves the nearest record of the same tokens before.

    first ..... at_token ..... first + len(ours)
    | the same  | ours, or theirs

    ``ours`` and ``theirs`` both begin with token ``first`` and have at most SHOWN_TOKENS tokens on each side of
    ``at_token``. ``theirs`` None: the viewer may not see them. ``senders``: who sent all of ``theirs``.
    """

    at_token: int
    first: int
    ours: tuple[int, ...]
    theirs: tuple[int, ...] | None
    senders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Another namespace, by its digest, and how many tokens of the prompt it would hit by whole blocks."""

    namespace: bytes
    n_hit: int


@dataclass(frozen=True, slots=True)
class Account:
    """Everything that may be said of one look-up. ``runs`` cover the prompt without gaps.

    ``min_reusable_tokens``: the shortest beginning that whole blocks cover. ``evicted_ago_s``: with
    ``stop.evicted_at``, how long ago that was.
    """

    n_tokens: int
    n_hit: int
    n_copy: int
    stop: Stop
    runs: tuple[Run, ...]
    difference: Difference | None
    min_reusable_tokens: int
    evicted_ago_s: float | None = None
    elsewhere: tuple[Elsewhere, ...] = ()

    @property
    def n_compute(self) -> int:
        """Tokens that have to be computed."""
        return self.n_tokens - self.n_hit - self.n_copy

    def seen_by(self, viewer: Viewer) -> Account:
        """The same without what ``viewer`` may not see."""
        seen = self
        if self.stop.request is not None and not viewer.may_see((self.stop.sender,)):
            seen = replace(seen, stop=replace(self.stop, request=None, sender=""))
        other = self.difference
        if other is not None and other.theirs is not None and not viewer.may_see(other.senders):
            seen = replace(seen, difference=replace(other, theirs=None, senders=()))
        return seen if viewer.operator else replace(seen, elsewhere=())

    def sentence(self) -> str:
        """Why the hit ends where it does, for people; it names what this account names."""
        stop = self.stop
        at = f"token {stop.at_token}"
        whom = "another request" if stop.request is None else f"request {stop.request}"
        ago = "" if self.evicted_ago_s is None else f", evicted {_ago(self.evicted_ago_s)} ago for {whom}"
        differs_at = stop.at_token if self.difference is None else self.difference.at_token
        return {
            StopReason.NO_RECORD: f"no record of what follows from {at} on",
            StopReason.DIFFERS: f"differs from what is recorded at token {differs_at}",
            StopReason.EVICTED: f"recorded but no longer held from {at} on{ago}",
            StopReason.OTHER_IDENTITY: f"from {at} on the same tokens are recorded with another adapter or media",
            StopReason.COMPUTING: f"{whom} is computing what follows from {at} on now",
            StopReason.PARTIAL_BLOCK: f"every full block hit; the rest from {at} on fills no block",
            StopReason.LAST_TOKEN: f"all that can be reused is; the last token must be computed ({at})",
            StopReason.BYPASSED: f"not looked up: bypassed by {stop.option}",
            StopReason.GROUP_CANNOT_START: f"layer group {stop.group} holds too little to start at {at}{ago}",
        }[stop.reason]


def account(index: PrefixIndex, lookup: Lookup, viewer: Viewer, clock: Callable[[], float]) -> Account:
    """The account of ``lookup``, which was made just now: nothing has changed in ``index`` since."""
    chain = lookup.chain
    path = index.walk(chain, chain.n_units)
    nearest = _nearest(index, chain, path, viewer, lookup.stop)
    stop = lookup.stop
    return Account(
        n_tokens=lookup.n_tokens,
        n_hit=lookup.n_hit,
        n_copy=lookup.n_copy,
        stop=stop,
        runs=tuple(_runs(index, lookup, path, nearest)),
        difference=None if nearest is None else _difference(chain, len(path), nearest, viewer, stop),
        min_reusable_tokens=index.layout.hit_unit,
        evicted_ago_s=None if stop.evicted_at is None else max(0.0, clock() - stop.evicted_at),
    ).seen_by(viewer)


# ---- runs ---------------------------------------------------------------------------------------


def _runs(index: PrefixIndex, lookup: Lookup, path: Sequence[Node], nearest: _Nearest | None) -> Iterator[Run]:
    """
    0 ... n_hit ... n_start ... path ... nearest ... n_tokens
    | HIT | COPIED  | by unit   | by the | COMPUTING, UNKNOWN
                                  nearest record
    """
    if lookup.n_hit:
        yield Run(0, lookup.n_hit, State.HIT)
    if lookup.n_copy:
        yield Run(lookup.n_hit, lookup.n_copy, State.COPIED)
    unit = index.layout.unit
    states = _unit_states(index, lookup, path)
    bounds = [(lookup.n_start // unit + k) * unit for k in range(len(states) + 1)]
    pieces = list(zip(states, bounds, bounds[1:], strict=False))
    end = bounds[-1]
    if nearest is not None and nearest.n_shared and len(path) * unit >= end:
        at = len(path) * unit + nearest.n_shared
        pieces.append((_state(index, nearest.node) or State.UNKNOWN, len(path) * unit, at))
        end = at
    pieces.append((State.UNKNOWN, end, lookup.n_tokens))
    yield from _folded(pieces, lookup.n_start)


def _folded(pieces: Sequence[tuple[State, int, int]], start: int) -> Iterator[Run]:
    """``pieces`` from token ``start`` on, neighbours of one state joined."""
    state, first = None, start
    for piece, _, end in pieces:
        if end <= start:
            continue
        if piece is not state:
            if state is not None and start > first:
                yield Run(first, start - first, state)
            state, first = piece, start
        start = end
    if state is not None and start > first:
        yield Run(first, start - first, state)


def _unit_states(index: PrefixIndex, lookup: Lookup, path: Sequence[Node]) -> list[State]:
    """Of the units from the one with the first token to compute on, as far as anything is recorded of them."""
    first = lookup.n_start // index.layout.unit
    states: list[State] = []
    later = State.UNKNOWN
    for node in reversed(path[first:]):  # a unit with which no block ends is as the one with which its block ends
        later = _state(index, node) or later
        states.append(later)
    states.reverse()
    _mark_computing(index, lookup.chain, path, first, states)  # always: whether others compute shows in no time taken
    return states


def _state(index: PrefixIndex, node: Node) -> State | None:
    if node.copies:
        return State.HELD
    return State.EVICTED if node in index.ghosts.nodes else None


def _mark_computing(
    index: PrefixIndex, chain: TokenChain, path: Sequence[Node], first: int, states: list[State]
) -> None:
    """Units that somebody computes after a node of ``path`` (or from the start on) and that are not held."""
    parents: Sequence[Node | None] = [index.root_of(chain), *path]
    reach = 0  # units before it were marked for one of the holdings so far; what shares them is compared at once
    for i, parent in enumerate(parents):
        for holding in () if parent is None else index.computing.get(parent, ()):
            other, k = holding.chain, i
            if other is chain:
                continue
            n_units = min(other.n_units, chain.n_units)
            if i < reach <= n_units and other.same_units(chain, i, reach):
                k = reach
            while k < n_units and other.same_unit(chain, k):
                at = k - first
                if at == len(states):
                    states.append(State.COMPUTING)
                elif 0 <= at < len(states) and states[at] is not State.HELD:
                    states[at] = State.COMPUTING
                k += 1
            reach = max(reach, k)


# ---- the difference -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Nearest:
    """The record that shares most of the tokens after a path: ``n_shared`` of them."""

    node: Node
    n_shared: int


def _nearest(
    index: PrefixIndex, chain: TokenChain, path: Sequence[Node], viewer: Viewer, stop: Stop
) -> _Nearest | None:
    """The record that shares the longest beginning with what follows ``path``; of several that share as much, one that
    the viewer's sender sent. None without a record, and where media or embeddings, not tokens, are what differs."""
    tail, extras = chain.beginning(len(path))
    parent = path[-1] if path else index.root_of(chain)
    if parent is None or not tail:
        return None
    n_tail = len(tail) // TOKEN_BYTES
    best: _Nearest | None = None
    for node, n_shared in islice(_alike(parent, tail), MAX_CANDIDATES):
        if shared_extras(node.extras, extras, index.layout.unit) < n_shared:
            return best
        if n_shared == n_tail and stop.reason is StopReason.DIFFERS:
            continue  # equal to the end, but nothing holds it: the hit was measured against the next
        if best is not None and n_shared < best.n_shared:
            return best
        if best is None or viewer.sender in node.senders:
            best = _Nearest(node, n_shared)
        if viewer.sender in node.senders:
            return best
    return best


def _alike(parent: Node, tail: bytes) -> Iterator[tuple[Node, int]]:
    """Children that share a beginning with ``tail``, longest first; then some that share nothing."""
    yield from parent.nearest(tail)
    for node in _some_children(parent):
        if node.tokens[:TOKEN_BYTES] != tail[:TOKEN_BYTES]:
            yield node, 0


def _some_children(node: Node) -> Sequence[Node]:
    if node.siblings is not None:
        return node.siblings[:MAX_CANDIDATES]
    return () if node.child is None else (node.child,)


def _difference(chain: TokenChain, n_path: int, nearest: _Nearest, viewer: Viewer, stop: Stop) -> Difference | None:
    """None where the prompt only ends, and where what is recorded besides is beside the point."""
    at = n_path * chain.unit + nearest.n_shared
    beside = (StopReason.BYPASSED, StopReason.LAST_TOKEN, StopReason.COMPUTING, StopReason.OTHER_IDENTITY)
    if at >= len(chain) or stop.reason in beside:
        return None
    first = max(0, at - SHOWN_TOKENS)
    before = tuple(chain.tokens[first:at])
    theirs, last = _what_follows(nearest, viewer)
    return Difference(
        at_token=at,
        first=first,
        ours=tuple(chain.tokens[first : at + SHOWN_TOKENS]),
        theirs=before + theirs,
        senders=tuple(sorted(last.senders)),
    )


def _what_follows(nearest: _Nearest, viewer: Viewer) -> tuple[tuple[int, ...], Node]:
    """Up to SHOWN_TOKENS recorded tokens from the difference on, and the last node that they come from. As long as the
    viewer's sender sent what is told, only what it sent is added."""
    node = nearest.node
    own = viewer.sender in node.senders
    tokens = node.tokens[nearest.n_shared * TOKEN_BYTES :]
    while len(tokens) < SHOWN_TOKENS * TOKEN_BYTES:
        below = next((child for child in _some_children(node) if not own or viewer.sender in child.senders), None)
        if below is None:
            break
        node, tokens = below, tokens + below.tokens
    return token_ids(tokens[: SHOWN_TOKENS * TOKEN_BYTES]), node


# ---- other namespaces ---------------------------------------------------------------------------


def elsewhere(index: PrefixIndex, chain: TokenChain) -> tuple[Elsewhere, ...]:
    """What other namespaces hold of the chain's tokens, longest first. For operators only: it walks what other callers
    have cached. By comparison alone: a chain has keys in its own namespace only."""
    n_units = max(0, len(chain) - 1) // chain.unit
    n_left = MAX_COMPARED_ELSEWHERE
    found: list[Elsewhere] = []
    for root in index.roots.values():
        if root.identity.namespace == chain.namespace or n_left <= 0:
            continue
        path = _walk(root, chain, min(n_units, n_left))
        n_left -= len(path) + 1
        n_hit = longest_hit(index.layout, path, index.pool)[0] * index.layout.unit
        if n_hit:
            found.append(Elsewhere(root.identity.digest, n_hit))
    found.sort(key=lambda other: (-other.n_hit, other.namespace))
    return tuple(found[:MAX_ELSEWHERE])


def _walk(root: Node, chain: TokenChain, n_units: int) -> list[Node]:
    path: list[Node] = []
    node = root
    for i in range(n_units):
        extras = chain.extras(i)
        below = next((child for child in node.with_tokens(chain.chunk(i)) if child.extras == extras), None)
        if below is None:
            break
        path.append(below)
        node = below
    return path


def _ago(seconds: float) -> str:
    """A duration for people."""
    for limit, size, name in ((60.0, 1.0, "s"), (3600.0, 60.0, "min"), (86_400.0, 3600.0, "h")):
        if seconds < limit:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds / 86_400:.1f} days"
