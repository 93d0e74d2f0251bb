"""Fits pictures of any size into samples of one size: computes where the picture goes, and resizes it, antialiased.

Placement and rounding are torchvision's: `crop` with a square size is Resize(size) followed by CenterCrop(size).
The kernel in C gives the same bytes as torch on any processor, and resizes only the part that the sample shows.

`adm` gives the bytes of `center_crop_arr` in guided_diffusion/image_datasets.py of Dhariwal and Nichol, "Diffusion
models beat GANs on image synthesis", NeurIPS 2021, with Pillow up to version 12, which always resized rows first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.conversion.images.decode import WHITE, Color
from shardio.conversion.images.headers import check_pixels
from shardio.conversion.options import ConvertOptions, FitMode, Pixels, Quality, Resample
from shardio.errors import DecodeError
from shardio.format.layout import RowType, pixels_row
from shardio.kernels import resample as kernel
from shardio.kernels.rowcopy import Windows


@dataclass(frozen=True)
class Placement:
    """Where a picture goes in its sample. The picture is first resized to `resized`, a (height, width).

    Row r, column c of the sample is row r + top, column c + left of the resized picture. Rows and columns outside the
    resized picture (if `top` or `left` is negative) are black.
    """

    resized: tuple[int, int]
    top: int
    left: int


@dataclass(frozen=True)
class Fit:
    """The options with which a picture is decoded and fitted into a sample of `size` (height, width)."""

    size: tuple[int, int]
    mode: FitMode = "crop"
    resample: Resample = "bicubic"
    exif_rotate: bool = False
    background: Color = WHITE
    pixels: Pixels = "rgb"
    quality: Quality = "exact"
    """With "fast", a JPEG may be decoded at a reduced size, not below `least_size`. "exact" decodes the full size."""

    @classmethod
    def of(cls, options: ConvertOptions) -> Fit:
        """Returns the Fit of a conversion's options, whose `size` must not be None."""
        size: Any = options.size
        color: Any = options.background
        return cls(size, options.fit, options.resample, options.exif_rotate, color, options.pixels, options.quality)

    @property
    def row(self) -> RowType:
        """The type of a stored sample's pixels: uint8 (height, width, 3), or yuv420 as in `pixels_row`."""
        return pixels_row((*self.size, 3), self.pixels)

    def placement(self, height: int, width: int) -> Placement:
        """Returns the Placement of a picture of this height and width in its sample.

        With `crop` and `pad`, one side is resized to exactly the sample's side. The other side is rounded down, as in
        torchvision's `_compute_resized_output_size`. A margin is split with Python's round(), as in torchvision's
        `center_crop`.
        """
        target_height, target_width = self.size
        if self.mode == "squash":
            return Placement(self.size, 0, 0)
        if self.mode == "adm":
            *_, (height, width) = _halvings((height, width), target_height)
            scale = target_height / min(height, width)
            resized = (round(height * scale), round(width * scale))
            return Placement(resized, (resized[0] - target_height) // 2, (resized[1] - target_height) // 2)
        taller = height * target_width >= width * target_height  # than the target's aspect ratio
        if taller == (self.mode == "crop"):
            resized = (target_width * height // width, target_width)
        else:
            resized = (target_height, target_height * width // height)
        resized = (max(resized[0], 1), max(resized[1], 1))  # `pad` of a very long picture
        return Placement(resized, round((resized[0] - target_height) / 2), round((resized[1] - target_width) / 2))

    def count_enlarged(self, heights: NDArray[Any], widths: NDArray[Any]) -> dict[str, int]:
        """Counts the pictures that become larger in the set, among pictures of these heights and widths in pixels.
        Returns {"enlarged": their number, "stored": the bytes of their samples, "own": the bytes of these samples if
        they had only as many pixels as the pictures}."""
        sizes, counts = np.unique(heights.astype(np.int64) << 32 | widths, return_counts=True)
        placed = (self.placement(int(one >> 32), int(one & 0xFFFFFFFF)).resized for one in sizes)
        growth = np.array([height * width for height, width in placed]) / ((sizes >> 32) * (sizes & 0xFFFFFFFF))
        counts, growth = counts[growth > 1], growth[growth > 1]
        stored = self.row.nbytes * counts
        return {"enlarged": int(counts.sum()), "stored": int(stored.sum()), "own": int((stored / growth).sum())}

    def least_size(self, height: int, width: int) -> tuple[int, int]:
        """Returns the minimum (height, width) at which to decode a picture of this size: twice its size in the sample.
        At that size, the resampling filter decides the finest detail of the sample, not the decoder."""
        resized = self.placement(height, width).resized
        return 2 * resized[0], 2 * resized[1]

    def apply(
        self,
        pixels: NDArray[np.uint8],
        source_size: tuple[int, int] | None = None,
        reduction: int = 1,
        out: NDArray[np.uint8] | None = None,
    ) -> NDArray[np.uint8]:
        """Fits a picture, uint8 (height, width, 3), into a sample. Returns the sample, uint8 of the shape of `row`.

        Writes the sample, as it is stored, into `out`, which must be contiguous, or into a new array. For a picture
        that was decoded at a reduced size, `source_size` is its full (height, width), and each pixel stands for
        `reduction` rows and columns; the picture is placed as if it were not reduced.

        Raises DecodeError if the picture is so long and thin that resizing one or both sides would make it too large.
        """
        height, width = pixels.shape[:2] if source_size is None else source_size
        placement = self.placement(height, width)
        try:
            # Rows are resized first: the picture in between has the new width and the old height.
            check_pixels(placement.resized[1], max(placement.resized[0], height))
        except DecodeError as error:
            raise DecodeError(error.reason, f"{width} x {height} resized: {error.detail}") from None
        stored = np.empty(self.row.shape, np.uint8) if out is None else out
        sample = stored if self.pixels == "rgb" else np.empty((*self.size, 3), np.uint8)
        if self.mode == "adm":
            for sides in islice(_halvings((height, width), self.size[0]), 1, None):
                halved = np.empty((*sides, 3), np.uint8)
                _resample(pixels, np.divide(pixels.shape[:2], sides), halved, cubic=False, box=True)
                pixels, (height, width) = halved, sides
        # Of a reduced picture, the last row and column may stand for fewer rows and columns than the others.
        sides, extent = pixels.shape[:2], (height / reduction, width / reduction)
        scales = np.divide(sides, placement.resized)
        if extent != sides:  # as torch does with scale factors, just large enough to round down to the new sides
            scales = 1 / (np.divide(placement.resized, extent) * (1 + 2**-40))
        _resample(
            pixels,
            scales,
            sample,
            cubic=self.resample == "bicubic",
            lanczos=self.resample == "lanczos",
            wide=self.mode == "adm",
            resized=placement.resized,
            first=(placement.top, placement.left),
        )
        if self.pixels == "yuv420":
            kernel.to_yuv420(sample[None], stored[None])
        return stored

    def picture_of(self, row: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Returns the picture, uint8 (height, width, 3), of a stored sample: `row`, uint8 of the shape of `Fit.row`."""
        if self.pixels == "rgb":
            return row
        picture = np.empty((*self.size, 3), np.uint8)
        kernel.Planes.packed(row, Windows.whole(1, *self.size), 3, halved=True).copy_images(picture[None])
        return picture

    def apply_nearest(self, mask: NDArray[Any]) -> NDArray[Any]:
        """Returns a picture's mask (height, width, ...) fitted into the sample, as a new array of the mask's dtype.

        The mask is placed as `apply` places the picture. Each pixel of the result is the nearest pixel of the mask,
        without blending. Margins that `apply` makes black are 0.
        """
        height, width = mask.shape[:2]
        placement = self.placement(height, width)
        rows = _nearest(self.size[0], placement.top, placement.resized[0], height)
        columns = _nearest(self.size[1], placement.left, placement.resized[1], width)
        sample: NDArray[Any] = mask[np.ix_(rows.clip(0, height - 1), columns.clip(0, width - 1))]
        if self.mode == "pad":
            sample[(rows < 0) | (rows >= height)] = 0
            sample[:, (columns < 0) | (columns >= width)] = 0
        return sample


def _halvings(sides: tuple[int, int], target: int) -> Iterator[tuple[int, int]]:
    """Yields (height, width): `sides`, then after each halving, as long as both sides were at least 2 * `target`."""
    yield sides
    while min(sides) >= 2 * target:
        sides = sides[0] // 2, sides[1] // 2
        yield sides


def _resample(pixels: NDArray[np.uint8], scales: NDArray[np.float64], out: NDArray[np.uint8], **options: Any) -> None:
    """Resizes a picture into `out`, both uint8 (height, width, 3). `options` are passed to the kernel. `scales` is
    (rows of the picture for each row of `out`, columns of the picture for each column of `out`)."""
    planes = kernel.Planes.of_images(np.ascontiguousarray(pixels)[None])
    axes = [(0, scale, 0, side) for scale, side in zip(scales, pixels.shape[:2], strict=True)]
    kernel.resample(planes, np.array([axes], np.float64), np.zeros(1, bool), out[None], **options)


def _nearest(target: int, start: int, resized: int, side: int) -> NDArray[np.int64]:
    """Returns which pixel of the picture is at the center of each pixel of the sample, along one axis: int64 (target,).
    `target`, `resized` and `side` are the lengths of the sample, the resized picture and the picture along this axis,
    in pixels; `start` is the Placement's `top` or `left`. In a margin, indices are negative, or at least `side`."""
    return (2 * (np.arange(target, dtype=np.int64) + start) + 1) * side // (2 * resized)
