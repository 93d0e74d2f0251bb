"""Memory that O_DIRECT can read into."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# A page: the most that O_DIRECT demands of where it puts what it reads.
ALIGNMENT = 4096


def aligned_empty(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Uninitialised uint8 memory at a multiple of ALIGNMENT, which np.empty does not promise."""
    nbytes = int(np.prod(shape, dtype=np.int64))
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].reshape(shape)
