"""Mooncake traces: what was asked of a real service, with the shared beginnings kept and the texts left out.

A line is ``{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}``. Each id stands for a block of
512 tokens together with everything before it; equal ids are equal tokens, and so the hits of a replay are real. Source:
github.com/kvcache-ai/Mooncake, FAST25-release (Qin et al., FAST '25).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from headwater.errors import ConfigError

TRACE_BLOCK = 512
"""Tokens that an id stands for in a trace."""

Count = Annotated[int, msgspec.Meta(ge=0)]
Id = Annotated[int, msgspec.Meta(ge=0)]


class TraceLine(msgspec.Struct, frozen=True):
    """A request as recorded. ``timestamp`` in ms, lengths in tokens."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Count
    hash_ids: tuple[Id, ...]


@dataclass(frozen=True)
class TraceScale:
    """How a trace is made smaller. ``length`` scales inputs and outputs."""

    length: float = 1.0

    @property
    def block(self) -> int:
        """Tokens that an id becomes."""
        return max(1, round(TRACE_BLOCK * self.length))

    def input(self, n_tokens: int) -> int:
        """Scaled input, at least a token: whole blocks stay whole, so that what was shared stays shared.

        512      512      512    300        512 x 3 + 300
        |--------|--------|--------|----|
        |----|----|----|--|                 block x 3 + round(300 x block / 512)
        """
        blocks, rest = divmod(n_tokens, TRACE_BLOCK)
        return max(1, blocks * self.block + round(rest * self.block / TRACE_BLOCK))

    def output(self, n_tokens: int) -> int:
        return max(1, round(n_tokens * self.length))


def read_trace(path: Path, n_requests: int | None = None) -> list[TraceLine]:
    """The requests in order of time, the first ``n_requests`` of them. Raises ConfigError, naming the line, for what
    is no trace."""
    lines: list[TraceLine] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    lines.append(_line(path, number, line))
    except OSError as error:
        raise ConfigError(f"the trace {path} cannot be read: {error.strerror or error}") from None
    if not lines:
        raise ConfigError(f"the trace {path} is empty")
    lines.sort(key=lambda one: one.timestamp)
    return lines[:n_requests]


def _line(path: Path, number: int, line: bytes) -> TraceLine:
    try:
        return msgspec.json.decode(line, type=TraceLine)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}, line {number} is no line of a Mooncake trace ({error}): it must be "
            '{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}'
        ) from None


class TraceTokens:
    """Turns ids into tokens: indices below ``n_vocabulary`` into whatever ordinary tokens there are. ``seed`` decides
    which, so that another run is not answered from the cache of this one."""

    def __init__(self, n_vocabulary: int, seed: int, scale: TraceScale) -> None:
        self._n_vocabulary = n_vocabulary
        self._seed = seed
        self._scale = scale

    def of_id(self, hash_id: int) -> list[int]:
        """The whole block of an id: always the same, whichever request has it, and wherever."""
        return self._draw((self._seed, 0, hash_id), self._scale.block)

    def of_request(self, line: TraceLine, index: int) -> list[int]:
        """A request's input: its ids' tokens, the last ones cut to its length. Tokens that its ids do not reach are its
        own, by its ``index`` in the trace."""
        n_input = self._scale.input(line.input_length)
        n_ids = -(-n_input // self._scale.block)
        tokens = [token for one in line.hash_ids[:n_ids] for token in self.of_id(one)][:n_input]
        return tokens + self._draw((self._seed, 1, index), n_input - len(tokens))

    def _draw(self, key: tuple[int, int, int], n_tokens: int) -> list[int]:
        random = np.random.default_rng(key)
        return [int(one) for one in random.integers(self._n_vocabulary, size=n_tokens)]
