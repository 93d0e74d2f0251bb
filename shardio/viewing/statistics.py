"""What is told of a split in numbers: distributions, class counts, what resizing has lost. Arithmetic, no I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# As many bars as can be told apart.
_MOST_BINS = 40
_NICE = (1, 2, 5, 10)


@dataclass(frozen=True)
class Distribution:
    """Numbers in bins, and five of them that say where they lie.

    `edges` has one more than `counts`. `ticks` are the places in `edges` that are round numbers.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    ticks: tuple[int, ...]
    least: float
    low: float
    """One in twenty lies below."""
    median: float
    high: float
    """One in twenty lies above."""
    most: float

    def __post_init__(self) -> None:
        if len(self.edges) != len(self.counts) + 1 or not self.counts:
            raise ValueError(f"expected an edge more than bins, found {len(self.edges)} and {len(self.counts)}")

    @property
    def total(self) -> int:
        return sum(self.counts)


def distribution(
    values: NDArray[Any], *, per_octave: int = 0, whole: bool = False, within: tuple[float, float] | None = None
) -> Distribution | None:
    """Returns the distribution of these numbers, in bins of one round width; None if there are none.

    With `per_octave`, the numbers are above 0, and so many bins double them. `whole` says that they are integers.
    `within` are the ends of the axis, and what lies outside counts in the bins there.
    """
    if not len(values):
        return None
    five = np.quantile(values, [0, 0.05, 0.5, 0.95, 1])
    low, high = within or (float(five[0]), float(five[-1]))
    edges, ticks = _octaves(low, high, per_octave) if per_octave else _steps(low, high, whole)
    inside = np.clip(values, edges[0], np.nextafter(edges[-1], -np.inf))
    counts = np.histogram(inside, edges)[0]
    return Distribution(tuple(edges.tolist()), tuple(counts.tolist()), tuple(ticks), *five.tolist())


def _octaves(low: float, high: float, per_octave: int) -> tuple[NDArray[Any], list[int]]:
    first = math.floor(math.log2(low) * per_octave)
    last = max(first, math.floor(math.log2(high) * per_octave)) + 1
    ticks = [number - first for number in range(first, last + 1) if number % per_octave == 0]
    if len(ticks) < 2:  # one power of two alone gives no scale
        ticks = [0, *(tick for tick in ticks if 0 < tick < last - first), last - first]
    return np.exp2(np.arange(first, last + 1) / per_octave), ticks[:: -(-len(ticks) // 7)]


def _steps(low: float, high: float, whole: bool) -> tuple[NDArray[Any], list[int]]:
    step = _nice((high - low) / _MOST_BINS) if high > low else 1.0
    step = max(step, 1.0) if whole else step
    first = math.floor(low / step + 1e-9)
    last = math.floor(high / step + 1e-9) + 1
    if not whole and last - first > 1 and high <= (last - 1) * step + 1e-9:
        last -= 1  # the last edge belongs to the bin before it
    count = last - first
    every = 1 if count < 8 else 5 if count <= 20 else 10
    return np.arange(first, last + 1) * step, [n - first for n in range(first, last + 1) if n % every == 0]


def _nice(number: float) -> float:
    """Returns the least of 1, 2, 5, 10, ... and their tenths that is no smaller."""
    power = 10.0 ** math.floor(math.log10(number))
    return next(power * nice for nice in _NICE if power * nice >= number * (1 - 1e-9))


@dataclass(frozen=True)
class ClassCount:
    """How many samples of a label each split has, in the order of the splits."""

    label: int
    counts: tuple[int, ...]


def count_classes(labels: Sequence[NDArray[np.int64]], num_classes: int) -> list[ClassCount]:
    """Returns the counts of all classes, and of other labels that are there, ascending. `labels` are those of each
    split."""
    there = [np.unique(some, return_counts=True) for some in labels]
    known = np.unique(np.concatenate([np.arange(num_classes), *(found for found, _ in there)]))
    table = np.zeros((len(known), len(labels)), np.int64)
    for column, (found, counts) in enumerate(there):
        table[np.searchsorted(known, found), column] = counts
    return [ClassCount(label, tuple(row)) for label, row in zip(known.tolist(), table.tolist(), strict=True)]


@dataclass(frozen=True)
class Loss:
    """What resizing has done to the pictures of a split. `reduction` is how many pixels along a side became one; below
    1 the picture was enlarged."""

    fit: str
    share: Distribution | None
    """The share of each picture that was cut away; for `pad`, of each sample that is margin. None for `squash`."""
    reduction: Distribution
    num_enlarged: int


def measure_loss(widths: NDArray[Any], heights: NDArray[Any], size: tuple[int, int], fit: str) -> Loss | None:
    """Returns the loss of pictures of these sizes, above 0, in samples of `size` (height, width); None of none."""
    across = size[1] / widths.astype(np.float64)
    down = size[0] / heights.astype(np.float64)
    share = None
    if fit == "squash":
        scale = np.sqrt(across * down)
    else:
        scale = np.maximum(across, down) if fit == "crop" else np.minimum(across, down)
        # The resized picture's area in samples: from 1 on if it is cropped, up to 1 if it is padded.
        area = (scale / across) * (scale / down)
        share = distribution(1 - (1 / area if fit == "crop" else area), within=(0, 1))
    reduction = distribution(1 / scale, per_octave=4)
    return None if reduction is None else Loss(fit, share, reduction, int((scale > 1 + 1e-9).sum()))
