"""WebDataset tars: samples, labels, splits and keys; refusals of single samples, and of whole tars."""

from __future__ import annotations

import contextlib
import os
import re
import zipfile
from itertools import chain
from pathlib import Path

import pytest
from folders import put
from storages import rows, scan, scan_tree, tar_of

from shardio.conversion.images.headers import SUFFIXES
from shardio.conversion.sources.collection import Collection, Extent, Fault
from shardio.conversion.sources.doubt import DoubtError
from shardio.conversion.sources.names import known_split
from shardio.conversion.sources.webdataset import list_webdataset
from shardio.errors import DecodeError, SourceError


def write_tar(path: Path, *files: tuple[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar_of(files))
    return path


def scan_tars(src: Path) -> Collection:
    return list_webdataset(src).collect()


def pair(name: str, label: str = "0", suffix: str = "jpg") -> list[tuple[str, bytes]]:
    return [(f"{name}.cls", label.encode()), (f"{name}.{suffix}", name.encode())]


def faults(found: Collection) -> dict[bytes, str]:
    """Sources that will be refused, with the reasons that rejects.jsonl will give."""
    refused = {}
    for source in (source for sources in found.splits.values() for source in sources):
        if isinstance(source.place, Fault):
            with pytest.raises(DecodeError, match=r"^incomplete: ") as caught:
                found.origin.read(source)
            refused[source.key] = caught.value.detail
    return refused


def test_members_with_one_name_but_for_the_suffix_are_a_sample(tmp_path: Path) -> None:
    files = [
        *pair("n01440764_1", "3", "JPEG"),
        ("deep/x.png", b"png"),
        ("deep/x.cls", b" 1\n"),
        ("deep/x.txt", b"a caption"),
        ("y.webp", b"webp"),
        ("y.json", b'{"width": 3, "label": 0}'),
        ("y.seg.png", b"another picture, not the image"),
        ("z.CLS", b"2"),
        ("z.Jpg", b"z"),
        ("deep/x.json", b'{"label": "a .cls comes first"}'),
    ]
    found = scan_tars(write_tar(tmp_path / "x.tar", *files))
    keys = [(b"3/n01440764_1.JPEG", 3), (b"1/deep/x.png", 1), (b"0/y.webp", 0), (b"2/z.Jpg", 2)]
    assert rows(found) == keys
    assert found.classes == ("0", "1", "2", "3")
    assert found.ignored == {"neither image nor label": 1, "part of another sample": 1}
    assert found.ignored.examples["part of another sample"] == ["y.seg.png"]
    assert [found.origin.read(source) for source in found.splits["train"]] == [b"n01440764_1", b"png", b"webp", b"z"]
    assert found.kind == "webdataset"


IMAGES = " ".join(f"{i}{suffix}" for i, suffix in enumerate(SUFFIXES))
DOTS: dict[str, tuple[str, str]] = {
    "an image and a label of its own": ("v1.0.jpg v1.0.cls v1.1.jpg v1.1.cls", "v1.0.jpg v1.1.jpg"),
    "beside its beginning": ("a.jpg a.cls a.v2.jpg a.v2.cls", "a.jpg a.v2.jpg"),
    "in folders": ("x.1/a.jpg x.1/a.cls x.jpg x.cls", "x.1/a.jpg x.jpg"),
    "a part": ("a.jpg a.cls a.seg.png a.left.seg.png a.fine.cls", "a.jpg"),
    "a part with the label": ("a.jpg a.target.cls b.v1.jpg b.v1.x.y.cls", "a.jpg b.v1.jpg"),
    "a part with the label in JSON": ("a.jpg a.meta.json b.jpg b.json", "a.jpg b.jpg"),
    "a part of a name with dots": ("v1.0.jpg v1.0.cls v1.0.seg.png", "v1.0.jpg"),
    "pictures of a sample without its own": ("b.left.png b.right.png b.cls a.jpg a.cls", "a.jpg"),
    "every image that folders may have": (" ".join([IMAGES, *(f"{i}.cls" for i in range(len(SUFFIXES)))]), IMAGES),
}


@pytest.mark.parametrize("name", DOTS)
def test_a_name_with_dots_is_a_sample_unless_it_is_part_of_another(name: str, tmp_path: Path) -> None:
    files, expected = DOTS[name]
    found = scan_tars(
        write_tar(tmp_path / "x.tar", *((file, b'{"label": 0}' if "json" in file else b"0") for file in files.split()))
    )
    good = [source for source in found.splits["train"] if not isinstance(source.place, Fault)]
    assert [source.key.decode().removeprefix("0/") for source in good] == expected.split()
    assert set(faults(found)) <= {b"b"}


def test_pictures_of_other_kinds_are_refused_unless_a_sample_has_an_image(tmp_path: Path) -> None:
    files = [("a/1.jpg", b"x"), ("a/2.heic", b"x"), ("b/3.JP2", b"x"), ("b/4.png", b"x"), ("b/4.cr2", b"x")]
    found = scan(write_tar(tmp_path / "x.tar", *files))
    assert rows(found) == [(b"a/1.jpg", 0), (b"a/2.heic", 0), (b"b/3.JP2", 1), (b"b/4.png", 1)]
    assert found.ignored.examples == {"neither image nor label": ["b/4.cr2"]}
    found = scan_tars(write_tar(tmp_path / "y.tar", *pair("1"), *pair("2", suffix="heic")))
    assert rows(found) == [(b"0/1.jpg", 0), (b"0/2.heic", 0)]


def test_labels_none_takes_every_image_with_or_without_a_label(tmp_path: Path) -> None:
    files = [*pair("a", "x"), *((f"{name}.png", b"x") for name in "bcd"), ("b.json", b'{"caption": "y"}')]
    files += [("c.cls", b""), ("d.json", b"["), ("e.cls", b"x")]
    found = scan(write_tar(tmp_path / "x.tar", *files), "webdataset", labels="none")
    assert rows(found) == [(key, None) for key in (b"x/a.jpg", b"b.png", b"c.png", b"d.png", b"e")]
    assert faults(found) == {b"e": "expected one image of the sample 'e' in x.tar, found 0 images"}
    assert list(faults(scan(tmp_path / "x.tar"))) == [b"b.png", b"c.png", b"d.png", b"e"]
    skipping = scan(tmp_path / "x.tar", unlabeled="skip")
    assert [list(faults(skipping)), skipping.ignored["image without a label"]] == [[b"c.png", b"d.png", b"e"], 1]
    alone = scan(write_tar(tmp_path / "y.tar", ("b.png", b"b")), labels="none")
    assert rows(alone) == [(b"b.png", None)]


def test_a_sample_without_its_image_or_label_is_a_source_that_is_refused(tmp_path: Path) -> None:
    label = "label (.cls or .json)"
    samples = {  # by key: the suffixes of the members, and of what one is expected, but so many found
        "no label.jpg": (".jpg", label, "0 labels"),
        "no label 2.jpg": (".jpg .json", label, "0 labels"),
        "no image": (".cls", "image", "0 images"),
        "two.jpg": (".jpg .png .cls", "image", "2 images"),
        "twice.jpg": (".jpg .jpg .cls", "image", "2 images"),
        "labels.jpg": (".jpg .cls .cls", label, "2 labels"),
        "parts.jpg": (".jpg .fine.cls .coarse.cls", label, "2 labels"),
    }
    contents = {".cls": b"3", ".fine.cls": b"3", ".coarse.cls": b"3", ".json": b'{"width": 3}'}
    files = [
        (key.removesuffix(".jpg") + suffix, contents.get(suffix, b""))
        for key, (suffixes, _, _) in samples.items()
        for suffix in suffixes.split()
    ]
    found = scan_tars(write_tar(tmp_path / "train.tar", *pair("good", "7"), *files))
    assert rows(found)[0] == (b"train/7/good.jpg", 7)
    assert faults(found) == {
        f"train/{key}".encode(): f"expected one {what} of the sample '{key}' in train.tar, found {count}"
        for key, (_, what, count) in samples.items()
    }


@pytest.mark.parametrize("label", ["", "-1"])
def test_a_later_split_without_labels_is_a_doubt_and_may_have_none(label: str, tmp_path: Path) -> None:
    write_tar(tmp_path / "train.tar", *pair("1", "0"), *pair("2", "1"))
    write_tar(tmp_path / "test.tar", ("3.jpg", b"3"), *([("3.cls", label.encode())] if label else []))
    with pytest.raises(DoubtError, match=r"labels .* in the split 'test', as in 'train'") as caught:
        scan_tars(tmp_path)
    assert [dict(one.options) for one in caught.value.readings] == [{"--unlabeled": "skip"}, {"--labels": "none"}]
    found = scan(tmp_path, unlabeled="skip")
    assert rows(found, "train") == [(b"train/0/1.jpg", 0), (b"train/1/2.jpg", 1)]
    assert rows(found, "test") == [(b"test/3.jpg", None)]


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("1.json", b'{"label": 1}', 1),
        ("1.json", b'{"label": "1"}', 1),
        ("1.json", b'{"class": "b", "x": [1]}', 1),
        ("1.json", b'{"cls": " b\\n"}', 1),
        ("1.json", b'{"class": "a", "label": "b"}', 1),
        ("1.cls", b"", "expected a class name, or an integer from 0 to 1,048,575, found ''"),
        ("1.cls", b"\xff\xfe", r"expected UTF-8, found b'\xff\xfe'"),
        ("1.cls", b"9" * 5000, "found '999"),
        ("1.json", b"{", "not valid JSON: "),
        ("1.json", b"[" * 100_000, "not valid JSON: "),
        ("1.json", b'{"label": [1, 2]}', "expected an integer or a class name in 'label', found [1, 2]"),
        ("1.json", b'{"label": true}', "expected an integer or a class name in 'label', found True"),
        ("1.json", b'{"label": "\\ud800"}', "not valid JSON: "),
        ("1.json", b"[1]", "expected one label (.cls or .json) of the sample '1.jpg' in x.tar, found 0 labels"),
        ("1.json", b'"' + b"x" * (1 << 20) + b'"', "expected one label (.cls or .json) of the sample '1.jpg' in x.tar"),
        ("1.txt", b"0", "expected one label (.cls or .json) of the sample '1.jpg' in x.tar, found 0 labels"),
    ],
)
def test_a_label_is_an_integer_or_a_name_or_refuses_its_sample_alone(
    name: str, content: bytes, found: int | str, tmp_path: Path
) -> None:
    others = "ab" if re.search(b'" ?b', content) else "01"
    files = [*pair("0", others[0]), *pair("2", others[1]), ("1.jpg", b""), (name, content)]
    collection = scan_tars(write_tar(tmp_path / "x.tar", *files))
    assert {label for key, label in rows(collection) if b"1.jpg" in key} == {found if isinstance(found, int) else 0}
    assert collection.num_sources == 3
    details = faults(collection)
    assert set(details) == (set() if isinstance(found, int) else {b"1.jpg"})
    assert all(str(found) in detail for detail in details.values())


def test_a_class_of_val_that_train_does_not_have_refuses_its_samples(tmp_path: Path) -> None:
    write_tar(tmp_path / "train.tar", *pair("1", "cat"), *pair("2", "dog"))
    write_tar(tmp_path / "val.tar", *pair("3", "cat"), *pair("4", "fish"))
    found = scan_tars(tmp_path)
    assert found.classes == ("cat", "dog")
    detail = "the label of the sample '4.jpg' in val.tar: expected one of the classes of 'train', found 'fish'"
    assert faults(found) == {b"val/4.jpg": detail}
    write_tar(tmp_path / "train.tar", ("1.jpg", b""))  # refused samples decide about no class
    found = scan_tars(tmp_path)
    assert found.classes == ("cat", "fish")
    assert list(faults(found)) == [b"train/1.jpg"]


@pytest.mark.parametrize(
    ("pattern", "numbers"),
    [
        ("a-{008..011}.tar", [8, 9, 10, 11]),
        ("a-0{08,10}.tar", [8, 10]),
        ("a-0{1{1,0},09}.tar", [11, 10, 9]),
        ("{a-0{10..11},a-00{8,9}}.tar", [10, 11, 8, 9]),
        ("{a,a}-{009..010}.tar", [9, 10]),
        ("a-01?.tar", [10, 11]),
        ("a-[0-9]*[89].tar", [8, 9]),
        ("{a-011,a-00*}.tar", [11, 8, 9]),
        ("../tars/a-0{11..11}.tar", [11]),
        ("../{tars,tars}/a-008.tar", [8]),
        ("a-008.tar", [8]),
        ("", [8, 9, 10, 11]),
    ],
)
def test_a_pattern_names_its_tars_in_its_order(
    pattern: str, numbers: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8, 12):
        write_tar(tmp_path / "tars" / f"a-{number:03d}.tar", *pair(f"{number}"))
    monkeypatch.chdir(tmp_path / "tars")  # so that a pattern may begin with a brace
    found = scan_tars(Path(pattern))
    assert [key for key, _ in rows(found)] == [f"0/{number}.jpg".encode() for number in numbers]
    assert [found.origin.read(source) for source in found.splits["train"]] == [str(n).encode() for n in numbers]


def test_what_exists_is_no_pattern(tmp_path: Path) -> None:
    assert rows(scan(write_tar(tmp_path / "{0..1}[x]*?.tar", *pair("1")))) == [(b"0/1.jpg", 0)]
    put(tmp_path, "images [old] {1}/a/1.jpg", "images [old] {1}/b/1.jpg")
    assert scan(tmp_path / "images [old] {1}").classes == ("a", "b")


def test_tars_of_a_folder_and_of_its_folders_are_read_and_other_files_counted(tmp_path: Path) -> None:
    write_tar(tmp_path / "b.tar", *pair("1"))
    write_tar(tmp_path / "a" / "c.tar", *pair("2"))
    put(tmp_path, "sizes.json", "a/README", ".DS_Store", "a/.x", ".hidden/d.tar", "._b.tar", "a/deep/e.tar")
    found = scan_tars(tmp_path)
    assert [key for key, _ in rows(found)] == [b"0/2.jpg", b"0/1.jpg"]
    assert found.ignored == {"other file": 3, "hidden": 4}
    os.mkfifo(tmp_path / "c.tar")
    with pytest.raises(SourceError, match=r"c\.tar: expected a regular file"):
        scan_tars(tmp_path)


@pytest.mark.parametrize(
    ("tar", "split"),
    [
        ("train-000000.tar", "train"),
        ("imagenet1k-validation-63.tar", "val"),
        ("imagenet_VAL_0.tar", "val"),
        ("test.tar", "test"),
        ("set-dev-0.tar", "val"),
        ("Testing/000.tar", "test"),
        ("val/000.tar", "val"),
        ("validation/train-0.tar", "val"),
        ("training.tar.tar", "train"),
        ("val-0.tar Val-1.tar", "val"),
        ("dev/in-train-0.tar dev/in-train-1.tar", "val"),
        ("train/train-val-0.tar val/train-val-1.tar", "train val"),
        ("dev/in-train-0.tar dev/in-val-0.tar", "train val"),  # of an experiment called dev
        *((tar, "") for tar in ("strain-0.tar", "0.tar", "contest.tar")),  # words within words
    ],
)
def test_a_tar_tells_its_split_by_its_folder_or_its_name(tar: str, split: str, tmp_path: Path) -> None:
    for number, one in enumerate(tar.split()):
        write_tar(tmp_path / one, *pair(f"{number}", "cat"))
    splits = scan_tars(tmp_path).splits
    assert list(splits) == (split or "train").split()
    several = split.split() if len(splits) > 1 else [split] * len(tar.split())
    keys = {f"{one}/cat/{number}.jpg".lstrip("/").encode() for number, one in enumerate(several)}
    assert {(source.key, source.label) for some in splits.values() for source in some} == {(key, 0) for key in keys}


def test_the_first_folder_of_all_samples_tells_the_split_if_no_tar_does(tmp_path: Path) -> None:
    files = [*pair("train/a/1", "a"), *pair("validation/a/2", "a"), *pair("train/b/3", "b")]
    found = scan_tars(write_tar(tmp_path / "0.tar", *files))
    assert rows(found) == [(b"train/a/1.jpg", 0), (b"train/b/3.jpg", 1)]
    assert rows(found, "val") == [(b"val/a/2.jpg", 0)]
    found = scan_tars(write_tar(tmp_path / "0.tar", *files, *pair("other/4", "a")))
    keys = b"a/train/a/1.jpg a/validation/a/2.jpg b/train/b/3.jpg a/other/4.jpg"
    assert [key for key, _ in rows(found)] == keys.split()


@pytest.mark.parametrize(
    ("prefix", "in_name"), [("", True), ("{label}/", False), ("{split}/{label}/", True), ("{split}/{label}/", False)]
)
def test_names_with_and_without_the_folders_of_a_tree_give_the_keys_of_the_tree(
    prefix: str, in_name: bool, tmp_path: Path
) -> None:
    for split, images in (("train", ("a/1", "a/2", "b/3")), ("val", ("b/4", "a/5"))):
        put(tmp_path / "tree", *(f"{split}/{image}.jpg" for image in images))
        pairs = (pair(prefix.format(split=split, label=image[0]) + image[2:], image[0]) for image in images)
        write_tar(tmp_path / "tars" / (f"{split}-0.tar" if in_name else f"{split}/0.tar"), *chain(*pairs))
    found, expected = scan_tars(tmp_path / "tars"), scan_tree(tmp_path / "tree")
    assert found.classes == ("a", "b")
    for split in ("train", "val"):
        assert sorted(rows(found, split)) == sorted(rows(expected, split))


def test_names_that_begin_anew_in_each_tar_are_told_apart_by_the_tar(tmp_path: Path) -> None:
    for tar, label in (("train-0", "x"), ("train-1", "x"), ("val-0", "x")):
        write_tar(tmp_path / f"{tar}.tar", *pair("000", label), *pair("001", "y"))
    found = scan_tars(tmp_path)
    keys = b"x/train-0/000.jpg y/train-0/001.jpg x/train-1/000.jpg y/train-1/001.jpg"
    assert [key for key, _ in rows(found)] == [b"train/" + key for key in keys.split()]


# The names of the images in each archive, and the keys, which tell the splits and the classes, that these mean.
FOLDERS: dict[str, tuple[str, str]] = {
    "classes": ("x.zip: cat/1.jpg dog/2.jpg", "cat/1.jpg dog/2.jpg"),
    "a folder around them": ("x.tar: x/y/cat/1.jpg x/y/dog/2.tif", "cat/1.jpg dog/2.tif"),
    "splits": ("x.zip: x/train/a/1.jpg x/train/b/2.jpg x/valid/a/3.jpg", "train/a/1.jpg train/b/2.jpg val/a/3.jpg"),
    "an archive for each split": (
        "train.zip: train/a/1.jpg train/b/2.jpg; test.zip: a/3.jpg b/4.jpg",
        "train/a/1.jpg train/b/2.jpg test/a/3.jpg test/b/4.jpg",
    ),
    "names with backslashes": (
        "x.zip: x\\train\\a\\1.jpg x\\train\\b\\2.jpg x\\val\\a\\3.jpg",
        "train/a/1.jpg train/b/2.jpg val/a/3.jpg",
    ),
    "one split": ("val2017.zip: val2017/1.jpg val2017/2.jpg", "val/1.jpg val/2.jpg"),
    "classes and a table": ("x.zip: cat/1.jpg dog/2.jpg train.csv", "cat/1.jpg dog/2.jpg"),
    "no folder": ("x.tar: 1.jpg 2.png", "1.jpg 2.png"),
    "ImageNet-21k": (
        "n00000001.tar: n00000001_1.JPEG; n00000012.tar: n00000012/n00000012_1.JPEG",
        "n00000001/n00000001_1.JPEG n00000012/n00000012_1.JPEG",
    ),
    "an archive for each class": ("cat.zip: 1.jpg; dog.zip: dog/1.jpg", "cat/1.jpg dog/1.jpg"),
    "an archive for each class of a split": (
        "train/a.tar: 1.jpg; train/b.tar: 1.jpg; val/a.tar: 1.jpg; val/b.tar: b/1.jpg",
        "train/a/1.jpg train/b/1.jpg val/a/1.jpg val/b/1.jpg",
    ),
    "the same names in splits": (
        "train.zip: a/1.jpg b/1.jpg; val.zip: a/1.jpg b/1.jpg",
        "train/a/1.jpg train/b/1.jpg val/a/1.jpg val/b/1.jpg",
    ),
    "parts of a tree": ("part1.tar: a/1.jpg b/2.jpg; part2.tar: a/3.jpg b/4.jpg", "a/1.jpg a/3.jpg b/2.jpg b/4.jpg"),
}


def write_archives(folder: Path, text: str) -> Path:
    """Writes archives, and returns the folder, or the only archive."""
    archives = dict(one.split(": ") for one in text.split("; "))
    for archive, names in archives.items():
        if archive.endswith(".tar"):
            write_tar(folder / archive, *((name, name.encode()) for name in names.split()))
            continue
        folder.mkdir(exist_ok=True)
        with zipfile.ZipFile(folder / archive, "w", zipfile.ZIP_DEFLATED) as file:
            for name in names.split():
                file.writestr(name, name.replace("\\", "/"))
    return folder / archive if len(archives) == 1 else folder


def meaning(key: str) -> tuple[str, str | None]:
    """The split and the label of an image, by the folders in its key."""
    *folders, _ = key.split("/")
    split = folders.pop(0) if folders and known_split(folders[0]) else "train"
    return split, folders[0] if folders else None


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_and_archives_without_labels_mean_what_folders_of_a_tree_mean(name: str, tmp_path: Path) -> None:
    archives, expected = FOLDERS[name]
    found = scan(write_archives(tmp_path / "s", archives))
    meant: dict[str, tuple[str, str | None]] = {}
    for split, source in ((split, source) for split, some in found.splits.items() for source in some):
        key = source.key.decode()
        meant[key] = split, None if source.indexed is None else found.classes[source.indexed]
        assert os.path.basename(found.origin.read(source)) == os.path.basename(source.key)
    assert meant == {key: meaning(key) for key in expected.split()}
    (note,) = found.notes
    assert archives.partition(":")[0] in note


DOUBTS: dict[str, tuple[str, str, int]] = {
    "images and masks": ("x.zip: images/1.jpg images/2.jpg masks/1.png masks/2.png", "masks", 0),
    "an archive for each of them": ("images.zip: 1.jpg 2.jpg; masks.zip: 1.png 2.png", "masks", 0),
    "numbered archives": ("000.tar: 1.jpg; 001.tar: 2.jpg", "'000', '001'", 2),
    "numbered archives of splits": (
        "train-0.tar: 1.jpg; train-1.tar: 1.jpg; val-0.tar: 1.jpg; val-1.tar: 1.jpg",
        "'train-0', 'train-1'",
        1,
    ),
    "the same names in parts": ("x.tar: a/1.jpg b/1.jpg; y.tar: a/1.jpg b/1.jpg", "deeper", 1),
    "several archives of a class": ("cat-0.tar: 1.jpg; cat-1.tar: 1.jpg; dog-0.tar: 1.jpg", "'cat-0'", 2),
    "parts with letters": ("part_a.tar: 1.jpg 2.jpg; part_b.tar: 3.jpg 4.jpg", "'part_a'", 1),
    "labels in texts": ("0.tar: 1.jpg 1.cls.txt 2.jpg 2.cls.txt", r"1\.cls\.txt", 1),
    "labels in files of other names": ("0.tar: a/1.jpg a/1.label b/2.jpg b/2.label", r"a/1\.label", 2),
    "archives in class folders": ("a/0.tar: 1.jpg; b/0.tar: 1.jpg", "deeper", 1),
    "captions": ("0.tar: a/1.jpg a/1.txt b/2.jpg b/2.txt", "a/1.txt", 2),
    "a table next to them": ("x.zip: x/1.jpg x/2.jpg labels.csv", "labels.csv", 1),
    "captions without folders": ("0.tar: 1.jpg 1.txt", "1.txt", 1),
    "depths": ("x.zip: a/1.jpg b/c/2.jpg b/d/3.jpg", "deeper", 1),
    "one folder": ("x.tar: n01/1.jpg", "n01", 1),
}


@pytest.mark.parametrize("name", DOUBTS)
def test_archives_that_may_mean_several_things_are_a_doubt_with_commands(name: str, tmp_path: Path) -> None:
    archives, words, least = DOUBTS[name]
    src = write_archives(tmp_path / "s", archives)
    with pytest.raises(DoubtError, match=words) as caught:
        scan(src)
    assert len(caught.value.readings) >= least
    assert "folders are" not in str(caught.value) or "a/0.tar" in archives  # but archives are, or folders in archives
    assert all(set(one.options) == {"--labels"} and one.src is None for one in caught.value.readings)
    assert scan(src, labels="none").num_sources == len(re.findall(r"\.(jpg|png)", archives))


def test_a_folder_next_to_splits_in_an_archive_is_a_doubt(tmp_path: Path) -> None:
    src = write_archives(tmp_path / "s", "x.zip: train/a/1.jpg train/b/2.jpg val/a/3.jpg val/b/4.jpg more/5.jpg")
    with pytest.raises(DoubtError, match=r"x\.zip: .*found 'more', which would be left out") as caught:
        scan(src)
    meanings = ["the 2 folders in each split are classes", "no image has a label"]
    assert [one.meaning for one in caught.value.readings] == meanings
    assert scan(src, labels="folders").num_sources == 4


def test_a_table_next_to_archives_without_labels_is_a_doubt(tmp_path: Path) -> None:
    src = write_archives(tmp_path / "s", "train.zip: train/1.jpg train/2.jpg; test.zip: test/3.jpg")
    put(src, "train.csv", content=b"id,label\n1,a\n2,b\n")
    with pytest.raises(DoubtError, match=r"'train\.csv' next to them") as caught:  # a fixture runs the commands
        scan(src)
    assert caught.value.readings[0].options["--table"] == (f"train={src / 'train.csv'}",)
    found = scan(src, table={"train": src / "train.csv"})
    assert (found.classes, rows(found), rows(found, "test")) == (
        ("a", "b"),
        [(b"train/1.jpg", 0), (b"train/2.jpg", 1)],
        [(b"test/3.jpg", None)],
    )


@pytest.mark.parametrize(
    ("system", "coded", "name"),
    [
        (3, "Äß".encode(), "Äß"),
        (0, b"\x8ep\xf8\xa7", "Äp°º"),
        (0, "猫犬".encode("gbk"), ""),
        (0, "коты".encode("cp866"), ""),
    ],
)
def test_undeclared_names_in_a_zip_are_right_or_refused(system: int, coded: bytes, name: str, tmp_path: Path) -> None:
    path = write_archives(tmp_path, "x.zip: NAME/1.jpg dog/2.jpg")
    content = path.read_bytes().replace(b"NAME", coded)
    path.write_bytes(content.replace(b"PK\x01\x02\x14\x03", b"PK\x01\x02\x14" + bytes([system])))
    with contextlib.nullcontext() if name else pytest.raises(SourceError, match=r"x\.zip: .*UTF-8.*unpack"):
        assert set(scan(path).classes) == {name, "dog"}


def test_an_undeclared_name_of_no_image_is_no_obstacle(tmp_path: Path) -> None:
    path = write_archives(tmp_path, "x.zip: cat/1.jpg dog/2.jpg NAME.txt")
    path.write_bytes(path.read_bytes().replace(b"NAME", "猫犬".encode("gbk")).replace(b"\x14\x03", b"\x14\0"))
    assert scan(path).classes == ("cat", "dog")


def test_labels_in_zips_are_read_and_damage_is_refused_by_name(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_DEFLATED) as file:
        for number in range(3):
            file.writestr(f"{number}.jpg", bytes(100) + b"%d" % number)
            file.writestr(f"{number}.cls", "cat" if number else "dog")
    found = scan(tmp_path / "x.zip")
    assert (found.classes, rows(found)) == (("cat", "dog"), [(b"dog/0.jpg", 1), (b"cat/1.jpg", 0), (b"cat/2.jpg", 0)])
    data = bytearray((tmp_path / "x.zip").read_bytes())
    one, other = (source for source in found.splits["train"][:2])
    assert isinstance(one.place, Extent)
    data[one.place.offset + one.place.nbytes - 2] ^= 4
    (tmp_path / "x.zip").write_bytes(data)
    with pytest.raises(DecodeError, match=r"^damaged: .*checksum"):
        found.origin.read(one)
    assert found.origin.read(other) == bytes(100) + b"1"
    data[data.index(b"0.cls") + 6] ^= 4
    (tmp_path / "x.zip").write_bytes(data)
    with pytest.raises(SourceError, match=r"x\.zip: '0\.cls': damaged"):
        scan(tmp_path / "x.zip")
