"""Losses between two turns of one conversation: all of the earlier turn should begin the later one."""

from __future__ import annotations

from headwater.explaining.cause import REASONING_REMOVED, SPACES_TRIMMED, rewriting
from headwater.explaining.conversations import is_end_and_beginning, split_system, system_text
from headwater.explaining.findings import Kind
from headwater.explaining.loss import Loss, example
from headwater.explaining.pieces import MIN_TOKENS
from headwater.explaining.same import canonical, common_tokens, exact, first_difference
from headwater.explaining.seen import Seen
from headwater.explaining.volatile import Masker
from headwater.text.common import common_length
from headwater.text.locate import MESSAGE, TEMPLATE, Place
from headwater.text.messages import plain_messages

ROOT_CHARS = 40


def turn_losses(seen: Seen, before: Seen, n_shared: int, masker: Masker) -> list[Loss]:
    """What ``seen`` lost of the turn ``before`` it. ``n_shared`` as in `piece_losses`."""
    system, history = split_system(before.messages)
    our_system, messages = split_system(seen.messages)
    ours = messages[: len(history)]
    root = _root(seen, before, masker)
    if canonical(seen.tools) != canonical(before.tools):
        if sorted(map(canonical, seen.tools)) != sorted(map(canonical, before.tools)):
            return _changed(seen, before, n_shared, Kind.TOOLS_CHANGE, len(our_system) + len(history), root)
        return []  # the order of the tools: told as such
    if exact(seen.tools) != exact(before.tools):
        return []
    if exact(our_system) != exact(system):
        texts = system_text(seen.messages), system_text(before.messages)
        if masker.mask(texts[0], [texts[0]]).text == masker.mask(texts[1], [texts[1]]).text:
            return []  # a piece that changes by itself: told as such
        return _changed(seen, before, n_shared, Kind.SYSTEM_CHANGES, len(our_system) + len(history), root)
    if exact(ours) != exact(history):
        return _client_rewrites(seen, before, n_shared, root)
    if exact(_arguments(seen)) != exact(_arguments(before)):
        return []  # another rendering was asked for
    return _template_rewrites(seen, before, n_shared)


def cut_losses(seen: Seen, before: Seen, n_cut: int, n_shared: int, masker: Masker) -> list[Loss]:
    """What ``seen`` lost because the first ``n_cut`` messages of ``before`` are gone, though it goes on from there.

    before   system | 1 | 2 | 3 | 4 | 5
    seen     system | 3 | 4 | 5 | 6 | 7        3 to 5 are lost
    """
    _, history = split_system(before.messages)
    our_system, messages = split_system(seen.messages)
    kept = history[n_cut:]
    if not is_end_and_beginning(kept, messages) or exact(seen.tools) != exact(before.tools):
        return []
    if len({masker.mask_line(system_text(one.messages)) for one in (seen, before)}) > 1:
        return []
    n_messages = len(our_system) + min(len(kept), len(messages))
    return _changed(seen, before, n_shared, Kind.HISTORY_CUT, n_messages, _root(seen, before, masker))


def _arguments(seen: Seen) -> object:
    return seen.line.body.get("chat_template_kwargs") or {}


def _changed(seen: Seen, before: Seen, n_shared: int, kind: Kind, n_messages: int, root: str) -> list[Loss]:
    """The system prompt or the tools are others; without that the first ``n_messages`` would be shared."""
    first = common_length(seen.plain.text, before.plain.text)
    end = max((piece.end for piece in seen.prompt.pieces if piece.message < n_messages), default=first)
    n_lost = seen.plain.tokens_before(end) - max(n_shared, seen.plain.tokens_before(first))
    if n_lost < MIN_TOKENS:
        return []
    return [_loss(seen, before, kind, n_lost, first, "", root)]


def _client_rewrites(seen: Seen, before: Seen, n_shared: int, root: str) -> list[Loss]:
    first = common_length(seen.plain.text, before.plain.text)
    n_lost = before.plain.tokens_before(len(before.plain.text)) - max(n_shared, before.plain.tokens_before(first))
    if n_lost < 1:
        return []
    ours = list(seen.messages[: len(before.messages)])
    path = first_difference(ours, list(before.messages), "messages") or "messages"
    return [_loss(seen, before, Kind.CLIENT_HISTORY, n_lost, first, f"{path} is not what it was", root)]


def _template_rewrites(seen: Seen, before: Seen, n_shared: int) -> list[Loss]:
    """The messages are the same; is their text?"""
    n_before = len(before.messages)
    answered = seen.messages[n_before].get("role") == "assistant" and before.asks_for_answer
    expected = before.plain.text if answered else before.without_answer()
    if expected is None:
        return []
    first = common_length(seen.plain.text, expected)
    if first < len(expected):
        n_lost = before.plain.tokens_before(len(expected)) - max(n_shared, before.plain.tokens_before(first))
        if n_lost < 1:
            return []
        detail = _how(seen, before, first)
        return [_loss(seen, before, Kind.TEMPLATE_HISTORY, n_lost, first, detail, _how_group(detail))]
    losses = _joined(seen, before, n_shared) if answered else []
    return losses + (_answer_rewritten(seen, before, n_shared) if answered else [])


def _how(seen: Seen, before: Seen, first: int) -> str:
    for piece in before.prompt.pieces:
        if piece.first <= first <= piece.end:
            return rewriting(before.prompt, seen.prompt, piece.message)
    return "it begins an answer that is to come with other text than an answer in the history"


def _how_group(detail: str) -> str:
    """Two ways of rewriting are two findings, whichever message they are about."""
    return next((way for way in (REASONING_REMOVED, SPACES_TRIMMED) if way in detail), "")


def _joined(seen: Seen, before: Seen, n_shared: int) -> list[Loss]:
    """All of the earlier text begins the later one, but not all of its tokens do."""
    same = common_tokens(seen.plain.token_ids, before.plain.token_ids)
    n_lost = len(before.plain.token_ids) - max(same, n_shared)
    if n_lost < 1:
        return []
    spans = before.prompt.spans(before.tokenizer)
    detail = f"the last {len(before.plain.token_ids) - same} tokens of a turn merge with the beginning of the next"
    return [_loss(seen, before, Kind.JOINED, n_lost, spans[same][0], detail, "")]


def _answer_rewritten(seen: Seen, before: Seen, n_shared: int) -> list[Loss]:
    """The answer that the model wrote after ``before`` is in the cache as it was written; is it still that text?"""
    index = len(before.messages)
    message = seen.messages[index]
    content = str(plain_messages([message])[0]["content"])
    start = len(before.plain.text)
    end = max((piece.end for piece in seen.prompt.pieces if piece.message == index), default=start)
    shown = seen.plain.text[start:end]
    thought = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(thought, str) and thought.strip() and thought.strip() not in shown:
        detail, same = REASONING_REMOVED, 0
    elif not content or shown.startswith(content.rstrip()) or message.get("tool_calls"):
        return []
    elif "</think>" in content and "</think>" not in shown:
        detail, same = REASONING_REMOVED, common_length(shown, content)
    elif content[0].isspace() and shown.startswith(content.strip()):
        detail, same = SPACES_TRIMMED, 0
    else:
        return []
    lost_from = max(n_shared, seen.plain.tokens_before(start + same))
    n_lost = seen.plain.tokens_before(end) - lost_from
    if n_lost < 1:
        return []
    said = f"it rewrites message {index}, the answer, once it is history: {detail}"
    place = Place(index, "assistant", same, MESSAGE)
    ours = (seen.plain.text, start + same, end)
    given = example(seen, before, place, ours, (content, same, len(content)))
    return [Loss(Kind.TEMPLATE_HISTORY, _how_group(said), said, n_lost, given)]


def _root(seen: Seen, before: Seen, masker: Masker) -> str:
    """The same for turns of one kind of conversation: how their system prompts begin, or how they end where they
    begin with what changes."""
    ours, theirs = (masker.mask_line(system_text(one.messages)) for one in (seen, before))
    if common_length(ours, theirs) >= min(ROOT_CHARS, len(theirs)):
        return theirs[:ROOT_CHARS]
    return theirs[-ROOT_CHARS:] if ours[-ROOT_CHARS:] == theirs[-ROOT_CHARS:] else ""


def _loss(seen: Seen, before: Seen, kind: Kind, n_lost: int, first: int, detail: str, group: str) -> Loss:
    ended = next((piece for piece in seen.prompt.pieces if piece.end == first), None)
    place = seen.prompt.place(first)
    if place.part == TEMPLATE and ended is not None:  # a content that was longer in the other turn
        place = Place(ended.message, ended.role, ended.offset + ended.end - ended.first, MESSAGE)
    ours, theirs = (seen.plain.text, first, first), (before.plain.text, first, first)
    return Loss(kind, group, detail, n_lost, example(seen, before, place, ours, theirs))
