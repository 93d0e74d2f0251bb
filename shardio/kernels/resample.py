"""Resamples boxes of images, mirrors, normalizes and casts them, by _resample.c in the calling thread.

The results equal those of torch's antialiased `interpolate`, or with `wide` those of Pillow: see `resample`.

Images are stored as pixels, or as yuv420. A yuv420 image has even sides and is (height * 3 / 2, width) bytes: lines of
Y, then lines of Cb and Cr, both of half the height and width. As in JPEG files, the colors are those of full range
BT.601, and each Cb and Cr is centered between its four pixels.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.kernels import _resample as _native
from shardio.kernels.rowcopy import Places, Windows, copy_spans

_FORM = 0
"""The number of the variant that runs: in `_native.FORMS`, the first is the fastest. All give the same bytes."""

# numpy has no bfloat16: results are kept as their bits.
_DEPTHS = {np.dtype(dtype): i for i, dtype in enumerate((np.uint8, np.float32, np.uint16, np.float16))}


@dataclass(frozen=True, eq=False)
class Planes:
    """Where the windows of B images lie in memory. Kernels read them there.

    - `memory`: uint8 (n,), C-contiguous; it may be a mapped file
    - `windows`: the window of each image; `channels`: the bytes of a pixel
    - `places`: the offset in `memory` of the first byte of each window, int64 (B,)
    - `stride`: the bytes from line to line; 0 if the lines of a window follow each other
    - `halved`: whether the images are stored as yuv420. Then `windows` are whole images, `places` the offsets of the
      images' rows, `channels` is 3 and `stride` is 0. Kernels convert the images to RGB.
    """

    memory: NDArray[np.uint8]
    windows: Windows
    channels: int
    places: NDArray[np.int64]
    stride: int = 0
    halved: bool = False

    @classmethod
    def packed(cls, memory: NDArray[np.uint8], windows: Windows, channels: int, halved: bool = False) -> Planes:
        """Returns the planes of windows that lie in `memory` one after the other. Raises ValueError unless `memory` has
        exactly their bytes."""
        nbytes = nbytes_of(windows, channels, halved)
        ends = nbytes.cumsum()
        if memory.nbytes != (ends[-1] if len(ends) else 0):
            raise ValueError(
                f"`memory` must have as many bytes as all windows together, {nbytes.sum()}; found {memory.nbytes} bytes"
            )
        return cls(memory.reshape(-1), windows, channels, ends - nbytes, halved=halved)

    @classmethod
    def of_images(cls, images: NDArray[np.uint8]) -> Planes:
        """Returns planes whose windows are the whole `images`, uint8 (B, height, width, channels), C-contiguous."""
        return cls.packed(images, Windows.whole(*images.shape[:3]), images.shape[3])

    @classmethod
    def of_rows(
        cls,
        rows: NDArray[np.uint8],
        numbers: NDArray[np.int64],
        windows: Windows,
        shape: tuple[int, int, int],
        halved: bool = False,
    ) -> Planes:
        """Returns planes whose image i is windows[i] of the image in row numbers[i] of `rows`.

        `shape` is the (height, width, channels) of an image. `rows` is uint8 (n, their product), C-contiguous. With
        `halved`, rows are half as long, and windows must be whole images.
        """
        _, width, channels = shape
        stride = 0 if halved else width * channels
        places = numbers * rows.shape[1] + windows.tops * stride + windows.lefts * channels
        return cls(rows.reshape(-1), windows, channels, places, stride, halved)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, some: slice | NDArray[np.int64]) -> Planes:
        """Returns the planes of the images `some`."""
        return Planes(self.memory, self.windows[some], self.channels, self.places[some], self.stride, self.halved)

    def copy_images(self, out: NDArray[np.uint8], lines: Places = None) -> None:
        """Copies the images to `out`, uint8 (B, height, width, channels), or halved images, with `lines`, to
        `out[lines]`. The windows must be whole images. Raises OSError if a page of a mapped file cannot be read."""
        if self.halved:
            sides = self.windows.sides[:, 2:, None]
            axes = np.concatenate([sides * 0, sides * 0 + 1, sides * 0, sides], axis=2)
            resample(self, axes, np.zeros(len(self), bool), out, cubic=False, lines=lines)
            return
        check_made(copy_spans(self.memory, self.places, out.reshape(len(out), -1)), len(out))


def nbytes_of(windows: Windows, channels: int, halved: bool) -> NDArray[np.int64]:
    """Returns the bytes of each window, int64 (B,)."""
    return windows.num_pixels * channels // (2 if halved else 1)


def check_made(made: int, count: int) -> None:
    """Raises OSError if a kernel made fewer than `count` images, because a page of a mapped file cannot be read."""
    if made < count:
        raise OSError(errno.EIO, f"{os.strerror(errno.EIO)}: a page of image {made} of {count}")


def resample(
    planes: Planes,
    axes: NDArray[np.float64],
    flips: NDArray[np.bool_],
    out: NDArray[Any],
    affine: NDArray[np.float32] | None = None,
    *,
    cubic: bool | NDArray[np.bool_],
    lanczos: bool = False,
    box: bool = False,
    wide: bool = False,
    antialias: bool = True,
    resized: tuple[int, int] | None = None,
    first: tuple[int, int] = (0, 0),
    lines: Places = None,
) -> None:
    """Resamples a box of each image of `planes`, and writes the results to `out`, (B, H, W, C).

    - `axes`, (B, 2, 4): start, scale, low and high, for rows and then for columns. Output i is centered at start +
      scale * (i + 1/2) in the image. The filter uses the pixels from low to high, which must lie inside the window.
    - `flips`, (B,): whether to mirror a result; `cubic`: whether the filter is bicubic, not bilinear, for all or (B,)
    - `lanczos`, `box`: whether the filter of all images is Lanczos' with three lobes, or the mean of a box
    - `wide`: whether weights have 22 binary places, as in Pillow, and not at most 16 bits, as in torch
    - `resized`: the size of the whole resized image (default: the size of `out`); `first`: the row and column of the
      resized image where `out` begins. Pixels outside of it are black.
    - `lines`: the index in `out` of each result; None for one result after the other
    - `out`: uint8; with `affine`, (2, C), a factor and an offset per channel: float32, float16, or bfloat16 as uint16

    Raises OSError if a page of a mapped file cannot be read.
    """
    _, height, width, channels = out.shape
    made = _native.resample(
        planes.memory,
        np.ascontiguousarray(planes.places, np.int64),
        planes.stride,
        planes.halved,
        planes.windows.sides,
        np.ascontiguousarray(axes, np.float64),
        np.ascontiguousarray(flips + np.multiply(cubic, 2) + 4 * lanczos + 8 * box + 16 * wide, np.uint8),
        None if lines is None else np.ascontiguousarray(lines, np.int64),
        out,
        b"" if affine is None else np.ascontiguousarray(affine, np.float32),
        channels,
        *((height, width) if resized is None else resized, first, (height, width)),
        antialias,
        _DEPTHS[out.dtype],
        _FORM,
    )
    check_made(made, len(planes))


def to_yuv420(images: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Writes RGB images, uint8 (B, H, W, 3), to `out` as yuv420, uint8 (B, H * 3 / 2, W). Sides are even.

    Coefficients have 16 binary places, and Cb and Cr are means of four pixels. Each result is rounded once, halves up.
    """
    count, height, width, channels = images.shape
    if channels != 3 or out.shape != (count, height * 3 // 2, width):
        raise ValueError(
            f"expected images (B, H, W, 3) and out (B, H * 3 / 2, W); found {images.shape} and {out.shape}"
        )
    _native.to_yuv420(images, out, height, width, _FORM)
