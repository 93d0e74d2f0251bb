"""Classes of other libraries that draw once for a batch are refused by name: doubles stand for those libraries."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from shardio.augment import Compose, HorizontalFlip
from shardio.augment.per_sample import check_foreign

V1, V2 = "torchvision.transforms.transforms", "torchvision.transforms.v2._geometry"
ALBUMENTATIONS, KORNIA = "albumentations.augmentations.crops.transforms", "kornia.augmentation._2d.geometric.crop"


def double(module: str, name: str, base: type = object, **attributes: Any) -> Any:
    """Returns an instance of a class of this name, which says to be of this module."""
    made = type(name, (base,), {"__module__": module})()
    for key, value in attributes.items():
        setattr(made, key, value)
    return made


class Own(nn.Module):
    """A module of a user, who may call what is inside for each image."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


FLIP = double(V2, "RandomHorizontalFlip", nn.Module)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (FLIP, "RandomHorizontalFlip"),
        (type("Mine", (type(FLIP),), {"__module__": "user"})(), "Mine"),
        (double(V1, "ColorJitter"), "ColorJitter"),
        (double(V1, "Compose", transforms=[double(V1, "ToTensor"), double(V1, "RandomCrop")]), "RandomCrop"),
        (nn.Sequential(nn.Identity(), nn.Sequential(FLIP)), "RandomHorizontalFlip"),
        (double(ALBUMENTATIONS, "OneOf"), "OneOf"),
        (double(ALBUMENTATIONS, "Normalize"), "Normalize"),
    ],
)
def test_classes_that_draw_once_for_a_batch_are_refused_by_name(function: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} .*PerSample"):
        check_foreign(function)
    with pytest.raises(ValueError, match="PerSample"):
        Compose([HorizontalFlip(), function])


def test_kornia_may_not_draw_once_for_a_batch() -> None:
    crop = double(KORNIA, "RandomCrop", nn.Module, same_on_batch=True)
    for function in (crop, nn.Sequential(crop)):
        with pytest.raises(ValueError, match="same_on_batch"):
            check_foreign(function)


@pytest.mark.parametrize(
    "function",
    [
        *(double(V1, name) for name in ("Normalize", "Resize", "CenterCrop", "ToTensor", "ConvertImageDtype")),
        double(V2, "Compose", nn.Module, transforms=[double(V2, "Resize", nn.Module), double(V2, "GaussianNoise")]),
        double(KORNIA, "RandomCrop", nn.Module, same_on_batch=False),
        double("user.torchvision", "RandomCrop"),
        *(Own(FLIP), FLIP.forward, lambda images: FLIP(images)),
    ],
)
def test_others_are_left_to_the_caller(function: Any) -> None:
    check_foreign(function)
