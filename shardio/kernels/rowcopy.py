"""Copies scattered rows of a matrix, or a window of each row, into one block of memory, by _rowcopy.c.

Copying releases the GIL; any number of threads may copy at the same time into different memory. Rows may be in a mapped
file whose storage fails, or which another process truncates. Then the kernel stops at the row that it cannot read, and
returns the number of copied rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardio.kernels import _rowcopy as _native

_FORM = _native.KERNELS.index(_native.BEST)
"""The number of the variant that runs: the fastest that this processor can run. All copy the same bytes."""
Places: TypeAlias = NDArray[np.int64] | None
"""Where each row goes: its index in `out`. None: one after the other."""


Number = TypeVar("Number", bound=np.generic)
Some = TypeVar("Some", bound="Rectangles[Any]")


@dataclass(frozen=True)
class Rectangles(Generic[Number]):
    """A rectangle in each of B images. Positions and sizes are in pixels, (B,) each."""

    tops: NDArray[Number]
    lefts: NDArray[Number]
    heights: NDArray[Number]
    widths: NDArray[Number]
    dtype: ClassVar[type[np.generic]]

    @classmethod
    def of_one_size(cls: type[Some], height: int, width: int, tops: NDArray[Any], lefts: NDArray[Any]) -> Some:
        """Returns rectangles of one size. `tops` and `lefts`, (B,) each, are their positions."""
        heights, widths = (np.full(len(tops), side, cls.dtype) for side in (height, width))
        return cls(tops, lefts, heights, widths)

    @classmethod
    def whole(cls: type[Some], count: int, height: int, width: int) -> Some:
        """Returns rectangles that cover `count` whole images of `height` and `width` pixels."""
        none = np.zeros(count, cls.dtype)
        return cls.of_one_size(height, width, none, none)

    @classmethod
    def picked(cls: type[Some], several: Sequence[Some], numbers: NDArray[np.int64]) -> Some:
        """Returns rectangles of which number i is rectangle i of `several[numbers[i]]`. `numbers` is int64 (B,)."""
        sides = np.stack([each.sides for each in several])[numbers, np.arange(len(numbers))]
        return cls(*sides.T)

    def __len__(self) -> int:
        return len(self.tops)

    @property
    def sides(self) -> NDArray[Number]:
        """The top, left, height and width of each rectangle, (B, 4)."""
        return np.stack([self.tops, self.lefts, self.heights, self.widths], axis=1)

    def __getitem__(self: Some, some: slice | NDArray[np.int64]) -> Some:
        """Returns the rectangles of the images `some`: a slice, or an array of positions in this batch."""
        return type(self)(self.tops[some], self.lefts[some], self.heights[some], self.widths[some])


class Windows(Rectangles[np.int64]):
    """A rectangular window of whole pixels of each of B images, int64."""

    dtype = np.int64

    @property
    def num_pixels(self) -> NDArray[np.int64]:
        """The number of pixels of each window, (B,)."""
        return self.heights * self.widths

    def part(self, number: int) -> tuple[slice, slice]:
        """Returns window `number` as a slice of rows and a slice of columns of its image."""
        top, left = int(self.tops[number]), int(self.lefts[number])
        return slice(top, top + int(self.heights[number])), slice(left, left + int(self.widths[number]))

    def check_inside(self, height: int, width: int) -> None:
        """Raises IndexError if a window is empty or not inside an image of this size, or if fields differ in length."""
        if len({len(values) for values in (self.tops, self.lefts, self.heights, self.widths)}) > 1:
            found = ", ".join(f"{len(values)} {name}" for name, values in vars(self).items())
            raise IndexError(f"expected as many tops as lefts, heights and widths; found {found}")
        for starts, sides, most in ((self.tops, self.heights, height), (self.lefts, self.widths, width)):
            # A difference that overflows is of a start below 0.
            wrong = (sides < 1) | (starts < 0) | (sides > most - starts)
            if wrong.any():
                at = int(wrong.argmax())
                raise IndexError(
                    f"windows must be inside images of {height} x {width} pixels; found {self.heights[at]} x "
                    f"{self.widths[at]} pixels at row {self.tops[at]}, column {self.lefts[at]}"
                )


def copy_rows(rows: NDArray[np.uint8], numbers: NDArray[np.int64], out: NDArray[np.uint8], lines: Places = None) -> int:
    """Copies rows: sets out[i] = rows[numbers[i]], or with `lines` out[lines[i]]. Returns how many rows were copied.

    `rows` is (n, row_nbytes) and `out` (len(numbers), row_nbytes), both C-contiguous. With `lines`, `out` may have any
    length. The count is lower than len(numbers) only if rows[numbers[count]] could not be read from storage. Raises
    IndexError, before anything is copied, if a number is not from 0 to n - 1, or a line is not in `out`.
    """
    check_bytes(out)
    count, nbytes = out.shape
    if rows.shape[1] != nbytes or len(numbers) != (count if lines is None else len(lines)):
        raise ValueError(f"out must have the shape {(len(numbers), rows.shape[1])}; found the shape {out.shape}")
    if lines is not None and len(lines) and not (lines.min() >= 0 and lines.max() < count):
        # Products of larger numbers would wrap around.
        raise IndexError(f"lines must be from 0 to {count - 1}; found {lines.min()} to {lines.max()}")
    how = None, None, None, 0, None if lines is None else _int64(lines * nbytes)
    return _native.copy(rows, nbytes, _int64(numbers), *how, out, _FORM)


def copy_windows(
    images: NDArray[np.uint8], numbers: NDArray[np.int64], windows: Windows, out: NDArray[np.uint8]
) -> int:
    """Copies windows[i] of image images[numbers[i]] into `out`, for each i. Returns how many windows were copied.

    `images` is (n, height, width, channels); images and `out` are C-contiguous. `out` has as many bytes as all windows
    together, and gets one window after the other. The count is lower than len(windows) only if windows[count] could not
    be read from storage. Raises IndexError, before anything is copied, if a number is not from 0 to n - 1, or a window
    is not inside its image.
    """
    check_bytes(out)
    _, height, width, channels = images.shape
    windows.check_inside(height, width)
    stride = width * channels
    starts = windows.tops * stride + windows.lefts * channels
    # The lines of a window as wide as its image are one piece of memory.
    pieces = np.where(windows.widths == width, 1, windows.heights)
    nbytes = windows.num_pixels * channels // pieces
    spans = _int64(starts), _int64(pieces), _int64(nbytes)
    return _native.copy(images, height * stride, _int64(numbers), *spans, stride, None, out, _FORM)


def copy_spans(memory: NDArray[np.uint8], places: NDArray[np.int64], out: NDArray[np.uint8]) -> int:
    """Sets out[i] to bytes of `memory`, from byte places[i] on. Returns how many spans were copied, as `copy_rows`.

    `memory` is uint8 (n,) and `out` (len(places), nbytes), both C-contiguous. Raises IndexError, before anything is
    copied, if a span is not inside the memory.
    """
    check_bytes(out)
    ones = np.ones(len(places), np.int64)
    spans = ones - 1, _int64(places), ones, ones * out.shape[1]
    return _native.copy(memory, memory.nbytes, *spans, 0, None, out, _FORM)


def check_bytes(out: NDArray[np.uint8]) -> None:
    """Raises TypeError unless `out` is uint8: a kernel writes bytes, and would write them over pointers, too."""
    if out.dtype != np.uint8:
        raise TypeError(f"out must be uint8, found {out.dtype}")


def _int64(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.ascontiguousarray(numbers, np.int64)
