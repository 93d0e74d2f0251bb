"""Crop, antialiased resize, flip, normalise and cast of a batch on CUDA: one kernel, written in Triton.

Every output pixel is computed from the stored pixels in registers; nothing is written but the result, in channels_last
memory. Grey levels are those of `shardio.resample`, within one. Without CUDA or Triton, torch's operations do the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from shardio.boxes import Boxes
from shardio.resample import Interpolation, make_spans

try:
    import triton
    import triton.language as tl
except ImportError:  # there are wheels for Linux only; torch for CUDA brings them
    triton = None

# Output pixels of one program.
_BLOCK = 128


def can_fuse(images: torch.Tensor) -> bool:
    """Whether `resample_fused` takes these images."""
    return triton is not None and images.is_cuda and images.shape[1] <= 4 and images.numel() > 0


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _filter(x, A: tl.constexpr, CUBIC: tl.constexpr):  # type: ignore[no-untyped-def]
        x = tl.abs(x)
        near = ((A + 2) * x - (A + 3)) * x * x + 1
        far = (((x - 5) * x + 8) * x - 4) * A
        return tl.where(x < 1, near, tl.where(x < 2, far, 0.0)) if CUBIC else tl.maximum(1 - x, 0.0)

    @triton.jit  # type: ignore[untyped-decorator]
    def _resample(  # type: ignore[no-untyped-def]
        images,
        out,
        parameters,  # of each picture: both spans, and whether it is mirrored
        affine,  # of each channel: what to multiply by, and what to add
        HEIGHT: tl.constexpr,
        WIDTH: tl.constexpr,
        CHANNELS: tl.constexpr,
        OUT_HEIGHT: tl.constexpr,
        OUT_WIDTH: tl.constexpr,
        CUBIC: tl.constexpr,
        ANTIALIAS: tl.constexpr,
        NORMALIZE: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        picture = tl.program_id(0).to(tl.int64)
        pixel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        channel = tl.arange(0, 4)
        inside = (pixel < OUT_HEIGHT * OUT_WIDTH)[:, None] & (channel < CHANNELS)[None, :]
        y = pixel // OUT_WIDTH
        x = pixel % OUT_WIDTH
        mine = parameters + picture * 9
        top, height, low_y, high_y = tl.load(mine), tl.load(mine + 1), tl.load(mine + 2), tl.load(mine + 3)
        left, width, low_x, high_x = tl.load(mine + 4), tl.load(mine + 5), tl.load(mine + 6), tl.load(mine + 7)
        x = tl.where(tl.load(mine + 8) > 0, OUT_WIDTH - 1 - x, x)

        A: tl.constexpr = -0.5 if ANTIALIAS else -0.75
        RADIUS: tl.constexpr = 2 if CUBIC else 1
        scale_y = height / OUT_HEIGHT
        scale_x = width / OUT_WIDTH
        stretch_y = tl.maximum(scale_y, 1.0) if ANTIALIAS else scale_y * 0 + 1
        stretch_x = tl.maximum(scale_x, 1.0) if ANTIALIAS else scale_x * 0 + 1
        centre_y = top + (y + 0.5) * scale_y
        centre_x = left + (x + 0.5) * scale_x
        first_y = tl.floor(centre_y - RADIUS * stretch_y + 0.5)
        first_x = tl.floor(centre_x - RADIUS * stretch_x + 0.5)
        last_y = tl.floor(centre_y + RADIUS * stretch_y + 0.5)
        last_x = tl.floor(centre_x + RADIUS * stretch_x + 0.5)
        taps_y = (2 * RADIUS * stretch_y + 1.999).to(tl.int32)
        taps_x = (2 * RADIUS * stretch_x + 1.999).to(tl.int32)

        image = images + picture * (HEIGHT * WIDTH * CHANNELS)
        sums = tl.zeros([BLOCK, 4], tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for j in range(taps_y):
            at_y = first_y + j
            weight_y = tl.where(at_y < last_y, _filter((at_y + 0.5 - centre_y) / stretch_y, A, CUBIC), 0.0)
            if ANTIALIAS:
                weight_y = tl.where((at_y >= low_y) & (at_y < high_y), weight_y, 0.0)
            row = tl.minimum(tl.maximum(at_y, low_y), high_y - 1).to(tl.int32)
            for i in range(taps_x):
                at_x = first_x + i
                weight_x = tl.where(at_x < last_x, _filter((at_x + 0.5 - centre_x) / stretch_x, A, CUBIC), 0.0)
                if ANTIALIAS:
                    weight_x = tl.where((at_x >= low_x) & (at_x < high_x), weight_x, 0.0)
                column = tl.minimum(tl.maximum(at_x, low_x), high_x - 1).to(tl.int32)
                weight = weight_y * weight_x
                places = ((row * WIDTH + column) * CHANNELS)[:, None] + channel[None, :]
                values = tl.load(image + places, mask=inside & (weight != 0)[:, None], other=0)
                sums += weight[:, None] * values.to(tl.float32)
                total += weight
        grey = sums / tl.where(total == 0, 1.0, total)[:, None]
        grey = tl.floor(tl.minimum(tl.maximum(grey + 0.5, 0.0), 255.0))
        if NORMALIZE:
            known = channel < CHANNELS
            factor = tl.load(affine + channel, mask=known, other=0.0)
            offset = tl.load(affine + CHANNELS + channel, mask=known, other=0.0)
            grey = grey * factor[None, :] + offset[None, :]
        places = (picture * (OUT_HEIGHT * OUT_WIDTH) + pixel)[:, None] * CHANNELS + channel[None, :]
        tl.store(out + places, grey.to(out.dtype.element_ty), mask=inside)


def resample_fused(
    images: torch.Tensor,
    boxes: Boxes,
    within: Boxes,
    flips: NDArray[np.bool_],
    size: tuple[int, int],
    interpolation: Interpolation,
    *,
    antialias: bool,
    statistics: tuple[Sequence[float], Sequence[float]] | None,
    dtype: torch.dtype | None,
) -> torch.Tensor:
    """As `resample`; and with `statistics`, mean and standard deviation of each channel, normalised; and cast.

    (B, C, *size) in channels_last memory: float32 if normalised, or of `dtype`, or else uint8. Does not wait for the
    device. IndexError as `resample`.
    """
    count, channels, height, width = images.shape
    spans = make_spans(boxes, within, height, width)
    packed = np.concatenate([spans[0], spans[1], flips[:, None]], axis=1).astype(np.float32)
    parameters = _to_device(torch.from_numpy(packed), images.device)
    affine = parameters  # of no use
    if statistics is not None:
        mean, std = (torch.tensor(values, dtype=torch.float64) for values in statistics)
        affine = _to_device(torch.cat([1 / (255 * std), -mean / std]).float(), images.device)
    made = dtype or (torch.uint8 if statistics is None else torch.float32)
    pixels = images.permute(0, 2, 3, 1).contiguous()
    out = torch.empty((count, *size, channels), dtype=made, device=images.device)
    grid = (count, -(-size[0] * size[1] // _BLOCK))
    with torch.cuda.device(images.device if images.is_cuda else -1):  # -1: where it is interpreted
        _resample[grid](
            pixels,
            out,
            parameters,
            affine,
            height,
            width,
            channels,
            *size,
            interpolation == "bicubic",
            antialias,
            statistics is not None,
            _BLOCK,
        )
    return out.permute(0, 3, 1, 2)


def _to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """From pinned memory, so that the host does not wait."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
