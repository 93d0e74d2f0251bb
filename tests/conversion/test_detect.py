"""The kind that SRC is taken for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from folders import put
from storages import (
    draw_imagenet,
    scan,
    tar_of,
    write_archives,
)

from shardio.conversion.collect import find_kind
from shardio.errors import SourceError


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_imagenet(tmp_path_factory.mktemp("scanner") / "imagenet")


def test_an_ordinary_tree_stays_a_tree_whatever_lies_in_it(tmp_path: Path) -> None:
    put(tmp_path, "a/1.jpg", "b/2.jpg", "labels.csv", "list.txt", "images.tar", "train.parquet", ".hidden/x")
    assert find_kind(tmp_path) == "tree"
    put(tmp_path, "a/extra.tar", "b/notes.csv", "Data/1.jpg")
    assert find_kind(tmp_path) == "tree"
    assert scan(tmp_path).ignored == {"hidden": 1, "not an image": 6}


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["ILSVRC2012_img_train.tar"], "ilsvrc"),
        (["ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12/data/meta.mat"], "ilsvrc"),
        (["ILSVRC/Data/CLS-LOC/train/n01/1.JPEG"], "kaggle"),
        (["Data/CLS-LOC/train/n01/1.JPEG", "ImageSets/x"], "kaggle"),
        (["train-000.tar", "train-001.tar", "README.md"], "webdataset"),
        (["train/000.tar", "val/000.tar", ".DS_Store", "val/.x"], "webdataset"),
        (["train-00000-of-00001.parquet", "README.md"], "parquet"),
        (["data/train-00000-of-00001.parquet", "assets/logo.png"], "parquet"),
        (["train/0.parquet", "validation/0.parquet"], "parquet"),
        (["train/a/1.jpg", "val/a/1.jpg", "scores.parquet"], "tree"),
        (["train/a/1.jpg", "train/scores.parquet"], "tree"),
        (["a/000.tar", "b/1.jpg"], "tree"),
        (["train/a/1.jpg", "train/a/2.tar", "val/a/3.tar", "val/a/4.jpg"], "tree"),
        (["a/000.tar", "b/c/1.tar"], "tree"),
        (["a/"], "tree"),
        ([], "tree"),
        (["list.csv"], "tree"),
    ],
)
def test_folders_are_told_by_what_is_in_them(names: list[str], kind: str, tmp_path: Path) -> None:
    put(tmp_path, *names)
    assert find_kind(tmp_path) == kind


def test_files_are_told_by_what_they_begin_with(imagenet: Path, tmp_path: Path) -> None:
    archives = write_archives(imagenet, tmp_path / "archives")
    assert find_kind(archives / "ILSVRC2012_img_train.tar") == "ilsvrc"
    assert find_kind(archives / "ILSVRC2012_img_val.tar") == "ilsvrc"
    (archives / "ILSVRC2012_img_train.tar").rename(tmp_path / "renamed")
    assert find_kind(tmp_path / "renamed") == "ilsvrc"
    (tmp_path / "x").write_bytes(tar_of([("1.jpg", b""), ("1.cls", b"0")]))
    assert find_kind(tmp_path / "x") == "webdataset"
    assert find_kind(tmp_path / "{x,y}.tar") == find_kind(tmp_path / "*.tar") == "webdataset"
    for text in (b"a.jpg 0\n", b"", b"caf\xe9.jpg\tcat\n", b"path,label\n"):
        (tmp_path / "list").write_bytes(text)
        assert find_kind(tmp_path / "list") == "list"


def test_a_file_or_folder_whose_name_looks_like_a_pattern_is_that_file_or_folder(tmp_path: Path) -> None:
    put(tmp_path, "images [old] {1}/a/1.jpg")
    assert find_kind(tmp_path / "images [old] {1}") == "tree"


def test_a_kind_that_is_said_is_not_looked_for(imagenet: Path, tmp_path: Path) -> None:
    put(tmp_path, "a/1.jpg")
    for kind, message in {
        "ilsvrc": "expected ILSVRC2012_img_train.tar or ILSVRC2012_img_val.tar, found neither",
        "kaggle": "expected the folder ILSVRC/Data/CLS-LOC in it, found none",
        "list": "expected a table, found no regular file",
    }.items():
        with pytest.raises(SourceError, match=re.escape(f"{tmp_path}: {message}")):
            scan(tmp_path, kind)
    with pytest.raises(SourceError, match=r"expected tars"):
        scan(tmp_path, "webdataset")
