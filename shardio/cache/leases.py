"""Leases, which keep a copy from being evicted, and the right to write into it.

The right to fill is taken under a lease. So a process that holds the lease's lock exclusively is alone with the copy,
and only such a process removes its lock files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardio.cache.locks import (
    WAY_OUT,
    LockedFile,
    lock_at_once,
    lock_holders,
    lock_key,
    lock_shared,
    open_in_cache,
    open_lock,
)
from shardio.errors import CacheError, FormatError, SetNotFoundError
from shardio.format.entries import FileEntry
from shardio.format.layout import MANIFEST_NAME
from shardio.format.manifest import Manifest
from shardio.format.manifest_file import load_manifest, read_manifest
from shardio.system.files import make_folder, write_all
from shardio.system.opening import FolderHandle, OpenFile, kind_of, naming

_MAX_SOURCE_NBYTES = 1 << 16


@dataclass(frozen=True)
class CopyPaths:
    """The places of the copy of one set and its two locks in a cache, be they there or not."""

    cache: Path
    digest: str

    @property
    def folder(self) -> Path:
        return self.cache / self.digest

    @property
    def lock(self) -> Path:
        """Locked shared by each lease, exclusively while the copy is evicted."""
        return self.cache / f"{self.digest}.lock"

    @property
    def fill(self) -> Path:
        """Locked exclusively by the process that fills the copy; says where its files come from."""
        return self.cache / f"{self.digest}.fill"

    def lock_alone(self) -> OpenFile | None:
        """Returns the lease's lock, held exclusively, for the caller to close; None if it is held elsewhere."""
        lock = open_lock(self.lock)
        if lock_at_once(lock.fileno()) and os.fstat(lock.fileno()).st_nlink:
            return lock
        lock.close()
        return None

    @contextlib.contextmanager
    def kept(self) -> Iterator[bool]:
        """Keeps the copy from being evicted meanwhile, and does not note that it was used. Yields False if it is being
        evicted, or has no lock. Errors are those of `open_in_cache`."""
        try:
            lock = open_in_cache(self.lock)
        except FileNotFoundError:
            yield False
            return
        with lock:
            try:
                fcntl.flock(lock.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield os.fstat(lock.fileno()).st_nlink > 0

    def remove_locks(self) -> None:
        """Removes the lock files of a copy that is gone. The caller holds the exclusive lock."""
        for path in (self.fill, self.lock):
            # Another user's, or a folder that was put in its place: it may as well stay.
            with contextlib.suppress(FileNotFoundError, PermissionError, IsADirectoryError):
                path.unlink()

    def remove_orphans(self) -> None:
        """Removes the lock files if there is no copy and no lease."""
        if self.folder.exists():
            return
        if (lock := self.lock_alone()) is not None:
            with lock:
                if not self.folder.exists():
                    self.remove_locks()

    def source(self) -> str:
        """Returns where the copy was last filled from; empty if unknown."""
        try:
            with open_in_cache(self.fill) as file:
                source = json.loads(file.read(_MAX_SOURCE_NBYTES))["source"]
        except (OSError, ValueError, TypeError, KeyError, RecursionError):  # not there, being written, or not readable
            return ""
        return source if isinstance(source, str) else ""


class Lease(LockedFile):
    """Keeps a copy from being evicted, until `close` or the end of the process. `Cache.lease` takes it."""

    def __init__(self, paths: CopyPaths, lock: OpenFile) -> None:
        super().__init__(lock)
        self.digest = paths.digest
        self.path = paths.folder
        """The folder of the copy. It exists from when the first file is copied."""
        self._paths = paths
        self._tried_filling = False
        self._touch()

    @classmethod
    def take(cls, paths: CopyPaths) -> Lease:
        """Waits while an evictor renames the copy, for half a minute at most. Errors are those of `Cache.lease`."""
        while True:
            lock = open_lock(paths.lock)
            try:
                with naming(paths.lock):
                    lock_shared(lock.fileno())
                if os.fstat(lock.fileno()).st_nlink:
                    _check_folder(paths.folder)
                    return cls(paths, lock)
            except BaseException:
                lock.close()
                raise
            lock.close()  # evicted between its opening and its lock

    def is_complete(self) -> bool:
        """Returns whether the copy has its manifest, which comes last."""
        return (self.path / MANIFEST_NAME).is_file()

    def manifest(self) -> Manifest | None:
        """Returns the copy's manifest, if it is complete and this is the manifest of the set."""
        try:
            manifest = load_manifest(self.path)
        except (SetNotFoundError, FormatError):
            return None
        return manifest if manifest.digest == self.digest else None

    def check_own(self, folder: Path | FolderHandle) -> None:
        """Raises CacheError if the folder of the copy holds another set, which shardio never puts there."""
        with contextlib.suppress(FormatError):
            if (found := read_manifest(folder / MANIFEST_NAME).digest) != self.digest:
                raise CacheError(f"{folder}: expected a copy of the set {self.digest}, found the set {found}{WAY_OUT}")

    def has(self, entry: FileEntry) -> bool:
        """Returns whether a file of the set is there, whole: it got its name when its sha256 was found right."""
        try:
            status = os.lstat(f"{self.path}/{entry.file}")
        except FileNotFoundError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == entry.nbytes

    def try_filling(self, source: str) -> Filling | None:
        """Takes the right to write into the copy, and notes that its files come from `source`. Returns None if another
        process has the right now.

        Raises PermissionError if no process has it, and only another user may. CacheError as `Cache.lease` does.
        """
        path = self._paths.fill
        allowed = True
        try:
            lock = open_in_cache(path, os.O_RDWR | os.O_CREAT, sole_name=True)
        except PermissionError:
            if not path.exists():
                raise
            allowed = False  # to write, but one may wait for the other user
            lock = open_in_cache(path)
        filling = Filling(lock)
        self._tried_filling = self._tried_filling or allowed
        try:
            if not lock_at_once(lock.fileno()):
                filling.close()
                return None
            if not allowed:
                raise _another_users(path)
            with contextlib.suppress(OSError):  # the disk is full: where the copy comes from is not worth a failure
                os.ftruncate(lock.fileno(), 0)
                write_all(lock.fileno(), json.dumps({"source": source}).encode())
        except BaseException:
            filling.close()
            raise
        return filling

    def open_folder(self) -> FolderHandle:
        """Makes the copy's folder if need be, and opens it for the process that has the right to fill the copy.

        Raises CacheError if something else is there, another set, too; PermissionError if the folder belongs to another
        user where only he may go on with the copy: under a sticky bit.
        """
        make_folder(self.path)
        _check_folder(self.path)
        folder = FolderHandle(self.path)
        owner, cache = os.fstat(folder.fileno()).st_uid, os.stat(self.path.parent)
        if cache.st_mode & stat.S_ISVTX and owner not in (0, os.geteuid(), cache.st_uid):
            raise _another_users(self.path)
        self.check_own(folder)
        return folder

    def filler(self) -> int | None:
        """Returns the process that fills the copy now, if there is one and /proc/locks tells."""
        with contextlib.suppress(FileNotFoundError):
            return min(lock_holders().get(lock_key(os.stat(self._paths.fill)), ()), default=None)
        return None

    def close(self) -> None:
        if not self._lock.closed:
            self._touch()
            super().close()
        if self._tried_filling:
            # Nothing stays of a copy that was not even begun: in a folder such as /tmp its files would keep all other
            # users from making it. Another lease keeps them.
            with contextlib.suppress(OSError, CacheError):
                self._paths.remove_orphans()
            self._tried_filling = False

    def _touch(self) -> None:
        """Notes when the copy was last used, if this user may."""
        with contextlib.suppress(OSError):
            os.utime(self._lock.fileno())


class Filling(LockedFile):
    """The right to write into a copy, until `close`. `Lease.try_filling` takes it; it must end before the lease."""

    def close(self) -> None:
        if not self._lock.closed:
            # A process that was forked meanwhile has the open file too, and does not fill the copy.
            fcntl.flock(self._lock.fileno(), fcntl.LOCK_UN)
        super().close()


def _another_users(path: Path) -> PermissionError:
    what = "another user has begun this copy, and only he may go on with it or evict it"
    return PermissionError(errno.EACCES, what, str(path))


def _check_folder(path: Path) -> None:
    """Raises CacheError if a link, say, would lead the process that fills the copy into another folder."""
    with contextlib.suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if not stat.S_ISDIR(mode):
            raise CacheError(f"{path}: expected the folder of a copy, found {kind_of(mode)}{WAY_OUT}")
