"""Layouts that look like mistakes, and classes without images: asked about, or understood as was said."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from folders import put as put_files
from pictures import random_jpeg
from proposals import check
from storages import scan

from shardio.cli.main import cli
from shardio.conversion.collect import find_kind
from shardio.conversion.convert import convert
from shardio.conversion.estimate import estimate
from shardio.conversion.options import EmptyClasses
from shardio.conversion.repair import repair
from shardio.conversion.sources.collection import Collection
from shardio.conversion.sources.doubt import DoubtError, Reading
from shardio.conversion.writing.set_writer import ShardWriter
from shardio.errors import ConvertError, SourceError
from shardio.reading.shardset import open_shards

OPTIONS: dict[str, Any] = {"size": 8, "workers": 1}
PICTURE = random_jpeg(0, 12, 15)


def put(root: Path, *names: str) -> Path:
    put_files(root, *names, content=PICTURE)
    return root


def labels(collection: Collection) -> dict[str, int | None]:
    return {source.key.decode(): source.label for split in collection.splits.values() for source in split}


def refused(src: Path) -> str:
    with pytest.raises(SourceError) as caught:
        scan(src)
    assert str(caught.value).startswith(f"{src}: ")
    return str(caught.value)


def test_both_commands_that_a_refusal_names_work_and_their_sets_are_repaired(tmp_path: Path) -> None:
    src = put(tmp_path / "my src", "train/a/1.jpg", "train/b/2.jpg", "test/3.jpg")
    for call in (lambda: estimate(src, seconds=0.01), lambda: convert(src, tmp_path / "out", **OPTIONS)):
        with pytest.raises(DoubtError, match="expected class folders in 'test'") as caught:
            call()
    assert not (tmp_path / "out").exists()
    doubt = caught.value.with_args(["convert", str(src), "OUT", "--size", "8", "--labels=folders"])
    for words, labels, unlabeled in zip(
        doubt.commands, ("folders", "none"), ({"test"}, {"train", "test"}), strict=True
    ):
        assert f": shardio {shlex.join(words)}" in str(doubt)
        assert words == ("convert", str(src), "OUT", "--size", "8", "--labels", labels)
        out = tmp_path / labels
        done = CliRunner().invoke(cli, [str(out) if word == "OUT" else word for word in words], catch_exceptions=False)
        assert set(re.findall(r"found +(\w+): [\d,]+ images?, without labels", done.output)) == unlabeled
        shards = {split: open_shards(out, split) for split in ("train", "test")}
        assert {split for split, one in shards.items() if one.content.label_row is None} == unlabeled
        assert shards["train"].classes == (("a", "b") if labels == "folders" else ())
        assert convert(src, out, **OPTIONS, labels=labels).num_converted == 0
        (out / "test-00000.npy").unlink()
        assert repair(out, src, workers=1).repaired == ("test-00000.npy",)
        assert any(re.search("^test: .* without labels$", one) for one in estimate(src, labels=labels).notes)


def test_a_command_that_does_not_do_what_its_sentence_says_fails_the_test(tmp_path: Path) -> None:
    src = put(tmp_path, "a/1.jpg", "b/2.jpg")
    for meaning, is_true in (("folders in archives are classes", False), ("no image has a label", True)):
        doubt = DoubtError(src, "found", [Reading(meaning, {"--labels": "none"})])
        with contextlib.nullcontext() if is_true else pytest.raises(AssertionError, match=meaning):
            check(doubt)


def test_an_empty_class_folder_is_refused_left_out_or_kept(tmp_path: Path) -> None:
    src = put(tmp_path, "a/1.jpg", "b/", "c/2.jpg", "d/.hidden", "d/Thumbs.db", "e/3.jpg")
    assert "expected images in every class folder, found 2 without images: 'b', 'd'" in refused(src)
    omitted, kept = scan(src, empty_classes="omit"), scan(src, empty_classes="keep")
    assert (omitted.classes, labels(omitted)) == (("a", "c", "e"), {"a/1.jpg": 0, "c/2.jpg": 1, "e/3.jpg": 2})
    assert (kept.classes, labels(kept)) == (("a", "b", "c", "d", "e"), {"a/1.jpg": 0, "c/2.jpg": 2, "e/3.jpg": 4})
    put(tmp_path, *(f"x{i}/" for i in range(10)))
    assert "found 12 without images: 'b', 'd', 'x0', 'x1', 'x2' and 7 more." in refused(src)


def test_a_class_may_be_without_images_in_val_but_not_in_train(tmp_path: Path) -> None:
    src = put(tmp_path, "train/a/1.jpg", "train/b/2.jpg", "train/c/3.jpg", "val/a/4.jpg", "val/b/")
    assert scan(src).classes == ("a", "b", "c")
    (src / "train/b/2.jpg").unlink()
    assert "found 1 without images: 'b'" in refused(src)
    assert labels(scan(src, empty_classes="omit")) == {"train/a/1.jpg": 0, "train/c/3.jpg": 1, "val/a/4.jpg": 0}
    put(src, "val/b/5.jpg")
    with pytest.raises(SourceError, match=r"(?s)'val/b/5.jpg': expected a class that has images in the first split"):
        scan(src, empty_classes="omit")
    assert labels(scan(src, empty_classes="keep"))["val/b/5.jpg"] == 1


@pytest.mark.parametrize(
    ("empty_classes", "classes", "labels"), [("omit", "acd", [0, 1, 2]), ("keep", "abcd", [0, 2, 3])]
)
def test_a_set_with_a_class_left_out_or_kept_is_recognized_and_repaired(
    tmp_path: Path, empty_classes: EmptyClasses, classes: str, labels: list[int]
) -> None:
    src, out = put(tmp_path / "src", "a/1.jpg", "b/", "c/2.jpg", "d/3.jpg"), tmp_path / "out"
    convert(src, out, **OPTIONS, empty_classes=empty_classes)
    assert (open_shards(out).classes, sorted(open_shards(out).labels.tolist())) == (tuple(classes), labels)
    assert convert(src, out, **OPTIONS, empty_classes=empty_classes).num_converted == 0
    (out / "train-index.npy").unlink()
    assert repair(out, src, workers=1).repaired == ("train-index.npy",)


def test_listing_a_tree_costs_a_fixed_number_of_calls_for_each_class_and_none_for_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()
    for name in ("scandir", "stat", "listdir"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *w, n=name, call=real, **o: (calls.update([n]), call(*w, **o))[1])

    def count(num_classes: int, num_images: int) -> int:
        src = tmp_path / f"{num_classes}-{num_images}"
        put(src, *(f"{c}/{i}.jpg" for c in range(num_classes) for i in range(num_images)))
        calls.clear()
        assert len(scan(src).classes) == num_classes
        return calls.total()

    few, more, most = count(10, 2), count(20, 2), count(40, 2)
    assert 0 < most - more <= 2 * (more - few) <= 2 * 10 * 6
    assert count(10, 20) == few


def test_a_plan_whose_manifest_no_reader_would_take_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    src = put(tmp_path / "src", *(f"{i:0200d}/{j}.jpg" for i in range(10) for j in range(3)))
    monkeypatch.setattr("shardio.format.manifest_file.MAX_MANIFEST_NBYTES", 6000)
    with pytest.raises(ConvertError, match="for 10 classes and 30 shards: shorten the names"):
        convert(src, tmp_path / "out", **OPTIONS, shard_size=1)
    assert not (tmp_path / "out").exists()
    convert(src, tmp_path / "out", **OPTIONS)
    with pytest.raises(ConvertError, match="for 40 classes and 0 shards"):
        ShardWriter(tmp_path / "own", (2, 2, 3), classes=[f"{i:0200d}" for i in range(40)])


def test_one_key_that_would_widen_every_row_of_the_index_is_told_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "b/" + "/".join(["d" * 200] * 15) + "/1.jpg"
    src = put(tmp_path / "one", *(f"a/{i}.jpg" for i in range(300)), long)
    assert scan(src, labels="folders").num_sources == 301  # an index of so few rows may be wide
    monkeypatch.setattr("shardio.conversion.sources.listing._MOST_PADDING_NBYTES", 900_000)
    with pytest.raises(SourceError, match=rf"'train', the path 'b/ddd.* {len(long):,} bytes.* 909,622 bytes") as caught:
        scan(src, labels="folders")
    assert len(str(caught.value)) < 1000
    # Beside keys that are long by themselves it is not much wider.
    many = put(tmp_path / "all", *(f"a/{'x' * 230}{i}.jpg" for i in range(400)), long)
    assert scan(many, labels="folders").num_sources == 401


def test_an_ordinary_tree_stays_a_tree_whatever_lies_in_it(tmp_path: Path) -> None:
    put_files(tmp_path, "a/1.jpg", "b/2.jpg", "labels.csv", "list.txt", "images.tar", "train.parquet", ".hidden/x")
    put_files(tmp_path, "a/extra.tar", "b/notes.csv", "Data/1.jpg")
    found = scan(tmp_path)
    assert (found.kind, found.ignored) == ("tree", {"hidden": 1, "not an image": 6})


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["ILSVRC2012_img_train.tar"], "ilsvrc"),
        (["ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12/data/meta.mat"], "ilsvrc"),
        (["ILSVRC/Data/CLS-LOC/train/n01/1.JPEG"], "kaggle"),
        (["Data/CLS-LOC/train/n01/1.JPEG", "ImageSets/x"], "kaggle"),
        (["train-000.tar", "train-001.tar", "README.md"], "webdataset"),
        (["train/000.tar", "val/000.tar", ".DS_Store", "val/.x"], "webdataset"),
        (["0.tar", "0.parquet", "0_stats.json"], "webdataset"),
        (["train/0.tar", "train/0.parquet", "train/0_stats.json"], "webdataset"),
        (["train/0.tar", "train/1.parquet"], "parquet"),
        (["train-00000-of-00001.parquet", "README.md"], "parquet"),
        (["data/train-00000-of-00001.parquet", "assets/logo.png"], "parquet"),
        (["train/0.parquet", "validation/0.parquet"], "parquet"),
        (["train/a/1.jpg", "val/a/1.jpg", "scores.parquet"], "tree"),
        (["train/a/1.jpg", "train/scores.parquet"], "tree"),
        (["a/000.tar", "b/1.jpg"], "tree"),
        (["train/a/1.jpg", "train/a/2.tar", "val/a/3.tar", "val/a/4.jpg"], "tree"),
        (["a/000.tar", "b/c/1.tar"], "tree"),
        (["a/1.jpg", "b/2.jpg", "labels.csv", "list.txt", "images.tar", "train.parquet", ".hidden/x"], "tree"),
        (["a/"], "tree"),
        ([], "tree"),
        (["list.csv"], "tree"),
    ],
)
def test_folders_are_told_by_what_is_in_them(names: list[str], kind: str, tmp_path: Path) -> None:
    put_files(tmp_path, *names)
    assert find_kind(tmp_path) == kind


def test_files_are_told_by_what_they_begin_with(tmp_path: Path) -> None:
    assert find_kind(tmp_path / "{x,y}.tar") == find_kind(tmp_path / "*.tar") == "webdataset"
    for text in (b"a.jpg 0\n", b"", b"caf\xe9.jpg\tcat\n", b"path,label\n"):
        (tmp_path / "list").write_bytes(text)
        assert find_kind(tmp_path / "list") == "list"


def test_a_kind_that_is_said_is_not_looked_for(tmp_path: Path) -> None:
    put_files(tmp_path, "a/1.jpg")
    for kind, message in {
        "ilsvrc": "expected ILSVRC2012_img_train.tar or ILSVRC2012_img_val.tar, found neither",
        "kaggle": "expected the folder ILSVRC/Data/CLS-LOC in it, found none",
        "list": "expected a table, found no regular file",
        "webdataset": "expected tars or zips in this folder or its subfolders, found none",
    }.items():
        with pytest.raises(SourceError, match=re.escape(f"{tmp_path}: {message}")):
            scan(tmp_path, kind)
