"""The accounts of the last answers, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec

from headwater.engine.messages import PrefixAccount

MAX_ANSWERS = 1000
MAX_RING_BYTES = 16 * 2**20
"""Of all that is kept. An account has about 800 bytes: the number of answers is what bounds most rings."""

OVERHEAD_BYTES = 256
"""What an answer costs beside its packed accounts: its id, and its place in the ring."""


class Where(msgspec.Struct, frozen=True):
    """Where in a chat request a difference lies: as text/locate.py's Place."""

    message: int | None
    role: str | None
    character: int
    part: str


class Finished(msgspec.Struct, frozen=True):
    """A prompt that was answered, or begun: times in seconds, counts in tokens.

    ``arrived_s`` is the wall clock's. ``account`` is as the operator may see it.
    """

    request_id: str
    sender: str
    arrived_s: float
    n_prompt: int
    n_cached: int
    n_generated: int
    ttft_s: float | None
    account: PrefixAccount
    where: Where | None = None


class AccountRing:
    """The accounts of the last answers; the oldest go when there are more than ``max_answers`` or ``max_bytes``.

    They are kept packed: what they take is known, and a few times less than as objects.
    """

    def __init__(self, max_answers: int = MAX_ANSWERS, max_bytes: int = MAX_RING_BYTES) -> None:
        self.n_bytes = 0
        self.max_answers = max_answers
        self._max_bytes = max_bytes
        self._packed: OrderedDict[str, bytes] = OrderedDict()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[Finished])

    def __len__(self) -> int:
        return len(self._packed)

    def add(self, answer_id: str, finished: Sequence[Finished]) -> None:
        """Keep the accounts of one answer, one for each of its prompts."""
        packed = self._encoder.encode(finished)
        self._packed[answer_id] = packed
        self.n_bytes += len(packed) + OVERHEAD_BYTES
        while len(self._packed) > self.max_answers or self.n_bytes > self._max_bytes:
            _, oldest = self._packed.popitem(last=False)
            self.n_bytes -= len(oldest) + OVERHEAD_BYTES

    def get(self, answer_id: str) -> list[Finished] | None:
        """The accounts of an answer, in the order of its prompts; None if they are not, or no longer, kept. The id of
        one of several prompts, as the engine has it (its place after a dash), finds that one."""
        packed = self._packed.get(answer_id)
        if packed is not None:
            return self._decoder.decode(packed)
        whole = self._packed.get(answer_id.rpartition("-")[0])
        if whole is None:
            return None
        return [one for one in self._decoder.decode(whole) if one.request_id == answer_id] or None

    def recent(self, n: int) -> list[Finished]:
        """The last ``n`` prompts, newest first."""
        return list(islice(self._newest_first(), n))

    def _newest_first(self) -> Iterator[Finished]:
        for packed in reversed(self._packed.values()):
            yield from reversed(self._decoder.decode(packed))
