"""Daemon threads whose start and end survive an exception that a signal handler raises, at any moment.

`threading.Thread` does not: after a `start` that was interrupted it may run and refuse to be joined, and after a `join`
that was interrupted Python 3.11 takes it for ended, whatever it does.
"""

from __future__ import annotations

import _thread
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Protocol


class DaemonThread(threading.Thread):
    """A call in a thread of its own, from `begin` on. The interpreter does not wait for it before finalisers run, which
    may tell it to stop.

    Keep a reference to it before `begin`. `begin` and `wait` may be interrupted; then `wait` may be called again.
    """

    def __init__(self, call: Callable[[], object], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._call = call
        self._error: BaseException | None = None
        self._is_over = False
        # Whether the thread ever starts. The first who asks decides, and may ask again: `setdefault` is one step.
        self._decision: dict[None, bool] = {}
        self._pid = os.getpid()
        self._started_signal: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._over_signal: queue.SimpleQueue[None] = queue.SimpleQueue()

    def begin(self) -> None:
        """Start. RuntimeError if there can be no more threads."""
        # Signal handlers run in the main thread only: a start in another thread cannot be interrupted.
        _thread.start_new_thread(self._start_here, ())
        self._started_signal.get()
        if self._error is not None and self.ident is None:
            raise self._error

    def _start_here(self) -> None:
        if self._decision.setdefault(None, True):
            try:
                self.start()
            except BaseException as error:
                self._end(error)
        self._started_signal.put(None)

    def run(self) -> None:
        error = None
        try:
            self._call()
        except BaseException as raised:
            error = raised
        del self._call  # and what it refers to
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self._error = error
        self._is_over = True
        self._over_signal.put(None)

    def wait(self) -> None:
        """Wait for the end of the call. A thread that has not started by now never does; a fork takes none along."""
        if not self._decision.setdefault(None, False) or self is threading.current_thread() or self._pid != os.getpid():
            return
        if not self._is_over:  # the flag, because an interrupted wait may have taken the signal with it
            self._over_signal.get()
        self._over_signal.put(None)  # for another thread that waits, also if a wait was interrupted before this
        if self.ident is not None:
            self.join()

    def result(self) -> None:
        """Wait for the end of the call, and raise what it has raised."""
        self.wait()
        if self._error is not None:
            raise self._error


class Closable(Protocol):
    def close(self) -> None: ...


def close_at_exit(owner: Closable) -> None:
    """Have `owner.close()` called when the interpreter exits, if the owner is still there."""
    weakref.finalize(owner, _close, weakref.ref(owner))


def _close(owner: weakref.ref[Closable]) -> None:
    if (alive := owner()) is not None:
        alive.close()
