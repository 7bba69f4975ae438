"""A seeded order of n things that is computed place by place, so that no list of n is ever held.

A Feistel network over the next power of four permutes more numbers than are needed; a number that
falls outside is sent through again until it falls inside (cycle walking: Black and Rogaway,
"Ciphers with arbitrary finite domains", CT-RSA 2002).
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

_ROUNDS: Final = 8
"""Four would make it pseudorandom (Luby and Rackoff 1988) with an ideal round function."""


def shuffled(places: NDArray[np.int64], *, size: int, key: str) -> NDArray[np.int64]:
    """What stands at these places (0 to size - 1) of an order of 0 to size - 1.

    The order follows from the key, on every machine and with every version of numpy.
    """
    half_bits = max(-(-(size - 1).bit_length() // 2), 1)
    keys = [_round_key(key, index) for index in range(_ROUNDS)]
    found = places.astype(np.uint64)
    outside = np.ones(len(found), dtype=bool)
    while outside.any():
        found[outside] = _permuted(found[outside], np.uint64(half_bits), keys)
        outside = found >= size
    return found.astype(np.int64)


def _permuted(
    values: NDArray[np.uint64], half_bits: np.uint64, keys: list[np.uint64]
) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << half_bits) | right


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Every bit of the input moves half of the bits of the output (SplitMix64's last steps)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed


def _round_key(key: str, index: int) -> np.uint64:
    digest = hashlib.blake2b(f"{key}/{index}".encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "big"))
