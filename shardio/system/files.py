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
import select
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import chain, starmap
from pathlib import Path
from types import TracebackType

from shardio.errors import FormatError, ShardioError

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
    with naming(folder), contextlib.closing(open_folder(folder)) as opened:
        os.fsync(opened.fileno())


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

    _file: OpenFile | None = None
    _is_temporary = False  # whether there may be a file of the temporary name

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with naming(path):
                while not self._begin():
                    pass
        except BaseException:
            self.discard()
            raise

    def _begin(self) -> bool:
        """Make the temporary file and lock it. False if it was swept between the two."""
        tag = f"{_machine()}-{secrets.token_hex(8)}"
        self._temporary = self.path.with_name(f".{self.path.name}.{tag}{_TEMPORARY_SUFFIX}")
        self._is_temporary = True
        self._file = open_file(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a filesystem without locks: then nobody sweeps there either
            fcntl.flock(self.descriptor, fcntl.LOCK_EX)
        return bool(os.fstat(self.descriptor).st_nlink)

    @property
    def descriptor(self) -> int:
        """Of the temporary file. ValueError once that is committed, left or discarded."""
        if self._file is None:
            raise ValueError(f"{self.path}: expected an open temporary file, found none")
        return self._file.fileno()

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
            self.leave()
            fsync_folder(self.path.parent)

    @classmethod
    def take_over(cls, path: Path, temporary: Path) -> AtomicFile | None:
        """Go on with the temporary file that a process on this machine has left. None if it is not there, or in use.

        The file of another machine is not taken, nor one without a lock: two would write to one file.
        """
        found = _open_left_over(temporary) if is_of_this_machine(temporary.name) else None
        if found is None:
            return None
        left, locked = found
        if not locked or os.fstat(left.fileno()).st_nlink > 1:  # under its other name it may be another user's own
            left.close()
            return None
        file = cls.__new__(cls)
        file.path, file._temporary, file._file, file._is_temporary = path, temporary, left, True
        return file

    def leave(self) -> None:
        """Close the temporary file, if it was not committed, and let it lie for `take_over`. May be called again."""
        self._is_temporary = False
        if self._file is not None:
            self._file.close()

    def discard(self) -> None:
        """Remove the temporary file, if it was not committed. May be called again, also where it was interrupted."""
        if self._is_temporary:
            # Whatever fails here must not hide the error for which the file is discarded.
            with contextlib.suppress(OSError):
                self._temporary.unlink()
            with contextlib.suppress(OSError):
                self.leave()

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


def _machine_of(name: str) -> str:
    """Which machine writes the temporary file of this name; "" if it does not say."""
    return name.split(".")[-2].rpartition("-")[0]


def is_of_this_machine(name: str) -> bool:
    """Whether the temporary file `name` is written, or was, by a process on this machine."""
    return _machine_of(name) == _machine()


def is_abandoned(name: str, written: float, *, locked: bool = True) -> bool:
    """Whether the temporary file `name` is of no use to any process, if this one could lock it.

    `written` is when it was written to last, in seconds since the epoch. Another machine's lock need not be seen here:
    then time must tell; so it must if not `locked`, since the filesystem has no locks.
    """
    if time.time() - written >= _ABANDONED_SECONDS:
        return True
    return _machine_of(name) in ("", _machine()) and (locked or written < _boot_time())


def _boot_time() -> float:
    """Before it no process of this machine has begun. A minute is left for the clocks of file servers."""
    if not hasattr(time, "CLOCK_BOOTTIME"):  # macOS
        return 0.0
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) - 60.0


def try_lock(descriptor: int, operation: int = fcntl.LOCK_EX) -> bool | None:
    """Lock an open file without waiting: whether it is locked now; None if the filesystem has no locks."""
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _open_left_over(path: Path) -> tuple[OpenFile, bool] | None:
    """Open a temporary file that no process is writing: it, and whether it is locked, as it is wherever there are
    locks. None if there is none such."""
    # Published or swept by another process in between, being written, or not ours to touch.
    try:
        file = open_untrusted(path, os.O_RDWR)
    except (OSError, FormatError):
        return None
    try:
        locked = try_lock(file.fileno())
        status = os.fstat(file.fileno())
        if (
            locked is not False
            and is_abandoned(path.name, status.st_mtime, locked=bool(locked))
            # The writer may have published the file, under its other name, before it was locked here.
            and os.path.samestat(status, os.lstat(path))
        ):
            return file, bool(locked)
    except OSError:
        pass
    except BaseException:
        file.close()
        raise
    file.close()
    return None


def is_left_over(path: Path) -> bool | None:
    """Whether a process of this machine has left the temporary file `path`, and none is writing it. None if no lock
    tells: it is another machine's, or the filesystem has none."""
    if not is_of_this_machine(path.name):
        return None
    try:
        with open_untrusted(path) as file:
            return try_lock(file.fileno(), fcntl.LOCK_SH)  # shared, so that others who look find it left, too
    except (OSError, FormatError):
        return False


def sweep_temporaries(folder: Path, is_kept: Callable[[str], bool] = lambda name: False) -> int:
    """Remove the temporary files in `folder` that no living process is writing; how many there were.

    Those stay for whose names `is_kept` says so. BeeGFS, NFS with local_lock and Lustre with localflock do not show one
    machine's locks to another: a file of another machine is left alone for an hour after it was last written to, lock
    or none.
    """
    swept = 0
    for entry in _temporaries(folder):
        if not is_kept(entry.name) and (found := _open_left_over(Path(entry.path))) is not None:
            with contextlib.suppress(OSError):
                # Once more, under the lock: its process may have decided to keep it just before it left it.
                if not is_kept(entry.name):
                    Path(entry.path).unlink()
                    swept += 1
            found[0].close()
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


if sys.platform == "linux":
    OpenFolder = select.epoll
else:
    OpenFolder = select.kqueue


def open_folder(folder: str | os.PathLike[str], flags: int = 0) -> OpenFolder:
    """Open a folder, to sync or to lock it. What comes owns the descriptor, as that of `open_file` does.

    FileIO refuses folders. Of the objects in C that close a descriptor, this kind takes any, and does nothing else to
    it.
    """
    flags |= os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    (opened,) = map(OpenFolder.fromfd, starmap(os.open, ((folder, flags),)))
    return opened


class OpenFile(io.FileIO):
    """A file that closes when its last reference is gone, without a line of Python being run."""

    _finalizing = False  # FileIO, which would note that here, does not warn of it then


def open_file(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> OpenFile:
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


def open_pipe() -> tuple[OpenFile, OpenFile]:
    """As `os.pipe`, but what comes owns the descriptors, as that of `open_file` does."""
    reader, writer = map(OpenFile, chain.from_iterable(starmap(os.pipe, ((),))))
    return reader, writer


def open_nameless() -> OpenFile:
    """Open a new file that is gone when it is closed, on the disk for temporary files. As `open_file`, and no name of
    it stays either: between the calls that make and remove that, nothing in Python runs."""
    path = os.path.join(tempfile.gettempdir(), f"shardio-{secrets.token_hex(8)}")
    try:
        return open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    finally:
        try:  # noqa: SIM105 - `suppress` is written in Python, and may be interrupted before the name is removed
            os.unlink(path)
        except FileNotFoundError:  # it could not be made
            pass


def open_untrusted(
    path: str | Path,
    flags: int = os.O_RDONLY,
    *,
    refusal: type[ShardioError] = FormatError,
    way_out: str = "",
    sole_name: bool = False,
) -> OpenFile:
    """Open a file in whose place another user may have put anything.

    Nothing is waited for, and no symbolic link in the last component is followed. Raises `refusal`, whose message ends
    with `way_out`, unless a regular file is there; with `sole_name`, which a file that is written in place needs, also
    if it has a second name (a hard link), under which it may be somebody's own. OSError passes through.
    """

    def refuse(found: str) -> ShardioError:
        return refusal(f"{path}: expected a regular file, found {found}{way_out}")

    try:
        # O_NONBLOCK: a FIFO is opened at once, or not at all. For a regular file it means nothing.
        file = open_file(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        found = {
            errno.ELOOP: "a symbolic link",
            errno.ENXIO: "a FIFO, socket or device",
            errno.EOPNOTSUPP: "a socket",  # on macOS
            errno.EISDIR: "a folder",
        }.get(error.errno or 0)
        if found is None:
            raise
        raise refuse(found) from None
    try:
        with naming(path):
            status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise refuse(kind_of(status.st_mode))
        if sole_name and status.st_nlink > 1:
            raise refuse("one that has a second name (a hard link)")
    except BaseException:
        file.close()
        raise
    return file


def kind_of(mode: int) -> str:
    """What a file is, by its mode, for people to read."""
    kinds = {
        stat.S_IFREG: "a file",
        stat.S_IFDIR: "a folder",
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "a device")


def open_regular(path: str | Path) -> tuple[OpenFile, int]:
    """Open a file of a shard set for reading, as `open_untrusted`: (the file, its size in bytes). FormatError if there
    is none.

    Size and type are read from the descriptor, so they are those of the very file that is then read or mapped.
    """
    try:
        file = open_untrusted(path)
    except FileNotFoundError:
        raise FormatError(f"{path}: expected a file of the shard set, found nothing") from None
    with naming(path):
        return file, os.fstat(file.fileno()).st_size


def read_untrusted(path: str | Path, *, refusal: type[ShardioError] = FormatError, way_out: str = "") -> bytes:
    """All of a file that `open_untrusted` opens."""
    with naming(path), open_untrusted(path, refusal=refusal, way_out=way_out) as file:
        return file.readall()
