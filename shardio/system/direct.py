"""O_DIRECT: reads and writes that bypass the page cache, and the aligned memory that they need."""

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

# A page: the largest alignment that O_DIRECT demands of memory, offsets and lengths.
ALIGNMENT = 4096
# The alignments that it may demand: the sector size of most disks, and a page or larger sector.
_ALIGNMENTS = (512, ALIGNMENT)


def aligned_empty(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Returns uninitialized uint8 memory that is aligned to ALIGNMENT bytes, which np.empty does not promise."""
    nbytes = int(np.prod(shape, dtype=np.int64))
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].reshape(shape)


def set_direct(descriptor: int, on: bool = True) -> None:
    """Makes an open file bypass the page cache, or with `on` false, use it again.

    Memory, offsets and lengths must then be multiples of the disk's alignment. Raises OSError (EINVAL) if the
    filesystem or the system does not support it.
    """
    if hasattr(os, "O_DIRECT"):
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags)
    elif on:  # macOS
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def direct_alignment(path: str | Path) -> int | None:
    """Returns the alignment that O_DIRECT demands for this file; None if the file cannot be read with it.

    It tests by reading, since not every filesystem and kernel reports the alignment, and some accept the flag but fail
    to read.
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
