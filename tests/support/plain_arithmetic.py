"""The definitions of the random numbers and permutations once more, in Python's integers."""

from __future__ import annotations

import hashlib
import math
import struct


def plain_mix(number: int) -> int:
    """splitmix64's finalizer."""
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ number >> 27) * 0x94D049BB133111EB % 2**64
    return number ^ number >> 31


def plain_random_bits(key: int, counter: int) -> int:
    """One number of `plain_splitmix64`, without the ones before it."""
    return plain_mix((key + (counter + 1) * 0x9E3779B97F4A7C15) % 2**64)


def plain_uniform(key: int, counter: int) -> float:
    return math.ldexp(plain_random_bits(key, counter) >> 11, -53)


def plain_keys(purpose: bytes, seed: int, epoch: int, count: int) -> list[int]:
    name = purpose + seed.to_bytes(8, "little") + epoch.to_bytes(8, "little")
    digest = hashlib.blake2b(name, digest_size=8 * count).digest()
    return [int.from_bytes(digest[i : i + 8], "little") for i in range(0, len(digest), 8)]


def plain_round_keys(seed: int, epoch: int, purpose: str = "permutation") -> list[int]:
    name = f"shardio {purpose} 1".encode() + seed.to_bytes(8, "little") + epoch.to_bytes(8, "little")
    return list(struct.unpack("<6Q", hashlib.blake2b(name, digest_size=48).digest()))


def plain_hash_below(digit: int, key: int, radix: int) -> int:
    mixed = (digit + key) % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    return (mixed >> 32) * radix >> 32


def plain_permute(position: int, n: int, keys: list[int]) -> int:
    """The definition once more, one number at a time, in integers that cannot overflow."""
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    number = position
    while True:
        high, low = divmod(number, b)
        for i in (0, 2, 4):
            high = (high + plain_hash_below(low, keys[i], a)) % a
            low = (low + plain_hash_below(high, keys[i + 1], b)) % b
        number = high * b + low
        if number < n:
            return number


def plain_inverse(number: int, n: int, keys: list[int]) -> int:
    """`plain_permute`, undone step by step."""
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    position = number
    while True:
        high, low = divmod(position, b)
        for i in (4, 2, 0):
            low = (low - plain_hash_below(high, keys[i + 1], b)) % b
            high = (high - plain_hash_below(low, keys[i], a)) % a
        position = high * b + low
        if position < n:
            return position
