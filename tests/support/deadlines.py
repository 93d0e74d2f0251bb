"""Calls that would wait for ever become failures instead of a hanging test run."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def must_not_block(seconds: int = 20) -> Iterator[None]:
    """Makes a block that waits for ever a failure instead of a hanging test run."""

    def fail(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"blocked for {seconds} seconds")

    previous = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.001)


def in_time(work: Callable[[], Any], seconds: float = 20) -> Any:
    """Returns or raises what `work` does. If that blocks for ever, this test fails, and the others go on."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"blocked for {seconds} seconds"
    if errors:
        raise errors[0]
    return results[0]
