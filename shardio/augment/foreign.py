"""Recognizes transforms of other libraries, and refuses those that would change all images of a batch alike.

torchvision and Albumentations are for single images: they draw once per call. Called with a batch, they would crop all
its images at the same place. Kornia draws for each image, unless told not to.
"""

from __future__ import annotations

import torch

from shardio.augment.description import is_name

# The classes of torchvision that draw, besides those whose names begin with "Random".
_DRAWING = {
    "AugMix",
    "AutoAugment",
    "ColorJitter",
    "CutMix",
    "ElasticTransform",
    "GaussianBlur",
    "JPEG",
    "MixUp",
    "RandAugment",
    "ScaleJitter",
    "TrivialAugmentWide",
}
# Classes that have another name in shardio. Others have the same name, or do not exist.
_RENAMED = {
    "Affine": "RandomAffine",
    "CoarseDropout": "RandomErasing",
    "MixUp": "Mixup",
    "OneOf": "RandomChoice",
    "Perspective": "RandomPerspective",
    "RandomHorizontalFlip": "HorizontalFlip",
    "RandomVerticalFlip": "VerticalFlip",
    "Rotate": "RandomRotation",
}
# Containers hand the whole batch to what is inside. What is inside of a user's module is the user's business.
_CONTAINERS = ("torch.nn.modules.container", "torch._dynamo", "torchvision.transforms", "kornia")


def check_foreign(function: object) -> None:
    """Raises ValueError if `function`, or a transform in it, would draw once for all images of a batch.

    Only classes of torchvision, Albumentations and Kornia are recognized. Other functions are the caller's business.
    """
    name = type(function).__name__
    if _is_of(function, "albumentations"):
        raise ValueError(f"transform: {name} takes one image at a time; use {_instead_of(function)}")
    if _draws(function):
        raise ValueError(
            f"transform: {name} draws random numbers once for all images of a batch; use {_instead_of(function)}"
        )
    if _is_of(function, "kornia") and getattr(function, "same_on_batch", None):
        raise ValueError(f"transform: {name} draws once for all images of a batch: leave out same_on_batch=True")
    if _is_of(function, *_CONTAINERS):
        for part in _parts_of(function):
            check_foreign(part)


def _draws(function: object) -> bool:
    names = [kind.__name__ for kind in type(function).__mro__ if _is_in(kind, "torchvision.transforms")]
    return any(name in _DRAWING or name.startswith("Random") for name in names)


def _instead_of(function: object) -> str:
    """Returns what to use instead of a transform for single images."""
    names = [_RENAMED.get(kind.__name__, kind.__name__) for kind in type(function).__mro__]
    ours = next((f"{name} of shardio.augment" for name in names if is_name(name)), "transforms of shardio.augment")
    return f"{ours}, or shardio.augment.PerSample(transform), which calls it for each image"


def of_library(function: object, *names: str) -> bool:
    """Returns whether the class of a function, or of a transform inside it, is defined in the modules `names`."""
    return _is_of(function, *names) or any(of_library(part, *names) for part in _parts_of(function))


def name_of(function: object) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _is_of(function: object, *names: str) -> bool:
    return any(_is_in(kind, name) for kind in type(function).__mro__ for name in names)


def _is_in(kind: type, name: str) -> bool:
    return f"{kind.__module__}.".startswith(f"{name}.")


def _parts_of(function: object) -> list[object]:
    parts: list[object] = list(function.children()) if isinstance(function, torch.nn.Module) else []
    several = getattr(function, "transforms", ())
    return [*parts, *several] if isinstance(several, list | tuple) else parts
