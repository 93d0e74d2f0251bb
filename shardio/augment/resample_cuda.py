"""Crop, antialiased resize, flip, normalize and cast of a batch on CUDA: one kernel, written in Triton.

A program computes some lines of a tile of the output. It filters the matching part of each stored line that the tile
needs, in registers, and adds the result to the output lines. Each warp reads 32 adjacent bytes, mostly from the
first-level cache. Only the result is written, in channels_last memory. So the width and the alignment of lines do not
matter, and one compiled kernel serves all sizes. Grey levels differ from `shardio.augment.resample` by at most one, and
rarely by two, as torch rounds weights to 16 bits and the kernel does not. `shardio.augment.trusted` compares the kernel
with torch's operations, which replace it where it does not work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from shardio.augment.boxes import Boxes
from shardio.augment.resample import Resampling, affine_on, make_spans, resample_bounds, to_device
from shardio.augment.trusted import MOST_COMPARED, Compared, fits, is_trusted, triton

if triton is not None:
    import triton.language as tl

# Grey levels of each channel, side by side, that one program makes of a line.
_LANES = 256
# Lines of the output that are made at once, and how many times over: the weights along the lines are made once for all.
_ROWS = 4
_PASSES = 4
# The most weights along a line that are kept in registers. More are computed for every stored line: taps are 0 then.
_MOST_KEPT = 8


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _filter(x, A: tl.constexpr, CUBIC: tl.constexpr):  # type: ignore[no-untyped-def]
        x = tl.abs(x)
        near = ((A + 2) * x - (A + 3)) * x * x + 1
        far = (((x - 5) * x + 8) * x - 4) * A
        return tl.where(x < 1, near, tl.where(x < 2, far, 0.0)) if CUBIC else tl.maximum(1 - x, 0.0)

    @triton.jit  # type: ignore[untyped-decorator]
    def _weight(at, centre, shrink, low, high, A: tl.constexpr, CUBIC: tl.constexpr, ANTIALIAS: tl.constexpr):  # type: ignore[no-untyped-def]
        """Returns the weight of a pixel: 0 if the filter does not reach it."""
        weight = _filter((at + 0.5 - centre) * shrink, A, CUBIC)
        return tl.where((at >= low) & (at < high), weight, 0.0) if ANTIALIAS else weight

    @triton.jit  # type: ignore[untyped-decorator]
    def _total(  # type: ignore[no-untyped-def]
        first,
        centre,
        shrink,
        low,
        high,
        most_taps,
        A: tl.constexpr,
        TAPS: tl.constexpr,
        CUBIC: tl.constexpr,
        ANTIALIAS: tl.constexpr,
        LANES: tl.constexpr,
    ):
        """Returns the sum of the weights along a line."""
        total = tl.zeros([LANES], tl.float32)
        if TAPS:
            for t in tl.static_range(TAPS):
                total += _weight(first + t, centre, shrink, low, high, A, CUBIC, ANTIALIAS)
        else:
            for t in range(most_taps):
                total += _weight(first + t, centre, shrink, low, high, A, CUBIC, ANTIALIAS)
        return total

    @triton.jit  # type: ignore[untyped-decorator]
    def _shifted(grey, CUBIC: tl.constexpr):  # type: ignore[no-untyped-def]
        """Returns rounded grey levels plus 1.5 * 2^23, where all floats are whole numbers.

        Callers add 2^-13 before, so that halves are rounded up.
        """
        if CUBIC:  # a mean of pixels is between them
            grey = tl.minimum(tl.maximum(grey, 0.0), 255.0)
        return grey + 12582912.0

    @triton.jit  # type: ignore[untyped-decorator]
    def _filtered(  # type: ignore[no-untyped-def]
        line,
        first,
        centre,
        shrink,
        share,
        low,
        high,
        channel,
        most_taps,
        A: tl.constexpr,
        CHANNELS: tl.constexpr,
        TAPS: tl.constexpr,
        CUBIC: tl.constexpr,
        ANTIALIAS: tl.constexpr,
        LANES: tl.constexpr,
    ):
        """Returns a stored line filtered along it, in grey levels. What depends only on TAPS leaves the loops."""
        begin = first.to(tl.int32) * CHANNELS + channel
        grey = tl.zeros([LANES], tl.float32) + 0.0001220703125
        if TAPS:
            for t in tl.static_range(TAPS):
                weight = _weight(first + t, centre, shrink, low, high, A, CUBIC, ANTIALIAS)
                place = line + begin + t * CHANNELS  # with `t` as a constant of the load
                if not ANTIALIAS:  # the pixel at the edge is repeated outside
                    column = tl.minimum(tl.maximum(first + t, low), high - 1).to(tl.int32)
                    place = line + column * CHANNELS + channel
                grey = tl.fma(tl.load(place).to(tl.float32), weight * share, grey)
        else:
            for t in range(most_taps):
                weight = _weight(first + t, centre, shrink, low, high, A, CUBIC, ANTIALIAS)
                pixel = tl.load(line + begin + t * CHANNELS).to(tl.float32)
                grey = tl.fma(pixel, weight * share, grey)
        return _shifted(grey, CUBIC) - 12582912.0

    @triton.jit  # type: ignore[untyped-decorator]
    def _columns(  # type: ignore[no-untyped-def]
        x, left, wide, width, out_width, most_taps, CUBIC: tl.constexpr, ANTIALIAS: tl.constexpr
    ):
        """Returns, for output columns, the filter's center, 1 / its stretch, and the first pixel that it reads."""
        RADIUS: tl.constexpr = 2 if CUBIC else 1
        scale = wide / out_width
        stretch = tl.maximum(scale, 1.0) if ANTIALIAS else scale * 0 + 1
        centre = left + (x + 0.5) * scale
        first = tl.floor(centre - RADIUS * stretch + 0.5)
        if ANTIALIAS:  # All taps are read, also those without a weight: none may lie outside of the line.
            first = tl.minimum(tl.maximum(first, 0.0), (width - most_taps).to(tl.float32))
        return centre, 1 / stretch, first

    @triton.jit(do_not_specialize=["height", "width", "out_height", "out_width", "most_taps"])  # type: ignore[untyped-decorator]
    def _resample(  # type: ignore[no-untyped-def]
        images,
        out,
        parameters,  # of each image: both spans, and whether it is mirrored
        places,  # of each image, where it is PACKED: its first byte, which need not be there, and the bytes of a line
        affine,  # of each channel: what to multiply by, and what to add
        height,
        width,
        out_height,
        out_width,
        most_taps,
        CHANNELS: tl.constexpr,
        TAPS: tl.constexpr,  # `most_taps`, or 0 where they are too many to keep their weights
        CUBIC: tl.constexpr,
        ANTIALIAS: tl.constexpr,
        NORMALIZE: tl.constexpr,
        PACKED: tl.constexpr,
        ROWS: tl.constexpr,
        PASSES: tl.constexpr,
        LANES: tl.constexpr,
    ):
        """Makes ROWS * PASSES lines of a tile."""
        A: tl.constexpr = -0.5 if ANTIALIAS else -0.75
        RADIUS: tl.constexpr = 2 if CUBIC else 1
        tiles = tl.cdiv(out_width * CHANNELS, LANES)
        blocks = tl.cdiv(out_height, ROWS * PASSES)
        number = tl.program_id(0)
        lane = number % tiles * LANES + tl.arange(0, LANES)
        block = number // tiles % blocks
        picture = (number // tiles // blocks).to(tl.int64)
        mine = parameters + picture * 9
        top, tall, low_y, high_y = tl.load(mine), tl.load(mine + 1), tl.load(mine + 2), tl.load(mine + 3)
        left, wide, low_x, high_x = tl.load(mine + 4), tl.load(mine + 5), tl.load(mine + 6), tl.load(mine + 7)

        # Along the lines: where each lane begins to read, and by what its sum is multiplied.
        channel = lane % CHANNELS
        x = lane // CHANNELS
        x = tl.where(tl.load(mine + 8) > 0, out_width - 1 - x, x)
        centre, shrink, first = _columns(x, left, wide, width, out_width, most_taps, CUBIC, ANTIALIAS)
        total = _total(first, centre, shrink, low_x, high_x, most_taps, A, TAPS, CUBIC, ANTIALIAS, LANES)
        share = 1 / tl.where(total == 0, 1.0, total)
        if PACKED:
            image = images + tl.load(places + 2 * picture)
            stride = tl.load(places + 2 * picture + 1).to(tl.int32)
        else:
            image = images + picture * (height * width * CHANNELS)
            stride = width * CHANNELS
        if NORMALIZE:
            factor, offset = tl.load(affine + channel), tl.load(affine + CHANNELS + channel)

        scale_y = tall / out_height
        stretch_y = tl.maximum(scale_y, 1.0) if ANTIALIAS else scale_y * 0 + 1
        shrink_y = 1 / stretch_y
        reach = RADIUS * stretch_y
        for y in range(block * (ROWS * PASSES), tl.minimum((block + 1) * (ROWS * PASSES), out_height), ROWS):
            ys = y + tl.arange(0, ROWS)
            centres = top + (ys + 0.5) * scale_y
            low = tl.floor(top + (y + 0.5) * scale_y - reach + 0.5)
            high = tl.floor(top + (tl.minimum(y + ROWS, out_height) - 0.5) * scale_y + reach + 0.5)
            if ANTIALIAS:
                low, high = tl.maximum(low, low_y), tl.minimum(high, high_y)
            sums = tl.zeros([ROWS, LANES], tl.float32)
            totals = tl.zeros([ROWS], tl.float32)
            for row in range(low.to(tl.int32), high.to(tl.int32)):
                at = row + 0.0
                line = image + tl.minimum(tl.maximum(at, low_y), high_y - 1).to(tl.int32) * stride
                grey = _filtered(
                    line,
                    first,
                    centre,
                    shrink,
                    share,
                    low_x,
                    high_x,
                    channel,
                    most_taps,
                    A,
                    CHANNELS,
                    TAPS,
                    CUBIC,
                    ANTIALIAS,
                    LANES,
                )
                weights = _filter((at + 0.5 - centres) * shrink_y, A, CUBIC)
                sums = tl.fma(weights[:, None], grey[None, :], sums)
                totals += weights
            shares = 1 / tl.where(totals == 0, 1.0, totals)
            grey = _shifted(tl.fma(sums, shares[:, None], 0.0001220703125), CUBIC)
            there = ((picture * out_height + ys) * (out_width * CHANNELS))[:, None] + lane[None, :]
            inside = (ys < out_height)[:, None] & (lane < out_width * CHANNELS)[None, :]
            # A comparison of types is a plain bool before Triton 3.4, and the `and` of a kernel does not take it.
            if NORMALIZE:
                grey = (grey - 12582912.0) * factor[None, :] + offset[None, :]
                tl.store(out + there, grey.to(out.dtype.element_ty), mask=inside)
            elif out.dtype.element_ty == tl.uint8:
                tl.store(out + there, grey.to(tl.int32, bitcast=True).to(tl.uint8), mask=inside)
            else:
                tl.store(out + there, (grey - 12582912.0).to(out.dtype.element_ty), mask=inside)


def resample_if_trusted(
    images: torch.Tensor, boxes: Boxes, within: Boxes, flips: NDArray[np.bool_], how: Resampling
) -> torch.Tensor | None:
    """Returns the result of `resample_fused`; None if the kernel cannot make it, or is not trusted."""
    spans = make_spans(boxes, within, *images.shape[2:])

    def compare() -> list[Compared]:
        some = images[:MOST_COMPARED], spans[:, :MOST_COMPARED], flips[:MOST_COMPARED], how
        return [(*resample_bounds(*some), partial(resample_fused, *some))]

    if not is_kernel_trusted(images.device, images, how, compare):
        return None
    return resample_fused(images, spans, flips, how)


def is_kernel_trusted(
    device: torch.device,
    images: torch.Tensor,
    how: Resampling,
    compare: Callable[[], Sequence[Compared]],
    *,
    packed: bool = False,
) -> bool:
    """Returns whether the kernel can resample such images, and does it as torch's operations do: see `is_trusted`.

    With `packed`, for the kernel of `resample_packed`. `images` need not be on the device.
    """
    count, channels, _, width = images.shape
    taps, normalizes = _kept_taps(_most_taps(width, how)), how.statistics is not None
    variant = (channels, taps, how.interpolation, how.antialias, normalizes, how.made, packed)
    does_fit = fits(images, how.size, count * _programs_of_an_image(how.size, channels))
    return does_fit and is_trusted(("resample", device, variant), compare, how.statistics)


def resample_fused(
    images: torch.Tensor, spans: NDArray[np.float64], flips: NDArray[np.bool_], how: Resampling
) -> torch.Tensor:
    """Returns the images resampled as by `resample`, and cast, (B, C, *size) in channels_last memory.

    `spans` come from `make_spans`. The host does not wait for the device.
    """
    pixels = images.permute(0, 2, 3, 1).contiguous()
    parameters = to_device(torch.from_numpy(parameters_of(spans, flips)), images.device)
    _, height, width, channels = pixels.shape
    return resample_packed(pixels, parameters, None, (height, width, channels), how)


def parameters_of(spans: NDArray[np.float64], flips: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Returns the kernel's parameters for each image, (B, 9), from the spans of `make_spans`."""
    return np.concatenate([spans[0], spans[1], flips[:, None]], axis=1).astype(np.float32)


def _programs_of_an_image(size: tuple[int, int], channels: int) -> int:
    return -(-size[0] // (_ROWS * _PASSES)) * -(-size[1] * channels // _LANES)


def _most_taps(width: int, how: Resampling) -> int:
    """Returns an upper bound of the number of stored pixels of a line that an output pixel depends on.

    It depends on sizes, not on boxes, so a training on images of one size compiles one kernel.
    """
    if not how.antialias:
        return int(2 * how.radius)
    return min(math.ceil(2 * how.radius * max(width / how.size[1], 1.0)), width)


def _kept_taps(most: int) -> int:
    """Returns the number of taps whose weights are kept in registers: all, or none."""
    return most if most <= _MOST_KEPT else 0


def resample_packed(
    pixels: torch.Tensor,
    parameters: torch.Tensor,
    places: torch.Tensor | None,
    shape: tuple[int, int, int],
    how: Resampling,
) -> torch.Tensor:
    """Returns windows of images resampled as by `resample_fused`, or whole images if `places` is None.

    `pixels`, uint8, holds the windows, with `cut.margin_of` bytes before and after them. `shape` is the height, width
    and channels of the images. `parameters` come from `parameters_of`. `places`, int64 (B, 2), has for each image the
    byte where its pixel (0, 0) would lie, even if outside of `pixels`, and the bytes of a line of its window.
    """
    count, (height, width, channels) = len(parameters), shape
    most_taps = _most_taps(width, how)
    taps = _kept_taps(most_taps)
    # Without statistics, the kernel does not read the affine, and may get any float32 memory.
    affine = parameters if how.statistics is None else affine_on(pixels.device, how.statistics)
    out = torch.empty((count, *how.size, channels), dtype=how.made, device=pixels.device)
    with torch.cuda.device(pixels.device if pixels.is_cuda else -1):  # -1: where it is interpreted
        _resample[(count * _programs_of_an_image(how.size, channels),)](
            pixels,
            out,
            parameters,
            parameters if places is None else places,  # the kernel does not read the former
            affine,
            height,
            width,
            *how.size,
            most_taps,
            channels,
            taps,
            how.interpolation == "bicubic",
            how.antialias,
            how.statistics is not None,
            places is not None,
            _ROWS,
            _PASSES,
            _LANES,
            # One warp has eight lanes a thread: as few programs compute the weights along the columns.
            num_warps=1 if 0 < taps <= 4 else 2,
            # Normalized pixels are rounded after the product, as torch's operations do it; the sums say where not.
            enable_fp_fusion=False,
            # Sixteen programs on a multiprocessor: some releases of Triton take 163 registers without need. Four taps
            # would not fit, and AMD's Triton does not know the option.
            **({"maxnreg": 128} if 0 < taps < 4 and torch.version.hip is None else {}),
        )
    return out.permute(0, 3, 1, 2)
