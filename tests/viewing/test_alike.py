"""Which pictures are found to look alike."""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray
from pictures import random_picture
from PIL import Image

from shardio.viewing.alike import MOST_BITS, close_pairs, count_bits, fields_of, hash_picture, join, look_alike, tells


def hash_of(picture: NDArray[np.uint8]) -> int:
    return hash_picture(Image.fromarray(picture))


def test_the_hash_is_one_bit_for_each_place_where_it_becomes_brighter_to_the_right() -> None:
    steps = np.tile(np.arange(9, dtype=np.uint8) * 10, (8, 1))
    steps[3] = steps[3][::-1]
    picture = np.kron(steps, np.ones((4, 4), np.uint8))
    assert hash_of(picture) == 0xFFFFFF_00_FFFFFFFF


def test_bits_are_counted() -> None:
    numbers = [random.getrandbits(64) for _ in range(100)] + [0, (1 << 64) - 1]
    assert count_bits(np.array(numbers, np.uint64)).tolist() == [bin(number).count("1") for number in numbers]


def test_all_close_pairs_are_found_and_no_others() -> None:
    rng = random.Random(7)
    hashes = [rng.getrandbits(64) for _ in range(200)]
    for flips in range(6):
        for number in range(20):
            mask = sum(1 << bit for bit in rng.sample(range(64), flips))
            hashes.append(hashes[number] ^ mask)
    found = {(int(one), int(other)) for one, other in close_pairs(np.array(hashes, np.uint64))}
    groups = join(found)
    close = {(i, j) for j in range(len(hashes)) for i in range(j) if bin(hashes[i] ^ hashes[j]).count("1") <= MOST_BITS}
    assert found <= close
    assert groups == join(close)


def test_thousands_of_hashes_of_one_quarter_take_no_time_of_their_square() -> None:
    hashes = np.arange(1 << 13, dtype=np.uint64) << np.uint64(3)
    assert len(close_pairs(hashes)) < 300 * len(hashes)


def test_one_picture_in_other_sizes_and_qualities_looks_alike_and_others_do_not() -> None:
    rng = np.random.default_rng(8)
    pictures = [random_picture(rng, 64, 64) for _ in range(20)]
    for picture in pictures:
        again = np.asarray(Image.fromarray(picture).resize((50, 50)).resize((64, 64)))
        assert count_bits(np.array([hash_of(picture) ^ hash_of(again)], np.uint64))[0] <= MOST_BITS
        assert look_alike(fields_of(picture), fields_of(again))
    assert not look_alike(fields_of(pictures[0]), fields_of(pictures[1]))


def test_flat_pictures_tell_nothing() -> None:
    flat = [hash_of(np.full((16, 16), level, np.uint8)) for level in (0, 255)]
    assert not tells(np.array(flat, np.uint64)).any()


def test_pairs_are_joined_to_groups() -> None:
    assert join([(1, 5), (7, 8), (5, 3), (8, 9)]) == [[1, 3, 5], [7, 8, 9]]
