"""Reads that are tried again where the storage did not give what was asked for, and the error if it never does."""

from __future__ import annotations

import errno
from pathlib import Path

# Before what storage did not give is asked for again: a server that restarts, a path that fails over come back.
RETRY_SECONDS = (0.05, 0.2, 0.8)
# What passes, or may: a server that restarts, a path that fails over, a signal.
TRANSIENT = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EINTR, errno.EAGAIN})


def reading_failed(error: OSError, path: str | Path, what: str, offset: int, attempts: int, hint: str = "") -> OSError:
    """The error to raise when storage does not give `what`, a label or a sample, after so many attempts."""
    hint = hint or "look into the kernel's log (dmesg) for the disk or server; `shardio verify` tells what else is lost"
    text = f"{error.strerror}: reading {what} at byte {offset} failed (attempts: {attempts}); {hint}"
    return OSError(error.errno, text, str(path))
