"""What the engine keeps of one request beside its sequence: its text, and when it ends."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from headwater.engine.estimate import StepTimes
from headwater.engine.messages import Delta, PrefixAccount, Timing, Usage
from headwater.sched.sequence import Sequence
from headwater.types import FinishReason, SamplingParams


class StopMatch(Protocol):
    @property
    def emit(self) -> str: ...

    @property
    def matched(self) -> str | None: ...


class TextDecoder(Protocol):
    """Tokens to text, holding back bytes of characters that are not complete (text/detokenizer)."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class StopStrings(Protocol):
    """Text to text, holding back what may become a stop string (text/stop)."""

    def push(self, text: str) -> StopMatch: ...

    def finish(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token added to the text, and the end if it brought that."""

    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class Answer:
    """One request's output text, token by token.

    A token that ends the request (EOS, a stop id) adds no text unless ``include_stop_str_in_output``; as in vLLM,
    ``stop_reason`` is the stop id or the stop string, and None for EOS. A stop string that is complete ends the text
    at its place, whatever the same token or held-back bytes would add; it wins over an end by length or id
    at the same token, because it stands earlier in the text.
    """

    def __init__(
        self, sampling: SamplingParams, decoder: TextDecoder, stops: StopStrings, eos_ids: Collection[int]
    ) -> None:
        self._decoder = decoder
        self._stops = stops
        self._eos_ids = frozenset() if sampling.ignore_eos else frozenset(eos_ids)
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._show_stop = sampling.include_stop_str_in_output

    def push(self, token: int, *, at_limit: bool) -> Piece:
        if token in self._eos_ids:
            return self._close(token if self._show_stop else None, FinishReason.STOP, None)
        if token in self._stop_ids:
            return self._close(token if self._show_stop else None, FinishReason.STOP, token)
        if at_limit:
            return self._close(token, FinishReason.LENGTH, None)
        match = self._stops.push(self._decoder.push(token))
        if match.matched is not None:
            return Piece(match.emit, FinishReason.STOP, match.matched)
        return Piece(match.emit)

    def _close(self, token: int | None, reason: FinishReason, stop_reason: int | None) -> Piece:
        """The last token (None: it has no text), then all that is held back."""
        text = "" if token is None else self._decoder.push(token)
        match = self._stops.push(text + self._decoder.finish())
        if match.matched is not None:
            return Piece(match.emit, FinishReason.STOP, match.matched)
        return Piece(match.emit + self._stops.finish(), reason, stop_reason)


@dataclass(slots=True)
class RequestState:
    """A live request: its sequence in the scheduler and its answer."""

    seq: Sequence
    answer: Answer
    times: StepTimes
    said_stop: bool = False
    """Was the first delta, which says where the hit stopped, sent?"""

    def delta(self, token_ids: list[int], piece: Piece, now_s: float, *, error: str | None = None) -> Delta:
        """The event for ``token_ids``; everything that only the first or the last one carries is added here."""
        lookup, prefix_stop, prefix = self.seq.lookup, None, None
        if lookup is not None and not self.said_stop:
            prefix_stop, prefix = lookup.stop.reason.value, self._account()
            self.said_stop = True
        return Delta(
            request_id=self.seq.request_id,
            token_ids=token_ids,
            text=piece.text,
            usage=usage_of(self.seq),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            error=error,
            error_kind=None if error is None else "internal",
            timing=None if piece.finish_reason is None else timing_of(self.seq, now_s),
            prefix_stop=prefix_stop,
            prefix=prefix,
        )

    def _account(self) -> PrefixAccount | None:
        account = self.seq.account
        return None if account is None else PrefixAccount(account, self.times.seconds(account.n_compute))


def usage_of(seq: Sequence) -> Usage | None:
    """prompt = computed + cached, whole blocks and copied slots, by the first admission; None before it."""
    if seq.lookup is None:
        return None
    n_cached = seq.lookup.n_start
    return Usage(seq.n_prompt, n_cached, seq.n_prompt - n_cached, seq.n_generated)


def timing_of(seq: Sequence, now_s: float) -> Timing:
    """Where the time of a finished request went. A phase that was not reached took 0 s; the one in which the request
    ended lasts until now."""
    admitted = now_s if seq.admitted_s is None else seq.admitted_s
    first = now_s if seq.first_token_s is None else seq.first_token_s
    last = first if seq.last_token_s is None else seq.last_token_s
    return Timing(
        queue_s=admitted - seq.arrival_s, prefill_s=first - admitted, decode_s=last - first, e2e_s=now_s - seq.arrival_s
    )
