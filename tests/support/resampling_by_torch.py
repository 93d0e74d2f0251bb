"""Resamples boxes of images by operations of torch: the oracle of `_resample.c`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from shardio.augment.batch import computed
from shardio.augment.boxes import Boxes
from shardio.augment.resample import Resampling, axes_of, make_spans, normalized
from shardio.augment.stage import Stage


def resample(
    images: torch.Tensor, boxes: Boxes, flips: NDArray[np.bool_], how: Resampling, *, native: bool = True
) -> torch.Tensor:
    """Returns the boxes of `images` resampled to `how.size`, by the kernel or by torch, and mirrored where `flips`."""
    if native:
        plain = replace(how, statistics=None, dtype=None)
        source = (images.shape[2], images.shape[3], images.shape[1])
        return computed(images, (Stage(len(flips), source, how.size, boxes, None, flips, plain),), how, len(flips))
    images = torch.cat([images] * (len(flips) // len(images)))
    return resample_by_torch(images, make_spans(boxes, boxes, *images.shape[2:]), flips, how)


def resample_by_torch(
    images: torch.Tensor, spans: NDArray[np.float64], flips: NDArray[np.bool_], how: Resampling
) -> torch.Tensor:
    """Returns the boxes with `spans`, from `make_spans`, resampled by operations of torch."""
    if how.cubic is not None:
        ways = (replace(how, interpolation=name, cubic=None) for name in ("bilinear", "bicubic"))
        bilinear, bicubic = (resample_by_torch(images, spans, flips, way) for way in ways)
        return torch.where(torch.from_numpy(how.cubic)[:, None, None, None], bicubic, bilinear)
    axes = torch.from_numpy(axes_of(spans, how.size))
    rows, columns = (
        _weights(axes[:, axis], _most_taps(spans[axis], size, how), limit, size, how)
        for axis, (limit, size) in enumerate(zip(images.shape[2:], how.size, strict=True))
    )
    columns = torch.where(torch.from_numpy(flips)[:, None, None], columns.flip(1), columns)
    # (B, H, W, C) is resampled along the lines first, then along the columns.
    pixels = images.permute(0, 2, 3, 1).double()
    lines = _to_levels(torch.einsum("bxw,bhwc->bhxc", columns, pixels))
    gray = _to_levels(torch.einsum("byh,bhxc->byxc", rows, lines)).to(torch.uint8).permute(0, 3, 1, 2)
    return normalized(gray.contiguous(), how.statistics, how.dtype).contiguous(memory_format=torch.channels_last)


def _to_levels(sums: torch.Tensor) -> torch.Tensor:
    """Rounds `sums` in place to whole numbers from 0 to 255, halves up. Returns `sums`."""
    return sums.add_(0.5).floor_().clamp_(0, 255)


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
