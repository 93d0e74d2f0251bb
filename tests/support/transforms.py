"""One transform of each public class of shardio.augment, for tests of what all of them promise."""

from __future__ import annotations

from typing import Any

import torch

from shardio.augment import (
    AlternatingFlip,
    AutoAugment,
    CenterCrop,
    ColorJitter,
    Compose,
    CutMix,
    GaussianBlur,
    HorizontalFlip,
    Mixup,
    Normalize,
    Pad,
    RandAugment,
    RandomAdjustSharpness,
    RandomAffine,
    RandomApply,
    RandomAutocontrast,
    RandomChoice,
    RandomCrop,
    RandomEqualize,
    RandomErasing,
    RandomGrayscale,
    RandomInvert,
    RandomOrder,
    RandomPerspective,
    RandomPosterize,
    RandomResizedCrop,
    RandomRotation,
    RandomSolarize,
    Resize,
    TimmRandAugment,
    ToDtype,
    TrivialAugmentWide,
    VerticalFlip,
    Views,
)
from shardio.augment.chain import Transform

# For pictures of 18 x 17, of one channel or three. Those that draw nothing:
FIXED: list[Transform] = [
    CenterCrop((12, 9)),
    Compose([Resize(14), Pad((1, 2))]),
    Normalize(0.4, (0.3,)),
    Pad((1, 0, 2, 3), 7),
    Resize((9, 20), "bicubic", antialias=False),
    ToDtype(torch.float16, scale=True),
]
RANDOM: list[Transform] = [
    AlternatingFlip(),
    AutoAugment("cifar10"),
    ColorJitter(0.4, (0.5, 2), 0.3, 0.1),
    GaussianBlur((3, 5), (0.5, 3)),
    HorizontalFlip(0.4),
    RandAugment(3, 12, interpolation="bilinear"),
    RandomAdjustSharpness(1.8),
    RandomAffine(20, (0.1, 0.2), (0.7, 1.2), (-3, 4, -5, 6), "bilinear", (9,), (3.5, 7)),
    RandomApply([ColorJitter(0.9), RandomErasing(1.0, value=3), RandomRotation(20)], 0.6),
    RandomAutocontrast(0.7),
    RandomChoice([Compose([RandomInvert(1.0), RandomCrop(12)]), CenterCrop(12), RandomResizedCrop(12)], (1, 0.5, 2)),
    RandomCrop(15, (2, 1), padding_mode="symmetric"),
    RandomEqualize(0.6),
    RandomErasing(0.8, (0.1, 0.2), (0.5, 2), 5, (1, 3)),
    RandomGrayscale(0.4),
    RandomInvert(0.3),
    RandomOrder([RandomRotation(30), RandomSolarize(80, 0.5), RandomErasing(0.4)]),
    RandomPerspective(0.4, 0.8),
    RandomPosterize(3),
    RandomResizedCrop(11, (0.2, 0.9), interpolation="bicubic"),
    Compose([RandomResizedCrop(11, interpolation="random"), HorizontalFlip()]),
    RandomRotation((-10, 50), fill=200),
    RandomSolarize(128),
    TimmRandAugment("rand-m7-mstd0.5-inc1-p0.9", fill=100),
    TrivialAugmentWide(),
    VerticalFlip(),
    Compose([RandomResizedCrop((9, 16), interpolation="random"), CenterCrop(14, "reflect")]),
    Compose([HorizontalFlip(), RandomCrop(20, pad_if_needed=True, fill=9)]),
]
OF_BATCHES: list[Transform] = [
    CutMix(5, 0.8, 0.9, True, "flip", 0.1, (0.2, 0.8)),
    Compose([ToDtype(torch.float32), Mixup(5, 0.2)]),
    Compose([Normalize(0.5, 0.5), Mixup(5, per_sample=True)]),
    Views([RandomCrop(9), Compose([RandomCrop(8), RandomGrayscale()])]),
]
"""Transforms whose result is made of several pictures, or is several."""

SINGLE = [*FIXED, *RANDOM]
ALL = [*SINGLE, *OF_BATCHES]


def changed(transform: Transform, images: torch.Tensor, **options: Any) -> torch.Tensor:
    """Returns what a transform makes of images, by seed 0 and indices from 0 unless `options` say otherwise."""
    result = transform(images, **{"seed": 0, "indices": range(len(images)), **options})
    assert isinstance(result, torch.Tensor)
    return result


def name_of(transform: object) -> str:
    return type(transform).__name__


def by_torch(images: torch.Tensor) -> torch.Tensor:
    """A function that draws once per call."""
    return images.flip(-1) if torch.rand(()) < 0.5 else images
