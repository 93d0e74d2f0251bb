"""Damaged samples: a reader raises an error that names them, or has other samples take their places.

A damaged sample is not what was published, or storage does not give it. The index has the crc32 of every sample, so
damage is detected where it would do harm: on its way into a batch. A sample that differs is read once more, another
way, as a page in memory may be what is wrong. The reader remembers damage for as long as it lives: batches that are
under way at the same time then agree about a sample that is in several of them.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.format.layout import crc32, sample_nbytes
from shardio.kernels.rowcopy import Windows, copy_windows
from shardio.order.rng import make_keys, uniform
from shardio.reading.layout import as_bytes
from shardio.reading.reader import ReadCounts, Reader
from shardio.reading.shardset import ShardSet
from shardio.system.direct import aligned_empty
from shardio.system.eager import warn_caller

# Memory that a thread keeps for whole samples of which windows are wanted: they are still in its caches when summed.
_ROOM_NBYTES = 1 << 20


class SecondReader(Protocol):
    """Reads samples of the same set another way. Thread safe. See `shardio.reading.reader.Reader`."""

    def read(self, indices: NDArray[np.int64], out: NDArray[np.uint8]) -> None: ...

    def read_array(self, name: str, indices: NDArray[np.int64], out: NDArray[Any]) -> None: ...

    def counts(self) -> ReadCounts: ...

    def close(self) -> None: ...


class GuardedReader:
    """A reader behind which no damaged sample gets into a batch. Thread safe; closes `reader` and `second` with itself.

    With `second`, samples are read whole, windows copied out of them, and every crc32 compared with the index. `second`
    reads a sample that differs again.
    Without `skips`, `read` raises the error of the first damaged sample: FormatError if its bytes are not those of the
    index, even when read again, or what `reader` raises. With `skips` it leaves the place of such a sample in `out` as
    it was, for `replace_damaged` to fill. It also skips samples that files do not have (FormatError) and samples that
    storage does not give after all attempts (EIO): it reads the samples of a failed request one by one.
    """

    def __init__(
        self, reader: Reader, shards: ShardSet, *, second: SecondReader | None, skips: bool, seed: int
    ) -> None:
        self.num_threads = reader.num_threads
        self.column_of = reader.column_of
        self.array_crc32s = reader.array_crc32s
        self.begin_epoch = reader.begin_epoch
        self.whole_lines = reader.whole_lines
        self._reader = reader
        self._shards = shards
        self._second = second
        self._skips = skips
        self._seed = seed
        # Each damaged sample, with what is wrong with it. Entries are added, never changed or removed. The text alone:
        # an error would keep its frames, and these a batch.
        self._damaged: dict[int, str] = {}
        self._news: deque[str] = deque()
        self._rereads: list[None] = []  # one for each: a list can be appended to by any thread, and needs no lock
        self._closed = False
        self._thread = threading.local()

    @property
    def name(self) -> str:
        return self._reader.name

    @property
    def damaged(self) -> list[int]:
        """The damaged samples that were skipped, in ascending order; also of batches that were read ahead."""
        return sorted(self._damaged)

    def read(self, indices: NDArray[np.int64], out: NDArray[np.uint8], windows: Windows | None = None) -> None:
        if self._second is None:
            self._read(indices, out, windows)
            return
        indices = self._shards.check_request(indices, out, windows)
        if windows is None:
            self._read_checked(self._second, indices, out)
        else:
            self._read_windows(self._second, indices, as_bytes(out), windows)

    def read_array(
        self, name: str, indices: NDArray[np.int64], out: NDArray[Any], windows: Windows | None = None
    ) -> None:
        if self._second is None:
            self._read(indices, out, windows, name)
            return
        indices = self._shards.check_array_request(name, indices, out, windows)
        if windows is None:
            self._read_checked(self._second, indices, out, name)
        else:
            self._read_windows(self._second, indices, as_bytes(out), windows, name)

    def _read_windows(
        self,
        second: SecondReader,
        indices: NDArray[np.int64],
        out: NDArray[np.uint8],
        windows: Windows,
        array: str = "",
    ) -> None:
        """Reads whole pictures, checked, a few at a time, and copies the windows out of them, one after the other."""
        shape = self._shards.picture_shape(array)
        rows = self._room(sample_nbytes(shape))
        ends = [0, *(windows.num_pixels * shape[2]).cumsum().tolist()]
        for start in range(0, len(indices), len(rows)):
            some = slice(start, start + len(rows))
            whole = rows[: len(indices[some])].reshape(-1, *shape)
            self._read_checked(second, indices[some], self._as_stored(whole, array), array)
            place = out[ends[start] : ends[start + len(whole)]]
            copy_windows(whole, np.arange(len(whole)), windows[some], place)

    def _as_stored(self, pictures: NDArray[np.uint8], array: str) -> NDArray[Any]:
        """Returns the memory of whole pictures as what readers put there: pixels, or values of the array."""
        if not array:
            return pictures
        row = self._shards.array(array).row
        values: NDArray[Any] = pictures.reshape(len(pictures), -1).view(row.dtype).reshape(-1, *row.shape)
        return values

    def _read_checked(
        self, second: SecondReader, indices: NDArray[np.int64], out: NDArray[Any], array: str = ""
    ) -> None:
        self._read(indices, out, array=array)
        expected = self.array_crc32s(array, indices) if array else self.column_of("crc32", indices)
        for number, (index, crc) in enumerate(zip(indices.tolist(), expected.tolist(), strict=True)):
            one = out[number : number + 1]
            if crc32(one) != crc and index not in self._damaged:
                self._read_again(second, index, one, crc, array)

    def _read_again(self, second: SecondReader, index: int, out: NDArray[Any], expected: int, array: str) -> None:
        """Reads the pixels or a value of one sample again, into `out`, whose length is 1."""
        again = np.empty_like(out) if array else aligned_empty(out.shape)
        self._rereads.append(None)
        try:
            if array:
                second.read_array(array, np.array([index]), again)
            else:
                second.read(np.array([index]), again)
            if (found := crc32(again)) != expected:
                raise self._mismatch(index, expected, found, array)
        except (FormatError, OSError) as error:
            self._skip(index, error)
        else:
            out[...] = again

    def _mismatch(self, index: int, expected: int, found: int, array: str) -> FormatError:
        shard, offset = self._shards.mapped(array).locate_one(index)
        (key,) = self.column_of("key", np.array([index])).tolist()
        way_out = "" if self._skips else ', and on_damage="skip" puts other samples in the place of damaged ones'
        what = f"the {array} of sample" if array else "sample"
        return FormatError(
            f"{self._shards.path_of(shard)}: {what} {index} ({os.fsdecode(key)}) at byte {offset}: crc32: expected "
            f"{expected:08x}, found {found:08x} in two reads; `shardio verify` finds what else is damaged, and says "
            f"how to repair it{way_out}"
        )

    def _read(
        self, indices: NDArray[np.int64], out: NDArray[Any], windows: Windows | None = None, array: str = ""
    ) -> None:
        def read(some: slice) -> None:
            if array:
                self._reader.read_array(array, indices[some], out[some])
            else:
                self._reader.read(indices[some], out[some], None if windows is None else windows[some])

        if not self._skips:
            read(slice(None))
            return
        if self._damaged.keys().isdisjoint(indices.tolist()):
            try:
                read(slice(None))
                return
            except (FormatError, OSError) as error:
                if not _is_damage(error):
                    raise
        # At least one of them cannot be read. As an attempt at one may take seconds, known ones are not tried again.
        for i, index in enumerate(indices.tolist()):
            if self._closed:
                raise RuntimeError("the loader was closed while samples were read one by one")
            if index not in self._damaged:
                try:
                    read(slice(i, i + 1))
                except (FormatError, OSError) as error:
                    self._skip(index, error)

    def _skip(self, index: int, error: FormatError | OSError) -> None:
        if not self._skips or not _is_damage(error):
            raise error
        text = str(error)
        if self._damaged.setdefault(index, text) is text:  # else another thread found it at the same time
            self._news.append(f"sample {index} is damaged, and another takes its place: {error}")

    def replace_damaged(self, epoch: int, indices: NDArray[np.int64], *parts: NDArray[Any]) -> None:
        """Puts sound samples of a batch in the places of its damaged ones, in `indices` and all other `parts` of it.

        Seed, epoch and the damaged sample decide which of the sound ones. Raises FormatError if there is none.
        """
        if self._damaged.keys().isdisjoint(indices.tolist()):
            return
        damaged = np.isin(indices, list(self._damaged))
        sound = np.flatnonzero(~damaged)
        if not sound.size:
            raise FormatError(
                f"none of the {len(indices)} samples of a batch is sound, so no other can take their places. The "
                f"first: {self._damaged[int(indices[0])]}"
            )
        (key,) = make_keys(b"shardio damage 1", self._seed, epoch, 1)
        drawn = uniform(key, indices[damaged].astype(np.uint64))
        chosen = sound[(drawn * sound.size).astype(np.int64)]
        for part in (*parts, indices):
            part[damaged] = part[chosen]

    def warn(self) -> None:
        """Issue a RuntimeWarning for each damaged sample that was found since the last call, at the caller's line."""
        while self._news:
            warn_caller(self._news.popleft())

    def _room(self, row_nbytes: int) -> NDArray[np.uint8]:
        """Returns this thread's memory for some rows of so many bytes."""
        count = max(1, _ROOM_NBYTES // row_nbytes)
        room: NDArray[np.uint8] | None = getattr(self._thread, "room", None)
        if room is None or len(room) < count * row_nbytes:
            room = self._thread.room = aligned_empty((max(_ROOM_NBYTES, row_nbytes),))
        return room[: count * row_nbytes].reshape(count, row_nbytes)

    def will_read(
        self, indices: NDArray[np.int64], windows: Windows | None = None, of_arrays: Windows | None = None
    ) -> None:
        if self._second is None:
            self._reader.will_read(indices, windows, of_arrays)
        else:
            self._reader.will_read(indices)

    def counts(self) -> ReadCounts:
        counts = self._reader.counts()
        if self._second is None:
            return counts
        again = self._second.counts()
        retries = counts.retries + again.retries + len(self._rereads)
        return counts._replace(nbytes=counts.nbytes + again.nbytes, retries=retries)

    def close(self) -> None:
        self._closed = True
        self._reader.close()
        if self._second is not None:
            self._second.close()


def _is_damage(error: Exception) -> bool:
    """Returns whether the error is about the bytes themselves, and not about the way to them."""
    return isinstance(error, FormatError) or (isinstance(error, OSError) and error.errno == errno.EIO)
