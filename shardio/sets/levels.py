"""Measures the mean and standard deviation of a split's pixels, by channel, as `Normalize` takes them.

They are measured on some lines of some samples, which depend only on the number of samples. The sums are integers, so
the result depends neither on how the samples are read nor on the machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.order.permutation import Permutation

NUM_SAMPLES = 2048
"""The most samples to measure: photographs vary by about 0.15, so their mean is within 0.01 of the mean of all."""

# Neighboring lines are alike: so many measure a picture as well as all of its lines do, in an eighth of the time.
_NUM_LINES = 32

LEVELS = "pixels"
"""The key of the levels in the provenance of a set."""


@dataclass(frozen=True)
class Levels:
    """Mean and standard deviation of each channel over some samples of a split, from 0 (black) to 1 (white)."""

    split: str
    num_samples: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def describe(self) -> dict[str, Any]:
        """Returns the levels as the JSON object that a set's provenance records."""
        return {**vars(self), "mean": list(self.mean), "std": list(self.std)}


def stored_levels(provenance: Mapping[str, Any], num_channels: int) -> Levels | None:
    """Returns the levels recorded in a set's provenance; None if they are missing or malformed."""
    told = provenance.get(LEVELS)
    if not isinstance(told, dict) or not isinstance(told.get("split"), str) or type(told.get("num_samples")) is not int:
        return None
    mean, std = (_numbers(told.get(name), num_channels) for name in ("mean", "std"))
    return Levels(told["split"], told["num_samples"], mean, std) if mean and std else None


def _numbers(value: object, count: int) -> tuple[float, ...]:
    if isinstance(value, list) and len(value) == count and all(type(n) in (int, float) and 0 <= n <= 1 for n in value):
        return tuple(map(float, value))
    return ()


def first_split(splits: Iterable[str]) -> str:
    """Returns the name of the split that models are trained with: `train`, or else the first by name."""
    names = sorted(splits)
    return "train" if "train" in names else names[0]


def chosen_samples(num_samples: int, most: int | None = None) -> NDArray[np.int64]:
    """Returns the samples to measure, at most `most` (by default NUM_SAMPLES) of `num_samples`: int64, ascending.

    Equal arguments always give the same samples.
    """
    most = NUM_SAMPLES if most is None else most
    return np.sort(Permutation(num_samples, 0, 0)(np.arange(min(most, num_samples))))


def sum_levels(picture: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Returns sums over some lines of a picture, uint8 (height, width, channels), as int64 (4, channels).

    For each channel: the number of pictures (1), the number of values, their sum, and the sum of their squares. Pass
    the total over all pictures to `levels_of`.
    """
    height, width, channels = picture.shape
    step = max(1, height // _NUM_LINES)
    lines = np.ascontiguousarray(picture[step // 2 :: step]).reshape(-1, width * channels)
    # Sums over lines, and then over columns: as fast as memory, and exact.
    over_lines = [each.sum(0, dtype=np.uint32) for each in (lines, np.multiply(lines, lines, dtype=np.uint16))]
    total, squares = np.reshape(over_lines, (2, -1, channels)).sum(axis=1, dtype=np.int64)
    return np.stack([np.ones_like(total), np.full_like(total, len(lines) * width), total, squares])


def levels_of(split: str, sums: NDArray[np.int64]) -> Levels:
    """Returns the levels of at least one picture. `sums` is the total of the pictures' results of `sum_levels`."""
    num_samples, num_values, total, squares = sums
    mean = total / num_values
    variance = np.maximum(squares / num_values - mean * mean, 0)
    shares = [tuple(round(level / 255, 6) for level in levels.tolist()) for levels in (mean, np.sqrt(variance))]
    return Levels(split, int(num_samples[0]), *shares)
