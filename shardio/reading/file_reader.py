"""Reads samples by pread, one request per thread at a time, through the page cache or past it (O_DIRECT).

Transient errors are retried for a second; then the error names the sample that could not be read.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from shardio.format.entries import FileEntry, ShardEntry
from shardio.format.layout import HEADER_NBYTES
from shardio.format.opening import check_not_cut
from shardio.kernels import rowread
from shardio.kernels.rowcopy import Places, Windows
from shardio.reading.layout import SplitLayout, StoredTable, as_rows
from shardio.reading.mapped_table import check_stored
from shardio.reading.reader import Reader
from shardio.system.opening import FolderHandle, OpenFile, OpenFiles, naming
from shardio.system.pour import TRANSIENT, Attempts, aligned_empty, reading_failed, set_direct

# One request. Longer ones are no faster, and keep a thread from noticing that the batch is not wanted any more.
_REQUEST_NBYTES = 4 << 20
_MOST_BUFFERS = 1024  # IOV_MAX
# Memory that a thread keeps, for samples that O_DIRECT cannot put where they belong.
_DETOUR_NBYTES = 1 << 20
# So many requests keep a local disk busy. A server answers each of them later, and takes more at a time. Their threads
# wait and need no core.
_DISK_THREADS, _SERVER_THREADS = 8, 32

# Descriptors that are wanting now may be there soon.
_TRANSIENT = TRANSIENT | {errno.EMFILE, errno.ENFILE}

_Span = tuple[int, int]
"""(first, stop): the samples `first` to `stop` - 1 among samples that are sorted by file and offset."""


def _open(
    layout: SplitLayout, folders: list[FolderHandle], entries: Mapping[str, FileEntry], direct: bool, name: str
) -> OpenFile:
    """Opens the file `name` of the split, whose entry is entries[name]: in folders[0], the split's open folder, or by
    its path if `folders` is empty. With `direct`, pixels and large arrays bypass the page cache. Not a method, as the
    reader would then be in a reference cycle with its files."""
    entry = entries[name]
    file = layout.open_file(entry, next(iter(folders), None))
    # Labels, orders and small arrays are few bytes, and read again in every epoch: through the page cache.
    if direct and isinstance(entry, ShardEntry) and not entry.row.is_small:
        with naming(layout.path_of(entry)):
            set_direct(file.fileno())
    elif hasattr(os, "posix_fadvise"):
        # The kernel shall read what is asked for and nothing around it.
        with contextlib.suppress(OSError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
    return file


class FileReader(Reader):
    """Reads samples by pread. Adjacent samples are read in one request; transient errors are retried for a second.

    - `alignment`: None, or to bypass the page cache, the alignment in bytes that `direct_alignment` returned
    - `drop_behind`: read through the page cache, and drop the bytes from the cache after each read
    - `remote`: the files are on a network filesystem, so more threads should read
    """

    def __init__(
        self, layout: SplitLayout, *, alignment: int | None = None, drop_behind: bool = False, remote: bool = False
    ) -> None:
        super().__init__(layout.halved)
        self.num_threads = _SERVER_THREADS if remote else _DISK_THREADS
        self.name = "pread" if alignment is None else "direct"
        self._layout = layout
        self._alignment = alignment or 1
        self._drop_behind = drop_behind and alignment is None and hasattr(os, "posix_fadvise")
        # Whether aligned rows are read into the caller's memory itself: until O_DIRECT refuses such memory.
        self._in_place = True
        self._thread = threading.local()
        files = {entry.file: entry for entry in layout.content.files}
        # The set's folder, until `close`. Without a free descriptor, files are opened by their paths, and compared.
        self._folders: list[FolderHandle] = []
        with contextlib.suppress(OSError):
            self._folders.append(FolderHandle(Path(layout.folder), follow=True))
        open_file = partial(_open, layout, self._folders, files, alignment is not None)
        # By name: a dictionary of strings runs no line of Python while it is looked into.
        self._files = OpenFiles(open_file)
        self._row_dtype = layout.content.index.dtype

    @property
    def whole_lines(self) -> int:
        if not self._layout.has_pixels:
            return 0
        height, width, channels = self._layout.sample_shape
        lines = self._alignment // math.gcd(width * channels, self._alignment)
        return lines if height % lines == 0 else 1

    def column_of(self, name: str, indices: NDArray[np.int64]) -> NDArray[Any]:
        """See `Reader.column_of`. Reads only the index rows of these samples, not the whole index."""
        fields = self._row_dtype.fields
        assert fields is not None
        dtype, start = fields[name][:2]
        return self._read_cells(self._layout.index_table, indices, dtype, start)

    def _read_cells(
        self, table: StoredTable, rows: NDArray[np.int64], dtype: DTypeLike, start: int = 0
    ) -> NDArray[Any]:
        """Returns a value of type `dtype` from each of the rows with the numbers `rows`, int64: the bytes from byte
        `start` of the row on. The table must have exactly one file."""
        values = np.empty(len(rows), dtype)
        cells = as_rows(values)
        (entry,), nbytes = table.files, cells.shape[1]
        offsets = HEADER_NBYTES + rows * table.row_nbytes + start
        file = self._files.get(entry.file)
        places = np.arange(len(cells)) * nbytes
        done = rowread.read_rows(file.fileno(), offsets, places, nbytes, cells, False)
        del file
        for cell, offset in zip(cells[done:], offsets[done:].tolist(), strict=True):
            self._fill(table, entry, [cell], offset, nbytes)
        return values

    def _stored(self, table: StoredTable, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the number of each sample's row in the table, int64. Raises FormatError if a row does not exist."""
        if table.order is None:
            return indices
        rows = self._read_cells(table.order, indices, np.int64)
        check_stored(rows, indices, table, self._layout.folder)
        return rows

    def copy(self, name: str, indices: NDArray[np.int64], out: NDArray[Any], lines: Places = None) -> None:
        if not len(indices):
            return
        table, rows = self._layout.table_of(name), as_rows(out)
        stored = self._stored(table, indices)
        lines = np.arange(len(indices)) if lines is None else lines
        if name and self._layout.array(name).row.is_small and len(table.files) == 1:
            rows[lines] = self._read_cells(table, stored, (np.uint8, (table.row_nbytes,)))
            return
        distinct, chosen = np.unique(stored, return_index=True)
        self._read_distinct(table, distinct, lines[chosen], rows)
        if len(distinct) < len(stored):
            first = chosen[np.searchsorted(distinct, stored)]
            again = np.flatnonzero(first != np.arange(len(stored)))
            rows[lines[again]] = rows[lines[first[again]]]

    def array_crc32s(self, name: str, indices: NDArray[np.int64]) -> NDArray[np.uint32]:
        table = self._layout.crc32s[name]
        return self._read_cells(table, self._stored(table, indices), np.uint32)

    def _read_distinct(
        self, table: StoredTable, stored: NDArray[np.int64], chosen: NDArray[np.int64], rows: NDArray[np.uint8]
    ) -> None:
        """Reads the row number stored[i] of the table into rows[chosen[i]]. `stored` is distinct and ascending."""
        files, offsets = table.locate(stored)
        nbytes = table.row_nbytes
        detour = bool(nbytes % self._alignment or rows.ctypes.data % self._alignment) or not self._in_place
        most = min((_DETOUR_NBYTES if detour else _REQUEST_NBYTES) // nbytes, _MOST_BUFFERS)
        # Rows of one request touch, or share a sector.
        spans = _requests(files, offsets, nbytes, self._alignment if detour else 1, max(1, most))
        if not detour and len(spans) == len(offsets):  # no two lie side by side
            spans = self._read_apart(table, files, offsets, chosen, rows)
        for first, stop in spans:
            entry, places = table.files[int(files[first])], offsets[first:stop].tolist()
            run = [rows[row] for row in chosen[first:stop].tolist()]
            if not detour:
                try:
                    self._fill(table, entry, run, places[0], len(run) * nbytes)
                    continue
                except OSError as error:
                    if error.errno != errno.EFAULT or self._alignment == 1:
                        raise
                    self._in_place = False  # no disk may write to memory of this kind: some drivers' pinned memory
            self._read_detour(table, entry, run, places)

    def _read_apart(
        self,
        table: StoredTable,
        files: NDArray[np.int64],
        offsets: NDArray[np.int64],
        rows: NDArray[np.int64],
        out: NDArray[np.uint8],
    ) -> list[_Span]:
        """Reads row i, at offsets[i] of file number files[i] of the table, into out[rows[i]], with one call per file.
        After an error, does not read the other rows of the file. Returns a span (i, i + 1) for each row i not read."""
        left: list[_Span] = []
        nbytes = table.row_nbytes
        places = rows * nbytes
        for first, stop in _stretches(files[1:] != files[:-1]):
            file = self._files.get(table.files[int(files[first])].file)
            some = slice(first, stop)
            done = rowread.read_rows(file.fileno(), offsets[some], places[some], nbytes, out, self._drop_behind)
            del file
            self._count(done * nbytes)
            left += [(i, i + 1) for i in range(first + done, stop)]
        return left

    def copy_windows(self, indices: NDArray[np.int64], windows: Windows, out: NDArray[np.uint8]) -> None:
        """See `Reader.copy_windows`. Reads only the lines of each image that its window crosses."""
        _, width, channels = self._layout.sample_shape
        stride, table = width * channels, self._layout.pixels
        files, starts = table.locate(self._stored(table, indices))
        order = np.lexsort((starts, files))
        files = files[order]
        nbytes = windows.widths * channels
        places = (windows.heights * nbytes).cumsum() - windows.heights * nbytes
        starts = starts + windows.tops * stride + windows.lefts * channels
        numbers = np.stack([starts, windows.heights, nbytes, places], axis=1)[order]
        most = int(windows.heights.max()) * stride + 2 * self._alignment
        for first, stop in _stretches(files[1:] != files[:-1]):
            entry, done = table.files[int(files[first])], first
            file = self._files.get(entry.file)
            how = stride, self._alignment, self._detour_buffer(most), out, self._drop_behind
            done += rowread.read_windows(file.fileno(), numbers[first:stop], *how)
            del file
            some = numbers[first:done]
            self._count(int(((some[:, 1] - 1) * stride + some[:, 2]).sum()))
            for start, lines, line_nbytes, place in numbers[done:stop].tolist():
                window = out[place : place + lines * line_nbytes].reshape(lines, line_nbytes)
                self._read_detour(table, entry, window, range(start, start + lines * stride, stride))

    def _read_detour(
        self,
        table: StoredTable,
        entry: FileEntry,
        rows: Sequence[NDArray[np.uint8]] | NDArray[np.uint8],
        offsets: Sequence[int],
    ) -> None:
        """Reads whole sectors of the file `entry` into this thread's buffer, piece by piece, and copies the bytes from
        byte offsets[i] on into rows[i]. The rows have one length. `offsets` are ascending."""
        buffer, nbytes = self._detour_buffer(), len(rows[0])
        for piece in range(_sector_of(offsets[0], self._alignment), offsets[-1] + nbytes, len(buffer)):
            stop = min(piece + len(buffer), offsets[-1] + nbytes)
            length = _sector_of(stop - piece + self._alignment - 1, self._alignment)
            self._fill(table, entry, [buffer[:length]], piece, stop - piece, max(offsets[0], piece))
            for row, offset in zip(rows, offsets, strict=True):
                low, high = max(offset, piece), min(offset + nbytes, stop)
                if low < high:
                    row[low - offset : high - offset] = buffer[low - piece : high - piece]

    def _detour_buffer(self, least: int = _DETOUR_NBYTES) -> NDArray[np.uint8]:
        """Returns a buffer of this thread, uint8: `least` bytes, rounded up to a multiple of the alignment."""
        nbytes = _sector_of(least + self._alignment - 1, self._alignment)
        buffer: NDArray[np.uint8] | None = getattr(self._thread, "buffer", None)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._thread.buffer = aligned_empty((max(nbytes, _DETOUR_NBYTES),))
        return buffer[:nbytes]

    def _fill(
        self,
        table: StoredTable,
        entry: FileEntry,
        buffers: Sequence[NDArray[np.uint8]],
        offset: int,
        wanted: int,
        asked_for: int = 0,
    ) -> None:
        """Reads bytes of the file `entry`, from byte `offset` on, into `buffers`, one after the other: at least
        `wanted` bytes, and at most as many as the buffers hold. The offset, the buffers and their lengths must be
        aligned. Transient errors are retried for a second. Then the error names the row of `table` at the byte that
        failed, or at byte `asked_for` if that comes later."""
        attempts: Attempts | None = None  # made when storage fails, which is seldom
        done = 0
        while done < wanted:
            try:
                done += self._fill_some(entry, buffers, offset, wanted, done)
            except OSError as error:
                attempts = attempts or Attempts()
                if error.errno == errno.ESTALE:
                    self._files.forget(entry.file)
                elif error.errno in (errno.EMFILE, errno.ENFILE):
                    self._files.forget_all()
                    self._folders.clear()
                if not attempts.again(error.errno in _TRANSIENT):
                    raise self._explained(error, table, entry, max(offset + done, asked_for), attempts.failed) from None
                self._count(retries=1)

    def _fill_some(
        self, entry: FileEntry, buffers: Sequence[NDArray[np.uint8]], offset: int, wanted: int, done: int
    ) -> int:
        """Makes one request for `_fill`, for the bytes after the first `done` bytes. Returns how many bytes were read,
        in whole sectors. Raises FormatError if the file was truncated."""
        file = self._files.get(entry.file)
        try:
            count = os.preadv(file.fileno(), _behind(buffers, done), offset + done)
            self._count(count)
            if done + count < wanted:
                # If the file was cut, waiting would not help.
                check_not_cut(self._layout.path_of(entry), entry, os.fstat(file.fileno()).st_size)
                count -= count % self._alignment
                if not count:
                    raise OSError(errno.EIO, f"only {done} of {wanted} bytes came")
            if self._drop_behind:
                # Whole pages, as the kernel ignores parts of pages.
                start = _sector_of(offset + done, mmap.PAGESIZE)
                stop = _sector_of(offset + done + count + mmap.PAGESIZE - 1, mmap.PAGESIZE)
                with contextlib.suppress(OSError):
                    os.posix_fadvise(file.fileno(), start, stop - start, os.POSIX_FADV_DONTNEED)
            return count
        finally:
            del file  # or a caller that keeps an error would keep the file open

    def _explained(self, error: OSError, table: StoredTable, entry: FileEntry, offset: int, attempts: int) -> OSError:
        row, at = divmod(max(0, offset - HEADER_NBYTES), table.row_nbytes)
        row += int(table.starts[table.files.index(entry)])
        if table is self._layout.index_table:
            fields = (self._row_dtype.fields or {}).items()
            name = next(name for name, (kind, start, *_) in fields if start <= at < start + kind.itemsize)
            what = f"the {name} of sample {row}"
        elif table.order is None:
            what = table.what(row)
        else:
            what = f"the {table.name or 'sample'} in stored row {row}"
        hint = ""
        if error.errno == errno.EINVAL and self._alignment > 1:
            hint = 'the filesystem refuses O_DIRECT here: use io="pread"'
        elif error.errno == errno.ESTALE:
            hint = "the file was replaced or removed on the server: put the set back, or make a new loader"
        return reading_failed(error, self._layout.path_of(entry), what, offset, attempts, hint)

    def close(self) -> None:
        self._files.close()
        self._folders.clear()


def _stretches(apart: NDArray[np.bool_]) -> Iterator[_Span]:
    """Returns consecutive spans of all samples: a new span begins after each sample i for which apart[i] is true."""
    return pairwise([0, *(np.flatnonzero(apart) + 1).tolist(), len(apart) + 1])


def _requests(shards: NDArray[np.int64], offsets: NDArray[np.int64], nbytes: int, grain: int, most: int) -> list[_Span]:
    """Returns the spans of samples that are read in one request each: at most `most` samples of one file, with gaps of
    less than `grain` bytes. Sample i has `nbytes` bytes, from offsets[i] on, in file number shards[i]."""
    apart = (offsets[1:] - (offsets[:-1] + nbytes) >= grain) | (shards[1:] != shards[:-1])
    cuts = [cut for first, stop in _stretches(apart) for cut in range(first, stop, most)]
    return list(pairwise([*cuts, len(offsets)]))


def _sector_of(offset: int, alignment: int) -> int:
    """Returns the offset of the sector that holds the byte `offset`. Sectors have `alignment` bytes."""
    return offset // alignment * alignment


def _behind(buffers: Sequence[NDArray[np.uint8]], done: int) -> list[memoryview]:
    """Returns views of the bytes of the buffers that come after the first `done` bytes."""
    rests = []
    for buffer in buffers:
        if done < len(buffer):
            rests.append(buffer[done:].data)
        done = max(0, done - len(buffer))
    return rests
