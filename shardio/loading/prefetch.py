"""Copies slots, the host memory of batches, to a device on a side stream. A slot returns to its ring after its copy.

This module has the rules and no CUDA calls; `shardio.loading.cuda` implements the two protocols below with CUDA. So
the rules are tested without a GPU, with a copier whose copies finish when the test says so.

Device memory for a batch is allocated on the consumer's stream, so it is reused in the order of that stream when the
caller drops the batch, however far the host is ahead of its device. Earlier work on the stream may still use it then,
so a copy into it has to wait for that work. To keep this wait short, memory is reserved one batch ahead: a copy waits
only for the work that was on the stream when the previous copy was started, and not for the caller's last step. So the
copy of a batch that was gathered late still overlaps with the step before it; other copies are up to `prefetch` steps
early. Without the reserve, a late batch would be copied between two steps, while the device is idle.
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
from shardio.loading.report import Counts
from shardio.loading.ring import Ring, Slot

# Batches that may be handed over while their copies are unfinished. As copies wait for the steps before them, this
# is how far the host may run ahead of its device: so many steps, and `prefetch` + 2. Further ahead is of no use, and
# would take more slots.
MOST_AHEAD = 2


class Tensors(NamedTuple):
    """A batch: `images` (B, C, H, W) in channels_last memory, a tuple if there are several views; `labels` and sample
    `indices`, int64 (B,); and `more`, arrays by name, (B, ...). `indices` are None if nobody wants them."""

    images: torch.Tensor | tuple[torch.Tensor, ...]
    labels: torch.Tensor
    indices: torch.Tensor | None
    more: Mapping[str, torch.Tensor] = MappingProxyType({})


def torch_dtype(dtype: str) -> torch.dtype:
    """Returns the torch dtype for the name of a NumPy dtype."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


class Transfer(Protocol):
    """Device memory for one batch, and the copy of a slot into it, with the times that it took."""

    seconds: float
    """Seconds that the device took for the copy. 0.0 until the copy is known to be done."""
    stall_seconds: float
    """Seconds that the consumer's stream waited for the copy. 0.0 until the copy is known to be done."""

    def start(self, slot: Slot, size: int) -> None:
        """Begins to copy the slot's first `size` samples. Does not wait. The slot must not change until `done`."""

    def done(self) -> bool:
        """Returns whether the copy is finished. Only then may the slot be written again. Does not wait."""

    def wait(self) -> None:
        """Waits until the copy is finished."""

    def hand_over(self) -> Tensors:
        """Returns the tensors on the device. Later work on the consumer's stream runs after the copy.

        The caller may drop the tensors at once: their memory is reused only after the copy.
        """


class Copier(Protocol):
    """Makes slots and device memory for one device."""

    def new_slot(self, batch_size: int, sample_shape: SampleShape, more: Mapping[str, RowType]) -> Slot:
        """Returns a slot for `batch_size` samples, in memory that the device can copy from. `sample_shape` is an
        image's shape. `more` has the further arrays by name, with the type of one sample's value."""

    def reserve(self, slot: Slot) -> Transfer:
        """Allocates device memory for a batch of the slot's size. Does not wait.

        The copy into this memory will wait for the work that is on the consumer's stream now, but not for later work.
        """


class DevicePrefetch:
    """The queue of batches that are copied to the device, in order. Not thread safe: it belongs to one iterator. Adds
    the times of the copies to `counts`, and returns slots to `ring`."""

    def __init__(self, copier: Copier, ring: Ring, counts: Counts) -> None:
        self._copier = copier
        self._ring = ring
        self._counts = counts
        self._reserved: Transfer | None = None
        self._transfers: deque[Transfer] = deque()
        self._copying: deque[tuple[Transfer, Slot]] = deque()

    def __len__(self) -> int:
        """The number of batches started and not yet taken."""
        return len(self._transfers)

    def start(self, slot: Slot, size: int) -> None:
        """Begins to copy the first `size` samples of a gathered batch, and takes over its slot."""
        with traced("shardio.copy"):
            transfer = self._reserved or self._copier.reserve(slot)
            self._reserved = None
            transfer.start(slot, size)
            self._transfers.append(transfer)
            self._copying.append((transfer, slot))
            self._reserved = self._copier.reserve(slot)

    def take(self) -> Tensors:
        """Returns the batch that was started first. Waits until at most MOST_AHEAD taken batches are being copied."""
        tensors = self._hand_over()
        # Copies are made in order: while one that was taken is unfinished, so are all that were not taken.
        self.reclaim(len(self._transfers) + MOST_AHEAD)
        return tensors

    def reclaim(self, most_copying: int) -> None:
        """Returns slots of finished copies to the ring. Waits while more than `most_copying` copies are unfinished."""
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
    """Returns a context manager that names the work of its block in traces of torch.profiler.

    Does nothing if no profiler is on, because the mark takes 0.2 ms when a step has emptied the processor's caches. If
    torch does not say whether a profiler is on, the block is always marked.
    """
    return profiler.record_function(name) if getattr(profiler, "_is_profiler_enabled", True) else nullcontext()
