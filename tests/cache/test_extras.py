"""Media and prompt embeddings in the keys (known faults, section C)."""

from __future__ import annotations

import random

import pytest

from headwater.cache.extras import EmbeddingSpan, MediaSpan, media_digest
from headwater.cache.lookup import StopReason
from headwater.errors import BadRequest
from tests.cache.cache_model import BASE, hit, make_cache, serve, span

X, Y = b"X" * 32, b"Y" * 32


def test_b16_image_over_the_first_block() -> None:
    cache = make_cache(partial=False)
    tokens = [1, 2, 9, 9, 9, 9, 9, 9, 3, 4]
    serve(cache, tokens, extras=[MediaSpan(X, 2, 6)])
    stopped = cache.lookup(cache.chain(BASE, tokens, [MediaSpan(Y, 2, 6)]))
    assert stopped.n_hit == 0
    assert stopped.stop.reason is StopReason.OTHER_IDENTITY and stopped.stop.at_token == 0
    assert hit(cache, tokens) == 0
    assert hit(cache, tokens, extras=[MediaSpan(X, 2, 6)]) == 8


def test_b16_text_first() -> None:
    cache = make_cache()
    tokens = [*span(1, 8), 9, 9, 9, 9, 9, 9, 3]
    serve(cache, tokens, extras=[MediaSpan(X, 8, 6)])
    other = cache.lookup(cache.chain(BASE, tokens, [MediaSpan(Y, 8, 6)]))
    assert (other.n_hit, other.stop.reason, other.stop.at_token) == (8, StopReason.OTHER_IDENTITY, 8)
    assert hit(cache, tokens, extras=[MediaSpan(X, 8, 6)]) == 12


def test_b16_the_offset_in_the_span_counts() -> None:
    cache = make_cache()
    serve(cache, [9] * 9, extras=[MediaSpan(X, 0, 8)])
    assert hit(cache, [9] * 9, extras=[MediaSpan(X, 1, 8)]) == 0
    assert hit(cache, [9] * 9, extras=[MediaSpan(X, 0, 7)]) == 4  # the same rows in the first block only


def test_b17_full_digests_and_no_equal_keys() -> None:
    cache = make_cache(n_blocks=8)
    a, b = bytes(30) + b"\xab\xcd", b"\1" + bytes(29) + b"\xab\xcd"
    serve(cache, [9] * 9, extras=[MediaSpan(a, 0, 8)])
    assert hit(cache, [9] * 9, extras=[MediaSpan(b, 0, 8)]) == 0
    rng = random.Random(17)
    keys = set()
    for _ in range(2000):
        keys.update(cache.chain(BASE, [9] * 8, [MediaSpan(rng.randbytes(32), 0, 8)]).keys(2))
    assert len(keys) == 4000


def test_b18_the_header_is_part_of_the_digest() -> None:
    black = bytes(30 * 150 * 3)
    digests = [
        media_digest({"mode": "RGB", "width": 30, "height": 150}, black),
        media_digest({"mode": "RGB", "width": 150, "height": 30}, black),
        media_digest({"mode": "P", "width": 30, "height": 150, "palette": b"\0\0\0"}, black),
        media_digest({"mode": "P", "width": 30, "height": 150, "palette": b"\0\0\1"}, black),
        media_digest({"shape": "6,4"}, bytes(24)),
        media_digest({"shape": "4,6"}, bytes(24)),
        media_digest({"mode": "RGB", "cap": 512}, black),
        media_digest({"mode": "RGB", "cap": 1024}, black),
        media_digest({"mode": "RGB", "cap": "512"}, black),
        media_digest({"a": "bc"}, b""),
        media_digest({"ab": "c"}, b""),
        media_digest({"a": "b"}, b"c"),
        media_digest({}, b"abc"),
        media_digest({"a": 1, "b": 2}, b""),
    ]
    assert len(set(digests)) == len(digests)
    assert media_digest({"b": 2, "a": 1}, b"") == digests[-1]


def test_b21_embeddings_and_their_mask() -> None:
    cache = make_cache()
    rows_e, rows_f = ([bytes([k, i]) for i in range(9)] for k in (1, 2))
    everywhere = [True] * 9
    e = [EmbeddingSpan.of(0, rows_e, everywhere)]
    serve(cache, [0] * 9, extras=e)
    assert hit(cache, [0] * 9, extras=[EmbeddingSpan.of(0, rows_f, everywhere)]) == 0
    assert hit(cache, [0] * 9, extras=[EmbeddingSpan.of(0, rows_e, [False] * 8 + [True])]) == 0
    assert hit(cache, [0] * 9) == 0
    assert hit(cache, [0] * 9, extras=e) == 8


def test_an_embedding_row_of_which_only_the_place_differs() -> None:
    cache = make_cache()
    serve(cache, [0] * 5, extras=[EmbeddingSpan(0, (None, X, None, None))])
    assert hit(cache, [0] * 5, extras=[EmbeddingSpan(0, (X, None, None, None))]) == 0
    assert hit(cache, [0] * 5, extras=[EmbeddingSpan(1, (X,))]) == 4


def test_rows_that_the_mask_leaves_out_are_no_content() -> None:
    cache = make_cache()
    serve(cache, span(1, 5))
    assert hit(cache, span(1, 5), extras=[EmbeddingSpan(0, (None,) * 5)]) == 4


def test_the_order_of_spans_is_no_content() -> None:
    cache = make_cache()
    spans = [MediaSpan(X, 0, 2), MediaSpan(Y, 2, 2)]
    serve(cache, [9] * 5, extras=spans)
    assert hit(cache, [9] * 5, extras=spans[::-1]) == 4
    assert hit(cache, [9] * 5, extras=[MediaSpan(Y, 0, 2), MediaSpan(X, 2, 2)]) == 0


def test_one_span_is_not_two_with_the_same_bytes() -> None:
    cache = make_cache()
    serve(cache, [9] * 5, extras=[MediaSpan(X, 0, 4)])
    assert hit(cache, [9] * 5, extras=[MediaSpan(X, 0, 2), MediaSpan(X, 2, 2)]) == 0
    assert hit(cache, [9] * 5, extras=[MediaSpan(X, 0, 4), MediaSpan(X, 0, 4)]) == 0


def test_a_span_longer_than_the_prompt_costs_nothing() -> None:
    cache = make_cache()
    serve(cache, [9] * 9, extras=[MediaSpan(X, 4, 2**40)])
    assert hit(cache, [9] * 9, extras=[MediaSpan(X, 4, 2**40)]) == 8


def test_generated_tokens_after_media_have_plain_keys_chained_to_it() -> None:
    cache = make_cache()
    x = cache.chain(BASE, [9] * 4, [MediaSpan(X, 0, 4)])
    y = cache.chain(BASE, [9] * 4, [MediaSpan(Y, 0, 4)])
    for made in (x, y):
        made.keys(1)
        made.extend(span(1, 4))
    assert x.extras(0) is not None and x.extras(1) is None
    assert x.keys(2)[1] != y.keys(2)[1]


@pytest.mark.parametrize("bad", [(b"", 0, 1), (X, -1, 1), (X, 0, 0)])
def test_spans_that_are_none(bad: tuple[bytes, int, int]) -> None:
    with pytest.raises(BadRequest):
        MediaSpan(*bad)


def test_mask_and_rows_must_agree() -> None:
    with pytest.raises(BadRequest, match="mask of 1"):
        EmbeddingSpan.of(0, [b"a", b"b"], [True])
    with pytest.raises(BadRequest):
        EmbeddingSpan(0, ())
