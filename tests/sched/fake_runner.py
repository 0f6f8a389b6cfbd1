"""A runner without a model that keeps real paged KV, and notices every wrong, stale or unwritten slot.

A slot holds (group, position, history): ``history`` is the digest of all tokens up to that position, which is
what the KV of a real model depends on. To compute a token the row reads, through its block tables, every slot
that the token's query sees, and compares each with the history that its own tokens imply. The sampled token is a
function of the history that was *read*, so a wrong block that escaped the comparison would still change the output.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from headwater.step import AddedRow, ContinuedRow, RowResult, RowSampling, StepPlan, StepResult
from headwater.types import BlockId, GroupSpec, RequestId

POISON = ("poison", -1, b"")
"""What a slot holds that was never written, or whose write was cut short: NaN in a real store."""

Slot = tuple[int | str, int, bytes]


class KVFault(AssertionError):
    """A row read a slot that does not hold its own history, or wrote where it must not."""


def extend_history(history: bytes, token: int) -> bytes:
    return hashlib.blake2b(history + token.to_bytes(4, "little"), digest_size=12).digest()


def sample(history: bytes, sampling: RowSampling, vocab_size: int) -> int:
    seed = b"" if sampling.temperature == 0 else sampling.seed.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(history, key=seed, digest_size=4).digest(), "little") % vocab_size


def oracle(prompt: Sequence[int], n_new: int, sampling: RowSampling = RowSampling(), *, vocab_size: int) -> list[int]:
    """What must come out: everything recomputed from the tokens, without blocks or cache."""
    history = b""
    for token in prompt:
        history = extend_history(history, token)
    out: list[int] = []
    for _ in range(n_new):
        out.append(sample(history, sampling, vocab_size))
        history = extend_history(history, out[-1])
    return out


@dataclass
class Row:
    tokens: list[int]
    histories: list[bytes]
    """histories[p] = digest of tokens[: p + 1]"""
    sampling: RowSampling
    first: list[int]
    blocks: list[list[BlockId]]

    def learn(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            self.histories.append(extend_history(self.histories[-1] if self.histories else b"", token))


@dataclass
class Faults:
    """What to break, each once."""

    raise_early: bool = False
    """The next step raises before the runner took note of anything."""
    raise_late: bool = False
    """The next step raises after rows were registered and some KV was written, garbage at that."""
    bad_rows: set[RequestId] = field(default_factory=set)
    """Rows that give an error at their next step."""


class FakeRunner:
    def __init__(self, groups: Sequence[GroupSpec], n_blocks: int, *, vocab_size: int = 997) -> None:
        self.groups = tuple(groups)
        self.vocab_size = vocab_size
        self.n_blocks = n_blocks
        longest = max(group.block_size for group in groups)
        self.pages: list[list[Slot]] = [[POISON] * longest for _ in range(n_blocks)]
        self.rows: dict[RequestId, Row] = {}
        self.faults = Faults()
        self.plans: list[StepPlan] = []
        self.n_copied = 0
        """Slots copied, in all groups and steps."""
        self.inputs: dict[RequestId, list[int]] = {}
        """Per request, how many tokens it computed in each of its steps, over all admissions."""
        self.next_token: Callable[[RequestId, int], int] | None = None
        """If set, decides the token for (request, position) instead of the history."""

    # ---- one step ---------------------------------------------------------------------------------

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        if self.faults.raise_early:
            self.faults.raise_early = False
            raise RuntimeError("injected: the step failed before it began")
        self._take_note(plan)
        rows = [*plan.continued, *plan.added]
        self._copy(plan, rows)
        if self.faults.raise_late:
            self.faults.raise_late = False
            for row in rows:
                self._poison(row)
            for copy in plan.copies:
                self.pages[copy.target][: copy.n_slots] = [POISON] * copy.n_slots
            raise RuntimeError("injected: the step failed half way")
        self._check_writes(rows)
        for row in rows:
            self._check_context(row, row.n_computed)
        bad = self.faults.bad_rows & {row.request_id for row in rows}
        self.faults.bad_rows -= bad
        for row in rows:
            if row.request_id in bad:
                self._poison(row)
            else:
                self._write(row)
        results = [self._result(row, bad) for row in rows]
        return StepResult(plan.step, tuple(results))

    def _take_note(self, plan: StepPlan) -> None:
        for request_id in plan.removed:
            self.rows.pop(request_id, None)
        for added in plan.added:
            if added.request_id in self.rows:
                raise KVFault(f"{added.request_id} was added twice without being removed")
            row = Row([], [], added.sampling, [t.first for t in added.tables], [list(t.blocks) for t in added.tables])
            row.learn(added.tokens)
            self.rows[added.request_id] = row
        for continued in plan.continued:
            row = self.rows[continued.request_id]
            for blocks, new in zip(row.blocks, continued.new_blocks, strict=True):
                blocks.extend(new)
        for row_plan in [*plan.continued, *plan.added]:
            if not 1 <= row_plan.n_new <= len(self.rows[row_plan.request_id].tokens) - row_plan.n_computed:
                raise KVFault(
                    f"{row_plan.request_id}: {row_plan.n_new} tokens from {row_plan.n_computed} are not known"
                )
            self.inputs.setdefault(row_plan.request_id, []).append(row_plan.n_new)

    def _result(self, row: AddedRow | ContinuedRow, bad: Collection[RequestId]) -> RowResult:
        if row.request_id in bad:
            return RowResult(row.request_id, error="injected: this row failed")
        state = self.rows[row.request_id]
        end = row.n_computed + row.n_new
        self._check_context(row, end)
        if end < len(state.tokens):
            return RowResult(row.request_id)
        group, read = 0, None
        for group in range(len(self.groups)):
            page, slot = self._where(row.request_id, group, end - 1)
            read = self.pages[page][slot][2]
        assert read is not None
        token = sample(read, state.sampling, self.vocab_size)
        if self.next_token is not None:
            token = self.next_token(row.request_id, end)
        state.learn([token])
        return RowResult(row.request_id, (token,))

    # ---- paged memory -------------------------------------------------------------------------------

    def _where(self, request_id: RequestId, group: int, position: int) -> tuple[BlockId, int]:
        """Page and slot of one token in one group."""
        row, size = self.rows[request_id], self.groups[group].block_size
        at = position // size - row.first[group]
        if not 0 <= at < len(row.blocks[group]):
            raise KVFault(f"{request_id}: position {position} is outside its table of group {group}")
        return row.blocks[group][at], position % size

    def _check_context(self, row: AddedRow | ContinuedRow, end: int) -> None:
        """Every slot that this step's queries see, as far as ``end``, holds this row's own history."""
        state = self.rows[row.request_id]
        for g, group in enumerate(self.groups):
            for position in range(group.first_needed(row.n_computed), end):
                page, slot = self._where(row.request_id, g, position)
                if self.pages[page][slot] != (g, position, state.histories[position]):
                    raise KVFault(
                        f"{row.request_id}: block {page} slot {slot} of group {g} should hold position {position}, "
                        f"but holds {self.pages[page][slot]}"
                    )

    def _check_writes(self, rows: Sequence[AddedRow | ContinuedRow]) -> None:
        """No page that is written now is in the table of any other row that runs."""
        users: dict[BlockId, set[RequestId]] = {}
        for row in rows:
            state = self.rows[row.request_id]
            for g, group in enumerate(self.groups):
                needed = group.first_needed(row.n_computed) // group.block_size
                for block in state.blocks[g][max(0, needed - state.first[g]) :]:
                    users.setdefault(block, set()).add(row.request_id)
        for row in rows:
            for page in {page for page, _, _ in self._targets(row)}:
                if users[page] != {row.request_id}:
                    raise KVFault(f"{row.request_id} writes block {page}, which {users[page]} use")

    def _copy(self, plan: StepPlan, rows: Sequence[AddedRow | ContinuedRow]) -> None:
        """All copies come first; a block that is copied from, or to, is written by nobody else in this step. Slots
        beyond the copied ones are poison until they are written, whatever the page held."""
        written = {page for row in rows for page, slot, _ in self._targets(row)}
        for copy in plan.copies:
            if copy.source in written:
                raise KVFault(f"block {copy.source} is copied from and written in one step")
            size = self.groups[copy.group].block_size
            self.pages[copy.target][:size] = [POISON] * size
            self.pages[copy.target][: copy.n_slots] = self.pages[copy.source][: copy.n_slots]
            self.n_copied += copy.n_slots

    def _targets(self, row: AddedRow | ContinuedRow) -> list[tuple[BlockId, int, Slot]]:
        state = self.rows[row.request_id]
        return [
            (*self._where(row.request_id, g, position), (g, position, state.histories[position]))
            for g in range(len(self.groups))
            for position in range(row.n_computed, row.n_computed + row.n_new)
        ]

    def _write(self, row: AddedRow | ContinuedRow) -> None:
        for page, slot, content in self._targets(row):
            self.pages[page][slot] = content

    def _poison(self, row: AddedRow | ContinuedRow) -> None:
        for page, slot, _ in self._targets(row):
            self.pages[page][slot] = POISON
