"""Steps: operations on the images of a batch after their resize. Steps keep the size of the images.

A Step holds an operation for every image, so operations, their magnitudes and their order may differ between images.
Steps are run by the kernel in C, see `shardio.kernels.pixels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import zip_longest

import numpy as np
from numpy.typing import ArrayLike, NDArray


class Op(IntEnum):
    """An operation on a uint8 image. Its number is its code in the kernel in C, and its comment lists its arguments.

    Names and results match torchvision's functions, such as `invert`, or `adjust_brightness` for a factor. Gray levels
    match torchvision's `rgb_to_grayscale`.
    """

    NOTHING = 0
    BRIGHTNESS = 1  # factor
    CONTRAST = 2  # factor
    SATURATION = 3  # factor
    HUE = 4  # share of the circle, from -0.5 to 0.5
    SHARPNESS = 5  # factor
    POSTERIZE = 6  # bits that are left
    SOLARIZE = 7  # the lowest gray level that is inverted
    SOLARIZE_ADD = 8  # the number added to gray levels, and the lowest gray level that stays unchanged
    INVERT = 9
    AUTOCONTRAST = 10
    EQUALIZE = 11
    GRAYSCALE = 12
    BLUR = 13  # width and height of a Gaussian kernel, both odd, and its standard deviations along them
    AFFINE = 14  # the six numbers of `geometry.affine`, interpolation, fill for each channel
    PERSPECTIVE = 15  # the eight numbers of `geometry.perspective`, interpolation, fill for each channel
    MIRROR = 16  # left and right exchanged
    FLIP = 17  # top and bottom exchanged
    ERASE = 18  # the top, left, height and width of a rectangle, and its color: fill for each channel


NEEDS_RGB = frozenset({Op.CONTRAST, Op.SATURATION, Op.HUE, Op.GRAYSCALE})
"""Operations that need images of one or three channels."""

WARPS = frozenset({Op.AFFINE, Op.PERSPECTIVE})


class Sampling(IntEnum):
    """The filter that reads an image between its pixels.

    NEAREST and BILINEAR are torchvision's: BILINEAR blends the fill color into the edge. Pillow's filters use the fill
    color for pixels whose center is read outside of the image, and repeat the edge for other pixels.
    """

    NEAREST = 0
    BILINEAR = 1
    PILLOW_BILINEAR = 2
    PILLOW_BICUBIC = 3


# The place of the interpolation and of the first fill among the values of AFFINE and PERSPECTIVE.
SAMPLING_AT = 8
FILL_AT = 9


@dataclass(frozen=True, eq=False)
class Step:
    """An operation for each image of a batch.

    `codes`, uint8 (B,), are numbers of Op. `values`, float64 (B, FILL_AT + channels), are the operation's arguments: an
    interpolation at SAMPLING_AT, a fill from FILL_AT on, and others, such as a factor, from 0 on. Unused values are 0.
    """

    codes: NDArray[np.uint8]
    values: NDArray[np.float64]

    @classmethod
    def of(cls, count: int, channels: int, op: Op | NDArray[np.uint8], *values: ArrayLike) -> Step:
        """Returns a step for `count` images. Each of `values` is a number or an array (B,); missing values are 0."""
        table = np.zeros((count, FILL_AT + channels))
        for place, value in enumerate(values):
            table[:, place] = value
        return cls(np.broadcast_to(np.asarray(op, np.uint8), count), table)

    def where(self, chosen: NDArray[np.bool_]) -> Step:
        """Returns the step for `chosen` images only, bool (B,). The operation of other images is NOTHING."""
        return replace(self, codes=np.where(chosen, self.codes, np.uint8(Op.NOTHING)))


Steps = tuple[Step, ...]


def merged(alternatives: Sequence[Steps], chosen: NDArray[np.int64]) -> Steps:
    """Returns steps that change image i as `alternatives[chosen[i]]` would. `chosen` is int64 (B,).

    A step that changes none of these images stays. Steps between a crop and a resize decide whether both are one pass,
    and this must not depend on what a batch drew.
    """
    steps = []
    for some in zip_longest(*alternatives):
        parts = [step.where(chosen == number) for number, step in enumerate(some) if step is not None]
        codes, values = parts[0].codes, parts[0].values
        for part in parts[1:]:
            codes = codes | part.codes  # at most one of them is not NOTHING, which is 0
            values = np.where(part.codes[:, None] != 0, part.values, values)
        steps.append(Step(codes, values))
    return tuple(steps)
