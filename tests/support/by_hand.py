"""Batches that a test copies to a device and looks at by hand, without a loader, where the order of events matters."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from shardio.format.layout import RowType
from shardio.loading.cuda import CudaCopier
from shardio.loading.prefetch import DevicePrefetch
from shardio.loading.report import Counts
from shardio.loading.ring import Ring, Slot


def flat(batch: Any) -> list[torch.Tensor]:
    """Returns the tensors of a batch, in order."""
    if isinstance(batch, Mapping):
        return flat(tuple(batch.values()))
    return [tensor for part in batch for tensor in flat(part)] if isinstance(batch, tuple | list) else [batch]


class Hand:
    """DevicePrefetch without a loader, of batches that are filled with one value."""

    def __init__(
        self, batch_size: int, shape: tuple[int, int, int], more: Mapping[str, RowType] = MappingProxyType({})
    ) -> None:
        self.copier = CudaCopier(torch.device("cuda", torch.cuda.current_device()))
        self.ring = Ring(8, lambda: self.copier.new_slot(batch_size, shape, more))
        self.counts = Counts()
        self.prefetch = DevicePrefetch(self.copier, self.ring, self.counts)
        self.whole = (batch_size, *shape), np.uint8
        self._right: list[torch.Tensor] = []

    def filled(self, value: int, *results: tuple[tuple[int, ...], Any]) -> Slot:
        """Returns a slot of whole pictures, or of other views."""
        slot = self.ring.acquire()
        slot.lay_out(*(results or [self.whole]))
        for array in (*slot.views, slot.labels, slot.indices):
            array.fill(value)
        return slot

    def start(self, value: int, *results: tuple[tuple[int, ...], Any]) -> None:
        slot = self.filled(value, *results)
        self.prefetch.start(slot, len(slot.labels))

    def look(self, tensors: Any, value: int) -> None:
        self._right += [(tensor == value).all() for tensor in flat(tensors)]

    def write_and_look(self, *values: int) -> None:
        """Tensors of the consumer's own, of the sizes of a batch, that are dropped before they are written and read."""
        for value in values:
            for size in (int(np.prod(self.whole[0])), 2 * 8 * self.whole[0][0]):
                self.look(torch.full((size,), value, dtype=torch.uint8, device="cuda"), value)

    def all_right(self) -> bool:
        torch.cuda.synchronize()
        return len(self._right) > 0 and all(map(bool, self._right))
