"""SplitTransform and Cut, which find the windows of stored images that a transform needs, before the images are read.

This works because crop boxes depend on random numbers, not on pixels. A SplitTransform has two parts: the transform's
crops, resizes and flips at its beginning, and the rest. A Cut is the first part, applied to a batch: the window of each
image to read, and how to resample the window. For batches on the CPU that are read from mapped memory, the threads that
read images also resample them. Otherwise whole batches of windows are resampled, on the CPU or on CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardio.augment.arguments import is_of_shardio
from shardio.augment.batch import Arrays, Batch, Images, sizes_of
from shardio.augment.boxes import Draws
from shardio.augment.chain import Compose, Container, Piece, Transform, Views, applied
from shardio.augment.masks import Masks
from shardio.augment.resample import Resampling, as_made, make_spans, resample_by_torch, resample_windows
from shardio.augment.transforms import (
    AlternatingFlip,
    CenterCrop,
    HorizontalFlip,
    Normalize,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    ToDtype,
)
from shardio.kernels import resample as kernel
from shardio.kernels.pixels import in_slices
from shardio.kernels.rowcopy import Windows

_FLIPS = (HorizontalFlip, AlternatingFlip)
_CASTS = (Normalize, ToDtype)


@dataclass(frozen=True)
class SplitTransform:
    """A transform in two parts: `head`, which decides which pixels are read, and `rest`, which runs on the result.

    `head` has the crops, resizes and flips at the beginning of the transform, and any Normalize and ToDtype that
    directly follow. `rest` has all other transforms. Threads may share a SplitTransform.
    """

    transform: Transform
    head: tuple[Piece, ...]
    rest: tuple[Piece, ...]

    @classmethod
    def of(cls, transform: Transform) -> SplitTransform | None:
        """Splits a transform. Returns None if the transform cannot be split, or the kernel in C is missing."""
        name = type(transform).__name__
        parts = [*transform.parts(name)] if type(transform) is Compose else [(transform, name)]
        resizes = [type(part) in (RandomResizedCrop, Resize) for part, _ in parts]
        crops = [resizes[i] or _is_crop(part) for i, (part, _) in enumerate(parts)]
        end = 0
        # A second resize needs the pixels of the first.
        while end < len(parts) and (crops[end] or type(parts[end][0]) in _FLIPS) and sum(resizes[: end + 1]) < 2:
            end += 1
        head_crops = any(crops[:end])
        while end < len(parts) and type(parts[end][0]) in _CASTS:
            end += 1
        # Views make the pixels of what they share if it is resized, so nothing is joined with it.
        rest = [part for part, _ in parts[end:] if not (type(part) is Views and any(resizes[:end]))]
        if not kernel.AVAILABLE or not head_crops or not all(map(_keeps_places, rest)):
            return None
        return cls(transform, tuple(parts[:end]), tuple(parts[end:]))

    def cut(
        self,
        draws: Draws,
        shape: tuple[int, int, int],
        sizes: NDArray[np.int64] | None = None,
        whole_lines: int = 0,
    ) -> Cut:
        """Returns the Cut of a batch: the head, applied to the samples of `draws` before their images are read.

        `shape` is the height, width and channels of stored images; for `sizes` see `Transform.__call__`. If
        `whole_lines` is not 0, windows consist of whole lines, and begin and end at line numbers that are multiples of
        `whole_lines`, or at the image's end. Raises the errors of the head's transforms.
        """
        height, width, channels = shape
        # Nothing of the head looks at pixels.
        stand_in = torch.empty((len(draws.counters), channels, height, width), dtype=torch.uint8, device="meta")
        batch = Batch(stand_in, draws, sizes_of(stand_in) if sizes is None else sizes)
        for transform, purpose in self.head:
            batch = transform.apply(batch, purpose)
        return Cut(self, batch, whole_lines)


@dataclass(frozen=True, eq=False)
class Cut:
    """Which windows of a batch's images to read, and how to resample the windows. Threads may share a Cut.

    `batch` has the changes that the head of `split` recorded; its images have a shape but no pixels. For `whole_lines`
    see `SplitTransform.cut`.
    """

    split: SplitTransform
    batch: Batch
    whole_lines: int = 0

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the resampled images. Raises ValueError if they would have several sizes."""
        return self.how.size

    @cached_property
    def how(self) -> Resampling:
        """The size, filter, normalization and dtype to resample to. Raises ValueError if the sizes would differ."""
        return self.batch.resampling

    @property
    def num_channels(self) -> int:
        return self.batch.images.shape[1]

    @property
    def dtype(self) -> Any:
        """The NumPy dtype of the resampled images that `resample` writes: see `Resampling.kernel_dtype`."""
        return self.how.kernel_dtype

    @cached_property
    def windows(self) -> Windows:
        """The pixels of each stored image that the filter reads, extended to whole lines if `whole_lines` is not 0."""
        (tops, lefts), (ends, rights) = (self._spans[:, :, side].astype(np.int64) for side in (2, 3))
        if self.whole_lines:
            height, width = self.batch.images.shape[2:]
            tops = tops // self.whole_lines * self.whole_lines
            ends = np.minimum(-(-ends // self.whole_lines) * self.whole_lines, height)
            lefts, rights = np.zeros_like(lefts), np.full_like(rights, width)
        return Windows(tops, lefts, ends - tops, rights - lefts)

    @cached_property
    def _spans(self) -> NDArray[np.float64]:
        """The spans of the boxes, as from `make_spans`, with limits narrowed to the pixels that the filter reads."""
        batch = self.batch
        region = batch.region
        spans = make_spans(region, batch.within or region, *batch.images.shape[2:])
        for span, side in zip(spans, self.size, strict=True):
            start, length, low, high = span.T
            scale = length / side
            reach = self.how.radius * (np.maximum(scale, 1) if self.how.antialias else 1)
            span[:, 2] = np.maximum(low, np.floor(start - reach))
            span[:, 3] = np.minimum(high, np.ceil(start + length + reach))
        return spans

    def resample(self, pixels: NDArray[np.uint8], some: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Resamples the images whose numbers in the batch are `some`, and writes the results to `out[some]`.

        `pixels`, uint8 (n,), holds the windows of the images `some`, one after the other. `out` is (B, *size, C) of
        `dtype`.
        """
        windows, spans, flips = self.windows[some], self._spans[:, some], self.batch.is_mirrored[some]
        resample_windows(pixels, windows, spans, flips, out, self.how, some)

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """Byte offsets in memory with all windows in a row, int64 (B + 1,): window i is from ends[i] to ends[i + 1]."""
        return np.concatenate([[0], (self.windows.num_pixels * self.num_channels).cumsum()])

    @cached_property
    def parameters(self) -> NDArray[np.float64]:
        """The parameters of the CUDA kernels for each image, float64 (B, 9): see `parameters_of`."""
        from shardio.augment.resample_cuda import parameters_of  # Triton takes its time to import

        return parameters_of(self._spans, self.batch.is_mirrored, self.size)

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """Where the CUDA kernel finds each image in memory with all windows, one after the other, int64 (B, 2).

        The first number is the byte offset where pixel (0, 0) of the image would be, even if the window leaves it out.
        The second number is the number of bytes in a line of the window.
        """
        lines = self.windows.widths * self.num_channels
        firsts = self.ends[:-1] - self.windows.tops * lines - self.windows.lefts * self.num_channels
        return np.stack([firsts, lines], axis=1)

    def works_on(self, device: torch.device) -> bool:
        """Returns whether the CUDA kernel and torch's operations give the same images for this size, filter and dtype.

        The kernel gets windows, torch gets whole images. Both get random pixels, not the pixels of stored images.
        """
        from shardio.augment.resample_cuda import are_kernels_trusted  # Triton takes its time to import
        from shardio.augment.trusted import Compared

        if self.how.cubic is not None:  # the kernel has one filter
            return False

        def compare() -> list[Compared]:
            pictures = np.random.default_rng(0).integers(0, 256, (len(self.batch), *self._shape), np.uint8)
            margin = np.full(margin_of(*self._shape[1:]), 255, np.uint8)
            images = torch.from_numpy(pictures).permute(0, 3, 1, 2).to(device)
            expected = resample_by_torch(images, self._spans, self.batch.is_mirrored, self.how)
            windows = [picture[self.windows.part(i)].reshape(-1) for i, picture in enumerate(pictures)]
            sent = (np.concatenate([margin, *windows, margin]), self.parameters, self.places)
            packed, *told = (torch.from_numpy(array).to(device) for array in sent)
            return [(expected, partial(self.resampled_on_cuda, packed[len(margin) : -len(margin)], *told))]

        return are_kernels_trusted(device, self.batch.images, self.how, compare, packed=True)

    @property
    def _shape(self) -> tuple[int, int, int]:
        channels, height, width = self.batch.images.shape[1:]
        return height, width, channels

    def resampled_on_cuda(self, pixels: torch.Tensor, parameters: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Returns all images, resampled on CUDA, like `resampled`. All three tensors must be on the device.

        `pixels` needs `margin_of` bytes before and after it. `parameters` and `places` are copies of the attributes.
        """
        from shardio.augment.resample_cuda import resample_packed

        return resample_packed(pixels, parameters, places, self._shape, self.how)

    def resampled(self, pixels: torch.Tensor) -> torch.Tensor:
        """Returns all images, resampled, (B, C, *size) in channels_last memory.

        `pixels`, uint8 (n,) on the CPU, holds all windows, one after the other. Runs in as many threads as torch has.
        """
        packed = pixels.numpy()
        out = np.empty((len(self.batch), *self.size, self.num_channels), self.dtype)

        def work(some: slice) -> None:
            first, stop, _ = some.indices(len(out))
            self.resample(packed[self.ends[first] : self.ends[stop]], np.arange(first, stop), out)

        in_slices(len(out), work)
        return as_made(torch.from_numpy(out), self.how).permute(0, 3, 1, 2)

    def finish(
        self, images: torch.Tensor, labels: torch.Tensor | None, masks: Mapping[str, torch.Tensor] | None = None
    ) -> tuple[Images, torch.Tensor | None, Arrays | None]:
        """Applies the rest of the transform. Returns images, labels or None, and masks by name or None.

        `images` are the resampled images, (B, C, *size) in channels_last memory, and may be changed in place. For
        `labels` and `masks` see `Transform.__call__`.
        """
        stand_in = torch.empty((), dtype=torch.uint8, device=images.device).expand(self.batch.images.shape)
        moving = Masks.of(stand_in, masks, self.split.transform.mask_fill)
        batch = replace(self.batch, labels=labels, masks=moving).holding(as_made(images, self.how))
        return applied(self.split.rest, batch)


def margin_of(width: int, channels: int) -> int:
    """Returns the number of bytes that must be readable before and after the windows of images of `width` pixels.

    The CUDA kernel also reads pixels outside of a window, and gives them no weight.
    """
    return -(-2 * width * channels // 256) * 256


def _is_crop(transform: Transform) -> bool:
    """Returns whether the transform crops, and adds no border to any image: a border needs the pixels."""
    if type(transform) is CenterCrop:
        return transform.padding_mode is None
    return type(transform) is RandomCrop and transform.padding is None and not transform.pad_if_needed


def _keeps_places(transform: Transform) -> bool:
    """Returns whether the transform neither crops nor resizes. Returns False for classes from outside of shardio: they
    may crop, even if they inherit from a class of shardio that does not.
    """
    if not is_of_shardio(type(transform)):
        return False
    if isinstance(transform, Container):
        return all(map(_keeps_places, transform.transforms))
    return transform.keeps_places
