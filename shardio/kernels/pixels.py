"""Steps of color and geometry on a batch, and its normalization, in as many threads as torch has: _pixels.c.

shardio.augment.pixels_torch defines the results by operations of torch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardio.kernels.built import _pixels as _native
from shardio.kernels.built import in_slices

AVAILABLE = _native is not None


def run_steps(pixels: NDArray[np.uint8], codes: NDArray[np.uint8], values: NDArray[np.float64]) -> None:
    """Runs steps on (B, H, W, C) pixels in place. `codes` is (S, B), `values` (S, B, n).

    Raises ValueError, and changes nothing in its part of the batch, for values that an operation cannot take.
    """
    shape = pixels.shape[1:]

    def work(some: slice) -> None:
        _native.run(pixels[some], np.ascontiguousarray(codes[:, some]), np.ascontiguousarray(values[:, some]), *shape)

    in_slices(len(pixels), work)


def normalize(pixels: NDArray[np.uint8], affine: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns (B, H, W, C) pixels times a factor plus an offset of each channel, rows of `affine`, (2, C)."""
    out = np.empty(pixels.shape, np.float32)

    def work(some: slice) -> None:
        _native.normalize(pixels[some], out[some], affine)

    in_slices(len(pixels), work)
    return out
