"""Keys: pure functions of content, tagged, framed, and each hashed once."""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash

from headwater.cache import key as keys_module
from headwater.cache.extras import EmbeddingSpan, Extra, MediaSpan
from headwater.cache.key import Hasher, TokenChain, chain_root, make_hasher, unit_key
from headwater.errors import BadRequest, CacheError, ConfigError
from headwater.types import Namespace
from tests.cache.cache_model import BASE, hit, make_cache, serve, span

GOLDEN = json.loads((Path(__file__).parent / "golden_keys.json").read_text())
SHA = make_hasher("sha256")


def chain(tokens, namespace=BASE, unit=4, hasher=SHA, extras=()) -> TokenChain:
    return TokenChain(namespace, unit, hasher, tokens, extras)


def keys(tokens, namespace=BASE, unit=4, extras=()) -> list[bytes]:
    made = chain(tokens, namespace, unit, extras=extras)
    return list(made.keys(made.n_units))


def golden_chain(case: dict, algorithm: str) -> TokenChain:
    adapters = tuple((bytes.fromhex(digest), scale) for digest, scale in case["adapters"])
    namespace = Namespace(bytes.fromhex(case["weights"]), adapters, case["salt"])
    extras: list[Extra] = [MediaSpan(bytes.fromhex(d), start, n) for d, start, n in case["media"]]
    for start, rows in case["embeddings"]:
        extras.append(EmbeddingSpan(start, tuple(None if row is None else bytes.fromhex(row) for row in rows)))
    return TokenChain(namespace, case["unit"], make_hasher(algorithm), case["tokens"], extras)


@pytest.mark.parametrize("algorithm", ["sha256", "xxh3_128", "blake3"])
@pytest.mark.parametrize("name", GOLDEN["cases"])
def test_golden_vectors_b07(name: str, algorithm: str) -> None:
    case = GOLDEN["cases"][name]
    made = golden_chain(case, algorithm)
    assert made.root.digest.hex() == case["root"][algorithm]
    assert [key.hex() for key in made.keys(made.n_units)] == case["keys"][algorithm]


def test_golden_vectors_have_all_salt_and_adapter_combinations_b07() -> None:
    cases = GOLDEN["cases"].values()
    assert {(case["salt"] is not None, bool(case["adapters"])) for case in cases} == {
        (False, False),
        (False, True),
        (True, False),
        (True, True),
    }
    roots = [(case["weights"], str(case["adapters"]), case["salt"]) for case in cases]
    digests = [case["root"]["sha256"] for case in cases]
    assert len(set(roots)) == len(set(digests))


@pytest.mark.parametrize("algorithm", ["sha256", "xxh3_128"])
def test_the_format_written_out_by_hand(algorithm: str) -> None:
    """An independent reading of the format, for those who write a router."""

    def digest(message: bytes) -> bytes:
        return hashlib.sha256(message).digest() if algorithm == "sha256" else xxhash.xxh3_128_digest(message)

    def frame(data: bytes) -> bytes:
        return len(data).to_bytes(8, "little") + data

    root = digest(
        b"headwater chain 1"
        + (b"H" + frame(algorithm.encode()))
        + (b"W" + frame(b"weights"))
        + (b"A" + (1).to_bytes(4, "little") + frame(b"adapter") + struct.pack("<d", 0.5))
        + (b"S" + frame(b"pepper"))
    )
    picture = b"M" + struct.pack("<IIQ", 2, 2, 0) + frame(b"picture")
    first = digest(
        root + b"t" + (4).to_bytes(4, "little") + b"x" + struct.pack("<4I", 1, 2, 9, 9)
        + frame((1).to_bytes(4, "little") + frame(picture))
    )  # fmt: skip
    second = digest(first + b"t" + (4).to_bytes(4, "little") + b"-" + struct.pack("<4I", 5, 6, 7, 2**32 - 1))
    made = chain(
        [1, 2, 9, 9, 5, 6, 7, 2**32 - 1, 1],
        Namespace(b"weights", ((b"adapter", 0.5),), "pepper"),
        hasher=make_hasher(algorithm),
        extras=[MediaSpan(b"picture", 2, 2)],
    )
    assert made.root.digest == root
    assert list(made.keys(2)) == [first, second]


def test_b01_digests_are_wide_and_ids_that_pythons_hash_confuses_differ() -> None:
    assert all(len(key) >= 16 for key in keys(span(1, 8)))
    assert len(xxhash.xxh3_128_digest(b"")) == 16
    top = 2**32 - 1  # the nearest to the -1 and -2 that CPython's tuple hash takes for equal
    assert keys([top, 7, 7, 7]) != keys([top - 1, 7, 7, 7])


def test_b02_no_algebra_at_any_position_and_up_the_chain() -> None:
    base = [100] * 12
    for at in range(11):
        other = list(base)
        other[at] += 31
        other[at + 1] -= 1
        for i, (a, b) in enumerate(zip(keys(base), keys(other), strict=True)):
            assert (a == b) == (i < at // 4)


def test_a_changed_token_changes_its_key_and_all_later_ones() -> None:
    base = keys(span(1, 16))
    changed = keys([*span(1, 4), 5, 6, 7, 99, *span(9, 16)])
    assert base[0] == changed[0]
    assert not set(base[1:]) & set(changed[1:])


def test_same_tokens_after_another_history_are_other_content() -> None:
    assert not set(keys(span(1, 8))) & set(keys([9, 9, 9, 9, 5, 6, 7, 8]))


def test_b04_kinds_are_tagged_and_lengths_framed() -> None:
    def lora(name: bytes, scale: float = 1.0) -> tuple[tuple[bytes, float], ...]:
        return ((name, scale),)

    namespaces = [
        Namespace(b"w"),
        Namespace(b"w", salt=""),
        Namespace(b"w", salt="x"),
        Namespace(b"w", lora(b"x")),
        Namespace(b"w", lora(b"")),
        Namespace(b"w", lora(b"x"), salt=""),
        Namespace(b"w", lora(b"ab"), salt="c"),
        Namespace(b"w", lora(b"a"), salt="bc"),
        Namespace(b"w", ((b"a", 1.0), (b"b", 1.0))),
        Namespace(b"w", ((b"b", 1.0), (b"a", 1.0))),
        Namespace(b"w", ((b"ab", 1.0),)),
        Namespace(b"w", lora(b"x", 0.5)),
        Namespace(b"wx"),
        Namespace(b""),
    ]
    roots = [chain_root(namespace, SHA).digest for namespace in namespaces]
    assert len(set(roots)) == len(roots)
    cache = make_cache()
    for i, namespace in enumerate(namespaces[:12]):
        assert hit(cache, span(1, 8), namespace) == 0, f"{namespaces[i]} hits what another namespace computed"
        serve(cache, span(1, 8), namespace=namespace)
        assert hit(cache, span(1, 8), namespace) == 4


def test_b04_media_digest_equal_to_a_salt_string() -> None:
    with_salt = keys([9] * 4, Namespace(b"w", salt="picture"))
    with_media = keys([9] * 4, Namespace(b"w"), extras=[MediaSpan(b"picture", 0, 4)])
    assert with_salt != with_media != keys([9] * 4, Namespace(b"w"))


def test_absent_extras_differ_from_any_encoded_ones() -> None:
    parent, tokens = b"p" * 32, struct.pack("<4I", 1, 2, 3, 4)
    made = {unit_key(SHA, parent, tokens, extras) for extras in (None, b"", b"-", b"x")}
    assert len(made) == 4


def test_b15_adapters_scales_and_the_base_model_miss_each_other() -> None:
    cache = make_cache()
    for adapters in [((b"1", 1.0),), ((b"2", 1.0),), ((b"1", 0.5),), ()]:
        assert serve(cache, span(1, 16), namespace=Namespace(b"w", adapters)).n_hit == 0
    assert hit(cache, span(1, 16), Namespace(b"w", ((b"1", 0.5),))) == 12


def test_scales_are_compared_as_they_are_encoded() -> None:
    assert chain([1], Namespace(b"w", ((b"a", -0.0),))).root == chain([1], Namespace(b"w", ((b"a", 0),))).root
    for scale in (float("nan"), float("inf")):
        with pytest.raises(BadRequest, match="finite"):
            chain([1], Namespace(b"w", ((b"a", scale),)))


def test_a_salt_may_be_any_string_and_is_never_shown() -> None:
    for salt in ("\ud800", "", "ü", "\0"):
        made = chain(span(1, 4), Namespace(b"w", salt=salt))
        assert len(made.root.digest) == 32
    secret = chain(span(1, 4), Namespace(b"w", salt="tell-no-one"))
    cache = make_cache()
    lookup = cache.lookup(secret)
    holding = cache.claim(secret, lookup, "r")
    shown = f"{secret!r} {secret.root!r} {lookup!r} {holding!r} {lookup.stop.describe()} {cache!r}"
    assert "tell-no-one" not in shown


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1, "2"], [1.5], [None], [2**70]])
def test_b91_what_is_no_token_id_is_refused_and_leaves_nothing(tokens: list[object]) -> None:
    with pytest.raises(BadRequest, match="token ids") as caught:
        chain(tokens)
    assert caught.value.field == "prompt"
    made = chain([1, 2, 3])
    with pytest.raises(BadRequest):
        made.extend([4, *tokens])
    assert list(made.tokens) == [1, 2, 3]


def test_messages_of_16_tokens_take_two_compressions() -> None:
    lengths = []

    def digest(message: bytes) -> bytes:
        lengths.append(len(message))
        return hashlib.sha256(message).digest()

    chain(span(1, 64), unit=16, hasher=Hasher("measured", digest)).keys(4)
    assert max(lengths[1:]) <= 119


def test_each_unit_is_hashed_once_in_its_life() -> None:
    calls = []

    def digest(message: bytes) -> bytes:
        calls.append(message)
        return hashlib.sha256(message).digest()

    cache = make_cache(hasher=Hasher("counted", digest))
    made = cache.chain(BASE, span(1, 10))
    for _ in range(3):  # look-ups that are retried
        lookup = cache.lookup(made)
    holding = cache.claim(made, lookup, "r")
    cache.allocate(holding, 10)
    cache.publish(made, holding, 10)
    for token in span(11, 30):
        made.extend([token])
        cache.allocate(holding, len(made))
        cache.publish(made, holding, len(made))
    cache.lookup(made)
    assert len(calls) == len(set(calls)) == 1 + 30 // 4


def test_keys_do_not_depend_on_how_the_tokens_arrived() -> None:
    whole = keys(span(1, 50))
    rng = random.Random(1)
    made = chain([])
    tokens = span(1, 50)
    while tokens:
        n = rng.randrange(1, 7)
        made.extend(tokens[:n])
        tokens = tokens[n:]
        made.keys(made.n_units)
    assert list(made.keys(12)) == whole
    with pytest.raises(CacheError, match="unit 12"):
        made.keys(13)


def test_big_endian_machines_make_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = chain([1, 2, 3, 4])
    monkeypatch.setattr(keys_module.sys, "byteorder", "big")
    assert made.chunk(0) == struct.pack(">4I", 1, 2, 3, 4)  # swapped from this machine's order
    assert list(made.tokens) == [1, 2, 3, 4]


def test_unknown_and_missing_hash_functions_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="did you mean 'sha256'"):
        make_hasher("sha265")
    monkeypatch.setitem(sys.modules, "blake3", None)
    with pytest.raises(ConfigError, match="pip install blake3"):
        make_hasher("blake3")


def test_b10_keys_are_equal_in_every_process() -> None:
    script = (
        "from headwater.cache.key import TokenChain, make_hasher\n"
        "from headwater.cache.extras import MediaSpan\n"
        "from headwater.types import Namespace\n"
        "for extras in ([], [MediaSpan(b'p', 5, 9)]):\n"
        "    for salt in (None, 's'):\n"
        "        for algorithm in ('sha256', 'xxh3_128'):\n"
        "            chain = TokenChain(Namespace(b'w', ((b'a', 2.0),), salt), 4, make_hasher(algorithm),"
        " range(1, 33), extras)\n"
        "            print(*(key.hex() for key in chain.keys(8)))\n"
    )
    outputs = set()
    for seed in ("0", "1", "4242"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
        outputs.add(done.stdout)
    assert len(outputs) == 1
    assert len(set(outputs.pop().split())) == 8 * 8 - 4  # the unit before the media span is the same content
