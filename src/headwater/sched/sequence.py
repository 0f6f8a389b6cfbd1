"""One request's tokens and progress, as the scheduler sees them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from headwater.cache.account import Account
from headwater.cache.block import Holding
from headwater.cache.key import TokenChain
from headwater.cache.lookup import Lookup
from headwater.sched.parts import NotYet
from headwater.step import RowSampling
from headwater.types import FinishReason, RequestId


class Status(str, Enum):
    """Where a sequence is. A preempted one is WAITING again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the scheduler. Counts are in tokens and never mixed up:

        0 .... n_cached .... n_computed .... n_scheduled .... n_known .... max_len
        | hit  | computed by us | in flight      | ids exist      | may still be sampled
                                     <= n_slots: slots allocated, in every group

    ``n_cached`` is of the current admission; what the request is told (usage) is of its first one:
    ``lookup``.
    """

    request_id: RequestId
    chain: TokenChain
    n_prompt: int
    max_len: int
    """The most tokens that may ever be known: prompt + max_tokens, or the context limit if that is less."""
    sampling: RowSampling = field(default_factory=RowSampling)
    priority: int = 0
    """Lower runs first."""
    bypass: str | None = None
    """The option by which the cache is not consulted for this request."""
    sender: str = ""
    """Who sent it; empty where callers are not told apart."""

    # set by the scheduler
    status: Status = Status.WAITING
    arrival: int = 0
    """A number in the order of arrival; kept through preemption."""
    n_cached: int = 0
    n_computed: int = 0
    n_scheduled: int = 0
    n_slots: int = 0
    n_high: int = 0
    """The most tokens ever computed or hit: computing a token below it again is recomputation."""
    holding: Holding | None = None
    lookup: Lookup | None = None
    """The look-up of the first admission; None until then."""
    account: Account | None = None
    """Of that look-up, as the operator may see it."""
    n_preemptions: int = 0
    n_admissions: int = 0
    finish_reason: FinishReason | None = None

    epoch: int = 0
    """Moves when the sequence loses its place in steps in flight: what they bring is then ignored."""
    last_step: int = 0
    """The last step that names this sequence; 0 if none does."""
    told: list[int] | None = None
    """Per group, the logical end of the table that the runner knows; None while it does not know the row."""
    grew: bool = False
    """Did the tables grow since they were told?"""
    not_yet: NotYet | None = None
    """In the queue: why it did not start when its turn came last."""
    blocked_at: tuple[int, int] | None = None
    """(prompts published, available blocks) when admission last failed: until one grows, it fails again."""

    arrival_s: float = 0.0
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    @property
    def n_known(self) -> int:
        return len(self.chain)

    @property
    def n_generated(self) -> int:
        return len(self.chain) - self.n_prompt

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: lower priority number, then earlier arrival. No two sequences are equal."""
        return (self.priority, self.arrival)

    def held(self) -> Holding:
        """The blocks of a running sequence."""
        if self.holding is None:
            raise RuntimeError(f"sequence {self.request_id!r} is {self.status.value} and holds no blocks")
        return self.holding
