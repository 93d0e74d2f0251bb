"""Tiny ImageNet as it is shipped."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from folders import put
from pictures import random_jpeg
from storages import rows

from shardio.conversion.convert import convert
from shardio.conversion.sources.detect import find_kind, scan
from shardio.errors import SourceError
from shardio.reading.shardset import open_shards


@pytest.fixture
def src(tmp_path: Path) -> Path:
    src = tmp_path / "tiny-imagenet-200"
    names = [f"train/{wnid}/images/{wnid}_{i}.JPEG" for wnid in ("n02", "n01") for i in range(3)]
    names += [*(f"val/images/val_{i}.JPEG" for i in range(4)), "test/images/test_0.JPEG"]
    put(src, *names, content=random_jpeg(0, 12, 15))
    put(src, "train/n01/n01_boxes.txt", "train/n02/n02_boxes.txt", content=b"n01_0.JPEG\t0\t0\t9\t9\n")
    (src / "wnids.txt").write_text("n02\nn01\n")
    (src / "words.txt").write_text("n01\ttench\nn02\tcrane, bird\nn03\tother\n")
    lines = [f"val_{i}.JPEG\tn0{1 + i % 2}\t0\t0\t9\t9\n" for i in range(4)]
    (src / "val" / "val_annotations.txt").write_text("".join(lines))
    return src


def test_it_is_recognized_and_its_labels_are_those_of_its_files(src: Path, tmp_path: Path) -> None:
    assert find_kind(src) == "tiny-imagenet"
    found = scan(src)
    assert (found.classes, found.class_names) == (("n01", "n02"), ("tench", "crane, bird"))
    assert dict(rows(found)) == {
        f"train/n0{1 + label}/images/n0{1 + label}_{i}.JPEG".encode(): label for label in (0, 1) for i in range(3)
    }
    assert rows(found, "val") == [(f"val/images/val_{i}.JPEG".encode(), i % 2) for i in range(4)]
    assert rows(found, "test") == [(b"test/images/test_0.JPEG", None)]
    assert found.ignored == {"not an image": 5}
    report = convert(src, tmp_path / "out", size=8, workers=1)
    assert report.notes == ("tiny-imagenet-200: Tiny ImageNet, 2 classes",)
    assert report.num_samples == {"train": 6, "val": 4, "test": 1}
    assert report.unlabeled == ("test",)
    assert open_shards(tmp_path / "out", "val").class_names == ("tench", "crane, bird")


def test_an_image_of_val_that_is_missing_is_refused_and_one_without_a_label_an_error(src: Path, tmp_path: Path) -> None:
    (src / "val" / "images" / "val_3.JPEG").unlink()
    report = convert(src, tmp_path / "out", size=8, workers=1, max_bad=1)
    assert (report.num_samples["val"], report.refused) == (3, {"incomplete": 1})
    put(src, "val/images/val_9.JPEG")
    with pytest.raises(SourceError, match=r"val_9\.JPEG: expected a line in val/val_annotations.txt"):
        scan(src)
    (src / "val" / "images" / "val_9.JPEG").unlink()
    annotations = src / "val" / "val_annotations.txt"
    annotations.write_text(annotations.read_text().replace("val_3.JPEG\tn02", "val_3.JPEG\tn09"))
    with pytest.raises(SourceError, match=r"val_annotations\.txt: expected classes of wnids\.txt, found 'n09'"):
        scan(src)
    (src / "wnids.txt").write_text("n01\n")
    with pytest.raises(SourceError, match=r"n02_0\.JPEG: expected a class folder with a class of wnids.txt"):
        scan(src)


def test_an_incomplete_download_is_an_error(src: Path) -> None:
    (src / "wnids.txt").write_text("n01\nn02\nn03\n")
    with pytest.raises(SourceError, match=r"expected images in every class folder, found none in 1: 'n03'"):
        scan(src)
    (src / "wnids.txt").write_text("n01\nn02\n")
    shutil.rmtree(src / "val" / "images")
    with pytest.raises(SourceError, match=r"val: expected images, found none"):
        scan(src)
