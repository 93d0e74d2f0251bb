"""Stored rows of a split: which files hold them, what their checksums should be, and which samples they are of."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardio.format.checksum import crc32
from shardio.format.entries import Crc32Entry, ShardEntry, SplitEntry
from shardio.format.layout import HEADER_NBYTES, RowType
from shardio.system.opening import open_regular


@dataclass(frozen=True)
class Values:
    """What stored rows of a split hold: its pixels, or, with a name, an array's values."""

    split: SplitEntry
    name: str
    shards: tuple[ShardEntry, ...]
    row: RowType
    order: int | None
    crc32: Crc32Entry | None = None
    """The checksums of an array; those of pixels are in the index."""

    @property
    def num_rows(self) -> int:
        return sum(shard.num_samples for shard in self.shards)

    @property
    def starts(self) -> list[int]:
        """The first stored row of each shard."""
        return list(accumulate((shard.num_samples for shard in self.shards[:-1]), initial=0))


def values_of(split: SplitEntry, pixels: RowType) -> list[Values]:
    """Returns the pixels, and the arrays in the order of their names, as the order of keys in a manifest means
    nothing."""
    arrays = sorted(split.arrays.items())
    return [
        Values(split, "", split.shards, pixels, split.order),
        *(Values(split, name, array.shards, array.row, array.order, array.crc32) for name, array in arrays),
    ]


@dataclass(frozen=True)
class Sums:
    """The checksums of stored rows, in the order of the rows: `rows[i]` has `crc32s[i]` and is that of `samples[i]`.

    A row comes once for each sample that it is of; one that is of no sample comes with the sample -1, or not at all if
    nothing tells its crc32.
    """

    rows: NDArray[np.int64]
    crc32s: NDArray[np.uint32]
    samples: NDArray[np.int64]
    keys: NDArray[np.bytes_] | None
    """Those of all samples of the split; None if the index cannot be trusted."""

    def of(self, first: int, count: int) -> Sums:
        """Returns those of so many rows from `first` on, which is row 0 of the result."""
        start, stop = np.searchsorted(self.rows, [first, first + count])
        return replace(
            self,
            rows=self.rows[start:stop] - first,
            crc32s=self.crc32s[start:stop],
            samples=self.samples[start:stop],
        )

    def at(self, rows: NDArray[np.int64]) -> Sums:
        """Returns those of these rows alone."""
        chosen = np.isin(self.rows, rows)
        return replace(self, rows=self.rows[chosen], crc32s=self.crc32s[chosen], samples=self.samples[chosen])

    def known_rows(self) -> NDArray[np.int64]:
        """Returns the rows that have a checksum, each once."""
        rows: NDArray[np.int64] = np.unique(self.rows)
        return rows


class FalseBools:
    """Finds the rows of a file of |b1 that have other bytes than 0 and 1."""

    def __init__(self, row: RowType) -> None:
        self.rows: set[int] = set()
        self._row_nbytes = row.nbytes

    def see(self, offset: int, data: memoryview) -> None:
        """Looks at a piece of the file."""
        places = np.flatnonzero(np.frombuffer(data, np.uint8) > 1) + (offset - HEADER_NBYTES)
        self.rows.update((places[places >= 0] // self._row_nbytes).tolist())


def damaged_rows(path: Path, nbytes: int, sums: Sums) -> NDArray[np.bool_]:
    """Returns of which sums the row does not have the crc32, or is not there."""
    damaged = np.ones(len(sums.rows), bool)
    if not os.path.lexists(path):
        return damaged
    at = 0
    with io.BufferedReader(open_regular(path)[0]) as file:
        while at < len(damaged):
            row = int(sums.rows[at])
            file.seek(HEADER_NBYTES + row * nbytes)
            data = file.read(nbytes)
            found = crc32(data) if len(data) == nbytes else None
            while at < len(damaged) and sums.rows[at] == row:
                damaged[at] = found is None or sums.crc32s[at] != found
                at += 1
    return damaged
