"""Memory for KV ahead of need: blocks that were never used are touched before a request has to.

The pool is address space at first. The system finds memory for it where something is written for the first time, and
in a virtual machine whose host does the same that is slow: 0.5 GB/s was measured, a tenth of a second for 2,048 tokens
of a small model, which the first request to use those blocks would pay. So a little of the pool beyond what was ever
used is touched at start, and more of it in idle time.

    0 ........... n_used_ever ........... n_touched ........... n_blocks
    | requests'   | touched, AHEAD_BYTES  | address space
"""

from __future__ import annotations

from headwater.cache.prefix import PrefixCache
from headwater.run.store import KVStore

AHEAD_BYTES = 128 << 20
"""So much beyond what was ever used: some thousands of tokens of a small model."""
PIECE_BYTES = 2 << 20
"""So much at a time, some milliseconds at worst: no request waits longer for idle work."""


class MemoryAhead:
    """Idle work. Reads the cache and writes zeros into blocks that it has never given out."""

    def __init__(self, cache: PrefixCache, store: KVStore, *, ahead_bytes: int = AHEAD_BYTES) -> None:
        page_bytes = store.n_bytes // store.n_blocks
        self._cache = cache
        self._store = store
        self._ahead = -(-ahead_bytes // page_bytes)
        self._piece = max(1, PIECE_BYTES // page_bytes)
        self.n_touched = 0
        """Blocks from the pool's first on that have memory, used or not."""

    @property
    def pending(self) -> bool:
        return self.n_touched < self._wanted

    @property
    def _wanted(self) -> int:
        return min(self._cache.n_used_ever + self._ahead, self._cache.n_blocks)

    def work(self) -> None:
        """Touch the next piece."""
        first = max(self.n_touched, self._cache.n_used_ever)
        self.n_touched = min(first + self._piece, self._wanted)
        self._store.clear(first, self.n_touched)

    def work_all(self) -> None:
        while self.pending:
            self.work()
