"""Reads published sets in a folder or at an fsspec URL, and copies their files.

A storage reads ranges of bytes of named files and lists folders. Retries are made inside these calls. A copied file
gets its name only if its sha256 is right.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardio.errors import FormatError
from shardio.format.entries import FileEntry
from shardio.format.manifest import Manifest
from shardio.format.manifest_file import load_manifest
from shardio.format.opening import check_not_cut, open_sized, wrong_size
from shardio.sets.names import is_url, resolve
from shardio.sets.remote import RemoteStorage
from shardio.system.files import AtomicFile, reserve
from shardio.system.opening import FileAt, FolderHandle, OpenFiles, kind_of, missing_file, naming
from shardio.system.pour import TRANSIENT, Attempts, pour, reading_failed, synced_writes
from shardio.system.threads import Flag, Stop, ThreadPool

Read = Callable[[FileEntry, int, memoryview], None]
"""`read_into(entry, offset, buffer)` of a storage, or a function like it."""


class FolderStorage:
    """A folder that holds a set, or folders with sets in them. Read-only, and thread safe. Recent files stay open.

    `name` is the folder, for people to read.
    """

    def __init__(self, folder: str | os.PathLike[str] | FolderHandle) -> None:
        self._opened = folder if isinstance(folder, FolderHandle) else None
        self.name = str(folder)
        self._folder = os.path.abspath(self.name)  # wherever the process may go
        self.damaged: set[str] = set()
        """The names of the files whose sha256 was found wrong."""
        self.changed: set[str] = set()
        """The names of files that a web server has replaced, until the caller removes them; empty for folders."""
        self._files: OpenFiles[tuple[str | FileAt, FileEntry]] = OpenFiles(lambda file: open_sized(*file))

    def list_folders(self) -> list[str]:
        """Returns the names of the folders directly below, sorted. Raises OSError if that fails."""
        with os.scandir(self._folder) as entries:
            # Hidden ones are the temporary folders of publishers.
            return sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())

    def load_manifest(self, digest: str | None = None) -> Manifest:
        """Returns the manifest of the set: see `manifest_file.load_manifest`. Raises OSError if it cannot be read."""
        manifest = load_manifest(self._folder, digest)
        self._opened = FolderHandle(Path(self._folder), follow=True)  # whose files are read, wherever the path leads
        return manifest

    def path_of(self, entry: FileEntry) -> str:
        """Returns the path or URL of one of the set's files, for messages."""
        return f"{self._folder}/{entry.file}"

    def find_fault(self, manifest: Manifest) -> str:
        """Returns an error text about the first file that is missing or has the wrong size; "" if none is."""
        for entry in manifest.files:
            path = self.path_of(entry)
            try:
                status = os.lstat(path)
            except FileNotFoundError:
                return str(missing_file(path))
            if not stat.S_ISREG(status.st_mode):
                return f"{path}: expected a regular file, found {kind_of(status.st_mode)}"
            if status.st_size != entry.nbytes:
                return str(wrong_size(path, entry, status.st_size))
        return ""

    def read_into(self, entry: FileEntry, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` with the file's bytes from `offset` on. Retries transient errors.

        Raises OSError, which names file and offset, or FormatError if the file ends too early.
        """
        path = self.path_of(entry) if self._opened is None else self._opened / entry.file
        attempts = Attempts()
        done = 0
        while done < len(buffer):
            try:
                done += self._read_some(path, entry, offset + done, buffer[done:])
            except OSError as error:
                self._files.forget((path, entry))  # it may have become stale
                if not attempts.again(error.errno in TRANSIENT):
                    raise reading_failed(error, str(path), f"{len(buffer):,} bytes", offset, attempts.failed) from None

    def _read_some(self, path: str | FileAt, entry: FileEntry, offset: int, buffer: memoryview) -> int:
        """Reads at least one byte into `buffer`, from `offset` on. Returns the number of bytes read."""
        file = self._files.get((path, entry))
        try:
            if count := os.preadv(file.fileno(), [buffer], offset):
                return count
            check_not_cut(path, entry, os.fstat(file.fileno()).st_size)
            raise OSError(errno.EIO, "the file has its full size, but reading returned no bytes")
        finally:
            del file  # or a caller that keeps an error would keep the file open

    def close(self) -> None:
        """Closes files and connections; later reads fail. May be called again."""
        self._files.close()
        self._opened = None


Storage = FolderStorage | RemoteStorage


def open_storage(place: str | os.PathLike[str]) -> Storage:
    """Returns the storage of a folder or URL, without reading from it. Raises the errors of RemoteStorage."""
    place = resolve(place)
    return RemoteStorage(place) if is_url(place) else FolderStorage(place)


@dataclass(eq=False)
class FileCopier:
    """Copies files of `storage` in `workers` threads, whose names start with `name`, until `stop` is set.

    The threads call `on_progress` with the number of bytes since the last call, which is negative when the copy of a
    file starts again, and with `total`, the bytes of all files.
    """

    storage: Storage
    workers: int
    name: str
    on_progress: Callable[[int, int], None] | None = None
    total: int = 0
    stop: Flag = field(default_factory=Flag)

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1; found {self.workers}")
        self._failed = Flag()

    def copy(self, folder: Path | FolderHandle, entries: Sequence[FileEntry]) -> None:
        """Copies the files `entries` into `folder`. Raises FormatError if a file of the storage is damaged."""
        self.each(lambda entry: self._copy(folder / entry.file, entry), entries)

    def find_damaged(self, folder: Path | FolderHandle, entries: Sequence[FileEntry]) -> list[FileEntry]:
        """Returns those of the files `entries` that have a wrong sha256 or cannot be read in `folder`, a copy."""
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
        """Calls `do` with each of `entries`, in threads. Raises the first error, after which no further call starts."""
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

        with ThreadPool(self.workers, self.name) as pool:
            try:
                for _ in pool.map(work, entries):
                    pass
            except BaseException:
                self._failed.set()  # also by a Ctrl-C
                raise

    def ends(self) -> bool:
        """Returns whether copying ends early: `stop` is set, or a file has failed."""
        return self._failed.is_set() or self.stop.is_set()

    def _copy(self, path: Path | FileAt, entry: FileEntry) -> None:
        found = ""
        for _ in range(2):  # damage on the way does not happen again
            with AtomicFile(path) as file:
                with naming(path):
                    reserve(file.descriptor, entry.nbytes)
                with synced_writes(path, file.descriptor) as write:
                    found = self._pour(self.storage.read_into, entry, write)
                if found == entry.sha256:
                    file.commit()
                    return
            self.count(-entry.nbytes)
        raise self.damaged(entry, found)

    def damaged(self, entry: FileEntry, found: str) -> FormatError:
        """Returns the FormatError for a file with the sha256 `found`. Adds the file's name to `storage.damaged`."""
        self.storage.damaged.add(entry.file)
        path = self.storage.path_of(entry)
        # `verify` takes no URL. A merge copies from several folders.
        place = "FOLDER` of a download of its files" if is_url(path) else f"{shlex.quote(os.path.dirname(path))}`"
        return FormatError(
            f"{path}: sha256: expected {entry.sha256}, found {found}: the source is damaged; `shardio verify {place} "
            "names the samples, and `shardio repair` mends it"
        )

    def count(self, nbytes: int) -> None:
        """Reports `nbytes` more bytes, or fewer if negative, to `on_progress`."""
        if self.on_progress is not None:
            self.on_progress(nbytes, self.total)

    def _pour(self, read_into: Read, entry: FileEntry, write: Callable[[memoryview], object] | None = None) -> str:
        """Reads a file by `read_into`, and passes each piece to `write`. Returns the file's sha256."""
        poured = 0

        def read(offset: int, buffer: memoryview) -> None:
            if self.ends():
                raise Stop
            read_into(entry, offset, buffer)

        def progress(nbytes: int) -> None:
            nonlocal poured
            self.count(nbytes)
            poured += nbytes

        try:
            return pour(read, entry.nbytes, write, progress)
        finally:
            if 0 < poured < entry.nbytes:  # it may be begun again
                self.count(-poured)
