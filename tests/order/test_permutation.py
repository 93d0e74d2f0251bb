"""One order per (n, seed, epoch): exact for every n, and the same numbers for ever."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from plain_arithmetic import plain_inverse, plain_permute, plain_round_keys

from shardio.order.permutation import MAX_N, ROUNDS, Permutation, check_below, permute, round_keys

KEYS = [(0, 0), (0, 1), (1, 0), (2**64 - 1, 2**64 - 1)]

# (n, seed, epoch) -> the first and the last numbers of the order. Never to be rewritten: a training run that is taken
# up again depends on them.
GOLDEN: dict[tuple[int, int, int], tuple[list[int], list[int]]] = {
    (1, 0, 0): ([0], [0]),
    (1, 7, 3): ([0], [0]),
    (2, 0, 0): ([0, 1], [0, 1]),
    (2, 7, 3): ([1, 0], [1, 0]),
    (10, 0, 0): ([3, 7, 9, 8, 0], [1, 6, 4, 5, 2]),
    (10, 7, 3): ([1, 3, 0, 6, 4], [9, 2, 7, 5, 8]),
    (1000, 0, 0): ([326, 503, 726, 878, 665], [459, 887, 242, 133, 307]),
    (1000, 7, 3): ([237, 179, 899, 884, 742], [508, 168, 209, 336, 851]),
    (1281167, 0, 0): ([337714, 436682, 887353, 731163, 803688], [191829, 780207, 1073909, 205664, 843982]),
    (1281167, 7, 3): ([518503, 907552, 420864, 707220, 183768], [880273, 819161, 1115998, 710719, 599691]),
    (10**10, 0, 0): (
        [4740314503, 9443684591, 8838854822, 3025730833, 7488164728],
        [7350032961, 822520052, 3960592798, 7450780308, 1340071212],
    ),
    (10**10, 7, 3): (
        [6371546231, 1293811369, 4065893763, 5314163454, 691715180],
        [9644376499, 9449352278, 5967050182, 9828277968, 1024374641],
    ),
}


@pytest.mark.parametrize(("seed", "epoch"), KEYS)
def test_an_order_is_a_bijection_and_its_inverse_undoes_it(seed: int, epoch: int) -> None:
    for n in (*range(1, 301), 49_999, 50_000, 65_536, 65_537):
        permutation, numbers = Permutation(n, seed, epoch), np.arange(n)
        assert np.array_equal(np.sort(permutation(numbers)), numbers), n
        assert np.array_equal(permutation.inverse(permutation(numbers)), numbers), n


def test_the_order_is_what_it_has_always_been() -> None:
    for (n, seed, epoch), (first, last) in GOLDEN.items():
        permutation = Permutation(n, seed, epoch)
        assert permutation(np.arange(len(first))).tolist() == first
        assert permutation(np.arange(n - len(last), n)).tolist() == last


@pytest.mark.parametrize(("seed", "epoch"), KEYS)
def test_an_order_and_its_inverse_are_their_definitions_in_plain_integers(seed: int, epoch: int) -> None:
    for n in (1, 2, 3, 4, 10, 255, 1000, 1281167, 10**10, 2**61 + 1, 2**62 - 1, 2**62):
        permutation, keys = Permutation(n, seed, epoch), plain_round_keys(seed, epoch)
        positions = sorted({0, n // 3, n // 2, max(0, n - 2), n - 1, *range(min(n, 8))})
        found = permutation(np.array(positions))
        assert found.tolist() == [plain_permute(position, n, keys) for position in positions]
        assert permutation.inverse(found).tolist() == positions
        assert permutation.inverse(np.array(positions)).tolist() == [plain_inverse(p, n, keys) for p in positions]


def key_arrays(choice: np.ndarray, keys: list[tuple[np.uint64, ...]]) -> list[np.ndarray]:
    """keys[c] for each c of `choice`, as `permute` takes them."""
    return [np.array([key[number] for key in keys])[choice] for number in range(ROUNDS)]


# For 3, 5, 7 and 13 up to a quarter of the network's numbers lie outside and walk on, some of them many times.
@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 13, 64, 8191, 10**10, 2**61 + 1, 2**62])
def test_positions_with_keys_of_their_own_are_permuted_by_them(n: int) -> None:
    rng = np.random.default_rng(3)
    keys = [round_keys(seed, seed % 3, "window") for seed in range(20)]
    positions, choice = rng.integers(0, n, 300), rng.integers(0, len(keys), 300)
    found = permute(positions, n, key_arrays(choice, keys))
    assert found.dtype == np.int64
    plain = [list(map(int, key)) for key in keys]
    assert found.tolist() == [plain_permute(int(p), n, plain[c]) for p, c in zip(positions, choice, strict=True)]


def test_permute_only_reads_positions_and_keys() -> None:
    keys = key_arrays(np.arange(7), [round_keys(seed, 0) for seed in range(7)])
    positions = np.arange(7)
    before = [array.copy() for array in (positions, *keys)]
    for array in (positions, *keys):
        array.flags.writeable = False
    permute(positions, 7, keys)
    assert all(map(np.array_equal, before, (positions, *keys)))
    assert permute(positions[:0], 7, [key[:0] for key in keys]).tolist() == []


@pytest.mark.parametrize("n", [0, 1, 10, 2**62, 2**63 - 1])
def test_check_below_lets_all_below_n_through_and_nothing_else(n: int) -> None:
    inside = sorted({0, n // 2, n - 1}) if n else []
    found = check_below(n, np.array(inside, np.int64))
    assert found.dtype == np.int64
    assert found.tolist() == inside
    for position in (-1, n, 2**63 - 1, -(2**63)):
        for check in (partial(check_below, n), *((Permutation(n, 0, 0).inverse,) if 0 < n <= MAX_N else ())):
            with pytest.raises(ValueError, match=rf"positions must be from 0 to {n - 1}; found"):
                check(np.array([*inside, position]))


def test_positions_of_any_integer_type_are_compared_as_numbers() -> None:
    for kind in (np.int8, np.uint8, np.int32, np.uint32, np.uint64):
        assert check_below(10, np.array([3, 9], kind)).tolist() == [3, 9]
    with pytest.raises(ValueError, match=r"positions must be from 0 to 9; found"):
        check_below(10, np.array([2**64 - 1], np.uint64))


@pytest.mark.parametrize("n", [MAX_N + 1, 2**63, 2**64, 0, -1, -(2**62)])
def test_n_outside_of_its_bounds_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match=rf"n must be from 1 to 2\*\*62; found {n}$"):
        Permutation(n, 0, 0)
