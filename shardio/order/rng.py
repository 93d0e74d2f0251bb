"""Random numbers without a state: each number is a hash of a key and a counter, and can be computed alone.

A key is derived from (purpose, seed, epoch), and the counter is a position or a sample (Salmon, Moraes, Dror, Shaw,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011). No number depends on earlier draws, or on the process.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
from numpy.typing import NDArray

# splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
_SHIFT_TO_53_BITS = np.uint64(11)


def make_keys(purpose: bytes, seed: int, epoch: int, count: int) -> tuple[np.uint64, ...]:
    """Returns `count` (at most 8) independent 64-bit keys. Another purpose, seed or epoch changes all keys. Raises
    ValueError unless seed and epoch are from 0 to 2**64 - 1."""
    if not 0 <= seed < 1 << 64 or not 0 <= epoch < 1 << 64:
        raise ValueError(f"seed and epoch must be from 0 to 2**64 - 1; found seed {seed}, epoch {epoch}")
    digest = hashlib.blake2b(purpose + struct.pack("<QQ", seed, epoch), digest_size=8 * count).digest()
    return tuple(map(np.uint64, struct.unpack(f"<{count}Q", digest)))


def scramble(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Applies splitmix64's finalizer to `numbers` in place, and returns `numbers`. Omits the finalizer's last shift,
    which does not change the high 31 bits."""
    numbers ^= numbers >> _SHIFT_1
    numbers *= _MIX_1
    numbers ^= numbers >> _SHIFT_2
    numbers *= _MIX_2
    return numbers


def random_bits(key: np.uint64 | NDArray[np.uint64], counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns 64 random bits for each counter, uint64: the output of splitmix64 after `counter` steps from `key`."""
    bits = scramble(key + (counters + np.uint64(1)) * _GAMMA)
    bits ^= bits >> _SHIFT_3
    return bits


def uniform(key: np.uint64 | NDArray[np.uint64], counters: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Returns a random number in [0, 1) for each counter, float64: a multiple of 2**-53."""
    return (random_bits(key, counters) >> _SHIFT_TO_53_BITS).astype(np.float64) * 2.0**-53
