"""Files that are either whole or absent, and opening files that somebody else may have tampered with.

Writing: a unique temporary name in the same folder, fsync, rename, fsync of the folder. While it is written, the
temporary file is held under an advisory lock that dies with its process, so that `sweep_temporaries` can tell the
left-over of a killed process from the work of a living one. Its name says which machine writes it, as some cluster
filesystems keep locks to each machine.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import io
import os
import secrets
import stat
import time
from collections.abc import Iterator
from itertools import starmap
from pathlib import Path
from types import TracebackType

from shardio.errors import FormatError

_TEMPORARY_SUFFIX = ".tmp"
# A file that another machine is writing is silent for seconds, while a block of it is filled.
_ABANDONED_SECONDS = 3600.0


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Give an OSError from inside the block the file's name, which calls on descriptors do not know."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """`os.write` until every byte is written: one call may write less than asked without an error."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]


def fsync_folder(folder: Path) -> None:
    with naming(folder):
        # An int, which an exception from a signal handler may lose at once: `OpenFile` cannot be a folder.
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@functools.cache
def _machine() -> str:
    return hashlib.sha256(os.fsencode(os.uname().nodename)).hexdigest()[:8]


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, so that their names are durable. It may be there already.

    Then its name is synced all the same: who made it may have been killed before that.
    """
    try:
        folder.mkdir(exist_ok=True)
    except FileNotFoundError:
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
    with contextlib.suppress(PermissionError):  # a folder above that may be passed but not read
        fsync_folder(folder.parent)


class AtomicFile:
    """A file that is written under a temporary name and appears as `path`, whole and durable, at `commit`.

    Leaving the `with` block without `commit` discards it. An existing `path` is replaced. OSError (ENOSPC, EIO, ...)
    passes through, with the name of the file. Not thread safe.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = -1
        with naming(path):
            while True:
                tag = f"{_machine()}-{secrets.token_hex(8)}"
                self._temporary = path.with_name(f".{path.name}.{tag}{_TEMPORARY_SUFFIX}")
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                self.descriptor = os.open(self._temporary, flags, 0o666)
                try:
                    with contextlib.suppress(OSError):  # a filesystem without locks: then nobody sweeps there either
                        fcntl.flock(self.descriptor, fcntl.LOCK_EX)
                    if os.fstat(self.descriptor).st_nlink:
                        return
                except BaseException:
                    self.discard()
                    raise
                self._close()  # swept between its creation and its lock

    @property
    def temporary(self) -> Path:
        """The name under which it is written. It belongs to this process alone, as long as it is there."""
        return self._temporary

    def __enter__(self) -> AtomicFile:
        return self

    def commit(self, *, replace: bool = True) -> None:
        """Make the content durable, then the name. Without `replace`, FileExistsError if `path` exists already."""
        with naming(self.path):
            os.fsync(self.descriptor)
            if replace:
                self._temporary.rename(self.path)
            else:
                os.link(self._temporary, self.path)  # unlike rename, this fails if the name is taken
                self._temporary.unlink()
            self._close()
            fsync_folder(self.path.parent)

    def discard(self) -> None:
        """Remove the temporary file, if it was not committed. May be called again."""
        if self.descriptor >= 0:
            # Whatever fails here must not hide the error for which the file is discarded.
            with contextlib.suppress(OSError):
                self._temporary.unlink()
            with contextlib.suppress(OSError):
                self._close()

    def _close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        os.close(descriptor)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()


def write_atomic(path: Path, *parts: bytes | memoryview, replace: bool = True) -> None:
    """Publish `parts`, one after the other, as the whole content of `path`. `replace` is that of AtomicFile.commit."""
    with AtomicFile(path) as file, naming(path):
        for part in parts:
            write_all(file.descriptor, part)
        file.commit(replace=replace)


def is_temporary(name: str) -> bool:
    return name.startswith(".") and name.endswith(_TEMPORARY_SUFFIX)


def is_abandoned(name: str, written: float) -> bool:
    """Whether the temporary file `name` is of no use to anybody, if this process could lock it.

    `written` is when somebody wrote to it last, in seconds since the epoch. Another machine's lock need not be seen
    here: then time must tell.
    """
    machine, known, _ = name.split(".")[-2].rpartition("-")
    return not known or machine == _machine() or time.time() - written >= _ABANDONED_SECONDS


def sweep_temporaries(folder: Path) -> int:
    """Remove the temporary files in `folder` that no living process is writing; how many there were.

    BeeGFS, NFS with local_lock and Lustre with localflock do not show one machine's locks to another: a file of another
    machine is left alone for an hour after it was last written to, lock or none.
    """
    swept = 0
    for entry in _temporaries(folder):
        # Published or swept by somebody else in between, being written, not ours to touch, or no locks here.
        with contextlib.suppress(OSError):
            descriptor = os.open(entry.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not is_abandoned(entry.name, os.fstat(descriptor).st_mtime):
                    continue
                Path(entry.path).unlink()
                swept += 1
            finally:
                os.close(descriptor)
    return swept


def remove_temporaries(folder: Path) -> None:
    """Remove all temporary files in `folder`: whoever is still writing one cannot publish it any more."""
    for entry in _temporaries(folder):
        with contextlib.suppress(OSError):
            Path(entry.path).unlink()


def _temporaries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return [entry for entry in entries if is_temporary(entry.name) and entry.is_file(follow_symlinks=False)]


def reserve(descriptor: int, nbytes: int) -> None:
    """Allocate the first `nbytes` of a file, so that a full disk is an OSError now and not halfway through.

    Where the filesystem cannot allocate ahead this does nothing: the writes themselves will report a full disk.
    """
    if not hasattr(os, "posix_fallocate"):  # macOS
        return
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def bypass_page_cache(descriptor: int, yes: bool) -> bool:
    """Have an open file written and read past the page cache (O_DIRECT), or no longer; whether that is so now.

    Then memory, offsets and lengths must be those that the disk can take: multiples of 4096 do for nearly all.
    """
    if not hasattr(os, "O_DIRECT"):  # macOS
        return False
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if yes else flags)
    except OSError:  # a filesystem that cannot
        return False
    return yes


class OpenFile(io.FileIO):
    """A file that closes when nobody uses it any more: reference counting knows that, and needs no line of Python."""

    _finalizing = False  # FileIO, which would note that here, does not warn of it then


def open_file(path: str | Path, flags: int, mode: int = 0o666) -> OpenFile:
    """As `os.open`, but what comes owns the descriptor. Folders are refused: IsADirectoryError.

    Only C runs from the one to the other. An exception that a signal handler raises comes before or after that, and
    cannot lose the descriptor.
    """
    try:
        (file,) = map(OpenFile, starmap(os.open, ((path, flags, mode),)))
    except IsADirectoryError as error:
        if isinstance(error.filename, int):  # FileIO leaves it open
            os.close(error.filename)
        raise
    return file


def open_regular(path: str | Path) -> tuple[OpenFile, int]:
    """Open a file of a shard set for reading: (the file, its size in bytes). FormatError unless it is a regular file.

    No symbolic link in the last component, and no blocking on a FIFO. Size and type are read from the descriptor, so
    they are those of the very file that is then read or mapped.
    """
    try:
        file = open_file(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise FormatError(f"{path}: expected a file of the shard set, found nothing") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise FormatError(f"{path}: expected a regular file, found a symbolic link") from None
        if error.errno == errno.ENXIO:
            raise FormatError(f"{path}: expected a regular file, found a socket or device") from None
        if error.errno == errno.EISDIR:
            raise FormatError(
                f"{path}: expected a regular file, found {stat.filemode(os.lstat(path).st_mode)}"
            ) from None
        raise
    with naming(path):
        status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        file.close()
        raise FormatError(f"{path}: expected a regular file, found {stat.filemode(status.st_mode)}")
    return file, status.st_size
