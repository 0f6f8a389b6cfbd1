"""The cache as the scheduler sees it: look up, claim, allocate, publish, slide, release."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from headwater.cache import audit as audits
from headwater.cache.account import Account, Viewer, account
from headwater.cache.block import Holding, Node
from headwater.cache.events import BlockStored, EventLog
from headwater.cache.evict import Eviction
from headwater.cache.extras import Extra
from headwater.cache.group import GroupHit, Layout, first_block, longest_hit
from headwater.cache.index import PrefixIndex
from headwater.cache.key import Hasher, TokenChain, make_hasher
from headwater.cache.lookup import Lookup, Stop, StopReason, explain, explain_copy
from headwater.cache.partial import SlotRun, partial_hit, targets
from headwater.cache.pool import BlockPool
from headwater.cache.recheck import Recheck, recheck
from headwater.config import CacheConfig
from headwater.errors import CacheBusy, CacheError, ConfigError, DoubleRelease, OutOfBlocks, StaleLookup
from headwater.types import BlockId, BlockTable, GroupSpec, Namespace, RequestId


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters since the start (in tokens where not said otherwise), then gauges in blocks. Hits count whole
    blocks; what was copied from the beginning of a block comes on top."""

    query_tokens: int
    hit_tokens: int
    copied_tokens: int
    n_lookups: int
    bypassed_requests: int
    resumed_query_tokens: int
    resumed_hit_tokens: int
    resumed_copied_tokens: int
    evictions: int
    withdrawn: int
    refused_releases: int
    n_blocks: int
    in_use: int
    evictable: int
    free: int
    fenced: int
    logical_blocks: int
    """Entries in the tables of all sequences; against ``physical_in_use`` it shows what sharing saves."""
    physical_in_use: int


@dataclass(slots=True)
class _Counters:
    query_tokens: int = 0
    hit_tokens: int = 0
    copied_tokens: int = 0
    n_lookups: int = 0
    bypassed_requests: int = 0
    resumed_query_tokens: int = 0
    resumed_hit_tokens: int = 0
    resumed_copied_tokens: int = 0
    evictions: int = 0
    withdrawn: int = 0
    refused_releases: int = 0


class PrefixCache:
    """Automatic prefix caching over one pool of physical blocks. Not thread-safe: one loop owns it.

    A sequence's life: ``chain`` -> ``lookup`` -> ``claim`` -> (``allocate``, the step runs, ``publish``,
    ``slide``) ... -> ``release``. If the look-up found slots to copy, the first step makes ``copies`` before it
    computes, and ``copied`` follows when that step was applied.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        n_blocks: int,
        *,
        config: CacheConfig,
        clock: Callable[[], float] = time.monotonic,
        hasher: Hasher | None = None,
        events: EventLog | None = None,
    ) -> None:
        """ConfigError for a pool without blocks or an unknown hash algorithm. ``hasher`` overrides the config's."""
        if n_blocks < 1 and groups:
            raise ConfigError(f"the cache needs at least 1 block, got {n_blocks}")
        if config.max_ghosts < 0:
            raise ConfigError(f"max_ghosts must be at least 0, got {config.max_ghosts}")
        self.groups = tuple(groups)
        self.n_blocks = n_blocks
        self.layout = Layout.of(self.groups, config.block_size)
        self.hasher = make_hasher(config.hash_algo) if hasher is None else hasher
        self.events = EventLog() if events is None else events
        self.pool = BlockPool(n_blocks)
        self.index = PrefixIndex(self.layout, self.pool, self.events, config.max_ghosts)
        self.live: dict[Holding, None] = {}
        """Every holding that was claimed and not yet released."""
        self.n_logical = 0
        self._clock = clock
        self._counters = _Counters()
        self._enabled = config.enable_prefix_caching and bool(self.layout.reusable)
        self._partial = config.partial_reuse
        self._off_because = "no_reusable_group" if config.enable_prefix_caching else "no_enable_prefix_caching"

    @property
    def unit(self) -> int:
        """Tokens that one key covers."""
        return self.layout.unit

    @property
    def min_reusable_tokens(self) -> int:
        """The smallest length that is reused by whole blocks; every ``n_hit`` is a multiple of it. What is shorter
        can be copied, but only from a block that was filled and published."""
        return self.layout.hit_unit

    @property
    def available(self) -> int:
        """Blocks that can be allocated now: free and evictable ones."""
        return self.pool.available

    @property
    def n_used_ever(self) -> int:
        """Blocks numbered from here on were never given out: nothing can be in them."""
        return self.pool.n_used_ever

    def chain(self, namespace: Namespace, tokens: Iterable[int], extras: Sequence[Extra] = ()) -> TokenChain:
        """The chain of a request's tokens. BadRequest for what is no token id."""
        return TokenChain(namespace, self.unit, self.hasher, tokens, extras)

    # -- admission ----------------------------------------------------------------------------------------

    def lookup(self, chain: TokenChain, *, bypass: str | None = None) -> Lookup:
        """The longest usable hit, and why it ends there. Changes nothing and counts nothing.

        At most ``len(chain) - 1`` tokens (the last one's logits must be computed): whole blocks, a multiple of
        ``min_reusable_tokens``, then slots to copy from a block that begins with the same tokens; every reusable
        group can start there. ``bypass`` names the option by which the request does not want to read the cache.
        """
        option = bypass if self._enabled else self._off_because
        n_tokens = len(chain)
        if option is not None:
            stop = Stop(StopReason.BYPASSED, 0, option=option)
            nothing = tuple(GroupHit(0, ()) for _ in self.groups)
            return Lookup(n_tokens, 0, nothing, stop, chain, (), self.index.epoch)
        n_limit = max(0, n_tokens - 1) // self.layout.hit_unit * self.layout.period
        path = self.index.walk(chain, max(0, n_tokens - 1) // self.unit if self._partial else n_limit)
        n_hit, tables = longest_hit(self.layout, path, self.pool)
        stop = explain(self.index, chain, path, n_hit, n_limit)
        used = path if len(path) == n_hit else path[:n_hit]
        whole = Lookup(n_tokens, n_hit * self.unit, tuple(tables), stop, chain, used, self.index.epoch)
        found = partial_hit(self.index, chain, path, n_hit, tables) if self._partial else None
        if found is None:
            return whole
        n_whole = found.n_units * self.unit
        if found.n_units != n_hit:
            stop = explain(self.index, chain, path, found.n_units, n_limit)
        return Lookup(
            n_tokens,
            n_whole,
            found.tables,
            explain_copy(self.index, stop, chain, path[: found.n_units], found),
            chain,
            path[: found.n_units],
            self.index.epoch,
            n_copy=found.n_copy,
            beginnings=found.beginnings,
            whole=whole,
        )

    def can_admit(self, lookup: Lookup, n_tokens: int) -> bool:
        """Whether claiming this hit and allocating up to ``n_tokens`` tokens would succeed now."""
        refs = self.pool.refs
        from_queue = sum([refs[block] for block in table.blocks].count(0) for table in lookup.tables)
        from_queue += [refs[beginning.source] for beginning in lookup.beginnings].count(0)
        ends = [table.end for table in lookup.tables]
        return self._n_missing(ends, n_tokens) + from_queue <= self.available

    def account(self, lookup: Lookup, viewer: Viewer) -> Account:
        """What there is to say of ``lookup``, made now, to ``viewer``. Changes nothing and counts nothing."""
        return account(self.index, lookup, viewer, self._clock)

    def claim(self, chain: TokenChain, lookup: Lookup, owner: RequestId, sender: str = "") -> Holding:
        """Take a reference on each block of the hit, and on each that is copied from until that is done, and note
        that ``owner`` computes what follows the whole blocks. ``sender``: who sent the request, if callers are told
        apart.

        StaleLookup, and nothing is changed, if a block of the hit has lost its content since the look-up.
        """
        self._check_fresh(chain, lookup)
        for table in lookup.tables:
            self.pool.claim(table.blocks)
        self.pool.claim([beginning.source for beginning in lookup.beginnings])
        tables = tuple(BlockTable(table.first, list(table.blocks)) for table in lookup.tables)
        holding = Holding(chain, owner, tables, lookup.n_hit, sender)
        holding.beginnings = lookup.beginnings
        self.live[holding] = None
        self.n_logical += holding.n_blocks
        if self._enabled:
            if sender:
                self.index.senders.note(lookup.path, sender)
            self.index.enter(holding, lookup.path[-1] if lookup.path else self.index.ensure_root(chain))
            if not self.layout.every_unit_held:
                self.index.ghosts.touch(lookup.path)
        return holding

    def _check_fresh(self, chain: TokenChain, lookup: Lookup) -> None:
        if lookup.chain is not chain:
            raise StaleLookup("the look-up was made for another chain: look up again")
        if lookup.epoch == self.index.epoch:
            return
        nodes, path = self.pool.node, lookup.path
        gone = bool(path) and not self.index.is_attached(path[-1])
        gone = gone or any(nodes[beginning.source] is not beginning.node for beginning in lookup.beginnings)
        for group in self.layout.reusable:
            table = lookup.tables[group.index]
            for block, node in zip(
                table.blocks, path[(table.first + 1) * group.ratio - 1 :: group.ratio], strict=False
            ):
                gone = gone or nodes[block] is not node
        if gone:
            raise StaleLookup(f"part of the hit of {lookup.n_start} tokens was withdrawn: look up again")

    def record(self, lookup: Lookup, *, resumed: bool) -> None:
        """Count this look-up, once, when its request is admitted. Requests that bypass the cache, and those
        that resume after preemption, have counters of their own."""
        counters = self._counters
        if lookup.bypassed:
            counters.bypassed_requests += 1
        elif resumed:
            counters.resumed_query_tokens += lookup.n_tokens
            counters.resumed_hit_tokens += lookup.n_hit
            counters.resumed_copied_tokens += lookup.n_copy
        else:
            counters.n_lookups += 1
            counters.query_tokens += lookup.n_tokens
            counters.hit_tokens += lookup.n_hit
            counters.copied_tokens += lookup.n_copy
            if lookup.path:
                lookup.path[-1].hits += 1

    # -- running ------------------------------------------------------------------------------------------

    def copies(self, holding: Holding) -> tuple[SlotRun, ...]:
        """The copies that the sequence starts with, as long as no applied step has made them: every step in which
        the sequence starts, also again after a step that failed, makes them all before it computes."""
        self._check_alive(holding)
        return targets(holding.beginnings, holding.tables)

    def copied(self, holding: Holding) -> None:
        """A step that made the copies was applied: their sources are given back. Does nothing the second time."""
        self._check_alive(holding)
        if holding.beginnings:
            self._give_back_sources(holding, None)

    def _give_back_sources(self, holding: Holding, fence: int | None) -> None:
        sources = [beginning.source for beginning in holding.beginnings]
        holding.beginnings = ()
        if fence is None:
            self.pool.release(sources)
        else:
            self.pool.fence(sources, fence)

    def blocks_missing(self, holding: Holding, n_tokens: int) -> int:
        """Blocks to allocate so that the tables cover ``n_tokens`` tokens."""
        return self._n_missing([table.end for table in holding.tables], n_tokens)

    def _n_missing(self, ends: Sequence[int], n_tokens: int) -> int:
        wanted = [-(-n_tokens // spec.block_size) for spec in self.groups]
        return sum(max(0, want - end) for want, end in zip(wanted, ends, strict=True))

    def allocate(self, holding: Holding, n_tokens: int) -> tuple[tuple[BlockId, ...], ...]:
        """Extend the tables to cover ``n_tokens`` tokens; per group the new blocks.

        All or nothing: OutOfBlocks leaves everything as it was. Evicted content is withdrawn first, and
        remembers that ``holding.owner`` needed its block.
        """
        self._check_alive(holding)
        needs = [max(0, -(-n_tokens // s.block_size) - t.end) for s, t in zip(self.groups, holding.tables, strict=True)]
        total = sum(needs)
        if total > self.available:
            raise OutOfBlocks(total, self.available)
        if not total:
            return tuple(() for _ in needs)
        taken, evicted = self.pool.take(total)
        if evicted:
            self._counters.evictions += len(evicted)
            self.index.evict(evicted, Eviction(self._clock(), holding.owner, holding.sender))
        self.n_logical += total
        group_of, start = self.pool.group, 0
        added = []
        for g, need in enumerate(needs):
            blocks = taken[start : start + need]
            start += need
            for block in blocks:
                group_of[block] = g
            holding.tables[g].blocks += blocks
            added.append(tuple(blocks))
        return tuple(added)

    def publish(self, chain: TokenChain, holding: Holding, n_computed: int) -> None:
        """Make every full block up to ``n_computed`` tokens findable. Only for steps that were confirmed.

        Does nothing when caching is off. CacheError if ``n_computed`` exceeds what is known or allocated.
        """
        self._check_alive(holding)
        if holding.chain is not chain:
            raise CacheError(f"{holding} belongs to another chain")
        if n_computed > len(chain):
            raise CacheError(f"{n_computed} tokens computed, but only {len(chain)} are known")
        for spec, table in zip(self.groups, holding.tables, strict=True):
            if table.end * spec.block_size < n_computed:
                raise CacheError(f"{n_computed} tokens computed, but {table.end * spec.block_size} allocated")
        if not self._enabled or holding.barred:
            return
        if holding.cursor is None and not holding.n_published:  # its empty root went in a reset
            self.index.enter(holding, self.index.ensure_root(chain))
        self.index.publish(holding, n_computed // self.unit)

    def slide(self, holding: Holding, n_computed: int, *, fence: int | None = None) -> None:
        """Give back the blocks that no query at a position >= ``n_computed`` reads. Published ones stay findable.

        ``fence``: number of a step in flight that still names them; they become available once it is applied.
        """
        self._check_alive(holding)
        for spec, table in zip(self.groups, holding.tables, strict=True):
            n_out = min(first_block(spec, n_computed), table.end) - table.first
            if n_out > 0:
                self._give_back(table.blocks[n_out - 1 :: -1], fence)
                del table.blocks[:n_out]
                table.first += n_out

    def release(self, holding: Holding, *, fence: int | None = None) -> None:
        """Give everything back, each group's tail first. DoubleRelease, counted, the second time.

        ``fence`` as in ``slide``.
        """
        if holding.released:
            self._counters.refused_releases += 1
            raise DoubleRelease(f"the blocks of request {holding.owner!r} were released before; refused")
        self._give_back_sources(holding, fence)
        blocks = [block for table in holding.tables for block in reversed(table.blocks)]
        self._give_back(blocks, fence)
        self.index.leave(holding)
        for table in holding.tables:
            table.blocks = []
        holding.released = True
        del self.live[holding]

    def _give_back(self, blocks: list[BlockId], fence: int | None) -> None:
        if fence is None:
            self.pool.release(blocks)
        else:
            self.pool.fence(blocks, fence)
        self.n_logical -= len(blocks)

    def _check_alive(self, holding: Holding) -> None:
        if holding.released:
            raise CacheError(f"the blocks of request {holding.owner!r} were released before")

    def step_applied(self, step: int) -> None:
        """Step ``step`` (and all before) is over: what its fences kept becomes available."""
        self.pool.step_applied(step)

    # -- checking -----------------------------------------------------------------------------------------

    def recheck(self, node: Node) -> Recheck | None:
        """What it takes to compute a recorded block again, now; None if it cannot be. Changes nothing."""
        return recheck(self.index, node)

    def withdraw(self, node: Node) -> int:
        """``node``'s content proved wrong: it and all that follows it (computed from it) can no longer be found. The
        number of blocks. Those in use stay with their owners, who publish nothing more. Does nothing if it is gone."""
        n_blocks = self.index.withdraw(node)
        self._counters.withdrawn += n_blocks
        return n_blocks

    # -- the whole ----------------------------------------------------------------------------------------

    def reset(self) -> int:
        """Forget everything; the number of cached blocks cleared. CacheBusy while blocks are in use."""
        n_busy = self.n_blocks - self.available
        if n_busy:
            raise CacheBusy(n_busy)
        n_cleared = self.pool.clear()
        self.index.clear()
        if self.events.enabled:
            self.events.cleared()
        return n_cleared

    def peak_blocks(self, n_tokens: int, max_new: int) -> int:
        """Most blocks that one sequence of ``n_tokens`` tokens ever holds if a step computes at most ``max_new``."""
        return sum(spec.peak_blocks(n_tokens, max_new) for spec in self.groups)

    def stats(self) -> CacheStats:
        pool, counters = self.pool, self._counters
        fenced = pool.n_fenced
        in_use = self.n_blocks - self.available - fenced
        return CacheStats(
            query_tokens=counters.query_tokens,
            hit_tokens=counters.hit_tokens,
            copied_tokens=counters.copied_tokens,
            n_lookups=counters.n_lookups,
            bypassed_requests=counters.bypassed_requests,
            resumed_query_tokens=counters.resumed_query_tokens,
            resumed_hit_tokens=counters.resumed_hit_tokens,
            resumed_copied_tokens=counters.resumed_copied_tokens,
            evictions=counters.evictions,
            withdrawn=counters.withdrawn,
            refused_releases=counters.refused_releases,
            n_blocks=self.n_blocks,
            in_use=in_use,
            evictable=len(pool.evictable),
            free=len(pool.free),
            fenced=fenced,
            logical_blocks=self.n_logical,
            physical_in_use=in_use,
        )

    def snapshot(self) -> list[BlockStored]:
        """What is findable now, parents first, for a reader of events that joins late; each carries the number
        that the next event will have."""
        return self.index.snapshot()

    def audit(self, holdings: Iterable[Holding] = ()) -> None:
        """Check every invariant; AuditError says which does not hold."""
        audits.audit(self, holdings)
