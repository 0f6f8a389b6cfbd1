"""Every request keeps the account of the look-up with which it first started: what it reused, and why no more."""

from __future__ import annotations

from headwater.cache.account import Viewer
from headwater.cache.lookup import Lookup
from headwater.cache.prefix import PrefixCache
from headwater.sched.parts import Part
from headwater.sched.sequence import Sequence


class Accounts(Part):
    """Writes ``Sequence.account``, as the operator may see it: whoever tells it to others asks ``seen_by`` first."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache

    def before_start(self, seq: Sequence, lookup: Lookup) -> None:
        if seq.lookup is None:  # not when it goes on after preemption
            seq.account = self._cache.account(lookup, Viewer(seq.sender, operator=True))
