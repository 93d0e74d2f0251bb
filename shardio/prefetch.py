"""Slot -> device on a side stream; the slot returns to its ring when the copy's own event is done.

The rules are here and know nothing of CUDA; the CUDA calls are in `shardio.cuda`, behind the two protocols below. So
the rules are tested, without a GPU, with a copier whose copies finish when the test says so.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol

import torch
from torch.profiler import record_function

from shardio.format import SampleShape
from shardio.ring import Ring, Slot

# Copies that may be unfinished at a time. A host that runs further ahead of its device is held back.
MOST_COPYING = 4


class Tensors(NamedTuple):
    """A batch: `images` (B, C, H, W) uint8 in channels_last memory, `labels` and sample `indices` (B,) int64."""

    images: torch.Tensor
    labels: torch.Tensor
    indices: torch.Tensor


class Transfer(Protocol):
    """One batch on its way to the device."""

    def done(self) -> bool:
        """Whether the copy has been made: only then may the slot be written again. Does not wait."""

    def wait(self) -> None:
        """Wait, on the host, until `done`."""

    def hand_over(self) -> Tensors:
        """The device's tensors, which the consumer's stream may use: what it does comes after the copy."""


class Copier(Protocol):
    """How batches get to one device."""

    def new_slot(self, batch_size: int, sample_shape: SampleShape) -> Slot:
        """A slot in memory that the device can copy from by itself."""

    def start(self, slot: Slot, size: int) -> Transfer:
        """Begin to copy the first `size` samples. Does not wait; the slot must stay as it is until it is done."""


class DevicePrefetch:
    """Batches between host and device, in order. Not thread safe: it belongs to one iterator."""

    def __init__(self, copier: Copier, ring: Ring) -> None:
        self._copier = copier
        self._ring = ring
        self._transfers: deque[Transfer] = deque()
        self._copying: deque[tuple[Transfer, Slot]] = deque()

    def __len__(self) -> int:
        """Batches started and not yet taken."""
        return len(self._transfers)

    def start(self, slot: Slot, size: int) -> None:
        """Begin to copy a gathered batch, and take over its slot."""
        self.reclaim()
        with record_function("shardio.copy"):
            transfer = self._copier.start(slot, size)
        self._transfers.append(transfer)
        self._copying.append((transfer, slot))

    def take(self) -> Tensors:
        """The oldest started batch."""
        return self._transfers.popleft().hand_over()

    def reclaim(self, most_copying: int = MOST_COPYING) -> None:
        """Return the slots of finished copies; wait for the oldest while more than `most_copying` are unfinished."""
        while self._copying:
            transfer, slot = self._copying[0]
            if not transfer.done():
                if len(self._copying) <= most_copying:
                    return
                transfer.wait()
            self._copying.popleft()
            self._ring.release(slot)

    def close(self) -> None:
        """Wait for all copies and return all slots. Batches that were not taken are lost."""
        self.reclaim(most_copying=0)
        self._transfers.clear()
