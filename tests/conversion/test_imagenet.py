"""ImageNet's own archives, Kaggle's layout of it, and Tiny ImageNet: the facts and mistakes of each alone."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import sys
import tarfile
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import list_archive
import pytest
from folders import put
from public_collections import Copy, build
from storages import (
    CLASSES,
    SYNSETS,
    WORDS,
    devkit_files,
    draw_imagenet,
    keys,
    meta_mat,
    rows,
    scan,
    tar_of,
    write_archives,
    write_kaggle,
)

from shardio.conversion.collect import find_kind
from shardio.conversion.convert import convert
from shardio.conversion.options import EmptyClasses
from shardio.errors import DecodeError, SourceError

TRAIN, VAL, DEVKIT = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz"
META, TRUTH = "data/meta.mat", "data/ILSVRC2012_validation_ground_truth.txt"


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_imagenet(tmp_path_factory.mktemp("imagenet") / "imagenet")


@pytest.fixture
def src(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    return tmp_path / "src"


def refused(src: Path, empty_classes: EmptyClasses = "keep") -> str:
    with pytest.raises(SourceError) as caught:
        scan(src, empty_classes=empty_classes)
    assert str(caught.value).startswith(str(src))
    return str(caught.value)


def write_devkit(src: Path, files: Mapping[str, bytes]) -> None:
    named = ((f"ILSVRC2012_devkit_t12/{name}", content) for name, content in files.items())
    (src / DEVKIT).write_bytes(gzip.compress(tar_of(named)))


# --- the archives -----------------------------------------------------------------------------------------------------


def test_an_archive_alone_may_be_named_and_its_devkit_lies_next_to_it(imagenet: Path, src: Path) -> None:
    both, alone = scan(write_archives(imagenet, src)), [scan(src / TRAIN), scan(src / VAL)]
    assert {split: some for one in alone for split, some in one.splits.items()} == both.splits
    assert {(one.classes, one.class_names) for one in alone} == {(CLASSES, WORDS)}
    (src / TRAIN).rename(src / "renamed")
    assert scan(src / "renamed").kind == "ilsvrc"


def test_the_devkit_may_be_unpacked_or_no_longer_compressed(imagenet: Path, src: Path) -> None:
    expected = scan(write_archives(imagenet, src)).splits
    data = gzip.decompress((src / DEVKIT).read_bytes())
    (src / DEVKIT).unlink()
    (src / "ILSVRC2012_devkit_t12.tar").write_bytes(data)
    assert scan(src).splits == expected
    (src / "ILSVRC2012_devkit_t12.tar").unlink()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        if hasattr(tarfile, "data_filter"):  # Python 3.10.12, 3.11.4 and later
            tar.extraction_filter = tarfile.data_filter
        tar.extractall(src)
    assert scan(src).splits == expected


def test_tars_of_tars_are_read_as_they_would_be_unpacked(src: Path) -> None:
    inner = tar_of([(name, name.encode()) for name in ("1.JPEG", "deep/2.JPEG", "./3.JPEG", "._3.JPEG", ".x/4.JPEG")])
    outer = [("b.tar", inner), ("./a/a.tar", tar_of([("5", b"")])), ("README", b""), ("._b.tar", b"")]
    (src / TRAIN).write_bytes(tar_of([*outer, ("c.tar", tar_of([]))]))
    put(src, "ILSVRC2012_bbox_train_v2.tar.gz", ".DS_Store")
    found = scan(src, empty_classes="keep")
    names = (b"train/a/5", b"train/b/1.JPEG", b"train/b/3.JPEG", b"train/b/deep/2.JPEG")
    assert rows(found) == list(zip(names, (0, 1, 1, 1), strict=True))
    assert found.classes == ("a", "b", "c")  # an empty class keeps its label
    assert found.ignored == {"hidden": 4, "outside of class archives": 1, "other file": 1}


def test_training_images_need_no_scipy_without_a_devkit(
    imagenet: Path, src: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    assert scan(write_archives(imagenet, src, "train")).num_sources == 20
    write_devkit(src, {META: b"", TRUTH: b""})
    # With a devkit there the names of the classes would depend on what is installed, and so would the set.
    assert "pip install 'shardio[ilsvrc]'" in refused(src)


def test_what_the_archives_and_the_devkit_contradict_is_named(imagenet: Path, src: Path) -> None:
    write_archives(imagenet, src, "train", "val")
    assert f"expected {DEVKIT}, which has the labels, next to {VAL}" in refused(src)
    write_archives(imagenet, src, "devkit")
    (src / TRAIN).write_bytes(tar_of([("n99999999.tar", tar_of([("1.JPEG", b"x")]))]))
    assert "'n99999999'" in refused(src)
    (src / TRAIN).write_bytes(tar_of([("n01440764.tar", tar_of([("1.JPEG", b"x")]))]))
    assert "6 images are wrong" in refused(src)  # those of classes without training images


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        (META, None, "no data/meta.mat"),
        (META, b"", "cannot read the synsets in data/meta.mat"),
        (META, b"x" * 2000, "cannot read the synsets in data/meta.mat"),
        (TRUTH, b"1\n2\nfish\n", "line 3: expected the number of a class, found 'fish'"),
        (TRUTH, b"1\n5\n", "line 2: expected the number of a class, found '5'"),
        (TRUTH, b"1\n-1\n", "line 2: expected"),
        (TRUTH, b"1\n" * 9, "expected 9 images, one for each label, found none with number 9"),
        (TRUTH, b"1\n" * 7, "numbered from 1 to 7"),
        (META, {"n01440764": (1, "a"), "n01443537": (1, "b")}, "distinct numbers"),
        (META, {"../n01440764": (1, "a")}, "distinct numbers"),
        (META, {"n00001740": (1, "none without children")}, "distinct numbers"),
    ],
)
def test_what_is_wrong_with_a_devkit_is_named(name: str, content: Any, found: str, imagenet: Path, src: Path) -> None:
    write_archives(imagenet, src, "val")
    files = {**devkit_files(imagenet), name: meta_mat(content) if isinstance(content, dict) else content}
    write_devkit(src, {name: content for name, content in files.items() if content is not None})
    assert found in refused(src)


def test_a_devkit_of_a_single_class_is_read(src: Path) -> None:
    (src / VAL).write_bytes(tar_of([("ILSVRC2012_val_00000001.JPEG", b"x")]))
    write_devkit(src, {META: meta_mat({"n01440764": SYNSETS["n01440764"]}), TRUTH: b"3\n"})
    found = scan(src)
    assert keys(found) == {"val": [b"val/n01440764/ILSVRC2012_val_00000001.JPEG"]}
    assert found.class_names == ("tench, Tinca tinca",)


def test_a_devkit_that_unpacks_without_end_or_is_damaged_is_refused(
    imagenet: Path, src: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardio.conversion.sources.imagenet._MAX_DEVKIT_NBYTES", 1 << 16)
    write_archives(imagenet, src, "val")
    (src / DEVKIT).write_bytes(gzip.compress(bytes(1 << 17)))
    assert "expected a devkit of at most" in refused(src)
    for damaged in (gzip.compress(bytes(5000))[:-9], b"\x1f\x8b" + bytes(50), b"", b"no devkit"):
        (src / DEVKIT).write_bytes(damaged)
        assert str(src / DEVKIT) in refused(src)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["1.JPEG"], "found '1.JPEG'"),
        (["ILSVRC2012_val_00000009.JPEG"], "found 'ILSVRC2012_val_00000009.JPEG'"),
        (["ILSVRC2012_val_00000000.JPEG"], "found 'ILSVRC2012_val_00000000.JPEG'"),
        (["ILSVRC2012_val_00000001.JPEG"], "found none with number 2 (7 missing)"),
        ([f"{folder}ILSVRC2012_val_{i:08d}.JPEG" for folder in ("", "a/") for i in range(1, 9)], "8 images are wrong"),
        ([], "found none"),
    ],
)
def test_validation_images_are_exactly_those_that_have_labels(
    names: list[str], found: str, imagenet: Path, src: Path
) -> None:
    write_archives(imagenet, src, "devkit")
    (src / VAL).write_bytes(tar_of([(name, b"x") for name in names]))
    assert found in refused(src)


def test_a_list_takes_a_few_hundred_bytes_per_image(src: Path) -> None:
    with (src / TRAIN).open("wb") as file:
        list_archive.write_archive(file, num_images=1_000, num_classes=5)
    tracemalloc.start()
    try:
        found = scan(src)
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.num_sources == 1_000
    assert now / found.num_sources < 500
    assert peak / found.num_sources < 1000


def test_the_tool_that_lists_as_many_images_as_imagenet_has_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["list_archive.py", "--images", "103", "--classes", "7", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    list_archive.main()
    assert json.loads(capsys.readouterr().out)["num_images"] == 103
    assert not list(tmp_path.iterdir())


# --- Kaggle -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def kaggle(imagenet: Path, tmp_path: Path) -> Path:
    return write_kaggle(imagenet, tmp_path / "kaggle")


def images(kaggle: Path) -> Path:
    return kaggle / "ILSVRC" / "Data" / "CLS-LOC"


def test_src_may_be_any_folder_down_to_the_images_and_so_may_the_lists(kaggle: Path) -> None:
    expected = scan(kaggle)
    for name in ("LOC_val_solution.csv", "LOC_synset_mapping.txt"):
        for folder in (kaggle / "ILSVRC", images(kaggle)):
            assert (scan(folder).splits, scan(folder).class_names) == (expected.splits, WORDS)
        shutil.move(kaggle / name, images(kaggle) / name)
    assert scan(images(kaggle)).splits == expected.splits
    for source in expected.splits["val"]:
        assert source.place == b"val/" + source.key.rpartition(b"/")[2]


def test_test_images_and_what_is_no_image_are_counted_and_missing_ones_refused(kaggle: Path) -> None:
    put(images(kaggle), "val/README.txt", "train/notes.txt")
    (images(kaggle) / "val" / "ILSVRC2012_val_00000003.JPEG").unlink()
    found = scan(kaggle)
    assert found.ignored == {"unlabeled test image": 3, "not an image": 2}
    (gone,) = (source for source in found.splits["val"] if b"00000003" in source.key)
    with pytest.raises(DecodeError, match=r"^unreadable: No such file or directory$"):
        found.origin.read(gone)


def test_train_or_val_may_be_missing_and_not_empty(kaggle: Path) -> None:
    both = scan(kaggle).splits
    for missing, other in (("val", "train"), ("train", "val")):
        shutil.move(images(kaggle) / missing, kaggle / "away")
        found = scan(kaggle)
        assert (found.splits, found.classes) == ({other: both[other]}, CLASSES)
        (images(kaggle) / missing).mkdir()
        assert f"{missing}: expected images" in refused(kaggle)
        (images(kaggle) / missing).rmdir()
        shutil.move(kaggle / "away", images(kaggle) / missing)
    shutil.rmtree(images(kaggle) / "train")
    shutil.rmtree(images(kaggle) / "val")
    assert "expected a folder train or val" in refused(kaggle)


def test_validation_images_that_were_sorted_into_class_folders_are_taken_as_they_are(kaggle: Path) -> None:
    expected = rows(scan(kaggle), "val")
    for key, _ in expected:
        place = images(kaggle) / key.decode()
        place.parent.mkdir(exist_ok=True)
        shutil.move(images(kaggle) / "val" / place.name, place)
    (kaggle / "LOC_val_solution.csv").unlink()
    assert rows(scan(kaggle), "val") == expected
    put(images(kaggle), "val/ILSVRC2012_val_00000009.JPEG")
    assert "expected images in class folders" in refused(kaggle)


def test_lists_are_complete(kaggle: Path) -> None:
    mapping = kaggle / "LOC_synset_mapping.txt"
    mapping.write_text(mapping.read_text().replace("n02012849 crane\n", ""))
    assert f"{mapping}: expected a line for the class 'n02012849'" in refused(kaggle)
    mapping.unlink()
    assert scan(kaggle).class_names == ()
    put(images(kaggle), "val/ILSVRC2012_val_00000077.JPEG", "val/ILSVRC2012_val_00000078.JPEG")
    assert "found none for 'ILSVRC2012_val_00000077' (2 missing)" in refused(kaggle)
    (kaggle / "LOC_val_solution.csv").unlink()
    assert "expected LOC_val_solution.csv" in refused(kaggle)


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ("x,n01440764 1 2 3 4 n01443537 1 2 3 4\n", "line 2: expected an image"),
        ("x,n01440764 1 2 3 4\nx,n01440764 1 2 3 4\n", "line 3: expected an image"),
        ("x,\n", "line 2: expected an image"),
        ("../x,n01440764 1 2 3 4\n", "line 2: expected an image"),
        ("x,../n01440764 1 2 3 4\n", "line 2: expected an image"),
        ("x,n99999999 1 2 3 4\n", "expected a known class, found 'n99999999'"),
    ],
)
def test_a_solution_that_is_wrong_is_named_with_its_line(rows: str, found: str, kaggle: Path) -> None:
    (kaggle / "LOC_val_solution.csv").write_text(f"ImageId,PredictionString\n{rows}")
    shutil.rmtree(images(kaggle) / "val")
    put(images(kaggle), "val/x.JPEG")
    assert found in refused(kaggle)


# --- Tiny ImageNet ----------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    build("Tiny ImageNet", Copy(tmp_path))
    return tmp_path / "tiny-imagenet-200"


def test_the_split_test_has_no_labels_and_other_files_are_counted(tiny: Path, tmp_path: Path) -> None:
    assert find_kind(tiny) == "tiny-imagenet"
    found = scan(tiny)
    assert (found.classes, found.class_names) == (CLASSES, ("some words",) * 4)
    assert rows(found, "test") == [(b"test/images/test_0.JPEG", None)]
    assert found.ignored == {"not an image": 7}
    (tiny / "words.txt").write_text("n01440764\ttench\n")
    report = convert(tiny, tmp_path / "out", size=8, workers=1)
    assert (report.notes[0], report.unlabeled) == ("tiny-imagenet-200: Tiny ImageNet, 4 classes", ("test",))


def test_an_image_of_val_that_is_missing_is_refused_and_one_without_a_label_an_error(
    tiny: Path, tmp_path: Path
) -> None:
    (tiny / "val/images/val_3.JPEG").unlink()
    report = convert(tiny, tmp_path / "out", size=8, workers=1, max_bad=1)
    assert (report.num_samples["val"], report.refused) == (3, {"incomplete": 1})
    put(tiny, "val/images/val_9.JPEG")
    assert "val_9.JPEG" in refused(tiny)
    annotations = tiny / "val/val_annotations.txt"
    annotations.write_text(annotations.read_text().replace("val_3.JPEG\tn03126707", "val_3.JPEG\tn09"))
    assert "val_annotations.txt: expected classes of wnids.txt, found 'n09'" in refused(tiny)
    annotations.write_text(f"{annotations.read_text()}val_3.JPEG\t{CLASSES[0]}\t0\t0\t9\t9\n")
    assert "val_annotations.txt: expected one class for each image, found two for 'val_3.JPEG'" in refused(tiny)


def test_an_incomplete_download_is_an_error(tiny: Path) -> None:
    (tiny / "wnids.txt").write_text("\n".join([*CLASSES, "n09"]))
    assert "found 1 without images: 'n09'" in refused(tiny, "refuse")
    (tiny / "wnids.txt").write_text("\n".join(CLASSES))
    shutil.rmtree(tiny / "val" / "images")
    assert "val: expected images, found none" in refused(tiny)
