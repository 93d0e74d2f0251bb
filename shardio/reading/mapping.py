"""Maps many shards as one matrix with a sample in each row, so that one call gathers a batch from all of them.

The call takes the GIL once; next to a thread that computes in Python, a loop over rows gave 198 images/s and one call
25,288 (benchmarks/gather.py). Address space for all shards is reserved first, without memory. Each shard is then mapped
where its samples fall on whole rows of the matrix. Reading a row between two shards ends the process, so the matrix
stays private to ShardSet, which checks sample indices and translates them into rows.

No descriptor stays open, however many shards there are (Python's own mmap keeps one for each file).
"""

from __future__ import annotations

import ctypes
import errno
import io
import math
import mmap
import os
import resource
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from shardio.format.layout import HEADER_NBYTES
from shardio.kernels import rowread
from shardio.system.opening import OpenFile

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

_MADV_RANDOM = 1  # Linux, macOS and the BSDs agree on these two
# It keeps the GIL. Each of many short calls that gave it up would wait 5 ms for it beside a busy Python thread.
_quick = ctypes.PyDLL(None, use_errno=True)
_quick.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _reserve(nbytes: int) -> mmap.mmap:
    """Returns `nbytes` of reserved address space, without memory, which is freed with the last array over it. Raises
    OSError if the system refuses. C reserves and frees it, so an exception from a signal handler cannot leak it."""
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=_PROT_NONE)
    except (OSError, OverflowError) as error:
        raise _refused(nbytes, getattr(error, "errno", errno.ENOMEM)) from None


def _refused(nbytes: int, code: int) -> OSError:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    space = f"address space (`ulimit -v`, {limit:,} bytes)" if limit >= 0 else "mappings (`sysctl vm.max_map_count`)"
    return OSError(
        code,
        f"cannot map {nbytes:,} bytes into memory: {os.strerror(code)}: raise the limit of {space}, or give a "
        'ShardLoader io="pread", which maps no pixels',
    )


class RowMapping:
    """A read-only matrix of the rows of several files: file k has a header and `num_rows[k]` rows of `row_nbytes`.

    `rows` is the matrix, uint8 (n, row_nbytes). Row `first_rows[k]` is the first row of file k. Call `map_file` for
    every file before reading `rows`. Rows between two files belong to no file and must not be read. The mapping lives
    as long as any array over it. Raises OSError if the system refuses the address space.
    """

    def __init__(self, num_rows: Sequence[int], row_nbytes: int) -> None:
        # A place begins on a page and on a row.
        grain = math.lcm(mmap.ALLOCATIONGRANULARITY, row_nbytes)
        self._nbytes = [HEADER_NBYTES + count * row_nbytes for count in num_rows]
        self._places = [0, *accumulate(-(-nbytes // grain) * grain for nbytes in self._nbytes)]
        self.first_rows = [place // row_nbytes for place in self._places[:-1]]
        total = self.first_rows[-1] + num_rows[-1]
        pixels = np.frombuffer(_reserve(self._places[-1]), np.uint8, total * row_nbytes, HEADER_NBYTES)
        self.rows = pixels.reshape(total, row_nbytes)
        self._address = self.rows.ctypes.data - HEADER_NBYTES

    def map_file(self, number: int, file: OpenFile, *, private: bool = False, load: bool = False) -> None:
        """Maps `file` as file `number` of the matrix, and closes it. The caller must have checked its size and header.
        Raises OSError if the system refuses to map the file.

        With `private`, memory may be written to, which changes no file. With `load`, the file is read, not mapped.
        """
        address, nbytes = self._address + self._places[number], self._nbytes[number]
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if private or load else 0)
        # Some network filesystems allow no shared mappings.
        flags = mmap.MAP_PRIVATE | _MAP_FIXED | (mmap.MAP_ANONYMOUS if load else 0)
        with io.BufferedReader(file) as opened:
            if _libc.mmap(address, nbytes, protection, flags, -1 if load else file.fileno(), 0) == _MAP_FAILED:
                raise _refused(nbytes, ctypes.get_errno())
            if load:
                memory = (ctypes.c_char * nbytes).from_address(address)
                if (count := opened.readinto(memory)) != nbytes:
                    raise OSError(errno.EIO, f"expected {nbytes:,} bytes, found {count:,}: copy the file again")


def advise_random(rows: NDArray[np.uint8]) -> None:
    """Tells the kernel that `rows` will be read at random, so it reads only the touched pages and no neighbors. Never
    raises: a kernel may ignore advice."""
    start = rows.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    _quick.madvise(start, rows.ctypes.data + rows.nbytes - start, _MADV_RANDOM)


def will_need(
    rows: NDArray[np.uint8],
    numbers: NDArray[np.int64],
    starts: NDArray[np.int64] | int = 0,
    nbytes: NDArray[np.int64] | None = None,
) -> None:
    """Asks the kernel to read the rows `numbers` of `rows`, the matrix of a RowMapping, into the page cache. Does not
    wait. With `nbytes`, only nbytes[i] bytes of row numbers[i], from byte starts[i] on."""
    first, last = _pages_of(rows, numbers, starts, nbytes)
    spans = np.empty((len(numbers), 2), np.uint64)
    spans[:, 0] = first * mmap.PAGESIZE
    spans[:, 1] = (last + 1 - first) * mmap.PAGESIZE
    rowread.will_need(spans)


def resident_share(rows: NDArray[np.uint8], numbers: NDArray[np.int64]) -> float:
    """Returns the share of the rows `numbers` whose middle page is in the page cache, from 0 to 1 (Linux). For files
    that the user neither owns nor may write to, the kernel always reports everything as cached."""
    first, last = _pages_of(rows, numbers)
    pages = ((first + last) // 2).astype(np.uint64) * np.uint64(mmap.PAGESIZE)
    return rowread.count_resident(pages, mmap.PAGESIZE) / len(numbers)


def _pages_of(
    rows: NDArray[np.uint8],
    numbers: NDArray[np.int64],
    starts: NDArray[np.int64] | int = 0,
    nbytes: NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the first and the last page of each of the rows `numbers`, int64, counted from address 0. With `nbytes`,
    the pages of nbytes[i] bytes of row numbers[i], from byte starts[i] on."""
    first = rows.ctypes.data + numbers * rows.shape[1] + starts
    last = first + (rows.shape[1] if nbytes is None else nbytes) - 1
    return first // mmap.PAGESIZE, last // mmap.PAGESIZE
