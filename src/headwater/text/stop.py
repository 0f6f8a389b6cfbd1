"""Stop strings, found in text that arrives piece by piece.

Source: Aho and Corasick, "Efficient string matching" (1975). After each character the automaton's state
is the longest suffix of the text that begins some stop string: exactly what must be held back, because
the stop may still complete. Every character is looked at once, whatever the number of stops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headwater.errors import BadRequest


class StopResult(NamedTuple):
    """``emit`` is text that can be given out now; ``matched`` is the stop string that ended it, if one did."""

    emit: str
    matched: str | None = None


class StopChecker:
    """Finds the first of several stop strings.

    The match is the stop that *completes* first; of several that complete at the same character, the
    longest (it began first). This depends on the text alone, not on how it was cut into tokens.

        text so far   ...................|abc       stops "abcd", "bcx"
                       given out         |held back: it begins "abcd"

    The given-out text ends before the stop, or behind it with ``include_in_output``. What follows a match
    is dropped. Raises BadRequest for an empty stop string, which would match before any text.
    """

    __slots__ = ("_depth", "_fail", "_found", "_held", "_include", "_matched", "_next", "_state")

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) for stop in stops):
            raise BadRequest("stop must be a list of strings", field="stop")
        if "" in stops:
            raise BadRequest("a stop string may not be empty", field="stop")
        self._include = include_in_output
        self._held = ""
        self._state = 0
        self._matched: str | None = None
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self._fail = [0] * len(self._next)
        self._link()

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            following = self._next[state].get(char)
            if following is None:
                following = len(self._next)
                self._next[state][char] = following
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._found.append(None)
            state = following
        self._found[state] = stop

    def _link(self) -> None:
        """For each state, breadth first: the state of its longest proper suffix, and the longest stop ending there."""
        queue = list(self._next[0].values())
        for state in queue:
            for char, following in self._next[state].items():
                self._fail[following] = self._step(self._fail[state], char)
                self._found[following] = self._found[following] or self._found[self._fail[following]]
                queue.append(following)

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)

    @property
    def matched(self) -> str | None:
        """The stop string that was found, if one was."""
        return self._matched

    def push(self, text: str) -> StopResult:
        """Take the next piece of text; returns what can be given out."""
        if self._matched is not None:
            return StopResult("", self._matched)
        if not self._next[0]:
            return StopResult(text)
        state, step, found = self._state, self._step, self._found
        for i, char in enumerate(text, start=1):
            state = step(state, char)
            stop = found[state]
            if stop is not None:
                seen = self._held + text[:i]
                self._matched, self._held = stop, ""
                return StopResult(seen if self._include else seen[: len(seen) - len(stop)], stop)
        self._state = state
        seen = self._held + text
        given = len(seen) - self._depth[state]
        self._held = seen[given:]
        return StopResult(seen[:given])

    def finish(self) -> str:
        """No text follows: what was held back, which was no stop after all."""
        held, self._held, self._state = self._held, "", 0
        return held
