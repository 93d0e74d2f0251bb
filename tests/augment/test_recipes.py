"""Recipes are the chains that their papers and libraries name, and stay what they are."""

from __future__ import annotations

import pytest
import torch

from shardio.augment import Views, recipe
from shardio.augment.recipes import RECIPES

# They may never change: a run could not be told from one with another recipe.
DIGESTS = {
    "torchvision-v2": "73fd9f7f1cf1631a",
    "timm-rsb-a1": "36549e85eece1232",
    "timm-rsb-a2": "5414cb5913ca3324",
    "timm-rsb-a3": "57f3ddc4200d7aff",
    "deit3": "5a2b78c3a266a8f4",
    "simclr": "81ba9b5e8f269cb8",
    "moco-v2": "3a782a180ea010b6",
    "dino": "f8c14d46412a2e70",
    "dinov3": "d601a44a5087f696",
    "mae": "80cea5f443a874b0",
    "ijepa": "9e2ded0b9ee50c38",
    "sit": "14549ca511169674",
    "edm2": "7fc89462ffa3bb67",
    "cifar-airbench": "6213dafcd1d77a6c",
}
SIZES = {"torchvision-v2": 176, "timm-rsb-a3": 160, "dinov3": 256, "sit": 256, "edm2": 256, "cifar-airbench": 32}


def test_digests_of_recipes_are_golden() -> None:
    assert {name: recipe(name).digest[:16] for name in RECIPES} == DIGESTS
    for name in RECIPES:
        assert recipe(name, SIZES.get(name, 224)) == recipe(name)
        assert (recipe(name, num_classes=10) == recipe(name)) == (not recipe(name).mixes)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_makes_pictures_of_its_size(name: str) -> None:
    count, side = 5, 64
    images = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8)
    labels = torch.arange(count) % 10
    transform = recipe(name, side, 10)
    views, targets = transform(images, labels, seed=3)
    if isinstance(transform, Views):
        sides = [side, side, *{"dino": [27] * 8, "dinov3": [28] * 8}.get(name, [])]
        assert torch.equal(targets, labels)
    else:
        assert isinstance(views, torch.Tensor)
        sides, views = [side], (views,)
        assert targets.shape == ((count, 10) if transform.mixes else (count,))
    for view, size in zip(views, sides, strict=True):
        assert view.dtype == torch.float32
        assert view.isfinite().all()
        assert view.shape == (count, 3, size, size)
