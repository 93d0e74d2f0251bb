"""Mixup and CutMix on CUDA: one kernel, written in Triton, which also normalises and casts where that is still to do.

It reads the stored bytes of a picture and of its partner, and writes the result: torch's operations write a copy of the
partners, both in float32, their sum, and the cast of that.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardio.augment.resample import Statistics, affine_of, to_device
from shardio.errors import printable
from shardio.system.eager import is_recorded, warn_caller

try:
    import triton
    import triton.language as tl
except Exception:  # there are wheels for Linux only; torch for CUDA brings them
    triton = None

_BLOCK = 1024
# Places in a picture are int32, with room for the last program, which may begin inside and end outside.
_MOST_PIXELS = 1 << 30
_MOST_PROGRAMS = (1 << 31) - 1
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _mix(  # type: ignore[no-untyped-def]
        images,
        out,
        numbers,  # of each picture: its share, or the window's first and last line and column
        affine,  # of each channel: what to multiply by, and what to add
        pictures,
        size,
        width,
        CHANNELS: tl.constexpr,
        CUTS: tl.constexpr,
        FLIPS: tl.constexpr,
        NORMALIZE: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Makes BLOCK grey levels of one picture."""
        blocks = tl.cdiv(size, BLOCK)
        picture = tl.program_id(0) // blocks
        other = (pictures - 1 - picture) if FLIPS else (picture + pictures - 1) % pictures
        place = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
        own, theirs = images + picture.to(tl.int64) * size + place, images + other.to(tl.int64) * size + place
        inside = place < size
        made = out.dtype.element_ty
        if CUTS:
            row, column = place // CHANNELS // width, place // CHANNELS % width
            mine = numbers + picture * 4
            cut = (row >= tl.load(mine)) & (row < tl.load(mine + 1))
            cut = cut & (column >= tl.load(mine + 2)) & (column < tl.load(mine + 3))
            value = tl.load(tl.where(cut, theirs, own), mask=inside, other=0)
            if NORMALIZE:
                channel = place % CHANNELS
                value = value.to(tl.float32) * tl.load(affine + channel) + tl.load(affine + CHANNELS + channel)
            tl.store(out + picture.to(tl.int64) * size + place, value.to(made), mask=inside)
        else:
            one = tl.load(own, mask=inside, other=0).to(tl.float32)
            another = tl.load(theirs, mask=inside, other=0).to(tl.float32)
            if NORMALIZE:  # and rounded as it would have been stored
                channel = place % CHANNELS
                factor, offset = tl.load(affine + channel), tl.load(affine + CHANNELS + channel)
                one = (one * factor + offset).to(made).to(tl.float32)
                another = (another * factor + offset).to(made).to(tl.float32)
            share = tl.load(numbers + picture)
            between = one - another
            # As torch's `lerp` does it, from the nearer of both.
            value = tl.where(share < 0.5, another + share * between, one - between * (1 - share))
            tl.store(out + picture.to(tl.int64) * size + place, value.to(made), mask=inside)


def can_mix(
    images: Tensor, numbers: NDArray[np.float32], flips: bool, statistics: Statistics | None, dtype: torch.dtype | None
) -> bool:
    """Tells whether `mixed_fused` can mix these images."""
    count, channels, height, width = images.shape
    size = channels * height * width
    fits = 0 < size < _MOST_PIXELS and 0 < count * -(-size // _BLOCK) <= _MOST_PROGRAMS
    known = images.dtype in (torch.uint8, *_FLOATS) and images.is_contiguous(memory_format=torch.channels_last)
    if not images.is_cuda or triton is None or is_recorded(images) or not fits or not known:
        return False
    made = _made(images, statistics, dtype)
    # Where nothing is added up, bytes may stay bytes.
    cuts = numbers.shape[1] == 4
    takes = made in _FLOATS or (cuts and made == images.dtype)
    return takes and _works(images.device, channels, images.dtype, cuts, flips, statistics is not None, made)


def _made(images: Tensor, statistics: Statistics | None, dtype: torch.dtype | None) -> torch.dtype:
    return dtype or (images.dtype if statistics is None else torch.float32)


@cache
def _works(
    device: torch.device,
    channels: int,
    stored: torch.dtype,
    cuts: bool,
    flips: bool,
    normalizes: bool,
    made: torch.dtype,
) -> bool:
    """Tries once whether Triton can make this kernel for this device. It needs a C compiler, for one thing."""
    try:
        images = torch.zeros(1, 4, 4, channels, dtype=stored, device=device).permute(0, 3, 1, 2)
        statistics = ((0.5,) * channels, (0.5,) * channels) if normalizes else None
        mixed_fused(images, np.zeros((1, 4 if cuts else 1), np.float32), flips, statistics, made)
    except Exception as error:
        text = f"Triton does not work on {device}: pictures are mixed by torch's operations, which is slower: {error}"
        warn_caller(printable(text))
        return False
    return True


def mixed_fused(
    images: Tensor, numbers: NDArray[np.float32], flips: bool, statistics: Statistics | None, dtype: torch.dtype | None
) -> Tensor:
    """Normalises, casts to `dtype`, and mixes each picture with the one before it or, with `flips`, with the one as far
    from the batch's end.

    `numbers` are shares, (B, 1), or windows that the partner fills, (B, 4): first and last line, first and last column.
    Returns (B, C, H, W) in channels_last memory.
    """
    count, channels, height, width = images.shape
    pixels = images.permute(0, 2, 3, 1).contiguous()
    out = torch.empty(pixels.shape, dtype=_made(images, statistics, dtype), device=images.device)
    told = to_device(torch.from_numpy(np.ascontiguousarray(numbers, np.float32)), images.device)
    affine = told if statistics is None else to_device(affine_of(statistics), images.device)  # not read without them
    size = channels * height * width
    with torch.cuda.device(images.device if images.is_cuda else -1):  # -1: where it is interpreted
        _mix[(count * -(-size // _BLOCK),)](
            pixels,
            out,
            told,
            affine,
            count,
            size,
            width,
            channels,
            numbers.shape[1] == 4,
            flips,
            statistics is not None,
            _BLOCK,
            enable_fp_fusion=False,  # products are rounded before they are added, as torch does it
        )
    return out.permute(0, 3, 1, 2)
