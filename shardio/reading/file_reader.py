"""Reads samples by pread: with as many requests under way as there are threads, past the page cache if need be.

Reads that the storage fails are retried for a second; then the error names what could not be read.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.format.layout import HEADER_NBYTES
from shardio.format.manifest import FileEntry
from shardio.format.opening import check_not_cut, open_checked
from shardio.order.windows import Windows
from shardio.reading.layout import SplitLayout
from shardio.reading.reader import CountingReader
from shardio.reading.spans import Span, behind, distinct, pieces, requests, sector_of, stretches
from shardio.system.direct import aligned_empty, set_direct
from shardio.system.kernels import _rowread
from shardio.system.openfiles import OpenFiles, most_open
from shardio.system.opening import OpenFile, naming
from shardio.system.retry import TRANSIENT, Attempts, reading_failed

# One request. Longer ones are no faster, and keep a thread from noticing that the batch is not wanted any more.
_REQUEST_NBYTES = 4 << 20
_MOST_BUFFERS = 1024  # IOV_MAX
# Memory that a thread keeps, for samples that O_DIRECT cannot put where they belong.
_DETOUR_NBYTES = 1 << 20
# So many requests keep a local disk or a server busy; their threads wait and need no core.
_FILE_THREADS = 8

# Descriptors that are wanting now may be there soon.
_TRANSIENT = TRANSIENT | {errno.EMFILE, errno.ENFILE}


def _open(layout: SplitLayout, entries: Sequence[FileEntry], direct: bool, number: int) -> OpenFile:
    """Opens a file of the split. (No method of the reader, which would then be part of a cycle with its files.)"""
    entry = entries[number]
    path = layout.path_of(entry)
    file = open_checked(path, entry, layout.sample_shape)
    # Labels are few bytes, and read again in every epoch: through the page cache.
    if direct and entry is not layout.content.index:
        with naming(path):
            set_direct(file.fileno())
    elif hasattr(os, "posix_fadvise"):
        # The kernel shall read what is asked for and nothing around it.
        with contextlib.suppress(OSError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
    return file


class FileReader(CountingReader):
    """Reads samples by pread. With `alignment` past the page cache, as `direct_alignment` says; with `drop_behind`
    through the page cache, but what was read does not stay there, so that what other processes keep does.

    Samples of a request that lie side by side are read in one go. An error that may pass is retried for a second.
    Requests are under way all the time, so that nothing need be announced.
    """

    num_threads = _FILE_THREADS

    def __init__(self, layout: SplitLayout, *, alignment: int | None = None, drop_behind: bool = False) -> None:
        super().__init__()
        self.name = "pread" if alignment is None else "direct"
        self._layout = layout
        self._alignment = alignment or 1
        self._drop_behind = drop_behind and alignment is None and hasattr(os, "posix_fadvise")
        self._row_nbytes = layout.row_nbytes
        self._lands = True  # what O_DIRECT reads, in the caller's memory
        self._thread = threading.local()
        self._entries: list[FileEntry] = [*layout.content.shards, layout.content.index]
        self._index_number = len(self._entries) - 1
        open_file = partial(_open, layout, self._entries, alignment is not None)
        self._files = OpenFiles(open_file, min(len(self._entries), most_open()))
        self._row_dtype = layout.content.index.dtype

    def column_of(self, name: str, indices: NDArray[np.int64]) -> NDArray[Any]:
        """Reads the samples' rows of the index, so that opening costs the same for any number of samples."""
        fields = self._row_dtype.fields
        assert fields is not None
        cell_dtype, start = fields[name][:2]
        column = np.empty(len(indices), cell_dtype)
        cells = column.view(np.uint8).reshape(len(column), column.itemsize)
        offsets = HEADER_NBYTES + np.asarray(indices, np.int64) * self._row_dtype.itemsize + start
        done = 0
        if _rowread is not None:
            file = self._files.get(self._index_number)
            places = np.arange(len(column)) * column.itemsize
            done = _rowread.read_rows(file.fileno(), offsets, places, column.itemsize, cells, False)
            del file
        for cell, offset in zip(cells[done:], offsets[done:].tolist(), strict=True):
            self._fill(self._index_number, [cell], offset, len(cell))
        return column

    def read(self, indices: NDArray[np.int64], out: NDArray[np.uint8], windows: Windows | None = None) -> None:
        indices = self._layout.check_request(indices, out, windows)
        if not len(indices):
            return
        if windows is not None:
            self._read_windows(indices, out, windows)
            return
        chosen, again = distinct(indices)
        self._read_whole(indices[chosen], chosen, out)
        if again is not None:
            to, first = again
            rows = out.reshape(len(indices), -1)
            rows[to] = rows[first]

    def _read_whole(self, indices: NDArray[np.int64], chosen: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        """Reads samples, in ascending order, into the rows `chosen` of `out`."""
        rows = out.reshape(len(out), -1)
        shards, offsets = self._layout.locate(indices)
        detour = bool(self._row_nbytes % self._alignment or out.ctypes.data % self._alignment) or not self._lands
        most = min((_DETOUR_NBYTES if detour else _REQUEST_NBYTES) // self._row_nbytes, _MOST_BUFFERS)
        # Samples of one request touch, or share a sector.
        spans = requests(shards, offsets, self._row_nbytes, self._alignment if detour else 1, max(1, most))
        if _rowread is not None and not detour and len(spans) == len(offsets):  # no two lie side by side
            spans = self._read_apart(shards, offsets, chosen, out)
        for first, stop in spans:
            number, places = int(shards[first]), offsets[first:stop].tolist()
            run = [rows[row] for row in chosen[first:stop].tolist()]
            if not detour:
                try:
                    self._fill(number, run, places[0], len(run) * self._row_nbytes)
                    continue
                except OSError as error:
                    if error.errno != errno.EFAULT or self._alignment == 1:
                        raise
                    self._lands = False  # no disk may write to memory of this kind: some drivers' pinned memory
            self._read_detour(number, run, places)

    def _read_apart(
        self, shards: NDArray[np.int64], offsets: NDArray[np.int64], rows: NDArray[np.int64], out: NDArray[np.uint8]
    ) -> list[Span]:
        """Reads samples, whole, into rows of `out`, with one call for each file. Returns the spans of those left to be
        read, if there was an error: one sample each."""
        left: list[Span] = []
        places = rows * self._row_nbytes
        for first, stop in stretches(shards[1:] != shards[:-1]):
            file = self._files.get(int(shards[first]))
            some = slice(first, stop)
            done = _rowread.read_rows(
                file.fileno(), offsets[some], places[some], self._row_nbytes, out, self._drop_behind
            )
            del file
            self._count(done * self._row_nbytes)
            left += [(i, i + 1) for i in range(first + done, stop)]
        return left

    def _read_windows(self, indices: NDArray[np.int64], out: NDArray[np.uint8], windows: Windows) -> None:
        """Reads the lines of each sample that its window crosses, no others, and copies the window out of them."""
        _, width, channels = self._layout.sample_shape
        height, stride = out.shape[1], width * channels
        shards, starts = self._layout.locate(indices)
        for i in np.lexsort((starts, shards)).tolist():
            start = int(starts[i] + windows.tops[i] * stride)
            sectors = sector_of(start, self._alignment)
            wanted = start - sectors + height * stride
            buffer = self._detour_buffer(wanted)
            self._fill(int(shards[i]), [buffer], sectors, wanted, start)
            lines = buffer[start - sectors : wanted].reshape(height, width, channels)
            left = int(windows.lefts[i])
            np.copyto(out[i], lines[:, left : left + out.shape[2]])

    def _read_detour(self, number: int, rows: Sequence[NDArray[np.uint8]], offsets: Sequence[int]) -> None:
        """Reads whole sectors around the rows, piece by piece, and copies the rows out of them."""
        buffer = self._detour_buffer()
        for piece, stop, length in pieces(offsets[0], offsets[-1] + self._row_nbytes, self._alignment, len(buffer)):
            self._fill(number, [buffer[:length]], piece, stop - piece, max(offsets[0], piece))
            for row, offset in zip(rows, offsets, strict=True):
                low, high = max(offset, piece), min(offset + self._row_nbytes, stop)
                if low < high:
                    row[low - offset : high - offset] = buffer[low - piece : high - piece]

    def _detour_buffer(self, least: int = _DETOUR_NBYTES) -> NDArray[np.uint8]:
        """Returns this thread's buffer, or its first part: at least so many bytes, a multiple of the alignment."""
        nbytes = sector_of(least + self._alignment - 1, self._alignment)
        buffer: NDArray[np.uint8] | None = getattr(self._thread, "buffer", None)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._thread.buffer = aligned_empty((max(nbytes, _DETOUR_NBYTES),))
        return buffer[:nbytes]

    def _fill(
        self, number: int, buffers: Sequence[NDArray[np.uint8]], offset: int, wanted: int, asked_for: int = 0
    ) -> None:
        """Fills the first `wanted` bytes of the buffers from file `number`, from `offset` on, or raises.

        Offset, buffers and their lengths are aligned. More may be read than is wanted, up to what the buffers hold;
        the bytes that the caller needs begin at `asked_for` at the earliest.
        """
        attempts: Attempts | None = None  # made when storage fails, which is seldom
        done = 0
        while done < wanted:
            try:
                done += self._fill_some(number, buffers, offset, wanted, done)
            except OSError as error:
                attempts = attempts or Attempts()
                if error.errno == errno.ESTALE:
                    self._files.forget(number)
                elif error.errno in (errno.EMFILE, errno.ENFILE):
                    self._files.forget_all()
                if not attempts.again(error.errno in _TRANSIENT):
                    raise self._explained(error, number, max(offset + done, asked_for), attempts.failed) from None
                self._count(retries=1)

    def _fill_some(self, number: int, buffers: Sequence[NDArray[np.uint8]], offset: int, wanted: int, done: int) -> int:
        """Makes one request for what comes after the first `done` bytes. Returns how many more bytes are done."""
        file = self._files.get(number)
        try:
            count = os.preadv(file.fileno(), behind(buffers, done), offset + done)
            self._count(count)
            if done + count < wanted:
                # If the file was cut, waiting would not help.
                entry = self._entries[number]
                check_not_cut(self._layout.path_of(entry), entry, os.fstat(file.fileno()).st_size)
                count -= count % self._alignment
                if not count:
                    raise OSError(errno.EIO, f"only {done} of {wanted} bytes came")
            if self._drop_behind:
                _drop(file.fileno(), offset + done, count)
            return count
        finally:
            del file  # or a caller that keeps an error would keep the file open

    def _explained(self, error: OSError, number: int, offset: int, attempts: int) -> OSError:
        if number == self._index_number:
            row, at = divmod(offset - HEADER_NBYTES, self._row_dtype.itemsize)
            fields = (self._row_dtype.fields or {}).items()
            name = next(name for name, (kind, start, *_) in fields if start <= at < start + kind.itemsize)
            what = f"the {name} of sample {row}"
        else:
            position = max(0, offset - HEADER_NBYTES) // self._row_nbytes
            what = f"sample {self._layout.first_samples[number] + position}"
        hint = ""
        if error.errno == errno.EINVAL and self._alignment > 1:
            hint = 'the filesystem refuses O_DIRECT here: use io="pread"'
        elif error.errno == errno.ESTALE:
            hint = "the file was replaced or removed on the server: put the set back, or make a new loader"
        return reading_failed(error, self._layout.path_of(self._entries[number]), what, offset, attempts, hint)

    def close(self) -> None:
        self._files.close()


def _drop(descriptor: int, offset: int, nbytes: int) -> None:
    """Lets go of the pages that hold these bytes, whole ones, as the kernel ignores parts."""
    page = mmap.PAGESIZE
    start = sector_of(offset, page)
    with contextlib.suppress(OSError):
        os.posix_fadvise(descriptor, start, sector_of(offset + nbytes + page - 1, page) - start, os.POSIX_FADV_DONTNEED)
