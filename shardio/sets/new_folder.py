"""Creates a folder that appears whole under its name or not at all, and never replaces anything.

The folder is filled under a temporary name; then a rename that replaces nothing gives it its name. A temporary file
next to it is its lock. The lock ends with its process, so it shows which folders killed processes left. The lock is
made before the folder and removed after it, so a folder without a lock belongs to no process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardio.errors import ConvertError, FormatError
from shardio.sets.names import looks_like_a_set
from shardio.system.files import AtomicFile, alone_with, fsync_folder, remove_folder, target_of
from shardio.system.opening import FolderHandle

# Linux: <linux/fs.h>, <fcntl.h>.
_RENAME_NOREPLACE = 1
_AT_FDCWD = -100

FOLDER_SUFFIX = ".d"


@contextlib.contextmanager
def temporary_folder(target: Path) -> Iterator[tuple[FolderHandle, AtomicFile]]:
    """Yields a new folder next to `target`, opened, and its lock file.

    When the block ends, the folder is removed unless it was renamed. It is an open handle because users who may write
    to the root could put a link in its place.
    """
    with AtomicFile(target) as lock:  # never committed
        folder = folder_of(lock.temporary)
        try:
            folder.mkdir()
            with FolderHandle(folder) as opened:
                yield opened, lock
        finally:
            remove_folder(folder)


def taken(target: Path) -> ConvertError:
    if target.is_dir() and not looks_like_a_set(target):
        found, way = "a folder that is no set", f"add a name for the set, such as {target / 'NAME'}"
    else:
        found, way = "something", "a published set never changes, so choose another name"
    return ConvertError(f"{target}: expected nothing there, found {found}: {way}")


def check_new(target: Path, sets: list[Path]) -> None:
    """Raises ConvertError if `target` exists, has no parent folder, or is inside one of `sets` (real paths)."""
    root = target.parent
    if not root.is_dir():
        raise ConvertError(f"{root}: expected a folder for the new set {target.name!r}, found none: create it first")
    real = Path(os.path.realpath(root))
    for folder in sets:
        if folder in (real, *real.parents):
            raise ConvertError(
                f"{target}: expected a path outside of the set {folder}, which has only its own files: choose another"
            )
    if os.path.lexists(target):
        raise taken(target)


def rename_new(folder: FolderHandle, target: Path) -> None:
    """Renames `folder` to `target`, durably. Raises ConvertError if `target` exists or `folder` was replaced."""
    if not folder.is_in_place():
        raise ConvertError(
            f"{folder}: another process moved or replaced this folder, which is to become the new set: start again"
        )
    try:
        if not rename_without_replacing(folder.path, target):
            # A filesystem without it, such as NFS. A folder can replace nothing but an empty folder, and that only if
            # another process makes one between these two lines.
            if os.path.lexists(target):
                raise taken(target)
            folder.path.rename(target)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR) and os.path.lexists(target):
            raise taken(target) from None
        raise
    for parent in dict.fromkeys((target.parent, folder.path.parent)):  # the new name first
        fsync_folder(parent)


def rename_without_replacing(folder: Path, target: Path) -> bool:
    """Renames a folder by Linux's renameat2. Returns False if the system or filesystem does not support this."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    paths = (os.fsencode(folder), os.fsencode(target))
    if renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], ctypes.c_uint(_RENAME_NOREPLACE)) == 0:
        return True
    if (code := ctypes.get_errno()) in (errno.ENOSYS, errno.EINVAL):
        return False
    raise OSError(code, os.strerror(code), str(folder), None, str(target))


# --- what killed processes left --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LeftOver:
    """A temporary folder and its lock file, or either of them alone."""

    path: str
    nbytes: int
    abandoned: bool
    """Whether no process writes there, of this or another machine. False if that is not certain."""


def folder_of(lock: Path) -> Path:
    return lock.with_name(lock.name + FOLDER_SUFFIX)


def find_left_overs(root: str | os.PathLike[str]) -> list[LeftOver]:
    """Returns the temporary folders and locks in a root, also those of running publishers, sorted by name."""
    found = []
    for lock in _locks(Path(root)):
        folder, abandoned, nbytes = folder_of(lock), False, 0
        others = (folder, *folder.glob("*"))
        # It may be another user's and not readable, or gone by now, or no lock.
        with contextlib.suppress(OSError, FormatError), alone_with(lock, *others, only_looks=True) as alone:
            abandoned = alone
        for path in (lock, *others[1:]):
            with contextlib.suppress(OSError):
                nbytes += path.lstat().st_size
        if there := [path for path in (folder, lock) if os.path.lexists(path)]:
            found.append(LeftOver(str(there[0]), nbytes, abandoned))
    return found


def sweep_beside(target: Path) -> None:
    """Removes the temporary folders and locks that killed processes left next to `target`, if permissions allow."""
    if looks_like_a_set(target.parent):  # where temporary files are a conversion's own
        return
    with contextlib.suppress(OSError):  # no folder, or one that may not be read
        for lock in _locks(target.parent):
            folder = folder_of(lock)
            with contextlib.suppress(OSError, FormatError), alone_with(lock, folder, *folder.glob("*")) as abandoned:
                if abandoned:
                    remove_folder(folder)
                    lock.unlink(missing_ok=True)


def _locks(root: Path) -> list[Path]:
    # Other programs may have temporary files of their own in a root.
    names = {name.removesuffix(FOLDER_SUFFIX) for name in os.listdir(root)}
    return [root / name for name in sorted(filter(target_of, names))]
