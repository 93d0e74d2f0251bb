"""Writes files that are either whole or absent, and makes hard links and clones.

A file is written under a unique temporary name in the same folder, synced, and renamed; then its folder is synced. The
process that writes the temporary file holds an advisory lock on it, which ends with the process. By this lock,
`sweep_temporaries` distinguishes files of killed processes from files being written. The temporary name also identifies
the machine that writes the file, as some network filesystems do not show locks to other machines.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import filterfalse
from pathlib import Path
from typing import Any

from shardio.errors import FormatError
from shardio.system.opening import (
    FileAt,
    FolderHandle,
    OpenFile,
    at,
    kind_at,
    naming,
    open_file,
    open_folder,
    open_regular,
    open_untrusted,
)
from shardio.system.threads import DaemonThread

_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{8}-[0-9a-f]{16}\.tmp", re.DOTALL)
# A file that another machine is writing is silent for seconds, while a block of it is filled. A day is safe.
_ABANDONED_SECONDS = 86400.0
# Filesystems of some containers and of FUSE cannot sync folders.
_NO_SYNC = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Writes all of `data`; a single `os.write` may write less, without an error."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]


def fsync_folder(folder: Path | FolderHandle) -> None:
    """Makes the names in a folder durable, if the filesystem can sync folders, and this user may read the folder."""
    if isinstance(folder, FolderHandle):
        with naming(folder.path):
            _can(_NO_SYNC, os.fsync, folder.fileno())
        return
    with naming(folder), contextlib.suppress(PermissionError), contextlib.closing(open_folder(folder)) as opened:
        _can(_NO_SYNC, os.fsync, opened.fileno())


def fsync_file(path: Path | FileAt) -> None:
    """Makes the content of a file durable, whoever has written it. Raises OSError, which names the file."""
    with naming(path), open_regular(path)[0] as file:
        os.fsync(file.fileno())


@functools.cache
def _machine() -> str:
    return hashlib.sha256(os.fsencode(os.uname().nodename)).hexdigest()[:8]


def remove_folder(folder: Path) -> None:
    """Removes a folder and everything in it. Ignores errors: what cannot be removed stays.

    In a thread, because shutil.rmtree may close a descriptor twice when a signal handler interrupts it. If this call is
    interrupted twice, it does not wait for the thread.
    """
    remove = functools.partial(shutil.rmtree, folder, ignore_errors=True)
    remover = DaemonThread(remove, "shardio-remove")
    try:
        with contextlib.suppress(RuntimeError):  # the limit of threads
            remover.begin()
        remover.wait()
    finally:
        remover.wait()
        if remover.ident is None:  # it was not started, and never will be
            remove()


def make_folder(folder: Path) -> None:
    """Creates a folder and its missing parents, and makes their names durable.

    Syncs the parent of an existing folder too: the process that created it may have been killed before its sync.
    """
    try:
        folder.mkdir(exist_ok=True)
    except FileNotFoundError:
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
    except FileExistsError:
        what = f"expected a folder, or a free path for one, found {kind_at(folder)}"
        raise FileExistsError(errno.EEXIST, what, str(folder)) from None
    fsync_folder(folder.parent)


class AtomicFile:
    """A file that is written under a temporary name and appears as `path`, whole and durable, at `commit`.

    Leaving the `with` block without `commit` discards the file. `commit` replaces an existing `path`. Each OSError
    (ENOSPC, EIO, ...) passes through, with the file's path. If `path` is a FileAt, the file is written in the open
    folder, even if the folder is renamed. An AtomicFile that is dropped without `commit` or `discard` leaves its
    temporary file, as a killed process does. Not thread safe.
    """

    temporary: Path
    """The path under which the file is written. No other process uses it."""
    _file: OpenFile
    _is_temporary = False  # whether there may be a file with the temporary name

    def __init__(self, path: Path | FileAt) -> None:
        self.path = Path(str(path))
        self._folder = path.folder if isinstance(path, FileAt) else self.path.parent
        try:
            with naming(path):
                while not self._begin():
                    pass
        except BaseException:
            self.discard()
            raise

    def _begin(self) -> bool:
        """Creates the temporary file and locks it. Returns False if another process removed it before it was locked."""
        tag = f"{_machine()}-{secrets.token_hex(8)}"
        self.temporary = self.path.with_name(f".{self.path.name}.{tag}.tmp")
        self._is_temporary = True
        self._file = open_file(self._folder / self.temporary.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a filesystem without locks: then no process sweeps there either
            fcntl.flock(self.descriptor, fcntl.LOCK_EX)
        return bool(os.fstat(self.descriptor).st_nlink)

    @property
    def descriptor(self) -> int:
        """The temporary file's descriptor. Raises ValueError after `commit` or `discard`."""
        return self._file.fileno()

    def __enter__(self) -> AtomicFile:
        return self

    def commit(self, *, replace: bool = True) -> None:
        """Syncs the content, renames the file to `path`, and syncs the folder.

        Without `replace`, raises FileExistsError if `path` exists.
        """
        with naming(self.path):
            os.fsync(self.descriptor)
            (temporary, folder), (path, _) = at(self._folder / self.temporary.name), at(self._folder / self.path.name)
            if replace:
                os.rename(temporary, path, src_dir_fd=folder, dst_dir_fd=folder)
            else:
                # Unlike rename, this fails if the name is taken.
                os.link(temporary, path, src_dir_fd=folder, dst_dir_fd=folder)
                os.unlink(temporary, dir_fd=folder)
            self._is_temporary = False
            self._file.close()
            fsync_folder(self._folder)

    def discard(self) -> None:
        """Removes the temporary file, unless it was committed. May be called again, also after an interruption."""
        if self._is_temporary:
            # Errors here must not hide the error for which the file is discarded.
            with contextlib.suppress(OSError):
                (self._folder / self.temporary.name).unlink()
            self._is_temporary = False
            with contextlib.suppress(OSError, AttributeError):  # it may not have been opened
                self._file.close()

    def __exit__(self, *_: object) -> None:
        self.discard()


def write_atomic(path: Path | FileAt, *parts: bytes | memoryview, replace: bool = True) -> None:
    """Writes the joined `parts` as the whole content of `path`, durably, through an AtomicFile.

    Without `replace`, raises FileExistsError if `path` exists.
    """
    with AtomicFile(path) as file, naming(path):
        for part in parts:
            write_all(file.descriptor, part)
        file.commit(replace=replace)


def write_output(path: Path, data: bytes) -> None:
    """Writes `data` to the output file `path` that a user chose. The file appears whole.

    If `path` is a symbolic link, its target is replaced. A device or FIFO is written to directly. Raises ValueError if
    `path` is this process's own stdout or stderr, unless that is a device.
    """
    status = None
    with contextlib.suppress(FileNotFoundError):
        status = os.stat(path)
    if status is not None and not stat.S_ISCHR(status.st_mode):
        with contextlib.suppress(OSError):  # a closed stdout or stderr
            if any(os.path.samestat(status, os.fstat(descriptor)) for descriptor in (1, 2)):
                raise ValueError(
                    f"{path}: expected a file or FIFO, found the command's own stdout or stderr: choose another path"
                )
    if status is not None and not stat.S_ISREG(status.st_mode):
        with open_file(path, os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC) as opened, naming(path):
            write_all(opened.fileno(), data)
        return
    target = Path(os.path.realpath(path))
    with contextlib.suppress(OSError):  # no folder, or one that may not be read
        sweep_temporaries(target.parent, lambda name: target_of(name) != target.name)
    write_atomic(target, data)


def target_of(name: str) -> str:
    """Returns the file name that the temporary file `name` gets at `commit`; "" if no AtomicFile made `name`."""
    match = _TEMPORARY.fullmatch(name)
    return match[1] if match else ""


@contextlib.contextmanager
def alone_with(path: Path, *others: Path, only_looks: bool = False) -> Iterator[bool]:
    """Yields whether the temporary file `path` is abandoned: no process writes it. The block holds the file's lock.

    - A missing file is abandoned.
    - A file of this machine is abandoned if its lock is free; on a filesystem without locks, after a day or a reboot.
    - A file of another machine, whose lock may be invisible here, is abandoned a day after the last write to it and to
      `others`: paths that the same process writes to.

    With `only_looks`, the lock is shared, and permission to read is enough. Raises OSError if this user may not open
    the file, or FormatError if it is not a regular file.
    """
    locked: bool | None = True
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(FileNotFoundError):
            file = stack.enter_context(open_untrusted(path, os.O_RDONLY if only_looks else os.O_RDWR))
            with contextlib.suppress(OSError):
                locked = None  # the filesystem may have no locks
                locked = lock_at_once(file.fileno(), fcntl.LOCK_SH if only_looks else fcntl.LOCK_EX)
        written = max((each.stat().st_mtime for each in (path, *others) if os.path.lexists(each)), default=0.0)
        is_ours = path.name.split(".")[-2].partition("-")[0] == _machine()
        is_over = is_ours and (locked or written < _boot_time())
        yield locked is not False and (is_over or time.time() - written >= _ABANDONED_SECONDS)


def _boot_time() -> float:
    """Returns when this machine booted, as time.time(), minus a minute as clocks of servers differ; 0 if unknown."""
    if not hasattr(time, "CLOCK_BOOTTIME"):  # macOS
        return 0.0
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) - 60.0


def lock_at_once(descriptor: int, operation: int = fcntl.LOCK_EX) -> bool:
    """Locks an open file without waiting. Returns False if another process, or another open file, holds a lock on it.

    `operation` is LOCK_EX (exclusive) or LOCK_SH (shared). Raises OSError if the filesystem has no locks.
    """
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sweep_temporaries(folder: Path, is_kept: Callable[[str], bool] = lambda name: False) -> None:
    """Removes temporary files in `folder` that no living process is writing.

    Keeps files for whose names `is_kept` returns True. Keeps a file of another machine for a day after the last write:
    some network filesystems (BeeGFS, NFS with local_lock, Lustre with localflock) do not show locks to other machines.
    """
    for path in map(folder.joinpath, filterfalse(is_kept, _temporaries(folder))):
        # Another process has just published or removed the file, or it is another user's.
        with contextlib.suppress(OSError, FormatError), alone_with(path) as abandoned:
            if abandoned:
                path.unlink()


def remove_temporaries(folder: Path | FolderHandle) -> None:
    """Removes all temporary files in `folder`, even files being written, which then cannot be published."""
    for temporary in _temporaries(folder):
        with contextlib.suppress(OSError):
            (folder / temporary).unlink()


def _temporaries(folder: Path | FolderHandle) -> list[str]:
    with os.scandir(folder.fileno() if isinstance(folder, FolderHandle) else folder) as entries:
        return [entry.name for entry in entries if target_of(entry.name) and entry.is_file(follow_symlinks=False)]


def reserve(descriptor: int, nbytes: int) -> None:
    """Allocates the first `nbytes` of a file, if the filesystem can, so a full disk raises OSError now."""
    if hasattr(os, "posix_fallocate"):  # not on macOS
        _can((errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS), os.posix_fallocate, descriptor, 0, nbytes)


def _can(refusals: Sequence[int], call: Callable[..., object], *arguments: Any, **options: Any) -> bool:
    """Calls `call` and returns True. Returns False if it raises an OSError whose errno is in `refusals`."""
    try:
        call(*arguments, **options)
    except OSError as error:
        if error.errno in refusals:
            return False
        raise
    return True


# Linux: <linux/fs.h>.
_FICLONE = 0x40049409
# Another filesystem or mount; a filesystem without links, or with too many of this file; another user's file where
# fs.protected_hardlinks is set.
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
# Another filesystem, one without clones, or one that clones no file of this size.
_NO_CLONE = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOTTY)


def try_link(source: str | Path | FileAt, target: str | Path | FileAt) -> bool:
    """Makes `target` a hard link to `source`. Returns False if the system allows no such link."""
    (old, there), (new, here) = at(source), at(target)
    return _can(_NO_LINK, os.link, old, new, src_dir_fd=there, dst_dir_fd=here, follow_symlinks=False)


def try_clone(source: OpenFile, descriptor: int) -> bool:
    """Clones `source` into an open file: both share blocks. Returns False if the filesystem cannot clone the file."""
    return _can(_NO_CLONE, fcntl.ioctl, descriptor, _FICLONE, source.fileno())
