"""Gives a file a second name without copying a byte: a hard link, or a clone that shares its blocks (reflink)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from shardio.system.opening import FileAt, OpenFile, at

# Linux: <linux/fs.h>.
_FICLONE = 0x40049409
# Another filesystem or mount; a filesystem without links, or with too many of this file; another user's file where
# fs.protected_hardlinks is set.
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
# Another filesystem, one without clones, or one that clones no file of this size.
_NO_CLONE = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOTTY)


def try_link(source: str | Path, target: str | Path | FileAt) -> bool:
    """Gives the file `source`, no link itself, the name `target`, too. Returns False where no link can be made.

    Raises FileExistsError and all other errors of the system.
    """
    name, folder = at(target)
    try:
        os.link(source, name, dst_dir_fd=folder, follow_symlinks=False)
    except OSError as error:
        if error.errno in _NO_LINK:
            return False
        raise
    return True


def try_clone(source: OpenFile, descriptor: int) -> bool:
    """Makes the open file `descriptor` the content of `source`, of which it shares the blocks until one of them is
    written to. Returns False where the filesystem cannot."""
    try:
        fcntl.ioctl(descriptor, _FICLONE, source.fileno())
    except OSError as error:
        if error.errno in _NO_CLONE:
            return False
        raise
    return True


def is_same_file(file: OpenFile, path: str | Path | FileAt) -> bool:
    """Returns whether `path` is a name of the open file."""
    name, folder = at(path)
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(name, dir_fd=folder))
    return False
