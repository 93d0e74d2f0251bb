"""Transforms that crop, resize, flip, pad, normalize and cast. Most of them only record a change in the Batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from shardio.augment.arguments import (
    LATER,
    Fill,
    PositiveRange,
    Probability,
    as_pair,
    check_pair,
    check_whole,
    fill_of,
    numbers_of,
)
from shardio.augment.batch import Batch
from shardio.augment.boxes import Boxes, Looks, random_resized_boxes
from shardio.augment.chain import Transform
from shardio.augment.resample import Cast, Interpolation

PaddingMode = Literal["constant", "edge", "reflect", "symmetric"]

# Mean and standard deviation of red, green and blue in ImageNet, from 0 to 1.
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

Size = Annotated[int | tuple[int, int], check_pair]


def _sides_of(name: str, padding: int | Sequence[int]) -> tuple[int, int, int, int]:
    """Returns the border in pixels: left, above, right, below. Raises ValueError for an invalid `padding`."""
    sides = tuple(padding) if isinstance(padding, Sequence) else (padding,)
    if len(sides) not in (1, 2, 4):
        raise ValueError(f"{name} must be one, two or four numbers of pixels; found {padding!r}")
    for number in sides:
        check_whole(name, number, 0)
    left, above, right, below = sides * (4 // len(sides))
    return left, above, right, below


Padding = Annotated[int | Sequence[int], _sides_of]


@dataclass(frozen=True, repr=False)
class RandomResizedCrop(Transform):
    """Crops a box of random area, aspect ratio and position, and resizes the box to `size`.

    `scale` is (min, max) of the area, as a share of the image's area; `ratio` is (min, max) of width / height.
    `interpolation` is "bilinear", "bicubic", or "random", as in timm, to draw either filter for each image.
    """

    size: Size
    scale: PositiveRange = (0.08, 1.0)
    ratio: PositiveRange = (3 / 4, 4 / 3)
    interpolation: Interpolation = "bilinear"
    antialias: bool = True
    records = True

    def apply(self, batch: Batch, purpose: str) -> Batch:
        if batch.filter:  # the box is a part of the resized image
            batch = batch.finished()
        heights, widths = batch.sizes.T
        boxes = random_resized_boxes(batch.draws, purpose, heights, widths, self.scale, self.ratio)
        sizes = np.full((len(batch), 2), as_pair(self.size))
        return batch.cropped(boxes).resized_to(sizes, self.interpolation, self.antialias, purpose)


@dataclass(frozen=True, repr=False)
class Resize(Transform):
    """Resizes the image to `size`: (height, width), or a number of pixels for the shorter side."""

    size: Size
    interpolation: Interpolation = "bilinear"
    antialias: bool = True
    records = True

    def apply(self, batch: Batch, purpose: str) -> Batch:
        if isinstance(self.size, int):
            short = batch.sizes.min(axis=1, keepdims=True)
            # Long sides are cut to whole pixels.
            sizes = np.where(batch.sizes == short, self.size, self.size * batch.sizes // short)
        else:
            sizes = np.full((len(batch), 2), self.size)
        return batch.resized_to(sizes, self.interpolation, self.antialias, purpose)


@dataclass(frozen=True, repr=False)
class Pad(Transform):
    """Adds a border of `padding` pixels.

    `padding` is a number, (left and right, top and bottom), or (left, top, right, bottom). By default, the border has
    the color `fill`. `padding_mode` "edge" repeats the pixels at the edge. "reflect" and "symmetric" mirror the image,
    without and with the pixels at the edge.
    """

    padding: Padding
    fill: Fill = 0
    padding_mode: PaddingMode = "constant"
    records = True

    def apply(self, batch: Batch, purpose: str) -> Batch:
        left, above, right, below = _sides_of("padding", self.padding)
        batch.check_uint8()
        batch = batch.unsquashed().finished()
        height, width = batch.size
        if self.padding_mode == "reflect" and (max(above, below) >= height or max(left, right) >= width):
            raise ValueError(
                f'padding with padding_mode="reflect" must be less than the image\'s (height, width) {batch.size}; '
                f"found {self.padding!r}"
            )
        firsts = np.full((len(batch), 2), (-above, -left))
        fill = fill_of(self.fill or 0, batch.images.shape[1])
        return batch.placed((height + above + below, width + left + right), firsts, self.padding_mode, fill)


@dataclass(frozen=True, repr=False)
class RandomCrop(Transform):
    """Crops a window of `size` pixels at a random position.

    `size` is (height, width), or a number for both. With `padding`, the image gets a border first: see Pad. With
    `step`, the window begins at a multiple of this number of pixels, for crops on a grid of patches. With
    `pad_if_needed`, an image smaller than the window gets a border, and a random position in the window.
    """

    size: Size
    padding: Padding | None = None
    fill: Fill = 0
    padding_mode: PaddingMode = "constant"
    step: Annotated[int, partial(check_whole, low=1)] | None = field(default=None, metadata=LATER)
    pad_if_needed: bool | None = field(default=None, metadata=LATER)
    records = True

    def apply(self, batch: Batch, purpose: str) -> Batch:
        if self.padding is not None:
            batch = Pad(self.padding, self.fill, self.padding_mode).apply(batch, purpose)
        border = (self.padding_mode, self.fill) if self.pad_if_needed else None
        return _cropped(batch, as_pair(self.size), batch.draws.uniform(purpose, 2), self.step or 1, border)


@dataclass(frozen=True, repr=False)
class CenterCrop(Transform):
    """Crops a window of `size` pixels in the center.

    `size` is (height, width), or a number for both. An image smaller than the window gets a border if there is a
    `padding_mode`: see Pad. Without `padding_mode`, it raises ValueError. (If images were squashed, their original
    sizes count.)
    """

    size: Size
    padding_mode: Literal[PaddingMode, None] = field(default=None, metadata=LATER)
    fill: Fill = field(default=None, metadata=LATER)
    records = True

    def apply(self, batch: Batch, purpose: str) -> Batch:
        border = None if self.padding_mode is None else (self.padding_mode, self.fill)
        return _cropped(batch, as_pair(self.size), None, border=border)


def _cropped(
    batch: Batch,
    size: tuple[int, int],
    places: NDArray[np.float64] | None,
    step: int = 1,
    border: tuple[PaddingMode, Fill] | None = None,
) -> Batch:
    """Returns the batch cropped to windows of `size`.

    `places`, (2, B), are the positions of the windows along both axes, from 0 (top, left) to 1 (bottom, right), rounded
    down to multiples of `step` pixels. None is the center, rounded as in torchvision. Images smaller than `size` get
    the `border`, a mode and a fill; if `border` is None, they raise ValueError.
    """
    room = (batch.sizes - np.array(size)).T
    starts = np.rint(room / 2.0) if places is None else np.floor(places * (room // step + 1)) * step
    stored = np.stack([batch.region.heights, batch.region.widths])
    # Pixels that were resampled are made for all images, as a border needs them: another resize begins with pixels.
    if border is not None and ((room < 0).any() or (stored != batch.sizes.T).any()):
        batch = batch.made() if batch.steps else batch
        batch.check_uint8()
        # The smaller half of an odd border comes first.
        before = -room // 2 if places is None else np.floor(places * (1 - room))
        starts = np.where(room < 0, -before, starts)
        fill = fill_of(border[1] or 0, batch.images.shape[1])
        return batch.placed(size, starts.T.astype(np.int64), border[0], fill)
    if room.size and room.min() < 0:
        height, width = batch.sizes[room.min(axis=0).argmin()].tolist()
        raise ValueError(
            f"a crop of (height, width) = {size} does not fit into an image of {(height, width)}: choose a smaller "
            "crop, or resize first"
        )
    return batch.cropped(Boxes.of_one_size(*size, *starts))


@dataclass(frozen=True, repr=False)
class HorizontalFlip(Transform):
    """Flips each image left and right, with probability `p`."""

    p: Probability = 0.5
    records = True

    def apply(self, batch: Batch, purpose: str) -> Batch:
        return batch.mirrored(batch.draws.uniform(purpose, 1)[0] < self.p)


@dataclass(frozen=True, repr=False)
class AlternatingFlip(Transform):
    """Flips each image left and right in every other pass over the samples.

    A random half of the samples are flipped in even passes, the other half in odd passes. A pass is an epoch; with
    `epoch_batches` or a mixture, it has all samples of the set once. Raises ValueError where samples repeat in a pass.

    Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU", 2024.
    """

    records = True

    def apply(self, batch: Batch, purpose: str) -> Batch:
        draws = batch.draws
        looks = draws.looks or Looks(draws.counters, np.full(len(batch), draws.epoch))
        if looks.passes is None:
            raise ValueError(
                "AlternatingFlip needs passes over all samples; found a loader whose samples may repeat within a pass "
                "(weights, repeats, or repeated indices): use HorizontalFlip"
            )
        first = replace(draws, epoch=0, counters=looks.samples).uniform(purpose, 1)[0] < 0.5
        return batch.mirrored(first ^ (looks.passes % 2 == 1))


@dataclass(frozen=True, repr=False)
class Normalize(Transform):
    """Computes (x / 255 - mean) / std of gray levels x, as float32. No ToTensor is needed.

    `mean` and `std` are a number for all channels, or a number per channel. `Normalize("imagenet")` uses the mean and
    standard deviation of ImageNet.
    """

    mean: str | float | Sequence[float] = "imagenet"
    std: float | Sequence[float] | None = None
    casts = True
    on_any_device = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.statistics

    @cached_property
    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(mean, std) of gray levels / 255, each with one number for all channels or one per channel."""
        if isinstance(self.mean, str):
            if self.mean != "imagenet" or self.std is not None:
                raise ValueError(
                    f'mean must be numbers, or "imagenet" without std; found mean={self.mean!r}, std={self.std}'
                )
            return _IMAGENET
        mean, std = numbers_of("mean", self.mean), numbers_of("std", self.std)
        if min(std) <= 0:
            raise ValueError(f"std must be above 0; found {self.std}")
        if len({len(mean), len(std)} - {1}) > 1:
            raise ValueError(f"std must have as many numbers as mean; found std={self.std}, mean={self.mean}")
        return mean, std

    def apply(self, batch: Batch, purpose: str) -> Batch:
        channels = batch.images.shape[1]
        mean, std = (values * channels if len(values) == 1 else values for values in self.statistics)
        for values in (mean, std):
            if len(values) != channels:
                raise ValueError(f"Normalize: mean and std are for {len(values)} channels; found images of {channels}")
        if batch.is_cast:
            raise ValueError("Normalize needs uint8 images, 0 to 255: put it before ToDtype, and use it only once")
        return replace(batch, cast=Cast((mean, std)))


@dataclass(frozen=True, repr=False)
class ToDtype(Transform):
    """Casts images to `dtype`, a floating point type.

    With `scale`, uint8 images become numbers from 0 to 1. Without `scale`, they become numbers from 0 to 255.
    """

    dtype: torch.dtype
    scale: bool = False
    casts = True
    on_any_device = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise ValueError(f"dtype must be a torch.dtype of floating point numbers; found {self.dtype!r}")

    def apply(self, batch: Batch, purpose: str) -> Batch:
        statistics = batch.cast.statistics
        if self.scale and not batch.is_cast:
            channels = batch.images.shape[1]
            statistics = (0.0,) * channels, (1.0,) * channels
        return replace(batch, cast=Cast(statistics, self.dtype))
