"""Which pictures are found to look alike. What a report says of them: tests/cli/test_report.py."""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray
from pictures import random_picture
from PIL import Image

from shardio.viewing.repeats import MAX_BITS, close_pairs, hash_picture, join


def hash_of(picture: NDArray[np.uint8]) -> int:
    return hash_picture(Image.fromarray(picture))


def differing_bits(one: int, other: int) -> int:
    return bin(one ^ other).count("1")


def test_the_hash_has_a_bit_for_each_place_that_becomes_brighter_to_the_right() -> None:
    steps = np.tile(np.arange(9, dtype=np.uint8) * 10, (8, 1))
    steps[3] = steps[3][::-1]
    assert hash_of(np.kron(steps, np.ones((4, 4), np.uint8))) == 0xFFFFFF_00_FFFFFFFF


def test_exactly_the_close_pairs_are_found() -> None:
    rng = random.Random(7)
    hashes = [rng.getrandbits(64) for _ in range(200)]
    hashes += [
        hashes[number] ^ sum(1 << bit for bit in rng.sample(range(64), flips))
        for flips in range(6)
        for number in range(20)
    ]
    found = {(int(one), int(other)) for one, other in close_pairs(np.array(hashes, np.uint64))}
    close = {(i, j) for j in range(len(hashes)) for i in range(j) if differing_bits(hashes[i], hashes[j]) <= MAX_BITS}
    assert found <= close
    assert join(found) == join(close)


def test_a_hash_is_compared_with_256_neighbors_at_most() -> None:
    pairs = close_pairs(np.arange(1 << 11, dtype=np.uint64) << np.uint64(3))
    assert 200 < np.diff(pairs).max() < 256


def test_a_picture_in_other_sizes_has_a_close_hash() -> None:
    rng = np.random.default_rng(8)
    for picture in (random_picture(rng, 64, 64) for _ in range(20)):
        other = np.asarray(Image.fromarray(picture).resize((50, 50)).resize((64, 64)))
        assert differing_bits(hash_of(picture), hash_of(other)) <= MAX_BITS


def test_pairs_are_joined_to_groups() -> None:
    assert join([(1, 5), (7, 8), (5, 3), (8, 9)]) == [[1, 3, 5], [7, 8, 9]]
