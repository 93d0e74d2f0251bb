"""A ShardLoader's transform may be any function; one that would do the same to all pictures of a batch is an error."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_sets import make_plain_set
from torch import Tensor, nn
from transforms import by_numpy, by_python, by_torch

from shardio.augment import Compose, HorizontalFlip, PerSample, RandomCrop, RandomErasing, Resize, ToDtype
from shardio.loading.loader import ShardLoader

SHAPE = (12, 10, 3)
FLIP = HorizontalFlip()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_plain_set(tmp_path_factory.mktemp("foreign"), 64, SHAPE)


def loaded(path: Path, transform: Any, batch_size: int = 16, num_epochs: int = 1, **options: Any) -> list[Tensor]:
    with ShardLoader(path, batch_size, device="cpu", transform=transform, seed=3, **options) as loader:
        return [images for _ in range(num_epochs) for images, *_ in loader]


class Module(nn.Module):
    """A torch module that calls a function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, images: Any) -> Any:
        return self.function(images)


OWN = np.random.default_rng(1)


def by_its_own(images: Tensor) -> Tensor:
    return images.flip(-1) if OWN.random() < 0.5 else images


def drawing(draw: Callable[[], Any]) -> Callable[[Tensor], Tensor]:
    return lambda images: images.flip(-1) if float(draw()) < 0.5 else images


class Noisy:
    """As torchvision: it draws one flip for all, and noise for each pixel."""

    __module__ = "torchvision.transforms.v2"

    def __call__(self, images: Tensor) -> Tensor:
        return by_torch(images) + torch.randn(images.shape)


class Late:
    """A random branch that is taken first in the third batch."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, images: Tensor) -> Tensor:
        self.num_calls += 1
        return by_torch(images) if self.num_calls > 2 else images


@pytest.mark.parametrize("batch_size", [16, 2])
@pytest.mark.parametrize(
    "transform",
    [
        *(by_torch, by_python, by_numpy, Noisy(), Late(), partial(by_torch), nn.Sequential(Module(by_torch))),
        *(lambda images: by_torch(FLIP(images)), lambda images: [by_torch(images)]),
        *(lambda images: by_torch(images).numpy(), lambda images: (by_torch(images), torch.zeros(()))),
        *(by_its_own, lambda images: by_its_own(images)),
        *(Module(drawing(random.Random(1).random)), drawing(np.random.RandomState(1).rand)),
        *(lambda images: torch.cat([by_torch(images), images]), lambda images: torch.stack([images, by_torch(images)])),
        lambda images: by_torch(images).flatten(2).movedim(2, 1).flatten(0, 1),
        drawing(partial(torch.rand, (), generator=torch.Generator())),
    ],
)
def test_a_function_that_draws_once_for_a_batch_is_an_error(path: Path, transform: Any, batch_size: int) -> None:
    with pytest.raises(ValueError, match="PerSample"):
        loaded(path, transform, batch_size)


def flips_of_each(images: Tensor) -> Tensor:
    return torch.where(torch.rand(len(images), 1, 1, 1) < 0.5, images.flip(-1), images)


def draws_and_forgets(images: Tensor) -> Tensor:
    """As if another thread had drawn meanwhile."""
    torch.rand(())
    random.random()
    return images.flip(-1)


@pytest.mark.parametrize("batch_size", [16, 2, 1])
@pytest.mark.parametrize(
    "transform",
    [
        *(flips_of_each, draws_and_forgets, torch.Tensor.float, nn.Sequential(Module(flips_of_each))),
        *(lambda images: images + torch.randn(images.shape), lambda images: images.mul_(2)),
        lambda images: torch.cat([images, flips_of_each(images)]),
        lambda images: torch.stack([flips_of_each(images), flips_of_each(images)]),
    ],
)
def test_functions_that_draw_for_each_picture_or_not_at_all_are_accepted(
    path: Path, transform: Any, batch_size: int
) -> None:
    assert len(loaded(path, transform, batch_size)) == 64 // batch_size


def test_batches_of_one_may_draw_once(path: Path) -> None:
    assert len(loaded(path, by_torch, 1)) == 64


def test_looking_into_a_function_leaves_the_generators_as_they_were(path: Path) -> None:
    torch.manual_seed(1)
    found = loaded(path, flips_of_each)
    torch.manual_seed(1)
    expected = [flips_of_each(images) for images in loaded(path, None)]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    "wrap",
    [lambda transform: lambda images: transform(images), Module, lambda transform: nn.Sequential(Module(transform))],
)
@pytest.mark.parametrize("transform", [FLIP, Compose([RandomCrop(8), RandomErasing(0.5)])])
def test_a_transform_that_a_function_calls_draws_as_if_it_had_been_handed_over(
    path: Path, wrap: Callable[[Any], Any], transform: Any
) -> None:
    found = loaded(path, wrap(transform), num_epochs=2)
    expected = loaded(path, transform, num_epochs=2)
    assert all(map(torch.equal, found, expected))


def test_two_calls_in_one_function_draw_different_numbers(path: Path) -> None:
    for images in loaded(path, lambda images: torch.cat([FLIP(images), FLIP(images)], dim=1)):
        assert not torch.equal(images[:, :3], images[:, 3:])


def test_parts_of_a_batch_draw_different_numbers(path: Path) -> None:
    (plain,) = loaded(path, None, 64, shuffle=False)
    (halves,) = loaded(path, lambda images: torch.cat([FLIP(images[:32]), FLIP(images[32:])]), 64, shuffle=False)
    flipped = [not torch.equal(one, other) for one, other in zip(halves, plain, strict=True)]
    assert flipped[:32] != flipped[32:]


def test_a_batch_in_the_loop_is_augmented_afresh(path: Path) -> None:
    plain = loaded(path, None, shuffle=False)
    patterns = {tuple((FLIP(images) == images).flatten(1).all(1).tolist()) for _ in range(3) for images in plain}  # type: ignore[union-attr]
    assert len(patterns) == 3 * len(plain)


class Album:
    __module__ = "albumentations.core.composition"

    def __call__(self, **given: Any) -> Any:
        return given


def test_albumentations_is_refused_when_the_loader_is_made(path: Path) -> None:
    with pytest.raises(ValueError, match="PerSample"):
        ShardLoader(path, 16, device="cpu", transform=Album())


def test_samples_are_augmented_by_per_sample_whatever_their_batch(path: Path) -> None:
    options: dict[str, Any] = {"shuffle": False, "num_epochs": 2}
    transform = Compose([Resize(8), PerSample(by_torch), ToDtype(torch.float32)])
    expected = torch.cat(loaded(path, transform, 16, **options))
    assert torch.equal(torch.cat(loaded(path, transform, 8, **options)), expected)
    assert not torch.equal(expected[:64], expected[64:])
