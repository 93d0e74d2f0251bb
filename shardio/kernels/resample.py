"""Resamples boxes of images to one size, and mirrors them, by _resample.c in the calling thread.

shardio.augment.resample defines the result by operations of torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.kernels.built import _resample as _native

AVAILABLE = _native is not None


def resample_windows(
    pixels: NDArray[np.uint8],
    windows: NDArray[np.int64],
    spans: NDArray[np.float64],
    flips: NDArray[np.bool_],
    out: NDArray[Any],
    affine: NDArray[np.float32] | None,
    *,
    cubic: bool,
    antialias: bool,
) -> None:
    """Resamples a box of each image into `out`, uint8 (B, H, W, C), or float32 with `affine`.

    `pixels` holds the windows of the images, one after the other. `windows`, (B, 4), are their tops, lefts, heights and
    widths in the images. `spans`, (2, B, 4), has the start and length of the box and the limits of the filter, for rows
    and columns. `affine`, (2, C), is a factor and an offset per channel. Raises IndexError if a box is not inside its
    window.
    """
    _, height, width, channels = out.shape
    _native.resample(
        pixels,
        np.ascontiguousarray(windows, np.int64),
        np.ascontiguousarray(spans.transpose(1, 0, 2)),
        flips.astype(np.uint8),
        out,
        b"" if affine is None else affine,
        *(channels, height, width),
        *(cubic, antialias),
    )
