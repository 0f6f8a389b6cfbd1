"""Runs step plans on one model: keeps the rows between steps, builds batches, samples, and isolates a failing row."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headwater.errors import EngineError
from headwater.kernels.layout import LayerKV
from headwater.kernels.ops import RaggedBatch
from headwater.run.batch import Chunk, RowState, RowTable, build_batch
from headwater.run.sampler import NotFinite, sample
from headwater.run.store import KVStore
from headwater.step import AddedRow, ContinuedRow, RowResult, StepPlan, StepResult
from headwater.types import GroupSpec, RequestId

logger = logging.getLogger(__name__)


class Forward(Protocol):
    """What the runner needs of a model (``model.decoder.Model``): logits float32 [n_sampled, vocab_size]."""

    def forward(self, batch: RaggedBatch, kv: Sequence[LayerKV]) -> Tensor: ...


class LogitsObserver(Protocol):
    """Sees the logits of every step that succeeded; for tests and diagnosis.

    With ``every_position`` the logits of all computed tokens are worked out, not only those that are sampled.
    """

    every_position: bool

    def saw(self, request_ids: Sequence[RequestId], positions: Sequence[int], logits: Tensor) -> None:
        """``logits[i]``, float32 [vocab_size], follows the token at ``positions[i]`` of ``request_ids[i]``."""
        ...


@dataclass(slots=True)
class _Times:
    """Seconds, summed over the attempts of a step."""

    prepare_s: float = 0.0
    model_s: float = 0.0
    sample_s: float = 0.0


class Runner:
    """``model`` over ``store``. One step at a time; all numeric work in the calling thread."""

    def __init__(
        self,
        model: Forward,
        store: KVStore,
        groups: Sequence[GroupSpec],
        *,
        observer: LogitsObserver | None = None,
    ) -> None:
        self._model = model
        self._store = store
        self._groups = tuple(groups)
        self._observer = observer
        self._rows: dict[RequestId, RowState] = {}

    @property
    def n_rows(self) -> int:
        """Rows that are remembered between steps."""
        return len(self._rows)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step: forget ``removed``, copy slots, compute all rows together, sample those that reach their end.

        If that raises, each row is tried alone, and those that raise again are reported in their result; a row's
        tokens and count move only when it succeeded. EngineError if the plan contradicts what the rows
        remember (scheduler and runner disagree: nothing is run).
        """
        times = _Times()
        began = time.perf_counter()
        for request_id in plan.removed:
            self._rows.pop(request_id, None)  # a step that failed as a whole may have come before the row was known
        self._check_copies(plan)
        chunks = self._chunks(plan)
        self._store.copy(plan.copies)  # before any row: rows that are tried again alone find their slots copied
        times.prepare_s += time.perf_counter() - began
        results = self._run_isolated(plan.step, chunks, times)
        return StepResult(
            step=plan.step,
            rows=tuple(results),
            model_s=times.model_s,
            sample_s=times.sample_s,
            prepare_s=times.prepare_s,
        )

    # ---- rows -------------------------------------------------------------------------------------

    def _chunks(self, plan: StepPlan) -> list[Chunk]:
        """Every row's part, continued rows first; all are checked before any is changed."""
        seen: set[RequestId] = set()
        for request_id in (row.request_id for rows in (plan.continued, plan.added) for row in rows):
            if request_id in seen:
                raise EngineError(f"step {plan.step}: row {request_id!r} is in the plan twice")
            seen.add(request_id)
        for continued in plan.continued:
            self._check_continued(plan.step, continued)
        added = [self._new_row(plan.step, row) for row in plan.added]
        chunks = []
        for continued in plan.continued:
            row = self._rows[continued.request_id]
            for table, blocks in zip(row.tables, continued.new_blocks, strict=True):
                table.blocks.extend(blocks)
            chunks.append(Chunk(row, continued.n_new))
        for row, plan_row in zip(added, plan.added, strict=True):
            self._rows[row.request_id] = row
            chunks.append(Chunk(row, plan_row.n_new))
        return chunks

    def _check_continued(self, step: int, plan_row: ContinuedRow) -> None:
        row = self._rows.get(plan_row.request_id)
        where = f"step {step}, row {plan_row.request_id!r}"
        if row is None:
            raise EngineError(f"{where}: continued, but the runner does not know it")
        if row.n_computed != plan_row.n_computed:
            raise EngineError(
                f"{where}: the plan says {plan_row.n_computed} computed tokens, here are {row.n_computed}"
            )
        if len(plan_row.new_blocks) != len(row.tables):
            raise EngineError(f"{where}: blocks for {len(plan_row.new_blocks)} groups, the model has {len(row.tables)}")
        ends = [table.end + len(new) for table, new in zip(row.tables, plan_row.new_blocks, strict=True)]
        self._check_counts(where, row, plan_row.n_new, ends)
        self._check_blocks(where, plan_row.new_blocks)

    def _new_row(self, step: int, plan_row: AddedRow) -> RowState:
        where = f"step {step}, row {plan_row.request_id!r}"
        if plan_row.request_id in self._rows:
            raise EngineError(f"{where}: added, but the runner knows it already")
        if len(plan_row.tables) != len(self._groups):
            raise EngineError(f"{where}: tables for {len(plan_row.tables)} groups, the model has {len(self._groups)}")
        row = RowState(
            request_id=plan_row.request_id,
            tokens=array("q", plan_row.tokens),
            n_computed=plan_row.n_computed,
            tables=tuple(RowTable(start.first, array("i", start.blocks)) for start in plan_row.tables),
            sampling=plan_row.sampling,
        )
        for g, (table, group) in enumerate(zip(row.tables, self._groups, strict=True)):
            needed = group.first_needed(row.n_computed) // group.block_size
            if table.first > needed:
                raise EngineError(f"{where}, group {g}: the table starts at block {table.first}, needed from {needed}")
        self._check_counts(where, row, plan_row.n_new, [table.end for table in row.tables])
        self._check_blocks(where, [start.blocks for start in plan_row.tables])
        return row

    def _check_counts(self, where: str, row: RowState, n_new: int, ends: Sequence[int]) -> None:
        end = row.n_computed + n_new
        if n_new < 1 or end > len(row.tokens):
            raise EngineError(f"{where}: {n_new} new tokens after {row.n_computed}, {len(row.tokens)} are known")
        for g, (n_blocks, group) in enumerate(zip(ends, self._groups, strict=True)):
            if n_blocks * group.block_size < end:
                raise EngineError(
                    f"{where}, group {g}: blocks up to {n_blocks} cover {n_blocks * group.block_size} tokens of {end}"
                )

    def _check_blocks(self, where: str, tables: Sequence[Sequence[int]]) -> None:
        for blocks in tables:
            if blocks and not 0 <= min(blocks) <= max(blocks) < self._store.n_blocks:
                raise EngineError(
                    f"{where}: block ids {min(blocks)} to {max(blocks)}, the pool has {self._store.n_blocks}"
                )

    def _check_copies(self, plan: StepPlan) -> None:
        for copy in plan.copies:
            where = f"step {plan.step}, copy of {copy.n_slots} slots"
            if not 0 <= copy.group < len(self._groups):
                raise EngineError(f"{where}: group {copy.group}, the model has {len(self._groups)}")
            if not 0 < copy.n_slots <= self._groups[copy.group].block_size:
                raise EngineError(f"{where}: a block of group {copy.group} has {self._groups[copy.group].block_size}")
            self._check_blocks(where, [(copy.source, copy.target)])

    # ---- running ----------------------------------------------------------------------------------

    def _run_isolated(self, step: int, chunks: Sequence[Chunk], times: _Times) -> list[RowResult]:
        """All rows together; if that raises, each alone."""
        if not chunks:
            return []
        try:
            return self._run(chunks, times)
        except Exception as error:
            if len(chunks) == 1:
                return [_failed(step, chunks[0], error)]
            logger.warning("step %d raised %s; trying its %d rows one by one", step, _name(error), len(chunks))
        results = []
        for chunk in chunks:
            try:
                results += self._run([chunk], times)
            except Exception as error:
                results.append(_failed(step, chunk, error))
        return results

    @torch.inference_mode()
    def _run(self, chunks: Sequence[Chunk], times: _Times) -> list[RowResult]:
        """One forward pass and its sampling. Rows move at the very end, when nothing can raise any more."""
        every_position = self._observer is not None and self._observer.every_position
        marks = [time.perf_counter()]
        batch = build_batch(chunks, self._groups, every_position=every_position)
        marks.append(time.perf_counter())
        logits = self._model.forward(batch, self._store.layers)
        marks.append(time.perf_counter())
        if self._observer is not None:
            self._tell(self._observer, chunks, logits)
        sampled = [chunk for chunk in chunks if chunk.samples]
        if every_position:
            logits = logits[[batch.query_start[i + 1] - 1 for i, chunk in enumerate(chunks) if chunk.samples]]
        tokens = iter(sample(logits, [chunk.row.sampling for chunk in sampled], [chunk.end for chunk in sampled]))
        results = [_move(chunk, next(tokens) if chunk.samples else None) for chunk in chunks]
        marks.append(time.perf_counter())
        times.prepare_s += marks[1] - marks[0]
        times.model_s += marks[2] - marks[1]
        times.sample_s += marks[3] - marks[2]
        return results

    @staticmethod
    def _tell(observer: LogitsObserver, chunks: Sequence[Chunk], logits: Tensor) -> None:
        """Pass on the logits with the position of the token that each follows."""
        ids: list[RequestId] = []
        positions: list[int] = []
        for chunk in chunks:
            begin = chunk.row.n_computed if observer.every_position else chunk.end - 1
            if observer.every_position or chunk.samples:
                positions += range(begin, chunk.end)
                ids += [chunk.row.request_id] * (chunk.end - begin)
        observer.saw(ids, positions, logits)


def _move(chunk: Chunk, token: int | NotFinite | None) -> RowResult:
    """Confirm a row's progress. A row whose logits are not finite stays where it was."""
    row = chunk.row
    if isinstance(token, NotFinite):
        return RowResult(row.request_id, error=token.reason)
    row.n_computed = chunk.end
    if token is None:
        return RowResult(row.request_id)
    row.tokens.append(token)
    return RowResult(row.request_id, tokens=(token,))


def _failed(step: int, chunk: Chunk, error: Exception) -> RowResult:
    logger.error("step %d: row %r failed alone", step, chunk.row.request_id, exc_info=error)
    return RowResult(chunk.row.request_id, error=_name(error))


def _name(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
