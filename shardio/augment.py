"""Augmentation of whole batches: crop, resize, flip, normalise, cast.

    transform = Compose([RandomResizedCrop(224), HorizontalFlip(), Normalize("imagenet"), ToDtype(torch.bfloat16)])
    loader = ShardLoader("out/", batch_size=256, transform=transform)

What is random depends on (seed, epoch, sample, view) alone: the same augmented pixels after a resume, on any number of
ranks or threads, on the CPU and on a GPU. Crops, resizes and flips that follow each other are one pass over the pixels.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from shardio.boxes import Boxes, Draws, random_resized_boxes
from shardio.resample import Interpolation, resample

Size = int | tuple[int, int]

# Mean and standard deviation of red, green and blue, from 0 to 1.
_STATISTICS = {"imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}


@dataclass(frozen=True)
class Batch:
    """Pictures on their way through transforms: `images`, of which `boxes` are wanted, mirrored where `flips`, as
    pictures of `size` pixels. None of these is: as they are."""

    images: torch.Tensor
    draws: Draws
    sizes: NDArray[np.int64]
    """Height and width, (B, 2), of the pictures that the images show, before they were squashed to one shape."""
    boxes: Boxes | None = None
    flips: NDArray[np.bool_] | None = None
    size: tuple[int, int] = (0, 0)
    interpolation: Interpolation = "bilinear"
    antialias: bool = True

    def __len__(self) -> int:
        return len(self.images)

    def finished(self) -> Batch:
        """With what is wanted in `images`."""
        if self.boxes is None and self.flips is None:
            return self
        height, width = self.images.shape[2:]
        whole = Boxes(*(np.full(len(self), float(value)) for value in (0, 0, height, width)))
        images = resample(
            self.images,
            self.boxes or whole,
            np.zeros(len(self), bool) if self.flips is None else self.flips,
            self.size if self.boxes else (height, width),
            self.interpolation,
            antialias=self.antialias,
        )
        sizes = np.tile(np.array(images.shape[2:], np.int64), (len(self), 1))
        return replace(self, images=images, sizes=sizes, boxes=None, flips=None)


class Transform(ABC):
    """What is done to each picture of a batch."""

    def __call__(
        self,
        images: torch.Tensor,
        *,
        indices: ArrayLike | None = None,
        seed: int = 0,
        epoch: int = 0,
        view: int = 0,
        sizes: ArrayLike | None = None,
    ) -> torch.Tensor:
        """Transform uint8 images (B, C, H, W) of any device; what comes is on the same device, in channels_last memory.

        A ShardLoader gives the global sample `indices`, (B,), its `seed`, the `epoch`, and for sets that were made with
        `--fit squash` the original `sizes`, (B, 2), height and width. By default indices are 0 to B - 1. Another `view`
        gives other random numbers: several independent views of the same samples. Thread safe.
        """
        if images.dtype != torch.uint8 or images.ndim != 4:
            raise ValueError(f"images must be uint8 (B, C, H, W); found {images.dtype} {tuple(images.shape)}")
        count = len(images)
        numbers = np.arange(count) if indices is None else np.asarray(indices, np.int64)
        if numbers.shape != (count,):
            raise ValueError(f"indices must be {(count,)}; found {numbers.shape}")
        if sizes is None:
            found = np.tile(np.array(images.shape[2:], np.int64), (count, 1))
        else:
            found = np.asarray(sizes, np.int64)
        if found.shape != (count, 2) or (count and found.min() < 1):
            raise ValueError(f"sizes must be {(count, 2)}, each at least 1; found {found.shape}")
        batch = Batch(images, Draws(seed, epoch, numbers, view), found)
        return self.apply(batch, type(self).__name__).finished().images

    @abstractmethod
    def apply(self, batch: Batch, purpose: str) -> Batch:
        """The batch after this transform. `purpose` names its place among others: random numbers are drawn for it."""


@dataclass(frozen=True)
class Compose(Transform):
    """One transform after the other."""

    transforms: Sequence[Transform]

    def apply(self, batch: Batch, purpose: str) -> Batch:
        for number, transform in enumerate(self.transforms):
            batch = transform.apply(batch, f"{purpose}/{number} {type(transform).__name__}")
        return batch


def _pair(name: str, size: Size) -> tuple[int, int]:
    pair = (size, size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2 or not all(isinstance(side, int) and side > 0 for side in pair):
        raise ValueError(f"{name} must be a positive integer, or (height, width); found {size!r}")
    return pair


@dataclass(frozen=True)
class RandomResizedCrop(Transform):
    """A box of random area and aspect ratio at a random place, resized: as torchvision's class of this name.

    `scale` is of the share of the picture's area, `ratio` of width to height. Of pictures that were squashed, the box
    is drawn in the original, and the resize undoes the distortion.
    """

    size: Size
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: Interpolation = "bilinear"
    antialias: bool = True

    def __post_init__(self) -> None:
        _pair("size", self.size)
        _check_interpolation(self.interpolation)
        for name, (low, high) in (("scale", self.scale), ("ratio", self.ratio)):
            if not 0 < low <= high < math.inf:
                raise ValueError(f"{name} must be (least, most), both above 0; found {(low, high)}")

    def apply(self, batch: Batch, purpose: str) -> Batch:
        batch = batch.finished()
        heights, widths = batch.sizes.T
        boxes = random_resized_boxes(batch.draws, purpose, heights, widths, self.scale, self.ratio)
        height, width = batch.images.shape[2:]
        return replace(
            batch,
            boxes=boxes.scaled(height / heights, width / widths),
            size=_pair("size", self.size),
            interpolation=self.interpolation,
            antialias=self.antialias,
        )


@dataclass(frozen=True)
class Resize(Transform):
    """The whole picture, resized to (height, width), or to a square, whatever its aspect ratio was."""

    size: Size
    interpolation: Interpolation = "bilinear"
    antialias: bool = True

    def __post_init__(self) -> None:
        _pair("size", self.size)
        _check_interpolation(self.interpolation)

    def apply(self, batch: Batch, purpose: str) -> Batch:
        batch = batch.finished()
        height, width = batch.images.shape[2:]
        whole = Boxes(*(np.full(len(batch), float(value)) for value in (0, 0, height, width)))
        return replace(
            batch,
            boxes=whole,
            size=_pair("size", self.size),
            interpolation=self.interpolation,
            antialias=self.antialias,
        )


def _check_interpolation(name: str) -> None:
    if name not in get_args(Interpolation):
        raise ValueError(f"interpolation must be one of {', '.join(get_args(Interpolation))}; found {name!r}")


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
    """A window of so many pixels, height and width, in the centre; nothing is resized."""

    size: Size

    def __post_init__(self) -> None:
        _pair("size", self.size)

    def apply(self, batch: Batch, purpose: str) -> Batch:
        return _cropped(batch, _pair("size", self.size), None)


def _cropped(batch: Batch, size: tuple[int, int], places: NDArray[np.float64] | None) -> Batch:
    """Windows at `places`, from 0 to 1 along both axes, or in the centre, where torchvision has it."""
    batch = batch.finished()
    room = [have - want for have, want in zip(batch.images.shape[2:], size, strict=True)]
    if min(room) < 0:
        raise ValueError(f"a crop of {size} pixels does not fit into pictures of {tuple(batch.images.shape[2:])}")
    if places is None:
        starts = [np.full(len(batch), round(most / 2.0), float) for most in room]
    else:
        starts = [np.floor(place * (most + 1)) for place, most in zip(places, room, strict=True)]
    boxes = Boxes(*starts, *(np.full(len(batch), float(side)) for side in size))
    return replace(batch, boxes=boxes, size=size)


@dataclass(frozen=True)
class HorizontalFlip(Transform):
    """Mirror left and right, with probability `p`."""

    p: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise ValueError(f"p must be from 0 to 1; found {self.p}")

    def apply(self, batch: Batch, purpose: str) -> Batch:
        flips = batch.draws.uniform(purpose, 1)[0] < self.p
        return replace(batch, flips=flips if batch.flips is None else batch.flips ^ flips)


@dataclass(frozen=True)
class Normalize(Transform):
    """(x / 255 - mean) / std for each channel, as float32. `mean` may be a name, "imagenet", that stands for both."""

    mean: str | Sequence[float] = "imagenet"
    std: Sequence[float] | None = None
    _values: tuple[Sequence[float], Sequence[float]] = field(init=False, repr=False, default=((), ()))

    def __post_init__(self) -> None:
        if isinstance(self.mean, str):
            if self.mean not in _STATISTICS or self.std is not None:
                names = ", ".join(_STATISTICS)
                raise ValueError(
                    f"mean must be one of {names} without std, or numbers; found {self.mean!r}, {self.std}"
                )
            values: tuple[Sequence[float], Sequence[float]] = _STATISTICS[self.mean]
        elif self.std is None or len(self.mean) != len(self.std) or min(self.std) <= 0:
            raise ValueError(f"expected as many numbers above 0 in std as in mean; found {self.mean}, {self.std}")
        else:
            values = (tuple(self.mean), tuple(self.std))
        object.__setattr__(self, "_values", values)

    def apply(self, batch: Batch, purpose: str) -> Batch:
        batch = batch.finished()
        mean, std = (torch.tensor(values, device=batch.images.device)[:, None, None] for values in self._values)
        if len(mean) != batch.images.shape[1]:
            raise ValueError(f"expected images of {len(mean)} channels; found {batch.images.shape[1]}")
        if batch.images.dtype != torch.uint8:
            raise ValueError(f"expected uint8 images to normalise; found {batch.images.dtype}")
        # One multiplication and one addition for each value.
        return replace(batch, images=torch.addcmul(-mean / std, batch.images.float(), 1 / (255 * std)))


@dataclass(frozen=True)
class ToDtype(Transform):
    """Cast to a floating point type. uint8 images become 0 to 1 with `scale`, and stay 0 to 255 without."""

    dtype: torch.dtype
    scale: bool = False

    def __post_init__(self) -> None:
        if not self.dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating point type; found {self.dtype}")

    def apply(self, batch: Batch, purpose: str) -> Batch:
        batch = batch.finished()
        images = batch.images
        if self.scale and images.dtype == torch.uint8:
            images = images.float() / 255
        return replace(batch, images=images.to(self.dtype))
