"""A split in the memory of the device: brought there once; from then on batches are gathered where they are used.

reader -> gather threads -> slots -> device, in large pieces, once; then numbers of rows -> device -> batch

What a sample has of one kind is a row of bytes in a `Rows`. Rows are gathered in words of up to 8 bytes, whatever their
type is: so one way serves all types, also those that torch has few operations for, and a GPU reads more than a byte at
a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from shardio.augment.resample import to_device
from shardio.format.layout import RowType, SampleShape
from shardio.loading.device import memory_free, synchronize, use_on_this_stream
from shardio.loading.parts import Parts
from shardio.loading.prefetch import Tensors, torch_dtype
from shardio.order.orders import StoredOrder, Subset
from shardio.order.sampler import Sampler
from shardio.order.windows import Crop
from shardio.system.amounts import bytes_text

# So much is brought to the device at once: long enough for disk and bus, and the slots under way take little memory.
_PIECE_NBYTES = 16 << 20

_NUMBER = RowType("<i8", ())


class Rows:
    """Values of one type in the memory of a device, one for each sample."""

    def __init__(self, num_rows: int, row: RowType, device: torch.device) -> None:
        self._shape = row.shape
        self._dtype = torch_dtype(row.dtype)
        # Memory that is allocated in inference mode could be written in that mode only.
        with torch.inference_mode(False):
            self.memory = torch.empty((num_rows, row.nbytes), dtype=torch.uint8, device=device)

    def put(self, start: int, values: torch.Tensor) -> None:
        """Copies values into the rows from `start` on."""
        rows = self.memory[start : start + len(values)]
        rows.view(self._dtype).view(len(values), *self._shape).copy_(values)

    def take(self, numbers: torch.Tensor) -> torch.Tensor:
        """Returns a copy of the rows of these numbers."""
        found = _in_words(self.memory).index_select(0, numbers)
        return found.view(self._dtype).view(len(numbers), *self._shape)

    def take_windows(self, numbers: torch.Tensor, windows: DeviceWindows) -> torch.Tensor:
        """Returns a copy of a window of each of these rows, which are pictures: (height, width, ...)."""
        pictures = _in_words(self.memory.view(len(self.memory), *self._shape[:2], -1))
        lines = windows.tops[:, None] + torch.arange(windows.height, device=numbers.device)
        columns = windows.lefts[:, None] + torch.arange(windows.width, device=numbers.device)
        found = pictures[numbers[:, None, None], lines[:, :, None], columns[:, None, :]].contiguous()
        return found.view(self._dtype).view(*found.shape[:3], *self._shape[2:])


def _in_words(memory: torch.Tensor) -> torch.Tensor:
    """Returns a view of uint8 memory: the bytes of its last side, as the largest integers that they can be cut into."""
    for word in (torch.int64, torch.int32, torch.int16):
        if memory.shape[-1] % word.itemsize == 0:
            return memory.view(word)
    return memory


class DeviceWindows(NamedTuple):
    """One window for each of some samples, all of the same size; `tops` and `lefts`, int64 (B,), are on the device."""

    height: int
    width: int
    tops: torch.Tensor
    lefts: torch.Tensor


def crop_boxes_there(boxes: torch.Tensor, windows: DeviceWindows) -> None:
    """Does what `shardio.order.windows.crop_boxes` does, on the device. The host does not wait."""
    for axis, (places, most) in enumerate(((windows.lefts, windows.width), (windows.tops, windows.height))):
        boxes[:, :, axis:4:2].sub_(places[:, None, None]).clamp_(0, most)
    left, top, right, bottom, label = boxes.unbind(2)
    lost = ~((label >= 0) & (right - left >= 1) & (bottom - top >= 1))
    boxes[:, :, :4].masked_fill_(lost[:, :, None], 0)
    boxes[:, :, 4].masked_fill_(lost, -1)


class _Tables(NamedTuple):
    images: Rows
    labels: Rows
    indices: Rows | None
    """The samples' own numbers, where rows are not all samples in order."""
    more: Mapping[str, Rows]

    def use_here(self, device: torch.device) -> None:
        """Has the memory, once it is freed, wait for what the current stream is given until then."""
        for rows in (self.images, self.labels, self.indices, *self.more.values()):
            if rows is not None:
                use_on_this_stream(rows.memory, device)


class Resident:
    """The samples that a loader may draw, in its device's memory, which is taken when this is made.

    They are those in `indices`, or all `num_samples` of a split, in stored order. To be used by one thread, but for
    `clear`.
    """

    is_filled = False

    def __init__(
        self,
        what: str,
        num_samples: int,
        indices: NDArray[np.int64] | None,
        parts: Parts,
        shape: SampleShape,
        crop: Crop | None,
        device: torch.device,
    ) -> None:
        """Pixels are stored in `shape`, and `crop` is what batches hold of them, if not all. Raises MemoryError, which
        names `what`, if the device has too little memory left."""
        self._samples = samples = None if indices is None else np.unique(indices)
        self._parts = parts
        self._crop = crop
        self._device = device
        self.num_rows = num_samples if samples is None else len(samples)
        images, more = RowType("|u1", shape), parts.rows(shape)
        numbers = [_NUMBER] if samples is None else [_NUMBER, _NUMBER]
        row_nbytes = sum(row.nbytes for row in (images, *numbers, *more.values()))
        self.nbytes = self.num_rows * row_nbytes
        piece_size = min(max(_PIECE_NBYTES // row_nbytes, 1), self.num_rows)
        stored = StoredOrder(self.num_rows)
        self.sampler = Sampler(stored if samples is None else Subset(stored, samples), piece_size, tail="short")
        """The pieces that `fill` wants, as batches."""

        def rows(row: RowType) -> Rows:
            return Rows(self.num_rows, row, device)

        free = memory_free(device)
        try:
            if free is not None and self.nbytes > free:
                raise torch.cuda.OutOfMemoryError
            self._tables: _Tables | None = _Tables(
                rows(images),
                rows(_NUMBER),
                None if samples is None else rows(_NUMBER),
                {name: rows(row) for name, row in more.items()},
            )
        except torch.cuda.OutOfMemoryError:  # perhaps there is enough of it, but not in one piece
            raise MemoryError(
                f'resident="device": {what}: {self.num_rows:,} samples take {bytes_text(self.nbytes)}, and {device} '
                f"has {bytes_text(free or 0)} left: take smaller pictures (images_from=, or crop= in the centre), "
                "fewer of them (indices=), or leave out resident"
            ) from None

    def fill(self, take: Callable[[], Tensors]) -> None:
        """Brings all samples to the device: `take` returns one piece after the other."""
        tables = self._opened()
        # What another stream was given before this memory was freed may still use it; and from the end on, batches may
        # be gathered on any stream.
        synchronize(self._device)
        tables.use_here(self._device)
        start = 0
        while start < self.num_rows:
            piece = take()
            tables.images.put(start, piece.images.permute(0, 2, 3, 1))
            tables.labels.put(start, piece.labels)
            if tables.indices is not None:
                tables.indices.put(start, piece.indices)
            for name, rows in tables.more.items():
                rows.put(start, piece.more[name])
            start += len(piece.labels)
        synchronize(self._device)
        self.is_filled = True

    def gather(self, indices: NDArray[np.int64], epoch: int) -> Tensors:
        """Returns the samples `indices`, or the windows of this epoch of them, in new memory of the current stream."""
        tables = self._opened()
        tables.use_here(self._device)
        host = [indices if self._samples is None else np.searchsorted(self._samples, indices)]
        if self._crop is not None:
            cut = self._crop.windows(epoch, indices)
            host += [cut.tops, cut.lefts]
        numbers, *places = to_device(torch.from_numpy(np.stack(host)), self._device)
        windows = DeviceWindows(self._crop.height, self._crop.width, *places) if self._crop is not None else None

        def take(rows: Rows, *, of_pictures: bool) -> torch.Tensor:
            return rows.take(numbers) if windows is None or not of_pictures else rows.take_windows(numbers, windows)

        more = {name: take(rows, of_pictures=name in self._parts.masks) for name, rows in tables.more.items()}
        if windows is not None:
            for name in self._parts.boxes:
                crop_boxes_there(more[name], windows)
        return Tensors(
            take(tables.images, of_pictures=True).permute(0, 3, 1, 2),
            tables.labels.take(numbers),
            numbers if tables.indices is None else tables.indices.take(numbers),
            more,
        )

    def _opened(self) -> _Tables:
        tables = self._tables  # another thread may close the loader meanwhile
        if tables is None:
            raise RuntimeError("this ShardLoader was closed")
        return tables

    def clear(self) -> None:
        """Gives the memory back, as soon as the device has done what it was given. May be called again."""
        self._tables = None
