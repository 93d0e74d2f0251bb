"""Where a published set lies, to be copied or read from a distance: a folder, or what an fsspec URL names.

A storage gives whole ranges of named files and nothing else, so that all that can go wrong on the way, and what is to
be tried again, is behind one call.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from typing import Protocol

from shardio.format.manifest import FileEntry, Manifest, load_manifest
from shardio.format.opening import check_not_cut, open_sized
from shardio.sets.names import candidates, catalogue_roots, holds_set, is_url, not_in_catalogue
from shardio.sets.remote import RemoteStorage
from shardio.system.files import OpenFile, kind_of
from shardio.system.openfiles import OpenFiles, most_open
from shardio.system.retry import RETRY_SECONDS, TRANSIENT, reading_failed


class Storage(Protocol):
    """Read-only, and thread safe."""

    name: str
    """The folder or URL, for people to read: credentials in a URL are left out."""

    def load_manifest(self, digest: str | None = None) -> Manifest:
        """As `manifest.load_manifest`; OSError if it cannot be read."""

    def path_of(self, entry: FileEntry) -> str:
        """What to call one of the set's files in a message."""

    def check(self, entry: FileEntry) -> None:
        """FormatError if the file is missing or has another size than the manifest says; reads nothing of it."""

    def find_fault(self, manifest: Manifest) -> str:
        """The first file that is missing or has another size than the manifest says, in words; "" if none is found.

        No file is opened: a folder's are asked for their sizes, an object store for one listing, and a web server,
        which has no listing with sizes, for nothing. OSError if that fails.
        """

    def read_into(self, entry: FileEntry, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the file's bytes from `offset` on, all of which the manifest says there are.

        What may pass is tried again for a while. Then OSError names file and offset; FormatError if the file ends
        before.
        """

    def close(self) -> None:
        """Give back descriptors and connections. Nothing can be read any more; may be called again."""


class FolderStorage:
    """A set in a folder, on any filesystem. The files that were read last stay open."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.name = os.fspath(folder)
        self._folder = os.path.abspath(folder)  # wherever the process may go
        self._files: OpenFiles[tuple[str, FileEntry]] = OpenFiles(_open_sized, most_open())

    def load_manifest(self, digest: str | None = None) -> Manifest:
        return load_manifest(self._folder, digest)

    def path_of(self, entry: FileEntry) -> str:
        return f"{self._folder}/{entry.file}"

    def check(self, entry: FileEntry) -> None:
        open_sized(self.path_of(entry), entry).close()

    def find_fault(self, manifest: Manifest) -> str:
        for entry in manifest.files:
            path = self.path_of(entry)
            try:
                status = os.lstat(path)
            except FileNotFoundError:
                return f"{path}: expected a file of the shard set, found nothing"
            if not stat.S_ISREG(status.st_mode):
                return f"{path}: expected a regular file, found {kind_of(status.st_mode)}"
            if status.st_size != entry.nbytes:
                return f"{path}: expected {entry.nbytes} bytes, as the manifest says, found {status.st_size}"
        return ""

    def read_into(self, entry: FileEntry, offset: int, buffer: memoryview) -> None:
        path = self.path_of(entry)
        done = failures = 0
        while done < len(buffer):
            try:
                done += self._read_some(path, entry, offset + done, buffer[done:])
            except OSError as error:
                self._files.forget((path, entry))  # it may have become stale
                if error.errno not in TRANSIENT or failures == len(RETRY_SECONDS):
                    raise reading_failed(error, path, f"{len(buffer):,} bytes", offset, failures + 1) from None
                time.sleep(RETRY_SECONDS[failures])
                failures += 1

    def _read_some(self, path: str, entry: FileEntry, offset: int, buffer: memoryview) -> int:
        """At least one byte."""
        file = self._files.get((path, entry))
        try:
            if count := os.preadv(file.fileno(), [buffer], offset):
                return count
            check_not_cut(path, entry, os.fstat(file.fileno()).st_size)
            raise OSError(errno.EIO, "no bytes came")
        finally:
            del file  # or whoever keeps an error would keep the file open

    def close(self) -> None:
        self._files.close()


def _open_sized(file: tuple[str, FileEntry]) -> OpenFile:
    return open_sized(*file)


def open_storage(place: str | os.PathLike[str]) -> Storage:
    """The storage of the set that a path, a URL or a name in the catalogue (`shardio.sets.names`) stands for.

    Nothing of the set is looked at yet; only a name is looked for, in folders and URLs alike. SetNotFoundError if no
    root has it, or if a package is missing that the URL takes; OSError if a root that may have it cannot be asked.
    """
    found = candidates(place)
    if found == [os.fspath(place)]:
        return _storage_at(found[0])
    for candidate in found:
        storage = _storage_at(candidate)
        if storage.is_published() if isinstance(storage, RemoteStorage) else holds_set(candidate):
            return storage
    raise not_in_catalogue(os.fspath(place), catalogue_roots())


def _storage_at(place: str) -> Storage:
    if place.startswith("file://"):
        return FolderStorage(place.removeprefix("file://"))
    return RemoteStorage(place) if is_url(place) else FolderStorage(place)
