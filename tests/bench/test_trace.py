"""A trace's ids become tokens: equal ids equal tokens, lengths kept, nothing but ordinary tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.bench.trace import TRACE_BLOCK, TraceLine, TraceScale, TraceTokens, read_trace
from headwater.errors import ConfigError

SCALES = st.sampled_from([1.0, 0.5, 0.1, 0.05, 0.013, 1 / 512, 0.0001, 2.0])
VOCABULARY = 29_000


@st.composite
def lines(draw: st.DrawFn) -> TraceLine:
    length = draw(st.integers(1, 6 * TRACE_BLOCK))
    n_ids = -(-length // TRACE_BLOCK)
    ids = draw(st.lists(st.integers(0, 40), min_size=n_ids, max_size=n_ids))
    return TraceLine(draw(st.integers(0, 10**6)), length, draw(st.integers(0, 2000)), tuple(ids))


@settings(max_examples=60, deadline=None)
@given(line=lines(), other=lines(), factor=SCALES, seed=st.integers(0, 2**31 - 1))
def test_equal_ids_give_equal_tokens(line: TraceLine, other: TraceLine, factor: float, seed: int) -> None:
    scale = TraceScale(factor)
    tokens = TraceTokens(VOCABULARY, seed, scale)
    first, second = tokens.of_request(line, 0), tokens.of_request(other, 1)
    shared = 0
    for a, b in zip(line.hash_ids, other.hash_ids, strict=False):
        if a != b:
            break
        shared += 1
    n = min(shared * scale.block, len(first), len(second))
    assert first[:n] == second[:n]
    for i, one in enumerate(line.hash_ids):
        block = first[i * scale.block : (i + 1) * scale.block]
        assert block == tokens.of_id(one)[: len(block)]


@settings(max_examples=60, deadline=None)
@given(line=lines(), factor=SCALES)
def test_lengths_are_respected(line: TraceLine, factor: float) -> None:
    scale = TraceScale(factor)
    tokens = TraceTokens(VOCABULARY, 0, scale).of_request(line, 0)
    assert scale.block == max(1, round(512 * factor))
    assert len(tokens) == scale.input(line.input_length)
    assert (len(line.hash_ids) - 1) * scale.block <= len(tokens) <= len(line.hash_ids) * scale.block
    if factor == 1:
        assert len(tokens) == line.input_length
    assert all(0 <= token < VOCABULARY for token in tokens)
    assert scale.output(line.output_length) >= 1


@settings(max_examples=30, deadline=None)
@given(a=st.integers(0, 2**63 - 1), b=st.integers(0, 2**63 - 1), seed=st.integers(0, 2**31 - 1))
def test_other_ids_and_other_seeds_give_other_tokens(a: int, b: int, seed: int) -> None:
    tokens = TraceTokens(VOCABULARY, seed, TraceScale())
    assert (tokens.of_id(a) == tokens.of_id(b)) == (a == b)
    assert TraceTokens(VOCABULARY, seed + 1, TraceScale()).of_id(a) != tokens.of_id(a)


def test_what_ids_do_not_reach_is_the_requests_own() -> None:
    tokens = TraceTokens(VOCABULARY, 0, TraceScale())
    short = TraceLine(0, 1000, 1, (7,))
    first, second = tokens.of_request(short, 0), tokens.of_request(short, 1)
    assert len(first) == len(second) == 1000
    assert first[:512] == second[:512] and first[512:] != second[512:]
    assert len(tokens.of_request(TraceLine(0, 100, 1, (7, 8, 9)), 0)) == 100


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


GOOD = {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}


def test_lines_come_in_order_of_time_and_blank_ones_are_passed_over(tmp_path: Path) -> None:
    path = written(tmp_path / "t", {**GOOD, "timestamp": 5000}, "", {**GOOD, "timestamp": 1000, "extra": 1})
    assert [one.timestamp for one in read_trace(path)] == [1000, 5000]
    assert len(read_trace(path, 1)) == 1


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        "[]",
        "\x00",
        {**GOOD, "hash_ids": "x"},
        {**GOOD, "hash_ids": [-1]},
        {**GOOD, "input_length": 0},
        {**GOOD, "output_length": -1},
        {**GOOD, "timestamp": None},
        {name: GOOD[name] for name in ("timestamp", "input_length", "output_length")},
    ],
)
def test_a_line_that_is_none_is_named(tmp_path: Path, bad: Any) -> None:
    with pytest.raises(ConfigError, match="line 2 is no line of a Mooncake trace"):
        read_trace(written(tmp_path / "t", GOOD, bad))


def test_no_trace_at_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is empty"):
        read_trace(written(tmp_path / "t"))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "nothing")
