"""Resamples a box of each image to one size, and normalizes images.

The result equals torch's antialiased `interpolate` of the cropped uint8 images: lines are filtered with weights of 16
bits and rounded to gray levels, then columns are filtered in the same way. Pillow's `crop` and `resize` differ by at
most one gray level. Boxes may have fractional sides, for example in images that were squashed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from shardio.augment.boxes import Boxes
from shardio.kernels import resample as kernel
from shardio.kernels.pixels import in_slices
from shardio.kernels.resample import Planes
from shardio.kernels.rowcopy import Places

Interpolation = Literal["bilinear", "bicubic", "random"]
Statistics = tuple[Sequence[float], Sequence[float]]
"""The mean and the standard deviation of each channel, for pixels from 0 to 1."""


@dataclass(frozen=True)
class Resampling:
    """How to resample boxes: the filter, `size` (height, width), and the normalization and cast of the results."""

    size: tuple[int, int]
    interpolation: Interpolation = "bilinear"
    antialias: bool = True
    statistics: Statistics | None = None
    dtype: torch.dtype | None = None
    cubic: NDArray[np.bool_] | None = field(default=None, compare=False)
    """Where `interpolation` is "random", whether each image is resampled by a bicubic filter, bool (B,)."""

    @property
    def made(self) -> torch.dtype:
        """The dtype of the result: `dtype`; if it is None, float32 with `statistics` and uint8 without."""
        return self.dtype or (torch.uint8 if self.statistics is None else torch.float32)

    @property
    def kernel_dtype(self) -> Any:
        """The NumPy dtype that the kernel in C writes. uint16 stands for the bits of bfloat16: see `as_made`."""
        return _KERNEL_DTYPES.get(self.made, np.uint8 if self.statistics is None else np.float32)

    @property
    def radius(self) -> float:
        """The filter's radius, in pixels of the box; with `antialias`, in pixels of the result if the box shrinks."""
        return 1.0 if self.interpolation == "bilinear" else 2.0


_KERNEL_DTYPES = {
    torch.uint8: np.uint8,
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: np.uint16,  # numpy has no bfloat16
}
# Rounding may put a box beyond its limits by this share of a pixel.
_SLACK = 1e-6


def _affine_of(statistics: Statistics) -> torch.Tensor:
    """Returns a factor and an offset per channel that normalize gray levels: float32 (2, C)."""
    mean, std = (torch.tensor(values, dtype=torch.float64, device="cpu") for values in statistics)
    return torch.stack([1 / (255 * std), -mean / std]).float()


@cache
def affine_on(device: torch.device, mean: tuple[float, ...], std: tuple[float, ...]) -> torch.Tensor:
    """Returns the result of `_affine_of`, copied to the device once: a copy per batch would wait for larger copies."""
    with torch.inference_mode(False):
        # This waits, so any stream may use it.
        return _affine_of((mean, std)).to(device)


def normalized(images: torch.Tensor, statistics: Statistics | None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns (x / 255 - mean) / std of uint8 images x, (B, C, H, W), in their memory format, as float32 or `dtype`.

    If `statistics`, the mean and the std, are None, the images are only cast. Images may be on any device.
    """
    if statistics is None:
        return images if dtype is None else images.to(dtype)
    if images.device.type == "cpu" and images.is_contiguous(memory_format=torch.channels_last):
        how = Resampling((images.shape[2], images.shape[3]), statistics=statistics, dtype=dtype)
        planes = Planes.of_images(images.detach().permute(0, 2, 3, 1).numpy())
        out, lines = np.empty((len(images), *how.size, planes.channels), how.kernel_dtype), np.arange(len(images))
        in_slices(len(out), lambda some: cast_images(planes[some], out, how, lines[some]))
        return as_made(torch.from_numpy(out), how).permute(0, 3, 1, 2)
    factor, offset = affine_on(images.device, *map(tuple, statistics))[:, :, None, None]
    # Rounded after the product, as the kernel in C does it.
    made = images.to(torch.float32).mul_(factor).add_(offset)
    return made if dtype is None else made.to(dtype)


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a small CPU tensor copied to `device`. A copy to CUDA uses pinned memory, so the host does not wait."""
    if device.type != "cuda":
        return values.to(device)
    with torch.cuda.device(device):
        return values.pin_memory().to(device, non_blocking=True)


def make_spans(boxes: Boxes, within: Boxes, height: int, width: int) -> NDArray[np.float64]:
    """Returns the spans of boxes, float64 (2, B, 4): [0] for rows, [1] for columns.

    A span is the start and the length of a box, and the limits low and high of `within`, in pixels. The filter reads no
    pixel outside of the limits. Raises IndexError if a box is not inside its limits, or the limits are not inside an
    image of `height` and `width`.
    """
    spans = []
    for limit, start, length, low, room in (
        (height, boxes.tops, boxes.heights, within.tops, within.heights),
        (width, boxes.lefts, boxes.widths, within.lefts, within.widths),
    ):
        high = low + room
        inside = (length > 0) & (low >= 0) & (start >= low - _SLACK)
        inside &= (start + length <= high + _SLACK) & (high <= limit + _SLACK)
        if not inside.all():
            i = int(np.argmin(inside))
            box = ", ".join(f"{values[i]:g}" for values in (boxes.tops, boxes.lefts, boxes.heights, boxes.widths))
            raise IndexError(
                f"the box of image {i} is not inside its image of {height} x {width} pixels, or not inside its limits; "
                f"found top, left, height, width = {box}"
            )
        # Rounding may have moved a limit slightly off a whole pixel.
        spans.append(np.stack([start, length, np.floor(low + 1e-9), np.minimum(np.ceil(high - 1e-9), limit)], axis=1))
    return np.stack(spans)


def axes_of(spans: NDArray[np.float64], size: tuple[int, int]) -> NDArray[np.float64]:
    """Returns `spans` as axes, float64 (B, 2, 4): start, scale, low and high along rows, and along columns.

    The scale is the length divided by the side of `size`.
    """
    axes = spans.transpose(1, 0, 2).copy()
    axes[:, :, 1] /= size
    return axes


def as_made(images: torch.Tensor, how: Resampling) -> torch.Tensor:
    """Returns images that the kernel in C wrote as dtype `how.made`: uint16 viewed as bfloat16, other dtypes cast.

    Without normalization and cast, images are returned as they are.
    """
    if how.made == torch.uint8:
        return images
    return images.view(how.made) if images.dtype == torch.uint16 else images.to(how.made)


def resample(
    planes: Planes,
    spans: NDArray[np.float64],
    flips: NDArray[np.bool_],
    out: NDArray[Any],
    how: Resampling,
    lines: Places = None,
    part: NDArray[np.int64] | None = None,
) -> None:
    """Resamples a box of each image to `how.size` in the calling thread, and writes the results to `out`.

    `spans` come from `make_spans`, with limits inside the windows of `planes`.
    `out` is (n, *size, C) of `how.kernel_dtype`. If `lines` is not None, result i becomes `out[lines[i]]`. `part` (by
    default `lines`) are the numbers of the images in the batch of `how.cubic`. Raises IndexError if a box is not inside
    its window, and OSError if a page of a mapped file cannot be read.
    """
    same = ((0.0,) * out.shape[3], (1 / 255,) * out.shape[3])
    affine = None if out.dtype == np.uint8 else _affine(*map(tuple, how.statistics or same))
    cubic = how.interpolation == "bicubic" if how.cubic is None else how.cubic[lines if part is None else part]
    axes = axes_of(spans, how.size)
    kernel.resample(planes, axes, flips, out, affine, cubic=cubic, antialias=how.antialias, lines=lines)


def cast_images(planes: Planes, out: NDArray[Any], how: Resampling, lines: NDArray[np.int64]) -> None:
    """Writes whole images, normalized and cast as `how` says, to `out[lines]`, in the calling thread."""
    height, width = out.shape[1:3]
    whole = Boxes.whole(len(planes), height, width)
    plain = Resampling((height, width), statistics=how.statistics, dtype=how.dtype)
    spans, flips = make_spans(whole, whole, height, width), np.zeros(len(planes), bool)
    resample(planes, spans, flips, out, plain, lines)


@cache
def _affine(mean: tuple[float, ...], std: tuple[float, ...]) -> NDArray[np.float32]:
    values: NDArray[np.float32] = _affine_of((mean, std)).numpy()
    return values
