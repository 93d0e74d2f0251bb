"""PerSample calls transforms of other libraries with each sample; without it, those that draw once are refused.

Doubles stand for torchvision, Albumentations and Kornia.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transforms import by_torch

from shardio.augment import Compose, HorizontalFlip, Normalize, PerSample, RandomApply, RandomCrop, ToDtype, Views
from shardio.augment.per_sample import check_foreign

COUNT, HEIGHT, WIDTH = 24, 12, 10
IMAGES = torch.randint(0, 256, (COUNT, 3, HEIGHT, WIDTH), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
MASKS = {"mask": IMAGES[:, 0].clone(), "parts": IMAGES[:, 1].clone()}


class Flip:
    """As torchvision's v2: one draw for all that one call is given."""

    __module__ = "torchvision.transforms.v2"

    def __call__(self, given: Any) -> Any:
        flips = torch.rand(()) < 0.5
        if isinstance(given, Tensor):
            return given.flip(-1) if flips else given
        if not flips:
            return given
        masks = {name: mask.flip(-1) for name, mask in given["masks"].items()}
        return {"image": given["image"].flip(-1), "masks": masks}


class Album:
    """As an Albumentations Compose: a generator of its own, arrays by keywords."""

    __module__ = "albumentations.core.composition"

    def __init__(self) -> None:
        self._rng = np.random.default_rng()

    def set_random_seed(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def __call__(self, **given: Any) -> dict[str, Any]:
        if self._rng.random() < 0.5:
            return given
        flipped = {name: given[name][:, ::-1] for name in ("image", "mask") if name in given}
        if "masks" in given:
            flipped["masks"] = [mask[:, ::-1] for mask in given["masks"]]
        return {**given, **flipped}


@pytest.fixture(autouse=True)
def _torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    double: Any = ModuleType("torchvision.tv_tensors")
    double.Image = double.Mask = lambda tensor: tensor
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.tv_tensors", double)


def flipped(images: Any, of: Tensor = IMAGES) -> list[bool]:
    """Which of the pictures are mirror images; all others are as they were."""
    found = [torch.equal(one, other.flip(-1)) for one, other in zip(images, of, strict=True)]
    same = [torch.equal(one, other) for one, other in zip(images, of, strict=True)]
    assert all(one != other for one, other in zip(found, same, strict=True))
    return found


class Own:
    """A function with a generator of its own, or of a library."""

    def __init__(self, rng: Any = None) -> None:
        self.rng = rng or np.random.default_rng()

    def __call__(self, image: Tensor) -> Tensor:
        return image.flip(-1) if self.rng.random() < 0.5 else image


LIBRARIES = [partial(Own, library) for library in (random, np.random)]
each = pytest.mark.parametrize("make", [lambda: by_torch, *LIBRARIES, Own, Flip, Album])


@each
def test_each_sample_draws_for_itself_by_seed_epoch_and_sample(make: Callable[[], Any]) -> None:
    transform = PerSample(make())
    one = flipped(transform(IMAGES, seed=3, epoch=2, indices=range(COUNT)))
    assert 0 < sum(one) < COUNT
    assert flipped(transform(IMAGES[5:9], seed=3, epoch=2, indices=range(5, 9)), IMAGES[5:9]) == one[5:9]
    for other in ({"seed": 4}, {"epoch": 3}, {"view": 1}, {"indices": range(COUNT, 2 * COUNT)}):
        assert flipped(transform(IMAGES, **{"seed": 3, "epoch": 2, "indices": range(COUNT), **other})) != one


@each
def test_the_callers_generators_are_restored(make: Callable[[], Any]) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    PerSample(make())(IMAGES, seed=1)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]  # type: ignore[union-attr]


@pytest.mark.parametrize("make", [Flip, Album])
@pytest.mark.parametrize("masks", [{"mask": MASKS["mask"]}, MASKS])
def test_masks_go_along(make: Callable[[], Any], masks: dict[str, Tensor]) -> None:
    images, arrays = PerSample(make())(IMAGES, masks=masks, seed=1)
    moved = flipped(images)
    for name, mask in masks.items():
        assert flipped(arrays[name], mask) == moved


def test_it_goes_between_transforms_of_shardio() -> None:
    chain = Compose([RandomCrop(8), PerSample(Flip()), HorizontalFlip(), Normalize()])
    assert chain(IMAGES, seed=1).shape == (COUNT, 3, 8, 8)  # type: ignore[union-attr]
    one, other = Views([PerSample(Flip()), PerSample(Flip())])(IMAGES, seed=1)
    assert flipped(one) != flipped(other)


def blacken(image: Tensor) -> Tensor:
    return image.zero_()


class Painter:
    """As an Albumentations Compose that works in place."""

    __module__ = "albumentations.core.composition"

    def __call__(self, **given: Any) -> dict[str, Any]:
        for array in [given["image"], *given.get("masks", ())]:
            array[:] = 0
        return given


def test_a_function_may_work_in_place() -> None:
    images, masks = IMAGES.clone(), {name: mask.clone() for name, mask in MASKS.items()}
    black = [not image.any() for image in RandomApply([PerSample(blacken)], 0.5)(images, seed=1)]
    assert 0 < sum(black) < COUNT
    for function in (blacken, Painter()):
        one, other = Views([PerSample(function), HorizontalFlip(1.0)])(images, seed=1)
        assert not one.any()
        assert all(flipped(other))
    made, arrays = PerSample(Painter())(images, masks=masks)
    assert not any(array.any() for array in (made, *arrays.values()))  # type: ignore[union-attr]
    assert torch.equal(images, IMAGES)
    assert all(torch.equal(masks[name], MASKS[name]) for name in MASKS)


def test_a_function_may_return_the_same_memory_again() -> None:
    memory = torch.empty(3, HEIGHT, WIDTH, dtype=torch.uint8)
    assert torch.equal(PerSample(memory.copy_)(IMAGES), IMAGES)  # type: ignore[arg-type]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_results_are_contiguous_whatever_the_order_of_the_images_in_memory(memory_format: torch.memory_format) -> None:
    images = IMAGES.contiguous(memory_format=memory_format)
    assert PerSample(lambda image: image + 1)(images).is_contiguous()  # type: ignore[union-attr]


def test_gray_images_that_a_function_has_made_floats_are_cast() -> None:
    images = IMAGES[:, :1]
    found = Compose([PerSample(lambda image: image / 255), ToDtype(torch.float16)])(images)
    assert torch.equal(found, (images / 255).half())  # type: ignore[arg-type]


def test_no_samples_have_the_size_and_the_type_of_others() -> None:
    found = PerSample(lambda image: image[:, 2:, 3:].float())(IMAGES[:0])
    assert isinstance(found, Tensor)
    assert (found.shape, found.dtype) == ((0, 3, HEIGHT - 2, WIDTH - 3), torch.float32)


@pytest.mark.parametrize(
    ("transform", "arrays", "kind", "match"),
    [
        (lambda image: image[:, : 5 + int(image[0, 0, 0]) % 2], {}, ValueError, "sample"),
        (lambda image: image.numpy(), {}, TypeError, "ndarray"),
        (lambda image: image.flip(-1), {"masks": MASKS}, ValueError, "mask, parts"),
    ],
)
def test_what_cannot_be_one_batch_is_an_error(
    transform: Any, arrays: dict[str, Any], kind: type[Exception], match: str
) -> None:
    with pytest.raises(kind, match=match):
        PerSample(transform)(IMAGES, **arrays)


V1, V2 = "torchvision.transforms.transforms", "torchvision.transforms.v2._geometry"
ALBUMENTATIONS, KORNIA = "albumentations.augmentations.crops.transforms", "kornia.augmentation._2d.geometric.crop"


def double(module: str, name: str, base: type = object, **attributes: Any) -> Any:
    """Returns an instance of a class of this name, which says to be of this module."""
    made = type(name, (base,), {"__module__": module})()
    for key, value in attributes.items():
        setattr(made, key, value)
    return made


class Calling(nn.Module):
    """A module of a user, who may call what is inside for each image."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


FLIP = double(V2, "RandomHorizontalFlip", nn.Module)


SAME = double(KORNIA, "RandomCrop", nn.Module, same_on_batch=True)


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
        *((function, "RandomCrop .*same_on_batch") for function in (SAME, nn.Sequential(SAME))),
    ],
)
def test_classes_that_draw_once_for_a_batch_are_refused_by_name(function: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.* .*PerSample"):
        check_foreign(function)
    with pytest.raises(ValueError, match="PerSample"):
        Compose([HorizontalFlip(), function])


@pytest.mark.parametrize(
    "function",
    [
        *(double(V1, name) for name in ("Normalize", "Resize", "CenterCrop", "ToTensor", "ConvertImageDtype")),
        double(V2, "Compose", nn.Module, transforms=[double(V2, "Resize", nn.Module), double(V2, "GaussianNoise")]),
        double(KORNIA, "RandomCrop", nn.Module, same_on_batch=False),
        double("user.torchvision", "RandomCrop"),
        *(Calling(FLIP), FLIP.forward, lambda images: FLIP(images)),
    ],
)
def test_others_are_left_to_the_caller(function: Any) -> None:
    check_foreign(function)
