"""Daemon threads, and pools of them, that survive an exception of a signal handler at any moment.

`threading.Thread` does not: after an interrupted `start`, it may run and refuse to be joined; after an interrupted
`join`, Python 3.11 treats it as ended. `concurrent.futures` has locks that an interrupted call leaves locked, so its
threads wait for ever. It also keeps the interpreter from exiting until all calls are done.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import errno
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

from shardio.system.opening import Living, limit_hint, open_file

T = TypeVar("T")
R = TypeVar("R")

# How long to wait for a thread that may be waiting for storage, which may never answer.
_PATIENCE_SECONDS = 1.0


class Call(Generic[T]):
    """A call of a function that one thread makes, and other threads may wait for."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._result: T
        self.error: BaseException | None = None
        """The error that the call raised, if any."""
        self.is_over = False
        self._over_signal: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run(self) -> None:
        """Makes the call, and stores its result or its error."""
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
        """Ends the call as if it had raised `error`."""
        self.error = error
        self._end()

    def _end(self) -> None:
        self.is_over = True
        self._over_signal.put(None)

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Waits until the call is over. Raises `queue.Empty` if that takes over `timeout_seconds`.

        May be called again after an interruption.
        """
        if not self.is_over:  # the flag, because an interrupted wait may have taken the signal with it
            self._over_signal.get(timeout=timeout_seconds)
        self._over_signal.put(None)  # for another thread that waits, also if a wait was interrupted before this

    def result(self) -> T:
        """Waits until the call is over. Returns the call's result, or raises its error."""
        self.wait()
        try:
            if self.error is not None:
                raise self.error
            return self._result
        finally:
            del self  # as in `run`


class DaemonThread(threading.Thread):
    """A daemon thread that makes one call. `begin` starts the thread, `wait` waits until its call is over.

    `begin` and `wait` may be interrupted, as by a Ctrl-C; then `wait` may be called (again). So keep a reference to the
    object before `begin`: the thread may be running. At exit, the interpreter does not wait for the thread.
    """

    def __init__(self, call: Callable[[], object], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._call = Call(call)
        # Whether the thread ever starts. The first who asks decides, and may ask again: `setdefault` is one step.
        self._decision: dict[None, bool] = {}
        self._pid = os.getpid()
        self._started_signal: queue.SimpleQueue[None] = queue.SimpleQueue()

    def begin(self) -> None:
        """Starts the thread. Raises RuntimeError if the system allows no more threads."""
        try:
            # Signal handlers run in the main thread only: a start in another thread cannot be interrupted.
            _thread.start_new_thread(self._start_here, ())
        except RuntimeError as error:
            raise RuntimeError(f"{error}{limit_hint(errno.ENOMEM)}") from None
        self._started_signal.get()
        if self._call.error is not None and self.ident is None:
            # A new one: if this thread kept what its caller gets, it would be in a cycle with the caller's frames.
            raise RuntimeError(f"{self._call.error}{limit_hint(errno.ENOMEM)}")

    def _start_here(self) -> None:
        if self._decision.setdefault(None, True):
            try:
                self.start()
            except BaseException as error:
                self._call.fail(error.with_traceback(None))
        self._started_signal.put(None)

    def run(self) -> None:
        self._call.run()

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Waits until the call is over. Raises `queue.Empty` if that takes over `timeout_seconds`.

        A thread that has not started by now never starts. Does not wait in the thread itself, in a forked process,
        which lacks the thread, or while the interpreter is finalizing.
        """
        starts = self._decision.setdefault(None, False)
        if starts and self is not threading.current_thread() and self._pid == os.getpid() and not sys.is_finalizing():
            self._call.wait(timeout_seconds)
            if self.ident is not None:
                self.join()

    @property
    def is_over(self) -> bool:
        return self._call.is_over

    def result(self) -> None:
        """Waits until the call is over, and raises the call's error, if any."""
        self.wait()
        if self._call.error is not None:
            raise self._call.error


class Ticker(DaemonThread):
    """A thread that calls `tick` every `seconds`. Ends at `close`, or when `owner` is freed: it holds only a weak
    reference to `owner`."""

    def __init__(self, owner: object, tick: Callable[[], object], seconds: float, name: str) -> None:
        self._ends: queue.SimpleQueue[object] = queue.SimpleQueue()
        super().__init__(partial(_tick, self._ends, weakref.ref(owner, self._ends.put), tick, seconds), name)

    def close(self) -> None:
        """Ends the thread, and waits for it, but at most a second for a `tick` under way. May be called again."""
        self._ends.put(None)
        with contextlib.suppress(queue.Empty):
            self.wait(_PATIENCE_SECONDS)


def _tick(ends: queue.SimpleQueue[object], owner: object, tick: Callable[[], object], seconds: float) -> None:
    """Calls `tick` every `seconds`, until `ends` has an item. `owner` is a weak reference, which this frame keeps
    alive: it puts itself into `ends` when its object is freed."""
    while True:
        with contextlib.suppress(queue.Empty):
            ends.get(timeout=seconds)
            return
        tick()


def wait_while_running(threads: Iterable[DaemonThread]) -> list[DaemonThread]:
    """Waits for the end of `threads`, as long as any of them makes progress. Returns the threads that have not ended.

    These seem to wait for storage: none of them has run, or waited for a core, for a second. Where the system does not
    count that, returns the threads that have not ended after a second.
    """
    left = list(threads)
    while left:
        before = [core_seconds(thread.native_id) for thread in left]
        deadline, waited_for, left = time.monotonic() + _PATIENCE_SECONDS, left, []
        for thread in waited_for:
            try:
                thread.wait(max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                left.append(thread)
        if not any(core_seconds(thread.native_id) not in before for thread in left):
            break
    return left


def core_seconds(thread: int | None) -> tuple[float, float]:
    """Returns how many seconds a thread has run, and waited for a core; zeros if unknown. `thread` is its native id."""
    try:
        with open_file(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY) as file:
            ran, waited, _ = file.read(100).split()
            return int(ran) / 1e9, int(waited) / 1e9
    except (OSError, ValueError):  # another system, or the thread has ended
        return 0.0, 0.0


def preempt_nobody() -> None:
    """Makes this thread wait for a free core or the next tick, rather than preempt a running thread (SCHED_BATCH).

    The thread's share of processor time stays the same. Does nothing if the thread has another policy than SCHED_OTHER,
    if the system has no such policies, or if the kernel refuses.
    """
    with contextlib.suppress(AttributeError, OSError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class Stop(Exception):
    """Raised to end the work of a thread that was told to stop, or because another thread failed. It is no error."""


class Flag:
    """A flag that any thread may set. It is also set when its `owner` is freed, without running Python code.

    Unlike threading.Event it has no lock: a Ctrl-C in the middle of `set` would leave the lock locked, and a finalizer
    that interrupts `wait` would wait for the lock forever.
    """

    def __init__(self, owner: object | None = None) -> None:
        self._reasons: list[object] = []
        self._owner = None if owner is None else weakref.ref(owner, self._reasons.append)

    def is_set(self) -> bool:
        return bool(self._reasons)

    def set(self) -> None:
        self._reasons.append(None)


# The calls end with anything else: None, or a weak reference that has died.
_Calls = queue.SimpleQueue[Any]


class ThreadPool(contextlib.AbstractContextManager["ThreadPool"]):
    """Makes calls in at most `num_threads` daemon threads, which start as calls are submitted.

    To be used by one thread. The end of a `with` block waits for all calls or, if the block raises, only for running
    calls. The threads hold no reference to the pool, and also end when the pool is freed. Their names are `name`_0, ...
    """

    def __init__(self, num_threads: int, name: str) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1; found {num_threads}")
        self._num_threads = num_threads
        self._name = name
        self._calls: _Calls = queue.SimpleQueue()
        self._cancelled, self._closed = Flag(), Flag()
        self._serve = partial(_serve, self._calls, self._cancelled, weakref.ref(self, self._calls.put))
        self._threads: list[DaemonThread] = []

    def submit(self, function: Callable[..., R], *arguments: Any) -> Call[R]:
        """Returns a new Call of `function`, which a thread of the pool makes.

        Raises RuntimeError if the pool is closed, or if the system allows no more threads.
        """
        if self._closed.is_set():
            raise RuntimeError("this thread pool was closed: make calls before `close`, or in a new pool")
        call = Call(partial(function, *arguments))
        self._calls.put(call)
        if len(self._threads) < self._num_threads:
            thread = DaemonThread(self._serve, f"{self._name}_{len(self._threads)}")
            self._threads.append(thread)
            thread.begin()
        return call

    def map(self, function: Callable[[T], R], arguments: Iterable[T]) -> Iterator[R]:
        """Yields `function`'s result for each argument, in order. Submits all calls before the first result."""
        calls = deque([self.submit(function, argument) for argument in arguments])
        return (calls.popleft().result() for _ in range(len(calls)))

    def close(self, *, cancel: bool = False) -> None:
        """Waits for all calls (with `cancel`, only for running calls) and for the end of the threads.

        May be called again. If it is interrupted, it waits again, for running calls, before it raises: the caller may
        be about to close what these calls use.
        """
        try:
            self._end(cancel)
            for thread in self._threads:
                thread.wait()
        except BaseException:
            self._end(cancel=True)
            wait_while_running(self._threads)  # and not for storage that does not answer: the caller has asked twice
            raise

    def _end(self, cancel: bool) -> None:
        self._closed.set()
        if cancel:
            self._cancelled.set()
        self._calls.put(None)

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(cancel=kind is not None)


def _serve(calls: _Calls, cancelled: Flag, owner: weakref.ref[ThreadPool]) -> None:
    while isinstance(call := calls.get(), Call):
        if cancelled.is_set() or owner() is None:
            call.fail(RuntimeError("the thread pool was closed before this call started: submit it to a new pool"))
        else:
            call.run()
        del call  # or this frame would keep its result while it waits for the next call
    calls.put(None)  # for the next thread


class Closable(Protocol):
    def close(self) -> None: ...


def close_at_exit(owner: Closable) -> None:
    """Makes the interpreter call `owner.close()` when it exits, if the owner still exists."""
    _CLOSED_AT_EXIT.add(owner)


_CLOSED_AT_EXIT: Living[Closable] = Living()


@atexit.register
def _close_all() -> None:
    for owner in reversed(_CLOSED_AT_EXIT.all()):
        owner.close()
