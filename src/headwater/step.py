"""What runs in one model step, and what came out: where scheduling and running meet.

Both are plain serialisable data, so that a step can go to another process or to many ranks. The runner
keeps each row's tokens and tables between steps; a plan carries only what is new.

Counts of a row, in tokens:

    0 ........ n_computed ........ n_computed + n_new ........ known
      KV written | computed now     | left for later steps

A row is sampled in a step exactly when n_computed + n_new == known.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import msgspec

from headwater.types import BlockId, RequestId


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How a row's next token is chosen. ``seed`` is always set: draws are keyed by
    (seed, choice, position, purpose), so a resumed row draws what it would have drawn."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TableStart:
    """A new row's block table in one group: ``blocks[j]`` holds logical block ``first + j``."""

    first: int
    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class AddedRow:
    """A row that the runner does not know yet (new, or resumed after preemption)."""

    request_id: RequestId
    tokens: tuple[int, ...]
    """All known tokens, from position 0."""
    n_computed: int
    """Tokens whose KV is already in the store (the hit)."""
    n_new: int
    """Tokens to compute in this step, at least 1."""
    tables: tuple[TableStart, ...]
    """Per group, covering n_computed + n_new tokens."""
    sampling: RowSampling
    n_prompt: int = 0


@dataclass(frozen=True, slots=True)
class ContinuedRow:
    """A row that the runner knows: only what is new. The tokens it sampled itself it already has."""

    request_id: RequestId
    n_computed: int
    n_new: int
    new_blocks: tuple[tuple[BlockId, ...], ...]
    """Per group, appended to the row's table."""


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """Copy the first ``n_slots`` slots of block ``source`` to ``target`` in group ``group``, before the first layer."""

    group: int
    source: BlockId
    target: BlockId
    n_slots: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One model step. Rows run in the order ``continued`` then ``added``; ``removed`` rows are forgotten first."""

    step: int
    added: tuple[AddedRow, ...] = ()
    continued: tuple[ContinuedRow, ...] = ()
    removed: tuple[RequestId, ...] = ()
    copies: tuple[SlotCopy, ...] = ()

    @property
    def n_tokens(self) -> int:
        return sum(row.n_new for row in self.continued) + sum(row.n_new for row in self.added)

    def digest(self) -> bytes:
        """SHA-256 over the plan's canonical encoding; ranks compare it (mission section 6)."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()


@dataclass(frozen=True, slots=True)
class RowResult:
    """What one row gave: the sampled tokens (none for a chunk that is not the last), or an error."""

    request_id: RequestId
    tokens: tuple[int, ...] = ()
    n_accepted: int = 0
    """How many proposed tokens were accepted (0 without speculation)."""
    error: str | None = None
    """Set when this row, alone, made the step fail: nothing of it was computed."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came out of step ``step``: a result per row, in the plan's row order."""

    step: int
    rows: tuple[RowResult, ...]
    digest: bytes = b""
    """``StepPlan.digest`` of what was run, where several ranks run one plan; empty from a lone runner."""
    model_s: float = 0.0
    """Seconds in the model."""
    sample_s: float = 0.0
    """Seconds in sampling."""
    prepare_s: float = field(default=0.0)
    """Seconds building the batch."""
