"""Kaggle's layout of ImageNet: labels of the flat validation folder, ignored files, and missing or wrong ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from folders import put
from storages import CLASSES, WORDS, draw_imagenet, write_kaggle

from shardio.conversion.sources.kaggle import scan_kaggle
from shardio.conversion.sources.tree import scan_tree
from shardio.errors import DecodeError, SourceError


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_imagenet(tmp_path_factory.mktemp("kaggle") / "imagenet")


@pytest.fixture
def src(imagenet: Path, tmp_path: Path) -> Path:
    return write_kaggle(imagenet, tmp_path / "src")


def images(src: Path) -> Path:
    return src / "ILSVRC" / "Data" / "CLS-LOC"


def refused(src: Path) -> str:
    with pytest.raises(SourceError) as caught:
        scan_kaggle(src)
    assert str(caught.value).startswith(str(src))
    return str(caught.value)


def test_validation_images_have_the_keys_of_the_tree_and_their_own_places(src: Path, imagenet: Path) -> None:
    found, tree = scan_kaggle(src), scan_tree(imagenet)
    for split in ("train", "val"):
        assert [(s.key, s.label) for s in found.splits[split]] == [(s.key, s.label) for s in tree.splits[split]]
    for source in found.splits["val"]:
        assert source.place == b"val/" + source.key.rpartition(b"/")[2]
    assert found.class_names == WORDS
    assert found.classes == CLASSES


def test_test_images_and_what_is_no_image_are_counted(src: Path) -> None:
    put(images(src), "val/.DS_Store", "val/README.txt", "train/.x", "train/notes.txt")
    put(images(src), "train/._n01440764.JPEG", "test/.DS_Store")
    assert scan_kaggle(src).ignored == {
        "unlabeled test image": 3,
        "hidden": 4,
        "not a validation image": 1,
        "not an image": 1,
    }


def test_train_or_val_may_be_missing(src: Path) -> None:
    both = scan_kaggle(src)
    shutil.move(images(src) / "val", src.parent / "val")
    assert scan_kaggle(src).splits == {"train": both.splits["train"]}
    shutil.move(src.parent / "val", images(src) / "val")
    shutil.rmtree(images(src) / "train")
    found = scan_kaggle(src)
    assert found.splits == {"val": both.splits["val"]}
    assert found.classes == CLASSES
    shutil.rmtree(images(src) / "val")
    assert "expected a folder train or val in it, found neither" in refused(src)


def test_validation_images_that_were_sorted_into_class_folders_are_taken_as_they_are(src: Path) -> None:
    expected = [(source.key, source.label) for source in scan_kaggle(src).splits["val"]]
    for source in scan_kaggle(src).splits["val"]:
        place = images(src) / source.key.decode()
        place.parent.mkdir(exist_ok=True)
        shutil.move(images(src) / "val" / place.name, place)
    (src / "LOC_val_solution.csv").unlink()
    assert [(source.key, source.label) for source in scan_kaggle(src).splits["val"]] == expected
    put(images(src), "val/ILSVRC2012_val_00000009.JPEG")
    assert "expected each image in a class folder, as others are, found 'ILSVRC2012_val_00000009.JPEG'" in refused(src)


def test_an_image_that_is_listed_and_not_there_is_a_source_that_is_refused(src: Path) -> None:
    (images(src) / "val" / "ILSVRC2012_val_00000003.JPEG").unlink()
    found = scan_kaggle(src)
    (gone,) = (source for source in found.splits["val"] if b"00000003" in source.key)
    with pytest.raises(DecodeError, match=r"^unreadable: No such file or directory$"):
        found.origin.read(gone)


def test_class_names_are_optional_but_not_in_part(src: Path) -> None:
    mapping = src / "LOC_synset_mapping.txt"
    mapping.write_text(mapping.read_text().replace("n02012849 crane\n", ""))
    assert f"{mapping}: expected a line for the class 'n02012849', found none" in refused(src)
    mapping.unlink()
    assert scan_kaggle(src).class_names == ()


def test_the_lists_may_lie_in_any_folder_above_the_images(src: Path) -> None:
    expected = scan_kaggle(src).splits
    for name in ("LOC_val_solution.csv", "LOC_synset_mapping.txt"):
        shutil.move(src / name, images(src) / name)
    found = scan_kaggle(images(src))
    assert found.splits == expected
    assert found.class_names == WORDS


def test_images_without_a_solution_are_refused(src: Path) -> None:
    put(images(src), "val/ILSVRC2012_val_00000077.JPEG", "val/ILSVRC2012_val_00000078.JPEG")
    assert "found none for 'ILSVRC2012_val_00000077.JPEG' (2 without one)" in refused(src)
    (src / "LOC_val_solution.csv").unlink()
    assert "expected LOC_val_solution.csv next to ILSVRC" in refused(src)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "line 1: expected ['ImageId', 'PredictionString'], found ['']"),
        ("a,b\n", "line 1: expected ['ImageId', 'PredictionString'], found ['a', 'b']"),
        ("ImageId,PredictionString\nx,n01440764 1 2 3 4 n01443537 1 2 3 4\n", "line 2: expected an image"),
        ("ImageId,PredictionString\nx,n01440764 1 2 3 4\nx,n01440764 1 2 3 4\n", "line 3: expected an image"),
        ("ImageId,PredictionString\nx,\n", "line 2: expected an image"),
        ("ImageId,PredictionString\nx\n", "line 2: expected 2 fields, found 'x'"),
        ("ImageId,PredictionString\n../x,n01440764 1 2 3 4\n", "line 2: expected an image"),
        ("ImageId,PredictionString\nx,../n01440764 1 2 3 4\n", "line 2: expected an image"),
        ("ImageId,PredictionString\nx,n99999999 1 2 3 4\n", "expected the classes of train in val, found 'n99999999'"),
        ("ImageId,PredictionString\nx," + "n01440764 1 2 3 4 " * 10_000, "line 2: expected fewer than"),
    ],
)
def test_a_solution_that_is_wrong_is_named_with_its_line(text: str, found: str, src: Path) -> None:
    (src / "LOC_val_solution.csv").write_text(text)
    shutil.rmtree(images(src) / "val")
    (images(src) / "val").mkdir()
    assert found in refused(src)
