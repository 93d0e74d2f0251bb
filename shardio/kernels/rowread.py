"""Reads many rows or windows of a file, giving up the GIL once: _rowread.c.

Where the kernel was not built, each function does nothing and says so; the caller then reads by itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.kernels.built import _rowread as _native


def read_rows(
    descriptor: int,
    offsets: NDArray[np.int64],
    places: NDArray[np.int64],
    nbytes: int,
    out: NDArray[np.uint8],
    drop_behind: bool,
) -> int:
    """Reads `nbytes` from each of the offsets into `out` at the place of the same number.

    With `drop_behind`, the page cache forgets what was read. Returns how many rows were read before the first that
    could not be.
    """
    if _native is None:
        return 0
    return _native.read_rows(descriptor, offsets, places, nbytes, out, drop_behind)


def read_windows(
    descriptor: int,
    windows: NDArray[np.int64],
    stride: int,
    alignment: int,
    scratch: NDArray[np.uint8],
    out: NDArray[np.uint8],
    drop_behind: bool,
) -> int:
    """Reads windows, each (offset of its first byte, lines, bytes of a line, place in `out`), through `scratch`.

    Lines of an image are `stride` bytes apart; reads begin and end at multiples of `alignment`. Returns as read_rows.
    """
    if _native is None:
        return 0
    return _native.read_windows(descriptor, windows, stride, alignment, scratch, out, drop_behind)


def will_need(spans: NDArray[Any]) -> bool:
    """Calls madvise(MADV_WILLNEED) for spans of memory, uint64 (n, 2). Returns whether it did."""
    if _native is None:
        return False
    _native.will_need(spans)
    return True
