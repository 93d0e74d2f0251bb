"""Batch slots, and who owns each: the ring, the pipeline that fills it, or the caller who holds a batch of it.

The idea: a slot that was lent comes back by reference counting, when the last array or tensor over its memory
dies, and never "after the next few batches". So a batch stays valid for as long as it is held, and if many are, the
ring makes new slots instead of waiting for old ones.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.format.layout import RowType, SampleShape
from shardio.system.direct import aligned_empty

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Slot:
    """The memory of one batch: `images` (batch_size, height, width, channels) uint8 and `labels`, `indices` int64. (For
    what gather threads make of images, see `lay_out`.)

    `more` are arrays of batch_size rows by name: what a batch holds next to images and labels. Only one owner may touch
    a slot at a time. The arrays keep their memory alive, pinned or not.
    """

    def __init__(
        self,
        images: NDArray[np.uint8],
        labels: NDArray[np.int64],
        indices: NDArray[np.int64],
        more: Mapping[str, NDArray[Any]] = _NOTHING,
    ) -> None:
        self.images: NDArray[Any] = images
        self._memory: NDArray[np.uint8] = images.reshape(-1)
        self.labels = labels
        self.indices = indices
        self.more = more

    def lay_out(self, shape: tuple[int, ...], dtype: type[np.generic] = np.uint8) -> None:
        """Lets `images` be an array of this shape and type, in the same memory if there is enough of it. Its contents
        are lost."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if nbytes > len(self._memory):
            self._memory = aligned_empty((nbytes,))
        self.images = self._memory[:nbytes].view(dtype).reshape(shape)


def new_slot(batch_size: int, sample_shape: SampleShape, more: Mapping[str, RowType] = _NOTHING) -> Slot:
    """Returns a slot in ordinary memory, with rows of `more` next to its images."""
    return Slot(
        aligned_empty((batch_size, *sample_shape)),
        np.empty(batch_size, np.int64),
        np.empty(batch_size, np.int64),
        {name: _aligned_rows(batch_size, row) for name, row in more.items()},
    )


def _aligned_rows(count: int, row: RowType) -> NDArray[Any]:
    rows: NDArray[Any] = aligned_empty((count * row.nbytes,)).view(row.dtype).reshape(count, *row.shape)
    return rows


class Ring:
    """Slots to reuse. At most `capacity` wait for reuse; further ones are made when needed and freed when returned.

    The slot that came back last is used first: it may still be in the processor's caches. Thread safe: nothing here
    takes a lock, and a lent slot returns without a line of Python being run. So nothing can go wrong if a garbage
    collection or a Ctrl-C comes at that moment.
    """

    def __init__(self, capacity: int, make: Callable[[], Slot]) -> None:
        self.capacity = capacity
        self.num_made = 0
        self._make = make
        # A full deque drops its oldest entry. Entries are slots, or the tickets by which lent slots came back.
        self._free: deque[Slot | _Ticket] = deque(maxlen=capacity)

    def __del__(self) -> None:
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
        """Slots that wait for reuse."""
        return len(self._free)

    def release(self, slot: Slot) -> None:
        """Gives a slot back. The caller must not touch it any more."""
        self._free.append(slot)

    def lend(self, slot: Slot, size: int) -> NDArray[Any]:
        """Returns the first `size` images as a view that owns the slot: this comes back when the last view dies. Images
        that lie in one dimension are windows of several sizes, and are returned whole."""
        loan = _Loan(slot, size)
        ticket = _Ticket(loan, self._free.append)
        ticket.slot = slot
        loan.ticket = ticket
        return np.asarray(loan)

    def lend_beside(self, images: NDArray[Any], array: NDArray[Any]) -> NDArray[Any]:
        """Returns a view of `array`, of the slot that `images` was lent from. The slot comes back when the last view of
        both dies."""
        return np.asarray(_Beside(images, array))

    def clear(self) -> None:
        """Free the slots that wait for reuse. Lent ones stay valid."""
        self._free.clear()


class _Ticket(weakref.ref["_Loan"]):
    """A weak reference to a loan that knows the slot. When the loan dies, the ticket is its own notice of it."""

    __slots__ = ("slot",)
    slot: Slot


class _Loan:
    """Memory by NumPy's array interface. NumPy keeps the object that gave it for as long as the array lives.

    If a loan dies as part of a cycle, its ticket dies with it: then the slot is freed instead of returned.
    """

    def __init__(self, slot: Slot, size: int) -> None:
        images = slot.images if slot.images.ndim == 1 else slot.images[:size]
        self.__array_interface__: dict[str, Any] = images.__array_interface__
        self.ticket: _Ticket | None = None
        self._keeps_memory = images


class _Beside:
    """Memory of a slot by NumPy's array interface, which keeps another view of the slot, and with that its loan."""

    def __init__(self, lent: NDArray[Any], array: NDArray[Any]) -> None:
        self.__array_interface__: dict[str, Any] = array.__array_interface__
        self._keeps_loan = lent
        self._keeps_memory = array
