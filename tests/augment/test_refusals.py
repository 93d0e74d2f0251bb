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

NAMES = {**vars(shardio.augment), "nan": math.nan, "inf": math.inf, "torch": torch, "np": np, "Draws": Draws}

# Names of an argument, and calls that are refused for it: values that make no sense, and values of a wrong type.
VALUES: dict[str, list[str]] = {
    "size": [
        *("RandomResizedCrop(0)", "RandomResizedCrop((3, 4, 5))", "Resize(-3)", "Resize(3.5)", "RandomCrop('12')"),
        *("CenterCrop(0)", "recipe('dino', 0)", "recipe('dino', '224')", "recipe('dino', 224.0)"),
    ],
    "scale": [
        *("RandomResizedCrop(8, (0.0, 1.0))", "RandomResizedCrop(8, 0.5)", "RandomAffine(1, scale=(0, 1))"),
        *("RandomAffine(1, scale=2)", "RandomErasing(scale=(0.5, 1.5))", "RandomErasing(scale=(0.5, 0.2))"),
        "RandomErasing(scale=(0.5, nan))",
    ],
    "ratio": [
        *("RandomResizedCrop(8, ratio=(2.0, 1.0))", "RandomErasing(ratio=(0, 1))", "RandomErasing(ratio=(1, inf))"),
        "RandomErasing(ratio=(1, 2, 3))",
    ],
    "interpolation": [
        *("RandomResizedCrop(8, interpolation='nearest')", "RandomRotation(1, 'bicubic')"),
        *("RandomPerspective(interpolation='x')", "RandAugment(interpolation='bicubic')"),
        *("TrivialAugmentWide(interpolation=None)", "TimmRandAugment(interpolation='nearest')"),
    ],
    "p": [
        *("HorizontalFlip(1.5)", "VerticalFlip(nan)", "RandomGrayscale(-0.1)", "RandomPerspective(p=nan)"),
        *("RandomErasing(1.1)", "RandomApply([CenterCrop(3)], nan)", "Mixup(9, p=2.0)"),
        *("RandomChoice([CenterCrop(3)], 0.5)", "RandomChoice([CenterCrop(3)], 'a')"),
        *("RandomChoice([CenterCrop(3)], [nan])", "RandomChoice([CenterCrop(3)], [inf])"),
        *("RandomChoice([CenterCrop(3)] * 2, [0, 0])", "RandomChoice([CenterCrop(3)] * 2, [1])"),
        "RandomChoice([CenterCrop(3)] * 2, [2, -1])",
    ],
    "padding": [
        *("Pad(-1)", "Pad(1.5)", "Pad((1, nan))", "Pad((1, 2, 3))", "Pad(())", "Pad('12')", "Pad(None)"),
        *("RandomCrop(8, -1)", "RandomCrop(8, (1, 2, 3))"),
    ],
    "padding_mode": [
        *("Pad(1, padding_mode='wrap')", "RandomCrop(8, 2, padding_mode='mirror')", "CenterCrop(8, 'wrap')"),
    ],
    "fill": [
        *("Pad(1, 256)", "Pad(1, nan)", "Pad(1, ())", "RandomCrop(8, 2, -3)", "RandomRotation(1, fill=(0, nan, 0))"),
        "RandAugment(fill=-1)",
    ],
    "brightness": ["ColorJitter(-0.1)", "ColorJitter(nan)", "ColorJitter(inf)"],
    "contrast": [f"ColorJitter(contrast=({pair}))" for pair in ("1, nan", "nan, 1", "1, inf")],
    "saturation": [f"ColorJitter(saturation=({some}))" for some in ("2, 1", "1, 2, 3", "", "-1, 2")],
    "hue": ["ColorJitter(hue=0.6)", "ColorJitter(hue=(-0.6, 0))"],
    "bits": [f"RandomPosterize({bits})" for bits in ("9", "3.5", "'3'", "True")],
    "threshold": ["RandomSolarize(-1)", "RandomSolarize(nan)"],
    "sharpness_factor": [f"RandomAdjustSharpness({factor})" for factor in ("-1", "nan", "inf")],
    "kernel_size": [f"GaussianBlur({size})" for size in ("4", "0", "(3, 5, 7)", "()", "'ab'")],
    "sigma": [f"GaussianBlur(3, {sigma})" for sigma in ("0", "(2, 1)", "(1, nan)", "'x'")],
    "degrees": [f"RandomRotation({some})" for some in ("-1", "inf", "(1, 2, 3)", "(2, 1)", "(1, nan)")],
    "center": [f"RandomRotation(1, center={some})" for some in ("3", "0", "(1, 2, 3)", "(1, inf)", "(-inf, 1)")],
    "translate": [f"RandomAffine(1, {some})" for some in ("0.1", "(0.1,)", "(0.1, 1.1)", "(nan, 0)")],
    "shear": [f"RandomAffine(1, shear={some})" for some in ("(1, 2, 3)", "(2, 1)", "(0, 1, 2, inf)", "-3")],
    "distortion_scale": ["RandomPerspective(1.1)"],
    "value": [f"RandomErasing(value={value})" for value in ("'rand'", "nan", "(0, inf, 0)", "()")],
    "count": [
        *(f"RandomErasing(count={count})" for count in ("0", "2.0", "(3, 2)", "(1, 2, 3)", "'2'")),
        *(f"Draws(0, 0, np.arange(3)).uniform('crop', {count})" for count in (0, 33)),
    ],
    "num_ops": ["RandAugment(-1)", "RandAugment(2.0)", "RandAugment('2')"],
    "magnitude": ["RandAugment(magnitude=31)", "RandAugment(magnitude=nan)"],
    "num_magnitude_bins": ["RandAugment(num_magnitude_bins=1, magnitude=0)", "TrivialAugmentWide(1)"],
    "policy": ["AutoAugment('mnist')", "AutoAugment(3)"],
    "config": [
        f"TimmRandAugment({config!r})"
        for config in (
            *("rand-m9-x3", "rand-m", "rand-m-9", "rand-mnan", "rand-minf", "rand-ninf", "rand-mmaxinf", "rand-m9.5"),
            *("rand-m9-p1.5", "rand-m9-inc2", "rand-m9-t", "other-m5", "", 9),
        )
    ],
    "mean": ["Normalize('cifar')", "Normalize(nan, 1.0)", "Normalize([], [])"],
    "std": ["Normalize([0.5], [0.0])", "Normalize(0.5, -1)", "Normalize([0.5, 0.5], [0.5] * 3)"],
    "dtype": ["ToDtype(torch.uint8)", "ToDtype('float32')"],
    "alpha": ["CutMix(9, alpha=0.0)", "Mixup(9, alpha=inf)"],
    "num_classes": ["Mixup(0)", "Mixup('a')", "CutMix(2.5)", "recipe('timm-rsb-a1', 224, 0)"],
    "minmax": ["CutMix(9, minmax=(0.5, 0.2))", "CutMix(9, minmax=(0.2, 1.5))", "CutMix(9, minmax=0.5)"],
    "label_smoothing": ["CutMix(9, label_smoothing=1.0)"],
    "partner": ["Mixup(9, partner='next')"],
    "name": ["recipe('resnet')", "recipe(['dino'])", "recipe(None)"],
    "transforms": [
        *("Compose([abs])", "Views([abs])", "RandomChoice([abs])", "RandomOrder([VerticalFlip()] * 33)"),
        *("Views([])", "RandomApply([])", "RandomOrder([])", "RandomChoice([])"),
    ],
    "Views": [
        *("RandomApply([Views([CenterCrop(3)])])", "RandomChoice([Compose([Views([CenterCrop(3)])])])"),
        "Compose([Views([CenterCrop(3)]), Normalize()])",
    ],
    "step": ["RandomCrop(3, step=0)", "RandomCrop(3, step=1.5)"],
    "CutMix": [
        *("RandomApply([CutMix(3)])", "RandomApply([Compose([CutMix(3)])])", "RandomOrder([CutMix(3)])"),
        *("Views([CutMix(3), CenterCrop(3)])", "Views([CenterCrop(3), Compose([RandomChoice([CutMix(3)])])])"),
    ],
    "mask_fill": ["Views([Compose([], mask_fill=1)])"],
}
TYPES: dict[str, list[str]] = {
    "p": [
        *("HorizontalFlip('x')", "RandomGrayscale([0.5])", "RandomErasing('x')", "RandomApply([CenterCrop(3)], 'x')"),
        "RandomChoice([CenterCrop(3)], ['x'])",
    ],
    "antialias": ["Resize(8, antialias='false')", "RandomResizedCrop(8, antialias=None)"],
    "per_sample": ["Mixup(9, per_sample=1)"],
    "pad_if_needed": ["RandomCrop(3, pad_if_needed='reflect')"],
    "scale": ["RandomResizedCrop(8, ('a', 'b'))", "RandomErasing(scale=('a', 1))", "ToDtype(torch.float32, 'no')"],
    "fill": ["TimmRandAugment(fill=None)", "RandAugment(fill=('a', 1, 2))", "RandomRotation(1, fill='red')"],
    "brightness": ["ColorJitter('x')", "ColorJitter(None)"],
    "hue": ["ColorJitter(hue=(0, 'x'))"],
    "threshold": ["RandomSolarize('x')"],
    "sharpness_factor": ["RandomAdjustSharpness('x')"],
    "degrees": ["RandomRotation('x')", "RandomRotation(None)"],
    "center": ["RandomRotation(1, center=('a', 1))", "RandomRotation(1, center='ab')"],
    "translate": ["RandomAffine(1, ('a', 0))", "RandomAffine(1, 'ab')"],
    "shear": ["RandomAffine(1, shear='x')"],
    "distortion_scale": ["RandomPerspective('x')"],
    "value": ["RandomErasing(value=None)", "RandomErasing(value=(0, 'a'))"],
    "mean": ["Normalize([[0.5]], 1.0)"],
    "std": ["Normalize(0.5, 'x')", "Normalize([0.5] * 3)"],
    "alpha": ["Mixup(3, alpha='x')"],
    "transforms": ["Compose(3)", "Views(CenterCrop(3))", "RandomApply(CenterCrop(3))", "RandomOrder(None)"],
    "mask_fill": ["Compose([], mask_fill={'m': '255'})", "Compose([], mask_fill='0')"],
    "function": ["PerSample(HorizontalFlip())", "PerSample(3)"],
    "tensors": ["CenterCrop(2)(np.zeros((1, 3, 4, 4)))", "CenterCrop(2)(torch.zeros(1, 3, 4, 4).byte(), [1])"],
}


@pytest.mark.parametrize(
    ("kind", "word", "call"),
    [
        (kind, word, call)
        for kind, table in ((ValueError, VALUES), (TypeError, TYPES))
        for word, calls in table.items()
        for call in calls
    ],
)
def test_values_that_make_no_sense_are_refused(kind: type[Exception], word: str, call: str) -> None:
    with pytest.raises(kind, match=rf"\b{word}\b"):
        eval(call, NAMES)


LABELS = torch.zeros(2, dtype=torch.int64)

# What the error says, and transforms that refuse images (2, 3, 8, 8) whatever they draw.
UNFIT: dict[str, list[str]] = {
    "does not fit into": ["CenterCrop(9)", "RandomCrop((3, 9))", "RandomCrop(13, 2)"],
    "one size and dtype": ["RandomApply([Normalize()])"],
    "2 channels": ["Normalize([0.5] * 2, 0.5)"],
    "before ToDtype": ["Compose([ToDtype(torch.float32), Normalize()])"],
    "less than the": ["Pad(8, padding_mode='reflect')"],
    "less than twice the": ["GaussianBlur((17, 15))", "GaussianBlur((15, 17))"],
    "images have 3 channels": [
        *("Pad(1, (1, 2))", "RandomErasing(0.0, value=(1, 2))", "RandomRotation(5, fill=(1, 2))"),
        "RandAugment(fill=(1, 2))",
    ],
    "before Normalize": [
        f"Compose([Normalize(), {inner}])"
        for inner in (
            *("HorizontalFlip()", "CenterCrop(4)", "Resize(4)", "Pad(1)", "ColorJitter(0.1)", "RandomInvert()"),
            *("GaussianBlur(3)", "VerticalFlip()", "RandomRotation(3)", "RandomAffine(3)", "RandomPerspective()"),
            *("RandAugment()", "TrivialAugmentWide()", "AutoAugment()", "TimmRandAugment(fill=0)"),
        )
    ],
    "normalized": ["RandomErasing(0.0, value='random')", "RandomErasing(0.0, value='color')"],
    "from 0 to 255": ["RandomErasing(0.0, value=256)", "RandomErasing(0.0, value=(0, -1, 0))"],
    "found none": ["CutMix(9)", "RandomChoice([CutMix(3)])"],
}
RGB = [
    *("ColorJitter(0.1, 0.1)", "ColorJitter(hue=0.1)", "RandomGrayscale(1e-9)", "RandAugment()"),
    *("TrivialAugmentWide()", "AutoAugment()", "AutoAugment('cifar10')", "TimmRandAugment(fill=0)"),
]
# The same with another number of channels, and with options of the call.
BATCHES: list[tuple[str, str, int, Mapping[str, Any]]] = [
    *((word, call, 3, {}) for word, calls in UNFIT.items() for call in calls),
    *(("red, green and blue", call, 2, {}) for call in RGB),
    ("images have 1 channels", "RandomPerspective(p=0.0, fill=(1, 2, 3))", 1, {}),
    ("images have 1 channels", "TimmRandAugment()", 1, {}),
    ("indices must be integers", "CenterCrop(4)", 3, {"indices": [1, 2, 3]}),
    ("found float64", "CenterCrop(4)", 3, {"indices": [0.5, 1.5]}),
    ("indices", "HorizontalFlip()", 3, {"epoch": 2}),
    ("sizes must be of shape", "CenterCrop(4)", 3, {"sizes": [[3, 4]]}),
    ("minimum 1", "CenterCrop(4)", 3, {"sizes": [[8, 0], [8, 8]]}),
    ("one size", "Resize(4)", 3, {"sizes": [[8, 16], [8, 8]]}),
    ("one size", "RandAugment()", 3, {"sizes": [[8, 16], [8, 8]]}),
    ("one size", "RandomChoice([CenterCrop(4), CenterCrop(5)])", 3, {"seed": 1}),
    ("seed", "RandomCrop(4)", 3, {"seed": -1}),
    ("view must be", "HorizontalFlip()", 3, {"view": -1}),
    ("labels", "RandomChoice([CutMix(9, per_sample=True), HorizontalFlip()])", 3, {"labels": LABELS}),
    ("floating point", "Mixup(9)", 3, {"labels": LABELS}),
    ("mix once", "Compose([CutMix(9), CutMix(9)])", 3, {"labels": LABELS}),
    ("labels must be", "CutMix(9)", 3, {"labels": torch.zeros(3, dtype=torch.int64)}),
    ("found torch.float32", "CutMix(9)", 3, {"labels": torch.zeros(2)}),
]


@pytest.mark.parametrize(("word", "call", "channels", "options"), BATCHES)
def test_what_does_not_fit_the_batch_is_refused(
    word: str, call: str, channels: int, options: Mapping[str, Any]
) -> None:
    with pytest.raises(ValueError, match=word):
        eval(call, NAMES)(torch.zeros(2, channels, 8, 8, dtype=torch.uint8), **options)


MASK = torch.zeros(2, 8, 8, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("kind", "word", "options"),
    [
        (TypeError, "mapping", {"masks": MASK}),
        (TypeError, "mapping", {"masks": {1: MASK}}),
        (TypeError, "tensor", {"masks": {"m": MASK.numpy()}}),
        (ValueError, "cpu", {"masks": {"m": MASK.to("meta")}}),
        (ValueError, "2, 8, 8", {"masks": {"m": MASK.expand(2, 2, 8, 8)}}),
        (ValueError, "1, 8, 8", {"masks": {"m": MASK[1:]}}),
        (ValueError, "2, 8, 8, 1, 1", {"masks": {"m": MASK[..., None, None]}}),
        (ValueError, "hold", {"masks": {"m": MASK}, "mask_fill": 256}),
        (ValueError, "hold", {"masks": {"m": MASK}, "mask_fill": 0.5}),
        (ValueError, "hold", {"masks": {"m": MASK}, "mask_fill": math.nan}),
        (ValueError, "hold", {"masks": {"m": MASK.half()}, "mask_fill": 1e5}),
        (ValueError, "hold", {"masks": {"m": MASK.bool()}, "mask_fill": 255}),
        (ValueError, "names", {"masks": {"m": MASK}, "mask_fill": {"n": 1}}),
        (TypeError, "mask_fill", {"masks": {"m": MASK}, "mask_fill": "0"}),
    ],
)
def test_masks_that_do_not_fit_are_refused(kind: type[Exception], word: str, options: dict[str, Any]) -> None:
    with pytest.raises(kind, match=word):
        HorizontalFlip()(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), **options)


@pytest.mark.parametrize(
    "call", ["CutMix(5)", "recipe('torchvision-v2', 16, 5)", "RandomChoice([HorizontalFlip(), CutMix(5)], (1, 1e-9))"]
)
def test_a_picture_made_of_several_has_no_mask(call: str) -> None:
    with pytest.raises(ValueError, match="m, n"):
        eval(call, NAMES)(MASK[:, None].expand(2, 3, 8, 8), torch.arange(2), masks={"m": MASK, "n": MASK})


@pytest.mark.parametrize("images", [torch.zeros(2, 3, 8, 8), torch.zeros(3, 8, 8, dtype=torch.uint8)])
def test_only_batches_of_uint8_are_taken(images: torch.Tensor) -> None:
    for transform in (HorizontalFlip(), Normalize(), Compose([])):
        with pytest.raises(ValueError, match="images must be uint8"):
            transform(images)


def test_labels_beyond_the_classes_are_refused() -> None:
    with pytest.raises(RuntimeError, match="out of bounds"):
        shardio.augment.CutMix(10)(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.full((2,), 11))
