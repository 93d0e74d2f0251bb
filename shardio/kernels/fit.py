"""Resizes an image, then crops or pads it to the size of a sample, by _fit.c.

shardio.conversion.images.fit defines the result, to the bit, by torch's antialiased resize of uint8 images.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardio.kernels.built import _fit as _native

AVAILABLE = _native is not None and _native.AVAILABLE
"""True if the kernel was built and the processor has AVX2."""


def fit_picture(
    pixels: NDArray[np.uint8],
    out: NDArray[np.uint8],
    resized_size: tuple[int, int],
    place: tuple[int, int],
    scales: tuple[float, float],
    cubic: bool,
) -> None:
    """Resizes `pixels`, (h, w, 3), to `resized_size`, and writes the part that begins at `place` into `out`, (H, W, 3).

    `scales` are the numbers of rows and columns of `pixels` per row and column of the resized image. Pixels of `out`
    outside of the resized image become black.
    """
    size, out_size = pixels.shape[:2], out.shape[:2]
    _native.fit(np.ascontiguousarray(pixels), out, size, out_size, resized_size, place, scales, cubic)
