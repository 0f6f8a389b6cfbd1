"""What breaks the common beginning of the requests in a log.

For each request two things are asked of all earlier ones: how many tokens does it really share with the best of them,
and how many would it share if the pieces that change by themselves (times, ids, numbers, the order of tools and keys)
were the same? Where the second is more, the pieces that differ on the way are the finding. Turns of one conversation
are compared with the turn before as well: there the whole history should be shared. An end that differs is no finding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headwater.errors import BadRequest, NoChatTemplate
from headwater.explaining.conversations import Conversations
from headwater.explaining.findings import Finding, Kind, Report
from headwater.explaining.log import BadLine, Line
from headwater.explaining.loss import Loss
from headwater.explaining.neighbours import TOKEN_BYTES, Neighbours, token_key
from headwater.explaining.pieces import piece_losses, tool_losses
from headwater.explaining.seen import Seen
from headwater.explaining.turns import cut_losses, turn_losses
from headwater.explaining.volatile import Masker
from headwater.text.common import common_length
from headwater.text.tokenizer import Tokenizer

MIN_SHARE = 0.02
"""A piece that changed in fewer of the requests that have it is no habit: a prompt was edited, or the day changed."""

PROGRESS_EVERY = 20


def lint(
    lines: Sequence[Line],
    tokenizer: Tokenizer,
    *,
    bad: Sequence[BadLine] = (),
    progress: Callable[[str, float], None] = lambda what, fraction: None,
) -> Report:
    """Look through the requests in their order. Lines whose messages the template refuses are told as bad ones.

    Raises NoChatTemplate for chat requests with a tokenizer that has none.
    """
    looking = _Looking(tokenizer)
    refused: list[BadLine] = []
    for i, line in enumerate(lines):
        if i % PROGRESS_EVERY == 0:
            progress("looking through the requests", i / len(lines))
        try:
            looking.add(line)
        except NoChatTemplate:
            raise
        except BadRequest as error:
            refused.append(BadLine(line.file, line.line, str(error)))
    return looking.report([*bad, *refused])


class _Looking:
    """What is known after some of the requests."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_lengths = [len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)]
        self._masker = Masker()
        self._requests: list[Seen] = []
        self._by_tokens: Neighbours[bytes] = Neighbours()
        self._by_masked: Neighbours[str] = Neighbours()
        self._conversations = Conversations()
        self._findings: dict[tuple[Kind, str], Finding] = {}
        self._n_tokens = 0
        self._n_shared = 0

    def add(self, line: Line) -> None:
        seen = Seen(line, self._tokenizer, self._token_lengths, self._masker)
        me = len(self._requests)
        key = token_key(seen.plain.token_ids)
        nearest = self._by_tokens.nearest(key)
        n_shared = 0 if nearest is None else nearest[1] // TOKEN_BYTES
        masked = self._by_masked.nearest(seen.masked.text)
        cut = self._conversations.cut_from(seen.messages)
        parent = self._conversations.add(me, seen.messages, seen.tools) if seen.messages else None
        losses: list[Loss] = []
        if masked is not None:
            other = self._requests[masked[0]]
            losses += piece_losses(seen, other, masked[1], n_shared, n_shared)
            losses += tool_losses(seen, other, masked[1], n_shared)
        if parent is not None:
            before = self._requests[parent]
            n_same = common_length(seen.masked.text, before.masked.text)
            losses += piece_losses(seen, before, n_same, n_shared, 0)
            losses += turn_losses(seen, before, n_shared, self._masker)
        elif cut is not None:
            losses += cut_losses(seen, self._requests[cut[0]], cut[1], n_shared, self._masker)
        for loss in losses:
            self._note(me, loss)
        self._requests.append(seen)
        self._by_tokens.add(key, me)
        self._by_masked.add(seen.masked.text, me)
        self._n_tokens += len(seen.plain.token_ids)
        self._n_shared += n_shared

    def _note(self, me: int, loss: Loss) -> None:
        key = (loss.kind, loss.group)
        finding = self._findings.get(key)
        if finding is None:
            finding = Finding(loss.kind, loss.detail, loss.example, loss.n_tokens, context=loss.context)
            self._findings[key] = finding
        if loss.n_tokens > finding.largest_loss:
            finding.example, finding.detail, finding.largest_loss = loss.example, loss.detail, loss.n_tokens
        finding.losses[me] = max(loss.n_tokens, finding.losses.get(me, 0))

    def report(self, bad: list[BadLine]) -> Report:
        kept = [finding for finding in self._findings.values() if self._is_habit(finding)]
        kept.sort(key=lambda finding: -finding.n_lost_tokens)
        return Report(len(self._requests), self._n_tokens, self._n_shared, kept, bad)

    def _is_habit(self, finding: Finding) -> bool:
        if finding.context is None:
            return True
        n_there = sum(finding.context in seen.masked.text for seen in self._requests)
        return finding.n_requests >= MIN_SHARE * n_there
