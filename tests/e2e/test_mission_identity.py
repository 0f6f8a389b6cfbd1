"""Mission 4: what else than its tokens and its history identifies a block."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headwater.cache.extras import EmbeddingSpan, Extra, MediaSpan
from headwater.cache.key import Hasher
from headwater.text.tokenizer import load_tokenizer
from headwater.types import Namespace
from tests.cache.cache_model import BASE, full, hit, make_cache, serve, sliding, span
from tests.e2e.compare import assert_same, oracle
from tests.e2e.engine import Engine, Loaded, load, some_tokens
from tests.e2e.models import plain_model, write_folder

VOCAB = 300
SEVEN = Hasher("seven", lambda message: b"\x07" * 32)


def test_a_salt_isolates_both_ways_and_is_no_password(plain: Loaded) -> None:
    # mission 4: another salt, no salt and the empty salt never share; the same salt does, whoever sends it
    engine = Engine(plain)
    prompt = some_tokens(40, seed=1, vocab=VOCAB)
    expected = oracle(plain, prompt, 2)
    salts = ["alice", "bob", None, "", "alice ", "a", "lice"]
    for hits in (0, 32):
        for salt in salts:
            answer = engine.generate(prompt, 2, salt=salt)
            assert answer.n_cached == hits, salt
            assert_same(answer, expected, plain)
    assert engine.generate(prompt, salt="carol").stop == "no_record", "nothing is said of what others have cached"


def test_adapters_their_order_and_their_scales_isolate() -> None:
    # mission 4
    p, q = b"digest of p", b"digest of q"
    adapters = [(), ((p, 1.0),), ((p, 0.5),), ((q, 1.0),), ((p, 1.0), (q, 1.0)), ((q, 1.0), (p, 1.0))]
    cache = make_cache()
    for each in adapters:
        assert serve(cache, span(1, 9), namespace=Namespace(b"weights", each)).n_hit == 0
    for each in adapters:
        assert hit(cache, span(1, 9), Namespace(b"weights", each)) == 8


def test_b04_an_adapter_is_no_salt_and_boundaries_do_not_move() -> None:
    # mission 4: fields are tagged and framed
    cache = make_cache(n_blocks=128)
    namespaces = [
        Namespace(b"w", ((b"x", 1.0),)),
        Namespace(b"w", salt="x"),
        Namespace(b"w", ((b"ab", 1.0),), "c"),
        Namespace(b"w", ((b"a", 1.0),), "bc"),
        Namespace(b"w", ((b"x", 1.0),), ""),
        Namespace(b"wx", salt=""),
        Namespace(b"w", salt="\0"),
    ]
    for namespace in namespaces:
        assert serve(cache, span(1, 9), namespace=namespace).n_hit == 0


def test_b16_media_isolate_from_the_block_that_they_overlap_on() -> None:
    # mission 4, B = 4, placeholder 9
    cache = make_cache()
    tokens = [1, 2, 9, 9, 9, 9, 9, 9, 3, 4]

    def picture(digest: bytes) -> tuple[MediaSpan, ...]:
        return (MediaSpan(digest, 2, 6),)

    assert serve(cache, tokens, extras=picture(b"X")).n_hit == 0
    assert serve(cache, tokens, extras=picture(b"Y")).n_hit == 0
    assert serve(cache, tokens).n_hit == 0, "nor the bare placeholders"
    assert hit(cache, tokens, extras=picture(b"X")) == 8
    text_first = [*span(1, 8), 9, 9, 9, 9, 9, 9, 3]
    serve(cache, text_first, extras=(MediaSpan(b"X", 8, 6),))
    assert hit(cache, text_first, extras=(MediaSpan(b"Y", 8, 6),)) == 8
    assert hit(cache, text_first, extras=(MediaSpan(b"X", 8, 6),)) == 12


def test_b21_prompt_embeddings_and_their_mask_isolate() -> None:
    # mission 4: nine positions whose ids are all 0
    cache = make_cache()
    rows_e, rows_f = [[bytes([kind, i]) for i in range(9)] for kind in (1, 2)]

    def embeds(rows: list[bytes], mask: list[bool]) -> tuple[Extra, ...]:
        return (EmbeddingSpan.of(0, rows, mask),)

    assert serve(cache, [0] * 9, extras=embeds(rows_e, [True] * 9)).n_hit == 0
    assert hit(cache, [0] * 9, extras=embeds(rows_f, [True] * 9)) == 0
    assert hit(cache, [0] * 9, extras=embeds(rows_e, [False] * 8 + [True])) == 0
    assert hit(cache, [0] * 9) == 0
    assert hit(cache, [0] * 9, extras=embeds(rows_e, [True] * 9)) == 8


def test_a_cache_group_is_part_of_the_identity() -> None:
    # mission 4 and 6: the same content in one group's block is nothing to the other group
    cache = make_cache(full(4), sliding(4, 8), n_blocks=8)
    serve(cache, span(1, 9))
    full_group, sliding_group = cache.lookup(cache.chain(BASE, span(1, 9))).tables
    assert not set(full_group.blocks) & set(sliding_group.blocks)
    # Evict the sliding group's copies alone: the full group's blocks are still there, and no hit.
    for block in sliding_group.blocks:
        cache.pool.evictable.move_to_end(block, last=False)
    stranger = cache.chain(BASE, span(50, 50 + 4 * 3 - 1))
    holding = cache.claim(stranger, cache.lookup(stranger), "stranger")
    cache.allocate(holding, 12)
    assert all(cache.pool.node[block] is not None for block in full_group.blocks)
    assert hit(cache, span(1, 9)) == 0
    cache.release(holding)


def test_another_model_never_shares(plain: Loaded, tmp_path: Path) -> None:
    # mission 4: same tokens, same pool, weights that differ in one number
    model = plain_model()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] += 1.0
    folder = write_folder(tmp_path, model)
    other = load(folder, load_tokenizer(folder), torch.float32)
    assert other.model.weights_digest != plain.model.weights_digest
    prompt = some_tokens(40, seed=1, vocab=VOCAB)
    first = Engine(plain)
    assert [first.generate(prompt).n_cached for _ in range(2)] == [0, 32]
    second = Engine(other, of=first)
    answer = second.generate(prompt, 3)
    assert answer.n_cached == 0
    assert_same(answer, oracle(other, prompt, 3), other)
    assert Engine(plain, of=first).generate(prompt).n_cached == 32


def test_the_same_weights_elsewhere_are_the_same_model(plain: Loaded, tmp_path: Path) -> None:
    # mission 4: identity is content, not a path or a name
    write_folder(tmp_path / "copy", plain_model())
    copy = load(tmp_path / "copy", plain.tokenizer, torch.float32)
    assert copy.model.weights_digest == plain.model.weights_digest


def test_a_cache_lives_as_long_as_its_service(plain: Loaded) -> None:
    # mission 4: a new engine, and one that was reset, start from nothing
    prompt = some_tokens(40, seed=1, vocab=VOCAB)
    engine = Engine(plain)
    engine.generate(prompt)
    assert Engine(plain).generate(prompt).n_cached == 0
    assert engine.generate(prompt).n_cached == 32
    assert engine.reset().done
    assert engine.generate(prompt).n_cached == 0
    assert engine.generate(prompt).n_cached == 32


@pytest.mark.parametrize("model", ["plain", "hybrid"])
def test_when_every_key_collides_answers_stay_right(request: pytest.FixtureRequest, model: str) -> None:
    # mission 4: equal stays equal, another parent differs, with a hash function that always returns 7
    loaded: Loaded = request.getfixturevalue(model)
    engine = Engine(loaded, block_size=4, hasher=SEVEN)
    a, b, c = some_tokens(4, 1, VOCAB), some_tokens(4, 2, VOCAB), some_tokens(4, 3, VOCAB)
    # Cached [A, C] and [B]: a flat map from key to block would serve A's C for [B, C].
    engine.generate([*a, *c, 50])
    engine.generate([*b, 50])
    cases = [([*b, *c, 50], None, 4), ([*c, *a, 50], None, 0), ([*a, *c, 50], None, 8), ([*a, *c, 50], "salt", 0)]
    for prompt, salt, hits in cases:
        answer = engine.generate(prompt, 3, salt=salt)
        assert answer.n_cached == hits
        assert_same(answer, oracle(loaded, prompt, 3), loaded)
