"""Damaged samples: a reader raises an error that names them, or has other samples take their places.

The bytes of a damaged sample differ from the published bytes, or storage does not give them. The index has the crc32 of
every sample, so damage is detected where it would do harm: on its way into a batch. A sample that differs is read once
more, another way, as a page in memory may be wrong. The reader remembers damage for as long as it lives: batches that
are under way at the same time then agree about a sample that several of them have.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.format.layout import crc32
from shardio.kernels.rowcopy import Places
from shardio.order.rng import make_keys, uniform
from shardio.reading.reader import BatchMemory, ReadCounts, Reader, Request
from shardio.reading.shardset import ShardSet
from shardio.system.direct import aligned_empty
from shardio.system.eager import warn_caller


class GuardedReader(Reader):
    """Wraps a reader and notices damaged samples. Thread safe; `close` also closes `reader` and `second`.

    - `second`: reads a sample again if its crc32 differs from the index. If None, no crc32 is compared
    - `skips`: if false, `read` raises the error of the first damaged sample: FormatError if its bytes do not match the
      index in two reads, or the error of `reader`. If true, `read` leaves the place of a damaged sample as it was, and
      `replace_damaged` fills it. Samples that `reader` cannot read (FormatError, or EIO after all attempts) count as
      damaged: the samples of a failed request are read one by one
    """

    def __init__(self, reader: Reader, shards: ShardSet, *, second: Reader | None, skips: bool) -> None:
        super().__init__()
        self.num_threads = reader.num_threads
        self._reader = reader
        self._shards = shards
        self._second = second
        self._skips = skips
        # The text alone: an error would keep its frames, and these a batch.
        self.damaged: dict[int, str] = {}
        """What is wrong with each damaged sample that was skipped, also of batches that were read ahead. Entries are
        added, never changed or removed."""
        self._news: deque[str] = deque()
        self._rereads: list[None] = []  # one for each: a list can be appended to by any thread, and needs no lock
        self._closed = False

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

    def copy(self, name: str, indices: NDArray[np.int64], out: NDArray[Any], lines: Places = None) -> None:
        self._copy(name, indices, out, lines)
        if self._second is None:
            return
        expected = self.array_crc32s(name, indices) if name else self.column_of("crc32", indices)
        places = range(len(indices)) if lines is None else lines.tolist()
        for line, index, crc in zip(places, indices.tolist(), expected.tolist(), strict=True):
            one = out[line : line + 1]
            if crc32(one) != crc and index not in self.damaged:
                self._read_again(self._second, name, index, one, crc)

    def _read_again(self, second: Reader, name: str, index: int, out: NDArray[Any], expected: int) -> None:
        """Reads the pixels or a value of one sample again, into `out`, whose length is 1."""
        again = np.empty_like(out) if name else aligned_empty(out.shape)
        self._rereads.append(None)
        try:
            second.copy(name, np.array([index]), again)
            if (found := crc32(again)) != expected:
                raise self._mismatch(name, index, expected, found)
        except (FormatError, OSError) as error:
            self._skip(index, error)
        else:
            out[...] = again

    def _mismatch(self, name: str, index: int, expected: int, found: int) -> FormatError:
        shard, offset = self._shards.mapped(name).locate_one(index)
        (key,) = self.column_of("key", np.array([index])).tolist()
        way_out = "" if self._skips else ', and on_damage="skip" puts other samples in the place of damaged ones'
        what = f"the {name} of sample" if name else "sample"
        return FormatError(
            f"{self._shards.path_of(shard)}: {what} {index} ({os.fsdecode(key)}) at byte {offset}: crc32: expected "
            f"{expected:08x}, found {found:08x} in two reads; `shardio verify` finds what else is damaged, and says "
            f"how to repair it{way_out}"
        )

    def _copy(self, name: str, indices: NDArray[np.int64], out: NDArray[Any], lines: Places) -> None:
        if not self._skips:
            self._reader.copy(name, indices, out, lines)
            return
        if self.damaged.keys().isdisjoint(indices.tolist()):
            try:
                self._reader.copy(name, indices, out, lines)
                return
            except (FormatError, OSError) as error:
                if not _is_damage(error):
                    raise
        # At least one of them cannot be read. As an attempt at one may take seconds, known ones are not tried again.
        for i, line in enumerate(range(len(indices)) if lines is None else lines.tolist()):
            if self._closed:
                raise RuntimeError("the loader was closed while samples were read one by one")
            if (index := int(indices[i])) not in self.damaged:
                try:
                    self._reader.copy(name, indices[i : i + 1], out[line : line + 1])
                except (FormatError, OSError) as error:
                    self._skip(index, error)

    def _skip(self, index: int, error: FormatError | OSError) -> None:
        if not self._skips or not _is_damage(error):
            raise error
        text = str(error)
        if self.damaged.setdefault(index, text) is text:  # else another thread found it at the same time
            self._news.append(f"sample {index} is damaged, and another takes its place: {error}")

    def warn(self) -> None:
        """Issues a RuntimeWarning for each damaged sample that was found since the last call, at the caller's line."""
        while self._news:
            warn_caller(self._news.popleft())

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


def replace_damaged(
    damage: Callable[[], Mapping[int, str]], seed: int, epoch: int, memory: BatchMemory, size: int
) -> None:
    """Replaces the damaged samples of the batch in `memory`, which has `size` samples, with sound samples from it.

    `damage` returns what is wrong with each damaged sample. Seed, epoch and the damaged sample's index decide which
    sound sample is used. Raises FormatError if the batch has no sound sample.
    """
    indices, known = memory.indices[:size], damage()
    if known.keys().isdisjoint(indices.tolist()):
        return
    damaged = np.isin(indices, list(known))
    sound = np.flatnonzero(~damaged)
    if not sound.size:
        raise FormatError(
            f"all {len(indices)} samples of a batch are damaged, so no sound sample can replace them. The first: "
            f"{known[int(indices[0])]}"
        )
    (key,) = make_keys(b"shardio damage 1", seed, epoch, 1)
    drawn = uniform(key, indices[damaged].astype(np.uint64))
    chosen = sound[(drawn * sound.size).astype(np.int64)]
    for part in (memory.images, memory.labels, *memory.more.values(), indices):
        part[:size][damaged] = part[chosen]


def _is_damage(error: Exception) -> bool:
    """Returns whether the error is about the bytes themselves, and not about the way to them."""
    return isinstance(error, FormatError) or (isinstance(error, OSError) and error.errno == errno.EIO)
