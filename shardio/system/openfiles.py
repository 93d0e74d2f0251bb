"""Keeps a few of many files open: those used last.

A process may open only so many files, and a set may have more. On network filesystems opening costs a request or two.
"""

from __future__ import annotations

import contextlib
import resource
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from shardio.system.opening import OpenFile

K = TypeVar("K")


class OpenFiles(Generic[K]):
    """At most `most` files, or one more for each thread at work here, which `open_file` opens. Thread safe.

    Two threads may open a file at the same time; one of the descriptors then closes at once. A lock would be worse:
    `close` may run in a finaliser, in the middle of any other call. No operation may destroy a value while it is at
    work, as assignment and clear() do: closing a file lets other threads run, who would find the dictionary torn.
    """

    def __init__(self, open_file: Callable[[K], OpenFile], most: int) -> None:
        self.most = most
        self._open_file = open_file
        self._open: OrderedDict[K, OpenFile] = OrderedDict()
        self._closed = False

    def get(self, key: K) -> OpenFile:
        """Returns the file, and opens it if it is not open. Errors are those of `open_file`."""
        if self._closed:
            raise RuntimeError("the reader was closed")
        file = self._open.get(key)
        if file is not None:
            with contextlib.suppress(KeyError):
                self._open.move_to_end(key)
            return file
        file = self._open.setdefault(key, self._open_file(key))
        if len(self._open) > self.most:  # by one, or by as many as there are threads here
            self._forget_oldest()
        if self._closed:
            self.forget_all()
        return file

    def _forget_oldest(self) -> None:
        with contextlib.suppress(KeyError):  # another thread did
            self._open.popitem(last=False)

    def forget(self, key: K) -> None:
        """Has the file opened anew next time."""
        self._open.pop(key, None)

    def forget_all(self) -> None:
        for _ in range(len(self._open)):
            self._forget_oldest()

    def close(self) -> None:
        """Gives no more files. Those in use close when they no longer are."""
        self._closed = True
        self.forget_all()


def most_open() -> int:
    """Returns a part of the number of files that this process may open, as it opens others, too."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1024 if soft < 0 else max(4, min(1024, soft // 4))
