"""Recipes by name: the transforms with which published models were trained, and their sources.

`mae`, `ijepa` and `dinov3` do not mask patches: the model's own code draws the masks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from shardio.augment.arguments import check_whole
from shardio.augment.chain import Compose, Transform, Views
from shardio.augment.choice import RandomApply, RandomChoice
from shardio.augment.color import ColorJitter, GaussianBlur, RandomGrayscale, RandomSolarize
from shardio.augment.erasing import RandomErasing
from shardio.augment.mix import CutMix, Mixup, Partner
from shardio.augment.policies import TimmRandAugment, TrivialAugmentWide
from shardio.augment.transforms import (
    AlternatingFlip,
    CenterCrop,
    HorizontalFlip,
    Normalize,
    RandomCrop,
    RandomResizedCrop,
    Resize,
)


def _mixing(num_classes: int, alpha: float, partner: Partner = "flip", smoothing: float = 0.0) -> Transform:
    return RandomChoice(
        [
            Mixup(num_classes, alpha, partner=partner, label_smoothing=smoothing),
            CutMix(num_classes, 1.0, partner=partner, label_smoothing=smoothing),
        ]
    )


def _torchvision_v2(size: int | None, num_classes: int) -> Transform:
    # https://pytorch.org/blog/how-to-train-state-of-the-art-models-using-torchvision-latest-primitives/
    return Compose(
        [
            RandomResizedCrop(size or 176),
            HorizontalFlip(),
            TrivialAugmentWide(),
            Normalize("imagenet"),
            RandomErasing(0.1),
            _mixing(num_classes, 0.2, "roll", 0.1),
        ]
    )


def _timm_rsb(level: int, alpha: float, usual: int, smoothing: float, size: int | None, num_classes: int) -> Transform:
    # Wightman, Touvron, Jégou, "ResNet strikes back: An improved training procedure in timm", 2021, table 2.
    return Compose(
        [
            RandomResizedCrop(size or usual, interpolation="bicubic"),
            HorizontalFlip(),
            TimmRandAugment(f"rand-m{level}-mstd0.5-inc1"),
            Normalize("imagenet"),
            _mixing(num_classes, alpha, smoothing=smoothing),
        ]
    )


def _deit3(size: int | None, num_classes: int) -> Transform:
    # Touvron, Cord, Jégou, "DeiT III: Revenge of the ViT", ECCV 2022: 3-Augment with the simple random crop. Its blur
    # is Pillow's, with a radius of 0.1 to 2.
    return Compose(
        [
            Resize(size or 224, interpolation="bicubic"),
            RandomCrop(size or 224, padding=4, padding_mode="reflect"),
            HorizontalFlip(),
            RandomChoice([RandomGrayscale(1.0), RandomSolarize(128, 1.0), GaussianBlur(9)]),
            ColorJitter(0.3, 0.3, 0.3),
            Normalize("imagenet"),
            _mixing(num_classes, 0.8),
        ]
    )


def _simclr(size: int | None, num_classes: int) -> Transform:
    # Chen, Kornblith, Norouzi, Hinton, "A simple framework for contrastive learning of visual representations", ICML
    # 2020, appendix A, with strength 1. The kernel is a tenth of the image.
    side = size or 224
    view = Compose(
        [
            RandomResizedCrop(side, interpolation="bicubic"),
            HorizontalFlip(),
            RandomApply([ColorJitter(0.8, 0.8, 0.8, 0.2)], 0.8),
            RandomGrayscale(0.2),
            RandomApply([GaussianBlur(side // 20 * 2 + 1)]),
            Normalize((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
        ]
    )
    return Views([view, view])


def _moco_v2(size: int | None, num_classes: int) -> Transform:
    # Chen, Fan, Girshick, He, "Improved baselines with momentum contrastive learning", 2020. Its blur is Pillow's.
    view = Compose(
        [
            RandomResizedCrop(size or 224, scale=(0.2, 1.0)),
            RandomApply([ColorJitter(0.4, 0.4, 0.4, 0.1)], 0.8),
            RandomGrayscale(0.2),
            RandomApply([GaussianBlur(13)]),
            HorizontalFlip(),
            Normalize("imagenet"),
        ]
    )
    return Views([view, view])


def _view_of_dino(side: int, scale: tuple[float, float], flips: list[Transform], *more: Transform) -> Transform:
    return Compose(
        [
            RandomResizedCrop(side, scale=scale, interpolation="bicubic"),
            *flips,
            RandomApply([ColorJitter(0.4, 0.4, 0.2, 0.1)], 0.8),
            RandomGrayscale(0.2),
            *more,
            Normalize("imagenet"),
        ]
    )


def _dino(size: int | None, num_classes: int) -> Transform:
    # Caron, Touvron, Misra, Jégou, Mairal, Bojanowski, Joulin, "Emerging properties in self-supervised vision
    # transformers", ICCV 2021: two global views, and eight local ones of 96 pixels at 224. Its blur is Pillow's.
    side = size or 224

    def view(side: int, scale: tuple[float, float], blur: float, *more: Transform) -> Transform:
        return _view_of_dino(side, scale, [HorizontalFlip()], RandomApply([GaussianBlur(13)], blur), *more)

    large, small = (0.4, 1.0), (0.05, 0.4)
    local = view(round(side * 96 / 224), small, 0.5)
    return Views([view(side, large, 1.0), view(side, large, 0.1, RandomSolarize(128, 0.2)), *[local] * 8])


def _dinov3(size: int | None, num_classes: int) -> Transform:
    # Siméoni et al., "DINOv3", 2025, with the numbers of dinov3_vit7b16_pretrain.yaml. The blur of its code has the
    # probability 1 - p of its configuration, so the first view is never blurred, and the second with 0.9.
    side = size or 256

    large, blur = (0.32, 1.0), [GaussianBlur(9)]
    first = _view_of_dino(side, large, [])
    second = _view_of_dino(side, large, [], RandomApply(blur, 0.9), RandomSolarize(128, 0.2))
    local = _view_of_dino(round(side * 112 / 256), (0.05, 0.32), [], RandomApply(blur))
    return Views([first, second, *[local] * 8])


def _mae(size: int | None, num_classes: int) -> Transform:
    # He, Chen, Xie, Li, Dollár, Girshick, "Masked autoencoders are scalable vision learners", CVPR 2022, with the
    # numbers of its main_pretrain.py.
    return Compose(
        [
            RandomResizedCrop(size or 224, scale=(0.2, 1.0), interpolation="bicubic"),
            HorizontalFlip(),
            Normalize("imagenet"),
        ]
    )


def _ijepa(size: int | None, num_classes: int) -> Transform:
    # Assran et al., "Self-supervised learning from images with a joint-embedding predictive architecture", CVPR 2023,
    # with the numbers of in1k_vith14_ep300.yaml.
    return Compose([RandomResizedCrop(size or 224, scale=(0.3, 1.0)), Normalize("imagenet")])


def _latents(flip: bool, size: int | None, num_classes: int) -> Transform:
    # The pictures that an encoder of latents gets, from -1 to 1, from sets made with `--fit adm`. SiT flips them
    # (train.py of Ma et al., 2024), EDM2 does not (dataset_tool.py of Karras et al., 2024).
    return Compose([CenterCrop(size or 256), *[HorizontalFlip()] * flip, Normalize(0.5, 0.5)])


def _cifar_airbench(size: int | None, num_classes: int) -> Transform:
    # Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU", 2024. The mean and std are those of CIFAR-10.
    cast = Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    return Compose([AlternatingFlip(), RandomCrop(size or 32, padding=2, padding_mode="reflect"), cast])


RECIPES: dict[str, Callable[[int | None, int], Transform]] = {
    "torchvision-v2": _torchvision_v2,
    "timm-rsb-a1": partial(_timm_rsb, 7, 0.2, 224, 0.1),
    "timm-rsb-a2": partial(_timm_rsb, 7, 0.1, 224, 0.0),
    "timm-rsb-a3": partial(_timm_rsb, 6, 0.1, 160, 0.0),
    "deit3": _deit3,
    "simclr": _simclr,
    "moco-v2": _moco_v2,
    "dino": _dino,
    "dinov3": _dinov3,
    "mae": _mae,
    "ijepa": _ijepa,
    "sit": partial(_latents, True),
    "edm2": partial(_latents, False),
    "cifar-airbench": _cifar_airbench,
}


RECIPE_REPEATS = {"torchvision-v2": 4, "timm-rsb-a1": 3, "timm-rsb-a2": 3, "deit3": 3}
"""The `repeats` of ShardLoader in the sources of recipes: how often a global batch has each of its samples."""


def recipe(name: str, size: int | None = None, num_classes: int = 1000) -> Transform:
    """Returns the training transform of the recipe `name`.

    `name` is a key of RECIPES. `size` is the side of the returned images in pixels, or of the global crops if there
    are also local crops (default: the size in the recipe's source). `num_classes` is for recipes that mix labels.
    Printing the transform shows its Python code, to copy and change. Raises ValueError for an unknown name.
    """
    if not isinstance(name, str) or name not in RECIPES:
        raise ValueError(f"name must be one of {', '.join(RECIPES)}; found {name!r}")
    if size is not None:
        check_whole("size", size, 1)
    return RECIPES[name](size, num_classes)
