"""Leases, which keep a copy in a cache from being evicted, and the right to fill a copy.

The right to fill is taken under a lease. So a process that holds the lease's lock exclusively is alone with the copy,
and only such a process removes lock files. Any user of a cache may put something where a lock is expected, so locks are
opened as untrusted files are.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from shardio.errors import CacheError, FormatError, SetNotFoundError
from shardio.format.entries import FileEntry
from shardio.format.layout import MANIFEST_NAME
from shardio.format.manifest import Manifest
from shardio.format.manifest_file import load_manifest, read_manifest
from shardio.system.files import lock_at_once, make_folder, write_all
from shardio.system.machine import PROC
from shardio.system.opening import FolderHandle, OpenFile, kind_of, naming, open_untrusted

WAY_OUT = ": shardio has not put it there. Remove it, or choose another cache"
# A process that only checks whether a copy is in use holds its lock for a moment, and does not use the copy.
LOOKING_SECONDS = 0.01
# An evictor holds a lock for as long as a rename takes. Any user who may read a lock can hold it for ever.
_LEASE_SECONDS = 30.0
_MAX_SOURCE_NBYTES = 1 << 16


@dataclass(frozen=True)
class CopyPaths:
    """The paths of one set's copy and its two locks in a cache, whether or not they exist."""

    cache: Path
    digest: str

    @property
    def folder(self) -> Path:
        return self.cache / self.digest

    @property
    def lock(self) -> Path:
        """The lock file of the leases. Each lease holds a shared lock on it, and an evictor an exclusive lock."""
        return self.cache / f"{self.digest}.lock"

    @property
    def fill(self) -> Path:
        """The lock file of the right to fill the copy, which also says where its files come from."""
        return self.cache / f"{self.digest}.fill"

    def lock_alone(self) -> OpenFile | None:
        """Returns the file `lock`, locked exclusively, for the caller to close; None if another process holds it."""
        lock = open_lock(self.lock)
        if lock_at_once(lock.fileno()) and os.fstat(lock.fileno()).st_nlink:
            return lock
        lock.close()
        return None

    def remove_locks(self) -> None:
        """Removes the lock files of a copy that is gone. The caller holds the exclusive lock."""
        for path in (self.fill, self.lock):
            # Another user's file, or a folder that was put in its place, may as well stay.
            with contextlib.suppress(FileNotFoundError, PermissionError, IsADirectoryError):
                path.unlink()

    def remove_orphans(self) -> None:
        """Removes the lock files if the set has no copy and no lease."""
        if not self.folder.exists() and (lock := self.lock_alone()) is not None:
            with lock:
                if not self.folder.exists():
                    self.remove_locks()

    def source(self) -> str:
        """Returns where the copy was last filled from; empty if unknown."""
        try:
            with open_in_cache(self.fill) as file:
                source = json.loads(file.read(_MAX_SOURCE_NBYTES))["source"]
        except (OSError, ValueError, TypeError, KeyError, RecursionError):  # missing, being written, or not readable
            return ""
        return source if isinstance(source, str) else ""


class Lease:
    """Keeps a copy from being evicted, until `close`, until the object dies, or until the process ends.

    A forked process inherits the lease and holds it while it lives; an executed program does not. Not thread safe.
    """

    def __init__(self, paths: CopyPaths, lock: OpenFile) -> None:
        self.digest = paths.digest
        self.path = paths.folder
        """The folder of the copy. It exists from when the first file is copied."""
        self._paths = paths
        self._lock = lock
        self._tried_filling = False
        self._touch()

    @classmethod
    def take(cls, paths: CopyPaths) -> Lease:
        """Returns a lease on a copy. Waits as `Cache.lease` does, and raises the same errors."""
        while True:
            with contextlib.ExitStack() as stack:
                lock = stack.enter_context(open_lock(paths.lock))
                with naming(paths.lock):
                    _lock_shared(lock.fileno())
                if os.fstat(lock.fileno()).st_nlink:  # or the copy was evicted before the lock was taken
                    _check_folder(paths.folder)
                    stack.pop_all()
                    return cls(paths, lock)

    def is_complete(self) -> bool:
        """Returns whether the copy has its manifest, which comes last."""
        return (self.path / MANIFEST_NAME).is_file()

    def manifest(self) -> Manifest | None:
        """Returns the copy's manifest, if the copy is complete and the manifest belongs to the set."""
        try:
            return load_manifest(self.path, self.digest)
        except (SetNotFoundError, FormatError):
            return None

    def check_own(self, folder: Path | FolderHandle) -> None:
        """Raises CacheError if the folder of the copy holds another set, which shardio never puts there."""
        with contextlib.suppress(FormatError):
            if (found := read_manifest(folder / MANIFEST_NAME).digest) != self.digest:
                raise CacheError(f"{folder}: expected a copy of the set {self.digest}, found the set {found}{WAY_OUT}")

    def has(self, entry: FileEntry) -> bool:
        """Returns whether the copy has the whole file: a file gets its name after its sha256 is checked."""
        try:
            status = os.lstat(f"{self.path}/{entry.file}")
        except FileNotFoundError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == entry.nbytes

    def try_filling(self, source: str) -> contextlib.ExitStack | None:
        """Takes the right to write into the copy, and notes that its files come from `source`.

        The right ends when the result is closed, which must be before the lease ends. Returns None if another process
        has the right now. Raises PermissionError if no process has the right, but only another user may take it;
        CacheError as `Cache.lease` does.
        """
        path = self._paths.fill
        allowed = True
        try:
            lock = open_in_cache(path, os.O_RDWR | os.O_CREAT, sole_name=True)
        except PermissionError:
            if not path.exists():
                raise
            allowed = False  # to write, but this process may wait for the other user
            lock = open_in_cache(path)
        with contextlib.ExitStack() as stack:
            stack.enter_context(lock)
            self._tried_filling = self._tried_filling or allowed
            if not lock_at_once(lock.fileno()):
                return None
            # A process that was forked meanwhile has the open file too, and does not fill the copy.
            stack.callback(fcntl.flock, lock.fileno(), fcntl.LOCK_UN)
            if not allowed:
                raise _another_users(path)
            with contextlib.suppress(OSError):  # the disk is full: a note of the source is not worth a failure
                os.ftruncate(lock.fileno(), 0)
                write_all(lock.fileno(), json.dumps({"source": source}).encode())
            return stack.pop_all()

    def open_folder(self) -> FolderHandle:
        """Makes the copy's folder if it is missing, and opens it for the process that has the right to fill the copy.

        Raises CacheError if the path holds anything else, including another set; PermissionError if, under a sticky
        bit, only another user may continue the copy.
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
        """Returns the id of the process that fills the copy; None if no process does, or /proc/locks does not say."""
        with contextlib.suppress(FileNotFoundError):
            return min(holders_of(os.stat(self._paths.fill)), default=None)
        return None

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the lease. May be called again."""
        if not self._lock.closed:
            self._touch()
            self._lock.close()
        if self._tried_filling:
            # Nothing stays of a copy that was not begun: in a folder such as /tmp its files would keep all other users
            # from making it. Another lease keeps them.
            with contextlib.suppress(OSError, CacheError):
                self._paths.remove_orphans()
            self._tried_filling = False

    def _touch(self) -> None:
        """Records the time of the last use, if this user has the permission."""
        with contextlib.suppress(OSError):
            os.utime(self._lock.fileno())


def _another_users(path: Path) -> PermissionError:
    what = "another user has begun this copy, and only that user may continue or evict it"
    return PermissionError(errno.EACCES, what, str(path))


def _check_folder(path: Path) -> None:
    """Raises CacheError if, for example, a link would lead the process that fills the copy into another folder."""
    with contextlib.suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if not stat.S_ISDIR(mode):
            raise CacheError(f"{path}: expected the folder of a copy, found {kind_of(mode)}{WAY_OUT}")


def open_in_cache(path: Path, flags: int = os.O_RDONLY, *, sole_name: bool = False) -> OpenFile:
    """Opens a file of a cache as `open_untrusted` does. Raises CacheError unless it is a regular file.

    With `sole_name`, it also raises CacheError for a file with a second name, a hard link.
    """
    return open_untrusted(path, flags, refusal=CacheError, way_out=WAY_OUT, sole_name=sole_name)


def open_lock(path: Path) -> OpenFile:
    """Opens a lock file for reading, which is enough to lock it, and makes it if needed, readable by all users."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            return open_in_cache(path)
        # Never O_CREAT alone, which the kernel refuses for other users' files in folders such as /tmp.
        with contextlib.suppress(FileExistsError):  # made by another process in between
            lock = open_in_cache(path, os.O_CREAT | os.O_EXCL)
            with contextlib.suppress(OSError):  # a filesystem without permissions
                # Whatever the umask says about data: a lock that others cannot open keeps them from the copy for ever.
                os.fchmod(lock.fileno(), stat.S_IMODE(os.fstat(lock.fileno()).st_mode) | 0o644)
            return lock


def _lock_shared(descriptor: int) -> None:
    """Locks a file, shared. Raises OSError if it stays locked for longer than an eviction takes."""
    deadline = time.monotonic() + _LEASE_SECONDS
    while not lock_at_once(descriptor, fcntl.LOCK_SH):
        if time.monotonic() < deadline:
            time.sleep(LOOKING_SECONDS)
            continue
        found = holders_of(os.fstat(descriptor))
        by = f"process {', '.join(map(str, found))}" if found else "another process"
        raise OSError(
            errno.ETIMEDOUT,
            f"expected the lock within {_LEASE_SECONDS:.0f} seconds, as evictors hold it only for a moment; found that "
            f"{by} keeps it. End that process, or choose another cache",
        )


def is_held(path: Path) -> bool:
    """Returns whether the lock file is locked. Raises FileNotFoundError if it does not exist."""
    try:
        lock = open_in_cache(path)
    except PermissionError:  # another user's, who does not share it: this user may not remove it
        return True
    with lock:
        return not lock_at_once(lock.fileno())


def holders_of(status: os.stat_result, proc: Path = PROC) -> tuple[int, ...]:
    """Returns the ids of the processes that hold a flock on the file with this `status`; () if they are unknown."""
    key = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with contextlib.suppress(OSError):
        locks = map(str.split, (proc / "locks").read_text().splitlines())
        # 3: FLOCK ADVISORY READ 1234 fe:00:5678 0 EOF; for a waiting process the second field is an arrow.
        return tuple(
            sorted({int(each[4]) for each in locks if len(each) == 8 and (each[1], each[5]) == ("FLOCK", key)})
        )
    return ()
