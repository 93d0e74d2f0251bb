"""O_DIRECT: reads and writes past the page cache, and the memory that they need."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.system.opening import open_regular

# A page: the most that O_DIRECT demands of memory, offsets and lengths.
ALIGNMENT = 4096
# The alignments that it may demand: a sector as most disks show it, a page or larger sector.
_ALIGNMENTS = (512, ALIGNMENT)


def aligned_empty(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Uninitialised uint8 memory at a multiple of ALIGNMENT, which np.empty does not promise."""
    nbytes = int(np.prod(shape, dtype=np.int64))
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].reshape(shape)


def set_direct(descriptor: int, on: bool = True) -> None:
    """Makes an open file pass the page cache from now on, or use it again.

    Memory, offsets and lengths must then be multiples of what the disk demands. Raises OSError (EINVAL) where the
    filesystem or the system cannot do it.
    """
    if hasattr(os, "O_DIRECT"):
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags)
    elif on:  # macOS
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def direct_alignment(path: str | Path) -> int | None:
    """Returns what O_DIRECT demands of offsets, lengths and memory for this file; None if it cannot be read so.

    It tries, since not every filesystem and kernel says it, and some accept the flag but no read.
    """
    try:
        file, _ = open_regular(path)
    except (OSError, FormatError):
        return None
    with contextlib.suppress(OSError), file:
        set_direct(file.fileno())
        memory = aligned_empty((2 * _ALIGNMENTS[-1],))
        for alignment in _ALIGNMENTS:
            with contextlib.suppress(OSError):
                if os.preadv(file.fileno(), [memory[alignment : 2 * alignment].data], alignment):
                    return alignment
    return None
