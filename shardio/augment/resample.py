"""Resamples a box of each image to one size: by a kernel in C on the CPU, or by operations of torch on any device.

The result equals Pillow's `crop` and `resize` within one grey level: an antialiased filter, applied first along one
axis and then along the other. Boxes may have fractional sides, as in images that were squashed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from shardio.augment.boxes import Boxes
from shardio.kernels import pixels as pixels_kernel
from shardio.kernels import resample as kernel
from shardio.kernels.pixels import in_slices
from shardio.kernels.rowcopy import Windows
from shardio.system.eager import is_recorded

Interpolation = Literal["bilinear", "bicubic"]
Statistics = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation of each channel, of pixels from 0 to 1."""


@dataclass(frozen=True)
class Resampling:
    """How to resample boxes: to `size`, height and width, then normalized by `statistics` and cast to `dtype`."""

    size: tuple[int, int]
    interpolation: Interpolation = "bilinear"
    antialias: bool = True
    statistics: Statistics | None = None
    dtype: torch.dtype | None = None

    @property
    def made(self) -> torch.dtype:
        """The dtype of the result: float32 if it is normalized and not cast."""
        return self.dtype or (torch.uint8 if self.statistics is None else torch.float32)

    @property
    def radius(self) -> float:
        """The radius of the filter, in pixels of the box or of the result, whichever are larger."""
        return 2.0 if self.interpolation == "bicubic" else 1.0


# What torch's operations may take for images that they do at once.
_MOST_NBYTES = 256 << 20
# Rounding may put a box beyond its limits by this share of a pixel.
_SLACK = 1e-6


def resample(
    images: torch.Tensor,
    boxes: Boxes,
    flips: NDArray[np.bool_],
    size: tuple[int, int],
    interpolation: Interpolation = "bilinear",
    *,
    antialias: bool = True,
    within: Boxes | None = None,
    statistics: Statistics | None = None,
    native: bool = kernel.AVAILABLE,
) -> torch.Tensor:
    """Returns the boxes of `images` resampled to `size`, uint8 (B, C, *size) in channels_last memory.

    `images` are uint8 (B, C, H, W), on any device. Where `flips`, (B,), is true, the result is mirrored. With
    `statistics`, it is normalized float32. The filter reads no pixel outside of `within`, boxes around `boxes`
    (default: `boxes`). Raises IndexError if a box is not inside its image, or not inside `within`. With `native`, the
    kernel in C does the work on the CPU, in as many threads as torch has.
    """
    spans = make_spans(boxes, within or boxes, *images.shape[2:])
    how = Resampling(size, interpolation, antialias, statistics)
    # torch.export records operations of torch, and no kernel of ours.
    if native and images.device.type == "cpu" and not is_recorded(images):
        return _resample_natively(images, spans, flips, how)
    nbytes = _nbytes_of_a_picture(images, size)
    # What is recorded holds for batches of any size.
    if is_recorded(images) or len(images) * nbytes <= _MOST_NBYTES:
        return _resample_by_torch(images, spans, flips, how)
    out = torch.empty((len(images), *size, images.shape[1]), dtype=how.made, device=images.device).permute(0, 3, 1, 2)
    many = max(_MOST_NBYTES // nbytes, 1)
    for first in range(0, len(images), many):
        some = slice(first, first + many)
        out[some] = _resample_by_torch(images[some], spans[:, some], flips[some], how)
    return out


def _nbytes_of_a_picture(images: torch.Tensor, size: tuple[int, int]) -> int:
    """Returns the bytes that torch's operations need for an image.

    They hold three stages in float32, and a copy of each stage with the axes in the order of a matrix product."""
    channels, height, width = images.shape[1:]
    return 8 * channels * (height * width + height * size[1] + size[0] * size[1])


def _resample_by_torch(
    images: torch.Tensor, spans: NDArray[np.float64], flips: NDArray[np.bool_], how: Resampling
) -> torch.Tensor:
    # MPS has no float64.
    exact = torch.float32 if images.device.type == "mps" else torch.float64
    rows, columns = (
        _weights(there, _most_taps(span, side, how), limit, side, how)
        for span, limit, side in zip(spans, images.shape[2:], how.size, strict=True)
        for there in [to_device(torch.from_numpy(span).to(exact), images.device)]
    )
    mirrored = to_device(torch.from_numpy(flips), images.device)
    columns = torch.where(mirrored[:, None, None], columns.flip(1), columns)
    # (B, H, W, C) is resampled along the lines first, then along the columns.
    pixels = images.permute(0, 2, 3, 1).to(torch.float32)
    with torch.autocast(images.device.type, enabled=False):  # which would do this in 8 bits
        lines = torch.einsum("bxw,bhwc->bhxc", columns, pixels)
        result = torch.einsum("byh,bhxc->byxc", rows, lines)
    grey = result.add_(0.5).clamp_(0, 255).to(torch.uint8).permute(0, 3, 1, 2)
    return grey if how.statistics is None else normalized(grey, how.statistics, native=False)


def affine_of(statistics: Statistics) -> torch.Tensor:
    """Returns the factors and offsets that normalize grey levels, for each channel: float32 (2, C)."""
    mean, std = (torch.tensor(values, dtype=torch.float64, device="cpu") for values in statistics)
    return torch.stack([1 / (255 * std), -mean / std]).float()


def normalized(images: torch.Tensor, statistics: Statistics, *, native: bool = pixels_kernel.AVAILABLE) -> torch.Tensor:
    """Returns (x / 255 - mean) / std of uint8 images, (B, C, H, W), as float32, in the memory format of `images`."""
    is_last = images.is_contiguous(memory_format=torch.channels_last)
    if native and images.device.type == "cpu" and is_last and not is_recorded(images):
        pixels = images.detach().permute(0, 2, 3, 1).numpy()
        return torch.from_numpy(pixels_kernel.normalize(pixels, affine_of(statistics).numpy())).permute(0, 3, 1, 2)
    factor, offset = to_device(affine_of(statistics), images.device)[:, :, None, None]
    # Rounded after the product, as the kernels in C do it.
    return images.to(torch.float32).mul_(factor).add_(offset)


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a small CPU tensor copied to `device`. A copy to CUDA uses pinned memory, so the host does not wait."""
    if device.type != "cuda":
        return values.to(device)
    with torch.cuda.device(device):
        return values.pin_memory().to(device, non_blocking=True)


def make_spans(boxes: Boxes, within: Boxes, height: int, width: int) -> NDArray[np.float64]:
    """Returns the boxes as spans, (2, B, 4): start, length, low and high, for rows and columns and each image.

    Low and high are the limits from `within`: the filter reads no pixel outside of them. Raises IndexError if a box is
    not inside its limits, or the limits are not inside an image of this size.
    """
    spans = []
    for limit, start, length, low, room in (
        (height, boxes.tops, boxes.heights, within.tops, within.heights),
        (width, boxes.lefts, boxes.widths, within.lefts, within.widths),
    ):
        high = low + room
        inside = (length > 0) & (low >= 0) & (start >= low - _SLACK)
        if not (inside & (start + length <= high + _SLACK) & (high <= limit + _SLACK)).all():
            raise IndexError("a box that is not inside its image")
        # A limit that rounding has put beside a whole pixel is that pixel.
        spans.append(np.stack([start, length, np.floor(low + 1e-9), np.minimum(np.ceil(high - 1e-9), limit)], axis=1))
    return np.stack(spans)


def _resample_natively(
    images: torch.Tensor, spans: NDArray[np.float64], flips: NDArray[np.bool_], how: Resampling
) -> torch.Tensor:
    pixels = images.permute(0, 2, 3, 1).contiguous().numpy()
    count, height, width, channels = pixels.shape
    none = np.zeros(count, np.int64)
    whole = Windows.alike(height, width, none, none)
    out = np.empty((count, *how.size, channels), np.uint8 if how.statistics is None else np.float32)

    def work(some: slice) -> None:
        resample_windows(pixels[some], whole[some], spans[:, some], flips[some], out[some], how)

    in_slices(count, work)
    return torch.from_numpy(out).permute(0, 3, 1, 2)


def resample_windows(
    pixels: NDArray[np.uint8],
    windows: Windows,
    spans: NDArray[np.float64],
    flips: NDArray[np.bool_],
    out: NDArray[Any],
    how: Resampling,
) -> None:
    """Does what `resample` does, from windows of images, by the kernel in C in the calling thread.

    `pixels` holds the windows, one after the other. `spans` come from `make_spans`, with limits inside the windows.
    `out` is uint8 (B, *size, C), float32 with mean and std. Raises IndexError if a box is not inside its window.
    """
    sides = np.stack([windows.tops, windows.lefts, windows.heights, windows.widths], axis=1)
    affine = None if how.statistics is None else affine_of(how.statistics).numpy()
    cubic = how.interpolation == "bicubic"
    kernel.resample_windows(pixels, sides, spans, flips, out, affine, cubic=cubic, antialias=how.antialias)


def _most_taps(spans: NDArray[np.float64], size: int, how: Resampling) -> int:
    """Returns an upper bound of the number of input pixels that an output pixel depends on, along one axis."""
    largest = float(spans[:, 1].max(initial=0)) / size
    return int(2 * how.radius * (max(largest, 1.0) if how.antialias else 1.0)) + 2


def _weights(spans: torch.Tensor, taps: int, limit: int, size: int, how: Resampling) -> torch.Tensor:
    """Returns the weights of all inputs for each output of each image along one axis: float32 (B, size, limit).

    With `antialias`, the filter widens with the scale and leaves out pixels outside of its limits, as in Pillow.
    Without, the pixels at the edge are repeated outside, as in torch.
    """
    starts, lengths, low, high = (values[:, None] for values in spans.unbind(1))
    scale = lengths / size
    stretch = scale.clamp(min=1.0) if how.antialias else torch.ones_like(scale)
    centres = starts + (torch.arange(size, device=spans.device) + 0.5) * scale
    firsts = torch.floor(centres - how.radius * stretch + 0.5)
    lasts = torch.floor(centres + how.radius * stretch + 0.5)
    places = firsts[:, :, None] + torch.arange(taps, device=spans.device)
    weights = _filter((places + 0.5 - centres[:, :, None]) / stretch[:, :, None], how)
    weights = weights * (places < lasts[:, :, None])
    if how.antialias:
        weights = weights * ((places >= low[:, :, None]) & (places < high[:, :, None]))
    weights = torch.nan_to_num(weights / weights.sum(dim=2, keepdim=True))
    places = torch.minimum(torch.maximum(places, low[:, :, None]), high[:, :, None] - 1).long()
    dense = torch.zeros(len(spans), size, limit, dtype=torch.float32, device=spans.device)
    return dense.scatter_add_(2, places, weights.to(torch.float32))


def _filter(x: torch.Tensor, how: Resampling) -> torch.Tensor:
    x = x.abs()
    if how.interpolation == "bilinear":
        return (1.0 - x).clamp(min=0.0)
    # Keys, "Cubic convolution interpolation for digital image processing", 1981.
    a = -0.5 if how.antialias else -0.75
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
