"""A folder that appears whole under its name, never over anything, or not at all.

It is made under a temporary name beside it; then one rename, which replaces nothing, gives it its name. A temporary
file beside it is its lock, which dies with its process: from it the next process knows what a killed one has left.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from shardio.errors import ConvertError
from shardio.sets.leftovers import folder_of, sweep_left_overs
from shardio.sets.local import looks_like_a_set
from shardio.system.files import AtomicFile, fsync_folder
from shardio.system.opening import FolderHandle

# Linux: <linux/fs.h>, <fcntl.h>.
_RENAME_NOREPLACE = 1
_AT_FDCWD = -100


def sweep_beside(target: Path) -> None:
    """Removes what killed processes have left of folders beside `target`."""
    if not looks_like_a_set(target.parent):  # where temporary files are a conversion's own
        with contextlib.suppress(OSError):  # no folder, or one that may not be read
            sweep_left_overs(target.parent)


@contextlib.contextmanager
def temporary_folder(target: Path) -> Iterator[tuple[FolderHandle, AtomicFile]]:
    """Makes a folder beside `target` for the `with` block, and gives it, open, with its lock. Unless it is renamed
    there, it is removed. It stays open as other users may write to the root, and could put a link in its place."""
    with AtomicFile(target) as lock:  # never committed
        folder = folder_of(lock.temporary)
        try:
            folder.mkdir()
            with FolderHandle(folder) as opened:
                yield opened, lock
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def taken(target: Path) -> ConvertError:
    return ConvertError(
        f"{target}: expected nothing there, found something: what is published never changes. Choose another name"
    )


def check_new(target: Path, sets: list[Path]) -> None:
    """Raises ConvertError unless `target` can be made, outside of these sets, whose paths are real ones."""
    root = target.parent
    if not root.is_dir():
        raise ConvertError(f"{root}: expected a folder for the new set {target.name!r}, found none: make it first")
    real = Path(os.path.realpath(root))
    for folder in sets:
        if folder in (real, *real.parents):
            raise ConvertError(f"{target}: expected a place outside of the set {folder} itself")
    if os.path.lexists(target):
        raise taken(target)


def sync_names(folder: Path) -> None:
    with contextlib.suppress(PermissionError):  # a folder that may be written to but not read
        fsync_folder(folder)


def rename_new(folder: Path | FolderHandle, target: Path) -> None:
    """Renames a folder. Raises ConvertError if there is anything of that name already, even an empty folder, or if
    something else has taken the place of an open one."""
    if isinstance(folder, FolderHandle):
        if not folder.is_in_place():
            raise ConvertError(f"{folder}: expected the folder of the new set, found that another process replaced it")
        folder = folder.path
    try:
        if not rename_without_replacing(folder, target):
            # A filesystem without it, such as NFS. A folder can replace nothing but an empty folder, and that only if
            # another process makes one between these two lines.
            if os.path.lexists(target):
                raise taken(target)
            folder.rename(target)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR) and os.path.lexists(target):
            raise taken(target) from None
        raise


def rename_without_replacing(folder: Path, target: Path) -> bool:
    """Renames a folder by renameat2 of Linux. Returns False if the system or the filesystem does not have it."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    paths = (os.fsencode(folder), os.fsencode(target))
    if renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], ctypes.c_uint(_RENAME_NOREPLACE)) == 0:
        return True
    if (code := ctypes.get_errno()) in (errno.ENOSYS, errno.EINVAL):
        return False
    raise OSError(code, os.strerror(code), str(folder), None, str(target))
