"""All CUDA calls of the loader: pinned slots, copies on a side stream, events."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardio.format.layout import RowType, SampleShape
from shardio.loading.prefetch import Copier, Tensors, torch_dtype
from shardio.loading.ring import Slot
from shardio.system.pour import ALIGNMENT

# A device copies one thing after the other: what the caller copies waits for a piece of a batch, and not for all of it.
# 8 MiB take 0.15 to 0.3 ms, and a launch some microseconds.
_PIECE_NBYTES = 8 << 20


class PinnedSlot(Slot):
    """A slot in pinned memory, with CUDA events for the beginning and the end of its copy to the GPU."""

    def __init__(self, images: torch.Tensor, numbers: torch.Tensor, more: Mapping[str, torch.Tensor]) -> None:
        """`numbers`, int64 (2, batch_size), has the labels and the indices, so one copy moves both."""
        labels, indices = numbers.numpy()
        super().__init__(images.numpy(), labels, indices, {name: tensor.numpy() for name, tensor in more.items()})
        # The memory is torch's own: if the slot is dropped, torch keeps it until copies from it are done.
        self._pixels = images.view(-1)
        self._numbers = numbers
        self._read_into = dict(more)
        self._more = self._read_into
        self.begin = torch.cuda.Event(enable_timing=True)
        # A host that is ahead of its device waits for this one for most of each step. It sleeps, as spinning, the
        # default, takes a core that the gather threads may need.
        self.end = torch.cuda.Event(enable_timing=True, blocking=True)
        # Where the consumer's stream begins to wait for the copy.
        self.wanted = torch.cuda.Event(enable_timing=True)

    def lay_out(self, *results: tuple[tuple[int, ...], Any]) -> None:
        self._more = self._read_into
        super().lay_out(*results)

    def new_memory(self, nbytes: int) -> NDArray[np.uint8]:
        self._pixels = _pinned((nbytes,), torch.uint8)
        return self._pixels.numpy()

    def put(self, name: str, array: NDArray[Any]) -> None:
        tensor = _pinned(array.shape, torch_dtype(array.dtype.str))
        tensor.numpy()[...] = array
        self._more = {**self._more, name: tensor}
        super().put(name, tensor.numpy())

    def parts(self, size: int) -> list[torch.Tensor]:
        """Returns what is copied of a batch of `size` samples: the pixels of all views, the numbers, and the arrays."""
        nbytes, last = self.views[0][:size].nbytes, self.views[-1]
        if len(self.views) > 1:
            nbytes = last.ctypes.data - self.memory.ctypes.data + last.nbytes
        return [self._pixels[:nbytes], self._numbers, *(self._more[name][:size] for name in self.more)]


class CudaCopier:
    """Makes pinned slots, and transfers from them to one CUDA device, on its one copy stream: a `prefetch.Copier`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = _copy_stream(device)

    def new_slot(
        self, batch_size: int, sample_shape: SampleShape, more: Mapping[str, RowType] = MappingProxyType({})
    ) -> PinnedSlot:
        return PinnedSlot(
            _pinned((batch_size, *sample_shape), torch.uint8),
            _pinned((2, batch_size), torch.int64),
            {name: _pinned((batch_size, *row.shape), torch_dtype(row.dtype)) for name, row in more.items()},
        )

    def reserve(self, slot: Slot) -> CudaTransfer:
        assert isinstance(slot, PinnedSlot)
        return CudaTransfer(slot, self.device, self._stream)


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream on which all loaders of the process copy to this device. torch hands out 32 streams in turn:
    a loader's own stream could be one that has other work, which would then wait for whole steps."""
    return torch.cuda.Stream(device)


class CudaTransfer:
    """Device memory for a batch, and the copy into it on `copy_stream`: a `shardio.loading.prefetch.Transfer`. The
    memory belongs to the CUDA stream that is current when the transfer is made."""

    def __init__(self, slot: PinnedSlot, device: torch.device, copy_stream: torch.cuda.Stream) -> None:
        self.seconds = self.stall_seconds = 0.0
        self._done = self._is_awaited = False
        self._copy_stream = copy_stream
        self._device = device
        self._reserve(slot.parts(len(slot.labels)))

    def _reserve(self, pinned: list[torch.Tensor]) -> None:
        self._owner = torch.cuda.current_stream(self._device)
        # Memory that is allocated in inference mode could be copied into in that mode only, and the next batch may be
        # asked for outside of it.
        with torch.inference_mode(False):
            self._memory = [torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device) for tensor in pinned]
        # When it is done, so is everything that used this memory before. It comes after the allocation, which may
        # itself fill the memory (torch.use_deterministic_algorithms).
        self._free = self._owner.record_event()

    def start(self, slot: Slot, size: int) -> None:
        assert isinstance(slot, PinnedSlot)
        self._begin, self._end, self._wanted = slot.begin, slot.end, slot.wanted
        pinned = slot.parts(size)
        is_alike = len(pinned) == len(self._memory) and all(map(_fits, pinned, self._memory))
        if not is_alike:  # the transform was changed
            self._reserve(pinned)
        self._memory = [memory[: len(tensor)] for memory, tensor in zip(self._memory, pinned, strict=True)]
        # Where each view begins in the pixels, in bytes, its shape and its dtype.
        self._views = [
            (view.ctypes.data - slot.memory.ctypes.data, (size, *view.shape[1:]), torch_dtype(view.dtype.str))
            for view in slot.views
        ]
        self._names, self._size = tuple(slot.more), size
        self._copy_stream.wait_event(self._free)
        try:
            with torch.cuda.stream(self._copy_stream):
                self._begin.record(self._copy_stream)  # after the wait, which does not count
                for memory, tensor in zip(self._memory, pinned, strict=True):
                    _copy(memory, tensor)
                self._end.record(self._copy_stream)
        except BaseException:
            # A Ctrl-C, say. This memory is not handed over, but copies that have begun still write to it.
            self._owner.wait_stream(self._copy_stream)
            raise

    def done(self) -> bool:
        if not self._done and self._end.query():
            # From now on the slot, and its events with it, may be used for another batch.
            self._done = True
            self.seconds = self._begin.elapsed_time(self._end) / 1000
            # A stream that has not come so far yet, after the copy, has not waited for it.
            if self._is_awaited and self._wanted.query():
                self.stall_seconds = max(self._wanted.elapsed_time(self._end), 0.0) / 1000
        return self._done

    def wait(self) -> None:
        if not self._done:
            self._end.synchronize()
            self.done()

    def hand_over(self) -> Tensors:
        pixels, numbers, *more = self._memory
        with torch.inference_mode(False):  # the caller may use them outside of it
            images = [
                pixels[place : place + math.prod(shape) * dtype.itemsize].view(dtype).view(shape).permute(0, 3, 1, 2)
                for place, shape, dtype in self._views
            ]
        labels, indices = numbers[0][: self._size], numbers[1][: self._size]
        consumer = torch.cuda.current_stream(pixels.device)
        if not self._done:  # else the event may be that of another batch by now
            self._wanted.record(consumer)
            self._is_awaited = True
            consumer.wait_event(self._end)
        if consumer != self._owner:
            # When the caller drops the batch, its memory returns to the owner's stream at once, and that knows nothing
            # of the consumer's. This has the allocator wait for the consumer's, too.
            for memory in self._memory:
                memory.record_stream(consumer)
        named = dict(zip(self._names, more, strict=True))
        tensors = Tensors(tuple(images) if len(images) > 1 else images[0], labels, indices, named)
        self._memory = []  # the caller's alone now, so that it returns when the caller drops it
        return tensors


def _fits(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    return (tensor.dtype, tensor.shape[1:]) == (memory.dtype, memory.shape[1:]) and len(tensor) <= len(memory)


def _copy(memory: torch.Tensor, pinned: torch.Tensor) -> None:
    """Copies pinned memory to device memory in pieces of _PIECE_NBYTES, on the current stream. Does not wait."""
    rows = max(_PIECE_NBYTES * len(pinned) // max(pinned.nbytes, 1), 1)
    for start in range(0, len(pinned), rows):
        memory[start : start + rows].copy_(pinned[start : start + rows], non_blocking=True)


def _pinned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns uninitialized pinned memory that begins at a multiple of ALIGNMENT bytes, like all slots."""
    # On the CPU, whatever torch.set_default_device says.
    tensor = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
    if tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    # Small memory, or memory by pinned_use_cuda_host_register. Not always so: torch makes a power of two of every size.
    nbytes = math.prod(shape) * dtype.itemsize
    raw = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device="cpu", pin_memory=True)
    start = -raw.data_ptr() % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).view(shape)


def make_copier(device: torch.device) -> Copier | None:
    """Returns a copier for a CUDA device; None for the CPU."""
    return None if device.type == "cpu" else CudaCopier(device)
