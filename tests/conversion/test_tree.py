"""The meaning of a folder tree: classes, labels, order and splits; ignored files, and refused trees."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from folders import ODD_NAMES, put
from storages import keys, scan, scan_tree

from shardio.conversion.report import describe
from shardio.conversion.sources.collection import Collection, Source, read_file
from shardio.conversion.sources.doubt import DoubtError
from shardio.conversion.sources.tree import list_tree
from shardio.errors import DecodeError, SourceError


def image_folder(root: bytes) -> tuple[list[bytes], list[tuple[bytes, int]]]:
    """The class names and (path relative to `root`, label) as torchvision's ImageFolder lists them."""
    text = os.fsdecode(root)
    classes = sorted(entry.name for entry in os.scandir(text) if entry.is_dir())
    listed = []
    for label, name in enumerate(classes):
        for folder, _, files in sorted(os.walk(os.path.join(text, name), followlinks=True)):
            for file in sorted(files):
                listed.append((os.fsencode(os.path.relpath(os.path.join(folder, file), text)), label))
    return [os.fsencode(name) for name in classes], listed


# --- labels and order -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_classes_labels_and_order_are_those_of_image_folder(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)

    def name() -> bytes:
        return bytes(ODD_NAMES[rng.integers(len(ODD_NAMES))])

    for i in range(60):
        folders = b"/".join(name() for _ in range(rng.integers(1, 4)))
        put(tmp_path, folders + b"/%s%d.jpg" % (name(), i))
    classes, listed = image_folder(os.fsencode(tmp_path))
    tree = scan_tree(tmp_path)
    assert [os.fsencode(name) for name in tree.classes] == classes, seed
    assert [(source.key, source.label) for source in tree.splits["train"]] == listed, seed
    assert tree.num_sources == 60
    assert list(tree.splits) == ["train"]
    assert not tree.ignored


def test_classes_that_differ_only_in_case_and_blanks_are_said(tmp_path: Path) -> None:
    put(tmp_path, "Goldfish /1.jpg", "goldfish/2.jpg", "tench/3.jpg")
    said = [line for line in describe(scan_tree(tmp_path)) if "letter case" in line]
    assert [line.endswith("'Goldfish ', 'goldfish'") for line in said] == [True]


def test_linked_classes_folders_and_files_are_followed_as_image_folder_does(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    put(elsewhere, "one/1.jpg", "one/deep/2.jpg", "3.jpg")
    put(root, "b/4.jpg", "c/5.jpg")
    (root / "a").symlink_to(elsewhere / "one")
    (root / "b" / "in").symlink_to(elsewhere / "one")
    (root / "b" / "3.jpg").symlink_to(elsewhere / "3.jpg")
    (root / "c" / "again").symlink_to(root / "b")
    classes, listed = image_folder(os.fsencode(root))
    tree = scan_tree(root)
    assert [os.fsencode(name) for name in tree.classes] == classes == [b"a", b"b", b"c"]
    assert [(source.key, source.label) for source in tree.splits["train"]] == listed
    assert len(listed) == 11
    assert not tree.ignored
    assert tree.notes[0].startswith("8 images outside of SRC, such as ")
    assert str(elsewhere.resolve() / "one/1.jpg") in tree.notes[0]


def test_a_source_is_named_or_begins_as_an_image_and_other_files_are_counted(tmp_path: Path) -> None:
    put(tmp_path, "a/1.JPEG", "a/4.png", "a/5.txt", "a/6", "a/README.md", "b/7.Tiff", "8.csv")
    put(tmp_path, "a/2", "a/3.txt", content=b"\xff\xd8\xff\xe0")
    tree = scan_tree(tmp_path)
    assert keys(tree)["train"] == [b"a/1.JPEG", b"a/2", b"a/3.txt", b"a/4.png", b"b/7.Tiff"]
    assert tree.ignored == {"not an image": 4}


def test_keys_are_relative_to_the_root_however_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = os.fsdecode(b"\xff images")
    put(tmp_path, f"{root}/a/b/1.jpg", "x/")
    (tmp_path / "link").symlink_to(root)
    monkeypatch.chdir(tmp_path)
    for given in (root, f"{root}/", f"./{root}", f"x/../{root}", f"{root}//.", tmp_path / root, "link"):
        assert keys(scan(given, "tree", labels="folders"))["train"] == [b"a/b/1.jpg"]


# --- splits -----------------------------------------------------------------------------------------------------------


def test_val_and_test_use_the_labels_of_train(tmp_path: Path) -> None:
    put(
        tmp_path, *(f"{name}.jpg" for name in ("train/a/1", "train/b/2", "train/c/3", "val/c/4", "val/a/5", "test/b/6"))
    )
    tree = scan_tree(tmp_path)
    assert tree.classes == ("a", "b", "c")
    assert list(tree.splits) == ["train", "val", "test"]
    assert tree.splits == {
        "train": (Source(b"train/a/1.jpg", 0), Source(b"train/b/2.jpg", 1), Source(b"train/c/3.jpg", 2)),
        "val": (Source(b"val/a/5.jpg", 0), Source(b"val/c/4.jpg", 2)),
        "test": (Source(b"test/b/6.jpg", 1),),
    }
    assert tree.num_sources == 6


def test_folders_named_like_splits_are_classes_if_they_hold_images_only(tmp_path: Path) -> None:
    put(tmp_path, "train/1.jpg", "val/2.jpg", "dog/3.jpg")
    tree = scan_tree(tmp_path)
    assert tree.classes == ("dog", "train", "val")
    assert keys(tree)["train"] == [b"dog/3.jpg", b"train/1.jpg", b"val/2.jpg"]


def test_a_class_folder_of_a_split_may_be_named_like_a_split(tmp_path: Path) -> None:
    put(tmp_path, "train/train/1.jpg", "train/val/2.jpg", "val/val/3.jpg")
    tree = scan_tree(tmp_path)
    assert tree.classes == ("train", "val")
    assert tree.splits["val"] == (Source(b"val/val/3.jpg", 1),)


def test_split_folders_may_be_links(tmp_path: Path) -> None:
    put(tmp_path, "elsewhere/a/1.jpg", "root/")
    (tmp_path / "root" / "train").symlink_to(tmp_path / "elsewhere")
    assert keys(scan_tree(tmp_path / "root"))["train"] == [b"train/a/1.jpg"]


# --- the deepest folders, and names that Unicode spells in two ways ---------------------------------------------------


def test_the_deepest_folders_are_classes_if_that_is_said(tmp_path: Path) -> None:
    put(tmp_path, "train/birds/owl/1.jpg", "train/birds/emu/2.jpg", "train/cat/3.jpg", "train/cat/lynx/4.jpg")
    put(tmp_path, "val/cat/lynx/5.jpg", "val/6.jpg", "val/elsewhere/emu/7.jpg", "val/birds/none/")
    tree = scan_tree(tmp_path, "leaf")
    assert tree.classes == ("cat", "emu", "lynx", "owl")
    assert listed(tree) == {
        "train": {
            "train/cat/3.jpg": 0,
            "train/birds/emu/2.jpg": 1,
            "train/cat/lynx/4.jpg": 2,
            "train/birds/owl/1.jpg": 3,
        },
        "val": {"val/elsewhere/emu/7.jpg": 1, "val/cat/lynx/5.jpg": 2},
    }
    assert tree.ignored == {"outside of class folders": 1}
    put(tmp_path, "train/fish/owl/8.jpg")
    with pytest.raises(SourceError, match="'birds/owl' and 'fish/owl'"):
        scan_tree(tmp_path, "leaf")


def test_a_class_has_one_number_however_unicode_spells_its_name(tmp_path: Path) -> None:
    nfc, nfd = (unicodedata.normalize(form, "Müller") for form in ("NFC", "NFD"))
    put(tmp_path, f"train/{nfc}/1.jpg", "train/x/2.jpg", f"val/{nfd}/3.jpg", "val/x/4.jpg", f"val/{nfc}/5.jpg")
    for labels in ("folders", "leaf"):
        if labels == "leaf":
            (tmp_path / "val" / nfc / "5.jpg").unlink()
        tree = scan_tree(tmp_path, labels)
        assert tree.classes == (nfc, "x")
        assert listed(tree)["val"][f"val/{nfd}/3.jpg"] == 0
    assert list(scan(tmp_path).classes) == [nfc, "x"]


# --- flat folders, and layouts that could be understood in two ways ---------------------------------------------------


def doubts(root: Path) -> str:
    with pytest.raises(DoubtError) as caught:
        list_tree(root).collect()
    return str(caught.value)


def listed(tree: Collection) -> dict[str, dict[str, int | None]]:
    """The label of each source by its key, for each split."""
    return {split: {source.key.decode(): source.label for source in sources} for split, sources in tree.splits.items()}


def test_a_flat_folder_has_no_labels(tmp_path: Path) -> None:
    put(tmp_path / "flat", "2.jpg", "1.png", "notes.txt", "empty/", "labels/1.txt")
    tree = scan_tree(tmp_path / "flat")
    assert (listed(tree), tree.classes) == ({"train": {"1.png": None, "2.jpg": None}}, ())
    assert tree.ignored == {"not an image": 2}


TWO_WAYS: dict[str, tuple[tuple[str, ...], str, dict[str, dict[str, int | None]]]] = {
    "one class": (
        ("a/1.jpg", "a/2.jpg"),
        "expected at least two classes, found only 'a'",
        {"train": {"a/1.jpg": 0, "a/2.jpg": 0}},
    ),
    "one level too high": (
        ("x/train/a/1.jpg", "x/train/b/2.jpg"),
        "if x is the collection: shardio convert {root}/x OUT",
        {"train": {"x/train/a/1.jpg": 0, "x/train/b/2.jpg": 0}},
    ),
    "both": (
        ("0.jpg", "a/1.jpg", "b/2.jpg"),
        "in '{root}' or in its folders, found 1 directly in it, and folders with images such as 'a'",
        {"train": {"a/1.jpg": 0, "b/2.jpg": 1}},
    ),
    "deeper": (
        ("a/x/1.jpg", "a/2.jpg", "b/3.jpg"),
        "expected images directly in the class folders, found some deeper, in '{root}/a/x'",
        {"train": {"a/2.jpg": 0, "a/x/1.jpg": 0, "b/3.jpg": 1}},
    ),
    "splits in classes": (
        ("n01/train/1.jpg", "n01/test/2.jpg", "n02/train/3.jpg"),
        "found some deeper, in '{root}/n01/test'",
        {"train": {"n01/test/2.jpg": 0, "n01/train/1.jpg": 0, "n02/train/3.jpg": 1}},
    ),
    "unlabeled test": (
        ("train/a/1.jpg", "train/b/2.jpg", "Test/3.jpg"),
        "expected class folders in 'Test', as in 'train', found 1 images without",
        {"train": {"train/a/1.jpg": 0, "train/b/2.jpg": 1}, "test": {"test/3.jpg": None}},
    ),
    "unlabeled train": (
        ("train/1.jpg", "val/a/2.jpg", "val/b/3.jpg"),
        "expected class folders in 'train', as in 'val', found 1 images without",
        {"train": {"train/1.jpg": None}, "val": {"val/a/2.jpg": 0, "val/b/3.jpg": 1}},
    ),
    "empty val": (
        ("train/a/1.jpg", "train/b/2.jpg", "val/a/", "val/b/notes.txt"),
        "expected images in '{root}/val', found none: the split would be left out",
        {"train": {"train/a/1.jpg": 0, "train/b/2.jpg": 1}},
    ),
    "others beside splits": (
        ("Train/a/1.jpg", "Train/b/2.jpg", "annotations/3.jpg", "4.jpg"),
        "expected only folders of splits next to 'Train', found 'annotations', '4.jpg', which would be left out",
        {"train": {"train/a/1.jpg": 0, "train/b/2.jpg": 1}},
    ),
}


@pytest.mark.parametrize("layout", TWO_WAYS)
def test_what_could_be_understood_in_two_ways_is_said_and_both_ways_are_there(tmp_path: Path, layout: str) -> None:
    names, message, expected = TWO_WAYS[layout]
    put(tmp_path, *names)
    assert message.format(root=tmp_path) in doubts(tmp_path)
    assert listed(scan_tree(tmp_path, "folders")) == expected
    unlabeled = scan_tree(tmp_path, "none")
    assert unlabeled.classes == ()
    images = {name for name in names if name.endswith(".jpg")}
    left_out = {"annotations/3.jpg", "4.jpg"}  # which belong to no split
    places = {os.fsdecode(one.place or one.key) for split in unlabeled.splits.values() for one in split}
    assert places == images - (left_out if layout == "others beside splits" else set())
    assert {label for split in listed(unlabeled).values() for label in split.values()} == {None}


def test_folders_named_like_splits_without_classes_are_classes_if_that_is_said(tmp_path: Path) -> None:
    put(tmp_path, "train/1.jpg", "val/2.jpg")
    assert list(scan_tree(tmp_path).splits) == ["train", "val"]
    assert scan_tree(tmp_path, "folders").classes == ("train", "val")


def test_a_folder_without_class_folders_cannot_have_labels(tmp_path: Path) -> None:
    put(tmp_path, "1.jpg", "2.jpg")
    with pytest.raises(SourceError, match=r"expected class folders .* found images alone: pass `--labels none`"):
        scan_tree(tmp_path, "folders")


# --- what is ignored, and counted -------------------------------------------------------------------------------------


def ignored(root: Path) -> Mapping[str, int]:
    return dict(scan_tree(root).ignored)


def test_files_outside_of_class_folders_are_ignored_and_counted(tmp_path: Path) -> None:
    put(tmp_path / "flat", "README", "labels.csv", "a/1.jpg")
    assert ignored(tmp_path / "flat") == {"not an image": 2}
    put(tmp_path / "split", "README", "train/synsets.txt", "train/a/1.jpg", "val/a/2.jpg", "val/3.jpg", "train/.x")
    assert ignored(tmp_path / "split") == {"outside of class folders": 1, "not an image": 2, "hidden": 1}


def test_the_examples_of_what_is_ignored_have_different_suffixes(tmp_path: Path) -> None:
    put(tmp_path, "a/1.jpg", "a/1.txt", "a/2.txt", "b.csv", "c.md", "d.xml", ".x")
    assert scan_tree(tmp_path).ignored.examples == {"hidden": [".x"], "not an image": ["b.csv", "c.md", "d.xml"]}


def test_fifos_and_sockets_are_ignored_without_being_opened(tmp_path: Path, open_socket: str) -> None:
    put(tmp_path, "root/a/1.jpg")
    os.mkfifo(tmp_path / "root" / "a" / "fifo.jpg")
    os.mkfifo(tmp_path / "root" / "fifo.jpg")
    os.rename(tmp_path / open_socket, tmp_path / "root" / "a" / "socket.jpg")
    (tmp_path / "root" / "a" / "link.jpg").symlink_to("fifo.jpg")
    (tmp_path / "root" / "a" / "null.jpg").symlink_to("/dev/null")
    tree = scan_tree(tmp_path / "root")
    assert keys(tree)["train"] == [b"a/1.jpg"]
    assert tree.ignored == {"not a regular file": 5}


@pytest.mark.parametrize("target", [".", "..", "../..", "sub", "../a", "../../src"])
def test_links_to_a_folder_that_holds_them_are_counted_and_not_followed(tmp_path: Path, target: str) -> None:
    put(tmp_path, "src/a/1.jpg", "src/a/sub/2.jpg", "src/b/3.jpg")
    folder = tmp_path / "src" / "a" / "sub" if target == "sub" else tmp_path / "src" / "a"
    (folder / "loop").symlink_to("../sub" if target == "sub" else target)
    tree = scan_tree(tmp_path / "src")
    assert tree.splits["train"] == (Source(b"a/1.jpg", 0), Source(b"a/sub/2.jpg", 0), Source(b"b/3.jpg", 1))
    assert tree.ignored == {"symlink loop": 1}


@pytest.mark.parametrize("target", ["nowhere.jpg", "/nowhere/1.jpg", "2.jpg/3.jpg", "1.jpg"])
def test_links_to_nothing_and_to_themselves_are_sources_that_are_refused(tmp_path: Path, target: str) -> None:
    put(tmp_path, "a/2.jpg")
    (tmp_path / "a" / "1.jpg").symlink_to(target)
    assert keys(scan_tree(tmp_path))["train"] == [b"a/1.jpg", b"a/2.jpg"]
    with pytest.raises(DecodeError, match=r"^unreadable: (No such file|Not a directory|Too many levels)"):
        read_file(tmp_path / "a" / "1.jpg")


def test_a_link_to_itself_beside_the_classes_is_an_image_there(tmp_path: Path) -> None:
    put(tmp_path, "a/1.jpg")
    (tmp_path / "self").symlink_to("self")
    (tmp_path / "dangling").symlink_to("nowhere")
    tree = scan_tree(tmp_path, "folders")
    assert keys(tree)["train"] == [b"a/1.jpg"]
    assert tree.ignored == {"outside of class folders": 2}


@pytest.mark.parametrize("name", ["", "a", "a/b"])
def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "a/b/1.jpg", "c/2.jpg")
    scandir, broken = os.scandir, tmp_path / name

    def failing(path: str | os.PathLike[str]) -> object:
        if Path(path) == broken:
            raise OSError(5, "Input/output error", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", failing)
    with pytest.raises(SourceError, match="Input/output error") as caught:
        scan_tree(tmp_path)
    assert str(caught.value).startswith(f"{broken}: ")
