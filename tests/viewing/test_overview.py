"""The numbers of a report: histograms, class counts, what resizing lost, and which pictures look alike."""

from __future__ import annotations

import random

import numpy as np
import pytest
from numpy.typing import NDArray
from pictures import random_picture
from PIL import Image

from shardio.conversion.images.fit import Fit
from shardio.conversion.options import FitMode
from shardio.viewing.overview import (
    Scale,
    bins_of_counts,
    bins_of_shares,
    bins_of_sizes,
    count_labels,
    histogram,
    measure_loss,
)
from shardio.viewing.repeats import MAX_BITS, close_pairs, hash_picture, join

_RNG = np.random.default_rng(5)
_VALUES = {
    "one": np.array([7]),
    "equal": np.full(9, 500),
    "sizes": _RNG.integers(1, 5000, 300),
    "large": _RNG.integers(1, 1 << 31, 50),
}


@pytest.mark.parametrize("scale", [bins_of_counts, bins_of_sizes])
@pytest.mark.parametrize("values", _VALUES.values(), ids=_VALUES.keys())
def test_every_number_lies_in_one_bin(values: np.ndarray, scale: Scale) -> None:
    found = histogram(values, scale)
    assert found is not None
    assert found.counts == tuple(np.histogram(values, found.edges)[0])
    assert sum(found.counts) == len(values)
    assert list(found.edges) == sorted(set(found.edges))
    assert 2 <= len(found.ticks) <= 9
    assert all(0 <= tick < len(found.edges) for tick in found.ticks)
    minimum, _, median, _, maximum = found.quantiles
    assert (minimum, median, maximum) == (values.min(), np.median(values), values.max())


def test_whole_numbers_have_bins_of_whole_width() -> None:
    found = histogram(np.array([0, 1, 1, 3]), bins_of_counts)
    assert found is not None
    assert (found.edges, found.counts, found.ticks) == ((0, 1, 2, 3, 4), (1, 2, 0, 1), (0, 1, 2, 3, 4))
    wide = histogram(np.array([3, 401]), bins_of_counts)
    assert wide is not None
    assert (wide.edges[0], wide.edges[1], wide.edges[-1]) == (0, 10, 410)


def test_octaves_are_labeled_and_a_bin_is_a_quarter_of_one() -> None:
    found = histogram(np.array([100, 128, 500]), bins_of_sizes)
    assert found is not None
    assert [found.edges[tick] for tick in found.ticks] == [128, 256, 512]
    assert (found.counts[0], found.counts[2], found.counts[-1]) == (1, 1, 1)
    assert found.edges[1] / found.edges[0] == pytest.approx(2**0.25)


def test_shares_have_one_axis() -> None:
    found = histogram(np.array([-1e-9, 0.5, 1.0]), bins_of_shares)
    assert found is not None
    assert (found.edges[0], found.edges[-1], found.counts[0], found.counts[10], found.counts[-1]) == (0, 1, 1, 1, 1)


def test_there_is_no_histogram_of_nothing() -> None:
    assert histogram(np.array([]), bins_of_sizes) is None


def test_classes_are_counted_in_each_split_with_empty_and_unknown_ones() -> None:
    counts = count_labels([np.array([0, 2, 2, -5]), np.array([2, 9])], 4)
    assert [*counts] == [-5, 0, 1, 2, 3, 9]
    assert [*counts.values()] == [(1, 0), (1, 0), (0, 0), (2, 1), (0, 0), (0, 1)]


@pytest.mark.parametrize("mode", ["crop", "pad", "squash"])
def test_losses_are_those_of_the_conversion(mode: FitMode) -> None:
    """Compared with the boxes of `Fit`, which rounds to whole pixels."""
    rng = np.random.default_rng(6)
    for _ in range(50):
        height, width, tall, wide = rng.integers([200, 200, 150, 150], [3000, 3000, 400, 400]).tolist()
        loss = measure_loss(np.array([width]), np.array([height]), (tall, wide), mode)
        assert loss is not None
        resized = Fit((tall, wide), mode).placement(height, width).resized
        kept = min(tall, resized[0]) * min(wide, resized[1])
        whole = resized[0] * resized[1] if mode == "crop" else tall * wide
        assert (loss.share is None) == (mode == "squash")
        if loss.share is not None:
            assert loss.share.quantiles[2] == pytest.approx(1 - kept / whole, abs=0.01)
        reduction = loss.reduction.quantiles[2]
        assert reduction == pytest.approx(np.sqrt(height * width / (resized[0] * resized[1])), rel=0.03)
        assert loss.num_enlarged == (reduction < 1)


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
    for flips in range(6):
        hashes += [hashes[number] ^ sum(1 << bit for bit in rng.sample(range(64), flips)) for number in range(20)]
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
