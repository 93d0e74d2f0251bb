"""A folder on a node's own disk that holds copies of sets, for all jobs of the node, and that is kept to a size.

    CACHE/
      shardio-cache.txt    says that the folder is a cache, so that what lies in it may be removed
      <digest>/            a copy: a published set like any other once its manifest is there
      <digest>.lock        locked shared by whoever uses or fills the copy (a lease), exclusively while it is evicted
      <digest>.fill        locked exclusively by the one that fills the copy; says where that comes from

The locks are those of flock, which end with their process, however that ends. The fill lock is taken under a lease. So
whoever has the lease's lock exclusively is alone with the copy, and only such a one removes the two files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from shardio.errors import CacheError, FormatError, SetNotFoundError
from shardio.format.layout import MANIFEST_NAME
from shardio.format.manifest import FileEntry, Manifest, load_manifest
from shardio.sets.local import check_local
from shardio.system.files import OpenFile, kind_of, make_folder, naming, open_folder, open_untrusted, write_all
from shardio.system.machine import PROC, filesystem_kind, is_network

MARKER_NAME = "shardio-cache.txt"
_MARKER = b"""\
This folder is a cache of shardio: copies of shard sets, named by their digests, which can be made again.
`shardio evict` removes those that were not used for longest. Put nothing else here.
"""

# Filesystems by which containers and virtual machines get folders of their own machine, too.
_GIVEN_TO_CONTAINERS = ("fuse", "9p", "virtiofs")
# But those of FUSE by which machines share folders.
_SHARED_BY_FUSE = """
alluxio-fuse beegfs blobfuse blobfuse2 ceph ceph-fuse cvmfs curvefs davfs davfs2 dfuse gcsfuse geesefs glusterfs goofys
hdfs juicefs lizardfs mfs moosefs mount-s3 mountpoint-s3 nfs objectivefs orangefs ossfs quobyte rclone s3fs seaweedfs
smbnetfs sshfs weed
"""

_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_EVICTED_SUFFIX = ".evicted"
# Whoever looks whether a copy is in use has its lock for a moment, and that is no use of it.
_LOOKING_SECONDS = 0.01
# An evictor has a lock for as long as a rename takes. Any user who may read a lock can hold it for ever.
_LEASE_SECONDS = 30.0
_MAX_SOURCE_NBYTES = 1 << 16


@dataclass(frozen=True)
class CachedCopy:
    """What a cache holds of one set."""

    digest: str
    path: str
    nbytes: int
    """Of the files that are there, unfinished ones too."""
    complete: bool
    last_used: float
    """When a lease last began or ended, as time.time() tells it."""
    source: str
    """Where it was last copied from; empty if unknown."""
    in_use: bool
    processes: tuple[int, ...]
    """Those that hold a lease, as far as /proc/locks tells: it does not show those of other containers."""
    problem: str = ""
    """Why it is unknown whether it is in use, which then counts as such: what lies there is no lock."""


@dataclass(frozen=True)
class EvictReport:
    path: str
    removed: tuple[CachedCopy, ...]
    kept: tuple[CachedCopy, ...]
    """What would have gone too, were it not in use, or another user's to remove."""
    nbytes: int
    """Of the copies that remain."""


class Cache:
    """The cache in `folder`, which the first lease makes. Nothing is kept in memory: any number of threads, processes
    and users may have it at the same time, the latter as far as permissions allow."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        check_local(folder, CacheError, "a cache is a folder on a disk of this machine")
        self.folder = Path(os.path.abspath(folder))  # wherever the process may go

    def lease(self, digest: str) -> Lease:
        """Hold the copy of the set with this digest, which need not be there yet: nobody evicts it until `close`.

        ValueError if that is no digest, CacheError if the folder is something else than a cache, or a new one would not
        be on a disk of this machine, or something else lies where the lock or the copy should be; OSError if the lock
        cannot be had. It waits while an evictor renames the copy, for half a minute at most. To use a copy it is enough
        to be allowed to read.
        """
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"digest must be 64 lower-case hexadecimal digits; found {digest!r}")
        self._make()
        path = self._lock_path(digest)
        while True:
            lock = _open_lock(path)
            try:
                with naming(path):
                    _lock_shared(lock.fileno())
                if os.fstat(lock.fileno()).st_nlink:
                    self._check_copy(digest)
                    return Lease(self, digest, lock)
            except BaseException:
                lock.close()
                raise
            lock.close()  # evicted between its opening and its lock

    def _check_copy(self, digest: str) -> None:
        """CacheError if a link, say, would lead those who fill the copy into another folder."""
        path = self.copy_path(digest)
        with contextlib.suppress(FileNotFoundError):
            mode = os.lstat(path).st_mode
            if not stat.S_ISDIR(mode):
                raise CacheError(f"{path}: expected the folder of a copy, found {kind_of(mode)}{_WAY_OUT}")

    def free_nbytes(self) -> int:
        """Bytes that this user may still write to the cache's filesystem."""
        status = os.statvfs(self.folder)
        return status.f_bavail * status.f_frsize

    def copies(self) -> list[CachedCopy]:
        """What is there, in no order. CacheError if the folder is no cache, FileNotFoundError if there is none."""
        self._check()
        with os.scandir(self.folder) as entries:
            digests = [e.name for e in entries if _DIGEST.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
        holders = _lock_holders()
        found = []
        for digest in digests:
            with contextlib.suppress(FileNotFoundError):  # evicted in between
                found.append(self._describe(digest, holders))
        return found

    def _describe(self, digest: str, holders: Mapping[str, set[int]]) -> CachedCopy:
        folder, lock = self.copy_path(digest), self._lock_path(digest)
        problem = ""
        try:
            status = os.lstat(lock)
            processes = tuple(sorted(holders.get(_lock_key(status), ())))
            in_use = bool(processes) or _is_held(lock)
        except FileNotFoundError:  # a copy that was put here by hand: nobody has a lease on it
            status, processes, in_use = os.stat(folder), (), False
        except CacheError as error:
            in_use, problem = True, str(error)
        return CachedCopy(
            digest=digest,
            path=str(folder),
            nbytes=_folder_nbytes(folder),
            complete=os.path.isfile(folder / MANIFEST_NAME),
            last_used=status.st_mtime,
            source=_read_source(self._fill_path(digest)),
            in_use=in_use,
            processes=processes,
            problem=problem,
        )

    def evict(self, *, keep: int | None = None, free: int | None = None) -> EvictReport:
        """Remove copies that nobody holds, first those that were not used for longest, until that is enough.

        Enough is when the copies have at most `keep` bytes together, or when `free` bytes can be written to the
        filesystem: one of the two is to be given. A copy goes at once (it is renamed), and then its files. CacheError
        if the folder is no cache: nothing of it is touched then.
        """
        if (keep is None) == (free is None):
            raise ValueError(f"either keep or free must be given; found {keep}, {free}")
        copies = sorted(self.copies(), key=lambda copy: copy.last_used)
        self.sweep()
        nbytes = sum(copy.nbytes for copy in copies)
        removed, kept = [], []
        for copy in copies:
            if (nbytes <= keep) if keep is not None else (self.free_nbytes() >= (free or 0)):
                break
            try:
                gone = self._remove(copy.digest)
            except PermissionError:
                kept.append(copy)
                continue
            except CacheError as error:
                kept.append(dataclasses.replace(copy, in_use=True, problem=str(error)))
                continue
            if gone:
                removed.append(copy)
                nbytes -= copy.nbytes
            else:
                kept.append(dataclasses.replace(copy, in_use=True))
        return EvictReport(str(self.folder), tuple(removed), tuple(kept), nbytes)

    def _remove(self, digest: str) -> bool:
        """Remove a copy and its locks, unless somebody holds it: whether it is gone. PermissionError, and it is as it
        was, if this user may not remove all of it."""
        lock = self._lock_alone(digest)
        if lock is None:
            time.sleep(_LOOKING_SECONDS)
            lock = self._lock_alone(digest)
        if lock is None:
            return False
        trash = self.folder / f".{digest}.{secrets.token_hex(4)}{_EVICTED_SUFFIX}"
        with lock:
            if not self.may_remove(digest):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.copy_path(digest)))
            with contextlib.suppress(FileNotFoundError):  # somebody else was faster
                self.copy_path(digest).rename(trash)
            self._remove_locks(digest)
        with contextlib.suppress(PermissionError):  # the copy is gone: what this user may not remove, another sweeps
            _remove_trash(trash)
        return True

    def may_remove(self, digest: str) -> bool:
        """Whether permissions let this user remove a copy: rename it, and remove the files in it. True if there is
        none."""
        folder = self.copy_path(digest)
        try:
            owner = os.stat(folder).st_uid
        except FileNotFoundError:
            return True
        cache = os.stat(self.folder)
        if cache.st_mode & stat.S_ISVTX and os.geteuid() not in (0, owner, cache.st_uid):
            return False
        everything = os.R_OK | os.W_OK | os.X_OK
        return all(os.access(path, everything, effective_ids=True) for path in (self.folder, folder))

    def _lock_alone(self, digest: str) -> OpenFile | None:
        """The lease's lock, held exclusively, for the caller to close; None if somebody holds it."""
        lock = _open_lock(self._lock_path(digest))
        if _try_lock(lock.fileno()) and os.fstat(lock.fileno()).st_nlink:
            return lock
        lock.close()
        return None

    def _remove_locks(self, digest: str) -> None:
        """Of a copy that is no more, by whoever is alone with it."""
        for path in (self._fill_path(digest), self._lock_path(digest)):
            # Another user's, or a folder that somebody put in its place: it may as well stay.
            with contextlib.suppress(FileNotFoundError, PermissionError, IsADirectoryError):
                path.unlink()

    def sweep(self) -> None:
        """Remove what killed evictors have left, and the locks of copies that are no more. Nothing that is in use."""
        with os.scandir(self.folder) as entries:
            names = [entry.name for entry in entries]
        for name in names:
            digest = name.removesuffix(".lock")
            # Another user's, no lock at all, or somebody else was faster: the next one tries again.
            with contextlib.suppress(OSError, CacheError):
                if name.startswith(".") and name.endswith(_EVICTED_SUFFIX):
                    _remove_trash(self.folder / name)
                elif name != digest and _DIGEST.fullmatch(digest) and digest not in names:
                    self._remove_orphans(digest)

    def _remove_orphans(self, digest: str) -> None:
        if self.copy_path(digest).exists():
            return
        if (lock := self._lock_alone(digest)) is not None:
            with lock:
                if not self.copy_path(digest).exists():
                    self._remove_locks(digest)

    def copy_path(self, digest: str) -> Path:
        """The folder of a copy, be it there or not."""
        return self.folder / digest

    def _lock_path(self, digest: str) -> Path:
        return self.folder / f"{digest}.lock"

    def _fill_path(self, digest: str) -> Path:
        return self.folder / f"{digest}.fill"

    def _make(self) -> None:
        """Have the marker there. It comes first: whoever sees anything else sees it, too."""
        marker = self.folder / MARKER_NAME
        if marker.exists():
            return
        self._check_local()
        make_folder(self.folder)
        if os.listdir(self.folder):
            self._check()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with contextlib.suppress(FileExistsError), _open(marker, flags) as file:  # its existence counts
            write_all(file.fileno(), _MARKER)

    def _check_local(self) -> None:
        kind = filesystem_kind(next(path for path in (self.folder, *self.folder.parents) if path.exists()))
        is_shared = kind.removeprefix("fuse.") in _SHARED_BY_FUSE.split()
        if is_shared or (is_network(kind) and not kind.startswith(_GIVEN_TO_CONTAINERS)):
            raise CacheError(
                f"{self.folder}: expected a folder on a disk of this machine, found one on {kind}, where nobody could "
                "see that another machine uses a copy. Choose a local disk, or use the set where it is"
            )

    def _check(self) -> None:
        names = os.listdir(self.folder)
        # Looked for by its name: if it was made just now, the list may have what came after it only.
        if not (self.folder / MARKER_NAME).exists():
            found = f"{min(names)!r} in it and no {MARKER_NAME}" if names else "an empty one"
            raise CacheError(
                f"{self.folder}: expected a cache that `shardio stage` has made, found {found}; choose another folder: "
                "eviction may remove whatever is in a cache"
            )


class _LockedFile:
    """An open file that is locked until `close`, or until nobody refers to this, or the process ends. Not thread safe.

    A forked process has it too, and keeps it locked for as long as it lives; a program that is executed has not.
    """

    def __init__(self, lock: OpenFile) -> None:
        self._lock = lock

    def close(self) -> None:
        """May be called again."""
        self._lock.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Lease(_LockedFile):
    """That a copy stays: made by `Cache.lease`, ended by `close` or with the process."""

    def __init__(self, cache: Cache, digest: str, lock: OpenFile) -> None:
        super().__init__(lock)
        self.cache = cache
        self.digest = digest
        self.path = cache.copy_path(digest)
        """The folder of the copy. It exists from when the first file is copied."""
        self._tried_filling = False
        self._touch()

    def __enter__(self) -> Lease:
        return self

    def is_complete(self) -> bool:
        """Whether the copy has its manifest, which comes last."""
        return (self.path / MANIFEST_NAME).is_file()

    def manifest(self) -> Manifest | None:
        """The copy's, if it is complete and this is the manifest of the set."""
        try:
            manifest = load_manifest(self.path)
        except (SetNotFoundError, FormatError):
            return None
        return manifest if manifest.digest == self.digest else None

    def has(self, entry: FileEntry) -> bool:
        """Whether a file of the set is there, whole: it got its name when it was found to have the right sha256."""
        try:
            status = os.lstat(f"{self.path}/{entry.file}")
        except FileNotFoundError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == entry.nbytes

    def try_filling(self, source: str) -> Filling | None:
        """The right to write into the copy, if nobody else has it now; `source` says where its files come from.

        PermissionError if nobody has it, and only another user may. CacheError as `Cache.lease`.
        """
        path = self.cache._fill_path(self.digest)
        allowed = True
        try:
            lock = _open(path, os.O_RDWR | os.O_CREAT, sole_name=True)
        except PermissionError:
            if not path.exists():
                raise
            allowed = False  # to write, but one may wait for the other user
            lock = _open(path)
        filling = Filling(lock)
        self._tried_filling = self._tried_filling or allowed
        try:
            if not _try_lock(lock.fileno()):
                filling.close()
                return None
            if not allowed:
                what = "another user has begun this copy, and only he may go on with it or evict it"
                raise PermissionError(errno.EACCES, what, str(path))
            with contextlib.suppress(OSError):  # the disk is full: where the copy comes from is not worth a failure
                os.ftruncate(lock.fileno(), 0)
                write_all(lock.fileno(), json.dumps({"source": source}).encode())
        except BaseException:
            filling.close()
            raise
        return filling

    def filler(self) -> int | None:
        """The process that fills the copy now, if there is one and /proc/locks tells."""
        with contextlib.suppress(FileNotFoundError):
            return min(_lock_holders().get(_lock_key(os.stat(self.cache._fill_path(self.digest))), ()), default=None)
        return None

    def close(self) -> None:
        if not self._lock.closed:
            self._touch()
            super().close()
        if self._tried_filling:
            # Of a copy that was not even begun nothing stays: in a folder such as /tmp its files would keep all others
            # from making it. Whoever else has a lease keeps them.
            with contextlib.suppress(OSError, CacheError):
                self.cache._remove_orphans(self.digest)
            self._tried_filling = False

    def _touch(self) -> None:
        """Note when the copy was last used. Not everyone who may use it may do that."""
        with contextlib.suppress(OSError):
            os.utime(self._lock.fileno())


class Filling(_LockedFile):
    """The right to write into a copy, until `close`; to be had from `Lease.try_filling`, and ended before the lease."""

    def __enter__(self) -> Filling:
        return self

    def close(self) -> None:
        if not self._lock.closed:
            # A process that was forked meanwhile has the open file too, and does not fill the copy.
            fcntl.flock(self._lock.fileno(), fcntl.LOCK_UN)
        super().close()


# --- locks -----------------------------------------------------------------------------------------------------------


_WAY_OUT = ": shardio has not put it there. Remove it, or choose another cache"


def _open(path: Path, flags: int = os.O_RDONLY, *, sole_name: bool = False) -> OpenFile:
    """As `open_untrusted`: all who use a cache may put something where a lock is expected."""
    return open_untrusted(path, flags, refusal=CacheError, way_out=_WAY_OUT, sole_name=sole_name)


def _open_lock(path: Path) -> OpenFile:
    """Open a lock file for reading, which is enough to lock it; it is made if need be, for all to read."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            return _open(path)
        # Never O_CREAT alone, which the kernel refuses for other users' files in folders such as /tmp.
        with contextlib.suppress(FileExistsError):  # made by somebody else in between
            lock = _open(path, os.O_CREAT | os.O_EXCL)
            with contextlib.suppress(OSError):  # a filesystem without permissions
                # Whatever the umask says of data: a lock that others cannot open keeps them from the copy for ever.
                os.fchmod(lock.fileno(), stat.S_IMODE(os.fstat(lock.fileno()).st_mode) | 0o644)
            return lock


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_shared(descriptor: int) -> None:
    """OSError, and what to do, if somebody holds the lock exclusively for longer than any evictor."""
    deadline = time.monotonic() + _LEASE_SECONDS
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                break
        time.sleep(_LOOKING_SECONDS)
    holders = sorted(_lock_holders().get(_lock_key(os.fstat(descriptor)), ()))
    by = f"process {', '.join(map(str, holders))}" if holders else "another process"
    raise OSError(
        errno.ETIMEDOUT,
        f"expected the lock within {_LEASE_SECONDS:.0f} seconds, as an evictor has it for a moment; found that {by} "
        "keeps it. End that one, or choose another cache",
    )


def _is_held(path: Path) -> bool:
    try:
        lock = _open(path)
    except PermissionError:  # another user's, who shares it with nobody: it is not ours to remove
        return True
    with lock:
        return not _try_lock(lock.fileno())


def _lock_key(status: os.stat_result) -> str:
    """What /proc/locks calls a file."""
    return f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"


def _lock_holders(proc: Path = PROC) -> dict[str, set[int]]:
    """The processes that hold a flock on each file; empty where the kernel does not tell."""
    holders: dict[str, set[int]] = {}
    with contextlib.suppress(OSError):
        for fields in map(str.split, (proc / "locks").read_text().splitlines()):
            # 3: FLOCK ADVISORY READ 1234 fe:00:5678 0 EOF; of who waits the second field is an arrow.
            if len(fields) == 8 and fields[1] == "FLOCK":
                holders.setdefault(fields[5], set()).add(int(fields[4]))
    return holders


def _remove_trash(path: Path) -> None:
    """Remove an evicted copy, unless a living process is at it already."""
    with contextlib.suppress(FileNotFoundError), contextlib.closing(open_folder(path, os.O_NOFOLLOW)) as opened:
        if _try_lock(opened.fileno()):
            shutil.rmtree(path)


def _folder_nbytes(folder: Path) -> int:
    """Of the files in it that this user may see."""
    nbytes = 0
    with contextlib.suppress(PermissionError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # a temporary file that has got its name
                nbytes += entry.stat(follow_symlinks=False).st_size
    return nbytes


def _read_source(path: Path) -> str:
    try:
        with _open(path) as file:
            source = json.loads(file.read(_MAX_SOURCE_NBYTES))["source"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # not there, being written, or not for us
        return ""
    return source if isinstance(source, str) else ""
