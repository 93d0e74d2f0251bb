"""Crop, antialiased resize, flip, normalise and cast of a batch on CUDA: one kernel, written in Triton.

Every line of the output is computed from stored lines in registers; nothing is written but the result, in channels_last
memory. Grey levels are those of `shardio.augment.resample`, within one. Without CUDA or Triton, torch's operations do
the same.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from shardio.augment.boxes import Boxes
from shardio.augment.resample import Interpolation, Statistics, affine_of, make_spans, to_device
from shardio.errors import printable
from shardio.system.caller import warn_caller
from shardio.system.eager import is_recorded

try:
    import triton
    import triton.language as tl
except Exception:  # there are wheels for Linux only; torch for CUDA brings them
    triton = None

# The most bytes of a line: the registers of one program hold some lines.
_MOST_NBYTES = 2048
# Lines of the output that one program makes.
_ROWS = 4


def can_fuse(images: torch.Tensor, size: tuple[int, int]) -> bool:
    """Tells whether `resample_fused` can make pictures of this size from these images."""
    line_nbytes = images.shape[1] * max(images.shape[3], size[1])
    fits = images.is_cuda and line_nbytes <= _MOST_NBYTES and images.numel() > 0
    return fits and triton is not None and not is_recorded(images) and _works(images.device)


@cache
def _works(device: torch.device) -> bool:
    """Tries once whether Triton can make a kernel for this device. It needs a C compiler, for one thing."""
    try:
        whole = Boxes.whole(1, 2, 2)
        images = torch.zeros(1, 3, 2, 2, dtype=torch.uint8, device=device)
        resample_fused(
            images, whole, whole, np.zeros(1, bool), (2, 2), "bilinear", antialias=True, statistics=None, dtype=None
        )
    except Exception as error:
        text = f"Triton does not work on {device}: images are resampled by torch's operations, which is slower: {error}"
        warn_caller(printable(text))
        return False
    return True


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
        ROWS: tl.constexpr,
        IN_BLOCK: tl.constexpr,
        OUT_BLOCK: tl.constexpr,
    ):
        """Makes ROWS lines of the output. The weights along them are the same for all, and made once."""
        picture = tl.program_id(0).to(tl.int64)
        y = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        mine = parameters + picture * 9
        top, height, low_y, high_y = tl.load(mine), tl.load(mine + 1), tl.load(mine + 2), tl.load(mine + 3)
        left, width, low_x, high_x = tl.load(mine + 4), tl.load(mine + 5), tl.load(mine + 6), tl.load(mine + 7)
        A: tl.constexpr = -0.5 if ANTIALIAS else -0.75
        RADIUS: tl.constexpr = 2 if CUBIC else 1

        # Along the columns first, as lines are read best: what may be seen of lines of the picture, in float32.
        scale = height / OUT_HEIGHT
        stretch = tl.maximum(scale, 1.0) if ANTIALIAS else scale * 0 + 1
        shrink = 1 / stretch
        centre = top + (y + 0.5) * scale
        first = tl.floor(centre - RADIUS * stretch + 0.5)
        last = tl.floor(centre + RADIUS * stretch + 0.5)
        place = tl.arange(0, IN_BLOCK)
        # These are multiples of 16 bytes, so that the compiler can load as many at once.
        begin = (low_x.to(tl.int32) * CHANNELS) // 16 * 16
        end = (high_x.to(tl.int32) * CHANNELS + 15) // 16 * 16
        seen = (place >= begin) & (place < end) & (place < WIDTH * CHANNELS)
        image = images + picture * (HEIGHT * WIDTH * CHANNELS)
        lines = tl.zeros([ROWS, IN_BLOCK], tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for j in range((2 * RADIUS * stretch + 1.999).to(tl.int32)):
            at = first + j
            weight = tl.where(at < last, _filter((at + 0.5 - centre) * shrink, A, CUBIC), 0.0)
            if ANTIALIAS:
                weight = tl.where((at >= low_y) & (at < high_y), weight, 0.0)
            row = tl.minimum(tl.maximum(at, low_y), high_y - 1).to(tl.int32)
            places = (row * (WIDTH * CHANNELS))[:, None] + place[None, :]
            pixels = tl.load(image + places, mask=seen[None, :], other=0)
            lines += weight[:, None] * pixels.to(tl.float32)
            total += weight
        lines = lines / tl.where(total == 0, 1.0, total)[:, None]

        # Then along the lines. What is gathered from one axis goes through shared memory; from two axes, it would be
        # searched for in the registers of a warp.
        flat = tl.reshape(lines, [ROWS * IN_BLOCK])
        row_starts = tl.arange(0, ROWS) * IN_BLOCK
        lane = tl.arange(0, OUT_BLOCK)
        x = lane // CHANNELS
        channel = lane % CHANNELS
        x = tl.where(tl.load(mine + 8) > 0, OUT_WIDTH - 1 - x, x)
        scale = width / OUT_WIDTH
        stretch = tl.maximum(scale, 1.0) if ANTIALIAS else scale * 0 + 1
        shrink = 1 / stretch
        centres = left + (x + 0.5) * scale
        firsts = tl.floor(centres - RADIUS * stretch + 0.5)
        lasts = tl.floor(centres + RADIUS * stretch + 0.5)
        sums = tl.zeros([ROWS, OUT_BLOCK], tl.float32)
        totals = tl.zeros([OUT_BLOCK], tl.float32)
        for i in range((2 * RADIUS * stretch + 1.999).to(tl.int32)):
            ats = firsts + i
            weights = tl.where(ats < lasts, _filter((ats + 0.5 - centres) * shrink, A, CUBIC), 0.0)
            if ANTIALIAS:
                weights = tl.where((ats >= low_x) & (ats < high_x), weights, 0.0)
            columns = tl.minimum(tl.maximum(ats, low_x), high_x - 1).to(tl.int32)
            chosen = row_starts[:, None] + (columns * CHANNELS + channel)[None, :]
            pixels = tl.gather(flat, tl.reshape(chosen, [ROWS * OUT_BLOCK]), 0)
            sums += weights[None, :] * tl.reshape(pixels, [ROWS, OUT_BLOCK])
            totals += weights
        grey = sums / tl.where(totals == 0, 1.0, totals)[None, :]
        grey = tl.floor(tl.minimum(tl.maximum(grey + 0.5, 0.0), 255.0))
        if NORMALIZE:
            grey = grey * tl.load(affine + channel)[None, :] + tl.load(affine + CHANNELS + channel)[None, :]
        inside = (y < OUT_HEIGHT)[:, None] & (lane < OUT_WIDTH * CHANNELS)[None, :]
        places = ((picture * OUT_HEIGHT + y) * (OUT_WIDTH * CHANNELS))[:, None] + lane[None, :]
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
    statistics: Statistics | None,
    dtype: torch.dtype | None,
) -> torch.Tensor:
    """Does what `resample` does, and casts the result to `dtype`, without waiting for the device.

    Returns (B, C, *size) in channels_last memory: of `dtype`, or else float32 if normalised, or else uint8. Raises
    IndexError as `resample` does.
    """
    count, channels, height, width = images.shape
    spans = make_spans(boxes, within, height, width)
    packed = np.concatenate([spans[0], spans[1], flips[:, None]], axis=1).astype(np.float32)
    parameters = to_device(torch.from_numpy(packed), images.device)
    affine = parameters  # the kernel does not read it
    if statistics is not None:
        affine = to_device(affine_of(statistics), images.device)
    made = dtype or (torch.uint8 if statistics is None else torch.float32)
    pixels = images.permute(0, 2, 3, 1).contiguous()
    out = torch.empty((count, *size, channels), dtype=made, device=images.device)
    with torch.cuda.device(images.device if images.is_cuda else -1):  # -1: where it is interpreted
        _resample[(count, -(-size[0] // _ROWS))](
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
            _ROWS,
            triton.next_power_of_2(width * channels),
            triton.next_power_of_2(size[1] * channels),
        )
    return out.permute(0, 3, 1, 2)
