"""Segmentation from end to end: masks converted, augmented with their pictures, learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from shardio.augment import (
    ColorJitter,
    Compose,
    HorizontalFlip,
    Normalize,
    RandomResizedCrop,
    RandomRotation,
)
from shardio.conversion.convert import convert
from shardio.loading.loader import ShardLoader

SIDE = 48


def scene(rng: np.random.Generator) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Returns a picture of one to three squares and discs on noise, and its mask of classes."""
    picture = rng.integers(60, 120, (SIDE, SIDE, 3), dtype=np.uint8)
    mask = np.zeros((SIDE, SIDE), np.uint8)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    for _ in range(rng.integers(1, 4)):
        kind, size = int(rng.integers(2)), int(rng.integers(6, 14))
        top, left = rng.integers(0, SIDE - size, 2)
        inside = (rows >= top) & (rows < top + size) & (columns >= left) & (columns < left + size)
        if kind:
            middle = size / 2 - 0.5
            inside &= (rows - top - middle) ** 2 + (columns - left - middle) ** 2 <= (size / 2) ** 2
        picture[inside] = (230, 40, 40) if kind else (40, 60, 230)
        mask[inside] = kind + 1
    return picture, mask


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures and masks as PNGs, in folders of the same names."""
    folder = tmp_path_factory.mktemp("scenes")
    rng = np.random.default_rng(0)
    for number in range(160):
        picture, mask = scene(rng)
        for kind, pixels in (("images", picture), ("masks", mask)):
            path = (
                folder / kind / ("train" if number < 128 else "val") / ("even", "odd")[number % 2] / f"{number:03}.png"
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    return folder


def test_a_network_learns_masks_that_were_converted_and_augmented(scenes: Path, tmp_path: Path) -> None:
    convert(scenes / "images", tmp_path / "out", size=SIDE, masks=scenes / "masks", workers=1)
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 3, 1)
    ).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    chain = Compose(
        [
            RandomResizedCrop(32, scale=(0.4, 1)),
            HorizontalFlip(),
            RandomRotation(20),
            ColorJitter(0.1, 0.1),
            Normalize("imagenet"),
        ]
    )
    with ShardLoader(tmp_path / "out", 16, device="cpu", arrays=["mask"], transform=chain, seed=1) as loader:
        for _ in range(6):
            for images, _, more in loader:
                loss = nn.functional.cross_entropy(network(images), more["mask"].long())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    found = wanted = 0
    options: dict[str, Any] = {"split": "val", "shuffle": False, "device": "cpu", "transform": Normalize("imagenet")}
    with ShardLoader(tmp_path / "out", 16, arrays=["mask"], **options) as loader, torch.no_grad():
        for images, _, more in loader:
            guess, mask = network(images).argmax(1), more["mask"]
            found += int(((guess == mask) & (mask > 0)).sum())
            wanted += int(((guess > 0) | (mask > 0)).sum())
    assert found / wanted > 0.8  # the mean overlap; masks that had not moved with their pictures give 0.2
