"""Bytes on their way from one file into another: read, retried, hashed, written in pieces, and synced meanwhile."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from shardio.system.files import write_all
from shardio.system.opening import FileAt, naming
from shardio.system.threads import Call, DaemonThread, ThreadPool

# Long enough for the streaming rate of disks and servers, short enough to stop soon.
PIECE_NBYTES = 8 << 20
# What is only hashed comes in pieces that the processor's caches keep: that takes a fifth less time.
HASHED_NBYTES = 1 << 20
# The kernel is told to write after so much of a file: what the final fsync has to wait for stays small.
SYNC_NBYTES = 128 << 20


def pour(
    read: Callable[[int, memoryview], int | None],
    nbytes: int,
    write: Callable[[memoryview], object] | None = None,
    progress: Callable[[int], object] | None = None,
) -> str:
    """Reads `nbytes` bytes piece by piece, and has each piece written. Returns the sha256 (hex) of all that came.

    `read(offset, buffer)` fills the buffer from its beginning, and returns how many bytes came; none if the file ends.
    `progress` is called with the size of each piece.

    The pieces of a long file that is written are hashed in a thread, while they are written and the next ones are read,
    so that one file keeps two cores busy. The GIL is free meanwhile.
    """
    sha256 = hashlib.sha256()
    size = min(PIECE_NBYTES if write else HASHED_NBYTES, nbytes)
    apart = write is not None and nbytes > size
    here = there = memoryview(bytearray(size))
    if apart:
        there = memoryview(bytearray(size))
    # A finaliser must recognise by the name in whose service the thread is.
    name = f"{threading.current_thread().name}-hash"
    hashing: DaemonThread | None = None
    done = 0
    try:
        while done < nbytes and (count := read(done, here[: nbytes - done])):
            piece = here[:count]
            if hashing is not None:  # of the piece before; then its buffer is free for the next one
                hashing.result()
            if apart:
                hashing = DaemonThread(partial(sha256.update, piece), name)
                hashing.begin()
            else:
                sha256.update(piece)
            if write is not None:
                write(piece)
            if progress is not None:
                progress(count)
            done += count
            here, there = there, here
    finally:
        if hashing is not None:
            hashing.wait()
    return sha256.hexdigest()


class BackgroundSync:
    """Brings what was written to a file to the disk in a thread, one sync at a time, so that little is left for the
    last one. To be used by one thread at a time; `close` ends the sync under way, and may be called again."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPool(1, name)
        self._call: Call[object] | None = None
        self._unsynced_nbytes = 0

    def wrote(self, nbytes: int, sync: Callable[[], object], *, now: bool = False) -> None:
        """Begins `sync` if SYNC_NBYTES were written since the last one, or `now`; not while one is under way.

        Raises what the last one raised.
        """
        self._unsynced_nbytes += nbytes
        if (now or self._unsynced_nbytes >= SYNC_NBYTES) and (self._call is None or self._call.is_over):
            self.finish()
            self._call = self._pool.submit(sync)
            self._unsynced_nbytes = 0

    def finish(self) -> None:
        """Waits for the sync under way, and raises what it raised."""
        if self._call is not None:
            self._call.result()
            self._call = None

    def close(self) -> None:
        self._pool.close()


@contextlib.contextmanager
def synced_writes(path: Path | FileAt, descriptor: int) -> Iterator[Callable[[memoryview], None]]:
    """Gives a function that writes to a file one piece after the other, and has them brought to the disk on the way.

    At the end of the `with` block no sync is under way. OSError names the file, also if it was an earlier piece that
    failed.
    """
    sync = BackgroundSync(f"{threading.current_thread().name}-sync")

    def write(piece: memoryview) -> None:
        with naming(path):
            write_all(descriptor, piece)
            sync.wrote(len(piece), partial(os.fdatasync, descriptor))

    try:
        yield write
        with naming(path):
            sync.finish()
    finally:
        sync.close()


# The waits before what storage did not give is asked for again: a server that restarts, a path that fails over come
# back.
RETRY_SECONDS = (0.05, 0.2, 0.8)
# Errors that pass, or may: a server that restarts, a path that fails over, a signal.
TRANSIENT = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EINTR, errno.EAGAIN})


class Attempts:
    """The attempts at one request: counts those that failed, and waits before each further one."""

    def __init__(self, pauses: Iterable[float] | None = None, sleep: Callable[[float], object] | None = None) -> None:
        self.failed = 0
        self._pauses = iter(RETRY_SECONDS if pauses is None else pauses)
        self._sleep = sleep or time.sleep

    def again(self, may_pass: bool = True) -> bool:
        """Counts a failure and waits before the next attempt. Returns False, at once, if there is to be none: what
        failed does not pass, or was tried often enough."""
        self.failed += 1
        if not may_pass or (pause := next(self._pauses, None)) is None:
            return False
        self._sleep(pause)
        return True


def reading_failed(error: OSError, path: str | Path, what: str, offset: int, attempts: int, hint: str = "") -> OSError:
    """Returns the error to raise when storage does not give `what`, a label or a sample, after so many attempts."""
    hint = hint or "look into the kernel's log (dmesg) for the disk or server; `shardio verify` tells what else is lost"
    text = f"{error.strerror}: reading {what} at byte {offset} failed (attempts: {attempts}); {hint}"
    return OSError(error.errno, text, str(path))
