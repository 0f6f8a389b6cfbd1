"""What else than token ids a unit's KV was computed from: media and prompt embeddings.

Placeholder tokens of two pictures are the same ids, so every unit that overlaps a span takes the span's
content, and where in it the unit lies, into its key. Everything is tagged and length-framed: nothing of
one kind can be read as another, and no boundary can move.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headwater.errors import BadRequest

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


def frame(data: bytes) -> bytes:
    """``data`` after its length (8 bytes, little-endian), so that fields cannot run into each other."""
    return _U64.pack(len(data)) + data


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Tokens ``start .. start + length - 1`` stand for the item whose content digest is ``digest``.

    ``digest`` covers everything that decides the item's rows: bytes, shape, mode, processor options
    (see ``media_digest``).
    """

    digest: bytes
    start: int
    length: int

    def __post_init__(self) -> None:
        if not self.digest:
            raise BadRequest("a media span needs a content digest, got an empty one", field="media")
        if self.start < 0 or self.length < 1:
            raise BadRequest(f"media span: start {self.start} and length {self.length} are no range", field="media")

    @property
    def end(self) -> int:
        return self.start + self.length

    def piece(self, lo: int, hi: int) -> bytes:
        """Encoding of the part of this span inside tokens ``lo .. hi - 1`` (which overlap it).

        lo ........ hi          the unit
           | first | last       first = max(lo, start), last = min(hi, end)
        """
        first, last = max(lo, self.start), min(hi, self.end)
        where = _U32.pack(first - lo) + _U32.pack(last - first) + _U64.pack(first - self.start)
        return b"M" + where + frame(self.digest)


@dataclass(frozen=True, slots=True)
class EmbeddingSpan:
    """From position ``start`` on, ``rows[k]`` is the digest of the embedding row used at ``start + k``.

    None where the mask says that the token id is used instead. A unit in which no row is used has no
    extras: its KV comes from ids alone.
    """

    start: int
    rows: tuple[bytes | None, ...]

    def __post_init__(self) -> None:
        if self.start < 0 or not self.rows:
            raise BadRequest(f"embedding span at {self.start}: needs a start >= 0 and rows", field="prompt_embeds")

    @classmethod
    def of(cls, start: int, rows: Sequence[bytes], mask: Sequence[bool]) -> EmbeddingSpan:
        """``rows``: raw bytes of each row; ``mask[k]``: True where row k is used rather than the token id."""
        if len(rows) != len(mask):
            raise BadRequest(f"{len(rows)} embedding rows but a mask of {len(mask)}", field="prompt_embeds")
        digests = (hashlib.sha256(row).digest() if used else None for row, used in zip(rows, mask, strict=True))
        return cls(start, tuple(digests))

    @property
    def end(self) -> int:
        return self.start + len(self.rows)

    def piece(self, lo: int, hi: int) -> bytes | None:
        """Encoding of the rows used inside tokens ``lo .. hi - 1``: mask and digest; None if none is used."""
        mask = bytearray(hi - lo)
        rows = hashlib.sha256()
        for position in range(max(lo, self.start), min(hi, self.end)):
            row = self.rows[position - self.start]
            if row is not None:
                mask[position - lo] = 1
                rows.update(frame(row))
        return b"E" + frame(bytes(mask)) + rows.digest() if any(mask) else None


Extra = MediaSpan | EmbeddingSpan


def unit_extras(extras: Sequence[Extra], unit: int, first: int, last: int) -> dict[int, bytes]:
    """Encoded extras of units ``first .. last - 1`` (of ``unit`` tokens each); units without any are absent."""
    pieces: dict[int, list[bytes]] = {}
    for span in extras:
        for i in range(max(first, span.start // unit), min(last, -(-span.end // unit))):
            piece = span.piece(i * unit, (i + 1) * unit)
            if piece is not None:
                pieces.setdefault(i, []).append(piece)
    # Sorted: the order in which a caller lists its spans is not content.
    return {i: _U32.pack(len(found)) + b"".join(map(frame, sorted(found))) for i, found in pieces.items()}


def shared_extras(a: bytes | None, b: bytes | None, n_tokens: int) -> int:
    """Of a unit of ``n_tokens`` tokens with encoded extras ``a``, and one with ``b``: up to where the same was used.

    That is up to the first token of a piece that only one of them has: a piece counts as a whole.
    """
    if a == b:
        return n_tokens
    return min((_first_token(piece) for piece in _pieces(a) ^ _pieces(b)), default=0)


def _pieces(encoded: bytes | None) -> set[bytes]:
    pieces: set[bytes] = set()
    at = _U32.size
    while encoded is not None and at < len(encoded):
        begin = at + _U64.size
        at = begin + _U64.unpack_from(encoded, at)[0]
        pieces.add(encoded[begin:at])
    return pieces


def _first_token(piece: bytes) -> int:
    """Where in its unit a piece begins to be used."""
    if piece[:1] == b"M":
        first: int = _U32.unpack_from(piece, 1)[0]
        return first
    return piece.index(1, 1 + _U64.size) - (1 + _U64.size)  # the mask, after its length


def media_digest(header: Mapping[str, str | int | bytes], payload: bytes) -> bytes:
    """SHA-256 of an item's payload and of all else that decides how it is read.

    ``header``: mode, width, height, type, palette, processor options, ... Names and values are tagged and
    framed, so equal raw bytes of another shape, and options with moved boundaries, differ.
    """
    digest = hashlib.sha256(b"headwater media 1")
    digest.update(_U32.pack(len(header)))
    for name, value in sorted(header.items()):
        digest.update(frame(name.encode()))
        if isinstance(value, bytes):
            digest.update(b"b" + frame(value))
        elif isinstance(value, str):
            digest.update(b"s" + frame(value.encode()))
        else:
            digest.update(b"i" + frame(str(int(value)).encode()))
    digest.update(frame(payload))
    return digest.digest()
