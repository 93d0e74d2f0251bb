"""Conversions give the pixels that are recorded here: a change of the code is no change of a set's shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import put
from pictures import encode

from shardio import convert
from shardio.format.manifest_file import load_manifest

SIZES = [(40, 60), (61, 33), (224, 224), (16, 200), (90, 70), (32, 48)]

# The options of each conversion, and the first digits of the sha256 of its shard.
RECORDED: dict[str, tuple[dict[str, Any], str]] = {
    "cropped": ({"size": 32}, "d6ad6959f0571a90"),
    "squashed": ({"size": 32, "fit": "squash"}, "bf879dab7eec2f54"),
    "padded": ({"size": 32, "fit": "pad", "resample": "lanczos"}, "a0363793da05b985"),
}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of noise as PNG, which decodes to the same pixels with every library."""
    folder = tmp_path_factory.mktemp("recorded")
    rng = np.random.default_rng(0)
    for number, (height, width) in enumerate(SIZES):
        picture = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        put(folder, f"train/class{number % 2}/{number}.png", content=encode(picture, "PNG"))
    return folder


@pytest.mark.parametrize("name", RECORDED)
def test_a_conversion_gives_the_recorded_pixels(images: Path, tmp_path: Path, name: str) -> None:
    options, shard = RECORDED[name]
    convert(images, tmp_path / "out", workers=1, **options)
    (entry,) = load_manifest(tmp_path / "out").splits["train"].shards
    assert entry.sha256[:16] == shard
