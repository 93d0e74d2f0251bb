"""Loaders give the batches that are recorded here: a change of the code is no change of indices or pixels."""

from __future__ import annotations

import hashlib
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import flat

from shardio import ShardLoader
from shardio.augment import (
    ColorJitter,
    Compose,
    CutMix,
    HorizontalFlip,
    Normalize,
    RandAugment,
    RandomApply,
    RandomChoice,
    RandomCrop,
    RandomErasing,
    RandomResizedCrop,
    RandomRotation,
    Resize,
    TrivialAugmentWide,
    Views,
)
from shardio.conversion.writing.set_writer import ShardWriter

NUM_SAMPLES, HEIGHT, WIDTH, NUM_BATCHES = 331, 40, 48, 100

CROPPED = Compose([RandomResizedCrop(24), HorizontalFlip()])
POLICIES = Compose([RandomResizedCrop(32), RandAugment(), RandomErasing(0.5, value=(1, 2, 3))])
WARPED = Compose(
    [RandomApply([RandomRotation(30)], 0.7), Resize((20, 24)), RandomChoice([TrivialAugmentWide(), CutMix(10)])]
)

VIEWS = Compose(
    [
        RandomResizedCrop(16, scale=(0.3, 1.0)),
        Views([Compose([ColorJitter(0.4), Normalize("imagenet")]), Resize(8), *[RandomCrop(8, step=4)] * 2]),
    ]
)

# The options of each loader, and the first digits of the sha256 of its indices and of everything else in its batches.
RECORDED: dict[str, tuple[dict[str, Any], str, str]] = {
    "shuffled": ({"io": "mmap", "seed": 3}, "14f7a05d15050e57", "9645e4a635cb28fa"),
    "stored order, second of three ranks": (
        {"io": "pread", "shuffle": False, "rank": 1, "world_size": 3, "tail": "pad", "num_threads": 3},
        "40c6ae8f749d14a1",
        "329e4d71efda4ec6",
    ),
    "blocks, short tail": (
        {"io": "direct", "shuffle": "block", "tail": "short", "seed": 1},
        "97d979baa24b6b2e",
        "b8ed20fbc00daa53",
    ),
    "weights": (
        {"weights": np.arange(NUM_SAMPLES) % 7, "seed": 5, "num_threads": 1},
        "61abcef587b443e2",
        "8475db553813be54",
    ),
    "a stream with repeats, second of four ranks": (
        {"transform": CROPPED, "epoch_batches": 7, "repeats": 4, "rank": 1, "world_size": 4, "seed": 9},
        "5afc1b6bd7805a36",
        "d86fa47069557be8",
    ),
    "crops, first of two ranks": (
        {"transform": CROPPED, "rank": 0, "world_size": 2, "seed": 7},
        "f31149d75be71ec4",
        "d9dcff14479d5aa1",
    ),
    "policies of chosen samples": (
        {"transform": POLICIES, "indices": np.arange(300, 20, -2), "seed": 2**40},
        "190b14e06fd3df85",
        "ccc8f5afc71f9eaa",
    ),
    "warps and mixes": ({"transform": WARPED, "io": "pread"}, "3954394eda1a7f4d", "888df33ef466d89c"),
    "views, second of two ranks": (
        {"transform": VIEWS, "io": "pread", "rank": 1, "world_size": 2, "seed": 4, "tail": "short"},
        "dfe901ec2cfd70ef",
        "f85294d9aea491d6",
    ),
    "masks, checked": (
        {"transform": CROPPED, "arrays": ["mask"], "check": "sample", "io": "mmap"},
        "3954394eda1a7f4d",
        "6a1ab09ad307cd74",
    ),
    "masks and years, checked": (
        {"transform": CROPPED, "arrays": ["mask", "year"], "check": "sample", "io": "mmap"},
        "3954394eda1a7f4d",
        "8911362bdc27f9dd",
    ),
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of smooth pictures with noise, in four shards."""
    out = tmp_path_factory.mktemp("recorded") / "set"
    rng = np.random.default_rng(1)
    slopes = rng.integers(-3, 4, (NUM_SAMPLES, 2, 3))
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    rng.bit_generator.advance(5 * NUM_SAMPLES)  # where the noise of the recorded pictures begins
    with ShardWriter(
        out,
        (HEIGHT, WIDTH, 3),
        shard_nbytes=4096 + 90 * HEIGHT * WIDTH * 3,
        arrays={"mask": ("mask", "uint8", (HEIGHT, WIDTH)), "year": ("array", "int64", ())},
    ) as writer:
        for number in range(NUM_SAMPLES):
            image = 128 + y[..., None] * slopes[number, 0] + x[..., None] * slopes[number, 1]
            image = np.clip(image + rng.integers(-20, 20, image.shape), 0, 255).astype(np.uint8)
            writer.append(image, number % 10, key=f"{number}", mask=image[..., 0] // 32, year=1900 + number)
    return out


@pytest.mark.parametrize("name", RECORDED)
def test_the_first_hundred_batches_are_the_recorded_ones(shards: Path, name: str) -> None:
    options, indices, others = RECORDED[name]
    found = hashlib.sha256(), hashlib.sha256()
    with ShardLoader(shards, 13, device="cpu", return_indices=True, **options) as loader:
        batches = (batch for _ in range(NUM_BATCHES) for batch in loader)
        for images, labels, numbers, *rest in islice(batches, NUM_BATCHES):
            found[0].update(numbers.numpy().tobytes())
            for value in flat((images, labels, *rest)):
                found[1].update(value.contiguous().view(torch.uint8).numpy().tobytes())
    assert tuple(digest.hexdigest()[:16] for digest in found) == (indices, others)
