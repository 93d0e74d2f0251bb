"""What transforms refuse: arguments when they are made, batches when they are called. Errors name what is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

import shardio.augment
from shardio.augment import Compose, HorizontalFlip, Normalize
from shardio.augment.boxes import Draws

NAMES = {**vars(shardio.augment), "nan": math.nan, "inf": math.inf, "torch": torch, "np": np}

# What the error names, and calls that it refuses.
VALUES: dict[str, list[str]] = {
    "size must be": [
        *("RandomResizedCrop(0)", "RandomResizedCrop((3, 4, 5))", "Resize(-3)", "Resize(3.5)", "RandomCrop(0)"),
        *("CenterCrop(0)", "recipe('dino', 0)", "recipe('dino', '224')", "recipe('dino', 224.0)"),
    ],
    "scale must be": [
        *("RandomResizedCrop(8, (0.0, 1.0))", "RandomResizedCrop(8, 0.5)", "RandomAffine(1, scale=(0, 1))"),
        *("RandomAffine(1, scale=2)", "RandomErasing(scale=0.1)", "RandomErasing(scale=(0, 0.5))"),
        *("RandomErasing(scale=(0.5, 1.5))", "RandomErasing(scale=(0.5, 0.2))", "RandomErasing(scale=(0.5, nan))"),
    ],
    "ratio must be": [
        *("RandomResizedCrop(8, ratio=(2.0, 1.0))", "RandomErasing(ratio=(0, 1))", "RandomErasing(ratio=(1, inf))"),
        "RandomErasing(ratio=(1, 2, 3))",
    ],
    "interpolation must be one of": [
        *("RandomResizedCrop(8, interpolation='nearest')", "RandomRotation(1, 'bicubic')"),
        *("RandomPerspective(interpolation='x')", "RandAugment(interpolation='bicubic')"),
        *("TrivialAugmentWide(interpolation=None)", "TimmRandAugment(interpolation='nearest')"),
    ],
    "p must be": [
        *("HorizontalFlip(1.5)", "VerticalFlip(nan)", "RandomGrayscale(1.1)", "RandomInvert(-0.1)"),
        *("RandomPerspective(p=nan)", "RandomErasing(1.1)", "RandomApply([CenterCrop(3)], nan)"),
        *("RandomChoice([CenterCrop(3)], 0.5)", "RandomChoice([CenterCrop(3)], 'a')", "Mixup(9, p=2.0)"),
        *("RandomChoice([CenterCrop(3)], [nan])", "RandomChoice([CenterCrop(3)], [inf])"),
        *("RandomChoice([CenterCrop(3)] * 2, [0, 0])", "RandomChoice([CenterCrop(3)] * 2, [1])"),
        "RandomChoice([CenterCrop(3)] * 2, [2, -1])",
    ],
    "padding must be": [
        *("Pad(-1)", "Pad(1.5)", "Pad((1, nan))", "Pad((1, 2, 3))", "Pad(())", "Pad('12')", "Pad(None)"),
        *("RandomCrop(8, -1)", "RandomCrop(8, (1, 2, 3))"),
    ],
    "padding_mode must be one of": ["Pad(1, padding_mode='wrap')", "RandomCrop(8, 2, padding_mode='mirror')"],
    "fill must be": [
        *("Pad(1, 256)", "Pad(1, nan)", "Pad(1, ())", "RandomCrop(8, 2, -3)", "RandomRotation(1, fill=(0, nan, 0))"),
        *("RandomRotation(1, fill='red')", "RandAugment(fill=-1)", "TimmRandAugment(fill=None)"),
    ],
    "brightness must be": ["ColorJitter(-0.1)", "ColorJitter(nan)", "ColorJitter(inf)"],
    "contrast must be": [f"ColorJitter(contrast=({pair}))" for pair in ("1, nan", "nan, 1", "1, inf")],
    "saturation must be": [f"ColorJitter(saturation=({some}))" for some in ("2, 1", "1, 2, 3", "", "-1, 2")],
    "hue must be": ["ColorJitter(hue=0.6)", "ColorJitter(hue=(-0.6, 0))"],
    "bits must be an integer": [f"RandomPosterize({bits})" for bits in ("9", "3.5", "'3'", "True")],
    "threshold must be": ["RandomSolarize(-1)", "RandomSolarize(nan)"],
    "sharpness_factor must be": [f"RandomAdjustSharpness({factor})" for factor in ("-1", "nan", "inf")],
    "kernel_size must be": [f"GaussianBlur({size})" for size in ("4", "0", "(3, 5, 7)", "()", "'ab'")],
    "sigma must be": [f"GaussianBlur(3, {sigma})" for sigma in ("0", "(2, 1)", "(1, nan)", "'x'")],
    "degrees must be": [f"RandomRotation({some})" for some in ("-1", "inf", "(1, 2, 3)", "(2, 1)", "(1, nan)")],
    "center must be": [f"RandomRotation(1, center={some})" for some in ("3", "0", "'ab'", "(1, 2, 3)", "(1, inf)")],
    "translate must be": [f"RandomAffine(1, {some})" for some in ("0.1", "(0.1,)", "'ab'", "(0.1, 1.1)", "(nan, 0)")],
    "shear must be": [f"RandomAffine(1, shear={some})" for some in ("(1, 2, 3)", "(2, 1)", "(0, 1, 2, inf)", "-3")],
    "distortion_scale must be": ["RandomPerspective(1.1)"],
    "value must be": [f"RandomErasing(value={value})" for value in ("'rand'", "nan", "(0, inf, 0)", "()")],
    "count must be": [f"RandomErasing(count={count})" for count in ("0", "2.0", "(3, 2)", "(1, 2, 3)", "'2'")],
    "num_ops must be": ["RandAugment(-1)", "RandAugment(2.0)", "RandAugment('2')"],
    "magnitude must be": ["RandAugment(magnitude=31)", "RandAugment(magnitude=nan)"],
    "num_magnitude_bins must be": ["RandAugment(num_magnitude_bins=1, magnitude=0)", "TrivialAugmentWide(1)"],
    "policy must be one of": ["AutoAugment('mnist')", "AutoAugment(3)"],
    "config must be": [
        *(
            f"TimmRandAugment('rand-{part}')"
            for part in ("m9-x3", "m", "m-9", "mnan", "minf", "ninf", "mmaxinf", "m9.5")
        ),
        *(f"TimmRandAugment('rand-m9-{part}')" for part in ("p1.5", "inc2", "t")),
        *("TimmRandAugment('other-m5')", "TimmRandAugment('')", "TimmRandAugment(9)"),
    ],
    "mean must be": [
        *("Normalize('cifar')", "Normalize(nan, 1.0)", "Normalize([[0.5]], 1.0)", "Normalize([], [])"),
    ],
    "std must be": ["Normalize([0.5], [0.0])", "Normalize(0.5, -1)", "Normalize([0.5] * 3)"],
    "as many numbers": ["Normalize([0.5, 0.5], [0.5] * 3)"],
    "dtype must be": ["ToDtype(torch.uint8)", "ToDtype('float32')"],
    "num_classes must be at least 1, and alpha": ["Mixup(0)", "CutMix(9, alpha=0.0)", "recipe('timm-rsb-a1', 224, 0)"],
    "minmax": ["CutMix(9, minmax=(0.5, 0.2))", "CutMix(9, minmax=(0.2, 1.5))", "CutMix(9, minmax=0.5)"],
    "label_smoothing": ["CutMix(9, label_smoothing=1.0)"],
    "partner must be one of": ["Mixup(9, partner='next')"],
    "name must be one of": ["recipe('resnet')", "recipe(['dino'])", "recipe(None)"],
    "must be from shardio.augment": [
        *("Compose([abs])", "Views([abs])", "RandomChoice([abs])"),
    ],
    "Views must be the last": [
        *("RandomApply([Views([CenterCrop(3)])])", "RandomChoice([Compose([Views([CenterCrop(3)])])])"),
        "Compose([Views([CenterCrop(3)]), Normalize()])",
    ],
    "step": ["RandomCrop(3, step=0)", "RandomCrop(3, step=1.5)"],
    "one or more": ["Views([])", "RandomApply([])", "RandomOrder([])", "RandomChoice([])"],
    "at most 32 transforms": ["RandomOrder([VerticalFlip()] * 33)"],
    "Mixup or CutMix": ["RandomApply([CutMix(3)])", "RandomApply([Compose([CutMix(3)])])", "RandomOrder([CutMix(3)])"],
    "outermost": ["Views([Compose([], mask_fill=1)])"],
}
TYPES: dict[str, list[str]] = {
    "p must be a number": [
        *("HorizontalFlip('x')", "RandomGrayscale([0.5])", "RandomErasing('x')", "RandomApply([CenterCrop(3)], 'x')"),
        "RandomChoice([CenterCrop(3)], ['x'])",
    ],
    "must be True or False": [
        *("Resize(8, antialias='false')", "RandomResizedCrop(8, antialias=None)", "ToDtype(torch.float32, 'no')"),
        *("Mixup(9, per_sample=1)", "RandomCrop(3, pad_if_needed='reflect')"),
    ],
    "scale must be a number": ["RandomResizedCrop(8, ('a', 'b'))", "RandomErasing(scale=('a', 1))"],
    "fill must be a number": ["RandAugment(fill=('a', 1, 2))", "RandomRotation(1, fill=(0, 'a', 0))"],
    "brightness must be a number": ["ColorJitter('x')", "ColorJitter(None)"],
    "hue must be a number": ["ColorJitter(hue=(0, 'x'))"],
    "threshold must be a number": ["RandomSolarize('x')"],
    "sharpness_factor must be a number": ["RandomAdjustSharpness('x')"],
    "degrees must be a number": ["RandomRotation('x')", "RandomRotation(None)"],
    "center must be a number": ["RandomRotation(1, center=('a', 1))"],
    "translate must be a number": ["RandomAffine(1, ('a', 0))"],
    "shear must be a number": ["RandomAffine(1, shear='x')"],
    "distortion_scale must be a number": ["RandomPerspective('x')"],
    "value must be a number": ["RandomErasing(value=None)", "RandomErasing(value=(0, 'a'))"],
    "std must be a number": ["Normalize(0.5, 'x')"],
    "num_classes must be an integer": ["Mixup('a')", "CutMix(2.5)"],
    "alpha must be a number": ["Mixup(3, alpha='x')"],
    "transforms must be a list": [
        "Compose(3)",
        "Views(CenterCrop(3))",
        "RandomApply(CenterCrop(3))",
        "RandomOrder(None)",
    ],
    "mask_fill": ["Compose([], mask_fill={'m': '255'})"],
    "transform must be a function": ["PerSample(HorizontalFlip())", "PerSample(3)"],
    "must be tensors": [
        *("CenterCrop(2)(np.zeros((1, 3, 4, 4), np.uint8))", "CenterCrop(2)(torch.zeros(1, 3, 4, 4).byte(), [1])"),
    ],
}


@pytest.mark.parametrize(("word", "call"), [(word, call) for word in VALUES for call in VALUES[word]])
def test_values_that_make_no_sense_are_refused(word: str, call: str) -> None:
    with pytest.raises(ValueError, match=word):
        eval(call, NAMES)


@pytest.mark.parametrize(("word", "call"), [(word, call) for word in TYPES for call in TYPES[word]])
def test_values_of_a_wrong_type_are_refused(word: str, call: str) -> None:
    with pytest.raises(TypeError, match=word):
        eval(call, NAMES)


# What the error says, transforms, and the images (2, channels, 8, 8) and options that they refuse whatever they draw.
BATCHES: list[tuple[str, list[str], int, Mapping[str, Any]]] = [
    ("does not fit into", ["CenterCrop(9)", "RandomCrop((3, 9))", "RandomCrop(13, 2)"], 3, {}),
    ("indices must be integers", ["CenterCrop(4)"], 3, {"indices": [1, 2, 3]}),
    ("found float64", ["CenterCrop(4)"], 3, {"indices": [0.5, 1.5]}),
    ("indices", ["HorizontalFlip()"], 3, {"epoch": 2}),
    ("sizes must be of shape", ["CenterCrop(4)"], 3, {"sizes": [[3, 4]]}),
    ("minimum 1", ["CenterCrop(4)"], 3, {"sizes": [[8, 0], [8, 8]]}),
    ("one size", ["Resize(4)", "RandAugment()"], 3, {"sizes": [[8, 16], [8, 8]]}),
    ("one size and dtype", ["RandomApply([Normalize()])"], 3, {}),
    ("one size", ["RandomChoice([CenterCrop(4), CenterCrop(5)])"], 3, {"seed": 1}),
    ("seed", ["RandomCrop(4)"], 3, {"seed": -1}),
    ("view must be", ["HorizontalFlip()"], 3, {"view": -1}),
    ("2 channels", ["Normalize([0.5] * 2, 0.5)"], 3, {}),
    ("before ToDtype", ["Compose([ToDtype(torch.float32), Normalize()])"], 3, {}),
    ("less than the", ["Pad(8, padding_mode='reflect')"], 3, {}),
    ("less than twice the", ["GaussianBlur((17, 15))", "GaussianBlur((15, 17))"], 3, {}),
    (
        "images have 3 channels",
        [
            "Pad(1, (1, 2))",
            "RandomErasing(0.0, value=(1, 2))",
            "RandomRotation(5, fill=(1, 2))",
            "RandAugment(fill=(1, 2))",
        ],
        3,
        {},
    ),
    ("images have 1 channels", ["RandomPerspective(p=0.0, fill=(1, 2, 3))", "TimmRandAugment()"], 1, {}),
    (
        "red, green and blue",
        [
            *("ColorJitter(0.1, 0.1)", "ColorJitter(hue=0.1)", "RandomGrayscale(1e-9)", "RandAugment()"),
            *("TrivialAugmentWide()", "AutoAugment()", "AutoAugment('cifar10')", "TimmRandAugment(fill=0)"),
        ],
        2,
        {},
    ),
    (
        "before Normalize",
        [
            f"Compose([Normalize(), {inner}])"
            for inner in (
                *("HorizontalFlip()", "CenterCrop(4)", "Resize(4)", "Pad(1)", "ColorJitter(0.1)", "RandomInvert()"),
                *("GaussianBlur(3)", "VerticalFlip()", "RandomRotation(3)", "RandomAffine(3)", "RandomPerspective()"),
                *("RandAugment()", "TrivialAugmentWide()", "AutoAugment()", "TimmRandAugment(fill=0)"),
            )
        ],
        3,
        {},
    ),
    ("normalized", ["RandomErasing(0.0, value='random')", "RandomErasing(0.0, value='color')"], 3, {}),
    ("value must be from 0 to 255", ["RandomErasing(0.0, value=256)", "RandomErasing(0.0, value=(0, -1, 0))"], 3, {}),
    ("found none", ["CutMix(9)", "RandomChoice([CutMix(3)])"], 3, {}),
    ("floating point", ["Mixup(9)"], 3, {"labels": torch.zeros(2, dtype=torch.int64)}),
    ("mix once", ["Compose([CutMix(9), CutMix(9)])"], 3, {"labels": torch.zeros(2, dtype=torch.int64)}),
    ("labels must be", ["CutMix(9)"], 3, {"labels": torch.zeros(3, dtype=torch.int64)}),
    ("found torch.float32", ["CutMix(9)"], 3, {"labels": torch.zeros(2)}),
]


@pytest.mark.parametrize(
    ("word", "call", "channels", "options"),
    [(word, call, channels, options) for word, calls, channels, options in BATCHES for call in calls],
)
def test_what_does_not_fit_the_batch_is_refused(
    word: str, call: str, channels: int, options: Mapping[str, Any]
) -> None:
    with pytest.raises(ValueError, match=word):
        eval(call, NAMES)(torch.zeros(2, channels, 8, 8, dtype=torch.uint8), **options)


@pytest.mark.parametrize("images", [torch.zeros(2, 3, 8, 8), torch.zeros(3, 8, 8, dtype=torch.uint8)])
def test_only_batches_of_uint8_are_taken(images: torch.Tensor) -> None:
    for transform in (HorizontalFlip(), Normalize(), Compose([])):
        with pytest.raises(ValueError, match="images must be uint8"):
            transform(images)


def test_labels_beyond_the_classes_are_refused() -> None:
    with pytest.raises(RuntimeError, match="out of bounds"):
        shardio.augment.CutMix(10)(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.full((2,), 11))


def test_draws_that_do_not_exist_are_refused() -> None:
    draws = Draws(0, 0, np.arange(3))
    for count in (0, 33):
        with pytest.raises(ValueError, match="count must be from 1 to 32"):
            draws.uniform("crop", count)
