"""A table whose files are mapped into memory. Rows are copied out of the mapping; failed reads are retried."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.format.entries import FileEntry
from shardio.format.layout import SampleShape
from shardio.format.opening import check_not_cut, open_sized
from shardio.kernels.rowcopy import Places, Windows, copy_rows, copy_spans, copy_windows
from shardio.reading.layout import StoredTable, as_rows
from shardio.reading.mapping import RowMapping
from shardio.system.opening import open_regular
from shardio.system.pour import Attempts, reading_failed


class MappedTable(RowMapping):
    """The rows of `table`, whose files are in `folder`. Call `map_file` for each file before reading rows. `order` is
    the mapped order of the table; None if the table has no order. Any number of threads may read."""

    def __init__(self, table: StoredTable, folder: str, order: MappedTable | None = None) -> None:
        self.table = table
        self.folder = folder
        self.order = order
        try:
            super().__init__(table.num_rows, table.row_nbytes)
        except OSError:
            for entry in table.files:  # is it the manifest that claims what no file has?
                open_sized(self.path_of(entry), entry).close()
            raise
        # Row i of the table, in file k, is row i + shifts[k] of the mapping.
        self._shifts = np.array(self.first_rows) - table.starts[:-1]

    def path_of(self, entry: FileEntry) -> str:
        return f"{self.folder}/{entry.file}"

    @property
    def file_rows(self) -> tuple[NDArray[np.uint8], ...]:
        """Read-only views of the files' rows: uint8 (rows in the file, bytes per row)."""
        spans = zip(self.table.starts[:-1] + self._shifts, self.table.starts[1:] + self._shifts, strict=True)
        return tuple(self.rows[first:last] for first, last in spans)

    def stored(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the number of each sample's row in the table, int64. Raises FormatError if the order names a row that
        does not exist, and the errors of `copy`."""
        if self.order is None:
            return indices
        found = np.empty(len(indices), np.int64)
        self.order.copy(indices, as_rows(found))
        check_stored(found, indices, self.table, self.folder)
        return found

    def numbers(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the number of each sample's row in the matrix `rows`, int64. Raises the errors of `stored`."""
        stored = self.stored(indices)
        if len(self.table.files) == 1:
            return stored
        return stored + self._shifts[np.searchsorted(self.table.starts, stored, side="right") - 1]

    def lent(self, indices: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Returns the same as `numbers`, for a kernel that reads these samples in `rows` itself. Returns None if the
        table does not have all of them yet, so they must be copied. Raises the errors of `stored`."""
        return self.numbers(indices)

    def copy(self, indices: NDArray[np.int64], out: NDArray[np.uint8], lines: Places = None) -> None:
        """Copies the row of sample indices[i] into out[i], or with `lines` into out[lines[i]]. The samples must exist.

        `out` is uint8 (n, row_nbytes). A failed read is retried for a second. Then `copy` raises an OSError that names
        the sample, or FormatError if the file was truncated.
        """
        numbers = self.numbers(indices)

        def copy(done: int) -> int:
            if lines is None:
                return copy_rows(self.rows, numbers[done:], out[done:])
            return copy_rows(self.rows, numbers[done:], out, lines=lines[done:])

        self._insist(copy, indices)

    def copy_cells(self, indices: NDArray[np.int64], start: int, cells: NDArray[np.uint8], name: str) -> None:
        """Copies a part of each sample's row, from byte `start` on, into `cells`, uint8 (n, nbytes). See `copy`. `name`
        names the part in errors."""
        places = self.numbers(indices) * self.table.row_nbytes + start
        memory = self.rows.reshape(-1)
        self._insist(lambda done: copy_spans(memory, places[done:], cells[done:]), indices, name)

    def copy_windows(
        self, indices: NDArray[np.int64], out: NDArray[np.uint8], windows: Windows, shape: SampleShape
    ) -> None:
        """Copies a window of each sample's image into `out`, uint8 (n,), one after the other. The samples must exist.
        `shape` is (height, width, channels) of an image. Raises the errors of `copy`."""
        numbers = self.numbers(indices)
        images = self.rows.reshape(-1, *shape)
        ends = (windows.num_pixels * shape[2]).cumsum()

        def copy(done: int) -> int:
            return copy_windows(images, numbers[done:], windows[done:], out[ends[done - 1] if done else 0 :])

        self._insist(copy, indices)

    def locate_one(self, sample: int) -> tuple[FileEntry, int]:
        """Returns the entry of the file that holds a sample's row, and the offset of the row in the file."""
        files, offsets = self.table.locate(self.stored(np.array([sample])))
        return self.table.files[int(files[0])], int(offsets[0])

    def _insist(self, copy: Callable[[int], int], indices: NDArray[np.int64], name: str = "") -> None:
        """Copies the samples `indices`: copy(done) copies those after the first `done`, and returns how many it copied
        before the storage failed. Retries for a second, then raises the error of `_failure`, which gets `name`."""
        attempts = Attempts()
        done = copy(0)
        while done < len(indices):
            failure = self._failure(int(indices[done]), name, attempts.failed + 1)
            if not attempts.again():
                raise failure
            done += copy(done)

    def _failure(self, sample: int, name: str, attempts: int) -> OSError:
        """Returns the error for a sample that could not be copied in `attempts` attempts. `name` names a part of the
        row; "" is the whole row. Raises FormatError if the file was truncated. A page that cannot be read gives no
        reason, so this reads the row from the file."""
        entry, offset = self.locate_one(sample)
        what = f"the {name} of sample {sample}" if name else self.table.what(sample)
        path = self.path_of(entry)
        file, found = open_regular(path)
        with file:
            check_not_cut(path, entry, found)
            try:
                os.pread(file.fileno(), self.table.row_nbytes, offset)
            except OSError as error:
                return reading_failed(error, path, what, offset, attempts)
        hint = "reading the file itself works: if it was replaced after the set was opened, open the set again"
        return reading_failed(OSError(errno.EIO, os.strerror(errno.EIO)), path, what, offset, attempts, hint)


def check_stored(rows: NDArray[np.int64], indices: NDArray[np.int64], table: StoredTable, folder: str) -> None:
    """Raises FormatError, which names the order's file in `folder`, unless all `rows` exist in the table. `rows` are
    the stored rows of the samples `indices`, as the table's order gives them."""
    if len(rows) and not (rows.min() >= 0 and rows.max() < len(table)):
        assert table.order is not None
        at = int(np.argmax((rows < 0) | (rows >= len(table))))
        raise FormatError(
            f"{folder}/{table.order.files[0].file}: sample {indices[at]}: expected a stored row from 0 to "
            f"{len(table) - 1}, found {rows[at]}; `shardio verify` lists all damage"
        )
