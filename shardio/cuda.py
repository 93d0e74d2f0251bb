"""The CUDA calls, all of them: pinned slots, copies on a side stream, events."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardio.format import SampleShape
from shardio.prefetch import Tensors
from shardio.ring import Slot


class CudaCopier:
    """Copies to one CUDA device, on one stream of its own. A `shardio.prefetch.Copier`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)

    def new_slot(self, batch_size: int, sample_shape: SampleShape) -> Slot:
        return Slot(
            torch.empty((batch_size, *sample_shape), dtype=torch.uint8, pin_memory=True).numpy(),
            torch.empty(batch_size, dtype=torch.int64, pin_memory=True).numpy(),
            torch.empty(batch_size, dtype=torch.int64, pin_memory=True).numpy(),
        )

    def start(self, slot: Slot, size: int) -> CudaTransfer:
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            # torch.from_numpy keeps the memory pinned: copies from it are asynchronous.
            images, labels, indices = (
                torch.from_numpy(array[:size]).to(self.device, non_blocking=True)
                for array in (slot.images, slot.labels, slot.indices)
            )
            event = torch.cuda.Event()
            event.record(self._stream)
        return CudaTransfer(Tensors(images.permute(0, 3, 1, 2), labels, indices), event)


@dataclass
class CudaTransfer:
    tensors: Tensors
    event: torch.cuda.Event

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()

    def hand_over(self) -> Tensors:
        consumer = torch.cuda.current_stream(self.tensors.images.device)
        consumer.wait_event(self.event)
        for tensor in self.tensors:
            # The memory belongs to the side stream; without this its next copy could be given it while kernels of the
            # consumer's stream still read it.
            tensor.record_stream(consumer)
        return self.tensors
