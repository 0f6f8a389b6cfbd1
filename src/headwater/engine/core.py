"""The engine, synchronous: one ``step`` plans, runs, applies, and turns tokens into text.

Knows nothing of processes or HTTP; messages come in and go out as values (engine/messages.py).
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from headwater.cache.prefix import PrefixCache
from headwater.engine.estimate import StepTimes
from headwater.engine.explain import SKIP_READING, Explainer
from headwater.engine.kv_events import EventSink, NoEvents
from headwater.engine.messages import (
    Call,
    Delta,
    EngineInfo,
    EngineStats,
    Outputs,
    Refused,
    Reply,
    ResetCache,
    ResetDone,
    Submit,
)
from headwater.engine.request_state import Answer, Piece, RequestState
from headwater.engine.view import View
from headwater.errors import BadRequest, CacheBusy, HeadwaterError, NeverFits, Overloaded
from headwater.sched.scheduler import Progress, Scheduler
from headwater.sched.sequence import Sequence
from headwater.step import RowSampling, StepPlan, StepResult
from headwater.text.detokenizer import Detokenizer
from headwater.text.stop import StopChecker
from headwater.text.tokenizer import Tokenizer
from headwater.types import FinishReason, Namespace, RequestId, SamplingParams

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """Runs one step. Raises only when the step failed as a whole; a row that fails alone is in the result."""

    def execute(self, plan: StepPlan) -> StepResult: ...


@dataclass(slots=True)
class VerifyCounts:
    """In blocks of content (a block in all groups is one), since the start."""

    verified: int = 0
    """Computed again and compared, the differing ones included."""
    differing: int = 0
    skipped: int = 0
    """No longer held when their turn came, or something they are computed from was not."""
    dropped: int = 0
    """Gave way in the queue."""
    failed: int = 0
    """The computation itself failed."""


class IdleWork(Protocol):
    """Something for idle time, in short pieces."""

    @property
    def pending(self) -> bool: ...

    def work(self) -> None: ...


class Verifier(IdleWork, Protocol):
    """Checks hit blocks in idle time, one in each ``work``."""

    counts: VerifyCounts


class EngineCore:
    """Glue of scheduler, runner and text.

    ``namespace`` is the identity of the model that runs (no salt); a request's salt is added to it. ``rng`` draws
    seeds for requests that bring none. In idle time the ``verifier`` works, then what else is ``idle``. ``events`` is
    told what became of the cache, after everything that may have changed it.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        cache: PrefixCache,
        tokenizer: Tokenizer,
        info: EngineInfo,
        *,
        namespace: Namespace,
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
        verifier: Verifier | None = None,
        idle: Iterable[IdleWork] = (),
        events: EventSink | None = None,
    ) -> None:
        self.info = info
        self._runner = runner
        self._scheduler = scheduler
        self._cache = cache
        self._tokenizer = tokenizer
        self._namespace = namespace
        self._rng = rng
        self._clock = clock
        self._verifier = verifier
        self._idle: tuple[IdleWork, ...] = (*(() if verifier is None else (verifier,)), *idle)
        self._events = NoEvents() if events is None else events
        self._times = StepTimes(info.max_num_batched_tokens)
        explainer = Explainer(cache, namespace, info.vocab_size, self._times)
        self._answers: dict[type[Call], Callable[[Any], Reply]] = {
            ResetCache: self.reset,
            **View(cache).answers,
            **explainer.answers,
        }
        self._states: dict[RequestId, RequestState] = {}
        self._n_refused = 0
        self._steps: list[tuple[float, float, float]] = []

    @property
    def busy(self) -> bool:
        """Is there a request, running or waiting?"""
        return bool(self._states)

    @property
    def idle_work(self) -> bool:
        """Is there something for idle time?"""
        return self._events.pending or any(work.pending for work in self._idle)

    @property
    def hits_to_verify(self) -> bool:
        """Is a hit block's check what comes next in idle time?"""
        return self._verifier is not None and self._verifier.pending

    @property
    def doorbell(self) -> int | None:
        """A file descriptor that can be read when there is something for idle time that was not there before."""
        return self._events.doorbell

    # ---- messages ---------------------------------------------------------------------------------

    def submit(self, message: Submit) -> list[Delta]:
        """Queue a request. What comes back at once is a refusal: one delta that ends it with an error."""
        try:
            self._check_ids(message)
            answer = self._answer(message.sampling)
            seq = self._sequence(message)
            self._scheduler.add(seq)
        except (BadRequest, Overloaded) as refusal:
            self._n_refused += 1
            return [refusal_delta(message.request_id, refusal)]
        self._states[seq.request_id] = RequestState(seq, answer, self._times)
        return []

    def abort(self, request_id: RequestId) -> bool:
        """Forget a request, wherever it is; nothing more is said of it. False if it is not (or no longer) here."""
        self._states.pop(request_id, None)
        found = self._scheduler.abort(request_id)
        self._events.flush()
        return found

    def call(self, message: Call) -> Reply:
        """Answer a question; one that cannot be answered, with Refused."""
        try:
            return self._answers[type(message)](message)
        except HeadwaterError as refusal:
            return Refused(message.call_id, str(refusal), kind_of(refusal))
        finally:
            self._events.flush()

    def reset(self, message: ResetCache) -> ResetDone:
        """Forget all cached prefixes. Refused, with the number of busy blocks, while requests run; with ``force`` they
        are preempted, and go on afterwards from their tokens."""
        n_preempted = self._scheduler.preempt_all() if message.force else 0
        try:
            n_cleared = self._cache.reset()
        except CacheBusy as busy:
            return ResetDone(message.call_id, done=False, n_busy=busy.n_busy, n_preempted=n_preempted)
        return ResetDone(message.call_id, done=True, n_busy=0, n_cleared=n_cleared, n_preempted=n_preempted)

    def _check_ids(self, message: Submit) -> None:
        """Raises BadRequest for an id outside the vocabulary: it would index past the embedding table."""
        for field, ids in (("prompt", message.prompt_token_ids), ("stop_token_ids", message.sampling.stop_token_ids)):
            if ids and not 0 <= min(ids) <= max(ids) < self.info.vocab_size:
                bad = next(i for i in ids if not 0 <= i < self.info.vocab_size)
                raise BadRequest(
                    f"{field}: {bad} is no token id; they are 0 to {self.info.vocab_size - 1}", field=field
                )

    def _answer(self, params: SamplingParams) -> Answer:
        decoder = Detokenizer(self._tokenizer, skip_special_tokens=params.skip_special_tokens)
        stops = StopChecker(params.stop, include_in_output=params.include_stop_str_in_output)
        return Answer(params, decoder, stops, self._tokenizer.eos_ids)

    def _sequence(self, message: Submit) -> Sequence:
        params, n_prompt = message.sampling, len(message.prompt_token_ids)
        namespace = replace(self._namespace, salt=message.cache_salt)
        limit = self._scheduler.max_model_len
        return Sequence(
            request_id=message.request_id,
            chain=self._cache.chain(namespace, message.prompt_token_ids),
            n_prompt=n_prompt,
            max_len=limit if params.max_tokens is None else n_prompt + params.max_tokens,
            sampling=RowSampling(
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=params.top_k,
                seed=self._rng.getrandbits(63) if params.seed is None else params.seed,
            ),
            priority=message.priority,
            bypass=SKIP_READING if message.skip_reading_prefix_cache else None,
            sender=message.sender,
        )

    # ---- the step ---------------------------------------------------------------------------------

    def step(self) -> Outputs:
        """Run one step: one delta per sampled token, and a snapshot taken after it was all counted."""
        start_s = self._clock()
        plan = self._scheduler.plan()
        if plan is None:
            self._events.flush()
            return Outputs([], self.stats())
        try:
            result = self._runner.execute(plan)
        except Exception as error:
            logger.exception("step %d failed as a whole", plan.step)
            deltas = self._fail(plan, error)
            model_s = 0.0
        else:
            deltas = [delta for progress in self._scheduler.apply(result) for delta in self._deltas(progress)]
            deltas += self._begun(plan)
            model_s = result.model_s
        self._events.flush()
        step_s = self._clock() - start_s
        self._steps.append((step_s, model_s, plan.n_tokens))
        self._times.observe(plan.n_tokens, step_s)
        return Outputs(deltas, self.stats())

    def _deltas(self, progress: Progress) -> list[Delta]:
        seq = progress.seq
        if progress.error is not None:
            return [self._error_delta(seq, progress.error)]
        if not progress.tokens:
            return []
        state = self._states[seq.request_id]
        piece = state.answer.push(progress.tokens[0], at_limit=progress.at_limit)
        if piece.finish_reason is not None:
            self._scheduler.finish(seq.request_id, piece.finish_reason)
            del self._states[seq.request_id]
        return [state.delta([progress.tokens[0]], piece, self._clock())]

    def _begun(self, plan: StepPlan) -> list[Delta]:
        """Of requests that started with this step and have no token yet: what they reused is known all the same."""
        states = [self._states.get(row.request_id) for row in plan.added]
        begun = [state for state in states if state is not None and not state.said_stop]
        return [state.delta([], Piece(""), self._clock()) for state in begun]

    def _fail(self, plan: StepPlan, error: Exception) -> list[Delta]:
        """No row could be saved (the runner has tried them one by one): they end, the engine goes on."""
        reason = f"the model step failed: {type(error).__name__}: {error}"
        deltas = []
        for seq in self._scheduler.fail_step(plan.step):
            self._scheduler.finish(seq.request_id, FinishReason.ERROR)
            deltas.append(self._error_delta(seq, reason))
        return deltas

    def _error_delta(self, seq: Sequence, reason: str) -> Delta:
        state = self._states.pop(seq.request_id)
        return state.delta([], Piece("", FinishReason.ERROR), self._clock(), error=reason)

    def work_idle(self) -> None:
        """A short piece of the work for idle time: a block is computed, or memory touched. Nothing is done while there
        are requests."""
        next_work = next((work for work in self._idle if work.pending), None)
        if next_work is not None and not self.busy:
            next_work.work()
        self._events.flush()

    def close(self) -> None:
        """Nothing more will be asked of this core."""
        self._events.close()

    # ---- figures ----------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """A snapshot; ``steps`` holds those since the last one. Counters are in tokens where the name does not say
        requests, blocks or preemptions."""
        cache, done = self._cache.stats(), self._scheduler.accounting
        in_flight = self._scheduler.in_flight_wait
        counters: dict[str, float] = {
            "prefix_queries": cache.query_tokens,
            "prefix_hits": cache.hit_tokens,
            "copied_tokens": cache.copied_tokens,
            "bypassed_requests": cache.bypassed_requests,
            "resumed_queries": cache.resumed_query_tokens,
            "resumed_hits": cache.resumed_hit_tokens,
            "resumed_copied_tokens": cache.resumed_copied_tokens,
            "in_flight_waits": in_flight.waits,
            "in_flight_wait_s": in_flight.waited_s,
            "in_flight_tokens_saved": in_flight.tokens_saved,
            "evictions": cache.evictions,
            "withdrawn": cache.withdrawn,
            "preemptions": done.preemptions,
            "prompt_tokens": done.prompt_tokens,
            "prompt_tokens_computed": done.prompt_tokens_computed,
            "generation_tokens": done.generation_tokens,
            "tokens_recomputed": done.tokens_recomputed,
            "requests_refused": self._n_refused,
        }
        for reason, n_requests in done.requests_finished.items():
            counters[f"requests_finished_{reason.value}"] = n_requests
        if self._verifier is not None:
            counters |= verify_counters(self._verifier.counts)
        counters |= self._events.counters()
        gauges: dict[str, float] = {
            "running": self._scheduler.n_running,
            "waiting": self._scheduler.n_waiting,
            "blocks_total": self._cache.n_blocks,
            "blocks_in_use": cache.in_use,
            "blocks_evictable": cache.evictable,
            "blocks_free": cache.free,
            "logical_blocks": cache.logical_blocks,
            "physical_blocks": cache.physical_in_use,
            "kv_usage": cache.in_use / max(1, self._cache.n_blocks),
            "min_reusable_tokens": self._cache.min_reusable_tokens,
        }
        steps, self._steps = self._steps, []
        return EngineStats(counters, gauges, steps)


def verify_counters(counts: VerifyCounts) -> dict[str, float]:
    return {
        "hits_verified": counts.verified,
        "hits_differing": counts.differing,
        "hits_verify_skipped": counts.skipped,
        "hits_verify_dropped": counts.dropped,
        "hits_verify_failed": counts.failed,
    }


def refusal_delta(request_id: RequestId, refusal: HeadwaterError) -> Delta:
    """The one delta of a request that was refused."""
    return Delta(request_id, [], "", finish_reason=FinishReason.ERROR, error=str(refusal), error_kind=kind_of(refusal))


def kind_of(refusal: HeadwaterError) -> str:
    """As Delta's ``error_kind``."""
    if isinstance(refusal, NeverFits):
        return "never_fits"
    if isinstance(refusal, BadRequest):
        return "bad_request"
    return "overloaded" if isinstance(refusal, Overloaded) else "internal"
