"""Copies bytes between files in pieces, hashes and syncs them meanwhile, and counts the retries of reads.

Also prepares files and memory for O_DIRECT, which bypasses the page cache.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.system.files import write_all
from shardio.system.opening import FileAt, naming, open_regular
from shardio.system.threads import DaemonThread

# Long enough for the streaming rate of disks and servers, short enough to stop soon.
PIECE_NBYTES = 8 << 20
# Pieces that are only hashed fit into the processor's caches, which takes a fifth less time.
HASHED_NBYTES = 1 << 20
# How much is written between two syncs: little is left for the final fsync.
SYNC_NBYTES = 128 << 20


def pour(
    read: Callable[[int, memoryview], int | None],
    nbytes: int,
    write: Callable[[memoryview], object] | None = None,
    progress: Callable[[int], object] | None = None,
) -> str:
    """Reads `nbytes` bytes in pieces, and calls `write` with each piece. Returns the sha256 (hex) of all bytes read.

    `read(offset, buffer)` fills the buffer from its beginning. It returns the number of bytes read, None if the buffer
    is full, or 0 at the end of the file. `progress` is called with the size of each piece, in bytes.

    When a long file is written, a thread hashes each piece while the piece is written and the next piece is read.
    """
    sha256 = hashlib.sha256()
    size = min(PIECE_NBYTES if write else HASHED_NBYTES, nbytes)
    apart = write is not None and nbytes > size
    here = memoryview(bytearray(size))
    there = memoryview(bytearray(size)) if apart else here
    # A finalizer must see in the name which thread this one works for.
    name = f"{threading.current_thread().name}-hash"
    hashing: DaemonThread | None = None
    done = 0
    try:
        while done < nbytes and (count := read(done, here[: nbytes - done])) != 0:
            piece = here[: nbytes - done][:count]
            if hashing is not None:  # the previous piece; then its buffer is free
                hashing.result()
            if apart:
                hashing = DaemonThread(partial(sha256.update, piece), name)
                hashing.begin()
            else:
                sha256.update(piece)
            if write is not None:
                write(piece)
            if progress is not None:
                progress(len(piece))
            done += len(piece)
            here, there = there, here
    finally:
        if hashing is not None:
            hashing.wait()
    return sha256.hexdigest()


class BackgroundSync:
    """Syncs a file in a thread called `name` while it is written, one sync at a time, so little is left for the end.

    To be used by one thread at a time. `close` waits for the running sync, and may be called again.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._syncing: DaemonThread | None = None
        self._unsynced_nbytes = 0

    def wrote(self, nbytes: int, sync: Callable[[], object]) -> None:
        """Counts `nbytes` written bytes. Calls `sync` in a thread once SYNC_NBYTES written bytes are not synced yet.

        Does not call `sync` while another sync is running. Before a call, raises the previous sync's error, if any.
        """
        self._unsynced_nbytes += nbytes
        if self._unsynced_nbytes >= SYNC_NBYTES and (self._syncing is None or self._syncing.is_over):
            self.finish()
            self._syncing = DaemonThread(sync, self._name)
            self._syncing.begin()
            self._unsynced_nbytes = 0

    def finish(self) -> None:
        """Waits for the running sync. Raises the error of the last sync, if it failed."""
        if self._syncing is not None:
            self._syncing.result()
            self._syncing = None

    def close(self) -> None:
        if self._syncing is not None:
            self._syncing.wait()


@contextlib.contextmanager
def synced_writes(path: Path | FileAt, descriptor: int) -> Iterator[Callable[[memoryview], None]]:
    """Yields a function that writes bytes to `descriptor`, the open file `path`. A thread syncs the file now and then.

    When the `with` block ends, no sync is running. Each OSError names the file, including errors of a sync.
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


# The waits before a failed read is tried again: a server that restarts comes back, and so does a path that fails over.
RETRY_SECONDS = (0.05, 0.2, 0.8)
# Errors that pass, or may: a server that restarts, a path that fails over, a signal.
TRANSIENT = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EINTR, errno.EAGAIN})


class Attempts:
    """Counts the failed attempts at a request, and waits before each further attempt."""

    failed = 0

    def again(self, may_pass: bool = True) -> bool:
        """Counts a failure, and waits before the next attempt. Returns whether to make another attempt.

        Returns False at once if this was the last attempt, or if `may_pass` is false: the failure is permanent.
        """
        self.failed += 1
        if not may_pass or self.failed > len(RETRY_SECONDS):
            return False
        time.sleep(RETRY_SECONDS[self.failed - 1])
        return True


def reading_failed(error: OSError, path: str | Path, what: str, offset: int, attempts: int, hint: str = "") -> OSError:
    """Returns an OSError to raise, after `attempts` failed attempts, about a read of the file `path`. `error` is the
    error of the last attempt. `what` names in words what was read from byte `offset` on, such as "sample 5". `hint` is
    the remedy in the message; "" means the usual remedy."""
    hint = hint or "look into the kernel's log (dmesg) for the disk or server; `shardio verify` lists all damage"
    text = f"{error.strerror}: reading {what} at byte {offset} failed (attempts: {attempts}); {hint}"
    return OSError(error.errno, text, str(path))


# --- past the page cache ----------------------------------------------------------------------------------------------

# A page: the largest alignment that O_DIRECT demands of memory, offsets and lengths.
ALIGNMENT = 4096


def aligned_empty(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Returns new zeros of this shape, uint8, aligned to ALIGNMENT bytes, unlike np.empty. The system gets the memory
    back once the last array over it is freed; malloc would keep much of it when one loader after another is made."""
    nbytes = int(np.prod(shape, dtype=np.int64))
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages, or macOS
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8, nbytes).reshape(shape)


def set_direct(descriptor: int, on: bool = True) -> None:
    """Makes an open file bypass the page cache (O_DIRECT) or, if `on` is false, use the page cache again.

    While it is bypassed, memory, offsets and lengths must be multiples of the disk's alignment. Raises OSError (EINVAL)
    if the filesystem or the system does not support O_DIRECT.
    """
    if hasattr(os, "O_DIRECT"):
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags)
    elif on:  # macOS
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def direct_alignment(path: str | Path) -> int | None:
    """Returns the alignment in bytes that O_DIRECT needs for this file; None if O_DIRECT cannot read the file.

    Reads the file to find out, as some systems do not report it.
    """
    try:
        file, _ = open_regular(path)
    except (OSError, FormatError):
        return None
    with contextlib.suppress(OSError), file:
        set_direct(file.fileno())
        memory = aligned_empty((2 * ALIGNMENT,))
        for alignment in (512, ALIGNMENT):  # the sector size of most disks, and a page or larger sector
            with contextlib.suppress(OSError):
                if os.preadv(file.fileno(), [memory[alignment : 2 * alignment].data], alignment):
                    return alignment
    return None
