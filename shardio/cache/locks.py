"""Locks of a cache: those of flock, which end with their process, however that ends.

Any user of a cache may put something where a lock is expected, so locks are opened as untrusted files are.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from pathlib import Path
from typing import TypeVar

from shardio.errors import CacheError
from shardio.system.machine import PROC
from shardio.system.opening import OpenFile, open_untrusted

WAY_OUT = ": shardio has not put it there. Remove it, or choose another cache"
# A process that only looks whether a copy is in use has its lock for a moment, and does not use it.
LOOKING_SECONDS = 0.01
# An evictor has a lock for as long as a rename takes. Any user who may read a lock can hold it for ever.
_LEASE_SECONDS = 30.0

T = TypeVar("T")


class LockedFile:
    """An open file that is locked until `close`, or until the last reference to this dies, or the process ends. Not
    thread safe.

    A forked process has it too, and keeps it locked for as long as it lives; a program that is executed has not.
    """

    def __init__(self, lock: OpenFile) -> None:
        self._lock = lock

    def __enter__(self: T) -> T:
        return self

    def close(self) -> None:
        """May be called again."""
        self._lock.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def open_in_cache(path: Path, flags: int = os.O_RDONLY, *, sole_name: bool = False) -> OpenFile:
    """Opens a file as `open_untrusted` does. Raises CacheError unless it is a regular file."""
    return open_untrusted(path, flags, refusal=CacheError, way_out=WAY_OUT, sole_name=sole_name)


def open_lock(path: Path) -> OpenFile:
    """Opens a lock file for reading, which is enough to lock it, and makes it if need be, for all users to read."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            return open_in_cache(path)
        # Never O_CREAT alone, which the kernel refuses for other users' files in folders such as /tmp.
        with contextlib.suppress(FileExistsError):  # made by another process in between
            lock = open_in_cache(path, os.O_CREAT | os.O_EXCL)
            with contextlib.suppress(OSError):  # a filesystem without permissions
                # Whatever the umask says of data: a lock that others cannot open keeps them from the copy for ever.
                os.fchmod(lock.fileno(), stat.S_IMODE(os.fstat(lock.fileno()).st_mode) | 0o644)
            return lock


def lock_at_once(descriptor: int) -> bool:
    """Locks a file exclusively. Returns False if another process, or another part of this one, has it locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_shared(descriptor: int) -> None:
    """Locks a file, shared. Raises OSError, with the way out, if it stays locked for longer than by any evictor."""
    deadline = time.monotonic() + _LEASE_SECONDS
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                break
        time.sleep(LOOKING_SECONDS)
    found = sorted(lock_holders().get(lock_key(os.fstat(descriptor)), ()))
    by = f"process {', '.join(map(str, found))}" if found else "another process"
    raise OSError(
        errno.ETIMEDOUT,
        f"expected the lock within {_LEASE_SECONDS:.0f} seconds, as an evictor has it for a moment; found that {by} "
        "keeps it. End that one, or choose another cache",
    )


def is_held(path: Path) -> bool:
    """Returns whether a lock is held. Raises FileNotFoundError if there is none."""
    try:
        lock = open_in_cache(path)
    except PermissionError:  # another user's, who does not share it: this user may not remove it
        return True
    with lock:
        return not lock_at_once(lock.fileno())


def lock_key(status: os.stat_result) -> str:
    """Returns what /proc/locks calls a file."""
    return f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"


def lock_holders(proc: Path = PROC) -> dict[str, set[int]]:
    """Returns the processes that hold a flock on each file, by `lock_key`; empty where the kernel does not tell."""
    holders: dict[str, set[int]] = {}
    with contextlib.suppress(OSError):
        for fields in map(str.split, (proc / "locks").read_text().splitlines()):
            # 3: FLOCK ADVISORY READ 1234 fe:00:5678 0 EOF; in the line of a waiting process the second field is an
            # arrow.
            if len(fields) == 8 and fields[1] == "FLOCK":
                holders.setdefault(fields[5], set()).add(int(fields[4]))
    return holders
