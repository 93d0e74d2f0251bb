"""Color transforms with the names, arguments and results of torchvision."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import numpy as np

from shardio.augment.arguments import Probability, around, as_pair, check_number, check_pair, check_range, check_whole
from shardio.augment.batch import Batch
from shardio.augment.boxes import between
from shardio.augment.chain import Transform
from shardio.augment.steps import Op

Range = float | tuple[float, float]


@dataclass(frozen=True, repr=False)
class ColorJitter(Transform):
    """Changes brightness, contrast, saturation and hue, in random order.

    Each argument is (min, max) of a random amount, drawn for each image. `brightness`, `contrast` and `saturation` are
    factors, and a number x means (max(0, 1 - x), 1 + x). `hue` is a share of the color circle from -0.5 to 0.5, and a
    number x means (-x, x).
    """

    brightness: Range = 0.0
    contrast: Range = 0.0
    saturation: Range = 0.0
    hue: Range = 0.0
    records = True

    OPS: ClassVar = {
        "brightness": (Op.BRIGHTNESS, 1.0, 0.0, float("inf")),
        "contrast": (Op.CONTRAST, 1.0, 0.0, float("inf")),
        "saturation": (Op.SATURATION, 1.0, 0.0, float("inf")),
        "hue": (Op.HUE, 0.0, -0.5, 0.5),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.OPS:
            self.bounds(name)

    def bounds(self, name: str) -> tuple[float, float]:
        _, center, least, most = self.OPS[name]
        return around(name, getattr(self, name), center, least, most)

    def apply(self, batch: Batch, purpose: str) -> Batch:
        numbers = batch.draws.uniform(purpose, 2 * len(self.OPS))
        ops, factors, places = [], [], []
        for (name, (op, center, *_)), share, place in zip(self.OPS.items(), numbers[::2], numbers[1::2], strict=True):
            bounds = self.bounds(name)
            if bounds != (center, center):
                ops.append(op)
                factors.append(between(bounds, share))
                places.append(place)
        if not ops:
            return batch
        order = np.argsort(np.stack(places), axis=0)
        codes, values = np.array(ops, np.uint8)[order], np.take_along_axis(np.stack(factors), order, axis=0)
        for code, value in zip(codes, values, strict=True):
            batch = batch.stepped(code, value)
        return batch


class Sometimes(Transform):
    """Applies the operation `op` to each image with probability `p`. `values` names the arguments that `op` gets."""

    records = True
    op: ClassVar[Op]
    values: ClassVar[tuple[str, ...]] = ()
    p: Probability

    def apply(self, batch: Batch, purpose: str) -> Batch:
        values = (getattr(self, name) for name in self.values)
        return batch.stepped(self.op, *values, where=batch.draws.uniform(purpose, 1)[0] < self.p)


@dataclass(frozen=True, repr=False)
class RandomGrayscale(Sometimes):
    """Replaces colors by 0.2989 red + 0.587 green + 0.114 blue, with probability `p`."""

    p: Probability = 0.1
    op = Op.GRAYSCALE


@dataclass(frozen=True, repr=False)
class RandomInvert(Sometimes):
    """Replaces gray levels x by 255 - x, with probability `p`."""

    p: Probability = 0.5
    op = Op.INVERT


@dataclass(frozen=True, repr=False)
class RandomAutocontrast(Sometimes):
    """Stretches the gray levels of each channel to the range from 0 to 255, with probability `p`."""

    p: Probability = 0.5
    op = Op.AUTOCONTRAST


@dataclass(frozen=True, repr=False)
class RandomEqualize(Sometimes):
    """Equalizes the histogram of each channel, with probability `p`."""

    p: Probability = 0.5
    op = Op.EQUALIZE


@dataclass(frozen=True, repr=False)
class RandomPosterize(Sometimes):
    """Keeps the `bits` highest bits of each gray level, and sets the others to 0, with probability `p`."""

    bits: Annotated[int, partial(check_whole, low=0, high=8)]
    p: Probability = 0.5
    op = Op.POSTERIZE
    values = ("bits",)


@dataclass(frozen=True, repr=False)
class RandomSolarize(Sometimes):
    """Inverts gray levels from `threshold` to 255, with probability `p`. A threshold of 256 inverts nothing."""

    threshold: Annotated[float, partial(check_number, low=0, high=256)]
    p: Probability = 0.5
    op = Op.SOLARIZE
    values = ("threshold",)


@dataclass(frozen=True, repr=False)
class RandomAdjustSharpness(Sometimes):
    """Changes the sharpness by `sharpness_factor`, with probability `p`.

    0 blurs, 1 changes nothing, 2 doubles the sharpness.
    """

    sharpness_factor: Annotated[float, partial(check_number, low=0)]
    p: Probability = 0.5
    op = Op.SHARPNESS
    values = ("sharpness_factor",)


def _check_kernel_size(name: str, kernel_size: int | tuple[int, int]) -> None:
    check_pair(name, kernel_size)
    if not all(size % 2 for size in as_pair(kernel_size)):
        raise ValueError(f"{name} must be odd; found {kernel_size!r}")


def _check_sigma(name: str, sigma: Range) -> None:
    check_range(name, as_pair(sigma), 0, above=True)


@dataclass(frozen=True, repr=False)
class GaussianBlur(Transform):
    """Blurs with a Gaussian of `kernel_size` pixels.

    `kernel_size` is an odd number, or (width, height), both odd. `sigma`, the standard deviation in pixels, is a
    number, or (min, max) to draw it for each image. The image is mirrored at its edges.
    """

    kernel_size: Annotated[int | tuple[int, int], _check_kernel_size]
    sigma: Annotated[Range, _check_sigma] = (0.1, 2.0)
    records = True

    def apply(self, batch: Batch, purpose: str) -> Batch:
        width, height = as_pair(self.kernel_size)
        batch = batch.unsquashed()
        if width // 2 >= batch.size[1] or height // 2 >= batch.size[0]:
            raise ValueError(
                f"kernel_size must be less than twice the image's (width, height), {batch.size[::-1]}; found "
                f"{self.kernel_size!r}"
            )
        # Below 0.001, nothing changes, and the kernel would divide by 0.
        sigmas = np.maximum(between(as_pair(self.sigma), batch.draws.uniform(purpose, 1)[0]), 1e-3)
        return batch.stepped(Op.BLUR, width, height, sigmas, sigmas)
