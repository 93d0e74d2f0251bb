"""The transforms of pictures: crops, resizes, flips, normalising, casting. Each changes the Batch, not its pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray

from shardio.augment.batch import Batch, Transform, check_number
from shardio.augment.boxes import Boxes, random_resized_boxes
from shardio.augment.resample import Interpolation

Size = int | tuple[int, int]

# Mean and standard deviation of red, green and blue, from 0 to 1.
_STATISTICS = {"imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}


def _pair(name: str, size: Size) -> tuple[int, int]:
    pair = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(pair) != 2 or not all(isinstance(side, int) and side > 0 for side in pair):
        raise ValueError(f"{name} must be a positive integer, or (height, width); found {size!r}")
    return pair


def _check_interpolation(name: str) -> None:
    if name not in get_args(Interpolation):
        raise ValueError(f"interpolation must be one of {', '.join(get_args(Interpolation))}; found {name!r}")


@dataclass(frozen=True)
class RandomResizedCrop(Transform):
    """A box of random area and aspect ratio at a random place, resized: as torchvision's class of this name.

    `scale` bounds the share of the picture's area, `ratio` the box's width to height.
    """

    size: Size
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: Interpolation = "bilinear"
    antialias: bool = True

    def __post_init__(self) -> None:
        _pair("size", self.size)
        _check_interpolation(self.interpolation)
        for name, bounds in (("scale", self.scale), ("ratio", self.ratio)):
            try:
                low, high = bounds
            except (TypeError, ValueError):
                raise ValueError(f"{name} must be (least, most); found {bounds!r}") from None
            check_number(name, low)
            check_number(name, high)
            if not 0 < low <= high < math.inf:
                raise ValueError(f"{name} must be (least, most), both above 0; found {(low, high)}")

    def apply(self, batch: Batch, purpose: str) -> Batch:
        if batch.resized:  # the box is a part of the resized picture
            batch = batch.finished()
        heights, widths = batch.sizes.T
        boxes = random_resized_boxes(batch.draws, purpose, heights, widths, self.scale, self.ratio)
        sizes = np.tile(np.array(_pair("size", self.size)), (len(batch), 1))
        return batch.cropped(boxes).resized_to(sizes, self.interpolation, self.antialias)


@dataclass(frozen=True)
class Resize(Transform):
    """Resizes the whole picture to (height, width), or until its short side has `size` pixels, as in torchvision."""

    size: Size
    interpolation: Interpolation = "bilinear"
    antialias: bool = True

    def __post_init__(self) -> None:
        _pair("size", self.size)
        _check_interpolation(self.interpolation)

    def apply(self, batch: Batch, purpose: str) -> Batch:
        if isinstance(self.size, int):
            short = batch.sizes.min(axis=1, keepdims=True)
            # The long side is cut down to whole pixels.
            sizes = np.where(batch.sizes == short, self.size, self.size * batch.sizes // short)
        else:
            sizes = np.tile(np.array(self.size), (len(batch), 1))
        return batch.resized_to(sizes, self.interpolation, self.antialias)


@dataclass(frozen=True)
class RandomCrop(Transform):
    """A window of so many pixels, height and width, at a random place; nothing is resized."""

    size: Size

    def __post_init__(self) -> None:
        _pair("size", self.size)

    def apply(self, batch: Batch, purpose: str) -> Batch:
        return _cropped(batch, _pair("size", self.size), batch.draws.uniform(purpose, 2))


@dataclass(frozen=True)
class CenterCrop(Transform):
    """A window of so many pixels, height and width, in the centre; nothing is resized.

    A smaller picture is a ValueError; torchvision would pad it. (In a squashed set, the true picture counts.)
    """

    size: Size

    def __post_init__(self) -> None:
        _pair("size", self.size)

    def apply(self, batch: Batch, purpose: str) -> Batch:
        return _cropped(batch, _pair("size", self.size), None)


def _cropped(batch: Batch, size: tuple[int, int], places: NDArray[np.float64] | None) -> Batch:
    """Takes windows at `places`, (2, B), from 0 to 1 along both axes, or in the centre, where torchvision has it."""
    room = (batch.sizes - np.array(size)).T
    if room.size and room.min() < 0:
        height, width = batch.sizes[room.min(axis=0).argmin()].tolist()
        raise ValueError(
            f"a crop of {size} pixels, height and width, does not fit into a picture of {(height, width)}: "
            "choose a smaller one, or resize first"
        )
    starts = np.rint(room / 2.0) if places is None else np.floor(places * (room + 1))
    sides = (np.full(len(batch), float(side)) for side in size)
    return batch.cropped(Boxes(*starts, *sides))


@dataclass(frozen=True)
class HorizontalFlip(Transform):
    """Mirror left and right, with probability `p`."""

    p: float = 0.5

    def __post_init__(self) -> None:
        check_number("p", self.p)
        if not 0 <= self.p <= 1:
            raise ValueError(f"p must be from 0 to 1; found {self.p}")

    def apply(self, batch: Batch, purpose: str) -> Batch:
        return batch.mirrored(batch.draws.uniform(purpose, 1)[0] < self.p)


def _numbers(name: str, values: object) -> tuple[float, ...]:
    """Returns one number, or one for each channel, as a tuple."""
    try:
        numbers = np.atleast_1d(np.asarray(values, np.float64))
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, or one for each channel; found {values!r}") from None
    if numbers.ndim != 1 or not numbers.size or not np.isfinite(numbers).all():
        raise ValueError(f"{name} must be a finite number, or one for each channel; found {values!r}")
    return tuple(numbers.tolist())


@dataclass(frozen=True)
class Normalize(Transform):
    """(x / 255 - mean) / std for each channel, as float32: torchvision's ToTensor is part of it.

    `mean` and `std` are one number for every channel, or a number for each. The name "imagenet" as `mean` stands for
    both.
    """

    mean: str | float | Sequence[float] = "imagenet"
    std: float | Sequence[float] | None = None
    _values: tuple[tuple[float, ...], tuple[float, ...]] = field(init=False, repr=False, default=((), ()))

    def __post_init__(self) -> None:
        if isinstance(self.mean, str):
            if self.mean not in _STATISTICS or self.std is not None:
                names = ", ".join(_STATISTICS)
                raise ValueError(
                    f"mean must be one of {names} without std, or numbers; found {self.mean!r}, {self.std}"
                )
            values: tuple[tuple[float, ...], tuple[float, ...]] = _STATISTICS[self.mean]
        else:
            values = (_numbers("mean", self.mean), _numbers("std", self.std))
            if min(values[1]) <= 0:
                raise ValueError(f"std must be above 0, as pixels are divided by it; found {self.std}")
            if len({len(numbers) for numbers in values} - {1}) > 1:
                raise ValueError(f"expected as many numbers in std as in mean, or one; found {self.mean}, {self.std}")
        object.__setattr__(self, "_values", values)

    def apply(self, batch: Batch, purpose: str) -> Batch:
        channels = batch.images.shape[1]
        mean, std = (values * channels if len(values) == 1 else values for values in self._values)
        for values in (mean, std):
            if len(values) != channels:
                raise ValueError(f"expected images of {len(values)} channels to normalise; found {channels}")
        if batch.is_cast:
            raise ValueError("expected uint8 images to normalise, from 0 to 255: Normalize comes before ToDtype")
        return replace(batch, statistics=(mean, std))


@dataclass(frozen=True)
class ToDtype(Transform):
    """Cast to a floating point type. uint8 images become 0 to 1 with `scale`, and stay 0 to 255 without."""

    dtype: torch.dtype
    scale: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating point type of torch; found {self.dtype!r}")

    def apply(self, batch: Batch, purpose: str) -> Batch:
        if self.scale and not batch.is_cast:
            channels = batch.images.shape[1]
            batch = replace(batch, statistics=((0.0,) * channels, (1.0,) * channels))
        return replace(batch, dtype=self.dtype)
