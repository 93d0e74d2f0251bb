"""Segmentation from end to end: masks go with their pictures from files to batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from shardio.augment import Compose, HorizontalFlip, RandomResizedCrop, RandomRotation
from shardio.conversion.convert import convert
from shardio.loading.loader import ShardLoader


def test_masks_that_were_converted_are_augmented_with_their_pictures(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(32):
        picture = np.kron(rng.integers(0, 256, (6, 6, 3), np.uint8), np.ones((8, 8, 1), np.uint8))
        for kind, pixels in (("images", picture), ("masks", picture[..., 0])):
            path = tmp_path / kind / ("even", "odd")[number % 2] / f"{number:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    convert(tmp_path / "images", tmp_path / "out", size=48, masks=tmp_path / "masks", workers=1)
    chain = Compose([RandomResizedCrop(32, scale=(0.4, 1)), HorizontalFlip(), RandomRotation(20)])
    with ShardLoader(tmp_path / "out", 16, device="cpu", arrays=["mask"], transform=chain, seed=1) as loader:
        for images, _, more in loader:
            # Only along the edges of blocks are a picture and its red levels as a mask sampled differently.
            alike = (images[:, 0].int() - more["mask"].int()).abs() <= 8
            assert (alike.float().mean(dim=(1, 2)) > 0.4).all()  # any other mask has 0.07
