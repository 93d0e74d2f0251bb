"""Samples that are not what was published, or that storage does not give: an error that names them, or others instead.

The index has the crc32 of every sample, so that damage is noticed where it would do harm: on its way into a batch. A
sample that differs is read once more, past the page cache if that is possible, as a page in memory may be what is
wrong. Damage that is found is remembered for as long as the reader lives: batches that are under way at the same time
then agree about a sample that is in several of them.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.format.checksum import crc32
from shardio.format.layout import sample_nbytes
from shardio.order.rng import make_keys, uniform
from shardio.order.windows import Windows
from shardio.reading.file_reader import FileReader
from shardio.reading.layout import SplitLayout
from shardio.reading.reader import ReadCounts, Reader
from shardio.reading.rowcopy import copy_windows
from shardio.system.caller import warn_caller
from shardio.system.direct import aligned_empty, direct_alignment

Check = Literal["off", "sample"]
OnDamage = Literal["raise", "skip"]

# Memory that a thread keeps for whole samples of which windows are wanted: they are still in its caches when summed.
_ROOM_NBYTES = 1 << 20


def check_choices(check: Check, on_damage: OnDamage) -> None:
    """ValueError unless both are what GuardedReader takes."""
    for name, value, choices in (
        ("check", check, get_args(Check)),
        ("on_damage", on_damage, get_args(OnDamage)),
    ):
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}; found {value!r}")


class GuardedReader:
    """A reader behind which no damaged sample gets into a batch. Thread safe; closes `reader` and `second` with itself.

    With check="sample", samples are read whole, windows copied out of them, and every crc32 compared with the index.
    A sample that differs is read again by `second`: by default the files' own bytes, past the page cache.
    With on_damage="raise", `read` raises what is wrong with the first sample that is damaged: FormatError if its bytes
    are not those of the index, even when read again, or what `reader` raises. With "skip" it leaves the place of such a
    sample in `out` as it was, for `replace_damaged` to fill. That covers what files do not have (FormatError) and what
    storage does not give after all attempts (EIO), for which the samples of a failed request are read one by one.
    """

    def __init__(
        self,
        reader: Reader,
        shards: SplitLayout,
        *,
        check: Check,
        on_damage: OnDamage,
        seed: int,
        second: Reader | None = None,
    ) -> None:
        self.num_threads = reader.num_threads
        self.labels_of = reader.labels_of
        self.column_of = reader.column_of
        self.begin_epoch = reader.begin_epoch
        self._reader = reader
        self._shards = shards
        self._checks = check == "sample"
        self._skips = on_damage == "skip"
        self._seed = seed
        # Of each damaged sample, what is wrong with it. Entries are added, never changed or removed. The text alone: an
        # error would keep its frames, and these a batch.
        self._damaged: dict[int, str] = {}
        self._news: deque[str] = deque()
        self._second = second
        if self._checks and second is None:
            self._second = FileReader(shards, alignment=direct_alignment(self._path_of(0)))
        self._rereads: list[None] = []  # one for each: a list can be appended to by any thread, and needs no lock
        self._closed = False
        self._thread = threading.local()

    @property
    def name(self) -> str:
        return self._reader.name

    @property
    def damaged(self) -> list[int]:
        """The samples that were found damaged and skipped, in ascending order; of batches that were read ahead, too."""
        return sorted(self._damaged)

    def read(self, indices: NDArray[np.int64], out: NDArray[np.uint8], windows: Windows | None = None) -> None:
        if not self._checks:
            self._read(indices, out, windows)
            return
        indices = self._shards.check_request(indices, out, windows)
        if windows is None:
            self._read_checked(indices, out)
            return
        room = self._room()
        for start in range(0, len(indices), len(room)):
            some = slice(start, start + len(room))
            whole = room[: len(indices[some])]
            self._read_checked(indices[some], whole)
            copy_windows(whole, np.arange(len(whole)), windows.tops[some], windows.lefts[some], out[some])

    def _read_checked(self, indices: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        self._read(indices, out, None)
        expected = self.column_of("crc32", indices).tolist()
        for index, pixels, crc in zip(indices.tolist(), out, expected, strict=True):
            if crc32(pixels) != crc and index not in self._damaged:
                self._read_again(index, pixels, crc)

    def _read_again(self, index: int, pixels: NDArray[np.uint8], expected: int) -> None:
        assert self._second is not None
        again = aligned_empty((1, *pixels.shape))
        self._rereads.append(None)
        try:
            self._second.read(np.array([index]), again)
            if (found := crc32(again)) != expected:
                raise self._mismatch(index, expected, found)
        except (FormatError, OSError) as error:
            self._skip(index, error)
        else:
            pixels[...] = again[0]

    def _mismatch(self, index: int, expected: int, found: int) -> FormatError:
        (shard,), (offset,) = (where.tolist() for where in self._shards.locate(np.array([index])))
        (key,) = self.column_of("key", np.array([index])).tolist()
        way_out = "" if self._skips else ', and on_damage="skip" puts other samples in the place of damaged ones'
        return FormatError(
            f"{self._path_of(shard)}: sample {index} ({os.fsdecode(key)}) at byte {offset}: crc32: expected "
            f"{expected:08x}, found {found:08x} in two reads; `shardio verify` finds what else is damaged, `shardio "
            f"repair` makes it again{way_out}"
        )

    def _path_of(self, shard: int) -> str:
        return self._shards.path_of(self._shards.content.shards[shard])

    def _read(self, indices: NDArray[np.int64], out: NDArray[np.uint8], windows: Windows | None) -> None:
        if not self._skips:
            self._reader.read(indices, out, windows)
            return
        if self._damaged.keys().isdisjoint(indices.tolist()):
            try:
                self._reader.read(indices, out, windows)
                return
            except (FormatError, OSError) as error:
                if not _is_damage(error):
                    raise
        # At least one of them cannot be had, and storage that fails is asked for seconds: not for the same one again.
        for i, index in enumerate(indices.tolist()):
            if self._closed:
                raise RuntimeError("the loader was closed while samples were read one by one")
            if index not in self._damaged:
                one = slice(i, i + 1)
                try:
                    self._reader.read(indices[one], out[one], None if windows is None else windows[one])
                except (FormatError, OSError) as error:
                    self._skip(index, error)

    def _skip(self, index: int, error: FormatError | OSError) -> None:
        if not self._skips or not _is_damage(error):
            raise error
        text = str(error)
        if self._damaged.setdefault(index, text) is text:  # one of two threads that found it at the same time
            self._news.append(f"sample {index} is damaged, and another takes its place: {error}")

    def replace_damaged(
        self, epoch: int, images: NDArray[np.uint8], labels: NDArray[np.int64], indices: NDArray[np.int64]
    ) -> None:
        """Put sound samples of a batch, with their labels and indices, in the places of its damaged ones.

        (seed, epoch, the damaged sample) decide which of the sound ones. FormatError if there is none.
        """
        if self._damaged.keys().isdisjoint(indices.tolist()):
            return
        damaged = np.isin(indices, list(self._damaged))
        sound = np.flatnonzero(~damaged)
        if not sound.size:
            raise FormatError(
                f"none of the {len(indices)} samples of a batch is sound, so that no other can take their places. The "
                f"first: {self._damaged[int(indices[0])]}"
            )
        (key,) = make_keys(b"shardio damage 1", self._seed, epoch, 1)
        drawn = uniform(key, indices[damaged].astype(np.uint64))
        chosen = sound[(drawn * sound.size).astype(np.int64)]
        for array in (images, labels, indices):
            array[damaged] = array[chosen]

    def warn(self) -> None:
        """A RuntimeWarning for each sample that was found damaged since the last call, at the caller's line."""
        while self._news:
            warn_caller(self._news.popleft())

    def _room(self) -> NDArray[np.uint8]:
        """This thread's memory for some whole samples."""
        room: NDArray[np.uint8] | None = getattr(self._thread, "room", None)
        if room is None:
            shape = self._shards.sample_shape
            room = self._thread.room = aligned_empty((max(1, _ROOM_NBYTES // sample_nbytes(shape)), *shape))
        return room

    def will_read(self, indices: NDArray[np.int64], windows: Windows | None = None) -> None:
        self._reader.will_read(indices, None if self._checks else windows)

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
    """Whether it is about the bytes that were asked for, and not about the way to them."""
    return isinstance(error, FormatError) or (isinstance(error, OSError) and error.errno == errno.EIO)
