"""What people have, and the command of docs/guide/sources.md: the same pixels from all, and labels as plain Python has
them. The pictures are real where they are at hand."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from folders import put
from loaders import check_every_way
from numpy.typing import NDArray
from pictures import encode, random_jpeg
from PIL import Image
from places import SHARED

from shardio.cli.main import cli
from shardio.conversion.convert import convert
from shardio.reading.shardset import open_shards

COUNT, SIDE = 8, 32
Words = list[object]
Expected = dict[str, tuple[int, Any]]
"""The number of the picture and the label of each sample, by its key."""

BREEDS = ["pug", "akita", "boxer", "pug"]


@pytest.fixture(scope="module")
def pictures() -> list[bytes]:
    real = sorted((SHARED / "imagenet-sample").rglob("*.JPEG"))[::20]
    drawn = [random_jpeg(i, 40 + 7 * i, 90 - 5 * i) for i in range(COUNT)]
    return ([path.read_bytes() for path in real] + drawn)[:COUNT]


@pytest.fixture(scope="module")
def pixels(pictures: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> NDArray[np.uint8]:
    """The samples of the pictures, from a dataset of them."""
    out = tmp_path_factory.mktemp("reference") / "out"
    convert(pictures, out, size=SIDE, order="source", workers=1)
    return np.stack([sample.image for sample in open_shards(out)])  # type: ignore[misc]


def write_csv(path: Path, *lines: list[object]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(lines)
    return path


def flat(src: Path, pictures: list[bytes]) -> None:
    for i, data in enumerate(pictures):
        put(src, f"{i}.jpg", content=data)


def deep(labels: str) -> Callable[[Path, list[bytes]], tuple[Words, dict[str, Expected]]]:
    def build(folder: Path, pictures: list[bytes]) -> tuple[Words, dict[str, Expected]]:
        for i, data in enumerate(pictures):
            put(folder / "src", f"{'ab'[i % 2]}/deep/{i}.jpg", content=data)
        named = {f"{'ab'[i % 2]}/deep/{i}.jpg": (i, i % 2 if labels == "folders" else None) for i in range(COUNT)}
        return [folder / "src", "--labels", labels], {"train": named}

    return build


def kaggle_table(folder: Path, pictures: list[bytes]) -> tuple[Words, dict[str, Expected]]:
    flat(folder / "photos", pictures)
    table = write_csv(folder / "labels.csv", ["image_id", "breed"], *([i, breed] for i, breed in enumerate(BREEDS)))
    classes = sorted(set(BREEDS))
    named = {f"{i}.jpg": (i, classes.index(breed)) for i, breed in enumerate(BREEDS)}
    return [folder / "photos", "--table", table], {"train": named}


def tags(folder: Path, pictures: list[bytes]) -> tuple[Words, dict[str, Expected]]:
    flat(folder / "photos", pictures)
    rows: list[list[object]] = [[f"{i}.jpg", i % 2, i // 4, 7] for i in range(COUNT)]
    table = write_csv(folder / "tags.csv", ["filename", "sky", "sea", "other"], *rows)
    named = {f"{i}.jpg": (i, [i % 2, i // 4]) for i in range(COUNT)}
    return [folder / "photos", "--table", table, "--label-column", "sky", "--label-column", "sea"], {"train": named}


def ages(folder: Path, pictures: list[bytes]) -> tuple[Words, dict[str, Expected]]:
    flat(folder / "photos", pictures)
    table = write_csv(folder / "ages.csv", ["file_name", "age"], *([f"{i}.jpg", i + 0.5] for i in range(COUNT)))
    return [folder / "photos", "--table", table], {"train": {f"{i}.jpg": (i, i + 0.5) for i in range(COUNT)}}


def table_of_each_split(folder: Path, pictures: list[bytes]) -> tuple[Words, dict[str, Expected]]:
    flat(folder / "photos", pictures)
    train = write_csv(folder / "a.csv", ["path", "label"], *([f"{i}.jpg", "xy"[i % 2]] for i in range(5)))
    test = write_csv(folder / "b.csv", ["path"], *([f"{i}.jpg"] for i in range(5, COUNT)))
    return [folder / "photos", "--table", f"train={train}", "--table", f"test={test}"], {
        "train": {f"{i}.jpg": (i, i % 2) for i in range(5)},
        "test": {f"{i}.jpg": (i, None) for i in range(5, COUNT)},
    }


def parquet(folder: Path, pictures: list[bytes], **columns: list[Any]) -> tuple[Words, dict[str, Expected]]:
    images = [{"bytes": data, "path": None} for data in pictures]
    pq.write_table(pa.table({"image": images, **columns}), folder / "x.parquet")
    return [folder / "x.parquet"], {"train": {f"{i:08d}": (i, None) for i in range(COUNT)}}


def voc(folder: Path, pictures: list[bytes]) -> tuple[Words, dict[str, Expected]]:
    for i, data in enumerate(pictures):
        width, height = Image.open(io.BytesIO(data)).size
        put(folder / "JPEGImages", f"2008_{i}.jpg", content=data)
        put(folder / "SegmentationClass", f"2008_{i}.png", content=encode(np.full((height, width), i, np.uint8), "PNG"))
    words: Words = [folder / "JPEGImages", "--masks", folder / "SegmentationClass"]
    for split, numbers in (("train", range(6)), ("val", range(6, COUNT))):
        put(folder / "ImageSets", f"{split}.txt", content="".join(f"2008_{i}\n" for i in numbers).encode())
        words += ["--table", f"{split}={folder}/ImageSets/{split}.txt"]
    return words, {
        "train": {f"2008_{i}.jpg": (i, None) for i in range(6)},
        "val": {f"2008_{i}.jpg": (i, None) for i in range(6, COUNT)},
    }


@pytest.mark.parametrize(
    "build",
    [kaggle_table, tags, ages, table_of_each_split, voc, deep("none"), deep("folders")],
    ids=lambda build: build.__qualname__,
)
def test_one_command_gives_the_same_pixels_and_their_own_labels(
    build: Any, pictures: list[bytes], pixels: NDArray[np.uint8], tmp_path: Path
) -> None:
    words, splits = build(tmp_path, pictures)
    words = [words[0], tmp_path / "out", "--size", SIDE, *words[1:]]
    done = CliRunner().invoke(cli, ["convert", *map(str, words)])
    assert done.exit_code == 0, done.output
    assert set(open_shards(tmp_path / "out").manifest.splits) == set(splits)
    for split, expected in splits.items():
        shards = open_shards(tmp_path / "out", split)
        assert sorted(shards.index["key"].tolist()) == sorted(key.encode() for key in expected)
        for sample, key in zip(shards, shards.index["key"].tolist(), strict=True):
            number, label = expected[key.decode()]
            np.testing.assert_array_equal(sample.image, pixels[number])
            assert (sample.label if label is None else np.asarray(sample.label).tolist()) == label
            if "mask" in sample.arrays:
                assert (sample.arrays["mask"] == number).all()


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_pictures_without_labels_are_the_same_read_in_every_way(
    io: str, pictures: list[bytes], pixels: NDArray[np.uint8], tmp_path: Path
) -> None:
    flat(tmp_path / "src", pictures * 5)
    convert(tmp_path / "src", tmp_path / "out", size=SIDE, shard_size=4096 + 9 * pixels[0].nbytes)
    keys = open_shards(tmp_path / "out").index["key"].tolist()

    def checked(batch: tuple[Any, ...]) -> list[int]:
        images, indices = batch
        numbers: list[int] = indices.tolist()
        expected = pixels[[int(keys[number].removesuffix(b".jpg")) % COUNT for number in numbers]]
        np.testing.assert_array_equal(images.permute(0, 2, 3, 1).numpy(), expected)
        return numbers

    check_every_way(tmp_path / "out", checked, io, tmp_path, "images")
