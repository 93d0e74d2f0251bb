"""Reads many rows or windows of a file by _rowread.c, which releases the GIL once for all of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardio.kernels import _rowread as _native
from shardio.kernels.rowcopy import check_bytes

end_with = _native.end_with
"""end_with(flag): this thread begins no further read once flag[0] is set. The caller keeps `flag` while it reads."""
will_need = _native.will_need
"""will_need(spans): asks the kernel to read spans of mapped memory ahead. uint64 (n, 2): addresses and bytes."""
count_resident = _native.count_resident
"""count_resident(pages, page_nbytes): how many of the pages at these addresses, uint64, are in the page cache."""


def read_rows(
    descriptor: int,
    offsets: NDArray[np.int64],
    places: NDArray[np.int64],
    nbytes: int,
    out: NDArray[np.uint8],
    drop_behind: bool,
) -> int:
    """Reads rows of `nbytes` bytes: row i from byte offsets[i] of the file to byte places[i] of `out`.

    With `drop_behind`, drops the rows from the page cache afterwards. Returns the number of rows read before the first
    row that cannot be read, or the number of all rows.
    """
    check_bytes(out)
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
    """Reads windows of images from a file into `out`. Returns how many windows were read before one failed.

    A row of `windows` is (offset of the window in the file, number of lines, bytes per line, offset in `out`). Lines of
    an image are `stride` bytes apart. Reads go through the buffer `scratch`, and begin and end at multiples of
    `alignment`. With `drop_behind`, drops what was read from the page cache.
    """
    check_bytes(out)
    return _native.read_windows(descriptor, windows, stride, alignment, scratch, out, drop_behind)
