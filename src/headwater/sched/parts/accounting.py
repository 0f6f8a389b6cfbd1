"""What is counted, and when: each figure at the one moment when it becomes true."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from headwater.cache.prefix import PrefixCache
from headwater.sched.draft import Entry
from headwater.sched.parts import Part
from headwater.sched.sequence import Sequence, Status
from headwater.types import FinishReason


class Accounting(Part):
    """Counters in tokens or requests, from the start of the engine.

    Look-ups count when a sequence is admitted, once, with what is really used; look-ups of attempts
    that failed count nothing. A prompt token counts as computed when its step is confirmed, the
    first time; computing a token again after a preemption counts as recomputed, and only there.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self.requests_admitted = 0
        self.prompt_tokens = 0
        self.prompt_tokens_computed = 0
        self.generation_tokens = 0
        self.tokens_computed = 0
        self.tokens_recomputed = 0
        self.preemptions = 0
        self.requests_finished: dict[FinishReason, int] = dict.fromkeys(FinishReason, 0)

    def on_commit(self, admitted: Seq[Entry]) -> None:
        for entry in admitted:
            seq = entry.seq
            resumed = seq.n_admissions > 1
            lookup = entry.admission()
            if not (resumed and lookup.bypassed):  # a request bypasses the cache once, however often it resumes
                self._cache.record(lookup, resumed=resumed)
            if not resumed:
                self.requests_admitted += 1
                self.prompt_tokens += seq.n_prompt

    def on_apply(self, entry: Entry, n_sampled: int) -> None:
        """
        0 ....... n_start ....... n_high ....... end          (n_high anywhere)
                  | recomputed    | new, prompt tokens up to n_prompt
        """
        seq, end = entry.seq, entry.n_start + entry.n_new
        new_from = max(entry.n_start, min(seq.n_high, end))
        self.tokens_computed += entry.n_new
        self.tokens_recomputed += new_from - entry.n_start
        self.prompt_tokens_computed += max(0, min(end, seq.n_prompt) - new_from)
        self.generation_tokens += n_sampled

    def on_release(self, seq: Sequence) -> None:
        if seq.status is Status.WAITING:
            self.preemptions += 1
        elif seq.finish_reason is not None:
            self.requests_finished[seq.finish_reason] += 1
