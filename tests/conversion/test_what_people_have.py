"""What people have, and the command of docs/guide/sources.md: tables and masks next to a folder of pictures."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from folders import put
from pictures import encode, random_jpeg
from PIL import Image

from shardio.cli.main import cli
from shardio.reading.shardset import ShardSet, open_shards

COUNT = 8
PICTURES = [random_jpeg(i, 40 + 7 * i, 90 - 5 * i) for i in range(COUNT)]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for i, data in enumerate(PICTURES):
        put(tmp_path / "photos", f"{i}.jpg", content=data)
    return tmp_path / "photos"


def converted(src: Path, *words: object) -> Path:
    out = src.parent / "out"
    done = CliRunner().invoke(cli, ["convert", *map(str, (src, out, "--size", 32, *words))])
    assert done.exit_code == 0, done.output
    return out


def numbers(shards: ShardSet) -> list[int]:
    return [int(key.removesuffix(b".jpg")) for key in shards.index["key"].tolist()]


def test_columns_of_a_table_are_vectors_of_labels(photos: Path) -> None:
    with (photos.parent / "tags.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["file", "sky", "sea"], *([f"{i}.jpg", i % 2, i // 4] for i in range(COUNT))])
    words = ("--table", photos.parent / "tags.csv", "--label-column", "sky", "--label-column", "sea")
    shards = open_shards(converted(photos, *words))
    assert shards.classes == ("sky", "sea")
    assert shards.labels.tolist() == [[i % 2, i // 4] for i in numbers(shards)]


def test_pascal_voc_has_a_list_for_each_split_and_masks_in_another_folder(photos: Path) -> None:
    words: list[object] = ["--masks", photos.parent / "SegmentationClass"]
    for i, data in enumerate(PICTURES):
        width, height = Image.open(io.BytesIO(data)).size
        mask = encode(np.full((height, width), i, np.uint8), "PNG")
        put(photos.parent / "SegmentationClass", f"{i}.png", content=mask)
    for split, listed in (("train", range(6)), ("val", range(6, COUNT))):
        put(photos.parent, f"{split}.txt", content="".join(f"{i}\n" for i in listed).encode())
        words += ["--table", f"{split}={photos.parent}/{split}.txt"]
    out = converted(photos, *words)
    for split, listed in (("train", range(6)), ("val", range(6, COUNT))):
        shards = open_shards(out, split)
        assert sorted(numbers(shards)) == list(listed)
        for number, sample in zip(numbers(shards), shards, strict=True):
            assert (sample.label, np.unique(sample.arrays["mask"]).tolist()) == (None, [number])
