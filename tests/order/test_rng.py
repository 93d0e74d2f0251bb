"""Keys and counters in, random numbers out: exact, and the same for ever."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from plain_arithmetic import plain_keys, plain_random_bits, plain_uniform

from shardio.order.rng import make_keys, random_bits, uniform

KEYS = [0, 1, 1234567, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15]
COUNTERS = [0, 1, 2, 63, 2**31, 2**32 - 1, 2**32, 10**10, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1]

# These numbers are never rewritten, as every order that a seed stands for follows from them.
GOLDEN_KEYS: dict[tuple[bytes, int, int, int], tuple[int, ...]] = {
    (b"shardio weighted 1", 0, 0, 1): (9981577754722811547,),
    (b"shardio weighted 1", 7, 3, 1): (12228550472311705391,),
    (b"shardio weighted 1", 18446744073709551615, 18446744073709551615, 1): (12848832458352156913,),
    (b"x", 0, 1, 3): (3098444279377030707, 16749985199793613899, 11389486335820810006),
    (b"", 1, 0, 2): (13785219908537854011, 2675144341148067909),
}


def counters(numbers: list[int] | range) -> np.ndarray:
    return np.array(numbers, np.uint64)


def test_the_published_numbers_of_splitmix64_come_out() -> None:
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert random_bits(np.uint64(1234567), counters(range(5))).tolist() == published


@pytest.mark.parametrize("key", KEYS)
def test_random_numbers_are_their_definition_in_plain_integers(key: int) -> None:
    # A NumPy scalar that overflows warns, and warnings are errors here; an array of one does not.
    for some in (COUNTERS, [], *([counter] for counter in COUNTERS)):
        bits, numbers = random_bits(np.uint64(key), counters(some)), uniform(np.uint64(key), counters(some))
        assert (bits.dtype, numbers.dtype) == (np.uint64, np.float64)
        assert bits.tolist() == [plain_random_bits(key, counter) for counter in some]
        assert numbers.tolist() == [plain_uniform(key, counter) for counter in some]


def test_counters_are_only_read() -> None:
    numbers = counters(COUNTERS)[::-1]
    numbers.flags.writeable = False
    bits = random_bits(np.uint64(5), numbers)
    uniform(np.uint64(5), numbers)
    assert numbers.tolist() == COUNTERS[::-1]
    assert not np.shares_memory(bits, numbers)


def test_keys_are_what_they_have_always_been() -> None:
    for arguments, expected in GOLDEN_KEYS.items():
        keys = make_keys(*arguments)
        assert tuple(map(int, keys)) == expected
        assert all(type(key) is np.uint64 for key in keys)


def test_keys_are_their_definition_in_plain_integers() -> None:
    for purpose, seed, epoch in product([b"", b"a", b"shardio test 1"], KEYS, KEYS):
        for count in range(1, 9):
            assert list(map(int, make_keys(purpose, seed, epoch, count))) == plain_keys(purpose, seed, epoch, count)


@pytest.mark.parametrize(
    ("seed", "epoch"), [(-1, 0), (0, -1), (2**64, 0), (0, 2**64), (-(2**70), 2**70), (float("nan"), 0)]
)
def test_seeds_and_epochs_outside_of_64_bits_are_refused(seed: int, epoch: int) -> None:
    with pytest.raises(ValueError, match=rf"from 0 to 2\*\*64 - 1; found seed {seed}, epoch {epoch}$"):
        make_keys(b"x", seed, epoch, 1)
