"""Stored rows of a split: their files, their expected checksums, and the samples that use them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import IO

import numpy as np
from numpy.typing import NDArray

from shardio.format.entries import ArrayEntry, Crc32Entry, SplitEntry
from shardio.format.layout import HEADER_NBYTES, RowType, SampleShape, crc32, pixels_row


@dataclass(frozen=True)
class Values:
    """The stored rows of a split's pixels, or of the array `name`, which is "" for the pixels."""

    split: SplitEntry
    name: str
    stored: SplitEntry | ArrayEntry
    row: RowType

    @property
    def crc32(self) -> Crc32Entry | None:
        """The checksums of an array; the index has the checksums of pixels."""
        return self.stored.crc32 if isinstance(self.stored, ArrayEntry) else None


def values_of(split: SplitEntry, sample_shape: SampleShape | None) -> list[Values]:
    """Returns the pixels, if the split has any, and then the arrays, sorted by name."""
    pixels = [] if sample_shape is None else [Values(split, "", split, pixels_row(sample_shape))]
    return [*pixels, *(Values(split, name, array, array.row) for name, array in sorted(split.arrays.items()))]


@dataclass(frozen=True)
class Sums:
    """The checksums of stored rows, in the order of the rows: `rows[i]` has `crc32s[i]` and holds `samples[i]`.

    A row is listed once for each sample that uses it. An unused row is listed with the sample -1, or left out if its
    crc32 is unknown.
    """

    rows: NDArray[np.int64]
    crc32s: NDArray[np.uint32]
    samples: NDArray[np.int64]
    keys: NDArray[np.bytes_] | None
    """The keys of all samples of the split; None if the index cannot be trusted."""

    def of(self, first: int, count: int) -> Sums:
        """Returns the checksums of `count` rows from `first` on; row `first` becomes row 0 of the result."""
        part = self._part(slice(*np.searchsorted(self.rows, [first, first + count])))
        return replace(part, rows=part.rows - first)

    def at(self, rows: NDArray[np.int64]) -> Sums:
        """Returns the checksums of these rows only."""
        return self._part(np.isin(self.rows, rows))

    def _part(self, chosen: slice | NDArray[np.bool_]) -> Sums:
        return replace(self, rows=self.rows[chosen], crc32s=self.crc32s[chosen], samples=self.samples[chosen])

    def known_rows(self) -> NDArray[np.int64]:
        """Returns the rows that have a checksum, each once."""
        rows: NDArray[np.int64] = np.unique(self.rows)
        return rows


def compare_rows(
    file: IO[bytes], row: RowType, sums: Sums, progress: Callable[[int], object] = lambda nbytes: None
) -> tuple[NDArray[np.bool_], OSError | None]:
    """Returns a mask, true for each of `sums` whose row in `file` is damaged, and the last error of the disk, if any.

    A row is damaged if it has the wrong crc32, is truncated, cannot be read, or is |b1 with other bytes than 0 and 1.
    """
    damaged = np.zeros(len(sums.rows), bool)
    failure: OSError | None = None
    rows, starts = np.unique(sums.rows, return_index=True)
    bounds = [*starts.tolist(), len(damaged)]
    for stored, start, stop in zip(rows.tolist(), bounds[:-1], bounds[1:], strict=True):
        try:
            file.seek(HEADER_NBYTES + stored * row.nbytes)
            data = file.read(row.nbytes)
        except OSError as error:
            data, failure = b"", error
        is_whole = len(data) == row.nbytes and not (row.dtype == "|b1" and max(data) > 1)
        damaged[start:stop] = sums.crc32s[start:stop] != crc32(data) if is_whole else True
        progress(row.nbytes)
    return damaged, failure
