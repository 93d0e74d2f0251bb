"""The unfinished files of a copy, which all processes of the node fill together.

An unfinished file has its full size and a hidden name, `.NAME.part`. It consists of blocks. The file `.blocks-BOOT` has
one byte for each block of the set: the block's state. BOOT is the id of the machine's boot: a crash of the machine may
lose written blocks, so the states of earlier boots are not used. A process without the right to fill the copy holds a
shared lock on a file while it writes to the file. A file is locked exclusively while it is hashed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardio.cache.leases import lock_within, open_in_cache
from shardio.errors import CacheError
from shardio.format.entries import FileEntry, ShardEntry
from shardio.format.layout import HEADER_NBYTES
from shardio.format.manifest import Manifest
from shardio.reading.mapping import RowMapping
from shardio.sets.storage import Read
from shardio.system.files import fsync_folder, lock_at_once, write_all
from shardio.system.machine import boot_id
from shardio.system.opening import FileAt, FolderHandle, OpenFile, at, naming
from shardio.system.pour import pour

# A block is at least as long as a cheap request, and so short that a few of them are a small part of the memory.
_LEAST_NBYTES = 16 << 10
_MOST_NBYTES = 4 << 20
# A block of a file that has no rows, or longer rows.
_PLAIN_NBYTES = 1 << 20

MISSING, THERE, COMING = 0, 1, 2
"""The states of a block."""

# How long to wait for a block that another process fetches, before it is fetched here too.
_COMING_SECONDS = 2.0
_POLL_SECONDS = 0.002
# A process that adds a block to a file locks the file for a moment.
_LOCK_SECONDS = 60.0
_STATES_PREFIX = ".blocks-"
_PART_SUFFIX = ".part"


@dataclass(frozen=True)
class FileBlocks:
    """The division of one file into blocks. The first block includes the header; the last block may be shorter."""

    nbytes: int
    """The size of the file."""
    first: int
    """The number of the file's first block among all blocks of the set."""
    header_nbytes: int
    size: int
    """The bytes of a block; the first block also has the header."""
    num_rows: int
    """The rows of a block; 0 if blocks may begin or end within a row."""

    @property
    def count(self) -> int:
        return max(1, -(-(self.nbytes - self.header_nbytes) // self.size))

    def start(self, block: int) -> int:
        """Returns the offset in the file at which block number `block` begins. The block `count` begins at the end."""
        return min(self.header_nbytes + block * self.size, self.nbytes) if block else 0

    def around(self, start: int, stop: int) -> tuple[int, int]:
        """Returns (first, end): the blocks `first` to `end` - 1 overlap the bytes [start, stop) of the file."""
        first, last = (max(0, byte - self.header_nbytes) // self.size for byte in (start, stop - 1))
        return first, last + 1

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """Returns (first, end): the blocks `first` to `end` - 1 lie entirely in the bytes [start, stop) of the file."""
        first = 0 if start <= 0 else -(-max(1, start - self.header_nbytes) // self.size)
        return first, self.count if stop >= self.nbytes else max(0, stop - self.header_nbytes) // self.size


def blocks_of(manifest: Manifest) -> dict[FileEntry, FileBlocks]:
    """Returns the blocks of each file of a set.

    In shards of pixels and arrays, blocks are whole rows, unless rows are longer than 4 MiB.
    """
    found: dict[FileEntry, FileBlocks] = {}
    first = 0
    for entry in manifest.files:
        header, size, num_rows = 0, _PLAIN_NBYTES, 0
        if isinstance(entry, ShardEntry) and entry.num_samples:
            row_nbytes = (entry.nbytes - HEADER_NBYTES) // entry.num_samples
            if 0 < row_nbytes <= _MOST_NBYTES:
                num_rows = -(-_LEAST_NBYTES // row_nbytes)
                header, size = HEADER_NBYTES, num_rows * row_nbytes
        found[entry] = FileBlocks(entry.nbytes, first, header, size, num_rows)
        first += found[entry].count
    return found


class PartialCopy:
    """The unfinished files of the copy in `folder`, and the states of their blocks.

    `states` is uint8 (blocks of the set,), memory that all processes of the node share. The process with the right to
    fill the copy creates the files by `begin`. Only that process may call `write` and `finish`. Other processes of the
    same user open the files by `find`, and may call `add`.
    """

    def __init__(self, folder: Path | FolderHandle, manifest: Manifest, *, create: bool) -> None:
        """Opens the file with the blocks' states. With `create`, makes it if needed. Otherwise raises OSError if the
        file does not exist, and CacheError if the file is another user's or is being made."""
        self.blocks = blocks_of(manifest)
        self._folder = folder
        self._states_path = folder / (_STATES_PREFIX + boot_id())
        count = sum(each.count for each in self.blocks.values())
        nbytes = HEADER_NBYTES + count
        with naming(self._states_path):
            file = open_in_cache(self._states_path, os.O_RDWR | (os.O_CREAT if create else 0))
            status = os.fstat(file.fileno())
            if not create and (status.st_size, status.st_uid) != (nbytes, os.geteuid()):
                raise CacheError(
                    f"{self._states_path}: expected {nbytes:,} bytes, and this user as owner: run `shardio stage` again"
                )
            if status.st_size != nbytes:
                os.ftruncate(file.fileno(), 0)
                write_all(file.fileno(), bytes(nbytes))  # so a full disk is an error here
            mapping = RowMapping([count], 1)
            mapping.map_file(0, file)
        self.states: NDArray[np.uint8] = mapping.rows[:, 0]

    @classmethod
    def begin(cls, folder: FolderHandle, manifest: Manifest, missing: Collection[FileEntry]) -> PartialCopy:
        """Returns the PartialCopy, with an unfinished file for each entry in `missing`. Keeps blocks that are THERE."""
        copy = cls(folder, manifest, create=True)
        _remove(folder, lambda name: name.startswith(_STATES_PREFIX) and name != copy._states_path.name)
        # What a killed process was fetching is missing.
        copy._set_states(0, np.where(copy.states == THERE, THERE, MISSING).astype(np.uint8).tobytes())
        for entry in copy.blocks:
            if entry in missing:
                copy.make(entry)
            else:
                copy.mark(entry, THERE)
        return copy

    @classmethod
    def find(cls, folder: Path, manifest: Manifest) -> PartialCopy | None:
        """Returns the unfinished files of the copy in `folder`; None if it has none, or they are another user's."""
        with contextlib.suppress(OSError, CacheError):
            return cls(folder, manifest, create=False)
        return None

    def path_of(self, entry: FileEntry) -> Path | FileAt:
        return part_of(self._folder, entry)

    def has(self, entry: FileEntry) -> bool:
        """Returns whether a file is unfinished: it has its hidden name, perhaps as a link to another copy's file."""
        return os.path.lexists(str(self.path_of(entry)))

    def open(self, entry: FileEntry, flags: int = os.O_RDONLY) -> OpenFile:
        """Opens an unfinished file. Raises CacheError for a link to another copy's file, unless it is only read."""
        return open_in_cache(self.path_of(entry), flags)

    def make(self, entry: FileEntry) -> None:
        """Creates an unfinished file with all blocks MISSING, unless it exists. Replaces a link to another copy's file,
        which must not be written to."""
        path = self.path_of(entry)
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_nlink > 1:
                path.unlink()
        with self.open(entry, os.O_RDWR | os.O_CREAT) as file, naming(path):
            if os.fstat(file.fileno()).st_size != entry.nbytes:  # it is new
                self.mark(entry, MISSING)
                os.ftruncate(file.fileno(), entry.nbytes)

    def states_of(self, entry: FileEntry, start: int, stop: int) -> NDArray[np.uint8]:
        """Returns the states of the blocks that overlap the bytes [start, stop) of a file: MISSING, THERE or COMING,
        uint8 (blocks,), in memory that other processes change at any time."""
        blocks = self.blocks[entry]
        first, last = blocks.around(start, stop)
        return self.states[blocks.first + first : blocks.first + last]

    def mark(self, entry: FileEntry, state: int, start: int = 0, stop: int | None = None) -> None:
        """Sets the state of the blocks that lie entirely in the bytes [start, stop) of a file, by default of all."""
        blocks = self.blocks[entry]
        first, last = blocks.within(start, entry.nbytes if stop is None else stop)
        if first < last:
            self._set_states(blocks.first + first, bytes([state]) * (last - first))

    def wait(self, entry: FileEntry, start: int, stop: int) -> None:
        """Waits until no block that overlaps the bytes [start, stop) is COMING, but at most 2 seconds: the process that
        fetches the block may have been killed."""
        states, deadline = self.states_of(entry, start, stop), time.monotonic() + _COMING_SECONDS
        while (states == COMING).any() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _set_states(self, number: int, values: bytes) -> None:
        path = self._states_path
        # It is removed when the copy is complete.
        with contextlib.suppress(FileNotFoundError), open_in_cache(path, os.O_RDWR) as file, naming(path):
            os.pwrite(file.fileno(), values, HEADER_NBYTES + number)

    def read(self, entry: FileEntry, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` with the bytes of an unfinished file, starting at byte `offset`."""
        with self.open(entry) as file, naming(self.path_of(entry)):
            if os.preadv(file.fileno(), [buffer], offset) < len(buffer):
                raise OSError(
                    errno.EIO,
                    f"expected {entry.nbytes} bytes in this unfinished copy, found fewer: a process truncated it. "
                    "The set is not affected: run `shardio stage` or the training again, which copies the file again",
                )

    def write(self, entry: FileEntry, offset: int, data: memoryview) -> None:
        """Writes `data` into an unfinished file at byte `offset`, and marks the blocks that it covers as THERE."""
        with self.open(entry, os.O_RDWR) as file, naming(self.path_of(entry)):
            file.seek(offset)
            write_all(file.fileno(), data)
        self.mark(entry, THERE, offset, offset + len(data))

    def fetch(
        self,
        entry: FileEntry,
        start: int,
        stop: int,
        read_into: Read,
        write: Callable[[FileEntry, int, memoryview], None],
    ) -> memoryview:
        """Returns the bytes [start, stop) of a file, which are whole blocks, after passing them to `write`.

        `read_into(entry, start, buffer)` reads them, and `write(entry, start, data)` gets them. The blocks are COMING
        meanwhile, and MISSING again after an error.
        """
        data = memoryview(bytearray(stop - start))
        self.mark(entry, COMING, start, stop)
        try:
            read_into(entry, start, data)
            write(entry, start, data)
        except BaseException:
            self.mark(entry, MISSING, start, stop)
            raise
        return data

    def add(self, entry: FileEntry, start: int, data: memoryview) -> None:
        """Writes `data`, whole blocks, into an unfinished file at byte `start`. On an error, marks them as MISSING.

        Writes nothing if the blocks are THERE, or if another process is finishing the file.
        """
        try:
            with self.open(entry, os.O_RDWR) as file, naming(self.path_of(entry)):
                free = lock_at_once(file.fileno(), fcntl.LOCK_SH)
                if free and (self.states_of(entry, start, start + len(data)) != THERE).any():
                    self.write(entry, start, data)
                fcntl.flock(file.fileno(), fcntl.LOCK_UN)  # a process that was forked meanwhile has the open file, too
        except (OSError, CacheError):  # finished, or the disk is full
            self.mark(entry, MISSING, start, start + len(data))  # or others would wait for it

    def runs(self, entry: FileEntry, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Returns the bytes [start, stop) of a file as ranges (start, stop, state) of blocks with the same state."""
        blocks, states = self.blocks[entry], self.states_of(entry, start, stop).copy()
        first = blocks.around(start, stop)[0]
        ends = [0, *(np.flatnonzero(np.diff(states)) + 1).tolist(), len(states)]
        return [
            (max(start, blocks.start(first + begin)), min(stop, blocks.start(first + end)), int(states[begin]))
            for begin, end in pairwise(ends)
        ]

    def finish(self, entry: FileEntry) -> str:
        """Returns the sha256 of an unfinished file. If it is right, renames the file to its own name, durably.

        If it is wrong, marks all blocks as MISSING. If the file cannot be synced, removes it and raises OSError.
        """
        path = self.path_of(entry)
        with self.open(entry) as file, naming(path):
            lock_within(file.fileno(), fcntl.LOCK_EX, _LOCK_SECONDS)
            sha256 = pour(lambda offset, buffer: os.preadv(file.fileno(), [buffer], offset), entry.nbytes)
            if sha256 != entry.sha256:
                self.make(entry)
                self.mark(entry, MISSING)
                fcntl.flock(file.fileno(), fcntl.LOCK_UN)
                return sha256
            try:
                os.fsync(file.fileno())
            except OSError:
                # The system now calls the pages clean: a second sync would succeed, and nothing be on the disk.
                with contextlib.suppress(OSError):
                    path.unlink()
                self.mark(entry, MISSING)
                raise
            (old, there), (new, here) = at(path), at(self._folder / entry.file)
            os.rename(old, new, src_dir_fd=there, dst_dir_fd=here)
        fsync_folder(self._folder)
        return sha256


def remove_parts(folder: FolderHandle) -> None:
    """Removes a copy's unfinished files, and the states of their blocks. Processes with open files may still use
    these."""
    _remove(folder, lambda name: name.startswith(_STATES_PREFIX) or (name[:1] == "." and name.endswith(_PART_SUFFIX)))


def part_of(folder: Path | FolderHandle, entry: FileEntry) -> Path | FileAt:
    return folder / f".{entry.file}{_PART_SUFFIX}"


def _remove(folder: FolderHandle, is_meant: Callable[[str], bool]) -> None:
    for name in filter(is_meant, os.listdir(folder.fileno())):
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            (folder / name).unlink()
