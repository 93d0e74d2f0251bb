"""Slot -> device on a side stream; the slot returns to its ring when the copy's own event is done.

The rules are here and know nothing of CUDA; `shardio.loading.cuda` implements the two protocols below by CUDA calls. So
the rules are tested without a GPU, with a copier whose copies finish when the test says so.

Device memory for a batch is allocated on the consumer's stream: when the caller drops the batch, it returns in the
order of that stream, like the memory of any tensor of the caller's, however far the host is ahead of its device. The
price is that earlier work on that stream may still use the memory, and the copy has to wait for it. So memory is
reserved one batch ahead: the copy waits for the work that the stream had when the previous copy was started, not for
the caller's last step. A batch that was gathered late, just when it was due, still overlaps with the step before it;
other batches are up to `prefetch` steps early. Without the reserve, a late batch would be copied between two steps,
while the device is idle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch.autograd import profiler

from shardio.format.layout import RowType, SampleShape
from shardio.loading.ring import Ring, Slot

# Batches that may be handed over while their copies are unfinished. As copies wait for the steps before them, this
# is how far the host may run ahead of its device: so many steps, and `prefetch` + 2. Further ahead is of no use, and
# would take more slots.
MOST_AHEAD = 2

_UNSEEN = nullcontext()


class Tensors(NamedTuple):
    """A batch: `images` (B, C, H, W) uint8 in channels_last memory, `labels` and sample `indices` (B,) int64, and
    `more` by name, (B, ...)."""

    images: torch.Tensor
    labels: torch.Tensor
    indices: torch.Tensor
    more: Mapping[str, torch.Tensor] = MappingProxyType({})


def torch_dtype(dtype: str) -> torch.dtype:
    """Returns torch's type of the elements that NumPy calls so."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


class Transfer(Protocol):
    """Device memory for one batch, and the copy into it."""

    seconds: float
    """The time that the device took for the copy. 0.0 until it is known to be done."""
    stall_seconds: float
    """The time that the consumer's stream waited for the copy. 0.0 until it is known to be done."""

    def start(self, slot: Slot, size: int) -> None:
        """Begins to copy the first `size` samples. Does not wait; the slot must stay as it is until that is done."""

    def done(self) -> bool:
        """Returns whether the copy has been made: only then may the slot be written again. Does not wait."""

    def wait(self) -> None:
        """Waits, on the host, until `done`."""

    def hand_over(self) -> Tensors:
        """Returns the device's tensors for the consumer's stream, whose further work comes after the copy.

        So they may be dropped at once, too: the next use of their memory comes after the copy.
        """


class Copier(Protocol):
    """Makes slots and device memory for one device."""

    def new_slot(self, batch_size: int, sample_shape: SampleShape, more: Mapping[str, RowType]) -> Slot:
        """Returns a slot in memory that the device can copy from by itself, with rows of `more` next to its images."""

    def reserve(self, slot: Slot) -> Transfer:
        """Allocate device memory for a batch of the slot's size. Does not wait.

        The copy into it will wait for what the consumer's stream has been given until now, and for nothing after.
        """


class CopyCounts(Protocol):
    """Sums of the seconds of finished copies, and of the device's waits for them."""

    copy_seconds: float
    stall_seconds: float


class DevicePrefetch:
    """Batches between host and device, in order. Not thread safe: it belongs to one iterator."""

    def __init__(self, copier: Copier, ring: Ring, counts: CopyCounts) -> None:
        self._copier = copier
        self._ring = ring
        self._counts = counts
        self._reserved: Transfer | None = None
        self._transfers: deque[Transfer] = deque()
        self._copying: deque[tuple[Transfer, Slot]] = deque()

    def __len__(self) -> int:
        """Batches started and not yet taken."""
        return len(self._transfers)

    def start(self, slot: Slot, size: int) -> None:
        """Begins to copy a gathered batch, and takes over its slot."""
        with traced("shardio.copy"):
            transfer = self._reserved or self._copier.reserve(slot)
            self._reserved = None
            transfer.start(slot, size)
            self._transfers.append(transfer)
            self._copying.append((transfer, slot))
            self._reserved = self._copier.reserve(slot)

    def take(self) -> Tensors:
        """Returns the oldest started batch. Waits if more than MOST_AHEAD taken ones are not even copied yet."""
        tensors = self._hand_over()
        # Copies are made in order: while one that was taken is unfinished, so are all that were not taken.
        self.reclaim(len(self._transfers) + MOST_AHEAD)
        return tensors

    def reclaim(self, most_copying: int) -> None:
        """Returns the slots of finished copies; waits for the oldest while more than `most_copying` are unfinished."""
        while self._copying:
            transfer, slot = self._copying[0]
            if not transfer.done():
                if len(self._copying) <= most_copying:
                    return
                transfer.wait()
            self._copying.popleft()
            self._counts.copy_seconds += transfer.seconds
            self._counts.stall_seconds += transfer.stall_seconds
            self._ring.release(slot)

    def close(self) -> None:
        """Waits for all copies and returns all slots. Batches that were not taken are lost."""
        self._reserved = None
        # They are handed over, so that their memory is safe even if a Ctrl-C cuts the waiting short.
        while self._transfers:
            self._hand_over()
        self.reclaim(most_copying=0)

    def _hand_over(self) -> Tensors:
        tensors = self._transfers[0].hand_over()
        self._transfers.popleft()  # after that: if a Ctrl-C comes between, close() makes up for it
        return tensors


def traced(name: str) -> AbstractContextManager[object]:
    """Names the work inside the block in a trace of torch.profiler, if a profiler is on.

    The mark alone, a call of an operation of torch, takes 0.2 ms after a step has emptied the processor's caches. Where
    torch does not say whether a profiler is on, it marks always.
    """
    return profiler.record_function(name) if getattr(profiler, "_is_profiler_enabled", True) else _UNSEEN
