"""A split to be read: what every kind of it can do, and the split that is read where it lies."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardio.reading.choose import Io, alignment_of, make_reader
from shardio.reading.file_reader import FileReader
from shardio.reading.guard import SecondReader
from shardio.reading.reader import Reader
from shardio.reading.shardset import ShardSet, open_shards


class SplitSource(Protocol):
    """Opens a split, and makes the readers of its samples. To be used by one thread.

    `num_samples` is known from the beginning; `open` comes before all other calls but `stop` and `close`.
    """

    @property
    def num_samples(self) -> int: ...

    def open(self, batches: Iterable[NDArray[np.int64]]) -> ShardSet:
        """Returns the split, to be read at once. `batches` are the indices that will be read first."""

    def make_reader(self, io: Io, num_samples: int, tables: Sequence[str] = ("",), reserved_nbytes: int = 0) -> Reader:
        """Returns the reader that `io` asks for, of which so many samples will be wanted: the arrays `tables`, "" for
        the pixels. The job has yet to allocate `reserved_nbytes` on this node. Raises ValueError if it cannot work
        here."""

    def make_second(self) -> SecondReader:
        """Returns what reads samples again that came damaged."""

    def describe(self) -> dict[str, Any]:
        """Returns the entries `io_reason` and `staging` of `ShardLoader.stats`, after `make_reader`."""

    def stop(self) -> None:
        """Has what is under way end soon, and further reads of what lies elsewhere fail. Does not wait."""

    def close(self) -> None:
        """Ends what is under way. May be called again, also where it was interrupted."""


class LocalSplit:
    """A split that is read where it lies. It has nothing to end."""

    _io_reason: str

    def __init__(self, path: str | os.PathLike[str], split: str, digest: str | None) -> None:
        self._shards = open_shards(path, split, digest=digest)

    @property
    def num_samples(self) -> int:
        return len(self._shards)

    def open(self, batches: Iterable[NDArray[np.int64]]) -> ShardSet:
        return self._shards

    def make_reader(self, io: Io, num_samples: int, tables: Sequence[str] = ("",), reserved_nbytes: int = 0) -> Reader:
        reader, self._io_reason = make_reader(self._shards, io, num_samples, tables, reserved_nbytes)
        return reader

    def make_second(self) -> FileReader:
        """The files' own bytes, past the page cache if that is possible: a page in memory may be what is wrong."""
        return FileReader(self._shards, alignment=alignment_of(self._shards))

    def describe(self) -> dict[str, Any]:
        return {"io_reason": self._io_reason, "staging": None}

    def stop(self) -> None: ...

    def close(self) -> None: ...
