"""Many shards mapped as one matrix with a sample in each row, so that one np.take gathers from all of them.

Address space for all shards is reserved first, without memory behind it. Each shard is then mapped into its place;
places are so far apart that the samples of every shard fall on whole rows, counted from the first sample of the first
shard. The rows between shards belong to nothing: touching them ends the process, so the matrix stays private to
ShardSet, which translates checked sample indices into rows.

No descriptor stays open, however many shards there are (Python's own mmap keeps one for each).
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.format import HEADER_NBYTES

_PROT_NONE = 0
_MAP_FIXED = 0x10  # Linux, macOS and the BSDs agree
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, descriptor: int) -> int:
    if nbytes > sys.maxsize:  # ctypes would cut the number to 64 bits and get something else
        raise OSError(errno.ENOMEM, f"cannot map {nbytes} bytes: {os.strerror(errno.ENOMEM)}")
    result = _libc.mmap(address, nbytes, protection, flags, descriptor, 0)
    if result == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {nbytes} bytes: {os.strerror(code)}")
    return int(result)


class RowMapping:
    """Files of `num_rows[k]` rows of `row_nbytes` behind a header each, as one read-only matrix.

    `rows` is the matrix, uint8, and `first_rows[k]` the row in it where file k begins: valid once `place` was called
    for every file. The mapping lives as long as any array over it. OSError if the kernel refuses.
    """

    def __init__(self, num_rows: Sequence[int], row_nbytes: int) -> None:
        # A place begins on a page and on a row.
        grain = math.lcm(mmap.ALLOCATIONGRANULARITY, row_nbytes)
        self._nbytes = [HEADER_NBYTES + count * row_nbytes for count in num_rows]
        self._places = [0, *accumulate(-(-nbytes // grain) * grain for nbytes in self._nbytes)]
        self.first_rows = [place // row_nbytes for place in self._places[:-1]]
        self._region = _Region(self._places[-1])
        self.rows = self._region.as_rows(HEADER_NBYTES, self.first_rows[-1] + num_rows[-1], row_nbytes)

    def place(self, number: int, descriptor: int) -> None:
        """Map file `number`, whose size and header were checked on this descriptor; it may be closed afterwards."""
        address = self._region.address + self._places[number]
        _mmap(address, self._nbytes[number], mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, descriptor)


class _Region:
    """Reserved addresses, given back when the last array over them is gone."""

    def __init__(self, nbytes: int) -> None:
        self.address = _mmap(None, nbytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        weakref.finalize(self, _libc.munmap, self.address, nbytes).atexit = False
        self.__array_interface__: dict[str, Any] = {}

    def as_rows(self, start: int, num_rows: int, row_nbytes: int) -> NDArray[np.uint8]:
        """A read-only matrix over the region, from byte `start` on. NumPy keeps the region alive with it."""
        self.__array_interface__ = {
            "version": 3,
            "data": (self.address + start, True),
            "shape": (num_rows, row_nbytes),
            "typestr": "|u1",
        }
        return np.asarray(self)
