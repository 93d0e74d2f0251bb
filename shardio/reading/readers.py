"""Ways of getting samples from storage into memory: through the mapping, or by reads that can fail.

A reader of a mapping is the fastest where the samples are in the page cache, and the simplest. But pages are fetched
one after the other unless they are announced, and a thread that waits for one cannot be told to give up. `FileReader`
asks for whole samples by pread, with as many requests under way as there are threads, past the page cache if need be.
With either, what storage does not give is asked for again, and then raised with the name of what could not be read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.format.layout import HEADER_NBYTES, sample_nbytes, shard_header
from shardio.format.manifest import FileEntry
from shardio.format.opening import check_not_cut, open_checked
from shardio.order.windows import Windows
from shardio.reading.shardset import ShardSet
from shardio.system.direct import aligned_empty
from shardio.system.files import OpenFile, naming, open_regular
from shardio.system.kernels import _rowread
from shardio.system.openfiles import OpenFiles, most_open
from shardio.system.retry import RETRY_SECONDS, TRANSIENT, reading_failed

# What O_DIRECT may demand of offsets, lengths and memory: a sector as most disks show it, a page or larger sector.
_ALIGNMENTS = (512, 4096)
# One request. Longer ones are no faster, and keep a thread from noticing that nobody wants the batch any more.
_REQUEST_NBYTES = 4 << 20
_MOST_BUFFERS = 1024  # IOV_MAX
# Memory that a thread keeps, for samples that O_DIRECT cannot put where they belong.
_DETOUR_NBYTES = 1 << 20
# Of the samples that a thread copies at a time, so many are looked for in the page cache if they were announced.
_MOST_LOOKED_FOR = 8
# So many requests keep a local disk or a server busy; their threads wait and need no core.
_FILE_THREADS = 8

# Descriptors that are wanting now may be there soon.
_TRANSIENT = TRANSIENT | {errno.EMFILE, errno.ENFILE}


class ReadCounts(NamedTuple):
    """Since the reader was made: bytes that it read, requests that it made again; and of some of the samples that were
    announced, how many were looked for in the page cache when they were due, and found there."""

    nbytes: int
    retries: int
    looked_for: int
    found: int


class Reader(Protocol):
    """Reads samples of one set. Thread safe."""

    num_threads: int
    """Threads that should read at the same time, at least."""

    @property
    def name(self) -> str:
        """What `stats()` calls it."""

    def labels_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The labels of samples that exist. OSError if the storage fails."""

    def column_of(self, name: str, indices: NDArray[np.int64]) -> NDArray[Any]:
        """A column of the index for samples that exist: a copy. OSError if the storage fails."""

    def read(self, indices: NDArray[np.int64], out: NDArray[np.uint8], windows: Windows | None = None) -> None:
        """Copy the samples `indices`, or a window of each, as ShardSet.gather does. OSError if the storage fails."""

    def reads_ahead(self) -> bool:
        """Whether `will_read` is worth its cost, as things are now."""

    def will_read(self, indices: NDArray[np.int64], windows: Windows | None = None) -> None:
        """These samples, or a window of each, will be read soon. Never raises."""

    def counts(self) -> ReadCounts: ...

    def close(self) -> None:
        """Give back descriptors. Reads under way finish; others fail. Idempotent."""


class Tally:
    """Sums that many threads add to without a lock: each to its own."""

    def __init__(self) -> None:
        self._cells: dict[int, list[int]] = {}

    def add(self, nbytes: int = 0, retries: int = 0, looked_for: int = 0, found: int = 0) -> None:
        cell = self._cells.setdefault(threading.get_ident(), [0] * len(ReadCounts._fields))
        for i, number in enumerate((nbytes, retries, looked_for, found)):
            cell[i] += number

    def counts(self) -> ReadCounts:
        return ReadCounts(*(sum(column) for column in zip([0] * 4, *list(self._cells.values()), strict=True)))


class MappedReader:
    """Copies from the mapping, and announces to the kernel what will be copied.

    Without an announcement each page that is not in the page cache is a request of its own, for which a thread waits;
    and as the kernel by default reads around each, it would read many times what is wanted.
    """

    name = "mmap"
    num_threads = 1

    def __init__(self, shards: ShardSet) -> None:
        self._shards = shards
        self._tally = Tally()
        self._announced = False
        self.labels_of = shards.labels_of
        self.column_of = shards.column_of
        shards.expect_random_reads()

    def read(self, indices: NDArray[np.int64], out: NDArray[np.uint8], windows: Windows | None = None) -> None:
        if self._announced and len(indices):
            self._look_for(indices)
        self._shards.gather(indices, out, windows)
        self._tally.add(out.nbytes)

    def _look_for(self, indices: NDArray[np.int64]) -> None:
        """Was it worth it to announce them? A few samples tell."""
        count = min(_MOST_LOOKED_FOR, len(indices))
        with contextlib.suppress(IndexError):  # which `gather` will raise
            if (share := self._shards.resident_share(indices, count)) is not None:
                self._tally.add(looked_for=count, found=round(share * count))

    def reads_ahead(self) -> bool:
        # Of a resident set announcements are pure cost. Where the kernel does not tell,
        # they are worth it.
        self._announced = self._shards.resident_share() != 1.0
        return self._announced

    def will_read(self, indices: NDArray[np.int64], windows: Windows | None = None) -> None:
        with contextlib.suppress(Exception):
            self._shards.will_read(indices, windows)

    def counts(self) -> ReadCounts:
        return self._tally.counts()

    def close(self) -> None:
        """Nothing to give back: the mapping belongs to the set."""


class _File(NamedTuple):
    path: str
    entry: FileEntry
    header: bytes
    direct: bool


def _open_one(files: Sequence[_File], number: int) -> OpenFile:
    path, entry, header, direct = files[number]
    file = open_checked(path, entry, header)
    if direct:
        with naming(path):
            set_direct(file.fileno())
    elif hasattr(os, "posix_fadvise"):
        # The kernel shall read what is asked for and nothing around it.
        with contextlib.suppress(OSError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
    return file


class FileReader:
    """Reads samples by pread. With `direct` past the page cache, as `alignment` demands it (see `direct_alignment`);
    with `drop_behind` through the page cache, but what was read does not stay there, so that what others keep does.

    Samples of a request that lie side by side are read in one go. An error that may pass is retried for a second.
    """

    num_threads = _FILE_THREADS

    def __init__(self, shards: ShardSet, *, alignment: int | None = None, drop_behind: bool = False) -> None:
        self.name = "pread" if alignment is None else "direct"
        self._shards = shards
        self._alignment = alignment or 1
        self._drop_behind = drop_behind and alignment is None and hasattr(os, "posix_fadvise")
        self._row_nbytes = sample_nbytes(shards.sample_shape)
        self._lands = True  # what O_DIRECT reads, in the caller's memory
        self._tally = Tally()
        self._thread = threading.local()
        split = shards.manifest.splits[shards.split]
        direct = alignment is not None
        files = [
            _File(shards.path_of(shard), shard, shard_header(shard.num_samples, shards.sample_shape), direct)
            for shard in split.shards
        ]
        self._index_number = len(files)
        # Labels are few bytes, and read again in every epoch: through the page cache.
        files.append(_File(shards.path_of(split.index), split.index, split.index_header, False))
        self._entries = files
        self._files = OpenFiles(partial(_open_one, files), min(len(files), most_open()))
        self._index_stride = split.index.dtype.itemsize
        # Of a row of the index: each field's type, and its first byte.
        self._fields = {name: (field[0], field[1]) for name, field in (split.index.dtype.fields or {}).items()}

    def labels_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.column_of("label", indices)

    def column_of(self, name: str, indices: NDArray[np.int64]) -> NDArray[Any]:
        """Read by the samples' rows of the index, so that opening costs the same for any number of samples."""
        cell_dtype, start = self._fields[name]
        column = np.empty(len(indices), cell_dtype)
        cells = column.view(np.uint8).reshape(len(column), column.itemsize)
        offsets = HEADER_NBYTES + np.asarray(indices, np.int64) * self._index_stride + start
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
        indices = self._shards.check_request(indices, out, windows)
        if not len(indices):
            return
        if windows is not None:
            self._read_windows(indices, out, windows)
            return
        rows = out.reshape(len(indices), -1)
        order = np.argsort(indices, kind="stable")  # which is also the order of files and offsets
        ascending = indices[order]
        again = np.zeros(len(order), bool)
        np.equal(ascending[1:], ascending[:-1], out=again[1:])
        chosen = order[~again]
        shards, offsets = self._shards.locate(indices[chosen])
        detour = bool(self._row_nbytes % self._alignment or out.ctypes.data % self._alignment) or not self._lands
        spans = list(pairwise(self._cuts(shards, offsets, detour)))
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
        if again.any():
            # Each place of a sample that was asked for more than once, from its first place.
            firsts = np.maximum.accumulate(np.where(again, 0, np.arange(len(order))))
            rows[order[again]] = rows[order[firsts[again]]]

    def _read_apart(
        self, shards: NDArray[np.int64], offsets: NDArray[np.int64], rows: NDArray[np.int64], out: NDArray[np.uint8]
    ) -> list[tuple[int, int]]:
        """Read samples, whole, into rows of `out`, with one call for each file. The spans of those left to be read, if
        there was an error: one sample each."""
        left: list[tuple[int, int]] = []
        places = rows * self._row_nbytes
        bounds = [0, *(np.flatnonzero(np.diff(shards)) + 1).tolist(), len(shards)]
        for first, stop in pairwise(bounds):
            file = self._files.get(int(shards[first]))
            some = slice(first, stop)
            done = _rowread.read_rows(
                file.fileno(), offsets[some], places[some], self._row_nbytes, out, self._drop_behind
            )
            del file
            self._tally.add(done * self._row_nbytes)
            left += [(i, i + 1) for i in range(first + done, stop)]
        return left

    def _read_windows(self, indices: NDArray[np.int64], out: NDArray[np.uint8], windows: Windows) -> None:
        """Of each sample read the lines that its window crosses, no others, and copy the window out of them."""
        _, width, channels = self._shards.sample_shape
        height, stride = out.shape[1], width * channels
        shards, starts = self._shards.locate(indices)
        for i in np.lexsort((starts, shards)).tolist():
            start = int(starts[i] + windows.tops[i] * stride)
            sectors = start // self._alignment * self._alignment
            wanted = start - sectors + height * stride
            buffer = self._detour_buffer(wanted)
            self._fill(int(shards[i]), [buffer], sectors, wanted, start)
            lines = buffer[start - sectors : wanted].reshape(height, width, channels)
            left = int(windows.lefts[i])
            np.copyto(out[i], lines[:, left : left + out.shape[2]])

    def _cuts(self, shards: NDArray[np.int64], offsets: NDArray[np.int64], detour: bool) -> list[int]:
        """Where one request ends and the next begins: samples of one request touch, or share a sector."""
        gaps = offsets[1:] - (offsets[:-1] + self._row_nbytes)
        grain = self._alignment if detour else 1
        apart = (gaps >= grain) | (shards[1:] != shards[:-1])
        cuts = [0, *(np.flatnonzero(apart) + 1).tolist(), len(offsets)]
        most = max(1, min((_DETOUR_NBYTES if detour else _REQUEST_NBYTES) // self._row_nbytes, _MOST_BUFFERS))
        return [cut for a, b in pairwise(cuts) for cut in range(a, b, most)] + [len(offsets)]

    def _read_detour(self, number: int, rows: Sequence[NDArray[np.uint8]], offsets: Sequence[int]) -> None:
        """Read whole sectors around the rows, piece by piece, and copy the rows out of them."""
        end = offsets[-1] + self._row_nbytes
        buffer = self._detour_buffer()
        for piece in range(offsets[0] // self._alignment * self._alignment, end, len(buffer)):
            stop = min(piece + len(buffer), end)
            length = -(-(stop - piece) // self._alignment) * self._alignment
            self._fill(number, [buffer[:length]], piece, stop - piece, max(offsets[0], piece))
            for row, offset in zip(rows, offsets, strict=True):
                low, high = max(offset, piece), min(offset + self._row_nbytes, stop)
                if low < high:
                    row[low - offset : high - offset] = buffer[low - piece : high - piece]

    def _detour_buffer(self, least: int = _DETOUR_NBYTES) -> NDArray[np.uint8]:
        """This thread's buffer, or its first part: of at least so many bytes, a multiple of the alignment."""
        nbytes = -(-least // self._alignment) * self._alignment
        buffer: NDArray[np.uint8] | None = getattr(self._thread, "buffer", None)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._thread.buffer = aligned_empty((max(nbytes, _DETOUR_NBYTES),))
        return buffer[:nbytes]

    def _fill(
        self, number: int, buffers: Sequence[NDArray[np.uint8]], offset: int, wanted: int, asked_for: int = 0
    ) -> None:
        """Fill the first `wanted` bytes of the buffers from file `number`, from `offset` on, or raise.

        Offset, buffers and their lengths are aligned. More may be read than is wanted, up to what the buffers hold;
        what the caller needs begins at `asked_for` at the earliest.
        """
        done = 0
        failures = 0
        while done < wanted:
            try:
                done += self._fill_some(number, buffers, offset, wanted, done)
            except OSError as error:
                if error.errno not in _TRANSIENT or failures == len(RETRY_SECONDS):
                    raise self._explained(error, number, max(offset + done, asked_for), failures + 1) from None
                if error.errno == errno.ESTALE:
                    self._files.forget(number)
                elif error.errno in (errno.EMFILE, errno.ENFILE):
                    self._files.forget_all()
                self._tally.add(retries=1)
                time.sleep(RETRY_SECONDS[failures])
                failures += 1

    def _fill_some(self, number: int, buffers: Sequence[NDArray[np.uint8]], offset: int, wanted: int, done: int) -> int:
        """One request for what comes after the first `done` bytes; how many more are done now, at least one."""
        file = self._files.get(number)
        try:
            count = os.preadv(file.fileno(), _behind(buffers, done), offset + done)
            self._tally.add(count)
            if done + count < wanted:
                self._check_length(number, file.fileno())
                count -= count % self._alignment
                if not count:
                    raise OSError(errno.EIO, f"only {done} of {wanted} bytes came")
            if self._drop_behind:
                _drop(file.fileno(), offset + done, count)
            return count
        finally:
            del file  # or whoever keeps an error would keep the file open

    def _check_length(self, number: int, descriptor: int) -> None:
        """After a read that came short: if the file was cut, there is nothing to wait for."""
        file = self._entries[number]
        check_not_cut(file.path, file.entry, os.fstat(descriptor).st_size)

    def _explained(self, error: OSError, number: int, offset: int, attempts: int) -> OSError:
        if number == self._index_number:
            row, at = divmod(offset - HEADER_NBYTES, self._index_stride)
            name = next(name for name, (kind, start) in self._fields.items() if start <= at < start + kind.itemsize)
            what = f"the {name} of sample {row}"
        else:
            position = max(0, offset - HEADER_NBYTES) // self._row_nbytes
            what = f"sample {self._shards.first_samples[number] + position}"
        hint = ""
        if error.errno == errno.EINVAL and self._alignment > 1:
            hint = 'the filesystem refuses O_DIRECT here: use io="pread"'
        elif error.errno == errno.ESTALE:
            hint = "the file was replaced or removed on the server: put the set back, or make a new loader"
        return reading_failed(error, self._entries[number].path, what, offset, attempts, hint)

    def reads_ahead(self) -> bool:
        return False

    def will_read(self, indices: NDArray[np.int64], windows: Windows | None = None) -> None:
        """Nothing: the threads have requests under way all the time."""

    def counts(self) -> ReadCounts:
        return self._tally.counts()

    def close(self) -> None:
        self._files.close()


def direct_alignment(path: Path) -> int | None:
    """What O_DIRECT demands of offsets, lengths and memory for this file; None if it cannot be read so.

    Found by trying, since not every filesystem and kernel says it, and some accept the flag but no read.
    """
    try:
        file, _ = open_regular(path)
    except (OSError, FormatError):
        return None
    with contextlib.suppress(OSError), file:
        set_direct(file.fileno())
        memory = aligned_empty((2 * _ALIGNMENTS[-1],))
        for alignment in _ALIGNMENTS:
            with contextlib.suppress(OSError):
                if os.preadv(file.fileno(), [memory[alignment : 2 * alignment].data], alignment):
                    return alignment
    return None


def set_direct(descriptor: int) -> None:
    """Let further reads pass the page cache. OSError (EINVAL) where the filesystem or the system cannot."""
    if not hasattr(os, "O_DIRECT"):  # macOS
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)


def _behind(buffers: Sequence[NDArray[np.uint8]], done: int) -> list[memoryview]:
    """What is left of the buffers when the first `done` bytes are filled."""

    def rests() -> Iterator[memoryview]:
        skip = done
        for buffer in buffers:
            if skip < len(buffer):
                yield buffer[skip:].data
            skip = max(0, skip - len(buffer))

    return list(rests())


def _drop(descriptor: int, offset: int, nbytes: int) -> None:
    """Let go of the pages that hold these bytes, whole ones, as the kernel ignores parts."""
    page = mmap.PAGESIZE
    start = offset // page * page
    with contextlib.suppress(OSError):
        os.posix_fadvise(descriptor, start, -(-(offset + nbytes) // page) * page - start, os.POSIX_FADV_DONTNEED)
