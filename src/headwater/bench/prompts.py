"""Prompts of exactly so many tokens that nobody has sent before: of token ids, or of words that are a token each."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from headwater.bench.client import Ask
from headwater.bench.dialect import AskOne, Dialect
from headwater.errors import BenchError

Piece = int | str
"""What counts as one token in a prompt: an id, or a word."""

WORDS = (
    "river water stone house garden window table paper letter morning evening summer winter mountain valley forest "
    "field road bridge city village market school church station island ocean storm cloud rain snow wind light shadow "
    "color music story picture number problem question answer reason result change order power force energy metal wood "
    "glass gold silver iron horse bird fish dog cat tree flower leaf grass bread milk sugar salt coffee tea wine fruit "
    "apple orange green blue black white red yellow small large long short high low early late young old new good "
    "strong warm cold dark clear open close begin end start stop move turn walk run stand sit read write speak listen "
    "learn teach build break carry bring take give find lose keep hold send show think know believe remember forget "
    "mother father brother sister friend child woman man people family group world country history science nature "
    "system method process energy theory language culture society government law court police army war peace love hope "
    "fear anger joy sleep dream life death health body hand head heart eye face voice word name line point side part "
    "place time year month week day hour minute century age moment future past present today tomorrow yesterday"
)
"""Common English words, of which many are one token each for most models."""
N_FIRST = 24
"""Words that are tried as the first one of a prompt."""
GROUP = 8
"""Other words are tried by so many at once."""
MIN_WORDS = 32

OTHER_FIRST_TRIES = 1000


@dataclass(frozen=True)
class Vocabulary:
    """The pieces that prompts are made of, each one token; ``extra`` tokens come on top in every prompt."""

    firsts: Sequence[Piece]
    others: Sequence[Piece]
    extra: int
    exact: bool = True
    """False: the server tells no counts, and a word is taken for a token unseen."""


class Drawer:
    """Draws fresh pieces. ``seed`` must differ from that of every other run against the same server."""

    def __init__(self, vocabulary: Vocabulary, seed: str) -> None:
        self._vocabulary = vocabulary
        self._random = random.Random(seed)

    def prefix(self, n_tokens: int) -> tuple[Piece, ...]:
        """A prompt's first ``n_tokens`` tokens, what the server adds included."""
        n = max(1, n_tokens - self._vocabulary.extra)
        return (self._random.choice(self._vocabulary.firsts), *self.question(n - 1))

    def question(self, n_tokens: int) -> tuple[Piece, ...]:
        """What comes after a prefix."""
        return tuple(self._random.choice(self._vocabulary.others) for _ in range(n_tokens))

    def with_other_first(self, prefix: tuple[Piece, ...]) -> tuple[Piece, ...]:
        """The same but for the first token."""
        others = [piece for piece in self._vocabulary.firsts[:OTHER_FIRST_TRIES] if piece != prefix[0]]
        if not others:
            raise BenchError("no second word was found to begin a prompt with")
        return (self._random.choice(others), *prefix[1:])


def as_prompt(pieces: Sequence[Piece]) -> list[int] | str:
    """As the API takes it: ids, or one text."""
    ids = [piece for piece in pieces if isinstance(piece, int)]
    return ids if len(ids) == len(pieces) else " ".join(str(piece) for piece in pieces)


def learn_vocabulary(ask: AskOne, dialect: Dialect) -> Vocabulary:
    """Token ids where the server takes them; else words, tried through the usage that it tells.

    Raises BenchError when too few words are one token each.
    """
    if dialect.token_ids:
        ids = range(dialect.ids_from, dialect.ids_to)
        return Vocabulary(ids, ids, dialect.extra_tokens)
    words = list(dict.fromkeys(WORDS.split()))
    if not dialect.usage:
        return Vocabulary(words[:N_FIRST], words, 0, exact=False)

    def length(tried: Sequence[str]) -> int:
        answer = ask(Ask(body=dialect.body(" ".join(tried), 1)))
        if answer.error is not None or answer.usage is None or answer.usage.prompt_tokens is None:
            raise BenchError(f"the length of a prompt cannot be learnt from the server: {answer.error or 'no usage'}")
        return answer.usage.prompt_tokens

    lengths = {word: length([word]) for word in words[:N_FIRST]}
    least = min(lengths.values())
    firsts = [word for word, n in lengths.items() if n == least]
    groups = [words[i : i + GROUP] for i in range(0, len(words), GROUP)]
    others = [word for group in groups if length([firsts[0], *group]) == least + len(group) for word in group]
    if len(others) < MIN_WORDS:
        raise BenchError(
            f"only {len(others)} of {len(words)} English words are one token each for this model, and the server takes "
            "no token ids: prompts of an exact length cannot be made"
        )
    return Vocabulary(firsts, others, least - 1)
