"""Damaged arrays of a set are made again from their sources, to the same bytes; those that cannot be are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import flip, hashes
from numpy.typing import NDArray
from pictures import encode, random_picture
from PIL import Image

from shardio.conversion.convert import convert
from shardio.conversion.repair import repair
from shardio.errors import ConvertError, FormatError
from shardio.format.manifest_file import load_manifest
from shardio.reading.shardset import open_shards
from shardio.sets.verify import verify

SIZE = 16
OPTIONS: dict[str, Any] = {"size": SIZE, "shard_size": 4096 + 3 * SIZE * SIZE * 3, "also": (8, "4x6"), "workers": 1}
NAMES = ["image4x6", "image8", "mask"]
"""The arrays of `with_masks`; eleven samples in train and four in val, three to a shard at most."""


@pytest.fixture
def with_masks(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A tree with masks of which one is missing. Returns it and options for `convert`."""
    for split, count in (("train", 12), ("val", 4)):
        for i in range(count):
            height, width = 16 + 5 * i, 70 - 4 * i
            name = f"{split}/{'ab'[i % 2]}/{i}"
            for folder, data in (
                ("src", encode(random_picture(np.random.default_rng(i), height, width), "PNG")),
                ("masks", encode(np.random.default_rng(i).integers(0, 99, (height, width), np.uint8), "PNG")),
            ):
                path = tmp_path / folder / f"{name}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
    (tmp_path / "masks" / "train" / "a" / "4.png").unlink()
    return tmp_path / "src", {**OPTIONS, "masks": tmp_path / "masks", "max_bad": 1}


@pytest.fixture
def undisturbed(with_masks: tuple[Path, dict[str, Any]], tmp_path: Path) -> dict[str, str]:
    src, options = with_masks
    report = convert(src, tmp_path / "undisturbed", **options)
    assert report.num_samples == {"train": 11, "val": 4}
    assert verify(tmp_path / "undisturbed").ok
    assert sorted(load_manifest(tmp_path / "undisturbed").splits["val"].arrays) == NAMES
    return hashes(tmp_path / "undisturbed")


# --- repair -----------------------------------------------------------------------------------------------------------


def damage(out: Path) -> set[str]:
    """Damages files of every kind. Returns their names."""
    flip(out / "train-mask-00001.npy")
    (out / "train-image8-00002.npy").unlink()
    (out / "val-image4x6-00000.npy").write_bytes(b"")
    flip(out / "val-mask-crc32.npy")
    return {"train-mask-00001.npy", "train-image8-00002.npy", "val-image4x6-00000.npy", "val-mask-crc32.npy"}


def test_damaged_arrays_are_made_again(
    with_masks: tuple[Path, dict[str, Any]], undisturbed: dict[str, str], tmp_path: Path
) -> None:
    src, options = with_masks
    out = tmp_path / "undisturbed"
    damaged = damage(out)
    assert set(repair(out, src, masks=options["masks"]).repaired) == damaged
    assert hashes(out) == undisturbed
    damaged = damage(out)
    for name in ("train-00001.npy", "train-index.npy", "rejects.jsonl", "val-00000.npy", "train-mask-crc32.npy"):
        flip(out / name)
        damaged.add(name)
    assert set(repair(out, src, masks=options["masks"], workers=2).repaired) == damaged
    assert hashes(out) == undisturbed


def test_without_the_masks_all_else_is_repaired_and_the_masks_are_named(
    with_masks: tuple[Path, dict[str, Any]], undisturbed: dict[str, str], tmp_path: Path
) -> None:
    src, options = with_masks
    out = tmp_path / "undisturbed"
    damage(out)
    with pytest.raises(ConvertError, match=r"train-mask-00001.npy, val-mask-crc32.npy cannot be made again without"):
        repair(out, src)
    assert {problem.file for problem in verify(out).problems} == {"train-mask-00001.npy", "val-mask-crc32.npy"}
    repair(out, src, masks=options["masks"])
    assert hashes(out) == undisturbed


def test_a_changed_mask_makes_no_other_set(
    with_masks: tuple[Path, dict[str, Any]], undisturbed: dict[str, str], tmp_path: Path
) -> None:
    src, options = with_masks
    out = tmp_path / "undisturbed"
    for path in (options["masks"] / "train").glob("*/*.png"):
        height, width = np.asarray(Image.open(path)).shape
        path.write_bytes(encode(np.zeros((height, width), np.uint8), "PNG"))
    flip(out / "train-mask-00001.npy")
    flip(out / "train-image8-00001.npy")
    with pytest.raises(ConvertError, match=r"1 files cannot be made again.*train-mask-00001.npy: expected sha256"):
        repair(out, src, masks=options["masks"])
    assert [problem.file for problem in verify(out).problems] == ["train-mask-00001.npy"]


def test_an_array_that_convert_did_not_make_is_named(image_tree: Path, tmp_path: Path) -> None:
    from arrays import change_split, some_arrays

    convert(image_tree, tmp_path / "out", **OPTIONS)
    count = len(open_shards(tmp_path / "out"))
    values: NDArray[Any] = some_arrays(count, SIZE, SIZE)["clip"][1]
    change_split(tmp_path / "out", {"clip": ("array", values)})
    flip(tmp_path / "out" / "train-clip-00000.npy")
    flip(tmp_path / "out" / "train-image8-00000.npy")
    with pytest.raises((ConvertError, FormatError), match=r"train-clip-00000.npy: `convert` did not make the array"):
        repair(tmp_path / "out", image_tree)
    assert [problem.file for problem in verify(tmp_path / "out").problems] == ["train-clip-00000.npy"]
