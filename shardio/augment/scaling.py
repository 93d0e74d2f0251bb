"""Random sizes: images of a batch get different sizes, until a crop or a resize gives them one size again."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from shardio.augment.batch import Batch
from shardio.augment.boxes import Boxes, between
from shardio.augment.chain import Transform
from shardio.augment.checks import Probability, as_pair, check_whole, positive_range, whole
from shardio.augment.resample import Interpolation
from shardio.augment.transforms import Size, with_short_side

Range = Annotated[tuple[float, float], positive_range()]
Ints = NDArray[np.int64]


def _whole(sizes: NDArray[np.float64]) -> Ints:
    """Returns sizes cut to whole pixels. A product just below a whole number is this number."""
    cut: Ints = np.floor(sizes + 1e-9).astype(np.int64)
    return cut


class _RandomSize(Transform):
    """Resizes each image to a size of its own."""

    interpolation: Interpolation
    antialias: bool

    def apply(self, batch: Batch, purpose: str) -> Batch:
        sizes = np.maximum(self._sizes(batch, purpose), 1)
        return batch.resized_to(sizes, self.interpolation, self.antialias, purpose)

    @abstractmethod
    def _sizes(self, batch: Batch, purpose: str) -> Ints:
        """Returns the new heights and widths, (B, 2)."""


@dataclass(frozen=True, repr=False)
class RandomResize(_RandomSize):
    """Resizes the shorter side to a random number of pixels, from `min_size` to less than `max_size`."""

    min_size: Annotated[int, whole(1)]
    max_size: Annotated[int, whole(2)]
    interpolation: Interpolation = "bilinear"
    antialias: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("max_size", self.max_size, self.min_size + 1)

    def _sizes(self, batch: Batch, purpose: str) -> Ints:
        sides = np.floor(between((self.min_size, self.max_size), batch.draws.uniform(purpose, 1)[0]))
        return with_short_side(batch.sizes, sides.astype(np.int64))


@dataclass(frozen=True, repr=False)
class RandomShortestSize(_RandomSize):
    """Resizes the shorter side to one of the sizes `min_size`, but the longer side to `max_size` at most."""

    min_size: int | Sequence[int]
    max_size: int | None = None
    interpolation: Interpolation = "bilinear"
    antialias: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for size in (*self._choices, *([] if self.max_size is None else [self.max_size])):
            check_whole("min_size and max_size", size, 1)
        check_whole("the number of min_size", len(self._choices), 1)

    @property
    def _choices(self) -> tuple[int, ...]:
        return tuple(self.min_size) if isinstance(self.min_size, Sequence) else (self.min_size,)

    def _sizes(self, batch: Batch, purpose: str) -> Ints:
        places = (batch.draws.uniform(purpose, 1)[0] * len(self._choices)).astype(np.int64)
        scales = np.array(self._choices)[places] / batch.sizes.min(axis=1)
        if self.max_size is not None:
            scales = np.minimum(scales, self.max_size / batch.sizes.max(axis=1))
        return _whole(batch.sizes * scales[:, None])


@dataclass(frozen=True, repr=False)
class ScaleJitter(_RandomSize):
    """Resizes to fit `target_size`, (height, width), times a random factor from `scale_range`: large scale jitter.

    Ghiasi et al., "Simple copy-paste is a strong data augmentation method for instance segmentation", CVPR 2021. Put
    `RandomCrop(target_size, pad_if_needed=True)` after it.
    """

    target_size: Size
    scale_range: Range = (0.1, 2.0)
    interpolation: Interpolation = "bilinear"
    antialias: bool = True

    def _sizes(self, batch: Batch, purpose: str) -> Ints:
        scales = between(self.scale_range, batch.draws.uniform(purpose, 1)[0])
        fitting = (np.array(as_pair(self.target_size)) / batch.sizes).min(axis=1)
        return _whole(batch.sizes * (fitting * scales)[:, None])


@dataclass(frozen=True, repr=False)
class ResizeKeepRatio(_RandomSize):
    """Resizes so that the image covers `size`, with random changes of scale and aspect ratio, as timm does.

    - `longest`: 0 covers `size`, 1 fits into it, and numbers between are between.
    - `random_scale_prob`, `random_scale_range`: how often, and by which factor, the image becomes smaller; with
      `random_scale_area`, a share of the area that a crop of `size` shows.
    - `random_aspect_prob`, `random_aspect_range`: how often, and how, height / width changes.

    timm's crop modes "rkrc" and "rkrr" have a CenterCrop or a RandomCrop after it, with padding_mode="reflect".
    """

    size: Size
    longest: Probability = 0.0
    random_scale_prob: Probability = 0.0
    random_scale_range: Range = (0.85, 1.05)
    random_scale_area: bool = False
    random_aspect_prob: Probability = 0.0
    random_aspect_range: Range = (0.9, 1.11)
    interpolation: Interpolation = "bilinear"
    antialias: bool = True

    def _sizes(self, batch: Batch, purpose: str) -> Ints:
        is_scaled, scale, is_stretched, aspect = batch.draws.uniform(purpose, 4)
        ratios = (batch.sizes / np.array(as_pair(self.size))).T
        ratio = ratios.max(axis=0) * self.longest + ratios.min(axis=0) * (1 - self.longest)
        factor = between(self.random_scale_range, scale)
        factor = 1 / np.sqrt(factor) if self.random_scale_area else factor
        factor = np.where(is_scaled < self.random_scale_prob, factor, 1.0)
        stretch = np.exp(between(map(math.log, self.random_aspect_range), aspect) / 2)
        stretch = np.where(is_stretched < self.random_aspect_prob, stretch, 1.0)
        factors = np.stack([factor / stretch, factor * stretch], axis=1)
        sizes: Ints = np.rint(batch.sizes * factors / ratio[:, None]).astype(np.int64)
        return sizes


@dataclass(frozen=True, repr=False)
class RandomSizeCrop(Transform):
    """Crops a window of random height and width, from `min_size` to `max_size` pixels or the image's side.

    Carion, Massa, Synnaeve, Usunier, Kirillov, Zagoruyko, "End-to-end object detection with transformers", ECCV 2020.
    """

    min_size: Annotated[int, whole(1)]
    max_size: Annotated[int, whole(1)]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("max_size", self.max_size, self.min_size)

    def apply(self, batch: Batch, purpose: str) -> Batch:
        lengths, places = batch.draws.uniform(purpose, 4).reshape(2, 2, -1)
        high = np.minimum(batch.sizes.T, self.max_size)
        low = np.minimum(self.min_size, high)
        sides = low + np.floor(lengths * (high - low + 1))
        return batch.cropped(Boxes(*np.floor(places * (batch.sizes.T - sides + 1)), *sides))
