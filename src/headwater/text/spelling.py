"""How vocabularies spell bytes: the byte-level alphabet of GPT-2, and SentencePiece's pieces.

Sources: `bytes_to_unicode` of openai/gpt-2; google/sentencepiece (U+2581 for a space, byte pieces
``<0x00>`` .. ``<0xFF>``).
"""

from __future__ import annotations

import re

SPACE_MARK = "\u2581"
"""SentencePiece writes a space as this character."""

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """The byte that each of GPT-2's 256 characters stands for.

    Bytes that print in Latin-1 stand for themselves; the other 68 are, in order, U+0100 and on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def byte_level_bytes(token: str, alphabet: dict[str, int]) -> bytes:
    """The bytes of a token written in the byte-level alphabet; a token with any other character is literal text."""
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:
        return token.encode("utf-8")


def piece_bytes(piece: str) -> bytes:
    """The bytes of a SentencePiece piece: one byte for ``<0xNN>``, else its text with the marks as spaces."""
    match = BYTE_PIECE.fullmatch(piece)
    if match:
        return bytes([int(match[1], 16)])
    return piece.replace(SPACE_MARK, " ").encode("utf-8")
