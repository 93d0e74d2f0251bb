"""A cache: a folder on a node's own disk with copies of sets, which all jobs of the node share.

The package's docstring describes the states of a copy, its files and its locks. A marker file in the folder says that
everything there may be removed. Copies may share a file through hard links, so the file takes up space only once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from shardio.cache.leases import LOOKING_SECONDS, CopyPaths, Lease, holders_of, open_in_cache
from shardio.errors import CacheError, SpaceError, bytes_text
from shardio.format.layout import MANIFEST_NAME, MARKER_NAME
from shardio.format.parse import is_digest
from shardio.sets.names import check_local
from shardio.system.files import lock_at_once, make_folder, write_all
from shardio.system.machine import filesystem_kind, is_shared
from shardio.system.opening import naming_owner, open_folder, owner_of

_MARKER = b"""\
This folder is a cache of shardio: copies of shard sets, named by their digests, which can be made again.
`shardio evict` removes those that were not used for longest. Put nothing else here.
"""

_EVICTED_SUFFIX = ".evicted"


@dataclass(frozen=True)
class CachedCopy:
    """A cache's copy of one set, complete or partial."""

    digest: str
    path: str
    nbytes: int
    """The size of the files that are there, including unfinished ones. Copies may share files: see `nbytes_alone`."""
    complete: bool
    last_used: float
    """When a process last held a lease, to the minute, as seconds since 1970 (time.time)."""
    source: str
    """The folder or URL that it was last copied from; "" if unknown."""
    in_use: bool
    """Whether a process holds a lease, so the copy is not evicted."""
    processes: tuple[int, ...]
    """The ids of the processes that hold a lease. /proc/locks does not show processes of other containers."""
    nbytes_alone: int = 0
    """The size of the files that no other copy has, which is what eviction frees."""
    problem: str = ""
    """Why it cannot be known whether the copy is in use, so that it counts as in use; "" if it is known."""
    owner: str = ""
    """The name of the user who began it."""
    readable: bool = True
    """Whether this user may list its folder. Otherwise its size is unknown and counts as 0, and `complete` is False."""

    def __str__(self) -> str:
        size = bytes_text(self.nbytes) if self.readable else "size unknown"
        return f"{self.source or 'an unknown set'}, digest {self.digest[:16]}, {size}"


@dataclass(frozen=True)
class EvictReport:
    path: str
    removed: tuple[CachedCopy, ...]
    kept: tuple[CachedCopy, ...]
    """Copies that were due for removal, but are in use or another user's; and unreadable copies of another user."""
    nbytes: int
    """The size of the copies that remain. A file that several of them share counts once."""


class Cache:
    """The cache in `folder`, which threads, processes and users may share. The first `lease` creates the folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        check_local(folder, CacheError, "a cache is a folder on a disk of this machine")
        self.folder = Path(os.path.abspath(folder))  # wherever the process may go

    def lease(self, digest: str) -> Lease:
        """Returns a lease on the copy with this digest: the copy is not evicted until the lease is closed.

        The copy need not exist yet. Waits up to 30 seconds while another process evicts it. Permission to read the
        cache is enough if the copy has a lock file. Raises ValueError if `digest` is not 64 lower-case hexadecimal
        digits; CacheError if the folder is not a cache, is on a network filesystem, or has something else at the path
        of the copy or its lock; OSError if the lock cannot be taken.
        """
        if not is_digest(digest):
            raise ValueError(f"digest must be 64 lower-case hexadecimal digits; found {digest!r}")
        with naming_owner(self.folder, "ask the owner for permission to write, or use another cache"):
            self._make()
            return Lease(CopyPaths(self.folder, digest))

    def free_nbytes(self) -> int:
        """Returns how many bytes this user may still write to the cache's filesystem."""
        return shutil.disk_usage(self.folder).free

    def copies(self) -> list[CachedCopy]:
        """Returns a CachedCopy for each copy in the cache, unsorted. Raises CacheError if the folder is not a cache."""
        self._check()
        with os.scandir(self.folder) as entries:
            digests = [e.name for e in entries if is_digest(e.name) and e.is_dir(follow_symlinks=False)]
        found = []
        for digest in digests:
            with contextlib.suppress(FileNotFoundError):  # evicted in between
                found.append(_describe(CopyPaths(self.folder, digest), self.may_remove(digest)))
        return found

    def evict(self, *, keep: int | None = None, free: int | None = None) -> EvictReport:
        """Removes unused copies, least recently used first, until the limit is met. Returns an EvictReport.

        The limit is either `keep`, the most bytes that all copies together may have, or `free`, the bytes that must be
        free on the filesystem. Raises CacheError, and removes nothing, if the folder is not a cache.
        """
        if (keep is None) == (free is None):
            raise ValueError(f"give exactly one of `keep` and `free`, in bytes; found keep={keep} and free={free}")
        copies = sorted(self.copies(), key=lambda copy: copy.last_used)
        self.sweep()
        left = {copy.digest: list(_statuses(copy.path)) for copy in copies}
        removed, kept = [], [copy for copy in copies if not copy.readable]
        for copy in (copy for copy in copies if copy.readable):
            if free <= self.free_nbytes() if free is not None else _sizes(left.values())[0] <= (keep or 0):
                break
            try:
                if self._remove(CopyPaths(self.folder, copy.digest)):
                    removed.append(copy)
                    del left[copy.digest]
                else:
                    kept.append(replace(copy, in_use=True))
            except PermissionError:
                kept.append(copy)
            except CacheError as error:
                kept.append(replace(copy, in_use=True, problem=str(error)))
        return EvictReport(str(self.folder), tuple(removed), tuple(kept), _sizes(left.values())[0])

    def make_room(self, digest: str, nbytes: int) -> tuple[CachedCopy, ...]:
        """Evicts unused copies until `nbytes` more bytes fit on the disk. Returns the evicted copies.

        `digest` names the copy that needs the space. Raises SpaceError, and evicts nothing, if that cannot free enough.
        """
        free = self.free_nbytes()
        if nbytes <= free:
            return ()
        if nbytes <= free + _freed(self._evictable(self.copies())):
            evicted = self.evict(free=nbytes).removed
            if nbytes <= self.free_nbytes():
                return evicted
        raise self.no_room(digest, nbytes)

    def no_room(self, digest: str, nbytes: int, found: str | None = None) -> SpaceError:
        """Returns a SpaceError: the copy `digest` needs `nbytes` more bytes. Its message lists the copies in use.

        `found` is the filesystem's own error message, which may name a quota.
        """
        copies = [copy for copy in self.copies() if copy.digest != digest]
        held = [
            f"{copy.digest[:16]} ({copy.source or 'source unknown'}), {copy.nbytes:,} bytes"
            + (f" by process {', '.join(map(str, copy.processes))}" if copy.processes else "")
            for copy in copies
            if copy.in_use
        ]
        ours = _freed(self._evictable(copies))
        others = _freed([copy for copy in copies if not copy.in_use]) - ours
        return SpaceError(
            f"{self.folder}: expected room for {nbytes:,} bytes, found {f'{found}, ' if found else ''}"
            f"{self.free_nbytes():,} free, {ours:,} in copies that are not in use"
            f"{f', {others:,} in unused copies that only other users may remove' if others else ''}; in use: "
            f"{'; '.join(held) or 'no other copy'}. "
            "Finished files are kept. Make room, choose a larger disk for the cache, or read from the source"
        )

    def _evictable(self, copies: Sequence[CachedCopy]) -> list[CachedCopy]:
        return [copy for copy in copies if not copy.in_use and self.may_remove(copy.digest)]

    def _remove(self, paths: CopyPaths) -> bool:
        """Removes a copy and its lock files, and returns True. Returns False, and removes nothing, if it is in use.

        Raises PermissionError if this user may not remove all of the copy, and CacheError if its lock does not show
        whether it is in use; the copy stays in both cases.
        """
        if (lock := paths.lock_alone()) is None:
            time.sleep(LOOKING_SECONDS)
            if (lock := paths.lock_alone()) is None:
                return False
        trash = self.folder / f".{paths.digest}.{secrets.token_hex(4)}{_EVICTED_SUFFIX}"
        with lock:
            paths.check_lock(lock)
            if not self.may_remove(paths.digest):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(paths.folder))
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                paths.folder.rename(trash)
            paths.remove_locks()
        # The copy is gone. Files that this user may not remove are left to another user's sweep.
        with contextlib.suppress(PermissionError, NotADirectoryError):
            _remove_trash(trash)
        return True

    def may_remove(self, digest: str) -> bool:
        """Returns whether this user may rename and remove the copy `digest`; True if there is no such copy."""
        folder = self.folder / digest
        try:
            owner = os.stat(folder).st_uid
        except FileNotFoundError:
            return True
        cache = os.stat(self.folder)
        if cache.st_mode & stat.S_ISVTX and os.geteuid() not in (0, owner, cache.st_uid):
            return False
        everything = os.R_OK | os.W_OK | os.X_OK
        return all(os.access(path, everything, effective_ids=True) for path in (self.folder, folder))

    def sweep(self) -> None:
        """Removes what killed processes left: evicted folders, and lock files without a copy. Keeps anything in use."""
        names = os.listdir(self.folder)
        for name in names:
            digest = name.partition(".")[0]
            # Another user's, no lock at all, or another process was faster: the next sweep tries again.
            with contextlib.suppress(OSError, CacheError):
                if name.startswith(".") and name.endswith(_EVICTED_SUFFIX):
                    _remove_trash(self.folder / name)
                elif name != digest and is_digest(digest) and digest not in names:
                    CopyPaths(self.folder, digest).remove_orphans()

    def _make(self) -> None:
        """Creates the folder and its marker file, if needed. Raises CacheError if it has other files and no marker, or
        is on a network filesystem."""
        marker = self.folder / MARKER_NAME
        flags, may_pass = os.O_WRONLY, OSError
        if not marker.exists():
            kind = filesystem_kind(next(path for path in (self.folder, *self.folder.parents) if path.exists()))
            if is_shared(kind):
                raise CacheError(
                    f"{self.folder}: expected a folder on a disk of this machine, found one on {kind}, a "
                    "network filesystem, where it is unknown which copies other machines use. Choose a folder on a "
                    "local disk, or read the set without a cache"
                )
            make_folder(self.folder)
            if os.listdir(self.folder):
                self._check()
            flags, may_pass = os.O_WRONLY | os.O_CREAT | os.O_EXCL, FileExistsError  # another process has made it
        elif marker.stat().st_size:  # else its maker was killed, or is the folder's owner
            return
        with contextlib.suppress(may_pass), open_in_cache(marker, flags) as file:
            write_all(file.fileno(), _MARKER)
            os.fsync(file.fileno())  # whoever makes the folder of a copy syncs its name

    def _check(self) -> None:
        if not self.folder.exists():
            what = "expected a cache made by `shardio stage` or a loader, found nothing: check the path"
            raise FileNotFoundError(errno.ENOENT, what, str(self.folder))
        names = os.listdir(self.folder)
        # Looked up by name: if it was made just now, the list may have only what came after it.
        if not (self.folder / MARKER_NAME).exists():
            found = f"a folder with {min(names)!r} and without {MARKER_NAME}" if names else "an empty folder"
            raise CacheError(
                f"{self.folder}: expected a cache made by `shardio stage` or a loader, found {found}; choose another "
                "folder, as eviction may remove everything in a cache"
            )


def _describe(paths: CopyPaths, may_remove: bool) -> CachedCopy:
    status, processes, in_use, problem = os.stat(paths.folder), tuple[int, ...](), True, ""
    try:
        if may_remove:
            with contextlib.suppress(OSError):  # a full disk
                paths.open_lock().close()
        processes = holders_of(status := os.lstat(paths.lock))
        if not processes:
            with open_in_cache(paths.lock) as lock:
                if lock_at_once(lock.fileno()):
                    paths.check_lock(lock)
                    in_use = False
    except FileNotFoundError:  # only others can remove it
        in_use = False
    except PermissionError:  # another user's, who does not share it: this user may not remove it
        pass
    except CacheError as error:
        problem = str(error)
    nbytes, nbytes_alone = _sizes([_statuses(paths.folder)])
    os.stat(paths.folder)  # raises if the copy was evicted in between
    return CachedCopy(
        digest=paths.digest,
        path=str(paths.folder),
        nbytes=nbytes,
        nbytes_alone=nbytes_alone,
        complete=os.path.isfile(paths.folder / MANIFEST_NAME),
        last_used=status.st_mtime,
        source=paths.source(),
        in_use=in_use,
        processes=processes,
        problem=problem,
        owner=owner_of(paths.folder),
        readable=os.access(paths.folder, os.R_OK | os.X_OK, effective_ids=True),
    )


def _freed(copies: Iterable[CachedCopy]) -> int:
    """Returns how many bytes become free if all of `copies` are evicted."""
    return _sizes(_statuses(copy.path) for copy in copies)[1]


def _sizes(copies: Iterable[Iterable[os.stat_result]]) -> tuple[int, int]:
    """Returns the total bytes of the files of `copies`, and how many bytes removing all these copies frees.

    `copies` has the lstats of each copy's files. A file with several hard links counts once; removing it frees nothing
    if it has a link elsewhere.
    """
    found = list(chain.from_iterable(copies))
    counts = Counter((status.st_dev, status.st_ino) for status in found)
    each = {(status.st_dev, status.st_ino): status for status in found}
    # An unfinished file has its full size, and takes less.
    sizes = {inode: min(status.st_size, status.st_blocks * 512) for inode, status in each.items()}
    return sum(sizes.values()), sum(sizes[inode] for inode in each if counts[inode] >= each[inode].st_nlink)


def _statuses(folder: str | Path) -> Iterator[os.stat_result]:
    """Yields the lstat of each file in the folder of a copy; nothing if the folder is gone or unreadable."""
    with contextlib.suppress(PermissionError, FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # a temporary file that has got its name
                yield entry.stat(follow_symlinks=False)


def _remove_trash(path: Path) -> None:
    """Removes the folder of an evicted copy, unless another living process is removing it."""
    with contextlib.suppress(FileNotFoundError), contextlib.closing(open_folder(path, os.O_NOFOLLOW)) as opened:
        if lock_at_once(opened.fileno()):
            shutil.rmtree(path)
