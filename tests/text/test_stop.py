"""Stop strings against a naive search of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import BadRequest
from headwater.text.stop import StopChecker, StopResult


def feed(checker: StopChecker, pieces: list[str]) -> tuple[list[str], str | None]:
    """What each push gave, then what finish gave."""
    emits = [checker.push(piece).emit for piece in pieces]
    return [*emits, checker.finish()], checker.matched


def naive(stops: list[str], text: str, include: bool) -> tuple[str, str | None]:
    """Look at ever longer beginnings of the text until one ends in a stop; the longest such stop ends it."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def naive_held(stops: list[str], text: str) -> str:
    """The longest suffix of the text that is a proper prefix of a stop."""
    suffixes = (text[start:] for start in range(len(text) + 1))
    return next(s for s in suffixes if any(len(s) < len(stop) and stop.startswith(s) for stop in [*stops, "x"]))


few_letters = st.text(alphabet="ab", max_size=40)
stops_and_pieces = st.tuples(
    st.lists(st.text(alphabet="ab", min_size=1, max_size=6), max_size=4),
    st.lists(st.text("ab", max_size=5), max_size=15),
)


@given(stops_and_pieces, st.booleans())
def test_output_is_the_text_up_to_the_first_match(case: tuple[list[str], list[str]], include: bool) -> None:
    stops, pieces = case
    emits, matched = feed(StopChecker(stops, include_in_output=include), pieces)
    assert ("".join(emits), matched) == naive(stops, "".join(pieces), include)


@given(stops_and_pieces)
def test_held_back_is_exactly_what_may_become_a_stop(case: tuple[list[str], list[str]]) -> None:
    stops, pieces = case
    checker = StopChecker(stops)
    seen, given_out = "", ""
    for piece in pieces:
        result = checker.push(piece)
        seen, given_out = seen + piece, given_out + result.emit
        if result.matched is not None:
            break
        assert given_out + naive_held(stops, seen) == seen


@given(st.lists(st.text(min_size=1, max_size=4), max_size=3), st.text(max_size=30), st.data())
def test_result_does_not_depend_on_how_the_text_is_cut(stops: list[str], text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole, cut = feed(StopChecker(stops), [text]), feed(StopChecker(stops), pieces)
    assert ("".join(whole[0]), whole[1]) == ("".join(cut[0]), cut[1])


def test_a_stop_over_two_tokens_is_never_given_out() -> None:
    checker = StopChecker(["</end>"])
    assert checker.push("so </") == StopResult("so ")
    assert checker.push("en") == StopResult("")
    assert checker.push("d> and more") == StopResult("", "</end>")


def test_what_turns_out_to_be_no_stop_is_given_out_at_once() -> None:
    checker = StopChecker(["</end>"])
    assert checker.push("a</e") == StopResult("a")
    assert checker.push("x") == StopResult("</ex")


def test_fallback_to_a_shorter_beginning_of_the_same_stop() -> None:
    checker = StopChecker(["aab"])
    assert checker.push("aaa") == StopResult("a")
    assert checker.push("b") == StopResult("", "aab")


def test_the_stop_that_completes_first_wins_over_one_that_begins_first() -> None:
    assert StopChecker(["abcd", "bc"]).push("abcd") == StopResult("a", "bc")


def test_of_stops_that_complete_together_the_longest_wins() -> None:
    assert StopChecker(["b", "ab"]).push("xab") == StopResult("x", "ab")
    assert StopChecker(["ab", "b"]).push("xab") == StopResult("x", "ab")


def test_include_in_output_ends_behind_the_stop() -> None:
    checker = StopChecker(["ab"], include_in_output=True)
    assert checker.push("xa") == StopResult("x")
    assert checker.push("bc") == StopResult("ab", "ab")


def test_text_after_a_match_is_dropped() -> None:
    checker = StopChecker(["."])
    checker.push("a.b")
    assert checker.push("c") == StopResult("", ".")
    assert checker.finish() == ""


def test_finish_gives_out_what_was_held() -> None:
    checker = StopChecker(["END"])
    assert checker.push("the EN") == StopResult("the ")
    assert checker.finish() == "EN"
    assert checker.finish() == ""


def test_without_stops_everything_passes() -> None:
    checker = StopChecker([])
    assert checker.push("any") == StopResult("any")
    assert checker.finish() == ""


@pytest.mark.parametrize("stops", [[""], ["a", ""], "ab", [1]])
def test_bad_stops_are_refused(stops: list[str]) -> None:
    with pytest.raises(BadRequest) as caught:
        StopChecker(stops)
    assert caught.value.field == "stop"


def test_each_character_is_looked_at_a_bounded_number_of_times() -> None:
    # A stop that nearly matches everywhere is the worst case of a search that starts over.
    looks = 0

    class Counting(StopChecker):
        def _step(self, state: int, char: str) -> int:
            nonlocal looks
            while state and char not in self._next[state]:
                looks += 1
                state = self._fail[state]
            looks += 1
            return self._next[state].get(char, 0)

    checker = Counting(["a" * 500 + "b"])
    looks = 0
    text = ("a" * 499 + "c") * 20
    emitted = sum(len(checker.push(char).emit) for char in text)
    assert emitted + len(checker.finish()) == len(text)
    assert looks <= 2 * len(text)
