"""Numbers that depend on what they are for, not on what was drawn before: a counter-based generator.

Philox4x64-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); numpy.random.Philox
is the same function (it adds 1 to the counter before the first block).
"""

from __future__ import annotations

from enum import IntEnum

_MASK = (1 << 64) - 1
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_WEYL_0, _WEYL_1 = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B


class Purpose(IntEnum):
    """What a draw is for; draws for different purposes are independent."""

    TOKEN = 0


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """One block of four 64-bit words from a 256-bit counter and a 128-bit key, given as 64-bit words, low first."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (p1 >> 64) ^ c1 ^ k0, p1 & _MASK, (p0 >> 64) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int, purpose: Purpose) -> float:
    """A number in [0, 1), a multiple of 2**-53. ``seed`` counts modulo 2**64."""
    word = philox((position & _MASK, int(purpose), 0, 0), (seed & _MASK, choice & _MASK))[0]
    return (word >> 11) * 2.0**-53
