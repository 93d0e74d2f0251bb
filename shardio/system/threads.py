"""Daemon threads, pools of them, and calls in one, that survive an exception of a signal handler, at any moment.

`threading.Thread` does not: after a `start` that was interrupted it may run and refuse to be joined, and after a `join`
that was interrupted Python 3.11 takes it for ended, whatever it does. `concurrent.futures` has locks that an
interrupted call leaves locked: then its threads wait for ever, and so does the end of the pool.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Call(Generic[T]):
    """A call that one thread makes, and for whose end other threads may wait."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._result: T
        self.error: BaseException | None = None
        """The error that the call has raised, if it has."""
        self.is_over = False
        self._over_signal: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run(self) -> None:
        """Makes the call, and keeps what it raises."""
        try:
            try:
                self._result = self._call()
            finally:
                del self._call  # and what it refers to
        except BaseException as error:
            self.fail(error)
            del self  # or the error, whose traceback has this frame, would be part of a cycle
        else:
            self._end()

    def fail(self, error: BaseException) -> None:
        """Ends the call as if it had raised this."""
        self.error = error
        self._end()

    def _end(self) -> None:
        self.is_over = True
        self._over_signal.put(None)

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Waits for the end of the call. May be called again if interrupted. Raises `queue.Empty` if time is over."""
        if not self.is_over:  # the flag, because an interrupted wait may have taken the signal with it
            self._over_signal.get(timeout=timeout_seconds)
        self._over_signal.put(None)  # for another thread that waits, also if a wait was interrupted before this

    def result(self) -> T:
        """Waits for the end of the call. Returns what it has returned, and raises what it has raised."""
        self.wait()
        try:
            if self.error is not None:
                raise self.error
            return self._result
        finally:
            del self  # as in `run`


class DaemonThread(threading.Thread):
    """A call in a thread of its own, from `begin` on. The interpreter does not wait for it before finalisers run, which
    may tell it to stop.

    Keep a reference to it before `begin`. `begin` and `wait` may be interrupted; then `wait` may be called again.
    """

    def __init__(self, call: Callable[[], object], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._call = Call(call)
        # Whether the thread ever starts. The first who asks decides, and may ask again: `setdefault` is one step.
        self._decision: dict[None, bool] = {}
        self._pid = os.getpid()
        self._started_signal: queue.SimpleQueue[None] = queue.SimpleQueue()

    def begin(self) -> None:
        """Starts. Raises RuntimeError if there can be no more threads."""
        # Signal handlers run in the main thread only: a start in another thread cannot be interrupted.
        _thread.start_new_thread(self._start_here, ())
        self._started_signal.get()
        if self._call.error is not None and self.ident is None:
            raise self._call.error

    def _start_here(self) -> None:
        if self._decision.setdefault(None, True):
            try:
                self.start()
            except BaseException as error:
                self._call.fail(error)
        self._started_signal.put(None)

    def run(self) -> None:
        self._call.run()

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Waits for the end of the call, as `Call.wait` does. A thread that has not started by now never does; a fork
        takes none along, and none goes on when the interpreter is finalising."""
        if not self._decision.setdefault(None, False) or self is threading.current_thread() or self._pid != os.getpid():
            return
        if sys.is_finalizing():
            return
        self._call.wait(timeout_seconds)
        if self.ident is not None:
            self.join()

    def result(self) -> None:
        """Waits for the end of the call, and raises what it has raised."""
        self.wait()
        if self._call.error is not None:
            raise self._call.error


def preempt_nobody() -> None:
    """Lets this thread begin to run when a core is free or at the next tick, and not in place of a thread that runs.

    It has its share of the processor as before. Linux knows this as SCHED_BATCH. A thread with another policy than the
    usual one keeps that, as does one on another system, or where the kernel refuses.
    """
    with contextlib.suppress(AttributeError, OSError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class Flag:
    """A flag that any thread may set, and that is also set when its `owner` dies, without a line of Python.

    Unlike an Event it has no lock, which a Ctrl-C in the middle of `set` would leave locked, and for which a finaliser
    that runs in the middle of `wait` would wait.
    """

    def __init__(self, owner: object | None = None) -> None:
        self._reasons: list[object] = []
        self._owner = None if owner is None else weakref.ref(owner, self._reasons.append)

    def is_set(self) -> bool:
        return bool(self._reasons)

    def set(self) -> None:
        self._reasons.append(None)

    def wait(self, seconds: float) -> bool:
        """Sleeps for all of `seconds`, which must be few, unless it is set already. Returns whether it is set."""
        time.sleep(0.0 if self._reasons else seconds)
        return self.is_set()


# The calls end with anything else: None, or a weak reference that has died.
_Calls = queue.SimpleQueue[Any]


class ThreadPool:
    """Makes calls in at most `num_threads` daemon threads. One starts with each call, until there are so many.

    To be used by one thread. The end of a `with` block waits for all calls, or if it raises for those under way alone.
    The threads hold no reference to this object, and end also when it dies: see `shardio.loading.gather.GatherThreads`.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        if num_threads < 1:
            raise ValueError(f"expected at least 1 thread, found {num_threads}")
        self._num_threads = num_threads
        self._name = name
        self._calls: _Calls = queue.SimpleQueue()
        self._cancelled, self._closed = Flag(), Flag()
        self._serve = partial(_serve, self._calls, self._cancelled, weakref.ref(self, self._calls.put))
        self._threads: list[DaemonThread] = []

    def submit(self, function: Callable[..., R], *arguments: Any) -> Call[R]:
        """Has the function called. Raises RuntimeError if the pool is closed, or there can be no more threads."""
        if self._closed.is_set():
            raise RuntimeError("expected an open pool of threads, found a closed one")
        call = Call(partial(function, *arguments))
        self._calls.put(call)
        if len(self._threads) < self._num_threads:
            thread = DaemonThread(self._serve, f"{self._name}_{len(self._threads)}")
            self._threads.append(thread)
            thread.begin()
        return call

    def map(self, function: Callable[[T], R], arguments: Iterable[T]) -> Iterator[R]:
        """Yields what the function returns for each, in order. All are submitted at once."""
        return _results(deque([self.submit(function, argument) for argument in arguments]))

    def close(self, *, cancel: bool = False) -> None:
        """Waits for all calls, or with `cancel` for those under way alone, and for the end of the threads.

        May be called again, also where it was interrupted. Waits once more before that passes: the caller may be about
        to close what the calls under way use.
        """
        try:
            self._end(cancel)
        except BaseException:
            self._end(cancel=True)
            raise

    def _end(self, cancel: bool) -> None:
        self._closed.set()
        if cancel:
            self._cancelled.set()
        self._calls.put(None)
        for thread in self._threads:
            thread.wait()

    def __enter__(self) -> ThreadPool:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(cancel=kind is not None)


def _results(calls: deque[Call[R]]) -> Iterator[R]:
    while calls:
        yield calls.popleft().result()


def _serve(calls: _Calls, cancelled: Flag, owner: weakref.ref[ThreadPool]) -> None:
    while isinstance(call := calls.get(), Call):
        if cancelled.is_set() or owner() is None:
            call.fail(RuntimeError("the pool of threads was closed before the call was begun"))
        else:
            call.run()
        del call  # or this frame would keep what it has returned while it waits for the next one
    calls.put(None)  # the next thread's


def run_apart(
    work: Callable[[Callable[..., None]], R],
    report: Callable[..., object],
    stop: Callable[[], object],
    name: str,
    grace_seconds: float | None = None,
) -> R:
    """Returns what `work(tell)` returns, in a thread of its own, in which no signal handler raises an exception.

    `report` is called here with what is told there. If it raises, or a signal handler does so here, `stop` has the work
    end. It must be a function in C, which cannot be interrupted before it has begun. The end of the work is waited for,
    no longer than for the time of grace.
    """
    told: queue.SimpleQueue[tuple[object, ...] | None] = queue.SimpleQueue()
    call = Call(partial(work, lambda *what: told.put(what)))

    def run() -> None:
        call.run()
        told.put(None)

    thread = DaemonThread(run, name)
    try:
        thread.begin()
        while (what := told.get()) is not None:
            report(*what)
        return call.result()
    finally:
        stop()
        with contextlib.suppress(queue.Empty):
            thread.wait(grace_seconds)


class Closable(Protocol):
    def close(self) -> None: ...


def close_at_exit(owner: Closable) -> None:
    """Has `owner.close()` called when the interpreter exits, if the owner is still there."""
    weakref.finalize(owner, _close, weakref.ref(owner))


def _close(owner: weakref.ref[Closable]) -> None:
    if (alive := owner()) is not None:
        alive.close()
