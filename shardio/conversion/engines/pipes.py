"""Ties a worker process to the one that started it: word of its progress goes out, and the order to stop comes in.

This module imports nothing heavy, so that a worker watches its parent before it spends seconds importing torch.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import struct
import threading
from multiprocessing.connection import Connection

# (sources done, of these refused, of these kept): far below PIPE_BUF, so that writes of many processes to one pipe
# never mix.
PROGRESS = struct.Struct("<III")
# A worker told to stop looks up after each picture; one that is deep in an fsync is ended after this time.
_GRACE_SECONDS = 0.7


class Lifeline:
    """The worker's end. `alive` is a pipe on which nothing is ever sent and whose other end only the parent holds."""

    def __init__(self, progress: Connection, alive: Connection, threads: int) -> None:
        self.threads = threads
        self._progress = progress
        self._stop = threading.Event()
        threading.Thread(target=self._watch, args=(alive,), name="shardio-watch", daemon=True).start()

    def _watch(self, alive: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            alive.recv_bytes()  # returns when the parent closes its end, or is gone
        self._stop.set()
        threading.Event().wait(_GRACE_SECONDS)
        os._exit(1)

    def stopped(self) -> bool:
        return self._stop.is_set()

    def report(self, done: int, refused: int, kept: int = 0, /) -> None:
        try:
            send_progress(self._progress, done, refused, kept)
        except OSError:  # the parent reads no more
            self._stop.set()


def send_progress(pipe: Connection, done: int, refused: int, kept: int) -> None:
    os.write(pipe.fileno(), PROGRESS.pack(done, refused, kept))


def receive_progress(pipe: Connection) -> tuple[int, int, int]:
    """Waits for word from any worker, and returns the sum of what has come."""
    done = refused = kept = 0
    for message in PROGRESS.iter_unpack(os.read(pipe.fileno(), 8192 * PROGRESS.size)):
        done += message[0]
        refused += message[1]
        kept += message[2]
    return done, refused, kept


_lifeline: Lifeline | None = None


def tie(progress: Connection, alive: Connection, threads: int) -> None:
    """Initializes a worker process."""
    # At its end nothing is left to do but taking torch apart, for which the parent would wait.
    atexit.register(os._exit, 0)
    global _lifeline
    _lifeline = Lifeline(progress, alive, threads)


def lifeline() -> Lifeline:
    assert _lifeline is not None, "not in a worker process"
    return _lifeline
