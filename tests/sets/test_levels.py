"""Mean and standard deviation of pixels, in the manifest of a conversion."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import flip
from pictures import random_picture, write_jpeg

from shardio import ShardWriter, convert
from shardio.changes.change import change
from shardio.errors import FormatError
from shardio.format.manifest_file import load_manifest
from shardio.reading.shardset import open_shards
from shardio.sets import levels as levels_module
from shardio.sets.levels import Levels, chosen_samples, first_split, levels_of, stored_levels, sum_levels
from shardio.sets.selection import Selection
from shardio.viewing.overview import make_overview
from shardio.viewing.pictures import open_splits


def measured(pictures: Iterable[np.ndarray]) -> Levels:
    return levels_of("train", np.sum([sum_levels(picture) for picture in pictures], axis=0))


@pytest.mark.parametrize("shape", [(5, 7, 3), (64, 3, 1), (100, 4, 4)])
def test_levels_are_those_of_the_lines_that_are_looked_at(shape: tuple[int, int, int]) -> None:
    pictures = np.random.default_rng(1).integers(0, 256, (9, *shape), dtype=np.uint8)
    step = max(1, shape[0] // 32)
    values = pictures[:, step // 2 :: step].reshape(-1, shape[2]) / 255
    found = measured(pictures)
    assert found.num_samples == 9
    np.testing.assert_allclose(found.mean, values.mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(found.std, values.std(axis=0), atol=1e-6)


def test_white_pictures_do_not_overflow_and_have_no_deviation() -> None:
    white = np.full((2048, 3, 3), 255, np.uint8)
    assert measured([white] * 40) == Levels("train", 40, (1.0,) * 3, (0.0,) * 3)


def test_chosen_samples_are_distinct_ascending_and_at_most_some_thousands() -> None:
    for count in (1, 2, 2048, 2049, 100_003):
        chosen = chosen_samples(count)
        assert len(chosen) == min(count, 2048)
        assert (np.diff(chosen, prepend=-1, append=count) > 0).all()


def test_training_samples_are_measured() -> None:
    assert (first_split(["val", "train"]), first_split(["val", "test"])) == ("train", "test")


def draw_pictures(folder: Path) -> list[Path]:
    rng = np.random.default_rng(2)
    files = [folder / f"c{number // 15}" / f"{number:02}.jpg" for number in range(30)]
    for file in files:
        write_jpeg(file, random_picture(rng, 20, 24))
    return files


def test_a_conversion_tells_the_levels_of_its_pixels_whatever_its_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(levels_module, "NUM_SAMPLES", 20)
    draw_pictures(tmp_path / "src")
    told = []
    for name, shard_size in (("one", 10**9), ("many", 8000)):
        convert(tmp_path / "src", tmp_path / name, size=16, shard_size=shard_size)
        told.append(load_manifest(tmp_path / name).provenance["pixels"])
    shards = open_shards(tmp_path / "one")
    expected = measured(shards[int(i)].image for i in chosen_samples(30))
    assert told == [expected.describe()] * 2
    assert stored_levels(shards.manifest.provenance, 3) == expected
    assert expected.num_samples == 20
    change(tmp_path / "one", tmp_path / "new", keep=Selection(classes="c0"))
    assert "pixels" not in load_manifest(tmp_path / "new").provenance


def test_refused_images_are_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels_module, "NUM_SAMPLES", 20)
    files = draw_pictures(tmp_path / "src")
    chosen = [files[int(i)] for i in chosen_samples(30)]
    for file in chosen[:5]:
        file.write_bytes(b"\xff\xd8\xff")
    options: dict[str, Any] = {"size": 16, "order": "source", "max_bad": 30, "shard_size": 8000}
    convert(tmp_path / "src", tmp_path / "out", **options)
    shards = open_shards(tmp_path / "out")
    stems = {file.stem for file in chosen[5:]}
    keys = shards.column_of("key", np.arange(25)).tolist()
    kept = [shards[i].image for i, key in enumerate(keys) if Path(key.decode()).stem in stems]
    assert stored_levels(shards.manifest.provenance, 3) == measured(kept)
    assert len(kept) == 15
    for file in chosen:
        file.write_bytes(b"\xff\xd8\xff")
    convert(tmp_path / "src", tmp_path / "other", **options)
    assert "pixels" not in load_manifest(tmp_path / "other").provenance


def test_a_report_tells_no_levels_of_damaged_pixels(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "out", (8, 8, 3)) as writer:
        writer.append(np.zeros((8, 8, 3), np.uint8), 0)
    flip(tmp_path / "out" / "train-00000.npy")
    with pytest.raises(FormatError, match=r"train-00000\.npy: sample 0"):
        make_overview(open_splits(tmp_path / "out"), 1, lambda done, total: None)


@pytest.mark.parametrize(
    "told",
    [
        None,
        [],
        {},
        {"split": "train"},
        {"split": "train", "num_samples": 3, "mean": [0.5], "std": [0.5]},
        {"split": "train", "num_samples": 3, "mean": [0.5, 0.5, "x"], "std": [0.5, 0.5, 0.5]},
        {"split": "train", "num_samples": 3, "mean": [0.5, 0.5, 1e9], "std": [0.5, 0.5, 0.5]},
        {"split": "train", "num_samples": True, "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]},
        {"split": 1, "num_samples": 3, "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]},
    ],
)
def test_a_provenance_that_tells_anything_else_tells_no_levels(told: Any) -> None:
    assert stored_levels({"pixels": told}, 3) is None
