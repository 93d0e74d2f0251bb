"""A conversion does what `plan` says beforehand; and `plan` writes nothing."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from folders import put
from pictures import encode
from PIL import Image
from storages import draw_imagenet

from shardio.conversion.convert import convert
from shardio.conversion.estimate import estimate
from shardio.conversion.sources.table import Table
from shardio.errors import ConvertError, SourceError

SIZE = 16
OPTIONS = {"size": SIZE, "shard_size": 4096 + 6 * SIZE * SIZE * 3, "workers": 1}


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_imagenet(tmp_path_factory.mktemp("estimate") / "imagenet")


def test_counts_and_sizes_are_those_of_the_set_that_a_conversion_makes(tmp_path: Path) -> None:
    tree = draw_imagenet(tmp_path / "tree", sound=True)
    found = estimate(tree, tmp_path / "out", seconds=0.01, order="source", **OPTIONS)
    report = convert(tree, tmp_path / "out", **OPTIONS)
    assert (found.splits, found.num_shards) == (report.num_samples, report.num_shards)
    assert found.nbytes == found.nbytes_as["rgb"] == report.nbytes
    half = {"size": SIZE, "shard_size": 4096 + 6 * SIZE * SIZE * 3 // 2, "workers": 1, "pixels": "yuv420"}
    assert found.nbytes_as["yuv420"] == convert(tree, tmp_path / "half", **half).nbytes
    assert found.source_nbytes == sum(path.stat().st_size for path in tree.rglob("*.JPEG"))
    assert found.source == "tree"
    assert not found.refused


def test_the_shorter_sides_of_the_measured_images_are_told(tmp_path: Path) -> None:
    for i in range(11):
        size = (20 + i, 40) if i % 2 else (40, 20 + i)
        put(tmp_path / "tree", f"{'cat' if i < 5 else 'dog'}/{i}.png", content=encode(Image.new("RGB", size), "PNG"))
    put(tmp_path / "tree", "dog/bad.png", content=b"no picture")
    assert estimate(tmp_path / "tree", seconds=60, **OPTIONS).short_sides == (21, 25, 29)
    np.save(tmp_path / "vectors.npy", np.zeros((3, 4), np.float32))
    assert estimate(tmp_path / "vectors.npy", seconds=0.01).short_sides == ()


def test_columns_and_quality_count(imagenet: Path, tmp_path: Path) -> None:
    keys = [path.relative_to(imagenet).as_posix() for path in sorted(imagenet.rglob("*.JPEG"))]
    columns = tmp_path / "columns.csv"
    columns.write_text("path,area,shade\n" + "".join(f"{key},{i},0.5\n" for i, key in enumerate(keys)))
    with_columns = estimate(imagenet, table=Table(columns, columns=["area", "shade"]), quality="fast", seconds=0.01)
    files = 2 * 2 * 2  # of two splits, two arrays: the values, and their checksums
    assert with_columns.nbytes == estimate(imagenet, seconds=0.01).nbytes + (8 + 4) * 2 * len(keys) + files * 4096
    columns.write_text("path,area\n")
    with pytest.raises(SourceError, match="expected a row for every image"):
        estimate(imagenet, table=Table(columns, columns=["area"]))


@pytest.mark.parametrize("max_bad", [2, 0.11])
def test_what_a_conversion_refuses_for_its_bad_images_is_told_before(max_bad: int | float, tmp_path: Path) -> None:
    tree = draw_imagenet(tmp_path / "tree", sound=True)
    paths = sorted(tree.rglob("*.JPEG"))  # 28
    for path in paths[3::10]:
        path.write_bytes(b"no picture")
    found = estimate(tree, seconds=60, max_bad=max_bad, **OPTIONS)
    assert found.num_measured == found.num_sources == len(paths)
    if found.expected_bad <= found.most_bad:
        assert sum(convert(tree, tmp_path / "out", max_bad=max_bad, **OPTIONS).refused.values()) == found.expected_bad
    else:
        with pytest.raises(ConvertError, match=f"at most {found.most_bad} refused images of {len(paths)}"):
            convert(tree, tmp_path / "out", max_bad=max_bad, **OPTIONS)


def test_what_was_not_tried_is_taken_to_be_as_what_was(imagenet: Path) -> None:
    found = dataclasses.replace(
        estimate(imagenet, seconds=0.01, **OPTIONS),
        num_sources=1_300_000,
        num_measured=100,
        refused={"damaged": 2, "empty": 1},
    )
    for max_bad, most in ((0.01, 13_000), (10, 10), (0.03, 39_000), (39_000, 39_000), (38_999, 38_999)):
        found = dataclasses.replace(found, max_bad=max_bad)
        assert (found.expected_bad, found.most_bad) == (39_000, most)


def test_nothing_is_written_and_out_need_not_exist(imagenet: Path, tmp_path: Path) -> None:
    before = sorted(imagenet.parent.rglob("*"))
    found = estimate(imagenet, tmp_path / "not" / "there" / "out", seconds=0.01, **OPTIONS)
    assert os.listdir(tmp_path) == []
    assert sorted(imagenet.parent.rglob("*")) == before
    assert found.free_nbytes is not None
    assert abs(found.free_nbytes - shutil.disk_usage(tmp_path).free) < 1 << 30
    assert estimate(imagenet, seconds=0.01, **OPTIONS).free_nbytes is None


def test_the_set_fits_if_there_is_room_for_it(imagenet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = estimate(imagenet, tmp_path, seconds=0.01, **OPTIONS).nbytes
    for free, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: shutil._ntuple_diskusage(1, 1, free))
        assert estimate(imagenet, tmp_path, seconds=0.01, **OPTIONS).fits is fits
    assert estimate(imagenet, seconds=0.01, **OPTIONS).fits is None


def test_the_smallest_and_the_largest_class_are_named_and_empty_ones_count(imagenet: Path, tmp_path: Path) -> None:
    tree = shutil.copytree(imagenet, tmp_path / "tree")
    (tree / "train" / "n99999999").mkdir()
    found = estimate(tree, **OPTIONS, empty_classes="keep", seconds=0.01)
    assert any("0 (n99999999) to 5 (n01440764) of a class" in note for note in found.notes)
    assert found.num_classes == 5


def test_a_small_collection_is_tried_once_and_its_refused_images_counted(imagenet: Path) -> None:
    found = estimate(imagenet, seconds=60, **OPTIONS | {"workers": 9})
    assert found.num_measured == found.num_sources == 28
    assert found.refused == {"empty": 1, "damaged": 1, "unsupported": 1}
    assert found.workers == 9
    assert found.seconds == pytest.approx(28 / found.images_per_second)


def test_a_large_collection_is_measured_for_the_time_given(imagenet: Path) -> None:
    found = estimate(imagenet, seconds=1e-9, **OPTIONS | {"workers": 3})
    assert found.num_measured == 3  # one for each thread


def test_what_cannot_be_converted_cannot_be_estimated(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="expected a folder of images, found nothing"):
        estimate(tmp_path / "gone")
