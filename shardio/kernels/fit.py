"""An image resized, then cropped or padded to the size of a sample: _fit.c.

shardio.conversion.images.fit defines the result, to the bit, by torch's antialiased resizing of bytes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardio.kernels.built import _fit as _native

AVAILABLE = _native is not None and _native.AVAILABLE
"""Also false on processors without AVX2."""


def fit_picture(
    pixels: NDArray[np.uint8],
    out: NDArray[np.uint8],
    resized_size: tuple[int, int],
    place: tuple[int, int],
    scales: tuple[float, float],
    cubic: bool,
) -> None:
    """Resizes `pixels`, (h, w, 3), to `resized_size` and writes into `out`, (H, W, 3), what lies there from `place` on.

    `scales` are how many rows and columns of `pixels` make one. What lies outside of the resized image is black.
    """
    size, out_size = pixels.shape[:2], out.shape[:2]
    _native.fit(np.ascontiguousarray(pixels), out, size, out_size, resized_size, place, scales, cubic)
