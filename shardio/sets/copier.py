"""Copies files of a set into a folder, hashing each on the way.

A file gets its final name only if its sha256 is right."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path

from shardio.errors import FormatError
from shardio.format.entries import FileEntry
from shardio.sets.storage import FolderStorage, Storage
from shardio.system.files import AtomicFile, reserve
from shardio.system.opening import FileAt, FolderHandle, naming
from shardio.system.pour import pour, synced_writes
from shardio.system.threads import Flag, Stop, ThreadPool

Read = Callable[[FileEntry, int, memoryview], None]
"""`Storage.read_into`, or a function like it."""


class FileCopier:
    """Copies files of `storage` into a folder, `workers` at a time, until `stop` is set.

    The names of the threads begin with `name`. The threads call `on_progress` with the number of bytes since the last
    call, which is negative when the copy of a file starts again, and with `total`, the bytes of all files.
    """

    def __init__(
        self,
        storage: Storage,
        workers: int,
        name: str,
        on_progress: Callable[[int, int], None] | None = None,
        total: int = 0,
        stop: Flag | None = None,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1; found {workers}")
        self.copied: list[FileEntry] = []
        """The files that have been copied so far, complete and durable."""
        self.total = total
        self._storage = storage
        self._workers = workers
        self._name = name
        self._on_progress = on_progress
        self._stop = stop or Flag()
        self._failed = Flag()

    def copy(self, folder: Path | FolderHandle, entries: Sequence[FileEntry]) -> None:
        """Copies the files, or only some of them if `stop` is set meanwhile. Raises FormatError if one is damaged."""
        self.each(lambda entry: self._copy(folder / entry.file, entry), entries)

    def find_damaged(self, folder: Path | FolderHandle, entries: Sequence[FileEntry]) -> list[FileEntry]:
        """Returns the files of the copy that have a wrong sha256 or cannot be read."""
        copy = FolderStorage(folder)
        damaged: list[FileEntry] = []

        def check(entry: FileEntry) -> None:
            try:
                if self._pour(copy.read_into, entry) == entry.sha256:
                    return
            except FormatError:  # it is being cut
                pass
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
            damaged.append(entry)

        self.each(check, entries)
        return [entry for entry in entries if entry in damaged]

    def each(self, do: Callable[[FileEntry], None], entries: Sequence[FileEntry]) -> None:
        """Calls `do` with each file, in threads. When one thread fails, the other threads end soon."""
        self._failed = Flag()

        def work(entry: FileEntry) -> None:
            try:
                if not self.ends():
                    do(entry)
            except Stop:
                pass
            except Exception:
                self._failed.set()
                raise

        with ThreadPool(self._workers, self._name) as pool:
            try:
                for _ in pool.map(work, entries):
                    pass
            except BaseException:
                self._failed.set()  # also by a Ctrl-C
                raise

    def ends(self) -> bool:
        """Whether copying ends early: `stop` is set, or a file has failed."""
        return self._failed.is_set() or self._stop.is_set()

    def _copy(self, path: Path | FileAt, entry: FileEntry) -> None:
        found = ""
        for _ in range(2):  # damage on the way does not happen again
            with AtomicFile(path) as file:
                with naming(path):
                    reserve(file.descriptor, entry.nbytes)
                with synced_writes(path, file.descriptor) as write:
                    found = self._pour(self._storage.read_into, entry, write)
                if found == entry.sha256:
                    file.commit()
                    self.copied.append(entry)
                    return
            self.count(-entry.nbytes)
        raise self.damaged(entry, found)

    def damaged(self, entry: FileEntry, found: str) -> FormatError:
        """Returns the error of a file whose sha256 is `found`."""
        return FormatError(
            f"{self._storage.path_of(entry)}: sha256: expected {entry.sha256}, found {found}: the source is damaged; "
            f"`shardio verify {self._storage.name}` names the samples, and says how to repair it"
        )

    def count(self, nbytes: int) -> None:
        """Counts bytes as progress."""
        if self._on_progress is not None:
            self._on_progress(nbytes, self.total)

    def _pour(self, read_into: Read, entry: FileEntry, write: Callable[[memoryview], object] | None = None) -> str:
        """Reads a file by `read_into`, and passes each piece to `write`. Returns the file's sha256."""
        poured = 0

        def read(offset: int, buffer: memoryview) -> int:
            if self.ends():
                raise Stop
            read_into(entry, offset, buffer)
            return len(buffer)

        def progress(nbytes: int) -> None:
            nonlocal poured
            self.count(nbytes)
            poured += nbytes

        try:
            return pour(read, entry.nbytes, write, progress)
        finally:
            if 0 < poured < entry.nbytes:  # it may be begun again
                self.count(-poured)
