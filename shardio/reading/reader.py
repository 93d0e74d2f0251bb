"""Readers: ways of getting the samples of a split from storage into memory."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from shardio.kernels.rowcopy import Windows


class ReadCounts(NamedTuple):
    """Counts since the reader was made: bytes that it read, and requests that it made again. For some of the samples
    that were announced, it looks into the page cache when they are due: how many it looked for, and found."""

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
        """Its name in `stats()`."""

    def whole_lines(self, name: str = "") -> int:
        """Returns 0 if any window of the pictures, or of the array, is read at the cost of its bytes. Otherwise windows
        are best whole lines, beginning and ending at multiples of this number: they then need no other copy."""

    def column_of(self, name: str, indices: NDArray[np.int64]) -> NDArray[Any]:
        """Returns a copy of a column of the index for samples that exist. Raises OSError if the storage fails."""

    def read(self, indices: NDArray[np.int64], out: NDArray[np.uint8], windows: Windows | None = None) -> None:
        """Copies the samples `indices`, or a window of each, as ShardSet.gather does. Raises OSError if the storage
        fails."""

    def read_array(
        self, name: str, indices: NDArray[np.int64], out: NDArray[Any], windows: Windows | None = None
    ) -> None:
        """Copies the values of an array for the samples `indices`, or a window of each, as ShardSet.gather_array does.
        Raises OSError if the storage fails."""

    def array_crc32s(self, name: str, indices: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Returns the crc32 that the values of an array should have, for samples that exist. Raises OSError if the
        storage fails."""

    def begin_epoch(self) -> bool:
        """Decides how this epoch is read: from now on a complete copy takes the place of a distant source, and what is
        in the page cache is not announced. Returns whether `will_read` is worth its cost."""

    def will_read(
        self, indices: NDArray[np.int64], windows: Windows | None = None, of_arrays: Windows | None = None
    ) -> None:
        """Announces that these samples will be read soon: of the first of the reader's tables, the pictures, all or
        `windows`, and of other arrays of masks or images all or `of_arrays`. Never raises."""

    def counts(self) -> ReadCounts: ...

    def close(self) -> None:
        """Gives back descriptors. Reads under way finish; others fail. May be called again."""


class CountingReader:
    """The part that readers share: it counts, takes any window, announces nothing, and has nothing to give back."""

    def __init__(self) -> None:
        # Many threads count without a lock: each has a sum of its own.
        self._sums: dict[int, list[int]] = {}

    def _count(self, nbytes: int = 0, retries: int = 0, looked_for: int = 0, found: int = 0) -> None:
        sums = self._sums.setdefault(threading.get_ident(), [0] * len(ReadCounts._fields))
        for i, number in enumerate((nbytes, retries, looked_for, found)):
            sums[i] += number

    def whole_lines(self, name: str = "") -> int:
        return 0

    def begin_epoch(self) -> bool:
        return False

    def will_read(
        self, indices: NDArray[np.int64], windows: Windows | None = None, of_arrays: Windows | None = None
    ) -> None: ...

    def counts(self) -> ReadCounts:
        return ReadCounts(*(sum(column) for column in zip([0] * 4, *list(self._sums.values()), strict=True)))

    def close(self) -> None: ...
