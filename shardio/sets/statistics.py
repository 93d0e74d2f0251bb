"""What the indexes of a set tell in numbers: samples per class, sizes of the originals, columns. Arithmetic, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.format.layout import columns_of


@dataclass(frozen=True)
class Range:
    """Where numbers lie. Those that are no number (NaN) are left out, and `num_missing` counts them."""

    least: float
    median: float
    most: float
    num_missing: int = 0


def range_of(values: NDArray[Any]) -> Range | None:
    """Returns where these numbers lie; None if there are none. Integers stay integers."""
    there = values[~np.isnan(values)] if values.dtype.kind == "f" else values
    if not len(there):
        return None
    middle = float(np.median(there))
    median: float = int(middle) if values.dtype.kind in "iu" and middle.is_integer() else middle
    return Range(there.min().item(), median, there.max().item(), len(values) - len(there))


@dataclass(frozen=True, eq=False)
class ClassCounts:
    """How many samples of a split have each label: `counts` (int64), in the order of `labels`, which ascends.

    `labels` are all classes of the set, those without a sample as well; without classes, the labels that there are.
    """

    labels: NDArray[np.int64]
    counts: NDArray[np.int64]

    @property
    def range(self) -> Range:
        found = range_of(self.counts)
        assert found is not None  # a split has a sample
        return found

    @property
    def num_empty(self) -> int:
        return int((self.counts == 0).sum())

    def first(self, most: int) -> list[tuple[int, int]]:
        """Returns (label, samples) of the first labels."""
        return self._pairs(np.arange(min(most, len(self.labels))))

    def rarest(self, most: int) -> list[tuple[int, int]]:
        """Returns (label, samples) of the labels with the fewest samples, of equal ones the first."""
        return self._pairs(np.argsort(self.counts, kind="stable")[:most])

    def most_frequent(self, most: int) -> list[tuple[int, int]]:
        return self._pairs(np.argsort(-self.counts, kind="stable")[:most])

    def _pairs(self, places: NDArray[np.int64]) -> list[tuple[int, int]]:
        return list(zip(self.labels[places].tolist(), self.counts[places].tolist(), strict=True))


def count_classes(labels: NDArray[np.int64], num_classes: int) -> ClassCounts:
    """Returns the counts of these labels, at least one, which are below `num_classes` if that is not 0."""
    if num_classes:
        return ClassCounts(np.arange(num_classes), np.bincount(labels, minlength=num_classes))
    return ClassCounts(*np.unique(labels, return_counts=True))


@dataclass(frozen=True, eq=False)
class SplitStatistics:
    """What the index of a split tells. Sizes are those of the original images, None where the index has none."""

    num_samples: int
    classes: ClassCounts
    widths: Range | None
    heights: Range | None
    aspects: Range | None
    """Width over height."""
    columns: Mapping[str, Range | None]


def statistics_of(rows: NDArray[np.void], num_classes: int) -> SplitStatistics:
    """Returns the statistics of a split whose index has these rows."""
    widths, heights = rows["source_width"].astype(np.int64), rows["source_height"].astype(np.int64)
    known = (widths > 0) & (heights > 0)
    widths, heights = widths[known], heights[known]
    return SplitStatistics(
        num_samples=len(rows),
        classes=count_classes(rows["label"], num_classes),
        widths=range_of(widths),
        heights=range_of(heights),
        aspects=range_of(widths / heights),
        columns={name: range_of(rows[name]) for name, _ in columns_of(rows.dtype)},
    )
