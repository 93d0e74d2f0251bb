"""The meaning of a folder tree: classes, labels, order and splits; ignored files, and refused trees."""

from __future__ import annotations

import os
import re
import unicodedata
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


def listed(tree: Collection) -> dict[str, dict[str, int | None]]:
    """The label of each source by its key, for each split."""
    return {split: {source.key.decode(): source.label for source in sources} for split, sources in tree.splits.items()}


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
    put(tmp_path, "splits/")
    (tmp_path / "splits" / "train").symlink_to(root)
    assert set(scan_tree(tmp_path / "splits").splits) == {"train"}
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


# The images, the classes, and the labels of all images in the order of the sources, by split.
SPLITS: dict[str, tuple[str, str, dict[str, dict[str, int | None]]]] = {
    "val and test use the labels of train": (
        "train/a/1 train/b/2 train/c/3 val/c/4 val/a/5 test/b/6",
        "a b c",
        {"train": {"a/1": 0, "b/2": 1, "c/3": 2}, "val": {"a/5": 0, "c/4": 2}, "test": {"b/6": 1}},
    ),
    "images alone": ("train/1 val/2 dog/3", "dog train val", {"": {"dog/3": 0, "train/1": 1, "val/2": 2}}),
    "classes of such names": (
        "train/train/1 train/val/2 val/val/3",
        "train val",
        {"train": {"train/1": 0, "val/2": 1}, "val": {"val/3": 1}},
    ),
    "flat": ("2 1", "", {"": {"1": None, "2": None}}),
    "flat splits": ("val/1 train/2", "", {"train": {"2": None}, "val": {"1": None}}),
}


@pytest.mark.parametrize("name", SPLITS)
def test_folders_of_folders_are_splits_if_their_names_say_so(name: str, tmp_path: Path) -> None:
    images, classes, expected = SPLITS[name]
    put(tmp_path, *(f"{image}.jpg" for image in images.split()))
    if name == "flat":
        put(tmp_path, "notes.txt", "empty/", "labels/1.txt")
    tree = scan_tree(tmp_path)
    assert tree.classes == tuple(classes.split())
    assert [(split, list(some.items())) for split, some in listed(tree).items()] == [
        (split or "train", [(f"{split}/{key}.jpg".lstrip("/"), label) for key, label in some.items()])
        for split, some in expected.items()
    ]
    assert tree.ignored == ({"not an image": 2} if name == "flat" else {})


def test_the_deepest_folders_are_classes_if_that_is_said(tmp_path: Path) -> None:
    put(tmp_path, "train/birds/owl/1.jpg", "train/birds/emu/2.jpg", "train/cat/3.jpg", "train/cat/lynx/4.jpg")
    put(tmp_path, "val/cat/lynx/5.jpg", "val/6.jpg", "val/elsewhere/emu/7.jpg", "val/birds/none/")
    tree = scan_tree(tmp_path, "leaf")
    assert tree.classes == ("cat", "emu", "lynx", "owl")
    labels = {"train/cat/3": 0, "train/birds/emu/2": 1, "train/cat/lynx/4": 2, "train/birds/owl/1": 3}
    labels |= {"val/elsewhere/emu/7": 1, "val/cat/lynx/5": 2}
    assert {key[:-4]: label for some in listed(tree).values() for key, label in some.items()} == labels
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


def test_classes_that_are_numbers_in_the_order_of_texts_are_noted(tmp_path: Path) -> None:
    for name, count, notes in (("0", 11, ("the label of '10' is 2",)), ("00", 11, ()), ("0", 10, ())):
        src = tmp_path / f"{name}-{count}"
        put(src, *(f"{number:{name}{len(name)}}/{number}.jpg" for number in range(count)))
        found = scan(src)
        assert tuple(note.partition(": ")[2] for note in found.notes) == notes
        assert found.classes == tuple(sorted(found.classes))


# The files, images without a suffix; what is in doubt; and the label of each image if folders are classes.
TWO_WAYS: dict[str, tuple[str, str, dict[str, int | None]]] = {
    "one class": ("a/1 a/2", "expected at least two classes, found only 'a'", {"a/1": 0, "a/2": 0}),
    "one level too high": (
        "x/train/a/1 x/train/b/2",
        "if x is the collection: shardio convert {root}/x OUT",
        {"x/train/a/1": 0, "x/train/b/2": 0},
    ),
    "both": (
        "0 a/1 b/2",
        "in '{root}' or in its folders, found 1 directly in it, and folders with images such as 'a'",
        {"a/1": 0, "b/2": 1},
    ),
    "deeper": (
        "a/x/1 a/2 b/3",
        "expected images directly in the class folders, found some deeper, in '{root}/a/x'",
        {"a/2": 0, "a/x/1": 0, "b/3": 1},
    ),
    "splits in classes": (
        "n01/train/1 n01/test/2 n02/train/3",
        "found some deeper, in '{root}/n01/test'",
        {"n01/test/2": 0, "n01/train/1": 0, "n02/train/3": 1},
    ),
    "unlabeled test": (
        "train/a/1 train/b/2 Test/3",
        "expected class folders in 'Test', as in 'train', found 1 images without",
        {"train/a/1": 0, "train/b/2": 1, "test/3": None},
    ),
    "unlabeled train": (
        "train/1 val/a/2 val/b/3",
        "expected class folders in 'train', as in 'val', found 1 images without",
        {"train/1": None, "val/a/2": 0, "val/b/3": 1},
    ),
    "empty val": (
        "train/a/1 train/b/2 val/a/ val/b/notes.txt",
        "expected images in '{root}/val', found none: the split would be left out",
        {"train/a/1": 0, "train/b/2": 1},
    ),
    "others beside splits": (
        "Train/a/1 Train/b/2 annotations/3 4",
        "expected only folders of splits next to 'Train', found 'annotations', '4.jpg', which would be left out",
        {"train/a/1": 0, "train/b/2": 1},
    ),
}


@pytest.mark.parametrize("layout", TWO_WAYS)
def test_what_could_be_understood_in_two_ways_is_said_and_both_ways_are_there(tmp_path: Path, layout: str) -> None:
    files, message, expected = TWO_WAYS[layout]
    names = [file if file.endswith(("/", ".txt")) else f"{file}.jpg" for file in files.split()]
    put(tmp_path, *names)
    with pytest.raises(DoubtError, match=re.escape(message.format(root=tmp_path))):
        list_tree(tmp_path).collect()
    labels = {key: label for some in listed(scan_tree(tmp_path, "folders")).values() for key, label in some.items()}
    assert labels == {f"{key}.jpg": label for key, label in expected.items()}
    unlabeled = scan_tree(tmp_path, "none")
    images = {name for name in names if name.endswith(".jpg")}
    left_out = {"annotations/3.jpg", "4.jpg"}  # which belong to no split
    sources = [source for some in unlabeled.splits.values() for source in some]
    assert {os.fsdecode(one.place or one.key) for one in sources} == images - left_out
    assert ({one.label for one in sources}, unlabeled.classes) == ({None}, ())


def test_folders_named_like_splits_without_classes_are_classes_if_that_is_said(tmp_path: Path) -> None:
    put(tmp_path, "train/1.jpg", "val/2.jpg")
    assert scan_tree(tmp_path, "folders").classes == ("train", "val")
    put(tmp_path / "flat", "1.jpg")
    with pytest.raises(SourceError, match=r"expected class folders .* found images alone: pass `--labels none`"):
        scan_tree(tmp_path / "flat", "folders")


def test_files_outside_of_class_folders_are_ignored_and_counted_with_examples(tmp_path: Path) -> None:
    put(tmp_path, "README", "train/synsets.txt", "train/a/1.jpg", "val/a/2.jpg", "val/3.jpg", "train/.x")
    put(tmp_path, "train/a/1.txt", "train/a/2.txt")
    ignored = scan_tree(tmp_path).ignored
    assert ignored == {"outside of class folders": 1, "not an image": 4, "hidden": 1}
    examples = {"outside of class folders": ["val/3.jpg"], "hidden": ["train/.x"]}  # with different suffixes
    assert ignored.examples == {**examples, "not an image": ["README", "train/synsets.txt"]}


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
