"""Distributions, class counts and what resizing has lost: arithmetic alone."""

from __future__ import annotations

import numpy as np
import pytest

from shardio.conversion.images.fit import Fit, FitMode
from shardio.viewing.statistics import count_classes, distribution, measure_loss

_RNG = np.random.default_rng(5)
_VALUES = {
    "one": np.array([7.0]),
    "equal": np.full(9, 500),
    "shares": _RNG.random(300),
    "sizes": _RNG.integers(1, 5000, 300),
    "tiny": _RNG.random(50) * 1e-6 + 1e-9,
    "large": _RNG.integers(1, 1 << 31, 50),
}


@pytest.mark.parametrize("per_octave", [0, 1, 4, 8])
@pytest.mark.parametrize("values", _VALUES.values(), ids=_VALUES.keys())
def test_every_number_lies_in_one_bin(values: np.ndarray, per_octave: int) -> None:
    told = distribution(values, per_octave=per_octave)
    assert told is not None
    assert told.total == len(values)
    assert told.edges[0] <= values.min() * (1 + 1e-9)
    assert values.max() <= told.edges[-1] * (1 + 1e-9)
    assert list(told.edges) == sorted(set(told.edges))
    assert len(told.ticks) <= 8
    assert all(0 <= tick < len(told.edges) for tick in told.ticks)
    assert (told.least, told.median, told.most) == (values.min(), np.median(values), values.max())


def test_whole_numbers_have_bins_of_whole_width() -> None:
    told = distribution(np.array([0, 1, 1, 3]), whole=True)
    assert told is not None
    assert told.edges == (0, 1, 2, 3, 4)
    assert told.counts == (1, 2, 0, 1)


def test_numbers_outside_of_the_axis_count_at_its_ends() -> None:
    told = distribution(np.array([-1.0, 0.5, 1.0, 2.0]), within=(0, 1))
    assert told is not None
    assert (told.edges[0], told.edges[-1], told.counts[0], told.counts[-1]) == (0, 1, 1, 2)


def test_there_is_no_distribution_of_nothing() -> None:
    assert distribution(np.array([])) is None


def test_classes_are_counted_in_each_split_with_empty_and_unknown_ones() -> None:
    counts = count_classes([np.array([0, 2, 2, -5]), np.array([2, 9])], 4)
    assert {one.label: one.counts for one in counts} == {
        -5: (1, 0),
        0: (1, 0),
        1: (0, 0),
        2: (2, 1),
        3: (0, 0),
        9: (0, 1),
    }


@pytest.mark.parametrize("mode", ["crop", "pad", "squash"])
def test_losses_are_those_of_the_conversion(mode: FitMode) -> None:
    """Compared with the boxes of `Fit`, which rounds to whole pixels."""
    rng = np.random.default_rng(6)
    for _ in range(50):
        height, width = map(int, rng.integers(200, 3000, 2))
        size = tuple(map(int, rng.integers(150, 400, 2)))
        loss = measure_loss(np.array([width]), np.array([height]), (size[0], size[1]), mode)
        assert loss is not None
        resized = Fit((size[0], size[1]), mode).placement(height, width).resized
        kept = min(size[0], resized[0]) * min(size[1], resized[1])
        whole = resized[0] * resized[1] if mode == "crop" else size[0] * size[1]
        assert (loss.share is None) == (mode == "squash")
        if loss.share is not None:
            assert loss.share.median == pytest.approx(1 - kept / whole, abs=0.01)
        assert loss.reduction.median == pytest.approx(np.sqrt(height * width / (resized[0] * resized[1])), rel=0.03)
        assert loss.num_enlarged == (loss.reduction.median < 1)
