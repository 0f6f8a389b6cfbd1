from __future__ import annotations

import json
import time

import pytest

from headwater.explaining.volatile import Masker, Volatile

PIECES = (
    ("Today is Monday, June 3, 2024 at 10:05 AM UTC.", [("time", "Monday, June 3, 2024 at 10:05 AM UTC")]),
    ("now 2024-05-01T10:00:03.5Z ok", [("time", "2024-05-01T10:00:03.5Z")]),
    ("on 3rd of May 2024, or 03/05/2024", [("time", "3rd of May 2024"), ("time", "03/05/2024")]),
    ("at 1717401234567 or 9 pm", [("time", "1717401234567"), ("time", "9 pm")]),
    ("Tue, 04 Jun 2024 00:00:00 GMT", [("time", "Tue, 04 Jun 2024 00:00:00 GMT")]),
    ("id 550e8400-e29b-41d4-a716-446655440000.", [("id", "550e8400-e29b-41d4-a716-446655440000")]),
    ("sha deadbeefdead, sess_8fJk29sKQ1", [("id", "deadbeefdead"), ("id", "sess_8fJk29sKQ1")]),
    ("session id: qwertyui, trace_id=abc", [("id", "qwertyui"), ("id", "abc")]),
    ("<now>20240501T100003Z</now>, 20240501", [("time", "20240501T100003Z"), ("time", "20240501")]),
    ("\u4eca\u5929\u662f2024\u5e743\u67081\u65e5 09:18", [("time", "2024\u5e743\u67081\u65e5 09:18")]),
    ("Session: x7k2p, thread=ab1c", [("id", "x7k2p"), ("id", "ab1c")]),
    ("Request #17 of 1,000 (3.5 %)", [("number", "17"), ("number", "1,000"), ("number", "3.5")]),
    ("May I march in august company? The sun sat.", []),
    ("session: notes, run: slowly", []),
    ("a decade of cabbage, effaced", []),
)


@pytest.mark.parametrize(("text", "pieces"), PIECES)
def test_pieces_that_change_by_themselves(text: str, pieces: list[tuple[str, str]]) -> None:
    masked = Masker().mask(text, [text])
    assert [(atom.kind.value, masked.slice(atom)) for atom in masked.atoms] == pieces


def test_texts_that_differ_in_such_pieces_only_become_equal() -> None:
    masker = Masker()
    texts = ["Day 1, 10:00: go\nid 12ab34cd56", "Day 22, 9:30 PM: go\nid ffffffffff"]
    one, two = (masker.mask(text).text for text in texts)
    assert one == two
    assert masker.mask("Day 1, 10:00: stop").text != one[: len("Day 1, 10:00: stop")]


def test_json_is_the_same_however_it_is_written() -> None:
    value = {"b": [1, {"y": 2, "x": "t"}], "a": None}
    written = [json.dumps(value), json.dumps(value, indent=2), json.dumps(dict(reversed(value.items())))]
    masked = [Masker().mask(f"S: {text} end", [f"S: {text} end"]) for text in written]
    assert len({one.text for one in masked}) == 1
    assert [[atom.kind for atom in one.atoms] for one in masked] == [[Volatile.JSON]] * 3
    assert [one.slice(one.atoms[0]) for one in masked] == written


def test_a_masked_place_leads_back_to_the_source() -> None:
    text = 'at 2024-05-01 go {"a": 1, "b": 2222} on 5 x'
    masked = Masker().mask(text, [text])
    assert masked.source[masked.source_index(masked.text.index("go"))] == "g"
    assert masked.source[masked.source_index(masked.text.index(" on"))] == " "
    assert masked.source_index(len(masked.text)) == len(text)
    for atom in masked.atoms:
        assert masked.source_index(atom.at) == atom.first


LONG = (
    *("a-" * 50_000, "1" * 100_000, "a1_" * 30_000, "12:" * 30_000, "[" * 100_000, '{"a":' * 50_000, "id: " * 30_000),
    *("f" * 100_000 + "g", "2024-" * 30_000, "Mon " * 30_000, '["' + "a" * 100_000),
)


@pytest.mark.parametrize("text", LONG, ids=lambda text: text[:6])
def test_no_text_takes_long(text: str) -> None:
    start = time.perf_counter()
    Masker().mask(text, [text])
    assert time.perf_counter() - start < 5
