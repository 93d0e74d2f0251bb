"""Where rows are stored: arithmetic on the files of a split that hold one row for each sample; no I/O."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardio.format.entries import FileEntry
from shardio.format.layout import HEADER_NBYTES


class Table:
    """Rows of `row_nbytes` bytes in `files`, of which each holds so many of them as `num_rows` says behind its header.

    They are the pixels of a split, an array of it, or numbers of its samples; `name` is the array's or, with the word
    that stands before it in a message, what else they are. With `order`, the table of the split's order that holds for
    them, sample i is in the row that this one tells; else in row i.
    """

    def __init__(
        self,
        name: str,
        files: Sequence[FileEntry],
        num_rows: Sequence[int],
        row_nbytes: int,
        order: Table | None = None,
    ) -> None:
        self.name = name
        self.files = tuple(files)
        self.num_rows = tuple(num_rows)
        self.row_nbytes = row_nbytes
        self.order = order
        self.starts = np.cumsum([0, *num_rows])
        """Row i is in the file k with starts[k] <= i < starts[k + 1]."""

    def __len__(self) -> int:
        return int(self.starts[-1])

    def locate(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the files of rows that exist, by number, and the rows' first bytes in these files."""
        files: NDArray[np.int64] = np.searchsorted(self.starts, rows, side="right") - 1
        return files, HEADER_NBYTES + (rows - self.starts[files]) * self.row_nbytes

    def what(self, sample: int) -> str:
        """Returns the row of a sample in words, for a message."""
        return f"the {self.name} of sample {sample}" if self.name else f"sample {sample}"
