"""Global and shared memory. Every access is checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptx import Misaligned, OutOfBounds, Race

# Each buffer has addresses of its own, far from those of others.
_BUFFER_BITS = 40
_ALIGNMENT = 256
_POISON = 0xDB

# Of a byte of shared memory, instead of the warp that has written it.
_NONE, _ATOMIC = -1, -2
_RACE = "the same place in shared memory, and no barrier between them"


class GlobalMemory:
    """Copies of buffers, at `addresses` that are as aligned as the buffers are."""

    def __init__(self, buffers: Sequence[NDArray[np.uint8]]) -> None:
        self._place(buffers, [buffer.ctypes.data % _ALIGNMENT for buffer in buffers])

    def _place(self, buffers: Sequence[NDArray[np.uint8]], beyond: Sequence[int]) -> None:
        """Copies buffers to addresses that are so many bytes beyond aligned ones."""
        self._sizes = np.array([len(buffer) for buffer in buffers], np.int64)
        phases = np.array(beyond, np.int64)
        rooms = -(-(phases + self._sizes) // _ALIGNMENT) * _ALIGNMENT
        self._starts = np.concatenate([[0], rooms.cumsum()[:-1]]).astype(np.int64) + phases
        self._bytes = np.zeros(int(rooms.sum()), np.uint8)
        self.addresses: NDArray[np.int64] = (np.arange(1, len(buffers) + 1) << _BUFFER_BITS) + phases
        for number, buffer in enumerate(buffers):
            self.contents(number)[:] = buffer

    def add(self, nbytes: int) -> int:
        """Returns the address of more memory."""
        count, beyond = len(self.addresses), (self.addresses % _ALIGNMENT).tolist()
        self._place([*map(self.contents, range(count)), np.full(nbytes, _POISON, np.uint8)], [*beyond, 0])
        return int(self.addresses[count])

    def contents(self, number: int) -> NDArray[np.uint8]:
        start = self._starts[number]
        return self._bytes[start : start + self._sizes[number]]

    def load(self, addresses: NDArray[np.int64], dtype: np.dtype[Any], parts: int) -> list[NDArray[Any]]:
        """Returns vectors of `parts` elements, one array for each element."""
        view, at = self._bytes.view(dtype), self._find(addresses, dtype.itemsize, parts)
        return [view[at + part] for part in range(parts)]

    def store(self, addresses: NDArray[np.int64], values: Sequence[NDArray[Any]]) -> None:
        dtype = values[0].dtype
        view, at = self._bytes.view(dtype), self._find(addresses, dtype.itemsize, len(values))
        _store(view, at, values)

    def _find(self, addresses: NDArray[np.int64], itemsize: int, parts: int) -> NDArray[np.int64]:
        """Returns the number of the first element of each vector in all memory."""
        size = itemsize * parts
        numbers = (addresses >> _BUFFER_BITS) - 1
        if ((numbers < 0) | (numbers >= len(self._sizes))).any():
            raise OutOfBounds("an address in no buffer")
        offsets = addresses - self.addresses[numbers]
        outside = (offsets < 0) | (offsets + size > self._sizes[numbers])
        if outside.any():
            first = outside.argmax()
            number, offset = numbers[first], offsets[first]
            raise OutOfBounds(f"{size} bytes at byte {offset} of buffer {number}, which has {self._sizes[number]}")
        _check_alignment(addresses, size)
        return np.asarray((self._starts[numbers] + offsets) // itemsize)


class SharedMemory:
    """Shared memory of some blocks, `size` bytes each. `blocks` and `warps` are those of each thread.

    It knows for each byte which warps have read and written it since the last barrier of its block.
    """

    def __init__(self, size: int, blocks: NDArray[np.int64], warps: NDArray[np.int64]) -> None:
        self._size = size
        self._room = -(-max(size, 1) // 16) * 16
        self._blocks, self._warps = blocks, warps
        nbytes = (int(blocks.max()) + 1) * self._room
        self._bytes = np.full(nbytes, _POISON, np.uint8)
        self._writers = np.full(nbytes, _NONE, np.int16)
        self._readers = np.zeros(nbytes, np.uint32)  # a bit for each warp

    def load(self, lanes: Any, addresses: NDArray[np.int64], dtype: np.dtype[Any], parts: int) -> list[NDArray[Any]]:
        at, places, warps = self._find(lanes, addresses, dtype.itemsize, parts)
        writers = self._writers[places]
        if ((writers != _NONE) & (writers != warps)).any():
            raise Race(f"a read and a write of {_RACE}")
        np.bitwise_or.at(self._readers, places, np.uint32(1) << warps.astype(np.uint32))
        return [self._bytes.view(dtype)[at + part] for part in range(parts)]

    def store(self, lanes: Any, addresses: NDArray[np.int64], values: Sequence[NDArray[Any]]) -> None:
        at, places, warps = self._find(lanes, addresses, values[0].itemsize, len(values))
        self._check_write(places, warps, (_NONE,))
        self._writers[places] = warps  # the last of some warps that write the same
        _store(self._bytes.view(values[0].dtype), at, values)

    def add(self, lanes: Any, addresses: NDArray[np.int64], values: NDArray[Any]) -> NDArray[Any]:
        """Adds atomically, and returns what was there before all of the threads have added."""
        at, places, warps = self._find(lanes, addresses, values.itemsize, 1)
        self._check_write(places, warps, (_NONE, _ATOMIC))
        self._writers[places] = _ATOMIC
        view = self._bytes.view(values.dtype)
        before = view[at]
        np.add.at(view, at, values)
        return before

    def end_interval(self, block: int) -> None:
        """Forgets who has accessed the memory of a block: all its threads are at a barrier."""
        mine = slice(block * self._room, (block + 1) * self._room)
        self._writers[mine] = _NONE
        self._readers[mine] = 0

    def _check_write(self, places: NDArray[np.int64], warps: NDArray[np.int16], allowed: tuple[int, ...]) -> None:
        writers = self._writers[places]
        if (~np.isin(writers, allowed) & (writers != warps)).any():
            raise Race(f"two writes to {_RACE}")
        if (self._readers[places] & ~(np.uint32(1) << warps.astype(np.uint32))).any():
            raise Race(f"a read and a write of {_RACE}")

    def _find(
        self, lanes: Any, addresses: NDArray[np.int64], itemsize: int, parts: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int16]]:
        """Returns the first element of each vector in the memory of all blocks, each of its bytes, and its warp."""
        size = itemsize * parts
        outside = (addresses < 0) | (addresses + size > self._size)
        if outside.any():
            place = addresses[outside.argmax()]
            raise OutOfBounds(f"{size} bytes at byte {place} of shared memory, which has {self._size}")
        _check_alignment(addresses, size)
        starts = addresses + self._blocks[lanes] * self._room
        return starts // itemsize, starts[:, None] + np.arange(size), self._warps[lanes][:, None].astype(np.int16)


def _check_alignment(addresses: NDArray[np.int64], size: int) -> None:
    wrong = addresses % size != 0
    if wrong.any():
        raise Misaligned(f"{size} bytes at an address that is {addresses[wrong.argmax()] % size} beyond a multiple")


def _store(view: NDArray[Any], at: NDArray[np.int64], values: Sequence[NDArray[Any]]) -> None:
    for part, value in enumerate(values):
        view[at + part] = value
        if (view[at + part] != value).any():
            raise Race("two threads write different values to one place at once")
