"""Explains what a prompt would reuse now, without running it.

It looks up as a request does when it is admitted, and leaves no trace: recency, counters, ghosts, blocks and what is in
flight stay as they are. What it costs the step loop is a request's hashing and walking, and nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headwater.cache.account import elsewhere
from headwater.cache.prefix import PrefixCache
from headwater.engine.checks import check_token_ids
from headwater.engine.estimate import StepTimes
from headwater.engine.messages import Call, Explain, Explained, PrefixAccount, Reply
from headwater.types import Namespace

SKIP_READING = "skip_reading_prefix_cache"
"""The option, as its name appears in a look-up's reason, by which a request does not read the cache."""


class Explainer:
    """Answers Explain for one cache; ``answers`` says so. ``namespace`` is that of the model, without a salt."""

    def __init__(self, cache: PrefixCache, namespace: Namespace, vocab_size: int, times: StepTimes) -> None:
        self._cache = cache
        self._namespace = namespace
        self._vocab_size = vocab_size
        self._times = times

    @property
    def answers(self) -> dict[type[Call], Callable[[Any], Reply]]:
        return {Explain: self.explain}

    def explain(self, message: Explain) -> Explained:
        """Raises BadRequest for what is no token id."""
        check_token_ids(message.prompt_token_ids, vocab_size=self._vocab_size, field="prompt")
        chain = self._cache.chain(replace(self._namespace, salt=message.cache_salt), message.prompt_token_ids)
        lookup = self._cache.lookup(chain, bypass=SKIP_READING if message.skip_reading_prefix_cache else None)
        told = self._cache.account(lookup, message.viewer)
        if message.viewer.operator:
            told = replace(told, elsewhere=elsewhere(self._cache.index, chain))
        return Explained(message.call_id, PrefixAccount(told, self._times.seconds(told.n_compute)))
