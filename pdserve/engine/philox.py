"""Philox4x32-10: random numbers as a pure function of (key, counter).

Source: J. K. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011; constants as in Random123.
"""

from __future__ import annotations

_MASK = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four 32-bit words for a counter of four and a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0 = _MULTIPLIER_0 * c0
        product_1 = _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product_1 >> 32) ^ c1 ^ k0,
            product_1 & _MASK,
            (product_0 >> 32) ^ c3 ^ k1,
            product_0 & _MASK,
        )
        k0 = (k0 + _WEYL_0) & _MASK
        k1 = (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int, choice: int) -> float:
    """The random number that samples the token at a position: u in [0, 1), a multiple of 2⁻⁵³.

    seed      64 bits, the key: low word first
    position  index of the sampled token in the sequence's ids, 64 bits: counter words 0 and 1, low word first
    choice    64 bits: counter words 2 and 3, low word first
    u is the first 53 bits of output words 0, 1 (word 0 on top) / 2⁵³.
    """
    counter = (position & _MASK, position >> 32 & _MASK, choice & _MASK, choice >> 32 & _MASK)
    w0, w1, _, _ = philox4x32(counter, (seed & _MASK, seed >> 32 & _MASK))
    return float((w0 << 32 | w1) >> 11) / float(1 << 53)
