"""Rotations, affine maps and perspectives with the names, arguments and distributions of torchvision.

Warps read the cropped and resized image, as in torchvision. Joining the resize and the warp into one map would read
the stored image only once, but the result would differ visibly: the nearest neighbors are different pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardio.augment.arguments import Fill, PositiveRange, Probability, around, fill_of, numbers_of
from shardio.augment.batch import Batch
from shardio.augment.boxes import between
from shardio.augment.chain import Transform
from shardio.augment.color import Sometimes
from shardio.augment.steps import Op, Sampling

Angles = Annotated[float | tuple[float, float], partial(around, center=0)]
Reading = Literal["nearest", "bilinear"]
Floats = NDArray[np.float64]

SAMPLINGS = {"nearest": Sampling.NEAREST, "bilinear": Sampling.BILINEAR}


def affine(
    center: tuple[float, float],
    angle: ArrayLike = 0.0,
    translate: tuple[ArrayLike, ArrayLike] = (0.0, 0.0),
    scale: ArrayLike = 1.0,
    shear: tuple[ArrayLike, ArrayLike] = (0.0, 0.0),
) -> tuple[Floats, ...]:
    """Returns the values a to f of AFFINE: pixel (x, y) of the result is read at (a x + b y + c, d x + e y + f).

    The map shears, scales and rotates an image about `center`, (x, y), and then translates it. Angles are in degrees,
    clockwise; other numbers are in pixels. An array (B,) as an argument gives values (B,). As in torchvision's
    `affine`, the image moves by the product R(angle) scale Y(shear_y) X(shear_x), where X is [[1, -tan], [0, 1]] and Y
    is [[1, 0], [-tan, 1]]. The center of the first pixel is (1/2, 1/2).
    """
    turn, shear_x, shear_y = (np.radians(np.asarray(value, np.float64)) for value in (angle, *shear))
    # The inverse of the image's movement, as the result's pixels are looked for in the image.
    cos, sin = np.cos(turn - shear_y) / np.cos(shear_y), np.sin(turn - shear_y) / np.cos(shear_y)
    a = (np.cos(turn) - sin * np.tan(shear_x)) / scale
    b = (np.sin(turn) + cos * np.tan(shear_x)) / scale
    d, e = -sin / scale, cos / scale
    (x, y), (right, down) = center, translate
    x_from, y_from = x + np.asarray(right), y + np.asarray(down)
    return a, b, x - a * x_from - b * y_from, d, e, y - d * x_from - e * y_from


def _check_two(name: str, value: object, low: float = -math.inf, high: float = math.inf) -> None:
    if len(numbers_of(name, value, low, high)) != 2:
        raise ValueError(f"{name} must be two numbers, along x and y; found {value!r}")


Center = Annotated[tuple[float, float], _check_two] | None


@dataclass(frozen=True, repr=False)
class VerticalFlip(Sometimes):
    """Flips top and bottom, with probability `p`."""

    p: Probability = 0.5
    op = Op.FLIP


class _Warp(Transform):
    """The base class of RandomAffine, RandomRotation and RandomPerspective."""

    records = True
    interpolation: Reading
    fill: Fill

    def _warped(
        self, batch: Batch, op: Op, numbers: Sequence[ArrayLike], where: NDArray[np.bool_] | None = None
    ) -> Batch:
        """Returns the batch with `op` recorded for the images where `where`, bool (B,), is true; None is all images.
        `numbers` say where in the image each pixel of the result is read: for AFFINE the six values of `affine`, for
        PERSPECTIVE the eight of `perspective`, each a number for all images or an array (B,)."""
        padded = [*numbers, *[0.0] * (8 - len(numbers))]
        fill = fill_of(self.fill, batch.images.shape[1])
        return batch.stepped(op, *padded, SAMPLINGS[self.interpolation], *fill, where=where)


@dataclass(frozen=True, repr=False)
class RandomAffine(_Warp):
    """Rotates, shifts, scales and shears by random amounts.

    - `center`: the fixed point, (x, y) in pixels; by default the middle of the image.
    - `degrees`: (min, max) of the angle, clockwise; a number d means (-d, d).
    - `translate`: the maximum shifts, as shares of the width and the height; shifts are whole pixels.
    - `scale`: (min, max) of the factor.
    - `shear`: (min, max) of the shear angle along x, in degrees; two more numbers are (min, max) along y.
    - `fill`: the color outside of the image; None is black.
    """

    degrees: Angles
    translate: Annotated[tuple[float, float], partial(_check_two, low=0, high=1)] | None = None
    scale: PositiveRange | None = None
    shear: float | Sequence[float] | None = None
    interpolation: Reading = "nearest"
    fill: Fill = 0
    center: Center = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._shears()

    def _shears(self) -> tuple[tuple[float, float], tuple[float, float]]:
        if isinstance(self.shear, tuple) and len(self.shear) == 4:
            return around("shear", self.shear[:2], 0), around("shear", self.shear[2:], 0)
        return around("shear", 0.0 if self.shear is None else self.shear, 0), (0.0, 0.0)

    def apply(self, batch: Batch, purpose: str) -> Batch:
        batch = batch.unsquashed()
        height, width = batch.size
        numbers = batch.draws.uniform(purpose, 6)
        most = (0.0, 0.0) if self.translate is None else self.translate
        bounds = (
            around("degrees", self.degrees, 0),
            (-most[0] * width, most[0] * width),
            (-most[1] * height, most[1] * height),
            (1.0, 1.0) if self.scale is None else self.scale,
            *self._shears(),
        )
        angle, right, down, scale, shear_x, shear_y = map(between, bounds, numbers)
        center = self.center or (width / 2, height / 2)
        values = affine(center, angle, (np.rint(right), np.rint(down)), scale, (shear_x, shear_y))
        return self._warped(batch, Op.AFFINE, values)


@dataclass(frozen=True, repr=False)
class RandomRotation(_Warp):
    """Rotates by a random angle; the size of the image does not change.

    `center` is the fixed point, (x, y) in pixels; by default the middle of the image. `degrees` is (min, max) of the
    angle, counterclockwise; a number d means (-d, d).
    """

    degrees: Angles
    interpolation: Reading = "nearest"
    fill: Fill = 0
    center: Center = None

    def apply(self, batch: Batch, purpose: str) -> Batch:
        batch = batch.unsquashed()
        height, width = batch.size
        angle = between(around("degrees", self.degrees, 0), batch.draws.uniform(purpose, 1)[0])
        return self._warped(batch, Op.AFFINE, affine(self.center or (width / 2, height / 2), -angle))


@dataclass(frozen=True, repr=False)
class RandomPerspective(_Warp):
    """Moves each corner inwards by a random number of pixels, with probability `p`.

    The maximum is `distortion_scale` times half the image's width (along x) and half its height (along y).
    """

    distortion_scale: Probability = 0.5
    p: Probability = 0.5
    interpolation: Reading = "bilinear"
    fill: Fill = 0

    def apply(self, batch: Batch, purpose: str) -> Batch:
        batch = batch.unsquashed()
        height, width = batch.size
        numbers = batch.draws.uniform(purpose, 9)
        most = np.array([[int(self.distortion_scale * (side // 2)) + 1] for side in (width, height)])
        ways = np.floor(numbers[1:].reshape(4, 2, -1) * most)
        left, top, right, low = 0, 0, width - 1, height - 1
        corners = np.array([[left, top], [right, top], [right, low], [left, low]], np.float64)
        inwards = np.array([[1, 1], [-1, 1], [-1, -1], [1, -1]])
        seen = corners[:, :, None] + inwards[:, :, None] * ways
        return self._warped(batch, Op.PERSPECTIVE, perspective(seen, corners), numbers[0] < self.p)


def perspective(seen: Floats, corners: Floats) -> list[Floats]:
    """Returns the eight values of PERSPECTIVE, (B,) each, of the maps from `seen` to `corners`.

    `seen`, (4, 2, B), are four points (x, y) of each result, in pixels. `corners`, (4, 2), are the points of the image
    that are read there.
    """
    count = seen.shape[2]
    equations = np.zeros((count, 8, 8))
    for number, (x, y) in enumerate(corners):
        to = np.stack(seen[number], axis=1)
        for row, place, first in ((2 * number, x, 0), (2 * number + 1, y, 3)):
            equations[:, row, first : first + 2] = to
            equations[:, row, first + 2] = 1
            equations[:, row, 6:] = -place * to
    wanted = np.broadcast_to(corners.reshape(8, 1), (count, 8, 1))
    return list(_solved(equations, wanted)[:, :, 0].T)


def _solved(equations: Floats, wanted: Floats) -> Floats:
    """Returns x, (B, 8, 1), with equations[i] @ x[i] = wanted[i]; by least squares if corners meet."""
    try:
        return np.linalg.solve(equations, wanted)  # type: ignore[return-value]
    except np.linalg.LinAlgError:
        if len(equations) == 1:
            return np.linalg.lstsq(equations[0], wanted[0], rcond=None)[0][None]  # type: ignore[no-any-return]
        return np.concatenate([_solved(equations[i : i + 1], wanted[i : i + 1]) for i in range(len(equations))])
