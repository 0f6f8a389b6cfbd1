"""Random sequences of everything that can happen to the cache, against the plain model."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from headwater.cache.block import Holding
from headwater.cache.events import AllCleared, BlockRemoved, BlockStored, EventLog
from headwater.cache.key import TokenChain
from headwater.cache.lookup import StopReason
from headwater.cache.partial import SlotRun
from headwater.errors import CacheBusy, DoubleRelease, OutOfBlocks
from headwater.types import Namespace
from tests.cache.cache_model import CONSTANT, TRUNCATED, Blocks, full, make_cache, sliding

NAMESPACES = (
    *([Namespace(b"w")] * 4),
    Namespace(b"w", salt="a"),
    Namespace(b"w", adapters=((b"p", 1.0),)),
)


DOCUMENTS = [[(i * i) % 5 for i in range(8 * k)] + [(i + k) % 3 for i in range(8 * k, 40)] for k in range(4)]
"""Documents k and j share at least their first 8 * min(k, j) tokens."""


@dataclass(eq=False)
class Seq:
    name: str
    namespace: Namespace
    chain: TokenChain
    holding: Holding
    n_computed: int
    n_scheduled: int
    steps: set[int] = field(default_factory=set)
    """Steps in flight that name it."""

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self.chain.tokens)


@dataclass
class Row:
    seq: Seq
    start: int
    end: int
    blocks: list[tuple[int, int, int]]
    """(group, end position, block) of each block written, as the runner was told."""
    reads: list[tuple[int, int, int]]
    """The same, of each block that its queries read (those written included)."""
    copies: tuple[SlotRun, ...] = ()
    """What the step copies before it computes."""


class CacheMachine(RuleBasedStateMachine):
    GROUPS = (full(4),)
    HASHER = None
    MAX_GHOSTS = 65_536
    N_BLOCKS = 14
    EXACT = True
    """Whether the model knows everything that is resident (not when ghosts are dropped early)."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.cache = make_cache(
            *self.GROUPS,
            n_blocks=self.N_BLOCKS,
            hasher=self.HASHER,
            max_ghosts=self.MAX_GHOSTS,
            clock=self.clock,
            events=EventLog(enabled=True),
        )
        self.model = Blocks(self.cache.groups, self.cache.unit, self.cache.min_reusable_tokens)
        self.running: list[Seq] = []
        self.seen: list[Seq] = []
        self.released: list[Holding] = []
        self.in_flight: list[tuple[int, list[Row]]] = []
        self.n_steps = 0
        self.n_seqs = 0
        self.n_hits = 0
        self.n_copies = 0
        self.heard: set[tuple[int, bytes]] = set()
        self.next_event = 0

    def clock(self) -> float:
        self.now += 1.0
        return self.now

    # -- rules --------------------------------------------------------------------------------------------

    @rule(
        document=st.integers(0, 3),
        n_tokens=st.integers(1, 32),
        tail=st.lists(st.integers(0, 1), max_size=3),
        namespace=st.sampled_from(NAMESPACES),
    )
    def admit(self, document: int, n_tokens: int, tail: list[int], namespace: Namespace) -> None:
        if len(self.running) >= 5:
            self.leave_newest()
        self.start(namespace, [*DOCUMENTS[document][:n_tokens], *tail])

    @precondition(lambda self: self.seen)
    @rule(which=st.integers(0, 7), cut=st.integers(0, 9), tail=st.lists(st.integers(0, 1), max_size=6))
    def admit_again(self, which: int, cut: int, tail: list[int]) -> None:
        """A prompt that shares a beginning with a sequence that ran or runs: a chat's next turn."""
        if len(self.running) >= 5:
            self.leave_newest()
        seq = self.seen[-1 - which % len(self.seen)]
        self.start(seq.namespace, [*seq.tokens[: max(0, len(seq.chain) - cut)], *tail, 1])

    def start(self, namespace: Namespace, tokens: list[int]) -> None:
        chain = self.cache.chain(namespace, tokens)
        lookup = self.cache.lookup(chain)
        self.model.check_hit(namespace, tokens, lookup)
        whole = lookup if lookup.whole is None else lookup.whole
        self.model.check_hit(namespace, tokens, whole)
        best = self.model.longest_hit(namespace, tokens)
        assert whole.n_hit == best if self.EXACT else whole.n_hit <= best
        best = self.model.longest_start(namespace, tokens)
        # With blocks of several sizes a window might go on a little later still, with less than a hit unit copied.
        exact = self.EXACT and self.model.hit_unit == self.model.unit
        assert lookup.n_start == best if exact else whole.n_hit <= lookup.n_start <= best
        assert whole.n_copy == 0 and lookup.n_copy < self.model.hit_unit
        self.check_stop(namespace, tokens, lookup.n_start, lookup.stop)
        self.check_stop(namespace, tokens, whole.n_hit, whole.stop)
        self.n_hits += lookup.n_hit > 0
        self.n_copies += lookup.n_copy > 0
        if not self.cache.can_admit(lookup, min(len(tokens), lookup.n_start + 8)):
            lookup = whole
        first_chunk = min(len(tokens), lookup.n_start + 8)
        fits = self.cache.can_admit(lookup, first_chunk)
        name = f"s{self.n_seqs}"
        self.n_seqs += 1
        holding = self.cache.claim(chain, lookup, name)
        seq = Seq(name, namespace, chain, holding, lookup.n_start, lookup.n_start)
        assert (self.cache.blocks_missing(holding, first_chunk) <= self.cache.available) == fits
        if fits:
            self.allocate(seq, first_chunk)
            self.running.append(seq)
            self.seen.append(seq)
        else:
            self.cache.release(holding)

    def check_stop(self, namespace: Namespace, tokens: list[int], n_start: int, stop) -> None:
        assert stop.describe()
        assert n_start <= stop.at_token <= len(tokens) or self.EXACT is False or len(self.GROUPS) > 1
        unit = self.cache.unit
        known = {seq.name: seq for seq in self.running}
        if stop.reason is StopReason.COMPUTING:
            other = known[stop.request]
            end = stop.at_token // unit * unit + unit
            assert other.namespace == namespace
            assert list(other.tokens[:end]) == tokens[:end]
        if stop.reason in (StopReason.PARTIAL_BLOCK, StopReason.LAST_TOKEN):
            assert len(tokens) - n_start <= self.cache.min_reusable_tokens
        if stop.reason is StopReason.EVICTED:
            assert stop.evicted_at is not None and stop.request is not None

    def allocate(self, seq: Seq, n_tokens: int) -> bool:
        held = {block for other in self.running for table in other.holding.tables for block in table.blocks}
        held |= {block for _, rows in self.in_flight for row in rows for _, _, block in row.blocks}
        before = self.cache.available
        try:
            new = self.cache.allocate(seq.holding, n_tokens)
        except OutOfBlocks:
            assert self.cache.blocks_missing(seq.holding, n_tokens) > before == self.cache.available
            return False
        taken = [block for blocks in new for block in blocks]
        assert len(set(taken)) == len(taken)
        assert not held & set(taken), "a block was given to a second owner"
        self.model.taken(taken)
        return True

    @precondition(lambda self: self.running and len(self.in_flight) < 3)
    @rule(without=st.integers(0, 5), chunk=st.integers(1, 12))
    def plan(self, without: int, chunk: int) -> None:
        left_out = dict(enumerate(self.running)).get(without)
        rows = []
        for seq in list(self.running):
            if seq not in self.running:
                continue
            if seq is left_out and len(self.running) > 1:
                continue
            end = min(len(seq.chain), seq.n_scheduled + chunk)
            if end == seq.n_scheduled:
                continue
            while seq in self.running and not self.allocate(seq, end):
                self.leave_newest()  # preempted, perhaps seq itself, perhaps with a step in flight
            if seq not in self.running:
                continue
            blocks, reads = [], []
            for g, (spec, table) in enumerate(zip(self.cache.groups, seq.holding.tables, strict=True)):
                size = spec.block_size
                written = range(seq.n_scheduled // size, -(-end // size))
                blocks += [(g, (j + 1) * size, table.blocks[j - table.first]) for j in written]
                first = spec.first_needed(seq.n_scheduled) // size
                if not spec.reusable:
                    first = max(first, table.first)
                assert table.first <= first, "a block that a query reads was given back"
                reads += [(g, (j + 1) * size, table.blocks[j - table.first]) for j in range(first, written.stop)]
            copies = () if seq.steps else self.cache.copies(seq.holding)  # a step in flight carries them
            rows.append(Row(seq, seq.n_scheduled, end, blocks, reads, copies))
            seq.n_scheduled = end
            seq.steps.add(self.n_steps)
        self.in_flight.append((self.n_steps, rows))
        self.n_steps += 1

    @precondition(lambda self: self.in_flight)
    @rule(sampled=st.integers(0, 1))
    def apply(self, sampled: int) -> None:
        """The oldest step is confirmed: its writes are in memory, whoever owns those blocks by now."""
        number, rows = self.in_flight.pop(0)
        for row in rows:
            for copy in row.copies:
                self.model.copy(copy.group, copy.source, copy.target, copy.n_slots)
        for row in rows:
            for g, (spec, end) in enumerate((spec, row.start) for spec in self.cache.groups):
                if spec.reusable and end % spec.block_size:  # all before it is there: written, shared or copied
                    block = next(b for of, block_end, b in row.blocks if of == g and block_end > end)
                    of, namespace, held = self.model.written[block]
                    assert (of, namespace, held[:end]) == (g, row.seq.namespace, row.seq.tokens[:end])
            self.write(row, row.seq.tokens)
        for row in rows:
            for g, end, block in row.reads:  # fences keep them, though the sequence may be gone
                want = (g, row.seq.namespace, row.seq.tokens[: min(end, row.end)])
                assert self.model.written[block] == want, "a query reads what is not its own history"
        for row in rows:
            seq = row.seq
            seq.steps.discard(number)
            if seq not in self.running:
                continue
            self.cache.copied(seq.holding)
            start, seq.n_computed = seq.holding.n_published, row.end
            if seq.holding.barred:
                self.cache.publish(seq.chain, seq.holding, seq.n_computed)  # publishes nothing
            elif seq.holding.cursor is not None or start == 0:
                self.cache.publish(seq.chain, seq.holding, seq.n_computed)
                self.model.publish(seq.namespace, seq.tokens, seq.holding, start, seq.n_computed)
            self.cache.slide(seq.holding, seq.n_computed, fence=max(seq.steps, default=None))
            if seq.n_computed == len(seq.chain) and len(seq.chain) < 40:
                seq.chain.extend([sampled])
        self.cache.step_applied(number)

    @precondition(lambda self: self.in_flight)
    @rule()
    def fail_step(self) -> None:
        """The oldest step raises, half written; those after it in flight are worthless too."""
        for number, rows in self.in_flight:
            for row in rows:
                good = 0 if row.seq.holding.beginnings or row.copies else row.seq.n_computed
                self.write(row, (*row.seq.tokens[:good], *([99] * row.end)))
                row.seq.steps.clear()
                row.seq.n_scheduled = row.seq.n_computed
            self.cache.step_applied(number)
        self.in_flight.clear()

    def write(self, row: Row, tokens: tuple[int, ...]) -> None:
        for g, end, block in row.blocks:
            self.model.written[block] = (g, row.seq.namespace, tokens[: min(end, row.end)])

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 4))
    def leave(self, which: int) -> None:
        """Finish, abort or preemption, at any moment."""
        self.let_go(self.running[which % len(self.running)])

    def leave_newest(self) -> None:
        self.let_go(self.running[-1])

    def let_go(self, seq: Seq) -> None:
        self.running.remove(seq)
        self.cache.release(seq.holding, fence=max(seq.steps, default=None))
        self.released.append(seq.holding)

    @precondition(lambda self: self.released)
    @rule(which=st.integers(0, 9))
    def release_again(self, which: int) -> None:
        before = self.cache.stats()
        with pytest.raises(DoubleRelease):
            self.cache.release(self.released[-1 - which % len(self.released)])
        after = self.cache.stats()
        assert after.refused_releases == before.refused_releases + 1
        assert (after.free, after.evictable, after.in_use) == (before.free, before.evictable, before.in_use)

    @precondition(lambda self: self.model.published)
    @rule(which=st.integers(0, 30))
    def withdraw(self, which: int) -> None:
        """Some content proves wrong: it and all that follows it is no longer found, whoever holds its blocks."""
        held = [block for block, node in enumerate(self.cache.pool.node) if node is not None]
        if not held:
            return
        block = held[which % len(held)]
        node, (_, namespace, tokens) = self.cache.pool.node[block], self.model.published[block]
        before, n_free = set(held), len(self.cache.pool.free)
        idle = sum(self.cache.pool.refs[b] == 0 for b in held)
        assert node is not None and node.depth * self.cache.unit == len(tokens)
        n_blocks = self.cache.withdraw(node)
        gone = {
            b for b, (_, other, t) in self.model.published.items() if other == namespace and t[: len(tokens)] == tokens
        }
        self.model.withdrawn(gone)
        held = [b for b, node in enumerate(self.cache.pool.node) if node is not None]
        assert before - set(held) == gone & before and n_blocks == len(gone & before)
        assert len(self.cache.pool.free) - n_free == idle - sum(self.cache.pool.refs[b] == 0 for b in held)
        assert self.cache.withdraw(node) == 0

    @precondition(lambda self: self.running or self.in_flight)
    @rule()
    def reset_is_refused(self) -> None:
        busy = self.cache.n_blocks - self.cache.available
        if busy:
            with pytest.raises(CacheBusy):
                self.cache.reset()

    @precondition(lambda self: len(self.running) > 2 or self.n_seqs > 12)
    @rule(reset=st.booleans())
    def drain(self, reset: bool) -> None:
        """Everybody leaves, all steps end; perhaps everything is forgotten."""
        while self.running:
            self.leave_newest()
        while self.in_flight:
            self.apply(0)
        if reset and self.n_seqs > 12:
            cached = len(self.cache.pool.evictable)
            assert self.cache.reset() == cached
            self.model.published.clear()

    # -- after each ---------------------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        self.cache.audit([seq.holding for seq in self.running])
        stats = self.cache.stats()
        assert stats.in_use + stats.evictable + stats.free + stats.fenced == self.cache.n_blocks
        if not self.running and not self.in_flight:
            assert stats.in_use == stats.fenced == 0
        if self.EXACT:
            held = {block for block, node in enumerate(self.cache.pool.node) if node is not None}
            published = self.model.published
            # Of content that is computed again, idle copies may be given up; the content itself never.
            assert held <= published.keys()
            assert {published[block] for block in held} == set(published.values())

    @invariant()
    def events_tell_all(self) -> None:
        for event in self.cache.events.drain():
            assert event.sequence == self.next_event
            self.next_event += 1
            if isinstance(event, BlockStored):
                assert (event.group, event.key) not in self.heard
                self.heard.add((event.group, event.key))
            elif isinstance(event, BlockRemoved):
                self.heard.remove((event.group, event.key))
            else:
                assert isinstance(event, AllCleared)
                self.heard.clear()
        pool = self.cache.pool
        found = {(pool.group[b], node.key) for b, node in enumerate(pool.node) if node is not None}
        assert self.heard == found
        assert {(event.group, event.key) for event in self.cache.snapshot()} == found


WORLDS = {
    "full": ((full(4),), 14),
    "sliding": ((sliding(2, 6),), 12),
    "full-and-sliding": ((full(4), sliding(4, 10)), 28),
    "two-sliding": ((sliding(4, 6), sliding(2, 7)), 30),
    "blocks-of-4-and-6": ((full(4), full(6)), 28),
    "full-8-sliding-4": ((full(8), sliding(4, 9)), 26),
    "sliding-and-scratch": ((sliding(2, 4), full(3, reusable=False)), 34),
}
HASHERS = {"honest": None, "constant": CONSTANT, "truncated": TRUNCATED}
GHOSTS = {"many-ghosts": 65_536, "few-ghosts": 3, "no-ghosts": 0}
CASES = [
    (world, hasher, ghosts)
    for world in WORLDS
    for hasher in HASHERS
    for ghosts in GHOSTS
    if (hasher, ghosts) in {("honest", "many-ghosts"), ("constant", "many-ghosts"), ("truncated", "few-ghosts")}
    or (hasher, ghosts, world) == ("honest", "no-ghosts", "full")
]


def machine_for(world: str, hasher: str, ghosts: str) -> type[CacheMachine]:
    members = {
        "GROUPS": WORLDS[world][0],
        "N_BLOCKS": WORLDS[world][1],
        "HASHER": HASHERS[hasher],
        "MAX_GHOSTS": GHOSTS[ghosts],
        "EXACT": ghosts == "many-ghosts",
    }
    return type("Machine", (CacheMachine,), members)


@pytest.mark.parametrize(("world", "hasher", "ghosts"), CASES)
def test_hypothesis_against_the_model(world: str, hasher: str, ghosts: str) -> None:
    """Hypothesis leaves out some kinds of operation in each run: it finds the odd corners, and the least example."""
    run_state_machine_as_test(
        machine_for(world, hasher, ghosts),
        settings=settings(
            max_examples=12,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize(("world", "hasher", "ghosts"), CASES)
def test_long_random_lives_against_the_model(world: str, hasher: str, ghosts: str) -> None:
    """The same operations, mixed as a server mixes them: many hits, a full pool, every reason to stop."""
    n_hits, n_copies, n_evictions = 0, 0, 0
    for seed in range(4):
        rng = random.Random(f"{world} {seed}")
        machine = machine_for(world, hasher, ghosts)()
        for _ in range(400):
            act(machine, rng)
            machine.holds()
            machine.events_tell_all()
        n_hits += machine.n_hits
        n_copies += machine.n_copies
        n_evictions += machine.cache.stats().evictions
    if ghosts == "many-ghosts":
        assert n_hits >= 60, "a test of hits that sees none proves nothing"
        assert n_copies >= 20
    assert n_evictions >= 60


def act(machine: CacheMachine, rng: random.Random) -> None:
    kind = rng.random()
    tail = [rng.randrange(2) for _ in range(rng.randrange(4))]
    if kind < 0.15 and machine.seen:
        machine.admit_again(rng.randrange(8), rng.randrange(10), tail)
    elif kind < 0.25 or not machine.running:
        namespace = rng.choice(NAMESPACES)
        machine.admit(rng.randrange(4), rng.randrange(1, 33), tail, namespace)
    elif kind < 0.53 and len(machine.in_flight) < 3:
        machine.plan(rng.randrange(12), rng.randrange(1, 13))
    elif kind < 0.83 and machine.in_flight:
        machine.apply(rng.randrange(2))
    elif kind < 0.85 and machine.in_flight:
        machine.fail_step()
    elif kind < 0.96:
        machine.leave(rng.randrange(5))
    elif kind < 0.97 and machine.released:
        machine.release_again(rng.randrange(10))
    elif kind < 0.98:
        machine.reset_is_refused()
    elif kind < 0.985 and machine.model.published:
        machine.withdraw(rng.randrange(31))
    elif kind < 0.99:
        machine.drain(rng.random() < 0.5)
