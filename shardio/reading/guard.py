"""Compares samples with their checksums on their way into a batch.

The index has the crc32 of every sample, so damage is detected where it would do harm. A sample that differs is read
once more, another way, as a page in memory may be wrong.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.format.layout import crc32
from shardio.kernels.rowcopy import Places
from shardio.reading.reader import ReadCounts, Reader, Request
from shardio.reading.shardset import ShardSet
from shardio.system.direct import aligned_empty


class GuardedReader(Reader):
    """Wraps a reader and compares the crc32 of every sample. Thread safe; `close` also closes `reader` and `second`.

    `second` reads a sample again if its crc32 differs from the index. If the crc32 differs again, `copy` raises
    FormatError.
    """

    def __init__(self, reader: Reader, shards: ShardSet, second: Reader) -> None:
        super().__init__()
        self.num_threads = reader.num_threads
        self._reader = reader
        self._shards = shards
        self._second = second
        self._rereads: list[None] = []  # one for each: a list can be appended to by any thread, and needs no lock

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
        self._reader.copy(name, indices, out, lines)
        expected = self.array_crc32s(name, indices) if name else self.column_of("crc32", indices)
        places = range(len(indices)) if lines is None else lines.tolist()
        for line, index, crc in zip(places, indices.tolist(), expected.tolist(), strict=True):
            one = out[line : line + 1]
            if crc32(one) != crc:
                self._read_again(name, index, one, crc)

    def _read_again(self, name: str, index: int, out: NDArray[Any], expected: int) -> None:
        """Reads the pixels or a value of one sample again, into `out`, whose length is 1."""
        again = np.empty_like(out) if name else aligned_empty(out.shape)
        self._rereads.append(None)
        self._second.copy(name, np.array([index]), again)
        if (found := crc32(again)) != expected:
            shard, offset = self._shards.mapped(name).locate_one(index)
            (key,) = self.column_of("key", np.array([index])).tolist()
            what = f"the {name} of sample" if name else "sample"
            raise FormatError(
                f"{self._shards.path_of(shard)}: {what} {index} ({os.fsdecode(key)}) at byte {offset}: crc32: expected "
                f"{expected:08x}, found {found:08x} in two reads; `shardio verify` finds what else is damaged, and "
                "says how to repair it"
            )
        out[...] = again

    def counts(self) -> ReadCounts:
        counts, again = self._reader.counts(), self._second.counts()
        retries = counts.retries + again.retries + len(self._rereads)
        return counts._replace(nbytes=counts.nbytes + again.nbytes, retries=retries)

    def close(self) -> None:
        self._reader.close()
        self._second.close()
