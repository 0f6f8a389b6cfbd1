"""The shared nouns: small frozen values that every part of Headwater may name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

RequestId = str
BlockId = int
"""Number of a physical block: the index of its page in the pool."""

Progress = Callable[[str, float], None]
"""How long work tells how far it is: called with what is being done and the fraction done, 0 to 1."""


def silent(what: str, fraction: float) -> None:
    """A Progress that tells nobody."""


class GroupKind(str, Enum):
    """How long the KV of a group of layers lives."""

    FULL = "full"
    SLIDING = "sliding"


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Layers whose KV has one shape and one lifetime; they share a block table.

    ``block_size`` is in tokens. ``window`` (sliding groups only) counts the keys a query sees, itself
    included: the query at position p attends to positions max(0, p - window + 1) .. p.
    A group with ``reusable=False`` has a table but no part in prefix caching: it is left out of every
    look-up and of the hit unit.
    """

    kind: GroupKind
    block_size: int
    layers: tuple[int, ...] = ()
    window: int | None = None
    reusable: bool = True

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}")
        if (self.kind is GroupKind.SLIDING) != (self.window is not None):
            raise ValueError("a sliding group needs a window, and only a sliding group has one")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}")

    def first_needed(self, position: int) -> int:
        """First position whose KV the query at ``position`` reads."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def peak_blocks(self, n_tokens: int, max_new: int) -> int:
        """Most blocks that a sequence of ``n_tokens`` ever holds if a step computes at most ``max_new`` tokens.

        A step that computes positions c .. c + k - 1 needs those and the window before them; blocks before are
        given back between steps.

            c - window + 1 ......... c ......... c + k      a span of at most window - 1 + k tokens,
            |  read                  | written   |          at any offset from the block boundaries
        """
        span = n_tokens if self.window is None else min(n_tokens, self.window - 1 + max(1, max_new))
        offset = min(self.block_size - 1, n_tokens - span)
        return -(-(offset + span) // self.block_size)


@dataclass(slots=True)
class BlockTable:
    """A sequence's logical blocks in one group, as physical blocks.

    ``blocks[j]`` holds logical block ``first + j``. Logical blocks before ``first`` slid out of the
    window (or were never claimed, because no query to come reads them).

            0 ... first-1 | first ... first+len(blocks)-1
            slid out      | held, one reference each
    """

    first: int = 0
    blocks: list[BlockId] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Logical index one past the last held block."""
        return self.first + len(self.blocks)


@dataclass(frozen=True, slots=True)
class Namespace:
    """Who may share KV: the identity at the root of a key chain.

    ``adapters`` are ordered (digest, scale) pairs. ``salt`` None (absent) differs from "" (empty).
    """

    weights: bytes
    adapters: tuple[tuple[bytes, float], ...] = ()
    salt: str | None = field(default=None, repr=False)  # never shown in clear


class FinishReason(str, Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends. Names follow vLLM's.

    ``temperature`` 0 is greedy. ``top_p`` 1 and ``top_k`` 0 (or -1) switch those filters off. ``seed``
    None lets the engine draw one, once, at arrival. ``max_tokens`` None means up to the context limit.
    ``stop_reason`` of a finished request is the stop string or the stop id that matched.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
