"""The kind that SRC is taken for; and that the same images give the same set, whatever they are stored in."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from folders import put
from storages import (
    CLASSES,
    WORDS,
    devkit_files,
    draw_imagenet,
    tar_of,
    write_archives,
    write_kaggle,
    write_list,
    write_webdataset,
)

from shardio.conversion.convert import convert
from shardio.conversion.repair import repair
from shardio.conversion.sources.detect import find_kind, scan
from shardio.errors import ConvertError, SourceError
from shardio.reading.shardset import open_shards

SIZE = 16
OPTIONS = {"size": SIZE, "shard_size": 4096 + 6 * SIZE * SIZE * 3, "workers": 1, "max_bad": 3}


_TOLD_APART_BY = ("class_names", "digest", "provenance")


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_imagenet(tmp_path_factory.mktemp("scanner") / "imagenet")


def content(out: Path) -> dict[str, object]:
    """Returns the files' hashes, and the manifest without its digest, its provenance and the names of its classes."""
    files: dict[str, object] = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in out.iterdir()}
    manifest = json.loads((out / "manifest.json").read_bytes())
    return files | {"manifest.json": {k: v for k, v in manifest.items() if k not in _TOLD_APART_BY}}


@pytest.fixture(scope="module")
def expected(imagenet: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    out = tmp_path_factory.mktemp("tree") / "out"
    report = convert(imagenet, out, **OPTIONS)
    assert report.source == "tree"
    assert report.num_samples == {"train": 18, "val": 7}
    assert report.refused == {"empty": 1, "damaged": 1, "unsupported": 1}
    assert len(content(out)) == 4 + 2 + 2 + 1 + 1  # shards of train and val, indexes, rejects, manifest
    return content(out)


# --- the same set from everywhere -------------------------------------------------------------------------------------

STORAGES: dict[str, tuple[str, Callable[[Path, Path], Path]]] = {
    "archives": ("ilsvrc", lambda tree, out: write_archives(tree, out)),
    "kaggle": ("kaggle", lambda tree, out: write_kaggle(tree, out)),
    "kaggle, from ILSVRC": ("kaggle", lambda tree, out: write_kaggle(tree, out) / "ILSVRC"),
    "kaggle, from CLS-LOC": ("kaggle", lambda tree, out: write_kaggle(tree, out) / "ILSVRC" / "Data" / "CLS-LOC"),
    "csv": ("list", lambda tree, out: write_list(tree, tree / "list.csv")),
    "tsv": ("list", lambda tree, out: write_list(tree, tree / "list.tsv", "Image\tClass\tSubset", "\t")),
    "webdataset folder": ("webdataset", lambda tree, out: write_webdataset(tree, out)),
    "webdataset with json": ("webdataset", lambda tree, out: write_webdataset(tree, out, as_json=True)),
    "webdataset braces": (
        "webdataset",
        lambda tree, out: write_webdataset(tree, out) / "{train-{000000..000003},val-00000{0,1}}.tar",
    ),
    "webdataset glob": ("webdataset", lambda tree, out: write_webdataset(tree, out) / "*-*.tar"),
}


@pytest.mark.parametrize("storage", STORAGES)
def test_every_storage_gives_the_shards_and_the_index_of_the_folder_tree(
    storage: str, imagenet: Path, expected: dict[str, object], tmp_path: Path
) -> None:
    tree = Path(shutil.copytree(imagenet, tmp_path / "tree"))
    kind, write = STORAGES[storage]
    src = write(tree, tmp_path / "src")
    report = convert(src, tmp_path / "out", **OPTIONS)
    assert report.source == kind
    assert content(tmp_path / "out") == expected
    shards = open_shards(tmp_path / "out")
    assert shards.classes == CLASSES
    assert shards.manifest.class_names == (WORDS if kind in ("ilsvrc", "kaggle") else ())
    # A kind that is given gives the same set as one that is detected.
    assert convert(src, tmp_path / "out", source=kind, **OPTIONS).num_converted == 0


@pytest.mark.parametrize("storage", ["archives", "kaggle"])
def test_the_order_of_the_source_is_that_of_the_folder_tree(storage: str, imagenet: Path, tmp_path: Path) -> None:
    kind, write = STORAGES[storage]
    found = scan(write(imagenet, tmp_path / "src"))
    assert found.kind == kind
    assert found.class_names == WORDS
    tree = scan(imagenet)
    assert found.classes == tree.classes
    for split, sources in tree.splits.items():
        assert [(source.key, source.label) for source in found.splits[split]] == [(s.key, s.label) for s in sources]
        for one, other in zip(found.splits[split], sources, strict=True):
            assert found.origin.read(one) == tree.origin.read(other)


def test_a_conversion_may_end_from_another_storage_than_it_began_from_that_calls_the_classes_the_same(
    imagenet: Path, expected: dict[str, object], tmp_path: Path
) -> None:
    class Stop(Exception):
        pass

    def stop(progress: object) -> None:
        if progress.done > 10:  # type: ignore[attr-defined]
            raise Stop

    archives = write_archives(imagenet, tmp_path / "src")
    with pytest.raises(Stop):
        convert(archives, tmp_path / "out", **OPTIONS, on_progress=stop)
    with pytest.raises(ConvertError, match=r"unfinished conversion with other .* \(the readable names of the classes"):
        convert(imagenet, tmp_path / "out", **OPTIONS)
    convert(archives, tmp_path / "out", **OPTIONS)
    assert content(tmp_path / "out") == expected
    assert convert(write_kaggle(imagenet, tmp_path / "kaggle"), tmp_path / "out", **OPTIONS).num_converted == 0


def test_a_set_is_repaired_from_another_storage_even_one_that_has_no_names_for_the_classes(
    imagenet: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    convert(write_archives(imagenet, tmp_path / "src"), out, **OPTIONS)
    whole = content(out)
    (out / "val-index.npy").unlink()
    (out / "train-00000.npy").unlink()
    assert set(repair(out, imagenet).repaired) == {"val-index.npy", "train-00000.npy"}
    assert content(out) == whole


def test_worker_processes_read_archives_as_threads_do(
    imagenet: Path, expected: dict[str, object], tmp_path: Path
) -> None:
    convert(write_archives(imagenet, tmp_path / "src"), tmp_path / "out", **OPTIONS | {"workers": 5})
    assert content(tmp_path / "out") == expected


# --- telling kinds ----------------------------------------------------------------------------------------------------


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


def test_archives_beside_a_tree_could_be_either_and_are_refused(tmp_path: Path) -> None:
    put(
        tmp_path,
        "ILSVRC2012_img_train.tar",
        "ILSVRC2012_devkit_t12/data/meta.mat",
        "train/n01/1.JPEG",
        "train/n02/2.JPEG",
    )
    with pytest.raises(SourceError, match=r"found both.*--source ilsvrc.*--source tree") as caught:
        scan(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: ")
    shutil.rmtree(tmp_path / "ILSVRC2012_devkit_t12")
    assert scan(tmp_path, "tree").ignored == {"not an image": 1}


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
    with pytest.raises(SourceError, match=r"devkit_t12.tar.gz: expected a plain tar.*compressed with gzip"):
        find_kind(archives / "ILSVRC2012_devkit_t12.tar.gz")
    image = next((imagenet / "val").rglob("*01.JPEG"))
    with pytest.raises(
        SourceError, match=r"expected a folder, a tar, a parquet file, arrays or a list of images, found .* ff d8"
    ):
        find_kind(image)


def test_a_file_or_folder_whose_name_looks_like_a_pattern_is_that_file_or_folder(tmp_path: Path) -> None:
    put(tmp_path, "images [old] {1}/a/1.jpg")
    assert find_kind(tmp_path / "images [old] {1}") == "tree"


def test_a_kind_that_is_said_is_not_looked_for(imagenet: Path, tmp_path: Path) -> None:
    put(tmp_path, "a/1.jpg")
    for kind, message in {
        "ilsvrc": "expected ILSVRC2012_img_train.tar or ILSVRC2012_img_val.tar, found neither",
        "kaggle": "expected ILSVRC/Data/CLS-LOC in it, found none",
        "list": "expected a table, found something else",
    }.items():
        with pytest.raises(SourceError, match=re.escape(f"{tmp_path}: {message}")):
            scan(tmp_path, kind)  # type: ignore[arg-type]
    with pytest.raises(SourceError, match=r"expected tars in it or in its folders, found none"):
        scan(tmp_path, "webdataset")
    with pytest.raises(ValueError, match=r"source must be one of auto, tree, .*; found 'zip'"):
        scan(tmp_path, "zip")  # type: ignore[arg-type]


def test_the_devkit_of_the_tests_is_no_less_than_the_real_one(imagenet: Path) -> None:
    # The devkit's readme says so: numbers of the classes come first, validation images are listed by number.
    truth = devkit_files(imagenet)["data/ILSVRC2012_validation_ground_truth.txt"].split()
    assert len(truth) == 8
    assert {int(number) for number in truth} == {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("names", "found"),
    [(("data_batch_1", "batches.meta", "test_batch"), "CIFAR10"), (("train", "test", "meta"), "CIFAR100")],
)
def test_pickles_of_cifar_are_not_read_and_the_error_says_what_to_do(
    names: tuple[str, ...], found: str, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"\x80\x02}q\x01.")
    with pytest.raises(SourceError, match=rf"pickled batches of {found}, .*torchvision\.datasets\.{found}\(ROOT\)"):
        find_kind(tmp_path)
