"""The scheduler: plan -> commit -> (the step runs) -> apply. No prefill or decode phase: each step gives every
running sequence some tokens until *computed* catches up with *known*."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headwater.cache.prefix import PrefixCache
from headwater.config import SchedulerConfig
from headwater.errors import AuditError, BadRequest, ConfigError, EngineError, NeverFits, Overloaded
from headwater.sched.draft import Draft, Entry, Flight
from headwater.sched.parts import Part
from headwater.sched.parts.accounting import Accounting
from headwater.sched.parts.accounts import Accounts
from headwater.sched.parts.in_flight import InFlightWait
from headwater.sched.planner import Planner
from headwater.sched.preempt import Places
from headwater.sched.sequence import Sequence, Status
from headwater.step import AddedRow, ContinuedRow, RowResult, SlotCopy, StepPlan, StepResult, TableStart
from headwater.types import FinishReason, RequestId


@dataclass(frozen=True, slots=True)
class Progress:
    """What a step brought one sequence. ``error`` means that the sequence is already finished, with ERROR."""

    seq: Sequence
    tokens: tuple[int, ...] = ()
    """Sampled now, and known from now on; empty for a chunk that is not the last."""
    error: str | None = None

    @property
    def at_limit(self) -> bool:
        """No further token may be sampled: the caller finishes the sequence (LENGTH, if nothing else)."""
        return self.seq.n_known >= self.seq.max_len


class Scheduler:
    """Continuous batching over a prefix cache.

    ``plan`` may be called while steps are in flight; ``apply`` and ``fail_step`` take them in order. A
    sequence may be finished at any moment. ``max_model_len`` is the model's limit; the attribute is the
    limit that holds: what one sequence can have with the whole pool to itself, if that is less.
    """

    def __init__(
        self,
        cache: PrefixCache,
        config: SchedulerConfig,
        *,
        max_model_len: int,
        clock: Callable[[], float] = time.monotonic,
        parts: Iterable[Part] = (),
    ) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_num_mixed_tokens", "max_waiting"):
            if getattr(config, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(config, name)}")
        if not config.in_flight_wait_s >= 0:
            raise ConfigError(f"in_flight_wait_s must be at least 0 seconds, got {config.in_flight_wait_s}")
        self._cache = cache
        self._clock = clock
        self._live: dict[RequestId, Sequence] = {}
        self._max_waiting = config.max_waiting
        self.max_model_len = longest_fit(cache, max_model_len, config.max_num_batched_tokens)
        self.accounting = Accounting(cache)
        self.in_flight_wait = InFlightWait(
            config.in_flight_wait_s, hit_unit=cache.min_reusable_tokens, find=self._live.get, clock=clock
        )
        accounts = (Accounts(cache),) if config.explain else ()
        self._parts = (self.accounting, self.in_flight_wait, *accounts, *parts)
        self._places = Places(cache, self._parts)
        self._planner = Planner(
            cache,
            self._places,
            self._parts,
            max_seqs=config.max_num_seqs,
            max_tokens=config.max_num_batched_tokens,
            max_mixed_tokens=config.max_num_mixed_tokens,
            clock=clock,
        )
        self._n_arrived = 0
        self._step = 0
        self._windows = {(group.window, group.block_size) for group in cache.groups if group.window is not None}
        self._no_new_blocks: tuple[tuple[int, ...], ...] = tuple(() for _ in cache.groups)

    # ---- requests -------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence; its ``max_len`` is cut to the limit. Raises NeverFits, Overloaded or BadRequest."""
        if seq.request_id in self._live:
            raise BadRequest(f"request id {seq.request_id!r} is already in use", field="request_id")
        if seq.n_prompt < 1 or seq.n_prompt != seq.n_known:
            raise BadRequest("a prompt needs at least one token", field="prompt")
        if seq.n_prompt + 1 > self.max_model_len:
            raise NeverFits(
                f"the prompt has {seq.n_prompt} tokens, and at least one must be generated; "
                f"this engine holds at most {self.max_model_len} tokens per request",
                field="prompt",
            )
        if seq.max_len <= seq.n_prompt:
            raise BadRequest("at least one token must be asked for", field="max_tokens")
        if len(self._places.waiting) >= self._max_waiting:
            raise Overloaded(f"{self._max_waiting} requests are waiting already; try again later")
        seq.max_len = min(seq.max_len, self.max_model_len)
        self._n_arrived += 1
        seq.arrival = self._n_arrived
        seq.arrival_s = self._clock()
        self._live[seq.request_id] = seq
        self._places.waiting.add(seq)

    def finish(self, request_id: RequestId, reason: FinishReason) -> bool:
        """End a sequence now, waiting or running, a step in flight or not. False if there is none of that id."""
        seq = self._live.pop(request_id, None)
        if seq is None:
            return False
        self._places.finish(seq, reason)
        return True

    def abort(self, request_id: RequestId) -> bool:
        return self.finish(request_id, FinishReason.ABORT)

    def preempt_all(self) -> int:
        """Send every running sequence back to the queue; returns how many."""
        running = list(self._places.running)
        for seq in reversed(running):
            self._places.preempt(seq)
        return len(running)

    # ---- steps ----------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Plan and commit the next step. None when nothing can run now."""
        draft = self._planner.draft()
        return self._commit(draft) if draft.entries else None

    def _commit(self, draft: Draft) -> StepPlan:
        self._step += 1
        entries = tuple(draft.entries.values())
        removed = tuple(self._places.to_remove)
        self._places.to_remove.clear()
        continued: list[ContinuedRow] = []
        added: list[AddedRow] = []
        copies: list[SlotCopy] = []
        for entry in entries:
            seq = entry.seq
            if seq.told is None:
                added.append(self._added_row(entry))
                copies += (
                    SlotCopy(run.group, run.source, run.target, run.n_slots) for run in self._cache.copies(seq.held())
                )
            else:
                continued.append(self._continued_row(entry, seq.told))
            entry.epoch = seq.epoch
            seq.n_scheduled = entry.n_start + entry.n_new
            entry.samples = seq.n_scheduled == len(seq.chain)
            seq.last_step = self._step
        admitted = [entry for entry in entries if entry.lookup is not None]
        if admitted:
            self._admitted(admitted)
        self._places.in_flight.start(Flight(self._step, entries, removed))
        return StepPlan(self._step, tuple(added), tuple(continued), removed, tuple(copies))

    def _added_row(self, entry: Entry) -> AddedRow:
        seq, tables = entry.seq, entry.seq.held().tables
        seq.told = [table.end for table in tables]
        seq.grew = False
        return AddedRow(
            seq.request_id,
            tuple(seq.chain.tokens),
            entry.n_start,
            entry.n_new,
            tuple(TableStart(table.first, tuple(table.blocks)) for table in tables),
            seq.sampling,
            seq.n_prompt,
        )

    def _continued_row(self, entry: Entry, told: list[int]) -> ContinuedRow:
        """
        first ..... told ..... end
        | known to the runner | new
        """
        seq, new_blocks = entry.seq, self._no_new_blocks
        if seq.grew:
            tables = seq.held().tables
            new_blocks = tuple(tuple(t.blocks[end - t.first :]) for t, end in zip(tables, told, strict=True))
            told[:] = [table.end for table in tables]
            seq.grew = False
        return ContinuedRow(seq.request_id, entry.n_start, entry.n_new, new_blocks)

    def _admitted(self, entries: list[Entry]) -> None:
        now = self._clock()
        for entry in entries:
            seq = entry.seq
            seq.n_admissions += 1
            seq.blocked_at = None
            if seq.lookup is None:
                seq.lookup = entry.lookup
                seq.admitted_s = now
                seq.n_high = seq.n_cached
        for part in self._parts:
            part.on_commit(entries)

    def apply(self, result: StepResult) -> list[Progress]:
        """Confirm the oldest step in flight: computed and known move, full blocks become findable, sliding
        windows slide. Rows whose sequence finished, or was preempted, meanwhile are ignored.

        Raises EngineError if the result is not of that step and of those rows: nothing was confirmed then.
        """
        places = self._places
        flight = places.in_flight.oldest(result.step)
        rows = match_rows(flight, result)
        places.in_flight.land(flight)
        self._cache.step_applied(result.step)
        progress: list[Progress] = []
        for entry, row in rows:
            if not entry.current:
                continue
            if row.error is not None:
                self.finish(entry.seq.request_id, FinishReason.ERROR)
                progress.append(Progress(entry.seq, error=row.error))
            else:
                self._confirm(entry, row.tokens)
                progress.append(Progress(entry.seq, row.tokens))
        return progress

    def _confirm(self, entry: Entry, tokens: tuple[int, ...]) -> None:
        seq, cache, holding = entry.seq, self._cache, entry.seq.held()
        before, unit = seq.n_computed, seq.chain.unit
        seq.n_computed = entry.n_start + entry.n_new
        cache.copied(holding)  # before its blocks are published, so that sources that nobody else uses can be freed
        if before // unit != seq.n_computed // unit:
            cache.publish(seq.chain, holding, seq.n_computed)
            if before < seq.n_prompt:
                self._places.n_published += 1
        if any((before - w + 1) // size != (seq.n_computed - w + 1) // size for w, size in self._windows):
            # On confirmed counts only: a step in flight may still read what the scheduled ones no longer need.
            cache.slide(holding, seq.n_computed, fence=self._places.in_flight.fence(seq))
        if tokens:
            seq.chain.extend(tokens)
            seq.last_token_s = self._clock()
            if seq.first_token_s is None:
                seq.first_token_s = seq.last_token_s
        for part in self._parts:
            part.on_apply(entry, len(tokens))
        seq.n_high = max(seq.n_high, seq.n_computed)

    def fail_step(self, step: int) -> list[Sequence]:
        """The oldest step in flight failed as a whole: nothing of it is computed, nothing is published.

        Its sequences keep their blocks and what was confirmed before, and are planned again as rows that the
        runner does not know; later steps in flight that name them are void for them. Returns those that
        are still running: the caller may finish them instead.
        """
        places = self._places
        flight = places.in_flight.oldest(step)
        places.in_flight.land(flight)
        self._cache.step_applied(step)
        for request_id in flight.removed:  # the runner may have raised before it forgot them
            again = self._live.get(request_id)
            if again is None or again.told is None:
                places.to_remove[request_id] = None
        shaken = [entry.seq for entry in flight.entries if entry.current]
        for seq in shaken:
            places.forget_row(seq)
            seq.n_scheduled = seq.n_computed
        return shaken

    # ---- looking in -----------------------------------------------------------------------------

    @property
    def n_running(self) -> int:
        return len(self._places.running)

    @property
    def n_waiting(self) -> int:
        return len(self._places.waiting)

    @property
    def n_in_flight(self) -> int:
        """Steps whose result is not known yet."""
        return len(self._places.in_flight)

    @property
    def n_preemptions(self) -> int:
        return self.accounting.preemptions

    def running(self) -> list[Sequence]:
        """In order of priority, then arrival."""
        return list(self._places.running)

    def waiting(self) -> list[Sequence]:
        """In the order of admission."""
        return list(self._places.waiting)

    def audit(self) -> None:
        """Check every invariant of the scheduler and of the cache under it. Raises AuditError."""
        running, waiting = self.running(), self.waiting()
        by_id = {seq.request_id: seq for seq in running + waiting}
        if len(by_id) != len(running) + len(waiting) or by_id != self._live:
            raise AuditError(f"live {sorted(self._live)} are not running + waiting {sorted(by_id)}")
        for seq in running:
            counts = (0, seq.n_cached, seq.n_computed, seq.n_scheduled, seq.n_known, seq.max_len)
            if list(counts) != sorted(counts) or seq.n_scheduled > seq.n_slots:
                raise AuditError(f"counts of {seq.request_id!r} are out of order: {counts}, slots {seq.n_slots}")
            if seq.status is not Status.RUNNING or seq.holding is None:
                raise AuditError(f"{seq.request_id!r} is in the running queue but {seq.status.value}")
        for seq in waiting:
            if seq.status is not Status.WAITING or seq.holding is not None or seq.n_scheduled or seq.n_slots:
                raise AuditError(f"{seq.request_id!r} is in the waiting queue but {seq.status.value}, or holds blocks")
        self._cache.audit(seq.held() for seq in running)


def match_rows(flight: Flight, result: StepResult) -> list[tuple[Entry, RowResult]]:
    """Pair what was planned with what came out. Raises EngineError where they differ: the runner is broken."""
    by_id = {row.request_id: row for row in result.rows}
    if len(by_id) != len(result.rows) or by_id.keys() != {entry.seq.request_id for entry in flight.entries}:
        raise EngineError(f"step {flight.step}: the result's rows {list(by_id)} are not the plan's rows")
    pairs = [(entry, by_id[entry.seq.request_id]) for entry in flight.entries]
    for entry, row in pairs:
        if row.error is None and len(row.tokens) != entry.samples:
            raise EngineError(
                f"step {flight.step}: row {row.request_id!r} must sample {int(entry.samples)} tokens, "
                f"got {len(row.tokens)}"
            )
    return pairs


def longest_fit(cache: PrefixCache, limit: int, max_new: int) -> int:
    """The most tokens, at most ``limit``, that one sequence can have with the whole pool to itself.

    The last token's KV is never written, so n tokens need blocks for n - 1. Raises ConfigError when the pool cannot
    hold even a prompt of one token.
    """
    longest = bisect_right(range(limit), cache.n_blocks, key=lambda n_written: cache.peak_blocks(n_written, max_new))
    if longest < 2:
        raise ConfigError(
            f"no request fits: {cache.n_blocks} blocks and a limit of {limit} tokens "
            "must hold a prompt of one token and the token after it"
        )
    return longest
