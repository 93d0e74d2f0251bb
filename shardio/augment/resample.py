"""Resamples a box of each image to one size: by a kernel in C on the CPU, or by operations of torch on any device.

The result equals torch's antialiased `interpolate` of the cropped uint8 images: lines are filtered with weights of 16
bits and rounded to gray levels, then columns are filtered in the same way. Pillow's `crop` and `resize` differ by at
most one gray level. The kernel in C, torch's operations and the kernels on CUDA give the same bytes. Boxes may have
fractional sides, for example in images that were squashed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from shardio.augment.boxes import Boxes
from shardio.kernels import resample as kernel
from shardio.kernels.pixels import in_slices
from shardio.kernels.rowcopy import Places, Windows

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

    @property
    def of_each_filter(self) -> tuple[Resampling, Resampling]:
        """Two copies of this: all images bilinear, and all images bicubic."""
        first, second = (replace(self, interpolation=name, cubic=None) for name in get_args(Interpolation)[:2])
        return first, second


_KERNEL_DTYPES = {
    torch.uint8: np.uint8,
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: np.uint16,  # numpy has no bfloat16
}
# What torch's operations may take for images that they do at once.
_MOST_NBYTES = 256 << 20
# Rounding may put a box beyond its limits by this share of a pixel.
_SLACK = 1e-6


def resample(
    images: torch.Tensor,
    boxes: Boxes,
    flips: NDArray[np.bool_],
    how: Resampling,
    *,
    within: Boxes | None = None,
    native: bool = kernel.AVAILABLE,
) -> torch.Tensor:
    """Returns the boxes of `images` resampled, (B, C, *how.size) of dtype `how.made`, in channels_last memory.

    `images` are uint8 (n, C, H, W), on any device. If there are more boxes, the batch is repeated. The result is
    mirrored where `flips`, bool (B,), is true. The filter reads no pixel outside of `within`, boxes around `boxes`
    (default: `boxes`). Raises IndexError if a box is not inside its image, or not inside `within`. With `native`, the
    kernel in C does the work on the CPU, in as many threads as torch has.
    """
    spans = make_spans(boxes, within or boxes, *images.shape[2:])
    if native and images.device.type == "cpu":
        return _resample_natively(images, spans, flips, how)
    return resample_by_torch(repeated(images, len(flips)), spans, flips, how)


def repeated(images: torch.Tensor, count: int) -> torch.Tensor:
    """Returns `count` images: the batch, repeated as a whole as often as needed."""
    return images if len(images) == count else torch.cat([images] * (count // len(images)))


def resample_by_torch(
    images: torch.Tensor, spans: NDArray[np.float64], flips: NDArray[np.bool_], how: Resampling
) -> torch.Tensor:
    """Returns the result of `resample`, computed by operations of torch. `spans` come from `make_spans`."""
    if how.cubic is not None:
        return chosen(how.cubic, *(resample_by_torch(images, spans, flips, one) for one in how.of_each_filter))
    nbytes = _nbytes_of_a_picture(images, how.size)
    if len(images) * nbytes <= _MOST_NBYTES:
        return _resample_at_once(images, spans, flips, how)
    shape = (len(images), *how.size, images.shape[1])
    out = torch.empty(shape, dtype=how.made, device=images.device).permute(0, 3, 1, 2)
    many = max(_MOST_NBYTES // nbytes, 1)
    for first in range(0, len(images), many):
        some = slice(first, first + many)
        out[some] = _resample_at_once(images[some], spans[:, some], flips[some], how)
    return out


def resample_onto(
    images: torch.Tensor,
    boxes: Boxes,
    flips: NDArray[np.bool_],
    how: Resampling,
    sizes: NDArray[np.int64],
    firsts: NDArray[np.int64],
    *,
    within: Boxes | None = None,
    native: bool = kernel.AVAILABLE,
) -> torch.Tensor:
    """Resamples each box to a size of its own. Returns a window of each result, uint8 (B, C, *how.size).

    `sizes`, int64 (B, 2), are the heights and widths of the results. Windows begin at row and column `firsts`, int64
    (B, 2), which may be negative. Pixels outside of the result are black. For other arguments see `resample`.
    """
    # The part of an image that is mirrored in the end.
    mirrored = sizes[:, 1] - firsts[:, 1] - how.size[1]
    firsts = np.stack([firsts[:, 0], np.where(flips, mirrored, firsts[:, 1])], axis=1)
    spans = make_spans(boxes, within or boxes, *images.shape[2:])
    out = torch.zeros((len(flips), *how.size, images.shape[1]), dtype=torch.uint8, device=images.device)

    def work(some: slice) -> None:
        for i in range(*some.indices(len(flips))):
            one, to, size, first = slice(i, i + 1), i % len(images), tuple(sizes[i].tolist()), tuple(firsts[i].tolist())
            image = images[to : to + 1]
            if native and image.device.type == "cpu":
                pixels = image.permute(0, 2, 3, 1).contiguous().numpy()
                window = np.array([[0, 0, *images.shape[2:]]])
                cubic = how.interpolation == "bicubic" if how.cubic is None else how.cubic[one]
                given = pixels, window, axes_of(spans[:, one], size), np.zeros(1, bool), out[one].numpy()
                kernel.resample_windows(*given, cubic=cubic, antialias=how.antialias, resized=size, first=first)
                continue
            mine = replace(how, size=size, cubic=None if how.cubic is None else how.cubic[one])
            made = resample_by_torch(image, spans[:, one], np.zeros(1, bool), mine).permute(0, 2, 3, 1)
            part = made[0, max(first[0], 0) :, max(first[1], 0) :]
            to_part = out[i, max(-first[0], 0) :, max(-first[1], 0) :]
            height, width = (min(*pair) for pair in zip(part.shape[:2], to_part.shape[:2], strict=True))
            to_part[:height, :width] = part[:height, :width]

    in_slices(len(flips), work)
    which = to_device(torch.from_numpy(flips), out.device)[:, None, None, None]
    return torch.where(which, out.flip(2), out).permute(0, 3, 1, 2)


def chosen(which: NDArray[np.bool_], images: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Returns `images`, replaced by `others` where `which`, bool (B,), is true."""
    return torch.where(to_device(torch.from_numpy(which), images.device)[:, None, None, None], others, images)


def _nbytes_of_a_picture(images: torch.Tensor, size: tuple[int, int]) -> int:
    """Returns the bytes that torch's operations need for an image.

    They hold three stages in float64, and a copy of each stage with the axes in the order of a matrix product."""
    channels, height, width = images.shape[1:]
    return 16 * channels * (height * width + height * size[1] + size[0] * size[1])


def _resample_at_once(
    images: torch.Tensor, spans: NDArray[np.float64], flips: NDArray[np.bool_], how: Resampling
) -> torch.Tensor:
    # Sums of pixels times weights of 16 bits are exact in float64, and not in float32. MPS has no float64.
    exact = torch.float32 if images.device.type == "mps" else torch.float64
    axes = to_device(torch.from_numpy(axes_of(spans, how.size)).to(exact), images.device)
    rows, columns = (
        _weights(axes[:, axis], _most_taps(spans[axis], size, how), limit, size, how)
        for axis, (limit, size) in enumerate(zip(images.shape[2:], how.size, strict=True))
    )
    mirrored = to_device(torch.from_numpy(flips), images.device)
    columns = torch.where(mirrored[:, None, None], columns.flip(1), columns)
    # (B, H, W, C) is resampled along the lines first, then along the columns.
    pixels = images.permute(0, 2, 3, 1).to(exact)
    with torch.autocast(images.device.type, enabled=False):  # which would do this in 8 bits
        lines = _to_levels(torch.einsum("bxw,bhwc->bhxc", columns, pixels))
        gray = _to_levels(torch.einsum("byh,bhxc->byxc", rows, lines)).to(torch.uint8).permute(0, 3, 1, 2)
    return normalized(gray, how.statistics, how.dtype, native=False)


def _to_levels(sums: torch.Tensor) -> torch.Tensor:
    """Rounds `sums` in place to whole numbers from 0 to 255, halves up. Returns `sums`."""
    return sums.add_(0.5).floor_().clamp_(0, 255)


def affine_of(statistics: Statistics) -> torch.Tensor:
    """Returns a factor and an offset per channel that normalize gray levels: float32 (2, C)."""
    mean, std = (torch.tensor(values, dtype=torch.float64, device="cpu") for values in statistics)
    return torch.stack([1 / (255 * std), -mean / std]).float()


@cache
def affine_on(device: torch.device, mean: tuple[float, ...], std: tuple[float, ...]) -> torch.Tensor:
    """Returns the result of `affine_of`, copied to the device once: a copy per batch would wait for larger copies."""
    with torch.inference_mode(False):
        # This waits, so any stream may use it.
        return affine_of((mean, std)).to(device)


def normalized(
    images: torch.Tensor,
    statistics: Statistics | None,
    dtype: torch.dtype | None = None,
    *,
    native: bool = kernel.AVAILABLE,
) -> torch.Tensor:
    """Returns (x / 255 - mean) / std of uint8 images x, (B, C, H, W), in their memory format, as float32 or `dtype`.

    If `statistics`, the mean and the std, are None, the images are only cast.
    """
    if statistics is None:
        return images if dtype is None else images.to(dtype)
    is_last = images.is_contiguous(memory_format=torch.channels_last)
    if native and images.device.type == "cpu" and is_last:
        size = (images.shape[2], images.shape[3])
        whole = Boxes.whole(len(images), *size)
        how = Resampling(size, statistics=statistics, dtype=dtype)
        return _resample_natively(images.detach(), make_spans(whole, whole, *size), np.zeros(len(images), bool), how)
    factor, offset = to_device(affine_of(statistics), images.device)[:, :, None, None]
    # Rounded after the product, as the kernels in C do it.
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

    The scale is the length divided by the side of `size`. It is computed here for all devices: to divide by a number,
    torch on CUDA multiplies by its inverse, which may round differently.
    """
    axes = spans.transpose(1, 0, 2).copy()
    axes[:, :, 1] /= size
    return axes


def _resample_natively(
    images: torch.Tensor, spans: NDArray[np.float64], flips: NDArray[np.bool_], how: Resampling
) -> torch.Tensor:
    pixels = images.permute(0, 2, 3, 1).contiguous().numpy()
    count, height, width, channels = pixels.shape
    none = np.zeros(len(flips), np.int64)
    whole = Windows.of_one_size(height, width, none, none)
    out = np.empty((len(flips), *how.size, channels), how.kernel_dtype)

    def work(some: slice) -> None:
        first, stop, _ = some.indices(count)
        for start in range(0, len(flips), count):
            to = slice(start + first, start + stop)
            resample_windows(pixels[some], whole[to], spans[:, to], flips[to], out[to], how, part=to)

    in_slices(count, work)
    return as_made(torch.from_numpy(out), how).permute(0, 3, 1, 2)


def as_made(images: torch.Tensor, how: Resampling) -> torch.Tensor:
    """Returns images that the kernel in C wrote as dtype `how.made`: uint16 viewed as bfloat16, other dtypes cast."""
    return images.view(how.made) if images.dtype == torch.uint16 else images.to(how.made)


def resample_windows(
    pixels: NDArray[np.uint8],
    windows: Windows,
    spans: NDArray[np.float64],
    flips: NDArray[np.bool_],
    out: NDArray[Any],
    how: Resampling,
    lines: Places = None,
    part: slice | None = None,
) -> None:
    """Resamples a window of each image like `resample`, by the kernel in C in the calling thread, into `out`.

    `pixels` holds the windows, one after the other. `spans` come from `make_spans`, with limits inside the windows.
    `out` is (n, *size, C) of `how.kernel_dtype`. If `lines` is not None, result i becomes `out[lines[i]]`. `part` (by
    default `lines`) are the numbers of the images in the batch of `how.cubic`. Raises IndexError if a box is not inside
    its window.
    """
    sides = np.stack([windows.tops, windows.lefts, windows.heights, windows.widths], axis=1)
    same = ((0.0,) * out.shape[3], (1 / 255,) * out.shape[3])
    affine = None if out.dtype == np.uint8 else _affine(*map(tuple, how.statistics or same))
    cubic = how.interpolation == "bicubic" if how.cubic is None else how.cubic[lines if part is None else part]
    axes = axes_of(spans, how.size)
    antialias = how.antialias
    kernel.resample_windows(pixels, sides, axes, flips, out, affine, cubic=cubic, antialias=antialias, lines=lines)


@cache
def _affine(mean: tuple[float, ...], std: tuple[float, ...]) -> NDArray[np.float32]:
    values: NDArray[np.float32] = affine_of((mean, std)).numpy()
    return values


def _most_taps(spans: NDArray[np.float64], size: int, how: Resampling) -> int:
    """Returns an upper bound of the number of input pixels that an output pixel depends on, along one axis."""
    largest = float(spans[:, 1].max(initial=0)) / size
    return int(2 * how.radius * (max(largest, 1.0) if how.antialias else 1.0)) + 2


def _weights(axes: torch.Tensor, taps: int, limit: int, size: int, how: Resampling) -> torch.Tensor:
    """Returns the weight of each input pixel for each output pixel along one axis, (B, size, limit).

    The weights of an image are rounded to multiples of 2^-n, with the largest n for which they fit in 16 bits. With
    `how.antialias`, the filter widens if the scale is above 1, and leaves out pixels outside of its limits. Otherwise
    the pixels at the limits are repeated outside.
    """
    starts, scale, low, high = (values[:, None] for values in axes.unbind(1))
    stretch = scale.clamp(min=1.0) if how.antialias else torch.ones_like(scale)
    centers = starts + (torch.arange(size, device=axes.device) + 0.5) * scale
    firsts = torch.floor(centers - how.radius * stretch + 0.5)
    lasts = torch.floor(centers + how.radius * stretch + 0.5)
    places = firsts[:, :, None] + torch.arange(taps, device=axes.device)
    weights = _filter((places - centers[:, :, None] + 0.5) * (1 / stretch)[:, :, None], how)
    weights = weights * (places < lasts[:, :, None])
    if how.antialias:
        weights = weights * ((places >= low[:, :, None]) & (places < high[:, :, None]))
    places = torch.minimum(torch.maximum(places, low[:, :, None]), high[:, :, None] - 1).long()
    dense = torch.zeros(len(axes), size, limit, dtype=axes.dtype, device=axes.device)
    dense = dense.scatter_add_(2, places, weights)
    # Added one after the other, as in C: sums of doubles depend on the order.
    total = torch.zeros_like(weights[:, :, 0])
    for tap in range(taps):
        total = total + weights[:, :, tap]
    shares = torch.nan_to_num(dense / total[:, :, None])
    largest = shares.abs().amax(dim=(1, 2), keepdim=True)
    unit = torch.ones_like(largest)
    for n in range(1, 23):
        unit = torch.where(largest * 2.0**n + 0.5 < 2**15, 2.0**n, unit)
    return (shares.abs() * unit + 0.5).floor() * shares.sign() / unit


def _filter(x: torch.Tensor, how: Resampling) -> torch.Tensor:
    x = x.abs()
    if how.interpolation == "bilinear":
        return (1.0 - x).clamp(min=0.0)
    # Keys, "Cubic convolution interpolation for digital image processing", 1981.
    a = -0.5 if how.antialias else -0.75
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
