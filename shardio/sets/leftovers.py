"""Leftovers of publishers that were killed or lost their power: a temporary folder in a root, and its lock beside it.

A publisher makes the lock, a temporary file, before the folder, and removes it after the folder has its name or is
gone: a folder without a lock belongs to no process. The lock ends with its process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardio.errors import FormatError
from shardio.system.files import is_abandoned, target_of, try_lock
from shardio.system.opening import open_untrusted

FOLDER_SUFFIX = ".d"


@dataclass(frozen=True)
class LeftOver:
    """A temporary folder and its lock, or one of them."""

    path: str
    nbytes: int
    abandoned: bool
    """Whether it is of no use to any process. If not, a process writes there, or one of another machine may."""


def folder_of(lock: Path) -> Path:
    return lock.with_name(lock.name + FOLDER_SUFFIX)


def find_left_overs(root: str | os.PathLike[str]) -> list[LeftOver]:
    """Returns the temporary folders and locks in a root, those of living publishers too, in the order of their names.
    Changes nothing. Errors are those of os.listdir."""
    found = []
    for lock in _locks(Path(root)):
        folder, abandoned = folder_of(lock), False
        try:
            with _alone_with(lock, os.O_RDONLY, fcntl.LOCK_SH) as abandoned:
                pass
        except (OSError, FormatError):  # another user's and not readable, gone by now, or no lock
            pass
        nbytes = 0
        for path in (lock, *folder.glob("*")):
            with contextlib.suppress(OSError):
                nbytes += path.lstat().st_size
        if there := [path for path in (folder, lock) if os.path.lexists(path)]:
            found.append(LeftOver(str(there[0]), nbytes, abandoned))
    return found


def sweep_left_overs(root: Path) -> None:
    """Removes what is abandoned, as far as permissions allow."""
    for lock in _locks(root):
        with contextlib.suppress(OSError, FormatError), _alone_with(lock, os.O_RDWR, fcntl.LOCK_EX) as abandoned:
            if abandoned:
                shutil.rmtree(folder_of(lock), ignore_errors=True)
                lock.unlink(missing_ok=True)


def _locks(root: Path) -> list[Path]:
    # Other programs may have temporary files of their own in a root.
    names = {name.removesuffix(FOLDER_SUFFIX) for name in os.listdir(root)}
    return [root / name for name in sorted(filter(target_of, names))]


@contextlib.contextmanager
def _alone_with(lock: Path, access: int, operation: int) -> Iterator[bool]:
    """Yields whether the folder of this lock is abandoned. If it is, the block holds the lock, where there is one and
    the filesystem has locks.

    Raises OSError, such as PermissionError, if that cannot be known.
    """
    locked: bool | None = True
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(FileNotFoundError):
            file = stack.enter_context(open_untrusted(lock, access))
            locked = try_lock(file.fileno(), operation)
        if locked is False:
            yield False
            return
        folder = folder_of(lock)
        written = [path.stat().st_mtime for path in (lock, folder, *folder.glob("*")) if os.path.lexists(path)]
        yield is_abandoned(lock.name, max(written, default=0), locked=bool(locked))
