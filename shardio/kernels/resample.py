"""Resamples boxes of images, mirrors, normalizes and casts them, by _resample.c in the calling thread.

The results equal those of the torch operations in shardio.conversion.images.fit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.kernels import _resample as _native
from shardio.kernels.rowcopy import Places

FORMS: tuple[str, ...] = _native.FORMS
"""The variants of the kernel that this processor can run, such as "avx2", fastest first. All give the same bytes."""

# numpy has no bfloat16: results are kept as their bits.
_DEPTHS = {np.dtype(dtype): i for i, dtype in enumerate((np.uint8, np.float32, np.uint16, np.float16))}


def resample_windows(
    pixels: NDArray[np.uint8],
    windows: NDArray[np.int64],
    axes: NDArray[np.float64],
    flips: NDArray[np.bool_],
    out: NDArray[Any],
    affine: NDArray[np.float32] | None = None,
    *,
    cubic: bool | NDArray[np.bool_],
    antialias: bool = True,
    resized: tuple[int, int] | None = None,
    first: tuple[int, int] = (0, 0),
    form: str | None = None,
    lines: Places = None,
) -> None:
    """Resamples a box of each image, and writes the results to `out`, (B, H, W, C).

    - `pixels`: a window of each image, one window after the other; `windows`, (B, 4): their top, left, height and width
    - `axes`, (B, 2, 4): start, scale, low and high, for rows and then for columns. Output i is centered at start +
      scale * (i + 1/2) in the image. The filter uses the pixels from low to high, which must lie inside the window.
    - `flips`, (B,): whether to mirror a result; `cubic`: whether the filter is bicubic, not bilinear, for all or (B,)
    - `resized`: the size of the whole resized image (default: the size of `out`); `first`: the row and column of it
      where `out` begins. Pixels outside of the resized image are black.
    - `lines`: the index in `out` of each result; None for one result after the other
    - `out`: uint8; with `affine`, (2, C), a factor and an offset per channel: float32, float16, or bfloat16 as uint16
    """
    _, height, width, channels = out.shape
    _native.resample(
        np.ascontiguousarray(pixels),
        np.ascontiguousarray(windows, np.int64),
        np.ascontiguousarray(axes, np.float64),
        np.ascontiguousarray(flips + np.multiply(cubic, 2), np.uint8),
        None if lines is None else np.ascontiguousarray(lines, np.int64),
        out,
        b"" if affine is None else np.ascontiguousarray(affine, np.float32),
        channels,
        *((height, width) if resized is None else resized, first, (height, width)),
        antialias,
        _DEPTHS[out.dtype],
        0 if form is None else FORMS.index(form),
    )
