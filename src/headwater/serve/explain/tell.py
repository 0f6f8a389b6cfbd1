"""Accounts as JSON, with the tokens around a difference as text."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

from headwater.cache.account import Account, Difference, Run, State
from headwater.engine.messages import PrefixAccount
from headwater.serve.access import Caller
from headwater.serve.explain.ring import Finished, Where

Json = dict[str, Any]

PREFIX_HEADER = "x-headwater-prefix"

IN_MEMORY = (State.HIT, State.COPIED, State.HELD)
BY_BLOCK = (State.HIT, State.HELD, State.EVICTED, State.COMPUTING)


def prefix_header(accounts: Sequence[Account]) -> str:
    """The value of the header ``x-headwater-prefix``: tokens reused by whole blocks, copied if any were, of how many,
    and why not more. For several prompts the sums, and each reason once."""
    stops = dict.fromkeys(account.stop.reason.value for account in accounts)
    n_copied = sum(account.n_copy for account in accounts)
    fields = [f"hit={sum(account.n_hit for account in accounts)}"]
    fields += [f"copied={n_copied}"] if n_copied else []
    fields += [f"of={sum(account.n_tokens for account in accounts)}", f"stop={','.join(stops)}"]
    return " ".join(fields)


class Teller:
    """Tells accounts. ``token_bytes`` gives a token's text in UTF-8, which may be part of a character; ``unit`` is the
    number of tokens in a block."""

    def __init__(self, token_bytes: Callable[[int], bytes], unit: int) -> None:
        self._token_bytes = token_bytes
        self._unit = unit

    def finished(self, one: Finished) -> Json:
        """An answered prompt, to the operator."""
        operator = Caller("", operator=True)
        return {
            "id": one.request_id,
            "arrived": one.arrived_s,
            "n_prompt": one.n_prompt,
            "n_cached": one.n_cached,
            "n_generated": one.n_generated,
            "ttft_s": one.ttft_s,
            "account": self.account(one.account, operator, one.where),
        }

    def account(self, prefix: PrefixAccount, caller: Caller, where: Where | None) -> Json:
        """An account, to ``caller``: without what others sent, unless it is the operator. ``where``: the place of the
        difference in a chat request."""
        account = prefix.account.seen_by(caller.viewer)
        stop, seconds = account.stop, prefix.estimate_s
        told: Json = {
            "n_tokens": account.n_tokens,
            "hit_tokens": account.n_hit,
            "copied_tokens": account.n_copy,
            "compute_tokens": account.n_compute,
            "runs": [self._run(run) for run in account.runs],
            "stop": {
                "reason": stop.reason.value,
                "at_token": stop.at_token,
                "sentence": account.sentence(),
                "evicted_ago_s": None if account.evicted_ago_s is None else round(account.evicted_ago_s, 1),
                "request": stop.request,
                "option": stop.option,
                "group": stop.group,
            },
            "difference": None if account.difference is None else self._difference(account.difference, where),
            "smallest_reusable_prefix": account.min_reusable_tokens,
            "estimate": {
                "compute_tokens": account.n_compute,
                # Two digits: it is no better than that, and more would tell of steps of others.
                "seconds": None if seconds is None else float(f"{seconds:.2g}"),
            },
        }
        if account.elsewhere:
            told["elsewhere"] = [
                {"namespace": other.namespace.hex(), "hit_tokens": other.n_hit} for other in account.elsewhere
            ]
        return told

    def _run(self, run: Run) -> Json:
        told: Json = {"first": run.first_token, "tokens": run.n_tokens, "state": run.state.value}
        if run.state in BY_BLOCK:
            last = run.first_token + run.n_tokens - 1
            told["blocks"] = last // self._unit - run.first_token // self._unit + 1
        if run.state in IN_MEMORY:
            told["tier"] = "memory"
        return told

    def _difference(self, difference: Difference, where: Where | None) -> Json:
        n_before = difference.at_token - difference.first
        before = difference.ours[:n_before]
        text, inside = self._text_before(before, cut=difference.first > 0)
        theirs = None if difference.theirs is None else self._side(difference.theirs[n_before:], inside)
        return {
            "at_token": difference.at_token,
            "before": {"token_ids": list(before), "text": text},
            "ours": self._side(difference.ours[n_before:], inside),
            "theirs": theirs,
            "message": None
            if where is None
            else {"index": where.message, "role": where.role, "character": where.character, "part": where.part},
        }

    def _text_before(self, token_ids: Sequence[int], *, cut: bool) -> tuple[str, bytes]:
        """The text of the tokens before a difference, up to the character in which that lies; and what of this
        character they hold. With ``cut`` the tokens may begin inside a character, which is left out.

        ``...  e2 82 | ac`` and ``...  e2 82 | ad``: tokens differ inside a character, and the text in all of it.
        """
        raw = self._bytes(token_ids)
        begin = 0
        while cut and begin < min(3, len(raw)) and 0x80 <= raw[begin] < 0xC0:
            begin += 1
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(raw[begin:])
        return text, decoder.getstate()[0]

    def _side(self, token_ids: Sequence[int], inside: bytes) -> Json:
        """The tokens from a difference on; their text begins with the character in which it lies, and ends before one
        of which only a part is there."""
        raw = inside + self._bytes(token_ids)
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(raw)
        return {"token_ids": list(token_ids), "text": text or raw.decode("utf-8", "replace")}

    def _bytes(self, token_ids: Sequence[int]) -> bytes:
        return b"".join([self._token_bytes(token) for token in token_ids])
