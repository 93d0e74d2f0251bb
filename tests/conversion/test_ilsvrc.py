"""ImageNet's own archives: what they hold, and the errors when part of them is missing or wrong."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
import tarfile
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path

import list_archive
import pytest
from storages import (
    CLASSES,
    END,
    SYNSETS,
    WORDS,
    devkit_files,
    draw_imagenet,
    header,
    keys,
    meta_mat,
    tar_of,
    write_archives,
)

from shardio.conversion.sources.collection import Extent
from shardio.conversion.sources.ilsvrc import scan_ilsvrc
from shardio.conversion.sources.tree import scan_tree
from shardio.errors import SourceError

TRAIN, VAL, DEVKIT = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz"


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_imagenet(tmp_path_factory.mktemp("ilsvrc") / "imagenet")


@pytest.fixture
def src(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    return tmp_path / "src"


def refused(src: Path) -> str:
    with pytest.raises(SourceError) as caught:
        scan_ilsvrc(src)
    message = str(caught.value)
    assert message.startswith(str(src)), message
    return message


def train_archive(*files: tuple[str, bytes], name: str = "n01.tar") -> bytes:
    return tar_of([(name, tar_of(files))])


def write_devkit(src: Path, files: Mapping[str, bytes]) -> None:
    named = ((f"ILSVRC2012_devkit_t12/{name}", content) for name, content in files.items())
    (src / DEVKIT).write_bytes(gzip.compress(tar_of(named)))


# --- what is there ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("train",), ("train", "devkit"), ("val", "devkit"), ("train", "val", "devkit")])
def test_keys_are_those_of_the_tree_whichever_archives_there_are(
    names: tuple[str, ...], imagenet: Path, src: Path
) -> None:
    found = scan_ilsvrc(write_archives(imagenet, src, *names))
    tree = scan_tree(imagenet)
    expected = {split: listed for split, listed in keys(tree).items() if split in names}
    assert keys(found) == expected
    assert found.classes == CLASSES
    assert found.class_names == (WORDS if "devkit" in names else ())
    assert not found.ignored


def test_an_archive_alone_may_be_named_and_its_devkit_lies_beside_it(imagenet: Path, src: Path) -> None:
    both = scan_ilsvrc(write_archives(imagenet, src))
    train, val = scan_ilsvrc(src / TRAIN), scan_ilsvrc(src / VAL)
    assert {**train.splits, **val.splits} == both.splits
    assert train.class_names == val.class_names == WORDS
    assert train.classes == val.classes == CLASSES


def test_images_are_extents_of_the_archive_they_are_in(imagenet: Path, src: Path) -> None:
    found = scan_ilsvrc(write_archives(imagenet, src))
    for split, name in (("train", TRAIN), ("val", VAL)):
        for source in found.splits[split]:
            assert isinstance(source.place, Extent)
            assert source.place.file == name.encode()
            assert found.origin.read(source) == (imagenet / os.fsdecode(source.key)).read_bytes()


def test_the_devkit_may_be_unpacked_or_no_longer_compressed(imagenet: Path, src: Path) -> None:
    expected = scan_ilsvrc(write_archives(imagenet, src)).splits
    data = gzip.decompress((src / DEVKIT).read_bytes())
    (src / DEVKIT).unlink()
    (src / "ILSVRC2012_devkit_t12.tar").write_bytes(data)
    assert scan_ilsvrc(src).splits == expected
    (src / "ILSVRC2012_devkit_t12.tar").unlink()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        if hasattr(tarfile, "data_filter"):  # Python 3.10.12, 3.11.4 and later
            tar.extraction_filter = tarfile.data_filter
        tar.extractall(src)
    assert scan_ilsvrc(src).splits == expected


def test_archives_of_other_tars_and_folders_inside_are_read_as_they_would_be_unpacked(src: Path) -> None:
    inner = tar_of(
        [("1.JPEG", b"a"), ("deep/2.JPEG", b"b"), ("./3.JPEG", b"c"), ("._3.JPEG", b"x"), (".x/4.JPEG", b"x")]
    )
    outer = tar_of([("b.tar", inner), ("./a/a.tar", tar_of([("5", b"")])), ("README", b""), ("._b.tar", b"")])
    (src / TRAIN).write_bytes(outer)
    (src / "ILSVRC2012_bbox_train_v2.tar.gz").write_bytes(b"")
    (src / ".DS_Store").write_bytes(b"")
    found = scan_ilsvrc(src)
    assert keys(found) == {"train": [b"train/a/5", b"train/b/1.JPEG", b"train/b/3.JPEG", b"train/b/deep/2.JPEG"]}
    assert [source.label for source in found.splits["train"]] == [0, 1, 1, 1]
    assert found.ignored == {"hidden": 4, "outside of class archives": 1, "other file": 1}


def test_an_empty_class_archive_keeps_its_label(src: Path) -> None:
    (src / TRAIN).write_bytes(tar_of([("a.tar", tar_of([])), ("b.tar", tar_of([("1", b"x")]))]))
    found = scan_ilsvrc(src)
    assert found.classes == ("a", "b")
    assert [source.label for source in found.splits["train"]] == [1]


def test_training_images_need_no_scipy_without_a_devkit(
    imagenet: Path, src: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    write_archives(imagenet, src, "train")
    assert scan_ilsvrc(src).num_sources == 20
    write_devkit(src, {"data/meta.mat": b"", "data/ILSVRC2012_validation_ground_truth.txt": b""})
    # With a devkit there the names of the classes would depend on what is installed, and so would the set.
    assert "pip install 'shardio[ilsvrc]'" in refused(src)


# --- what is missing or wrong -----------------------------------------------------------------------------------------


def test_validation_images_without_a_devkit_are_refused(imagenet: Path, src: Path) -> None:
    write_archives(imagenet, src, "train", "val")
    message = refused(src)
    assert "expected ILSVRC2012_devkit_t12.tar.gz next to ILSVRC2012_img_val.tar" in message
    assert "with their archive as SRC" in message
    assert scan_ilsvrc(src / TRAIN).num_sources == 20


def test_an_archive_that_was_cut_short_is_named_with_the_class(imagenet: Path, src: Path) -> None:
    write_archives(imagenet, src, "train")
    data = (src / TRAIN).read_bytes()
    (src / TRAIN).write_bytes(data[:15_000])
    assert f"{TRAIN}: expected 'n01443537.tar' of 10,240 bytes at byte 10,752, found the end" in refused(src)
    # A class tar that is whole outside and cut inside.
    inner = tar_of([("1.JPEG", b"x" * 5000), ("2.JPEG", b"y" * 5000)])
    (src / TRAIN).write_bytes(tar_of([("a.tar", inner), ("b.tar", inner[:9000])]))
    message = refused(src)
    assert f"{TRAIN}: 'b.tar' in it: expected '2.JPEG' of 5,000 bytes at byte " in message
    assert "truncated" in message


@pytest.mark.parametrize(
    ("archive", "found"),
    [
        (train_archive(("1.JPEG", b"x"), ("1.JPEG", b"y")), "found 'train/n01/1.JPEG' twice"),
        (tar_of([("n01.tar", tar_of([])), ("b/n01.tar", tar_of([]))]), "found a second one of 'n01'"),
        (train_archive(("../1.JPEG", b"x")), "found '../1.JPEG'"),
        (train_archive(("/1.JPEG", b"x")), "found '/1.JPEG'"),
        (tar_of([("n01.tar", header(b"1.JPEG", kind=b"2") + END)]), "found the symbolic link '1.JPEG'"),
        (tar_of([("n01.tar", header(b"1.JPEG", kind=b"1") + END)]), "found the hard link '1.JPEG'"),
        (tar_of([("n01.tar", gzip.compress(tar_of([]), mtime=0))]), "found one compressed with gzip"),
        (tar_of([("n01.tar", b"no tar".ljust(1024))]), "found other bytes: it is not a tar"),
        (tar_of([("n01.tar", b"")]), "truncated"),
        (tar_of([("n01.tar", tar_of([]))]), "expected images, found none"),
        (tar_of([]), "expected images, found none"),
        (b"", "truncated"),
        (b"<html>404</html>".ljust(2000), "it is not a tar"),
        (gzip.compress(b"", mtime=0), "compressed with gzip"),
    ],
)
def test_what_is_wrong_with_an_archive_is_named(archive: bytes, found: str, src: Path) -> None:
    (src / TRAIN).write_bytes(archive)
    message = refused(src)
    assert message.startswith(str(src / TRAIN))
    assert found in message


def test_names_are_not_taken_from_a_devkit_of_other_classes(imagenet: Path, src: Path) -> None:
    write_devkit(src, devkit_files(imagenet))
    (src / TRAIN).write_bytes(train_archive(("1.JPEG", b"x"), name="n99999999.tar"))
    assert f"{src / DEVKIT}: expected the class 'n99999999' in data/meta.mat, found others" in refused(src)


def test_a_validation_image_of_a_class_without_training_images_is_named(imagenet: Path, src: Path) -> None:
    write_archives(imagenet, src, "val", "devkit")
    (src / TRAIN).write_bytes(train_archive(("1.JPEG", b"x"), name="n01440764.tar"))
    assert "of the 1 classes of the training images only, at byte " in refused(src)


def other_devkit(**changes: bytes) -> Callable[[Path], dict[str, bytes]]:
    names = {"meta": "data/meta.mat", "truth": "data/ILSVRC2012_validation_ground_truth.txt"}
    return lambda tree: {**devkit_files(tree), **{names[name]: content for name, content in changes.items()}}


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (lambda tree: {"readme.txt": b""}, "expected data/meta.mat in the devkit, found none"),
        (other_devkit(meta=b""), "expected synsets in data/meta.mat, found: "),
        (other_devkit(meta=b"x" * 2000), "expected synsets in data/meta.mat, found: "),
        (other_devkit(truth=b"1\n2\nfish\n"), "line 3: expected the number of a synset without children, found 'fish'"),
        (other_devkit(truth=b"1\n5\n"), "line 2: expected the number of a synset without children, found '5'"),
        (other_devkit(truth=b"1\n-1\n"), "line 2: expected"),
        (other_devkit(truth=b"1\n" * 9), "expected 9 images, one for each label in the devkit, found 8: number 9"),
        (other_devkit(truth=b"1\n" * 7), "numbered from 1 to 7, at byte "),
    ],
)
def test_what_is_wrong_with_a_devkit_is_named(
    files: Callable[[Path], dict[str, bytes]], found: str, imagenet: Path, src: Path
) -> None:
    write_archives(imagenet, src, "val")
    write_devkit(src, files(imagenet))
    assert found in refused(src)


def test_synsets_that_contradict_each_other_or_could_be_paths_are_refused(imagenet: Path, src: Path) -> None:
    write_archives(imagenet, src, "val")
    for synsets in (
        {"n01440764": (1, "a"), "n01443537": (1, "b")},
        {"../n01440764": (1, "a")},
        {"n00001740": (1, "none without children")},
    ):
        write_devkit(src, other_devkit(meta=meta_mat(synsets))(imagenet))
        assert "expected distinct synsets in data/meta.mat" in refused(src)


def test_a_devkit_of_a_single_class_is_read(imagenet: Path, src: Path) -> None:
    (src / VAL).write_bytes(tar_of([("ILSVRC2012_val_00000001.JPEG", b"x")]))
    write_devkit(src, other_devkit(meta=meta_mat({"n01440764": SYNSETS["n01440764"]}), truth=b"3\n")(imagenet))
    found = scan_ilsvrc(src)
    assert keys(found) == {"val": [b"val/n01440764/ILSVRC2012_val_00000001.JPEG"]}
    assert found.class_names == ("tench, Tinca tinca",)


def test_a_devkit_that_unpacks_without_end_is_refused(imagenet: Path, src: Path) -> None:
    write_archives(imagenet, src, "val")
    (src / DEVKIT).write_bytes(gzip.compress(bytes(65 << 20)))
    assert "expected a devkit of at most" in refused(src)
    for damaged in (gzip.compress(bytes(5000))[:-9], b"\x1f\x8b" + bytes(50), b"", b"no devkit"):
        (src / DEVKIT).write_bytes(damaged)
        assert str(src / DEVKIT) in refused(src)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ([("1.JPEG", b"x")], "found '1.JPEG'"),
        ([("ILSVRC2012_val_00000009.JPEG", b"x")], "found 'ILSVRC2012_val_00000009.JPEG'"),
        ([("ILSVRC2012_val_00000000.JPEG", b"x")], "found 'ILSVRC2012_val_00000000.JPEG'"),
        ([("ILSVRC2012_val_00000001.JPEG", b"x")], "found 1: number 2 is missing"),
        ([("ILSVRC2012_val_00000001.JPEG", b"x"), ("a/ILSVRC2012_val_00000001.JPEG", b"x")], "twice"),
        ([], "expected images, found none"),
    ],
)
def test_validation_images_are_exactly_those_that_have_labels(
    files: list[tuple[str, bytes]], found: str, imagenet: Path, src: Path
) -> None:
    write_archives(imagenet, src, "devkit")
    (src / VAL).write_bytes(tar_of(files))
    assert found in refused(src)


# --- as many as there are ---------------------------------------------------------------------------------------------


def test_a_list_takes_a_few_hundred_bytes_per_image(src: Path) -> None:
    with (src / TRAIN).open("wb") as file:
        list_archive.write_archive(file, num_images=10_000, num_classes=20)
    tracemalloc.start()
    try:
        found = scan_ilsvrc(src)
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.num_sources == 10_000
    assert now / found.num_sources < 500
    assert peak / found.num_sources < 1000


def test_the_tool_that_lists_as_many_images_as_imagenet_has_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["list_archive.py", "--images", "1003", "--classes", "7", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    list_archive.main()
    assert json.loads(capsys.readouterr().out)["num_images"] == 1003
    assert not list(tmp_path.iterdir())
