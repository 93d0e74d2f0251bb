"""RandomErasing: replaces rectangles of each image by a color or by noise.

Zhong, Zheng, Kang, Li, Yang, "Random erasing data augmentation", AAAI 2020.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardio.augment.arguments import (
    PositiveRange,
    Probability,
    as_pair,
    check_pair,
    check_range,
    fill_of,
    numbers_of,
)
from shardio.augment.batch import Batch
from shardio.augment.boxes import Draws, between
from shardio.augment.chain import Transform
from shardio.augment.resample import to_device
from shardio.augment.steps import FILL_AT, Op

# torchvision and timm draw this many boxes before they leave the image as it is.
_TRIES = 10

# splitmix64, as in shardio.order.rng, of int64 numbers, whose products are the same modulo 2**64.
_GAMMA, _MIX_1, _MIX_2 = (number - (1 << 64) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _check_count(name: str, count: int | tuple[int, int]) -> None:
    check_pair(name, count)
    least, most = as_pair(count)
    if least > most:
        raise ValueError(f"{name} must be an integer, or (min, max) with min <= max; found {count!r}")


@dataclass(frozen=True, repr=False)
class RandomErasing(Transform):
    """Replaces random rectangles of each image by a color or by noise, with probability `p`.

    - `scale`: (min, max) of the area, as a share of the image's area. `ratio`: (min, max) of height / width.
    - `value`: the color, a number or a number per channel. For normalized images, "random" draws every pixel, and
      "color" draws one color per rectangle, from a standard normal distribution. (In timm: const, pixel and rand.)
    - `count`: the number of rectangles, or (min, max). Each of n rectangles has 1 / n of the area.
    """

    p: Probability = 0.5
    scale: Annotated[tuple[float, float], partial(check_range, low=0, high=1, above=True)] = (0.02, 0.33)
    ratio: PositiveRange = (0.3, 3.3)
    value: float | Sequence[float] | str = 0.0
    count: Annotated[int | tuple[int, int], _check_count] = 1
    records = True
    on_any_device = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.value, str):
            if self.value not in ("random", "color"):
                raise ValueError(
                    f'value must be a number, a number per channel, "random" or "color"; found {self.value!r}'
                )
        else:
            numbers_of("value", self.value)

    def apply(self, batch: Batch, purpose: str) -> Batch:
        batch = batch.unsquashed()
        dtype = batch.images.dtype if batch.cast.made == torch.uint8 else batch.cast.made
        color: Sequence[float] = ()
        if not isinstance(self.value, str):
            color = fill_of(self.value, batch.images.shape[1], "value")
            if not dtype.is_floating_point:
                numbers_of("value", self.value, 0, 255)
        elif not dtype.is_floating_point:
            raise ValueError(f'value "{self.value}" needs normalized images: put RandomErasing after Normalize')
        whether, how_many = batch.draws.uniform(purpose, 2)
        least, most = as_pair(self.count)
        counts = np.where(whether < self.p, least + np.floor(how_many * (most - least + 1)), 0).astype(np.int64)
        parts = [f"{purpose}/{number}" for number in range(most)]
        if not batch.is_cast and batch.images.device.type in ("cpu", "meta"):
            for number, part in enumerate(parts):
                boxes = self._boxes(batch.draws, part, batch.size, np.maximum(counts, 1))
                unused = [0.0] * (FILL_AT - len(boxes))
                batch = batch.stepped(Op.ERASE, *boxes, *unused, *color, where=(number < counts) & (boxes[2] > 0))
            return batch
        done = batch.finished()
        # A cast that changes nothing returns the same tensor, which the caller or another view may have, too.
        images = done.images.clone() if done.images is batch.images else done.images
        for number, part in enumerate(parts):
            boxes = self._boxes(batch.draws, part, images.shape[2:], np.maximum(counts, 1))
            boxes[:, number >= counts] = 0
            if boxes[2].any():
                images = _erased(images, boxes, self._colors(batch.draws, part, images))
        return replace(done, images=images)

    def _boxes(self, draws: Draws, purpose: str, size: Sequence[int], counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns a random box per image: top, left, height, width, int64 (4, B). The height is 0 if no try fits.

        Each box has 1 / `counts`, (B,), of the area that `scale` gives.
        """
        numbers = draws.uniform(purpose, 2 * _TRIES + 2)
        height, width = size
        areas = between(self.scale, numbers[:_TRIES]) * height * width / counts
        ratios = np.exp(between(map(math.log, self.ratio), numbers[_TRIES:-2]))
        heights, widths = np.rint(np.sqrt(areas * ratios)), np.rint(np.sqrt(areas / ratios))
        fits = (heights < height) & (widths < width)
        first = fits.argmax(axis=0), np.arange(fits.shape[1])
        tall, wide = np.where(fits.any(axis=0), heights[first], 0), widths[first]
        rows, columns = np.floor(numbers[-2] * (height - tall + 1)), np.floor(numbers[-1] * (width - wide + 1))
        return np.stack([rows, columns, tall, wide]).astype(np.int64)

    def _colors(self, draws: Draws, purpose: str, images: Tensor) -> Tensor | NDArray[np.int64]:
        """Returns the color of each image, (B, C, 1, 1); for "random", the key of each image's `noise`, int64 (B,)."""
        count, channels = images.shape[:2]
        if self.value == "random":
            return draws.keys(f"{purpose} noise")
        if self.value == "color":
            colors = draws.normal(f"{purpose} color", channels).T
        else:
            colors = np.tile(np.array(fill_of(self.value, channels, "value")), (count, 1))  # type: ignore[arg-type]
        return to_device(torch.from_numpy(np.ascontiguousarray(colors)).to(images.dtype), images.device)[
            ..., None, None
        ]


def _erased(images: Tensor, boxes: NDArray[np.int64], colors: Tensor | NDArray[np.int64]) -> Tensor:
    """Returns the images with `boxes` filled with `colors`. On the CPU, `images` are changed in place."""
    if images.device.type == "cpu":
        for number in np.flatnonzero(boxes[2]):
            top, left, height, width = boxes[:, number].tolist()
            if isinstance(colors, Tensor):
                color = colors[number]
            else:
                key = torch.from_numpy(colors[number : number + 1])
                color = noise(key, (top, left, height, width), images.shape)[0].to(images.dtype)
            images[number, :, top : top + height, left : left + width] = color
        return images
    return _erased_at_once(images, boxes, colors)


def _erased_at_once(images: Tensor, boxes: NDArray[np.int64], colors: Tensor | NDArray[np.int64]) -> Tensor:
    """Returns new images with `boxes` filled with `colors`.

    The number of operations does not depend on the number of images: on a GPU, launches cost more than pixels.
    """
    if not isinstance(colors, Tensor):
        keys = to_device(torch.from_numpy(colors), images.device)
        colors = noise(keys, (0, 0, *images.shape[2:]), images.shape).to(images.dtype)
    # The images come first: the result has the memory format of the first that is as large as it.
    return torch.where(~are_inside(images, boxes[:2], boxes[:2] + boxes[2:]), images, colors)


def are_inside(images: Tensor, firsts: Iterable[NDArray[Any]], ends: Iterable[NDArray[Any]]) -> Tensor:
    """Returns a mask that is true inside a window of each image, bool (B, 1, H, W).

    `firsts` are the first rows and the first columns of the windows, (B,) each. `ends` are the rows and columns after
    the last.
    """
    size = images.shape[2:]
    inside = [
        (places >= first[:, None]) & (places < end[:, None])
        for places, first, end in zip(map(np.arange, size), firsts, ends, strict=True)
    ]
    both = to_device(torch.from_numpy(np.concatenate(inside, axis=1)), images.device)
    rows, columns = both[:, : size[0]], both[:, size[0] :]
    return rows[:, None, :, None] & columns[:, None, None, :]


def noise(keys: Tensor, box: tuple[int, int, int, int], shape: Sequence[int]) -> Tensor:
    """Returns normal noise for a box of each image, float32 (n, C, height, width).

    `keys`, int64 (n,), has a seed per image. `box` is (top, left, height, width) in images of `shape`, (B, C, H, W).
    Each number is one of 65,536 quantiles of the normal distribution. It depends only on the key, the pixel's position
    and the channel, not on the box or the device.
    """
    top, left, height, width = box
    rows = torch.arange(top, top + height, device=keys.device)[:, None]
    pixels = rows * shape[3] + torch.arange(left, left + width, device=keys.device)
    channels = []
    for channel in range(shape[1]):
        if channel % 4 == 0:
            counters = pixels + channel // 4 * shape[2] * shape[3] + 1
            bits = keys[:, None, None] + counters * _GAMMA
            for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, 1)):
                bits = (bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))) * factor
        channels.append((bits >> (16 * (channel % 4))) & 0xFFFF)
    numbers: Tensor = _quantiles(keys.device)[torch.stack(channels, dim=1)]
    return numbers


@cache
def _quantiles(device: torch.device) -> Tensor:
    shares = (torch.arange(1 << 16, dtype=torch.float64) + 0.5) / (1 << 16)
    quantiles: Tensor = torch.special.ndtri(shares).float()
    return quantiles.to(device)
