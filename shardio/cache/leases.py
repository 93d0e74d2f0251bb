"""Leases, which keep a copy in a cache from being evicted, and the right to fill a copy.

A process takes the right to fill only while it holds a lease. So a process with an exclusive lock on the lease's file
is alone with the copy, and only such a process removes lock files. Programs that clean up old files may remove them,
too: then each holder of a lease makes the file anew, and until it has, nobody can see its lease. Users of a shared
cache may put something else at the path of a lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import time
import weakref
from functools import partial
from pathlib import Path

from shardio.errors import CacheError, FormatError, SetNotFoundError
from shardio.format.entries import FileEntry
from shardio.format.layout import MANIFEST_NAME, MARKER_NAME
from shardio.format.manifest import Manifest
from shardio.format.manifest_file import load_manifest, read_manifest
from shardio.system.files import lock_at_once, make_folder, write_all
from shardio.system.machine import PROC
from shardio.system.opening import FileAt, FolderHandle, OpenFile, is_same_file, kind_of, naming, open_untrusted
from shardio.system.threads import Ticker

_ANOTHER_USERS = "another user has begun this copy"
WAY_OUT = ": shardio has not put it there. Remove it, or choose another cache"
# A process that only checks whether a copy is in use holds its lock for a moment, and does not use the copy.
LOOKING_SECONDS = 0.01
# An evictor holds a lock for as long as a rename takes. Any user who may read a lock can hold it for ever.
_LEASE_SECONDS = 30.0
# Holders touch the lock, and look whether it is still there, this often.
KEEP_SECONDS = 60.0
# The content of a lock file that was made before its copy: all leases on the copy are locks on this very file.
_IS_OLDER = b"older than the copy\n"
_MAX_SOURCE_NBYTES = 1 << 16


class CopyPaths:
    """The paths of one set's copy and its two locks in a cache, whether or not they exist."""

    def __init__(self, cache: Path, digest: str) -> None:
        self.cache = cache
        self.digest = digest
        self.folder = cache / digest
        self.lock = cache / f"{digest}.lock"
        """The lock file of the leases. Each lease holds a shared lock on it, and an evictor an exclusive lock."""
        self.fill = cache / f"{digest}.fill"
        """The lock file of the right to fill the copy. It also stores where the copy's files come from."""

    def open_lock(self) -> OpenFile:
        """Opens the lock file for reading, which is enough to lock it. Makes it, readable by all, if it is missing.

        On a read-only filesystem, where nothing is evicted, opens the manifest of a complete copy instead.
        """
        while True:
            with contextlib.suppress(FileNotFoundError):
                return open_in_cache(self.lock)
            try:
                # Never O_CREAT alone, which the kernel refuses for other users' files in folders such as /tmp.
                lock = open_in_cache(self.lock, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            except FileExistsError:  # made by another process in between
                continue
            except OSError as error:
                if error.errno == errno.EROFS and (self.folder / MANIFEST_NAME).is_file():
                    return open_in_cache(self.folder / MANIFEST_NAME)
                raise
            with contextlib.suppress(OSError):  # a filesystem without permissions
                # Whatever the umask says about data: a lock that others cannot open keeps them from the copy for ever.
                os.fchmod(lock.fileno(), stat.S_IMODE(os.fstat(lock.fileno()).st_mode) | 0o644)
            share(lock.fileno(), self.cache)
            with contextlib.suppress(OSError):  # a full disk
                write_all(lock.fileno(), b"" if os.path.lexists(self.folder) else _IS_OLDER)
            return lock

    def check_lock(self, lock: OpenFile) -> None:
        """Raises CacheError if processes may use the copy without holding a lock on `lock`, the open lock file.

        They have locked an earlier lock file, which was removed. Within a minute they notice, and lock the new file.
        """
        left = 2 * KEEP_SECONDS - abs(time.time() - os.fstat(lock.fileno()).st_mtime)
        if left > 0 and os.pread(lock.fileno(), len(_IS_OLDER), 0) != _IS_OLDER:
            raise CacheError(
                f"{self.lock}: expected a lock file older than the copy, found one made anew, which a process that "
                f"uses the copy may not have locked yet: try to evict the copy again in {left:.0f} seconds"
            )

    def lock_alone(self) -> OpenFile | None:
        """Returns the lock file, locked exclusively; None if another process holds a lock on it or has removed it."""
        lock = self.open_lock()
        return lock if lock_at_once(lock.fileno()) and os.fstat(lock.fileno()).st_nlink else None

    def remove_locks(self) -> None:
        """Removes both lock files of a copy that is gone. The caller holds the lock from `lock_alone`."""
        for path in (self.fill, self.lock):
            # Another user's file, or a folder that was put in its place, may as well stay.
            with contextlib.suppress(FileNotFoundError, PermissionError, IsADirectoryError):
                path.unlink()

    def remove_orphans(self) -> None:
        """Removes both lock files if the set has no copy and no lease."""
        if not self.folder.exists() and (lock := self.lock_alone()) is not None:
            with lock:
                if not self.folder.exists():
                    self.remove_locks()

    def source(self) -> str:
        """Returns the folder or URL that the copy was last filled from; "" if it is unknown."""
        try:
            with open_in_cache(self.fill) as file:
                source = json.loads(file.read(_MAX_SOURCE_NBYTES))["source"]
        except (OSError, ValueError, TypeError, KeyError, RecursionError):  # missing, being written, or not readable
            return ""
        return source if isinstance(source, str) else ""


class Lease(contextlib.AbstractContextManager["Lease"]):
    """Keeps a copy from being evicted until `close`, or until the object or the process ends. Not thread safe.

    A thread touches the lock file each minute, and makes it anew, locked, if it was removed. A forked process inherits
    the lease and holds it while it lives, without such a thread. A program started by exec does not inherit it.
    """

    def __init__(self, paths: CopyPaths) -> None:
        """Takes the lease. Waits up to 30 seconds for an evictor. Raises the errors of `Cache.lease`."""
        self.digest = paths.digest
        self.path = paths.folder
        """The folder of the copy. It exists once a process has begun the copy."""
        self._paths = paths
        self._lock = _lock_shared(paths)
        self._tried_filling = False
        self._keeper = Ticker(self, partial(_keep, weakref.ref(self)), KEEP_SECONDS, "shardio-lease")
        self._touch()
        with contextlib.suppress(RuntimeError):  # the system allows no more threads
            self._keeper.begin()

    def keep(self) -> None:
        """Touches the lock file, or makes it anew, locked, if it was removed. Raises the errors of `Cache.lease`."""
        if not is_same_file(before := self._lock, self._paths.lock):
            lock = _lock_shared(self._paths)
            if before.closed:  # by `close`, which does not wait for long
                return
            self._lock = lock
        self._touch()

    def is_complete(self) -> bool:
        """Returns whether the copy has its manifest, which is written last, and this user may read the manifest."""
        return os.path.isfile(manifest := self.path / MANIFEST_NAME) and os.access(manifest, os.R_OK)

    def manifest(self) -> Manifest | None:
        """Returns the copy's manifest; None if it is missing, damaged, of another set, or unreadable for this user."""
        try:
            return load_manifest(self.path, self.digest)
        except (SetNotFoundError, FormatError, PermissionError):
            return None

    def check_own(self, folder: Path | FolderHandle) -> None:
        """Raises CacheError if `folder`, the copy's folder, has the manifest of another set."""
        with contextlib.suppress(FormatError, PermissionError):
            if (found := read_manifest(folder / MANIFEST_NAME).digest) != self.digest:
                raise CacheError(f"{folder}: expected a copy of the set {self.digest}, found the set {found}{WAY_OUT}")

    def has(self, entry: FileEntry) -> bool:
        """Returns whether the copy has this file, verified, readable and of the right size. Does not read the file."""
        try:
            status = os.lstat(f"{self.path}/{entry.file}")
        except (FileNotFoundError, PermissionError):
            return False
        is_whole = stat.S_ISREG(status.st_mode) and status.st_size == entry.nbytes
        return is_whole and os.access(f"{self.path}/{entry.file}", os.R_OK)

    def try_filling(self, source: str) -> contextlib.ExitStack | None:
        """Takes the right to fill the copy, and returns it; None if another process has the right now.

        To give up the right, close the result, before the lease. Records `source`, the folder or URL that the files
        come from. Raises PermissionError if no process has the right, but only another user may take it; CacheError if
        the lock's path holds something other than a lock file.
        """
        path = self._paths.fill
        allowed = True
        try:
            lock = open_in_cache(path, os.O_RDWR | os.O_CREAT)
            share(lock.fileno(), self._paths.cache)
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
                raise PermissionError(errno.EACCES, _ANOTHER_USERS, str(path))
            with contextlib.suppress(OSError):  # the disk is full: a note of the source is not worth a failure
                os.ftruncate(lock.fileno(), 0)
                write_all(lock.fileno(), json.dumps({"source": source}).encode())
            return stack.pop_all()

    def open_folder(self) -> FolderHandle:
        """Returns the copy's folder, opened, and creates it if needed. The caller has the right to fill the copy.

        Raises CacheError if the path holds something other than a folder, or another set; PermissionError if the cache
        has the sticky bit set and only another user may continue the copy.
        """
        self.keep()  # a lock that others make once there is a folder counts as younger
        if not os.path.lexists(self.path):
            # The process that made the lock may not have said so, and may have been killed.
            path = self._paths.lock
            with contextlib.suppress(OSError, CacheError), open_in_cache(path, os.O_WRONLY) as lock:
                write_all(lock.fileno(), _IS_OLDER)
        make_folder(self.path)
        _check_folder(self.path)
        folder = FolderHandle(self.path)
        owner, cache = os.fstat(folder.fileno()).st_uid, os.stat(self.path.parent)
        if cache.st_mode & stat.S_ISVTX and owner not in (0, os.geteuid(), cache.st_uid):
            raise PermissionError(errno.EACCES, _ANOTHER_USERS, str(self.path))
        self.check_own(folder)
        return folder

    def share(self) -> None:
        """Calls the function `share` for the copy's folder and files, as far as this user may change them."""
        with contextlib.suppress(OSError), FolderHandle(self.path) as folder:
            share(folder.fileno(), self._paths.cache)
            for name in os.listdir(folder.fileno()):
                # Not another copy's file, which was shared before; nor a link that another user has put there.
                with contextlib.suppress(OSError, FormatError), open_untrusted(folder / name, sole_name=True) as file:
                    share(file.fileno(), self._paths.cache)

    def filler(self) -> int | None:
        """Returns the id of the process that fills the copy; None if there is none, or /proc/locks does not show it."""
        with contextlib.suppress(FileNotFoundError):
            return min(holders_of(os.stat(self._paths.fill)), default=None)
        return None

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the lease. May be called again."""
        self._keeper.close()
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
        """Sets the mtime of the lock file, the time of the last use, and of the cache's marker file, if permitted."""
        with contextlib.suppress(OSError):
            os.utime(self._paths.cache / MARKER_NAME, follow_symlinks=False)
        with contextlib.suppress(OSError):
            os.utime(self._lock.fileno())


def share(descriptor: int, cache: Path) -> None:
    """Gives an open file or folder the permissions of the folder `cache`, whatever the umask. Does nothing if only the
    owner of `cache` may write there. Under a sticky bit, only owners may write."""
    folder = os.stat(cache)
    if folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = folder.st_mode & (0o2755 if folder.st_mode & stat.S_ISVTX else 0o2777) | stat.S_IRWXU
        with contextlib.suppress(OSError):  # another user's, or a filesystem without permissions
            if mode >> 3 & ~mode & 7:  # the group may do more than all
                os.fchown(descriptor, -1, folder.st_gid)
            os.fchmod(descriptor, mode if stat.S_ISDIR(os.fstat(descriptor).st_mode) else mode & 0o666)


def _check_folder(path: Path) -> None:
    """Raises CacheError if `path` exists and is not a folder: a link might lead to a folder elsewhere."""
    with contextlib.suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if not stat.S_ISDIR(mode):
            raise CacheError(f"{path}: expected the folder of a copy, found {kind_of(mode)}{WAY_OUT}")


def open_in_cache(path: Path | FileAt, flags: int = os.O_RDONLY) -> OpenFile:
    """Opens a file of a cache by `open_untrusted`. Raises CacheError unless it is a regular file. With `flags` for
    writing, raises CacheError also for a file with a second hard link, which may be another user's or another copy's
    file."""
    sole_name = flags != os.O_RDONLY
    return open_untrusted(path, flags, refusal=CacheError, way_out=WAY_OUT, sole_name=sole_name)


def _lock_shared(paths: CopyPaths) -> OpenFile:
    """Returns the open lock file of a copy, with a shared lock on it, which makes a lease."""
    while True:
        lock = paths.open_lock()
        with naming(paths.lock):
            lock_within(lock.fileno(), fcntl.LOCK_SH, _LEASE_SECONDS)
        if os.fstat(lock.fileno()).st_nlink:  # or the copy was evicted before the lock was taken
            _check_folder(paths.folder)
            return lock


def _keep(lease: weakref.ref[Lease]) -> None:
    # Whatever is wrong in the cache may be right a period later.
    with contextlib.suppress(OSError, CacheError):
        if (held := lease()) is not None:
            held.keep()


def lock_within(descriptor: int, operation: int, seconds: float) -> None:
    """Waits until it has locked an open file. `operation` is fcntl.LOCK_EX (exclusive) or LOCK_SH (shared). Raises
    TimeoutError if another process still holds a lock on the file after `seconds`."""
    deadline = time.monotonic() + seconds
    while not lock_at_once(descriptor, operation):
        if time.monotonic() > deadline:
            by = ", ".join(map(str, holders_of(os.fstat(descriptor)))) or "unknown"
            raise OSError(
                errno.ETIMEDOUT,
                f"expected this lock to be free within {seconds:.0f} seconds, found it held by another process ({by}): "
                "end that process, or choose another cache",
            )
        time.sleep(LOOKING_SECONDS)


def holders_of(status: os.stat_result, proc: Path = PROC) -> tuple[int, ...]:
    """Returns the ids of the processes that hold a flock on the file with the lstat `status`; () if unknown."""
    key = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with contextlib.suppress(OSError):
        # 3: FLOCK ADVISORY READ 1234 fe:00:5678 0 EOF; for a waiting process the second word is an arrow.
        lock = rf"^\d+: FLOCK +ADVISORY +\w+ +(\d+) +{key} "
        return tuple(sorted({int(process) for process in re.findall(lock, (proc / "locks").read_text(), re.MULTILINE)}))
    return ()
