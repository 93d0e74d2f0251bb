"""Segmentation and detection from end to end: masks and boxes converted, augmented with their pictures, learnt."""

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
    RandomAffine,
    RandomCrop,
    RandomErasing,
    RandomResizedCrop,
    RandomRotation,
    TrivialAugmentWide,
)
from shardio.conversion.convert import convert
from shardio.conversion.writing.set_writer import ShardWriter
from shardio.loading.loader import ShardLoader
from shardio.reading.shardset import open_shards

SIDE = 48


def scene(rng: np.random.Generator) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.float32]]:
    """Returns a picture of one to three squares and discs on noise, its mask of classes, and the boxes around them."""
    picture = rng.integers(60, 120, (SIDE, SIDE, 3), dtype=np.uint8)
    mask = np.zeros((SIDE, SIDE), np.uint8)
    boxes = np.full((3, 5), (0, 0, 0, 0, -1), np.float32)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    for number in range(rng.integers(1, 4)):
        kind, size = int(rng.integers(2)), int(rng.integers(6, 14))
        top, left = rng.integers(0, SIDE - size, 2)
        inside = (rows >= top) & (rows < top + size) & (columns >= left) & (columns < left + size)
        if kind:
            middle = size / 2 - 0.5
            inside &= (rows - top - middle) ** 2 + (columns - left - middle) ** 2 <= (size / 2) ** 2
        picture[inside] = (230, 40, 40) if kind else (40, 60, 230)
        mask[inside] = kind + 1
        boxes[number] = left, top, left + size, top + size, kind
    return picture, mask, boxes


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures and masks as PNGs, in folders of the same names."""
    folder = tmp_path_factory.mktemp("scenes")
    rng = np.random.default_rng(0)
    for number in range(160):
        picture, mask, _ = scene(rng)
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


CHAINS = {
    "a crop": RandomCrop(32),
    "a crop that adds a border": RandomCrop(SIDE, padding=8),
    "flips": HorizontalFlip(),
    "rotation": RandomRotation(40),
    "affine": RandomAffine(20, (0.2, 0.2), (0.7, 1.3), 15),
    "a policy": TrivialAugmentWide(),
    "colour and erasing": Compose([ColorJitter(0.4, 0.4, 0.4, 0.1), RandomErasing(1.0)]),
    "a long chain": Compose([RandomCrop(40, padding=4), RandomRotation(10), HorizontalFlip(), RandomCrop(24)]),
}
MOVES_ONLY = [name for name in CHAINS if name not in ("a policy", "colour and erasing")]


@pytest.mark.parametrize("name", MOVES_ONLY)
def test_a_picture_that_is_its_own_mask_stays_it(scenes: Path, tmp_path: Path, name: str) -> None:
    """The masks of the scenes are also the pictures of a set: each pixel of both must have gone the same way."""
    convert(scenes / "masks", tmp_path / "out", size=SIDE, masks=scenes / "masks", workers=1)
    with ShardLoader(tmp_path / "out", 32, device="cpu", arrays=["mask"], transform=CHAINS[name], seed=3) as loader:
        for images, _, more in loader:
            for channel in images.unbind(1):
                torch.testing.assert_close(channel, more["mask"], rtol=0, atol=0)


@pytest.mark.parametrize("name", list(CHAINS))
def test_boxes_stay_around_what_they_were_around(tmp_path: Path, name: str) -> None:
    """Each sample has one square, painted with its own value into a mask: the box that comes out is that of what is
    left of it, but for the pixel by which a turned square's corners go beyond its pixels."""
    rng = np.random.default_rng(5)
    arrays = {"mask": ("mask", np.uint8, (SIDE, SIDE)), "boxes": ("boxes", np.float32, (2, 5))}
    with ShardWriter(tmp_path / "out", (SIDE, SIDE, 3), arrays=arrays) as writer:
        for number in range(64):
            size = int(rng.integers(8, 20))
            top, left = rng.integers(0, SIDE - size, 2)
            mask = np.zeros((SIDE, SIDE), np.uint8)
            mask[top : top + size, left : left + size] = 1
            boxes = np.array([(left, top, left + size, top + size, 3), (0, 0, 0, 0, -1)], np.float32)
            writer.append(np.zeros((SIDE, SIDE, 3), np.uint8), number, mask=mask, boxes=boxes)
    kept = 0
    turned = name not in ("a crop", "a crop that adds a border", "flips", "colour and erasing")
    with ShardLoader(
        tmp_path / "out", 16, device="cpu", arrays=["mask", "boxes"], transform=CHAINS[name], seed=7
    ) as loader:
        for _, _, more in loader:
            for mask, boxes in zip(more["mask"].numpy(), more["boxes"].numpy(), strict=True):
                assert boxes[1].tolist() == [0, 0, 0, 0, -1]
                rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
                if boxes[0, 4] < 0:
                    assert min(len(rows), len(columns)) <= 1 + 2 * turned
                    continue
                kept += 1
                left, top, right, bottom = boxes[0, :4]
                if turned and not len(rows):
                    assert min(right - left, bottom - top) < 4  # a corner of the hull, in which no pixel lies
                    continue
                seen = np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
                if turned:
                    # Of a part of a turned square the hull is larger than the part's own box: it is around it.
                    assert (boxes[0, :2] <= seen[:2] + 1).all()
                    assert (boxes[0, 2:4] >= seen[2:] - 1).all()
                else:
                    np.testing.assert_allclose(boxes[0, :4], seen, atol=1e-4)
    assert kept > 30


def test_masks_and_boxes_are_part_of_a_sample(scenes: Path, tmp_path: Path) -> None:
    convert(scenes / "images", tmp_path / "out", size=SIDE, masks=scenes / "masks", workers=1)
    shards = open_shards(tmp_path / "out", "val")
    for index, sample in enumerate(shards):
        name = bytes(shards.index["key"][index]).decode().removeprefix("val/")
        expected = np.asarray(Image.open(scenes / "masks" / "val" / name))
        np.testing.assert_array_equal(sample.arrays["mask"], expected)
