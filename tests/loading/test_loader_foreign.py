"""A ShardLoader's transform may be any function; a class that draws once for a batch is an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_sets import make_plain_set
from torch import Tensor, nn
from transforms import by_torch

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


class RandomFlip:
    __module__ = "torchvision.transforms.v2"

    def __call__(self, images: Tensor) -> Tensor:
        return by_torch(images)


def test_a_class_that_draws_once_for_a_batch_is_refused_when_it_is_handed_over(path: Path) -> None:
    with pytest.raises(ValueError, match="RandomFlip"):
        ShardLoader(path, 16, device="cpu", transform=RandomFlip())


@pytest.mark.parametrize("transform", [by_torch, torch.Tensor.float, Module(by_torch), lambda images: images.mul_(2)])
def test_any_other_function_is_called_once_with_the_batch(path: Path, transform: Any) -> None:
    torch.manual_seed(1)
    found = loaded(path, transform)
    torch.manual_seed(1)
    assert all(map(torch.equal, found, [transform(images) for images in loaded(path, None)]))


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


def test_samples_are_augmented_by_per_sample_whatever_their_batch(path: Path) -> None:
    options: dict[str, Any] = {"shuffle": False, "num_epochs": 2}
    transform = Compose([Resize(8), PerSample(by_torch), ToDtype(torch.float32)])
    expected = torch.cat(loaded(path, transform, 16, **options))
    assert torch.equal(torch.cat(loaded(path, transform, 8, **options)), expected)
    assert not torch.equal(expected[:64], expected[64:])
