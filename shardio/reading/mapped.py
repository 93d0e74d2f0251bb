"""Reads samples through the mapping, and announces to the kernel which ones come next.

This is the fastest way where the samples are in the page cache, and the simplest. But pages are fetched one after the
other unless they are announced, and a thread that waits for one cannot be told to give up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.kernels.rowcopy import Windows
from shardio.reading.reader import CountingReader
from shardio.reading.shardset import ShardSet

# So many of the announced samples that a thread copies at a time are looked for in the page cache.
_MOST_LOOKED_FOR = 8


class MappedReader(CountingReader):
    """Copies from the mapping, and announces to the kernel what will be copied.

    Without an announcement each page that is not in the page cache is a request of its own, for which a thread waits;
    and as the kernel by default reads around each, it would read many times what is wanted. There is nothing to close:
    the mapping belongs to the set.
    """

    name = "mmap"
    num_threads = 1

    def __init__(self, shards: ShardSet, tables: Sequence[str] = ("",)) -> None:
        """`tables` are the arrays that will be read, by name, and "" for the pixels: the first tells what of the
        announced samples is in the page cache."""
        super().__init__()
        self._shards = shards
        self._tables = tuple(tables)
        self._announced = False
        self.column_of = shards.column_of
        self.array_crc32s = shards.array_crc32s
        for name in tables:
            shards.expect_random_reads(name)

    def read(self, indices: NDArray[np.int64], out: NDArray[np.uint8], windows: Windows | None = None) -> None:
        self._look_for("", indices)
        self._shards.gather(indices, out, windows)
        self._count(out.nbytes)

    def read_array(
        self, name: str, indices: NDArray[np.int64], out: NDArray[Any], windows: Windows | None = None
    ) -> None:
        self._look_for(name, indices)
        self._shards.gather_array(name, indices, out, windows)
        self._count(out.nbytes)

    def _look_for(self, name: str, indices: NDArray[np.int64]) -> None:
        """Counts how many of a few samples are in the page cache, which tells whether announcing them was worth it."""
        if not self._announced or not len(indices) or name != self._tables[0]:
            return
        count = min(_MOST_LOOKED_FOR, len(indices))
        with contextlib.suppress(IndexError):  # which `gather` will raise
            if (share := self._shards.resident_share(indices, count, name)) is not None:
                self._count(looked_for=count, found=round(share * count))

    def begin_epoch(self) -> bool:
        # Announcements of a resident set are pure cost. Where the kernel does not tell, they are worth it.
        self._announced = any(self._shards.resident_share(name=name) != 1.0 for name in self._tables)
        return self._announced

    def will_read(
        self, indices: NDArray[np.int64], windows: Windows | None = None, of_arrays: Windows | None = None
    ) -> None:
        with contextlib.suppress(Exception):
            for number, name in enumerate(self._tables):
                wanted = of_arrays if number else windows
                self._shards.will_read(indices, wanted if self._shards.has_windows(name) else None, name)
