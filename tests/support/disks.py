"""Disks that fail."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardio.system.opening import OpenFile

DISK_CALLS = (
    *("open", "write", "pwrite", "ftruncate", "posix_fallocate"),
    *("fsync", "fdatasync", "link", "rename"),
)
"""The functions of os that a disk may refuse, beside Path.rename, which does not look os.rename up in Python 3.10."""


class FailingDisk:
    """While installed, the `first`-th call to the disk raises `code`, and so does every later one if `for_good`.

    A failing write leaves half of its bytes in the file, as a disk that fills up does; a failing close, of a file that
    was opened to be written, closes. An error of a call on a path names the path, as in os, and one on a descriptor
    nothing. Nothing is really synced. Removing files goes on working, as it does on a full disk. Thread safe.
    """

    def __init__(self, first: int, code: int, *, for_good: bool) -> None:
        self.first = first
        self.code = code
        self.for_good = for_good
        self.num_calls = 0
        self.failed: list[str] = []
        self._lock = threading.Lock()

    def _fails(self, name: str) -> bool:
        with self._lock:
            self.num_calls += 1
            if self.num_calls == self.first or (self.for_good and self.num_calls > self.first):
                self.failed.append(name)
                return True
            return False

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if self._fails(name):
                if name == "write":
                    real(args[0], memoryview(args[1])[: len(args[1]) // 2])
                named = [os.fspath(args[0])] if isinstance(args[0], (str, Path)) else []
                raise OSError(self.code, os.strerror(self.code), *named)
            return None if name in ("fsync", "fdatasync") else real(*args, **options)

        return call

    def _close(self) -> Callable[[OpenFile], None]:
        def close(file: OpenFile) -> None:
            # Its mode does not tell: an OpenFile is made of any descriptor.
            is_written = not file.closed and fcntl.fcntl(file.fileno(), fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
            io.FileIO.close(file)
            if is_written and self._fails("close"):
                raise OSError(self.code, os.strerror(self.code))

        return close

    @contextlib.contextmanager
    def installed(self) -> Iterator[FailingDisk]:
        with pytest.MonkeyPatch.context() as patch:
            for name in DISK_CALLS:
                patch.setattr(os, name, self._wrap(name, getattr(os, name)))
            patch.setattr(OpenFile, "close", self._close())
            patch.setattr(Path, "rename", self._wrap("Path.rename", Path.rename))
            yield self

    def __repr__(self) -> str:
        return f"call {self.first} fails{' for good' if self.for_good else ''}: {self.failed}"


def failing(code: int) -> Callable[..., Any]:
    """Returns what fails as a call of os does: the error names the first argument if that is a path."""

    def call(*args: object, **options: object) -> Any:
        named = [os.fspath(args[0])] if args and isinstance(args[0], (str, Path)) else []
        raise OSError(code, os.strerror(code), *named)

    return call


def raising(error: BaseException | type[BaseException]) -> Callable[..., Any]:
    """Returns what raises this error, however it is called. An instance keeps the frames through which it went."""

    def call(*args: object, **options: object) -> Any:
        raise error

    return call


def every_failure(do: Callable[[FailingDisk], bool]) -> int:
    """Calls `do` with a disk that fails at its first call, its second, ... until one does not. Returns how many failed.

    `do` says whether the operation succeeded: it must have failed exactly if a call of it did.
    """
    failures = 0
    for code in (errno.ENOSPC, errno.EIO):
        for for_good in (False, True):
            first = 0
            while True:
                first += 1
                disk = FailingDisk(first, code, for_good=for_good)
                succeeded = do(disk)
                if not disk.failed:
                    assert succeeded, "the operation failed on a disk that works"
                    break
                failures += 1
                assert not succeeded, f"the failure went unnoticed: {disk}"
    return failures
