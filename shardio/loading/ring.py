"""Batch slots and the ring that reuses them.

A slot is owned by the ring, by the pipeline that fills it, or by the caller who holds a batch in its memory. A lent
slot returns by reference counting, when the last array or tensor over its memory is freed, and never "after the next
few batches". So a batch stays valid while it is held. If many batches are held, the ring makes new slots instead of
waiting for old ones.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.format.layout import RowType, SampleShape
from shardio.kernels.finalized import Finalized
from shardio.system.pour import ALIGNMENT, aligned_empty

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Slot:
    """The memory of one batch.

    `views` are the images, arrays (batch_size, height, width, channels): one, or one for each view of a transform.
    `labels` and `indices` are int64 (batch_size,). `more` has the other arrays of the batch by name, with batch_size
    rows each. Only one owner may touch a slot at a time. The arrays keep their memory alive, pinned or not.
    """

    def __init__(
        self,
        images: NDArray[np.uint8],
        labels: NDArray[np.int64],
        indices: NDArray[np.int64],
        more: Mapping[str, NDArray[Any]] = _NOTHING,
    ) -> None:
        self.views: tuple[NDArray[Any], ...] = (images,)
        self.memory: NDArray[np.uint8] = images.reshape(-1)
        self.labels = labels
        self.indices = indices
        self.more = more
        self._read = more
        self._layout: tuple[tuple[tuple[int, ...], Any], ...] = ()
        self._arrays_nbytes = sum(array.nbytes for array in more.values())
        self.nbytes = images.nbytes + self._arrays_nbytes
        """The bytes of a batch's images and arrays."""

    @property
    def images(self) -> NDArray[Any]:
        """The first view."""
        return self.views[0]

    def lay_out(self, *results: tuple[tuple[int, ...], Any]) -> None:
        """Makes a new array of `views` for each of `results`, (shape, dtype), one after the other, with undefined
        contents.

        The arrays use the same memory if the memory is large enough.
        """
        self.more = self._read
        if results == self._layout:
            return
        self._layout = results
        sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in results]
        places = [0, *accumulate(-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes in sizes)]
        total = places[len(sizes) - 1] + sizes[-1]
        if total > len(self.memory):
            self.memory = self.new_memory(total)
        self.nbytes = total + self._arrays_nbytes
        self.views = tuple(
            self.memory[place : place + nbytes].view(dtype).reshape(shape)
            for place, nbytes, (shape, dtype) in zip(places, sizes, results, strict=False)
        )

    def put(self, name: str, array: NDArray[Any]) -> None:
        """Replaces the array `name` by `array`, until `lay_out` is called for the next batch."""
        self.more = {**self.more, name: array}

    def new_memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Returns new memory for the views, uint8 (nbytes,), of the kind that the slot has."""
        return aligned_empty((nbytes,))


def new_slot(batch_size: int, sample_shape: SampleShape, more: Mapping[str, RowType] = _NOTHING) -> Slot:
    """Returns a slot for `batch_size` samples, in ordinary memory. `sample_shape` is an image's shape. `more` has the
    further arrays by name, with the type of one sample's value."""
    return Slot(
        aligned_empty((batch_size, *sample_shape)),
        np.empty(batch_size, np.int64),
        np.empty(batch_size, np.int64),
        {
            name: aligned_empty((batch_size * row.nbytes,)).view(row.dtype).reshape(batch_size, *row.shape)
            for name, row in more.items()
        },
    )


class Ring(Finalized):
    """A pool of slots. Keeps at most `capacity` free slots; further slots are made when needed, and freed on return.

    The slot that returned last is used first, because it may still be in the processor's caches. Thread safe without
    locks: a lent slot returns without running a line of Python, so a garbage collection or a Ctrl-C at that moment
    does no harm.
    """

    def __init__(self, capacity: int, make: Callable[[], Slot]) -> None:
        self.capacity = capacity
        self.num_made = 0
        self._make = make
        # A full deque drops its oldest entry. Entries are slots, or the tickets by which lent slots came back.
        self._free: deque[Slot | _Ticket] = deque(maxlen=capacity)

    def finalize(self) -> None:
        if hasattr(self, "_free"):  # not where its making was interrupted
            self._free.clear()  # lent slots know the deque, and may outlive the ring

    def acquire(self) -> Slot:
        """Returns a slot that the caller alone owns. Never waits."""
        entry: Slot | _Ticket | None = None
        with contextlib.suppress(IndexError):
            entry = self._free.pop()
        if entry is None:
            self.num_made += 1
            return self._make()
        return entry.slot if isinstance(entry, _Ticket) else entry

    @property
    def num_free(self) -> int:
        """The number of slots that wait for reuse."""
        return len(self._free)

    def release(self, slot: Slot) -> None:
        """Returns a slot to the ring. The caller must not touch the slot any more."""
        self._free.append(slot)

    def lend(self, slot: Slot, size: int) -> NDArray[Any]:
        """Returns the slot's first `size` images. The slot returns to the ring when the last view of them is freed."""
        loan = _Loan(slot.images[:size])
        ticket = _Ticket(loan, self._free.append)
        ticket.slot = slot
        loan.ticket = ticket
        return np.asarray(loan)

    def lend_beside(self, images: NDArray[Any], array: NDArray[Any]) -> NDArray[Any]:
        """Returns a view of `array`, another array of the slot that `images` was lent from.

        The slot returns to the ring when the last view of `images` and the last view of `array` are freed.
        """
        return np.asarray(_Loan(array, images))

    def clear(self) -> None:
        """Frees the slots that wait for reuse. Lent slots stay valid."""
        self._free.clear()


class _Ticket(weakref.ref["_Loan"]):
    """A weak reference to a loan, with the loan's slot. When the loan is freed, its ticket goes into the ring."""

    __slots__ = ("slot",)
    slot: Slot


class _Loan:
    """Exposes an array of a slot through NumPy's array interface. NumPy keeps the loan alive as long as the array.

    If a loan is freed as part of a reference cycle, its ticket is freed with it: then the slot is freed, too, instead
    of returning to the ring.
    """

    def __init__(self, array: NDArray[Any], lent: NDArray[Any] | None = None) -> None:
        """Lends `array`. If `lent`, an array on loan from the same slot, is passed, this loan keeps it alive.

        So the slot returns to the ring only after both are freed.
        """
        self.__array_interface__: dict[str, Any] = array.__array_interface__
        self.ticket: _Ticket | None = None
        self._keeps = array, lent
