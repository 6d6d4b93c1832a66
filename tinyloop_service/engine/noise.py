"""Sampling noise: one uniform number as a pure function of (seed, choice, position).

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011).  Having no state it
gives a request the same numbers in any company, and a device can compute it as well as Python can.

    key     = (seed low, seed high)                       32 bits each
    counter = (position low, position high, choice, 0)
"""

from __future__ import annotations

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)  # the golden ratio and √3 − 1, in 32 bits: what the key grows by each round
_ROUNDS = 10

Words = tuple[int, int, int, int]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Four random 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = product1 >> 32 ^ c1 ^ k0, product1 & _MASK, product0 >> 32 ^ c3 ^ k1, product0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1), a multiple of 2⁻⁵³.  seed: uint64; position: absolute, of the token to be drawn."""
    words = philox((position & _MASK, position >> 32, choice, 0), (seed & _MASK, seed >> 32))
    return ((words[0] >> 5) << 26 | words[1] >> 6) * 2.0**-53
