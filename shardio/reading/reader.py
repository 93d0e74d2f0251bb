"""Readers copy the samples of a batch from storage into memory, as a request says.

Readers do not check arguments: callers outside use `ShardSet.gather`, which checks them, and the kernels check bounds.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.format.layout import crc32
from shardio.kernels.resample import Planes, nbytes_of
from shardio.kernels.rowcopy import Places, Windows
from shardio.reading.layout import as_rows
from shardio.reading.shardset import ShardSet
from shardio.sets.storage import Storage
from shardio.system.pour import aligned_empty

# Windows that a thread reads before it makes pixels: no more than caches hold, and enough that the calls cost little.
_ROOM_NBYTES = 4 << 20
# Waking one more thread for a batch takes as long as copying a part of these bytes.
_PART_NBYTES = 4 << 20
# Announcing a row costs a system call, about as much as copying a small row. A missing row costs a read for each of its
# pages. So a set of small rows, of four pages at most, is announced only if more than a hundredth of it is missing.
_SMALL_ROW_NBYTES, _MOST_RESIDENT = 16 << 10, 0.99
# So many of the announced samples that a thread copies at a time are looked for in the page cache.
_MOST_LOOKED_FOR = 8

_thread = threading.local()


Views: TypeAlias = Sequence[NDArray[Any]]
"""The images of a batch that `Request.make` writes: uint8 or, normalized and cast, other dtypes."""


class BatchMemory(Protocol):
    """The memory that a batch is read into. `views` are the images that `Request.make` writes; the first is `images`.
    `more` has the arrays of the request by name."""

    @property
    def images(self) -> NDArray[Any]: ...
    @property
    def views(self) -> Views: ...

    labels: NDArray[np.int64]
    indices: NDArray[np.int64]
    more: Mapping[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Request:
    """The samples of one batch, and what to read of each sample. Immutable, so threads may share a request."""

    indices: NDArray[np.int64]
    """The indices of the samples, (B,). The samples must exist."""
    images: bool = True
    """Whether to read pixels."""
    label: bool = True
    """Whether to read labels from the index."""
    arrays: Sequence[str] = ()
    """The names of the arrays to read."""
    windows: Windows | None = None
    """The window to read of each image. None reads whole images."""
    channels: int = 3
    """The channels of a stored image, for windows."""
    make: Callable[[Planes, NDArray[np.int64], Views], None] | None = None
    """With windows, reading threads call make(planes of windows, positions of their samples in the batch, views)."""
    order: NDArray[np.int64] | None = None
    """For a mixture, the positions of the batch's samples, sorted by set: samples are read in this order."""

    def __len__(self) -> int:
        return len(self.indices)


class ReadCounts(NamedTuple):
    """Counts since the reader was made: bytes read, and reads that were retried. `looked_for` counts announced samples
    that were looked for in the page cache when they were due, and `found` counts the samples that were there."""

    nbytes: int
    retries: int
    looked_for: int
    found: int


class Reader:
    """Reads samples of one set. Thread safe. Subclasses implement the methods that raise NotImplementedError."""

    name: str
    """The reader's name in `ShardLoader.stats`."""
    num_threads = 1
    """The minimum number of threads that should read at the same time."""
    min_part_nbytes = 0
    """The minimum bytes of a thread's part of a batch that is only copied; 0 if threads wait for storage."""

    def __init__(self, halved: tuple[int, int] | None = None) -> None:
        """`halved`: the height and width of images that are stored as yuv420, and read whole; None for other sets."""
        self._halved = halved
        # Many threads count without a lock: each has a sum of its own.
        self._sums: dict[int, list[int]] = {}

    def read(self, request: Request, memory: BatchMemory, part: slice) -> None:
        """Reads the samples request.indices[part] into the positions `part` of `memory`. Raises OSError if the storage
        fails, and FormatError if a file differs from the manifest."""
        indices = request.indices[part]
        if len(indices):
            self.read_samples(request, memory, np.arange(len(request))[part], indices)
            memory.indices[part] = indices

    def read_samples(
        self, request: Request, memory: BatchMemory, numbers: NDArray[np.int64], indices: NDArray[np.int64]
    ) -> None:
        """Reads the samples `indices` of this reader's set into the positions `numbers` of `memory`. `numbers` must be
        ascending, and the samples must exist. `request` says what to read of each sample."""
        first, stop = int(numbers[0]), int(numbers[-1]) + 1
        # Adjacent samples fill a slice of an array; of others, each fills its line of the whole array.
        some, lines = (slice(first, stop), None) if stop - first == len(numbers) else (slice(None), numbers)
        if request.windows is not None or (request.images and self._halved is not None):
            self.make_pixels(request, memory.views, numbers, indices)
        elif request.images:
            self.copy("", indices, memory.images[some], lines)
        for name in request.arrays:
            self.copy(name, indices, memory.more[name][some], lines)
        if request.label:
            memory.labels[numbers] = self.column_of("label", indices)

    def make_pixels(
        self, request: Request, views: Views, numbers: NDArray[np.int64], indices: NDArray[np.int64]
    ) -> None:
        """Reads the windows of the samples `indices`, and has `request.make` write their pixels to `views`, arrays of
        the batch, at the positions `numbers`. Reads a few at a time, so the processor's caches still have them then."""
        windows, make, halved = self._windows(request, numbers), request.make or _copy_images, self._halved is not None
        nbytes = nbytes_of(windows, request.channels, halved).cumsum()
        start = done = 0
        while start < len(numbers):
            # At least one picture, however large.
            stop = max(int(nbytes.searchsorted(done + _ROOM_NBYTES, side="right")), start + 1)
            some = slice(start, stop)
            pixels = _thread_memory(int(nbytes[stop - 1]) - done)
            if halved:
                self.copy("", indices[some], pixels.reshape(stop - start, -1))
            else:
                self.copy_windows(indices[some], windows[some], pixels)
            make(Planes.packed(pixels, windows[some], request.channels, halved), numbers[some], views)
            start, done = stop, int(nbytes[stop - 1])

    def _windows(self, request: Request, numbers: NDArray[np.int64]) -> Windows:
        """Returns the windows to read of the images at the positions `numbers` of the batch."""
        if self._halved is not None:
            return Windows.whole(len(numbers), *self._halved)
        assert request.windows is not None
        return request.windows[numbers]

    def copy(self, name: str, indices: NDArray[np.int64], out: NDArray[Any], lines: Places = None) -> None:
        """Copies the value of the array `name`, or the row of pixels (""), of sample indices[i] into out[i]. With
        `lines`, copies into out[lines[i]]. The samples must exist."""
        raise NotImplementedError

    def copy_windows(self, indices: NDArray[np.int64], windows: Windows, out: NDArray[np.uint8]) -> None:
        """Copies a window of each sample into `out`, uint8 (n,), one after the other. The samples must exist."""
        raise NotImplementedError

    def column_of(self, name: str, indices: NDArray[np.int64]) -> NDArray[Any]:
        """Returns a copy of the column `name` of the index for these samples, which must exist."""
        raise NotImplementedError

    def array_crc32s(self, name: str, indices: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Returns the stored crc32 of each sample's value of the array `name`, uint32. The samples must exist."""
        raise NotImplementedError

    @property
    def whole_lines(self) -> int:
        """0 if reading a window costs only its own bytes. Otherwise, windows should consist of whole lines, and begin
        and end at multiples of this number of lines: then they need no second copy."""
        return 0

    def begin_epoch(self) -> bool:
        """Prepares for an epoch. Returns whether samples should be announced by `will_read`. Switches to a cached copy
        that has become complete, and checks whether the samples are in the page cache."""
        return False

    def will_read(self, request: Request) -> None:
        """Announces a request that will be read soon, so its samples can be read ahead. Never raises."""

    def counts(self) -> ReadCounts:
        return ReadCounts(*(sum(column) for column in zip([0] * 4, *list(self._sums.values()), strict=True)))

    def close(self) -> None:
        """Closes the descriptors. Reads under way finish; later reads fail. May be called again."""

    def _count(self, nbytes: int = 0, retries: int = 0, looked_for: int = 0, found: int = 0) -> None:
        sums = self._sums.setdefault(threading.get_ident(), [0] * len(ReadCounts._fields))
        for i, number in enumerate((nbytes, retries, looked_for, found)):
            sums[i] += number


class MappedReader(Reader):
    """Copies samples from the mapping, or makes pixels from it, and announces coming samples to the system.

    This is the fastest way if the samples are in the page cache. Without an announcement, each missing page would be a
    request of its own, and a thread that waits for it cannot be interrupted. There is nothing to close: the mapping
    belongs to the set. `tables` has the names of the arrays that will be read, and "" for the pixels.
    """

    name = "mmap"

    def __init__(self, shards: ShardSet, tables: Sequence[str] = ("",)) -> None:
        super().__init__(shards.halved)
        self._shards = shards
        self._tables = tuple(tables)
        self._announced = False
        for name in tables:
            shards.expect_random_reads(name)
        _ = shards.index  # is mapped now, while its path leads to it

    @property
    def min_part_nbytes(self) -> int:  # type: ignore[override]
        return 0 if self._announced else _PART_NBYTES

    def copy(self, name: str, indices: NDArray[np.int64], out: NDArray[Any], lines: Places = None) -> None:
        if self._announced and not name:
            self._look_for(indices)
        rows = as_rows(out)
        self._shards.mapped(name).copy(indices, rows, lines)
        self._count(len(indices) * rows.shape[1])

    def copy_windows(self, indices: NDArray[np.int64], windows: Windows, out: NDArray[np.uint8]) -> None:
        if self._announced:
            self._look_for(indices)
        self._shards.mapped().copy_windows(indices, out, windows, self._shards.sample_shape)
        self._count(out.nbytes)

    def make_pixels(
        self, request: Request, views: Views, numbers: NDArray[np.int64], indices: NDArray[np.int64]
    ) -> None:
        """Makes the pixels of the batch from the mapping itself, without a copy of the windows."""
        table = self._shards.mapped()
        rows = table.lent(indices)
        if rows is None:
            super().make_pixels(request, views, numbers, indices)
            return
        if self._announced:
            self._look_for(indices)
        windows, shape, halved = self._windows(request, numbers), self._shards.sample_shape, self._halved is not None
        with contextlib.suppress(OSError):
            (request.make or _copy_images)(Planes.of_rows(table.rows, rows, windows, shape, halved), numbers, views)
            self._count(int(nbytes_of(windows, shape[2], halved).sum()))
            return
        # Storage failed to give a page. Copying tries again, and its error names the sample.
        super().make_pixels(request, views, numbers, indices)

    def column_of(self, name: str, indices: NDArray[np.int64]) -> NDArray[Any]:
        return self._shards.copy_column(name, indices)

    def array_crc32s(self, name: str, indices: NDArray[np.int64]) -> NDArray[np.uint32]:
        return self._shards.copy_crc32s(name, indices)

    def _look_for(self, indices: NDArray[np.int64]) -> None:
        """Counts how many of the samples are in the page cache, for `read_ahead_hits` of `ShardLoader.stats`. Looks at
        no more than _MOST_LOOKED_FOR of them."""
        count = min(_MOST_LOOKED_FOR, len(indices))
        if (share := self._shards.resident_share(indices, count)) is not None:
            self._count(looked_for=count, found=round(share * count))

    def begin_epoch(self) -> bool:
        # Announcements of a resident set are pure cost. Where the kernel does not tell, they are worth it.
        self._announced = any(map(self._is_worth_announcing, self._tables))
        return self._announced

    def _is_worth_announcing(self, name: str) -> bool:
        share = self._shards.resident_share(name=name)
        is_small = self._shards.table_of(name).row_nbytes <= _SMALL_ROW_NBYTES
        return share is None or share < (_MOST_RESIDENT if is_small else 1.0)

    def will_read(self, request: Request) -> None:
        with contextlib.suppress(Exception):
            for name in self._tables:
                windows = None if name or self._halved is not None else request.windows
                self._shards.will_read(request.indices, windows, name)


class WrappingReader(Reader):
    """Passes reads of the index, and announcements, on to `reader`. Subclasses copy pixels and arrays."""

    def __init__(self, reader: Reader) -> None:
        super().__init__(reader._halved)
        self._reader = reader
        self.num_threads = reader.num_threads

    @property
    def name(self) -> str:  # type: ignore[override]
        return self._reader.name

    def column_of(self, name: str, indices: NDArray[np.int64]) -> NDArray[Any]:
        return self._reader.column_of(name, indices)

    def array_crc32s(self, name: str, indices: NDArray[np.int64]) -> NDArray[np.uint32]:
        return self._reader.array_crc32s(name, indices)

    def begin_epoch(self) -> bool:
        return self._reader.begin_epoch()

    def will_read(self, request: Request) -> None:
        self._reader.will_read(request)

    def close(self) -> None:
        self._reader.close()


class GuardedReader(WrappingReader):
    """Wraps a reader, and compares the crc32 of each sample with the stored crc32. Thread safe.

    If they differ, the reader `second` reads the sample again, past the page cache if possible, as a page there may be
    wrong. If they differ again, `copy` raises FormatError. `close` closes both readers.
    """

    def __init__(self, reader: Reader, shards: ShardSet, second: Reader) -> None:
        super().__init__(reader)
        self._shards = shards
        self._second = second

    def copy(self, name: str, indices: NDArray[np.int64], out: NDArray[Any], lines: Places = None) -> None:
        self._reader.copy(name, indices, out, lines)
        expected = self.array_crc32s(name, indices) if name else self.column_of("crc32", indices)
        places = range(len(indices)) if lines is None else lines.tolist()
        for line, index, crc in zip(places, indices.tolist(), expected.tolist(), strict=True):
            one = out[line : line + 1]
            if crc32(one) != crc:
                self._read_again(name, index, one, crc)

    def copy_windows(self, indices: NDArray[np.int64], windows: Windows, out: NDArray[np.uint8]) -> None:
        """Copies whole images: a checksum is of all pixels of a sample."""
        self.copy("", indices, out.reshape(len(indices), *self._shards.sample_shape))

    def _read_again(self, name: str, index: int, out: NDArray[Any], expected: int) -> None:
        """Reads the pixels or the array `name` of one sample again, into `out`, (1, ...). Raises FormatError unless the
        crc32 is now as expected."""
        again = np.empty_like(out) if name else aligned_empty(out.shape)
        self._count(retries=1)
        self._second.copy(name, np.array([index]), again)
        if (found := crc32(again)) != expected:
            raise wrong_row(self._shards, self._shards, name, index, found)
        out[...] = again

    def counts(self) -> ReadCounts:
        counts, again = self._reader.counts(), self._second.counts()
        retries = counts.retries + again.retries + super().counts().retries
        return counts._replace(nbytes=counts.nbytes + again.nbytes, retries=retries)

    def close(self) -> None:
        self._reader.close()
        self._second.close()


def wrong_row(shards: ShardSet, place: ShardSet | Storage, name: str, index: int, found: int) -> FormatError:
    """Returns the FormatError for the sample `index`, whose pixels (""), or value of the array `name`, have the wrong
    crc32 `found`. `place` is the set or the storage that was read."""
    shard, offset = shards.locate_one(name, index)
    (key,) = shards.copy_column("key", np.array([index])).tolist()
    (expected,) = shards.copy_crc32s(name, np.array([index])).tolist()
    return FormatError(
        f"{place.path_of(shard)}: {shards.table_of(name).what(index)} ({os.fsdecode(key)}) at byte {offset}: crc32: "
        f"expected {expected:08x}, found {found:08x} in two reads; `shardio verify` finds what else is damaged, "
        "`shardio repair` mends it, and `indices=` without this sample trains on the others"
    )


def _copy_images(planes: Planes, numbers: NDArray[np.int64], views: Views) -> None:
    planes.copy_images(views[0], numbers)


def _thread_memory(nbytes: int) -> NDArray[np.uint8]:
    """Returns scratch memory of the calling thread, uint8 (nbytes,), valid until the thread's next call."""
    memory: NDArray[np.uint8] | None = getattr(_thread, "memory", None)
    if memory is None or len(memory) < nbytes:
        memory = _thread.memory = aligned_empty((max(nbytes, _ROOM_NBYTES),))
    return memory[:nbytes]
