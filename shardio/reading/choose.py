"""Chooses the reader that suits a split on this machine, and gives the reason; and opens splits.

`look_at` collects facts, and `choose` decides from the facts alone. A set larger than the page cache would evict
everything else and still be read from the disk, so it is read past the cache. A network filesystem is never mapped: a
thread that waits for a page cannot be interrupted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.errors import bytes_text, check_choice
from shardio.reading.file_reader import FileReader
from shardio.reading.reader import MappedReader, Reader
from shardio.reading.shardset import ShardSet, open_shards
from shardio.system.machine import filesystem_kind, is_network, memory_left
from shardio.system.pour import direct_alignment

Io = Literal["auto", "mmap", "pread", "direct"]

# The share of the memory that is left for the page cache: the job has yet to allocate the rest.
_SHARE_FOR_THE_SET = 0.75
# So much is announced to the kernel ahead of the batches that are due: enough to keep a fast disk busy between two
# steps.
_READ_AHEAD_NBYTES = 256 << 20
_READ_AHEAD_BATCHES = 8
_SHARE_FOR_READ_AHEAD = 0.25


@dataclass(frozen=True)
class ReaderFacts:
    """The facts from which `choose` picks a reader. None means unknown."""

    filesystem: str
    """The kind of filesystem that holds the set, as mount(8) names it; "" if unknown."""
    nbytes: int
    """Bytes that one epoch reads."""
    resident_share: float | None
    """The share of the set that is in the page cache, from 0 to 1."""
    memory_left: int | None
    """Bytes of free memory (`machine.memory_left`), less the bytes reserved for batches."""
    direct_alignment: int | None
    """The alignment in bytes that O_DIRECT requires; None if O_DIRECT does not work on the filesystem."""


class ReaderChoice(NamedTuple):
    engine: Literal["mmap", "pread", "direct"]
    drop_behind: bool
    """Whether to drop bytes from the page cache once they are read."""
    reason: str


def choose(facts: ReaderFacts) -> ReaderChoice:
    """Returns the reader for io="auto", chosen from `facts` alone."""
    size = f"the set's {bytes_text(facts.nbytes)}"
    fits = facts.memory_left is None or facts.nbytes <= _SHARE_FOR_THE_SET * facts.memory_left
    reason = f"how much memory is left for {size} is unknown"
    if facts.memory_left is not None:
        left = f"the {bytes_text(facts.memory_left)} of memory that are left"
        reason = f"{size} {'fit' if fits else 'do not fit'} in {left}"
    if is_network(facts.filesystem):
        network = f"{facts.filesystem} is a network filesystem: many reads at a time, each tried again if it fails"
        past_cache = "" if fits else f"; {reason}, so nothing is kept in the page cache"
        return ReaderChoice("pread", not fits, network + past_cache)
    if facts.resident_share == 1.0:
        return ReaderChoice("mmap", False, "the set is in the page cache")
    if fits:
        return ReaderChoice("mmap", False, reason)
    if facts.direct_alignment is not None:
        return ReaderChoice("direct", False, reason)
    where = facts.filesystem or "this filesystem"
    return ReaderChoice("pread", True, f"{reason}, and O_DIRECT does not work on {where}")


def look_at(shards: ShardSet, num_samples: int, tables: Sequence[str] = ("",), reserved_nbytes: int = 0) -> ReaderFacts:
    """Returns the facts for a loader that reads `num_samples` samples per epoch.

    - `tables`: the names of the arrays to read; "" for the pixels
    - `reserved_nbytes`: the memory that all ranks of the job on this node will allocate for batches; it counts as used
    """
    kind = filesystem_kind(shards.path)
    left = memory_left()
    return ReaderFacts(
        filesystem=kind,
        nbytes=num_samples * sum(shards.table_of(name).row_nbytes for name in tables),
        resident_share=None if is_network(kind) else resident_share_of(shards, tables),
        memory_left=None if left is None else max(0, left - reserved_nbytes),
        direct_alignment=alignment_of(shards),
    )


def resident_share_of(shards: ShardSet, tables: Sequence[str]) -> float | None:
    """Returns the share of the `tables` in the page cache, from 0 to 1: the smallest of the tables' shares. Returns
    None if the kernel does not report it, or does not map the files."""
    with contextlib.suppress(OSError):
        shares = [shards.resident_share(name=name) for name in tables]
        return min((share for share in shares if share is not None), default=None)
    return None


def make_reader(
    shards: ShardSet, io: Io, num_samples: int, tables: Sequence[str] = ("",), reserved_nbytes: int = 0
) -> tuple[Reader, str]:
    """Returns the reader for `io`, and the reason for the choice. For the other arguments see `look_at`. Raises
    ValueError if `io` is unknown, or if `io` is "direct" and O_DIRECT does not work on the set's filesystem."""
    check_choice("io", io, Io)
    if io == "auto":
        choice = choose(look_at(shards, num_samples, tables, reserved_nbytes))
    else:
        choice = ReaderChoice(io, False, f"asked for by io={io!r}")
    if choice.engine == "mmap":
        try:
            return MappedReader(shards, tables), choice.reason
        except OSError as error:
            if io == "mmap":
                raise
            choice = ReaderChoice("pread", False, str(error))
    shards.unmap()  # which the page cache was looked at through
    kind = filesystem_kind(shards.path)
    alignment = alignment_of(shards) if choice.engine == "direct" else None
    if choice.engine == "direct" and alignment is None:
        where = f"{shards.path}: O_DIRECT does not work on {kind or 'this filesystem'}"
        raise ValueError(f'{where}: use io="auto", "mmap" or "pread"')
    reader = FileReader(shards, alignment=alignment, drop_behind=choice.drop_behind, remote=is_network(kind))
    return reader, choice.reason


def read_ahead_batches(batch_nbytes: int, left: int | None) -> int:
    """Returns how many batches of `batch_nbytes` bytes to announce to the kernel, in addition to the batches under way.
    `left` is the free memory in bytes; None if unknown."""
    room = _READ_AHEAD_NBYTES if left is None else min(_READ_AHEAD_NBYTES, int(_SHARE_FOR_READ_AHEAD * left))
    return min(_READ_AHEAD_BATCHES, room // max(1, batch_nbytes))


def alignment_of(shards: ShardSet) -> int | None:
    """Returns the alignment in bytes that O_DIRECT requires for the set's files; None if O_DIRECT does not work."""
    return direct_alignment(shards.path_of(shards.content.files[-1]))


class SplitSource:
    """Opens a split, and makes the readers of its samples. To be used by one thread. Call `open` first: before, only
    `num_samples`, `digest`, `stop` and `close` may be used. The subclass CachedSplit reads a copy in a cache."""

    staging: dict[str, Any] | None = None
    """What `ShardLoader.stats` says about the copy in a cache."""

    def __init__(self, path: str | os.PathLike[str], split: str, digest: str | None) -> None:
        self._shards = open_shards(path, split, digest=digest, mapped=False)
        self.num_samples, self.digest = len(self._shards), self._shards.digest

    def open(self, batches: Iterable[NDArray[np.int64]]) -> ShardSet:
        """Opens the split, and returns it. `batches` are the sample indices of the first batches that will be read."""
        return self._shards

    def make_reader(self, io: Io, num_samples: int, tables: Sequence[str] = ("",), reserved_nbytes: int = 0) -> Reader:
        """Returns the reader for `io`. See the function `make_reader` for arguments and errors."""
        reader, self._io_reason = make_reader(self._shards, io, num_samples, tables, reserved_nbytes)
        return reader

    def make_second(self) -> Reader:
        """Returns a second reader, which reads a sample again if its crc32 is wrong: past the page cache if possible,
        because a page in the cache may be damaged."""
        return FileReader(self._shards, alignment=alignment_of(self._shards))

    def describe(self) -> dict[str, Any]:
        """Returns the entries `io_reason` and `staging` of `ShardLoader.stats`. Call `make_reader` first."""
        return {"io_reason": self._io_reason, "staging": self.staging}

    def stop(self) -> None:
        """Tells the copying into a cache to end, and makes reads from the set's storage fail. Does not wait."""

    def close(self) -> None:
        """Calls `stop`, waits until the copying has ended, and ends the lease on the copy. May be called again."""
