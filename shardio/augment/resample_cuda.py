"""Crop, antialiased resize, flip, normalize and cast of a batch on CUDA: two kernels, written in Triton.

`weigh` computes the weights of each image like the C kernel: in float64, rounded to 16 bits. Then a program of
`resample` computes some lines of a tile of the output. It filters the matching part of each stored line that the tile
needs, in registers, and adds the result to the output lines. Each warp reads 32 adjacent bytes, mostly from the
first-level cache. Only the result is written, in channels_last memory. So the width and the alignment of lines do not
matter, and one compiled kernel serves all sizes. Sums are integers, so the results equal `shardio.augment.resample` to
the bit. `shardio.augment.trusted` compares the kernels with torch's operations, and uses torch's if they differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from shardio.augment.boxes import Boxes
from shardio.augment.resample import Resampling, affine_on, axes_of, make_spans, resample_by_torch, to_device
from shardio.augment.trusted import MOST_COMPARED, Compared, fits, is_trusted, triton

# Arguments that compile no kernel of their own.
_SIZES = ["height", "width", "out_height", "out_width", "most_rows", "most_columns"]
# Gray levels of each channel, side by side, that one program makes of a line.
LANES = 256
# Lines of the output that are made at once, and how many times over: the weights along the lines are loaded once.
ROWS = 4
PASSES = 4
# The most weights along a line that are kept in registers. More are loaded for every stored line: taps are 0 then.
_MOST_KEPT = 8
# Outputs weighed at once by a program of `weigh`.
WEIGHED = 128

if triton is not None:
    import triton.language as tl

    # Weights are whole numbers of 2^-_BITS. Sums with pixels are less than 2^31: the magnitudes of an output's weights
    # add up to less than 2, also with bicubic filters.
    _BITS = tl.constexpr(22)
    _ONE = tl.constexpr(1 << 22)
    _LANES, _ROWS, _PASSES, _WEIGHED = (tl.constexpr(number) for number in (LANES, ROWS, PASSES, WEIGHED))

    @triton.jit  # type: ignore[untyped-decorator]
    def _filter(x, A: tl.constexpr, CUBIC: tl.constexpr):  # type: ignore[no-untyped-def]
        x = tl.abs(x)
        near = ((A + 2) * x - (A + 3)) * x * x + 1
        far = ((A * x - 5 * A) * x + 8 * A) * x - 4 * A
        return tl.where(x < 1, near, tl.where(x < 2, far, 0.0)) if CUBIC else tl.maximum(1 - x, 0.0)

    @triton.jit  # type: ignore[untyped-decorator]
    def _weight(  # type: ignore[no-untyped-def]
        at, begin, center, inverse, low, high, A: tl.constexpr, CUBIC: tl.constexpr, ANTIALIAS: tl.constexpr
    ):
        """Returns the weight of pixel `at` in the filter that starts at `begin`; 0 if the filter does not read it."""
        if ANTIALIAS:
            weight = tl.where((at >= low) & (at < high), _filter((at - center + 0.5) * inverse, A, CUBIC), 0.0)
        else:  # the pixel at the edge is repeated outside
            weight = at * 0
            for tap in tl.static_range(4 if CUBIC else 2):
                there = begin + tap
                is_here = tl.minimum(tl.maximum(there, low), high - 1) == at
                weight += tl.where(is_here, _filter(there - center + 0.5, A, CUBIC), 0.0)
        return weight

    @triton.jit(do_not_specialize=_SIZES)  # type: ignore[untyped-decorator]
    def weigh(  # type: ignore[no-untyped-def]
        parameters,  # of each image: start, scale, low and high of both axes, and whether it is mirrored
        table,
        height,
        width,
        out_height,
        out_width,
        most_rows,
        most_columns,
        CUBIC: tl.constexpr,
        ANTIALIAS: tl.constexpr,
    ):
        """Writes the filters of one axis of an image to `table`: per output, its first pixel, end and weights.

        The operations and their order are as in _resample.c, so that rounding is the same.
        """
        A: tl.constexpr = -0.5 if ANTIALIAS else -0.75
        RADIUS: tl.constexpr = 2 if CUBIC else 1
        picture = (tl.program_id(0) // 2).to(tl.int64)
        axis = tl.program_id(0) % 2
        mine = parameters + picture * 9 + axis * 4
        start, scale, low, high = tl.load(mine), tl.load(mine + 1), tl.load(mine + 2), tl.load(mine + 3)
        is_mirrored = tl.load(parameters + picture * 9 + 8) * axis > 0
        side = height + axis * (width - height)
        size = out_height + axis * (out_width - out_height)
        most = most_rows + axis * (most_columns - most_rows)
        rows = out_height * (2 + most_rows)
        entries = table + picture * (rows + out_width * (2 + most_columns)) + axis * rows
        shrink = tl.maximum(scale, 1.0) if ANTIALIAS else scale * 0 + 1
        inverse = 1 / shrink
        unit = scale * 0 + 1
        # The first pass finds the largest weight, which decides how the second pass rounds.
        for _pass in range(2):
            largest = tl.zeros([_WEIGHED], tl.float64)
            for block in range(0, size, _WEIGHED):
                number = block + tl.arange(0, _WEIGHED)
                i = tl.minimum(number, size - 1)
                center = start + scale * (i.to(tl.float64) + 0.5)
                begin = tl.floor(center - RADIUS * shrink + 0.5)
                first = tl.minimum(tl.maximum(begin, low), high - 1)
                end = tl.minimum(tl.maximum(tl.floor(center + RADIUS * shrink + 0.5), first + 1), high)
                entry = entries + tl.where(is_mirrored, size - 1 - i, i) * (2 + most)
                tl.store(entry, first.to(tl.int32), mask=number < size)
                tl.store(entry + 1, end.to(tl.int32), mask=number < size)
                # All taps are read, also those without a weight: none may lie outside of the line.
                first = tl.minimum(first, (side - most).to(tl.float64))
                total = center * 0
                if ANTIALIAS:
                    for t in range(most):
                        total += _weight(first + t, begin, center, inverse, low, high, A, CUBIC, ANTIALIAS)
                else:
                    for t in tl.static_range(2 * RADIUS):
                        total += _filter(begin + t - center + 0.5, A, CUBIC)
                for t in range(most):
                    share = _weight(first + t, begin, center, inverse, low, high, A, CUBIC, ANTIALIAS) / total
                    largest = tl.maximum(largest, tl.abs(share))
                    whole = (share * unit + tl.where(share < 0, -0.5, 0.5)).to(tl.int32)
                    tl.store(entry + 2 + t, whole * (1 / unit * _ONE).to(tl.int32), mask=number < size)
            limit = tl.max(largest, 0)
            unit = scale * 0 + 1
            for _bit in range(_BITS):
                unit = tl.where(limit * (2 * unit) + 0.5 < 32768.0, 2 * unit, unit)

    @triton.jit
    def _levels(sums):  # type: ignore[no-untyped-def]
        """Returns `sums`, in 2^-_BITS, rounded to gray levels: each sum started at 1/2."""
        return tl.minimum(tl.maximum(sums >> _BITS, 0), 255)

    @triton.jit(do_not_specialize=_SIZES)  # type: ignore[untyped-decorator]
    def resample(  # type: ignore[no-untyped-def]
        images,
        out,
        table,
        places,  # of each image, where it is PACKED: its first byte, which need not be there, and the bytes of a line
        affine,  # of each channel: what to multiply by, and what to add
        height,
        width,
        out_height,
        out_width,
        most_rows,
        most_columns,
        CHANNELS: tl.constexpr,
        TAPS: tl.constexpr,  # `most_columns`, or 0 where they are too many to keep their weights
        PADDED: tl.constexpr,  # a power of two from TAPS on
        NORMALIZE: tl.constexpr,
        PACKED: tl.constexpr,
    ):
        """Writes a tile of the resampled image to `out`: _LANES gray levels of _ROWS * _PASSES lines."""
        tiles = tl.cdiv(out_width * CHANNELS, _LANES)
        blocks = tl.cdiv(out_height, _ROWS * _PASSES)
        number = tl.program_id(0)
        lane = number % tiles * _LANES + tl.arange(0, _LANES)
        block = number // tiles % blocks
        picture = (number // tiles // blocks).to(tl.int64)
        if PACKED:
            image = images + tl.load(places + 2 * picture)
            stride = tl.load(places + 2 * picture + 1).to(tl.int32)
        else:
            image = images + picture * (height * width * CHANNELS)
            stride = width * CHANNELS
        rows = table + picture * (out_height * (2 + most_rows) + out_width * (2 + most_columns))

        # Along the lines: where each lane begins to read, and its weights.
        x = tl.minimum(lane // CHANNELS, out_width - 1)
        column = rows + out_height * (2 + most_rows) + x * (2 + most_columns)
        begin = tl.minimum(tl.load(column), width - most_columns) * CHANNELS + lane % CHANNELS
        column += 2
        if TAPS:
            tap = tl.arange(0, PADDED)[:, None]
            kept = tl.load(column[None, :] + tap, mask=tap < TAPS, other=0)

        for y in range(block * (_ROWS * _PASSES), tl.minimum((block + 1) * (_ROWS * _PASSES), out_height), _ROWS):
            ys = y + tl.arange(0, _ROWS)
            entries = rows + tl.minimum(ys, out_height - 1) * (2 + most_rows)
            firsts = tl.minimum(tl.load(entries), height - most_rows)
            low = tl.load(rows + y * (2 + most_rows))
            high = tl.load(rows + (tl.minimum(y + _ROWS, out_height) - 1) * (2 + most_rows) + 1)
            sums = tl.full([_ROWS, _LANES], _ONE // 2, tl.int32)
            for row in range(low, high):
                place = image + row * stride + begin
                if TAPS:
                    pixels = tl.load(place[None, :] + tap * CHANNELS, mask=tap < TAPS, other=0)
                    line = tl.sum(pixels.to(tl.int32) * kept, 0) + _ONE // 2
                else:
                    line = tl.full([_LANES], _ONE // 2, tl.int32)
                    for t in range(most_columns):
                        line += tl.load(place + t * CHANNELS).to(tl.int32) * tl.load(column + t)
                reached = (row >= firsts) & (row < firsts + most_rows)
                weights = tl.load(entries + 2 + row - firsts, mask=reached, other=0)
                sums += weights[:, None] * _levels(line)[None, :]
            gray = _levels(sums).to(tl.float32)
            if NORMALIZE:
                factor, offset = tl.load(affine + lane % CHANNELS), tl.load(affine + CHANNELS + lane % CHANNELS)
                gray = gray * factor[None, :] + offset[None, :]
            there = ((picture * out_height + ys) * (out_width * CHANNELS))[:, None] + lane[None, :]
            inside = (ys < out_height)[:, None] & (lane < out_width * CHANNELS)[None, :]
            tl.store(out + there, gray.to(out.dtype.element_ty), mask=inside)


def resample_if_trusted(
    images: torch.Tensor, boxes: Boxes, within: Boxes, flips: NDArray[np.bool_], how: Resampling
) -> torch.Tensor | None:
    """Returns the result of `resample_fused`; None if the kernels cannot be used: see `are_kernels_trusted`."""
    spans = make_spans(boxes, within, *images.shape[2:])

    def compare() -> list[Compared]:
        some = images[:MOST_COMPARED], spans[:, :MOST_COMPARED], flips[:MOST_COMPARED], how
        return [(resample_by_torch(*some), partial(resample_fused, *some))]

    if not are_kernels_trusted(images.device, images, how, compare):
        return None
    return resample_fused(images, spans, flips, how)


def are_kernels_trusted(
    device: torch.device,
    images: torch.Tensor,
    how: Resampling,
    compare: Callable[[], Sequence[Compared]],
    *,
    packed: bool = False,
) -> bool:
    """Returns whether the kernels can resample such images, and gave torch's results: see `fits` and `is_trusted`.

    `packed` says whether `resample_packed` gets windows. `images` need not be on the device: only their shape counts.
    """
    count, channels, _, width = images.shape
    taps = min(_most_taps(width, how.size[1], how), _MOST_KEPT + 1)
    variant = (channels, taps, how.interpolation, how.antialias, how.statistics is not None, how.made, packed)
    does_fit = fits(images, how.size, count * _programs_of_an_image(how.size, channels))
    return does_fit and is_trusted(("resample", device, variant), compare, how.statistics)


def resample_fused(
    images: torch.Tensor, spans: NDArray[np.float64], flips: NDArray[np.bool_], how: Resampling
) -> torch.Tensor:
    """Returns the result of `resample`, computed by CUDA kernels: (B, C, *how.size), dtype `how.made`, channels_last.

    `spans` come from `make_spans`. The host does not wait for the device.
    """
    pixels = images.permute(0, 2, 3, 1).contiguous()
    parameters = to_device(torch.from_numpy(parameters_of(spans, flips, how.size)), images.device)
    _, height, width, channels = pixels.shape
    return resample_packed(pixels, parameters, None, (height, width, channels), how)


def parameters_of(spans: NDArray[np.float64], flips: NDArray[np.bool_], size: tuple[int, int]) -> NDArray[np.float64]:
    """Returns the kernels' parameters, float64 (B, 9): eight numbers of `axes_of`, and 1 for a mirrored image or 0."""
    return np.concatenate([axes_of(spans, size).reshape(len(flips), 8), flips[:, None]], axis=1)


def _programs_of_an_image(size: tuple[int, int], channels: int) -> int:
    return -(-size[0] // (ROWS * PASSES)) * -(-size[1] * channels // LANES)


def _most_taps(side: int, size: int, how: Resampling) -> int:
    """Returns an upper bound of the number of pixels along an axis that an output pixel depends on.

    The bound depends on sizes, not on boxes, so a training on images of one size compiles one kernel.
    """
    shrink = max(side / size, 1.0) if how.antialias else 1.0
    return min(math.ceil(2 * how.radius * shrink), side)


def resample_packed(
    pixels: torch.Tensor,
    parameters: torch.Tensor,
    places: torch.Tensor | None,
    shape: tuple[int, int, int],
    how: Resampling,
) -> torch.Tensor:
    """Returns the result of `resample_fused` from windows of images, or from whole images if `places` is None.

    `pixels`, uint8, holds the windows, with `cut.margin_of` bytes before and after them. `shape` is the height, width
    and channels of the images. `parameters` come from `parameters_of`. For `places`, int64 (B, 2), see `Cut.places`.
    """
    count, (height, width, channels) = len(parameters), shape
    most = [_most_taps(side, size, how) for side, size in zip(shape, how.size, strict=False)]
    sizes = (height, width, *how.size, *most)
    taps = most[1] if most[1] <= _MOST_KEPT else 0
    # Without statistics, the kernel does not read the affine, and may get any float32 memory.
    device = pixels.device
    affine = torch.empty(0, device=device) if how.statistics is None else affine_on(device, *map(tuple, how.statistics))
    # An entry of each output row and column: the first pixel and the end of the pixels it depends on, and the weights.
    length = sum(size * (2 + taps) for size, taps in zip(how.size, most, strict=True))
    table = torch.empty((count, length), dtype=torch.int32, device=device)
    out = torch.empty((count, *how.size, channels), dtype=how.made, device=device)
    # Products are rounded before they are added, as torch's operations and the C kernel do it.
    options = {"enable_fp_fusion": False}
    with torch.cuda.device(device if pixels.is_cuda else -1):  # -1: where it is interpreted
        weigh[(2 * count,)](parameters, table, *sizes, how.interpolation == "bicubic", how.antialias, **options)
        resample[(count * _programs_of_an_image(how.size, channels),)](
            pixels,
            out,
            table,
            table if places is None else places,  # the kernel does not read the former
            affine,
            *sizes,
            channels,
            taps,
            1 << max(taps - 1, 0).bit_length(),
            how.statistics is not None,
            places is not None,
            # One warp has eight lanes a thread: as few programs load the weights along the lines.
            num_warps=1 if 0 < taps <= 4 else 2,
            # Sixteen programs on a multiprocessor: some releases of Triton take 163 registers without need. Four taps
            # would not fit, and AMD's Triton does not know the option.
            **({"maxnreg": 128} if 0 < taps < 4 and torch.version.hip is None else {}),
            **options,
        )
    return out.permute(0, 3, 1, 2)
