"""A box of each picture of a batch, resampled to one size: natively on the CPU, or by operations of torch anywhere.

What comes out is what Pillow's `crop` and `resize` give, within one grey level: an antialiased filter, computed along
the columns and the lines one after the other. Boxes need not be whole pixels, as those in a picture that was squashed.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from shardio.boxes import Boxes

try:
    from shardio import _resample as _native
except ImportError:  # installed without a compiler
    _native = None  # type: ignore[assignment]

Interpolation = Literal["bilinear", "bicubic"]


def resample(
    images: torch.Tensor,
    boxes: Boxes,
    flips: NDArray[np.bool_],
    size: tuple[int, int],
    interpolation: Interpolation = "bilinear",
    *,
    antialias: bool = True,
    native: bool = _native is not None,
) -> torch.Tensor:
    """The boxes of `images`, uint8 (B, C, H, W) on any device, as uint8 (B, C, *size) in channels_last memory.

    Where `flips`, (B,), is true, the result is mirrored. IndexError if a box is not inside its picture. On the CPU the
    native kernel does it, if `native`, in as many threads as torch has.
    """
    if native and images.device.type == "cpu":
        return _resample_natively(images, boxes, flips, size, interpolation, antialias)
    check_boxes(boxes, *images.shape[2:])
    device = images.device
    rows = _weights(boxes.tops, boxes.heights, images.shape[2], size[0], interpolation, antialias).to(device)
    columns = _weights(boxes.lefts, boxes.widths, images.shape[3], size[1], interpolation, antialias).to(device)
    columns = torch.where(torch.from_numpy(flips).to(device)[:, None, None], columns.flip(1), columns)
    # (B, H, W, C): first along the lines, then along the columns.
    pixels = images.permute(0, 2, 3, 1).float()
    lines = torch.einsum("bxw,bhwc->bhxc", columns, pixels)
    result = torch.einsum("byh,bhxc->byxc", rows, lines)
    return result.add_(0.5).clamp_(0, 255).to(torch.uint8).permute(0, 3, 1, 2)


def check_boxes(boxes: Boxes, height: int, width: int) -> None:
    """IndexError unless all of them lie in pictures of this size."""
    slack = 1e-6
    inside = (boxes.tops >= 0) & (boxes.lefts >= 0) & (boxes.heights > 0) & (boxes.widths > 0)
    inside &= (boxes.tops + boxes.heights <= height + slack) & (boxes.lefts + boxes.widths <= width + slack)
    if not inside.all():
        raise IndexError("a box that is not inside its picture")


def _resample_natively(
    images: torch.Tensor,
    boxes: Boxes,
    flips: NDArray[np.bool_],
    size: tuple[int, int],
    interpolation: Interpolation,
    antialias: bool,
) -> torch.Tensor:
    pixels = images.permute(0, 2, 3, 1).contiguous().numpy()
    count, height, width, channels = pixels.shape
    corners = np.stack([boxes.tops, boxes.lefts, boxes.heights, boxes.widths], axis=1)
    mirrored = flips.astype(np.uint8)
    out = np.empty((count, *size, channels), np.uint8)
    shapes = (height, width, channels, *size, interpolation == "bicubic", antialias)

    def work(some: slice) -> None:
        _native.resample(pixels[some], corners[some], mirrored[some], out[some], *shapes)

    threads = min(torch.get_num_threads(), count)
    if threads <= 1:
        work(slice(None))
    else:
        bounds = [count * part // threads for part in range(threads + 1)]
        with ThreadPoolExecutor(threads, thread_name_prefix="shardio-resample") as pool:
            list(pool.map(work, (slice(*pair) for pair in pairwise(bounds))))
    return torch.from_numpy(out).permute(0, 3, 1, 2)


def _weights(
    starts: NDArray[np.float64],
    lengths: NDArray[np.float64],
    limit: int,
    size: int,
    interpolation: Interpolation,
    antialias: bool,
) -> torch.Tensor:
    """Of each output of each picture along one axis, the weights of all inputs: float32 (B, size, limit).

    With `antialias` as Pillow has it: the filter is as wide as what it shrinks, and what would lie outside of the box
    is left out. Without, as torch has it: the pixels at the edge go on.
    """
    radius = 2.0 if interpolation == "bicubic" else 1.0
    scale = (lengths / size)[:, None]
    stretch = np.maximum(scale, 1.0) if antialias else np.ones_like(scale)
    centres = starts[:, None] + (np.arange(size) + 0.5) * scale
    firsts = np.floor(centres - radius * stretch + 0.5)
    lasts = np.floor(centres + radius * stretch + 0.5)
    low = np.floor(starts + 1e-9)[:, None]
    high = np.minimum(np.ceil(starts + lengths - 1e-9)[:, None], limit)
    taps = int((lasts - firsts).max())
    places = firsts[:, :, None] + np.arange(taps)
    weights = _filter((places + 0.5 - centres[:, :, None]) / stretch[:, :, None], interpolation, antialias)
    weights *= places < lasts[:, :, None]
    if antialias:
        weights *= (places >= low[:, :, None]) & (places < high[:, :, None])
    sums = weights.sum(axis=2, keepdims=True)
    places = np.clip(places, low[:, :, None], high[:, :, None] - 1).astype(np.int64)
    weights = np.divide(weights, sums, out=np.zeros_like(weights), where=sums != 0)
    dense = torch.zeros(len(starts), size, limit)
    return dense.scatter_add_(2, torch.from_numpy(places), torch.from_numpy(weights.astype(np.float32)))


def _filter(x: NDArray[np.float64], interpolation: Interpolation, antialias: bool) -> NDArray[np.float64]:
    x = np.abs(x)
    if interpolation == "bilinear":
        return np.maximum(1.0 - x, 0.0)
    # Keys, "Cubic convolution interpolation for digital image processing", 1981.
    a = -0.5 if antialias else -0.75
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))
