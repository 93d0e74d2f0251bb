"""Opens files that another user may have replaced, and gives every descriptor an owner that closes it.

`OpenFiles` keeps only a few of many files open, as a process may open a limited number of files.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import resource
import secrets
import select
import stat
import sys
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from threading import get_ident
from typing import Any, Generic, TypeVar

from shardio.errors import FormatError, ShardioError, SourceError

_LIMITS = {
    errno.EFBIG: "raise the limit of a file's size (`ulimit -f`), or write to a filesystem with larger files",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`), or use fewer workers",
    errno.ENFILE: "raise the machine's limit of open files (`sysctl fs.file-max`)",
    errno.ENOMEM: "raise the limits of memory and processes (`ulimit -v`, `ulimit -u`), or use fewer workers",
}


def limit_hint(code: int | None, text: object = "") -> str:
    """Returns ": " and a remedy, to append to an error's message, if the errno `code` means that a limit of the system
    is reached. Returns "" otherwise, or if `text`, the error's message, already has the word "limit"."""
    return f": {_LIMITS[code]}" if code in _LIMITS and "limit" not in str(text) else ""


@contextlib.contextmanager
def naming(path: str | Path | FileAt) -> Iterator[None]:
    """Adds `path`, which calls on descriptors do not know, and a `limit_hint` to an OSError raised in the block."""
    try:
        yield
    except OSError as error:
        if hint := limit_hint(error.errno, error.strerror):
            error.strerror = f"{error.strerror}{hint}"
        if error.filename is None or (isinstance(error.filename, str) and os.sep not in error.filename):
            error.filename = str(path)
        raise


def owner_of(path: Path) -> str:
    """Returns the name of the user who owns `path`, for a message; "user 1234" if the system knows no name."""
    try:
        return path.owner()
    except KeyError:
        return f"user {path.stat().st_uid}"


@contextlib.contextmanager
def naming_owner(folder: Path, way_out: str) -> Iterator[None]:
    """Adds the folder's owner, its permissions and the remedy `way_out` to a PermissionError in the block about
    `folder`, a parent of it, or a path that begins like it. If `folder` does not exist, names its first existing
    parent."""
    try:
        yield
    except PermissionError as error:
        first, second = sorted((str(folder), str(error.filename)), key=len)
        if second.startswith(first):
            there = next(path for path in (Path(first), *Path(first).absolute().parents) if os.path.lexists(path))
            mode = stat.filemode(os.stat(there).st_mode)
            error.strerror = f"{error.strerror}: {there} belongs to {owner_of(there)} ({mode}): {way_out}"
        raise


if sys.platform == "linux":
    OpenFolder = select.epoll
else:
    OpenFolder = select.kqueue


def open_folder(folder: str | os.PathLike[str], flags: int = 0) -> OpenFolder:
    """Opens a folder, to sync or lock it. Returns an object that owns the descriptor. `flags`: more flags of os.open.

    The object is a `select.epoll` (or kqueue), as FileIO refuses folders. It closes the descriptor when it is freed;
    use only its `fileno` and `close`. An interrupt cannot leave the descriptor open: see `open_file`.
    """
    flags |= os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    (opened,) = map(OpenFolder.fromfd, starmap(os.open, ((folder, flags),)))
    return opened


class FolderHandle(contextlib.AbstractContextManager["FolderHandle"]):
    """An open folder. `handle / name` is a file in this very folder, wherever the folder's path leads later.

    Neither FolderHandle nor FileAt is os.PathLike, so a call that would look up the path again raises TypeError. The
    constructor raises OSError if `path` is not a folder or, without `follow`, is a symbolic link. With `follow`, the
    folder is opened for its files alone: it cannot be listed, and need not be readable.
    """

    def __init__(self, path: Path, *, follow: bool = False) -> None:
        self.path = path
        self._opened = open_folder(path, getattr(os, "O_PATH", 0) if follow else os.O_NOFOLLOW)

    def fileno(self) -> int:
        return self._opened.fileno()

    def is_in_place(self) -> bool:
        """Returns whether the folder's path still leads to this folder."""
        return is_same_file(self, self.path)

    def __truediv__(self, name: str) -> FileAt:
        return FileAt(self, name)

    def __str__(self) -> str:
        return str(self.path)

    def __exit__(self, *_: object) -> None:
        self._opened.close()


@dataclass(frozen=True)
class FileAt:
    """The file `name` in an open folder; the file need not exist. str() of a FileAt is the file's path, for messages.
    Its methods are like a Path's."""

    folder: FolderHandle
    name: str

    def __str__(self) -> str:
        return f"{self.folder}/{self.name}"

    def lstat(self) -> os.stat_result:
        return os.lstat(self.name, dir_fd=self.folder.fileno())

    def unlink(self) -> None:
        os.unlink(self.name, dir_fd=self.folder.fileno())


def at(path: str | os.PathLike[str] | FileAt) -> tuple[str | os.PathLike[str], int | None]:
    """Returns (path, dir_fd), which name the file `path` in calls to `os`. Except for a FileAt, dir_fd is None."""
    return (path.name, path.folder.fileno()) if isinstance(path, FileAt) else (path, None)


def is_same_file(file: OpenFile | FolderHandle, path: str | Path | FileAt) -> bool:
    """Returns whether `path` is a name of the open file or folder."""
    name, folder = at(path)
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(name, dir_fd=folder))
    return False


class OpenFile(io.FileIO):
    """A file that closes when its last reference is gone, without running a line of Python."""

    _finalizing = False  # FileIO would set this, and then warn


def open_file(path: str | os.PathLike[str] | FileAt, flags: int, mode: int = 0o666) -> OpenFile:
    """Opens a file like `os.open`, and returns an object that owns the descriptor.

    Raises IsADirectoryError for a folder. No line of Python runs between opening the descriptor and giving it to the
    object, so an exception from a signal handler cannot leave a descriptor open.
    """
    name, folder = at(path)
    opening = os.open if folder is None else functools.partial(os.open, dir_fd=folder)
    try:
        (file,) = map(OpenFile, starmap(opening, ((name, flags, mode),)))
    except OSError as error:
        if isinstance(error, IsADirectoryError) and isinstance(error.filename, int):  # FileIO leaves it open
            os.close(error.filename)
        if isinstance(path, FileAt):
            error.filename = str(path)
        raise
    return file


def open_nameless() -> OpenFile:
    """Returns a new nameless temporary file. No Python runs between the calls that make its name and remove it."""
    path = os.path.join(tempfile.gettempdir(), f"shardio-{secrets.token_hex(8)}")
    try:
        return open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    finally:
        try:  # noqa: SIM105 - `suppress` is written in Python, and may be interrupted before the name is removed
            os.unlink(path)
        except FileNotFoundError:  # it could not be made
            pass


def open_untrusted(
    path: str | Path | FileAt,
    flags: int = os.O_RDONLY,
    *,
    refusal: type[ShardioError] = FormatError,
    way_out: str = "",
    sole_name: bool = False,
) -> OpenFile:
    """Opens a regular file, by the `flags` of os.open, that another user may have replaced with anything. Never waits.

    Does not follow a symbolic link in the last component of `path`. Raises the exception `refusal`, whose message ends
    with `way_out`, unless the file is a regular file. With `sole_name`, needed for files that are written in place,
    raises `refusal` also for a file with a second hard link, which may be another user's file. OSError passes through.
    """

    def refuse(found: str) -> ShardioError:
        return refusal(f"{path}: expected a regular file, found {found}{way_out}")

    try:
        # O_NONBLOCK: a FIFO is opened at once, or not at all. It has no effect on a regular file.
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
            raise refuse("a file with a second name (a hard link)")
    except BaseException:
        file.close()
        raise
    return file


def check_unpacked(path: str | Path, nbytes: int) -> None:
    """Raises SourceError if `nbytes`, the unpacked size of the file `path`, is far more than the file's own size.

    The limit is 64 MiB or 100 times the file's size, whichever is larger. Text compresses to a hundredth at best, a
    bomb to less than a thousandth.
    """
    most = max(64 << 20, 100 * os.path.getsize(path))
    if nbytes > most:
        raise SourceError(
            f"{path}: expected at most {most:,} bytes once unpacked, found {nbytes:,} bytes; save it uncompressed"
        )


def kind_of(mode: int) -> str:
    """Returns the kind of a file with this `mode`, an st_mode, in words such as "a folder"."""
    kinds = {
        stat.S_IFREG: "a file",
        stat.S_IFDIR: "a folder",
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "a device")


def kind_at(path: Path) -> str:
    """Returns the kind of the file at `path` in words, such as "a folder". Does not follow a symbolic link."""
    return kind_of(path.lstat().st_mode) + (" that leads nowhere" if not path.exists() else "")


def open_regular(path: str | Path | FileAt) -> tuple[OpenFile, int]:
    """Opens a file of a shard set by `open_untrusted`. Returns it and its size, read from the descriptor.

    Raises FormatError if the file does not exist or is not a regular file.
    """
    try:
        file = open_untrusted(path)
    except FileNotFoundError:
        raise missing_file(path) from None
    with naming(path):
        return file, os.fstat(file.fileno()).st_size


def missing_file(path: object) -> FormatError:
    is_gone = "://" not in str(path) and not os.path.isdir(os.path.dirname(os.path.abspath(str(path))))
    found = "nothing: the whole folder is gone" if is_gone else "nothing"
    return FormatError(
        f"{path}: expected a file of the shard set, found {found}; copy the file again, or repair the set "
        "(`shardio repair`)"
    )


def read_untrusted(path: str | Path, *, refusal: type[ShardioError] = FormatError, way_out: str = "") -> bytes:
    """Returns all bytes of the file `path`, opened by `open_untrusted`."""
    with naming(path), open_untrusted(path, refusal=refusal, way_out=way_out) as file:
        return file.readall()


K = TypeVar("K")


class Living(Generic[K]):
    """Weak references to objects: `all` returns the added objects that still exist. Thread safe. A freed object is
    removed without running Python code, in which an exception of a signal handler would be lost."""

    def __init__(self) -> None:
        self._references: dict[weakref.ref[K], None] = {}

    def add(self, one: K) -> None:
        self._references[weakref.ref(one, self._references.pop)] = None

    def all(self) -> list[K]:
        """Returns the objects, in the order in which they were added."""
        return [one for reference in list(self._references) if (one := reference()) is not None]


_LIVE: Living[OpenFiles[Any]] = Living()
# The name of the file that each thread has asked for last. No keys, which may hold open folders.
_asked: dict[int | None, str] = {}


def last_asked(thread: int | None) -> str:
    """Returns the path or name that a thread, by its get_ident(), last requested from an OpenFiles; "" if none."""
    return _asked.get(thread, "")


class OpenFiles(Generic[K]):
    """Opens many files by `open_file`, each named by a key, and keeps the most recently used open. Thread safe.

    At most `most_open()` files, divided by the number of living OpenFiles, stay open; plus one for each thread.

    Two threads may open a file at the same time; one of the descriptors then closes at once. There is no lock, as
    `close` may run in a finalizer, in the middle of any other call. No operation may destroy a value while it works on
    the dictionary, as assignment and clear() do: closing a file lets other threads run.
    """

    def __init__(self, open_file: Callable[[K], OpenFile]) -> None:
        self._open_file = open_file
        self._open: OrderedDict[K, OpenFile] = OrderedDict()
        self._closed = False
        _LIVE.add(self)

    def get(self, key: K) -> OpenFile:
        """Returns the file of `key`. Opens it by `open_file(key)` if needed. Raises RuntimeError after `close`."""
        if self._closed:
            raise RuntimeError("this reader was closed: open the set again to read")
        _asked[get_ident()] = str(key[0] if isinstance(key, tuple) else key)
        file = self._open.get(key)
        if file is not None:
            with contextlib.suppress(KeyError):
                self._open.move_to_end(key)
            return file
        file = self._open.setdefault(key, self._open_file(key))
        # The sets of a mixture, and other loaders, share what the process may have open.
        self.forget_all(max(1, most_open() // len(_LIVE.all())))
        if self._closed:
            self.forget_all()
        return file

    def forget(self, key: K) -> None:
        """Drops the file of `key`, so the next `get` opens the file again."""
        self._open.pop(key, None)

    def forget_all(self, but: int = 0) -> None:
        """Drops all files except the `but` most recently used."""
        for _ in range(len(self._open) - but):
            with contextlib.suppress(KeyError):  # another thread did
                self._open.popitem(last=False)

    def close(self) -> None:
        """Closes the unused files, and makes `get` fail. A file in use closes when its last user drops it."""
        self._closed = True
        self.forget_all()


def most_open() -> int:
    """Returns how many files all OpenFiles may keep open: a quarter of the process's limit, from 4 to 1024."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1024 if soft < 0 else max(4, min(1024, soft // 4))
