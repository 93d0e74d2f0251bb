"""When a read is tried again that the storage did not serve, and the error if it never does."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable
from pathlib import Path

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
