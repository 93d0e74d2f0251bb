"""The window of each sample that is read: its place depends on (seed, epoch, sample) alone. Boxes are moved into it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from shardio.order.rng import make_keys, uniform

CropAt = Literal["center", "random"]


@dataclass(frozen=True)
class Windows:
    """One window for each of some samples. Sizes and places are in pixels, int64 (B,) each."""

    tops: NDArray[np.int64]
    lefts: NDArray[np.int64]
    heights: NDArray[np.int64]
    widths: NDArray[np.int64]

    @classmethod
    def alike(cls, height: int, width: int, tops: NDArray[np.int64], lefts: NDArray[np.int64]) -> Windows:
        """Returns windows of one size at these places."""
        heights, widths = (np.full(len(tops), side, np.int64) for side in (height, width))
        return cls(tops, lefts, heights, widths)

    def __len__(self) -> int:
        return len(self.tops)

    def __getitem__(self, some: slice | NDArray[np.int64]) -> Windows:
        """Returns the windows of some of the samples."""
        return Windows(self.tops[some], self.lefts[some], self.heights[some], self.widths[some])

    @property
    def num_pixels(self) -> NDArray[np.int64]:
        """The pixels of each, (B,)."""
        return self.heights * self.widths

    def inside_of(self, outer: Windows) -> Windows:
        """Returns these windows, of what `outer` shows, as windows of the same samples."""
        return replace(self, tops=self.tops + outer.tops, lefts=self.lefts + outer.lefts)

    def part(self, number: int) -> tuple[slice, slice]:
        """Returns the rows and the columns of a sample that its window has."""
        top, left = int(self.tops[number]), int(self.lefts[number])
        return slice(top, top + int(self.heights[number])), slice(left, left + int(self.widths[number]))

    def check_inside(self, height: int, width: int) -> None:
        """Raises IndexError unless each has a pixel, and lies inside of samples of this size."""
        if len({len(values) for values in (self.tops, self.lefts, self.heights, self.widths)}) > 1:
            raise IndexError(f"expected as many tops, lefts, heights and widths; found {self}")
        for starts, sides, most in ((self.tops, self.heights, height), (self.lefts, self.widths, width)):
            # A side is compared first, so that no sum overflows.
            wrong = (sides < 1) | (sides > most) | (starts < 0)
            wrong |= starts > most - np.clip(sides, 0, most)
            if wrong.any():
                at = int(wrong.argmax())
                raise IndexError(
                    f"expected windows inside of {(height, width)}, height and width; found {self.heights[at]} x "
                    f"{self.widths[at]} pixels at {(int(self.tops[at]), int(self.lefts[at]))}"
                )


@dataclass(frozen=True)
class Crop:
    """Windows of `height` x `width` pixels from samples of `sample_shape`. Immutable; any thread may use one.

    "center" is where torchvision's center_crop puts it, "random" anywhere inside, with the same probability. The same
    seed, epoch and sample have the same window on every rank.
    """

    height: int
    width: int
    at: CropAt
    seed: int
    sample_shape: tuple[int, int, int]

    def __post_init__(self) -> None:
        if self.at not in get_args(CropAt):
            raise ValueError(f"crop_at must be one of {', '.join(get_args(CropAt))}; found {self.at!r}")
        height, width, _ = self.sample_shape
        if not (0 < self.height <= height and 0 < self.width <= width):
            raise ValueError(
                f"crop must be from (1, 1) to {(height, width)}, the size of the samples; "
                f"found {(self.height, self.width)}"
            )

    @property
    def cropped_shape(self) -> tuple[int, int, int]:
        return self.height, self.width, self.sample_shape[2]

    def windows(self, epoch: int, indices: NDArray[np.int64]) -> Windows:
        """Returns the windows of the samples `indices` in this epoch."""
        most_top, most_left = self.sample_shape[0] - self.height, self.sample_shape[1] - self.width
        if self.at == "center":
            # Rounded half to even, as torchvision does.
            places = (round(most_top / 2), round(most_left / 2))
            tops, lefts = (np.full(len(indices), place, np.int64) for place in places)
            return Windows.alike(self.height, self.width, tops, lefts)
        keys = make_keys(b"shardio crop 1", self.seed, epoch, 2)
        samples = indices.astype(np.uint64)
        tops, lefts = (
            (uniform(key, samples) * (most + 1)).astype(np.int64)
            for key, most in zip(keys, (most_top, most_left), strict=True)
        )
        return Windows.alike(self.height, self.width, tops, lefts)


def crop_boxes(boxes: NDArray[np.float32], windows: Windows) -> None:
    """Moves boxes of some samples, float32 (B, K, 5), in place, into the windows that are read of these: left, top,
    right and bottom are then pixels of the window, and inside of it.

    A box of which less than a pixel is left, in width or height, becomes zeros with the label -1, as in
    shardio.augment; so does a row without a box.
    """
    places = np.stack([windows.lefts, windows.tops], axis=1).astype(np.float32)
    # (B, K, 2, 2), of which the last side is x and y.
    corners = boxes[:, :, :4].reshape(*boxes.shape[:2], 2, 2)
    most = np.stack([windows.widths, windows.heights], axis=1).astype(np.float32)[:, None, None]
    with np.errstate(all="ignore"):  # of a damaged sample, which is replaced later, there may be any bytes
        moved = np.clip(corners - places[:, None, None], 0, most)
        kept = (boxes[:, :, 4] >= 0) & (moved[:, :, 1] - moved[:, :, 0] >= 1).all(axis=2)
    boxes[:, :, :4] = moved.reshape(*boxes.shape[:2], 4)
    boxes[~kept] = (0, 0, 0, 0, -1)
