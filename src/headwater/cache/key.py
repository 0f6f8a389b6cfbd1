"""Keys: the chained digests that find a full unit's content.

    root   = H(format tag, hash name, weights, adapters, salt)      whose KV this is
    key[i] = H(key[i-1], tokens of unit i, extras of unit i)        what it is, after all before it

A key is a pure function of content: equal in every process and after every restart. It finds content;
it proves nothing (the index compares). Only full units have keys.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import math
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import xxhash

from headwater.cache.extras import Extra, frame, unit_extras
from headwater.config import HASH_ALGORITHMS
from headwater.errors import BadRequest, CacheError, ConfigError
from headwater.types import Namespace

FORMAT = b"headwater chain 1"
TOKEN_BYTES = 4
_U32 = struct.Struct("<I")
_F64 = struct.Struct("<d")


@dataclass(frozen=True, slots=True)
class Hasher:
    """A hash function by name. ``digest`` returns the same number of bytes for every message."""

    name: str
    digest: Callable[[bytes], bytes]


def make_hasher(name: str) -> Hasher:
    """The hash function of the option ``prefix_caching_hash_algo``. ConfigError if unknown or not installed."""
    if name == "sha256":
        return Hasher(name, _sha256)
    if name == "xxh3_128":
        return Hasher(name, xxhash.xxh3_128_digest)
    if name == "blake3":
        return Hasher(name, _blake3())
    near = difflib.get_close_matches(name, HASH_ALGORITHMS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"unknown hash algorithm {name!r} (known: {', '.join(HASH_ALGORITHMS)}){hint}")


def _sha256(message: bytes) -> bytes:
    return hashlib.sha256(message).digest()


def _blake3() -> Callable[[bytes], bytes]:
    try:
        new = importlib.import_module("blake3").blake3
    except ImportError as error:
        raise ConfigError(
            "hash algorithm 'blake3' needs the package blake3, which is not installed: pip install blake3, "
            "or choose sha256 or xxh3_128"
        ) from error

    def digest(message: bytes) -> bytes:
        found: bytes = new(message).digest()
        return found

    return digest


@dataclass(frozen=True, slots=True)
class ChainRoot:
    """The start of a chain: a namespace and its digest under one hash function.

    The digest is safe to show; the salt inside the namespace is not, and is left out of ``repr``.
    """

    namespace: Namespace
    algorithm: str
    digest: bytes = field(compare=False)


def normal(namespace: Namespace) -> Namespace:
    """``namespace`` with scales as finite floats (0.0 for -0.0), so that equality and encoding agree."""
    adapters = []
    for digest, scale in namespace.adapters:
        if not math.isfinite(scale):
            raise BadRequest(f"adapter scale must be a finite number, got {scale}", field="adapters")
        adapters.append((bytes(digest), float(scale) + 0.0))
    return Namespace(bytes(namespace.weights), tuple(adapters), namespace.salt)


def chain_root(namespace: Namespace, hasher: Hasher) -> ChainRoot:
    """Root of ``namespace``: each field tagged and framed, absent different from empty."""
    fields = [FORMAT, b"H" + frame(hasher.name.encode()), b"W" + frame(namespace.weights)]
    fields.append(b"A" + _U32.pack(len(namespace.adapters)))
    fields += [frame(digest) + _F64.pack(scale) for digest, scale in namespace.adapters]
    # surrogatepass: a salt is any string that JSON can carry, lone surrogates included.
    salt = namespace.salt
    fields.append(b"-" if salt is None else b"S" + frame(salt.encode("utf-8", "surrogatepass")))
    return ChainRoot(namespace, hasher.name, hasher.digest(b"".join(fields)))


def unit_key(hasher: Hasher, parent: bytes, tokens: bytes, extras: bytes | None) -> bytes:
    """Key of a unit. ``tokens``: little-endian uint32; ``extras``: encoded (None: the unit has none).

    With 16 tokens and no extras the message is 32 + 6 + 64 = 102 bytes: two SHA-256 compressions (<= 119).
    """
    if extras is None:
        return hasher.digest(parent + _head(len(tokens), b"-") + tokens)
    return hasher.digest(parent + _head(len(tokens), b"x") + tokens + frame(extras))


def _head(n_bytes: int, kind: bytes) -> bytes:
    return b"t" + _U32.pack(n_bytes // TOKEN_BYTES) + kind


class TokenChain:
    """One request's known tokens and the keys of its full units, each hashed once in its life.

    ``tokens`` are the known tokens; they only grow, by ``extend``. ``unit`` is the number of tokens that one
    key covers.
    """

    __slots__ = ("_chunks", "_extras", "_hasher", "_keys", "_root", "_spans", "namespace", "tokens", "unit")

    def __init__(
        self, namespace: Namespace, unit: int, hasher: Hasher, tokens: Iterable[int] = (), extras: Sequence[Extra] = ()
    ) -> None:
        """BadRequest for a token id that is not an unsigned 32-bit integer."""
        self.namespace = normal(namespace)
        self.unit = unit
        self.tokens = _token_array(tokens)
        self._hasher = hasher
        self._spans = tuple(extras)
        self._root: ChainRoot | None = None
        self._keys: list[bytes] = []
        self._chunks: list[bytes] = []
        self._extras: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def root(self) -> ChainRoot:
        if self._root is None:
            self._root = chain_root(self.namespace, self._hasher)
        return self._root

    @property
    def n_units(self) -> int:
        """Number of full units of the known tokens."""
        return len(self.tokens) // self.unit

    @property
    def n_hashed(self) -> int:
        """Number of units whose key has been computed."""
        return len(self._keys)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append known tokens: all of them, or none if one is not a token id (BadRequest)."""
        self.tokens.extend(_token_array(tokens))

    def keys(self, n_units: int) -> Sequence[bytes]:
        """Keys of at least the first ``n_units`` units. The sequence is the chain's own: read only."""
        if n_units > len(self._keys):
            self._hash(n_units)
        return self._keys

    def chunks(self, n_units: int) -> Sequence[bytes]:
        """Tokens of at least the first ``n_units`` units, as ``chunk`` gives them. Read only."""
        self.keys(n_units)
        return self._chunks

    def chunk(self, i: int) -> bytes:
        """Tokens of unit ``i`` as little-endian uint32: what the index compares."""
        return self.chunks(i + 1)[i]

    def extras(self, i: int) -> bytes | None:
        """Encoded extras of unit ``i``; None if it has none."""
        self.keys(i + 1)
        return self._extras.get(i)

    def beginning(self, i: int) -> tuple[bytes, bytes | None]:
        """Tokens of unit ``i`` as far as they are known, and its extras as if it were full; hashes nothing."""
        raw = _little_endian(self.tokens[i * self.unit : (i + 1) * self.unit])
        return raw, None if self.plain else unit_extras(self._spans, self.unit, i, i + 1).get(i)

    def same_unit(self, other: TokenChain, i: int) -> bool:
        """Whether unit ``i`` (full in both) has the same tokens and extras in ``other``; hashes nothing."""
        return self.same_units(other, i, i + 1)

    def same_units(self, other: TokenChain, first: int, end: int) -> bool:
        """``same_unit`` of all units from ``first`` to ``end - 1``, in one comparison."""
        lo, hi = first * self.unit, end * self.unit
        if self.tokens[lo:hi] != other.tokens[lo:hi]:
            return False
        if self.plain and other.plain:
            return True
        return unit_extras(self._spans, self.unit, first, end) == unit_extras(other._spans, self.unit, first, end)

    @property
    def plain(self) -> bool:
        """Whether no unit of this chain can have extras."""
        return not self._spans

    def _hash(self, n_units: int) -> None:
        unit, start = self.unit, len(self._keys)
        if n_units > self.n_units:
            raise CacheError(f"key of unit {n_units - 1} asked for, but only {self.n_units} units are full")
        raw = _little_endian(self.tokens[start * unit : n_units * unit])
        step = unit * TOKEN_BYTES
        chunks = [raw[k : k + step] for k in range(0, len(raw), step)]
        key = self._keys[-1] if self._keys else self.root.digest
        found = unit_extras(self._spans, unit, start, n_units) if self._spans else {}
        if found:
            keys = []
            for i, chunk in enumerate(chunks, start):
                key = unit_key(self._hasher, key, chunk, found.get(i))
                keys.append(key)
        else:
            digest, head = self._hasher.digest, _head(step, b"-")
            keys = [key := digest(key + head + chunk) for chunk in chunks]
        self._keys += keys
        self._chunks += chunks
        self._extras.update(found)


def _token_array(tokens: Iterable[int]) -> array[int]:
    if isinstance(tokens, array) and tokens.typecode == "I":
        return array("I", tokens)
    try:
        return array("I", tokens if isinstance(tokens, (list, tuple)) else list(tokens))
    except (OverflowError, TypeError) as error:
        raise BadRequest(f"token ids must be integers from 0 to 4294967295: {error}", field="prompt") from error


def _little_endian(tokens: array[int]) -> bytes:
    if tokens.itemsize != TOKEN_BYTES:
        raise CacheError(f"this platform's unsigned int has {tokens.itemsize} bytes; keys need 4")
    if sys.byteorder == "big":
        tokens.byteswap()  # a slice: the chain's own tokens stay as they are
    return tokens.tobytes()


def token_ids(chunk: bytes) -> tuple[int, ...]:
    """Token ids of a chunk (little-endian uint32)."""
    return struct.unpack(f"<{len(chunk) // TOKEN_BYTES}I", chunk)
