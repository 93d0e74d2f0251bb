"""Batch slots, and who owns each: the ring, the pipeline that fills it, or the caller who holds a batch of it.

The one idea: a slot that was handed out comes back by reference counting, when the last array or tensor over its memory
dies, and never "after the next few batches". So a batch stays valid for as long as anybody holds it, and if many are
held, the ring makes new slots instead of waiting for old ones.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.format import SampleShape

# Of the slots' memory: a cache line, which is also what wide vector stores want.
ALIGNMENT = 64


class Slot:
    """The memory of one batch: `images` (batch_size, height, width, channels) uint8 and `labels`, `indices` int64.

    Only one owner may touch it at a time. The arrays keep their memory alive, whatever it is (pinned, say).
    """

    def __init__(self, images: NDArray[np.uint8], labels: NDArray[np.int64], indices: NDArray[np.int64]) -> None:
        self.images = images
        self.labels = labels
        self.indices = indices


def aligned_empty(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Uninitialised uint8 memory at a multiple of ALIGNMENT, which np.empty does not promise."""
    nbytes = int(np.prod(shape, dtype=np.int64))
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].reshape(shape)


def new_slot(batch_size: int, sample_shape: SampleShape) -> Slot:
    """A slot in ordinary memory."""
    return Slot(
        aligned_empty((batch_size, *sample_shape)), np.empty(batch_size, np.int64), np.empty(batch_size, np.int64)
    )


class Ring:
    """Slots to reuse. At most `capacity` wait for reuse; further ones are made when needed and freed when returned.

    The slot that came back last is used first: it may still be in the processor's caches. Thread safe, and safe to
    return slots to from a finaliser, which may run in the middle of any other call: nothing here takes a lock.
    """

    def __init__(self, capacity: int, make: Callable[[], Slot]) -> None:
        self.capacity = capacity
        self._make = make
        self._free: deque[Slot] = deque()

    def acquire(self) -> Slot:
        """A slot that nobody else owns. Never waits."""
        try:
            return self._free.pop()
        except IndexError:
            return self._make()

    def release(self, slot: Slot) -> None:
        """Give a slot back. The caller must not touch it any more."""
        if len(self._free) < self.capacity:
            self._free.append(slot)

    def lend(self, slot: Slot, size: int) -> NDArray[np.uint8]:
        """The first `size` images of the slot, as a view that owns the slot: it returns when the last view dies."""
        loan = _Loan(slot.images[:size])
        # Through a weak reference: a batch that outlives its loader must not keep the other slots alive.
        weakref.finalize(loan, _return, weakref.ref(self), slot).atexit = False
        return np.asarray(loan)


def _return(ring: weakref.ref[Ring], slot: Slot) -> None:
    if (alive := ring()) is not None:
        alive.release(slot)


class _Loan:
    """Memory by NumPy's array interface. NumPy keeps the object that gave it alive for as long as the array lives."""

    def __init__(self, images: NDArray[np.uint8]) -> None:
        self.__array_interface__: dict[str, Any] = images.__array_interface__
