"""Reads published sets in a folder or at an fsspec URL.

A storage reads whole ranges of named files and lists folders. Errors and retries are handled inside these calls.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Protocol

from shardio.format.entries import FileEntry
from shardio.format.manifest import Manifest
from shardio.format.manifest_file import load_manifest
from shardio.format.opening import check_not_cut, open_sized, wrong_size
from shardio.sets.names import is_url
from shardio.sets.remote import RemoteStorage
from shardio.system.opening import FileAt, FolderHandle, OpenFiles, kind_of, missing_file, most_open
from shardio.system.pour import TRANSIENT, Attempts, reading_failed


class Storage(Protocol):
    """A folder or URL that holds a set, or folders with sets in them. Read-only, and thread safe."""

    name: str
    """The folder or URL, for people to read: credentials in a URL are left out."""

    def list_folders(self) -> list[str]:
        """Returns the names of the folders directly below, in order. Raises OSError if that fails."""

    def load_manifest(self, digest: str | None = None) -> Manifest:
        """See `manifest_file.load_manifest`. Raises OSError if the manifest cannot be read."""

    def path_of(self, entry: FileEntry) -> str:
        """Returns the name of one of the set's files for a message."""

    def find_fault(self, manifest: Manifest) -> str:
        """Returns, in words, the first file that is missing or has another size than the manifest says; "" if all are
        right.

        Opens no file. In a folder, it reads the sizes of the files; an object store is listed once. A web server, which
        cannot list sizes, is not checked. Raises OSError if that fails.
        """

    def read_into(self, entry: FileEntry, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` with the file's bytes from `offset` on.

        Transient errors are retried for a while. Raises OSError with file and offset, or FormatError if the file
        ends too early.
        """

    def close(self) -> None:
        """Closes files and connections; later reads fail. May be called again."""


class FolderStorage:
    """A set in a folder, on any filesystem. Recently read files stay open."""

    def __init__(self, folder: str | os.PathLike[str] | FolderHandle) -> None:
        self._opened = folder if isinstance(folder, FolderHandle) else None
        self.name = str(folder)
        self._folder = os.path.abspath(self.name)  # wherever the process may go
        self._files: OpenFiles[tuple[str | FileAt, FileEntry]] = OpenFiles(lambda file: open_sized(*file), most_open())

    def list_folders(self) -> list[str]:
        with os.scandir(self._folder) as entries:
            # Hidden ones are the temporary folders of publishers.
            return sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())

    def load_manifest(self, digest: str | None = None) -> Manifest:
        return load_manifest(self._folder, digest)

    def path_of(self, entry: FileEntry) -> str:
        return f"{self._folder}/{entry.file}"

    def find_fault(self, manifest: Manifest) -> str:
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
        """Reads at least one byte into `buffer`. Returns the number of bytes read."""
        file = self._files.get((path, entry))
        try:
            if count := os.preadv(file.fileno(), [buffer], offset):
                return count
            check_not_cut(path, entry, os.fstat(file.fileno()).st_size)
            raise OSError(errno.EIO, "no bytes came")
        finally:
            del file  # or a caller that keeps an error would keep the file open

    def close(self) -> None:
        self._files.close()


def open_storage(place: str | os.PathLike[str]) -> Storage:
    """Returns the storage of a folder or URL without reading from it. Raises the errors of RemoteStorage."""
    place = os.fspath(place)
    if place.startswith("file://"):
        return FolderStorage(place.removeprefix("file://"))
    return RemoteStorage(place) if is_url(place) else FolderStorage(place)
