"""Parquet in the style of Hugging Face: which columns and files are what, refusals, and the copies of its images."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command import called
from conversions import OPTIONS, convert_twice_at_once, interrupted, rejects, rejects_of, undisturbed
from disks import FailingDisk
from folders import everything, hashes, put, stamps
from numpy.typing import NDArray
from pictures import random_jpeg, random_picture, write_jpeg
from storages import hub_metadata, hub_table, keys, put_parquet, scan, write_parquet

from shardio.cli.view import refused_pictures
from shardio.conversion.collect import collect, read_again
from shardio.conversion.convert import Conversion, convert
from shardio.conversion.estimate import estimate
from shardio.conversion.options import ConvertOptions, Progress
from shardio.conversion.sources import collection, spool
from shardio.conversion.sources.collection import Collection, Source
from shardio.conversion.sources.doubt import DoubtError
from shardio.conversion.sources.parquet import list_parquet
from shardio.conversion.sources.spool import ParquetOrigin
from shardio.conversion.sources.table import Table
from shardio.errors import DecodeError, SourceError, SpaceError

CLASSES = ("n01", "n02", "n03")
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def listed(src: Path) -> Collection:
    return list_parquet(Table(src)).collect()


@pytest.fixture
def src(image_tree: Path, tmp_path: Path) -> Path:
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "README.md").write_text("x")
    (tmp_path / "hub" / ".gitattributes").write_text("x")
    return write_parquet(image_tree, tmp_path / "hub")


@pytest.fixture
def picture() -> bytes:
    return random_jpeg(0, 24, 32)


def test_refused_rows_are_listed_and_left_out_as_refused_files_are(
    image_tree: Path, tmp_path: Path, picture: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (collection, spool):
        monkeypatch.setattr(module, "MAX_SOURCE_NBYTES", 10_000)
    images = [picture, b"", None, b"<html>", picture[:100], bytes(10_001), picture]
    built = hub_table(images, [0] * 7)
    nothing = pa.array([None], IMAGE)
    built = pa.concat_tables([built, pa.table({"image": nothing, "label": [1]})])  # the struct itself is null
    src = put_parquet(tmp_path / "a.parquet", built)
    report = convert(src, tmp_path / "out", **OPTIONS, max_bad=6)
    assert dict(report.num_samples) == {"train": 2}
    assert estimate(src, size=16, seconds=5).refused == report.refused
    found = {line["key"]: (line["reason"], line["detail"]) for line in rejects(tmp_path / "out")}
    assert found.keys() == {*(f"n01/{i}.JPEG" for i in range(1, 6)), "n02/00000007"}
    no_image = ("empty", "expected the bytes of an image, found null: the row has no image")
    assert found["n01/2.JPEG"] == found["n02/00000007"] == no_image
    assert found["n01/1.JPEG"] == ("empty", "the file has no bytes")
    assert found["n01/5.JPEG"] == ("too large", "expected at most 10,000 bytes, found 10,001 bytes")
    assert [found[f"n01/{i}.JPEG"][0] for i in (3, 4)] == ["unsupported", "damaged"]


# The files, without their suffix, and the split of each; - if there are no splits.
NAMES = {
    "a hub": ("data/test-00000-of-00001 data/train-00000-of-00001 data/validation-00000-of-00001", "test train val"),
    "with hashes": ("train-00000-of-00002-0123456789abcdef train-00001-of-00002-fedcba9876543210", "train train"),
    "another split": ("extra-00000-of-00001 train-00000-of-00001", "extra train"),
    "folders": ("dev/0000 train/0000 train/0001", "val train train"),
    "folders of folders": ("a/test/part=1/x a/test/part=2/x", "test test"),
    "names": ("Train valid", "train val"),
    "numbered names": ("test_0 test_1", "test test"),
    "no split": ("a b/c", "- -"),
    "words that only begin so": ("trainer values", "- -"),
}


@pytest.mark.parametrize("name", NAMES)
def test_splits_and_keys_follow_from_the_names_of_files(tmp_path: Path, name: str) -> None:
    files, splits = NAMES[name]
    expected: dict[str, list[bytes]] = {split: [] for split in ("train", "val", "test", "extra") if split in splits}
    for file, split in zip(files.split(), splits.split(), strict=True):
        put_parquet(tmp_path / "src" / f"{file}.parquet", hub_table([b"x"], [0]))
        some = expected.setdefault(split.replace("-", "train"), [])
        some.append(f"{split}/n01/{'00000001' if some else '0.JPEG'}".removeprefix("-/").encode())
    collection = listed(tmp_path / "src")
    assert (keys(collection), list(collection.splits)) == (expected, list(expected))
    assert (collection.classes, collection.class_names) == (CLASSES, ())


def test_a_file_of_a_series_is_a_source_and_classes_may_be_named_by_another_file(tmp_path: Path) -> None:
    path = put_parquet(tmp_path / "train-00001-of-00009.parquet", hub_table([b"x"], [0]))
    assert keys(listed(path)) == {"train": [b"train/n01/0.JPEG"]}
    put_parquet(tmp_path / "two" / "a.parquet", hub_table([b"x"], [0], classes=()))
    put_parquet(tmp_path / "two" / "b.parquet", hub_table([b"x"], [2]))
    assert keys(listed(tmp_path / "two")) == {"train": [b"n01/0.JPEG", b"n03/0.JPEG"]}


def test_links_to_files_are_followed_as_downloads_are_cached_so(tmp_path: Path) -> None:
    put_parquet(tmp_path / "blobs" / "0123", hub_table([b"x"], [0]))
    (tmp_path / "src" / "data").mkdir(parents=True)
    (tmp_path / "src" / "data" / "train.parquet").symlink_to("../../blobs/0123")
    (tmp_path / "src" / "data" / "test.parquet").symlink_to("nowhere")
    os.mkfifo(tmp_path / "src" / "val.parquet")
    collection = listed(tmp_path / "src")
    assert keys(collection) == {"train": [b"train/n01/0.JPEG"]}
    assert collection.ignored == {"not a parquet file": 2}


def test_rows_without_a_label_are_ignored_and_counted_and_a_split_of_them_is_none(tmp_path: Path) -> None:
    """ImageNet's test split is like that: its labels are not public."""
    put_parquet(tmp_path / "src" / "train.parquet", hub_table([b"x"] * 4, [2, -1, None, 1]))
    put_parquet(tmp_path / "src" / "test.parquet", hub_table([b"x"] * 3, [-1] * 3))
    collection = listed(tmp_path / "src")
    assert keys(collection) == {"train": [b"train/n03/0.JPEG", b"train/n02/3.JPEG"]}
    assert collection.ignored == {"row without a label": 5}
    assert list(collection.origin.files) == [b"train.parquet"]  # the others' images are not copied
    put_parquet(tmp_path / "src" / "train.parquet", hub_table([b"x"], [-1]))
    with pytest.raises(SourceError, match="expected rows with a label, found none"):
        listed(tmp_path / "src")


def test_names_are_those_of_the_paths_or_else_numbers(tmp_path: Path) -> None:
    names: list[tuple[str | None, bytes]] = [
        ("a.JPEG", b"a.JPEG"),
        ("/home/me/b.JPEG", b"b.JPEG"),
        ("n01/c.JPEG", b"c.JPEG"),
        *((None, b"00000003"), ("", b"00000004"), ("folder/", b"00000005")),
        ("a.JPEG", b"00000006"),  # the same as the first path
        ("d\0.JPEG", b"00000007"),
        ("ü☃.png", "ü☃.png".encode()),
        *(("00000010", b"00000010"), (None, b"00000010_")),  # the number of the last row
    ]
    built = hub_table([b"x"] * len(names), [0] * len(names), [path for path, _ in names])
    put_parquet(tmp_path / "a.parquet", built, row_group_size=2)
    assert keys(listed(tmp_path)) == {"train": [b"n01/" + name for _, name in names]}
    images = pa.array([{"bytes": b"x"}] * 3, pa.struct([("bytes", pa.large_binary())]))
    bare = pa.table({"image": images, "label": [0, 1, 2]}).replace_schema_metadata(hub_metadata(CLASSES))
    put_parquet(tmp_path / "a.parquet", bare)
    numbers = [b"n01/00000000", b"n02/00000001", b"n03/00000002"]
    assert keys(listed(tmp_path / "a.parquet")) == {"train": numbers}
    with pytest.raises(SourceError, match="found none"):
        listed(tmp_path / "gone.parquet")


def test_parquet_beside_pictures_is_their_table_and_in_a_folder_is_named(tmp_path: Path, picture: bytes) -> None:
    for name in ("1.jpg", "2.jpg"):
        put(tmp_path / "photos", name, content=picture)
    put_parquet(tmp_path / "photos/metadata.parquet", pa.table({"file_name": ["1.jpg", "2.jpg"], "label": ["a", "b"]}))
    with pytest.raises(DoubtError, match=r"'metadata\.parquet' next to them") as caught:  # a fixture runs the commands
        scan(tmp_path / "photos")
    found = scan(tmp_path / "photos", table=caught.value.readings[0].options["--table"][0])
    assert (found.kind, found.classes) == ("tree", ("a", "b"))
    put_parquet(tmp_path / "photos/metadata.parquet", hub_table([picture], [0]))
    assert scan(tmp_path / "photos").kind == "parquet"
    put_parquet(tmp_path / "hub/mnist/train-00000-of-00001.parquet", hub_table([picture], [0]))
    with pytest.raises(DoubtError, match="found parquet files in 'mnist'") as caught:
        scan(tmp_path / "hub")
    assert scan(Path(caught.value.commands[0][1])).num_sources == 1


def test_scanning_reads_no_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images take the room and the time: they are read when it is known that they are wanted."""
    rng = np.random.default_rng(0)
    images = [rng.bytes(50_000) for _ in range(40)]
    path = put_parquet(tmp_path / "a.parquet", hub_table(images, [0] * 40), compression="none")
    before = _bytes_read()
    listed(path)
    assert _bytes_read() - before < 500_000 < path.stat().st_size


def _bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("rchar:")))


ONE = pa.array([{"bytes": b"x", "path": "a"}], IMAGE)
FEATURES = {"image_file": {"_type": "Image"}, "kind": {"_type": "ClassLabel"}}
METADATA = {b"huggingface": json.dumps({"info": {"features": FEATURES}}).encode()}
COLUMNS: dict[str, tuple[dict[str, Any], str]] = {
    "by name": ({"thumb": [b"x"], "image": ONE, "fold": [7], "label": [1]}, "image.bytes"),
    "by metadata": ({"a": [b"x"], "image_file": ONE, "fold": [7], "kind": [1]}, "image_file.bytes"),
    "by the name of labels": ({"img": [b"x"], "Class": pa.array([1], pa.int8()), "text": ["t"]}, "img"),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_are_found(tmp_path: Path, name: str) -> None:
    columns, image = COLUMNS[name]
    metadata = METADATA if name == "by metadata" else None
    put_parquet(tmp_path / "a.parquet", pa.table(columns).replace_schema_metadata(metadata))
    collection = listed(tmp_path)
    (source,) = collection.splits["train"]
    assert (collection.origin.image, source.label, collection.origin.read(source)) == (image, 1, b"x")


CATS = ["cat", "dog", "cat", None]
CHOICES: dict[str, tuple[dict[str, Any], list[Any] | str]] = {
    "texts": ({"label": CATS, "age": [20, 21, 22, 23]}, ["cat", "dog", "cat"]),
    "texts in a dictionary": ({"labels": pa.array(CATS).dictionary_encode()}, ["cat", "dog", "cat"]),
    "texts with blanks": ({"label": ["b ", " a", "", "b"]}, ["b", "a", "b"]),
    "texts that mark what is missing in CSV": ({"label": ["NA", "null", "nan", "N/A"]}, ["NA", "null", "nan", "N/A"]),
    "integers as texts": ({"label": ["2", "0", "2", "0"]}, ["2", "0", "2", "0"]),
    "bools": ({"label": [True, False, None, True]}, ["1", "0", "1"]),
    "fine_label": ({"fine_label": [1, 0, 1, -1]}, ["1", "0", "1"]),
    "label before others": ({"label": [0] * 4, "class_id": [1] * 4}, ["0"] * 4),
    "captions and sizes": ({"caption": list("abca"), "width": [1, 2, 2, 1], "image_id": [1, 1, 2, 2]}, []),
    "texts that hardly repeat": ({"title": list("abca")}, []),
    "a constant text": ({"source": ["web"] * 4}, []),
    "zeros before numbers": ({"label": ["01", "00", "01", "00"]}, ["1", "0", "1", "0"]),
    "split of the file": ({"label": [0] * 4, "split": ["train"] * 4}, ["0"] * 4),
    "an integer": ({"age": [20, 21, 22, 23]}, "'age'"),
    "a text that repeats": ({"species": CATS}, "'species'"),
    "both": ({"species": CATS, "age": [1, 2, 1, 2]}, "'species', 'age'"),
    "two names of labels": ({"fine_label": [1] * 4, "coarse_label": [0] * 4}, "'fine_label', 'coarse_label'"),
    "splits": ({"label": [0] * 4, "part": ["Training", "Training", "test", None]}, "'part'"),
    "another split": ({"label": [0] * 4, "split": ["test"] * 4}, "'split'"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_labels_are_in_a_column_with_their_name_and_other_columns_are_a_doubt(tmp_path: Path, name: str) -> None:
    columns, expected = CHOICES[name]
    src = put_parquet(tmp_path / "a.parquet", pa.table({"image": [b"x"] * 4, **columns}))
    if isinstance(expected, str):
        with pytest.raises(DoubtError, match=expected):
            listed(src)
        return
    collection = listed(src)
    found = [source.label for source in collection.splits["train"]]
    assert [collection.classes[label] for label in found if isinstance(label, int)] == expected
    unused = [column for column in columns if f"labels from {column!r}" not in collection.notes[0]]
    assert all(column in collection.notes[0] for column in unused)


def test_named_columns_have_the_labels_and_the_splits_of_images(tmp_path: Path) -> None:
    columns = {"age": [7, 8, 7, 8], "kind": list("baab"), "split": ["Test", "train", None, "train"]}
    src = put_parquet(tmp_path / "a.parquet", pa.table({"image": [b"x"] * 4, **columns}))
    found = scan(Table(src, label_columns=["kind"], split_column="split"))
    train = [b"train/a/00000000", b"train/a/00000001", b"train/b/00000002"]
    assert (keys(found), found.classes) == ({"train": train, "test": [b"test/b/00000000"]}, ("a", "b"))
    assert found.notes == ("a.parquet: images from 'image', labels from 'kind', splits from 'split', not used: 'age'",)
    found = scan(Table(tmp_path, label_columns=["age"], split_column="none"))
    assert [source.label for source in found.splits["train"]] == [7, 8, 7, 8]
    wrong: list[dict[str, Any]] = [{"label_columns": ["nope"]}, {"split_column": "nope"}, {"group_column": "nope"}]
    for options in (*wrong, {"label_columns": ["age", "kind"]}, {"columns": ["age"]}):
        with pytest.raises(SourceError, match=r"a\.parquet.*(nope|label-column)"):
            scan(Table(src, **{"split_column": "none", **options}))
    put_parquet(tmp_path / "b.parquet", pa.table({"image": [b"x"], "kind": [1]}))
    with pytest.raises(SourceError, match=r"row 0 of b\.parquet.* as other labels are"):
        scan(Table(tmp_path, label_columns=["kind"], split_column="none"))
    put_parquet(src, pa.table({"image": [b"x"] * 3, "part": ["", "train", "../x"]}))
    with pytest.raises(SourceError, match=r"(?s)a\.parquet: 1 row is wrong.*row 2: expected a split"):
        scan(Table(src, split_column="part"), labels="none")


def test_rows_of_a_group_are_on_one_side_of_val(tmp_path: Path) -> None:
    columns = {"image": [b"x"] * 40, "label": [0] * 40, "patient": [i // 4 for i in range(40)]}
    src = put_parquet(tmp_path / "a.parquet", pa.table(columns))
    found = collect(Table(src, group_column="patient"), ConvertOptions(val=0.4))
    groups = {split: {int(key[2:]) // 4 for key in some} for split, some in keys(found).items()}
    assert groups["train"].isdisjoint(groups["val"])
    assert len(groups["train"] | groups["val"]) == 10
    put_parquet(src, pa.table({**columns, "patient": [None, *columns["patient"][1:]]}))
    with pytest.raises(SourceError, match=r"(?s)a\.parquet: .*row 0: expected a group"):
        collect(Table(src, group_column="patient"), ConvertOptions(val=0.4))


def test_images_alone_and_images_beside_text_have_no_labels(tmp_path: Path) -> None:
    alone = pa.table({"image": [{"bytes": b"x", "path": "1.jpg"}, {"bytes": b"y", "path": None}]})
    put_parquet(tmp_path / "alone" / "train-00000-of-00001.parquet", alone)
    put_parquet(tmp_path / "text.parquet", pa.table({"text": ["a cat", "a dog"], "image": [b"x", b"y"]}))
    for name, names in (("alone", [b"train/1.jpg", b"train/00000001"]), ("text.parquet", [b"00000000", b"00000001"])):
        collection = listed(tmp_path / name)
        (sources,) = collection.splits.values()
        assert [(source.key, source.label) for source in sources] == [(key, None) for key in names]
        assert [collection.origin.read(source) for source in sources] == [b"x", b"y"]
        assert (collection.classes, collection.class_names) == ((), ())
    put_parquet(tmp_path / "soft.parquet", pa.table({"image": [b"x"], "label": [[0.1]]}))
    assert scan(tmp_path / "soft.parquet", labels="none").splits["train"][0].label is None


def test_without_pyarrow_the_error_says_how_to_get_it(src: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(SourceError, match=f'^{src / "data"}.*pip install "shardio\\[parquet\\]"'):
        scan(src)


def test_damage_among_the_images_is_refused_by_name_and_mended_files_go_on(
    image_tree: Path, src: Path, tmp_path: Path
) -> None:
    path = src / "data" / "train-00001-of-00003.parquet"
    sound = path.read_bytes()
    pq.write_table(pq.read_table(path), path, row_group_size=4, write_page_checksum=True)
    data = bytearray(path.read_bytes())
    data[1000] ^= 16
    path.write_bytes(data)
    with pytest.raises(SourceError, match=f"^{path}: damaged, or no parquet file: .*(CRC|crc|checksum)"):
        convert(src, tmp_path / "out", **OPTIONS)
    copies = {name: stamp for name, stamp in everything(tmp_path / "out").items() if name.endswith(".images")}
    assert len(copies) == 1  # the file before it
    path.write_bytes(sound)
    convert(src, tmp_path / "out", **OPTIONS)
    assert hashes(tmp_path / "out") == undisturbed(image_tree, tmp_path / "reference", **OPTIONS)


def test_mutated_files_are_read_or_refused(src: Path, tmp_path: Path) -> None:
    """Without checksums of pages, some damage can only be noticed by the image decoders, or not at all."""
    path = src / "data" / "train-00001-of-00003.parquet"
    sound = path.read_bytes()
    for seed in range(30):
        rng = np.random.default_rng(seed)
        data = bytearray(sound)
        # Half of them in the last kilobyte: the footer, which says where everything is.
        start = 0 if seed % 2 else len(data) - 1000
        for place in rng.integers(start, len(data), rng.integers(1, 6)):
            data[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(data)
        refusal = str(path.parent)
        try:
            found = listed(src)
            spooled = replace(found.origin, spool=tmp_path / f"{seed}")
            (tmp_path / f"{seed}").mkdir()
            spooled.prepare(lambda count: None)
            for source in found.splits["train"]:
                with contextlib.suppress(DecodeError):
                    assert found.origin.read(source) == spooled.read(source)
        except SourceError as error:
            refusal = str(error)
        assert str(path.parent) in refusal


def copies(out: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in out.glob(".convert/*.images")}


def test_progress_tells_of_the_copies_first_and_none_are_left_in_the_end(src: Path, tmp_path: Path) -> None:
    seen: list[tuple[Progress, int]] = []
    out = tmp_path / "out"
    convert(src, out, **OPTIONS, on_progress=lambda progress: seen.append((progress, len(copies(out)))))
    assert seen[-1][1] == 4
    assert ".convert" not in os.listdir(out)
    spooling = [progress for progress, _ in seen if progress.done == 0]
    assert [progress.spooled for progress in spooling] == sorted(progress.spooled for progress in spooling)
    notes = ("hub: images from 'image', labels from 'label'",)
    assert spooling[-1] == Progress(0, 0, 18, spooled=18, notes=notes)
    assert seen[-1][0] == Progress(18, 0, 18, spooled=18, notes=notes)


def test_a_conversion_that_is_interrupted_while_it_copies_goes_on(image_tree: Path, src: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def interrupt(progress: Progress) -> None:
        if progress.spooled == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(src, out, **OPTIONS, on_progress=interrupt)
    before = copies(out)
    assert len(before) == 1  # the last one that was reported was not yet published
    assert not list(out.glob(".convert/.*.images.*.tmp"))
    seen: list[dict[str, tuple[int, int]]] = []
    convert(src, out, **OPTIONS, on_progress=lambda _: seen.append(copies(out)))
    assert before.items() <= seen[0].items()
    assert hashes(out) == undisturbed(image_tree, tmp_path / "reference", **OPTIONS)


def test_two_conversions_into_one_folder_at_once_both_succeed(image_tree: Path, src: Path, tmp_path: Path) -> None:
    assert not convert_twice_at_once(src, tmp_path / "out")
    assert hashes(tmp_path / "out") == undisturbed(image_tree, tmp_path / "reference", **OPTIONS)


def test_copies_are_not_made_again_nor_at_all_where_every_shard_is_done(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    interrupted(src, out, 10)
    before = copies(out)
    assert len(before) == 4
    interrupted(src, out, 18)
    assert copies(out) == before
    assert len(stamps(out)) == 5
    with monkeypatch.context() as patch:
        patch.setattr(Conversion, "_publish", Mock(side_effect=KeyboardInterrupt))
        interrupted(src, out, 19)
    for path in out.glob(".convert/*.images"):
        path.unlink()
    assert convert(src, out, **OPTIONS).num_converted == 0


def test_a_file_that_changed_is_copied_and_its_shards_are_made_again(
    image_tree: Path, src: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    interrupted(src, out, 18)
    assert len(copies(out)) == 4
    changed = image_tree / "val" / "n02" / "n02_1.JPEG"
    write_jpeg(changed, random_picture(np.random.default_rng(99), 50, 50))
    write_parquet(image_tree, src, {"val": 1})
    assert convert(src, out, **OPTIONS).num_converted == 6
    convert(image_tree, tmp_path / "reference", **OPTIONS)
    assert hashes(out) == hashes(tmp_path / "reference")


def test_too_little_space_is_told_with_what_the_copies_need(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    shards = 6 * 4096 + 18 * 16 * 16 * 3
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, shards + 1000))
        with pytest.raises(SpaceError, match=rf"room for {shards:,} more bytes .* and [\d,]+ for copies of the images"):
            convert(src, out, **OPTIONS)
    assert not copies(out)
    interrupted(src, out, 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, shards))
    convert(src, out, **OPTIONS)  # copies that are there need no room again


def test_a_disk_that_is_full_while_copying_is_named_and_loses_nothing(
    image_tree: Path, src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("disks.DISK_CALLS", ("write", "fsync"))
    reference = undisturbed(image_tree, tmp_path / "reference", **OPTIONS)
    for first in (3, 11):
        out = tmp_path / f"out-{first}"
        disk = FailingDisk(first, errno.ENOSPC, for_good=True)
        with disk.installed(), pytest.raises(SpaceError, match="make room and run the same command again") as caught:
            convert(src, out, **OPTIONS)
        assert str(out) in str(caught.value)
        assert not [name for name in hashes(out) if name.endswith(".tmp")]
        convert(src, out, **OPTIONS)
        assert hashes(out) == reference


@pytest.fixture
def origin(src: Path) -> tuple[ParquetOrigin, list[Source]]:
    collection = listed(src)
    return collection.origin, [source for sources in collection.splits.values() for source in sources]


HARMS: dict[str, Callable[[NDArray[np.uint8]], NDArray[np.uint8]]] = {
    "none": lambda data: data,
    "images": lambda data: np.concatenate([data[: len(data) // 2] ^ 1, data[len(data) // 2 :]]),
    "table": lambda data: np.concatenate([data[:-400], data[-400:] ^ 1]),
    "cut": lambda data: data[:-7],
    "empty": lambda data: data[:0],
}


@pytest.mark.parametrize("harm", HARMS)
def test_every_image_is_read_from_its_copy_or_if_that_is_damaged_from_the_parquet_file_also_elsewhere(
    image_tree: Path, origin: tuple[ParquetOrigin, list[Source]], tmp_path: Path, harm: str
) -> None:
    direct, sources = origin
    files = [(image_tree / os.fsdecode(source.key)).read_bytes() for source in sources]
    spooled = replace(direct, spool=tmp_path)
    assert direct.copies_nbytes() == spooled.copies_nbytes() >= sum(map(len, files))
    counts: list[int] = []
    spooled.prepare(counts.append)
    assert (sum(counts), spooled.copies_nbytes()) == (18, 0)
    for path in tmp_path.glob("*.images"):
        path.write_bytes(HARMS[harm](np.fromfile(path, np.uint8)).tobytes())
    sent = pickle.loads(pickle.dumps(spooled))
    for source, file in [*zip(sources, files, strict=True)][::-1]:
        assert direct.read(source) == spooled.read(source) == sent.read(source) == file


def test_a_spool_that_was_removed_or_a_file_that_changed_is_no_fault_of_the_images(
    src: Path, origin: tuple[ParquetOrigin, list[Source]], tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError):
        replace(origin[0], spool=tmp_path).read(origin[1][0])
    os.utime(src / "data" / "train-00001-of-00003.parquet", ns=(1, 1))
    with pytest.raises(SourceError, match="changed"):
        origin[0].read(origin[1][5])


def test_a_file_that_changes_while_it_is_copied_is_refused(
    src: Path, origin: tuple[ParquetOrigin, list[Source]], tmp_path: Path
) -> None:
    spooled = replace(origin[0], spool=tmp_path / "spool")
    (tmp_path / "spool").mkdir()
    path = src / "data" / "train-00000-of-00003.parquet"

    def touch(count: int) -> None:
        os.utime(path, ns=(1, 1))

    with pytest.raises(SourceError, match=f"^{path}: .*changed"):
        spooled.prepare(touch)
    assert not list((tmp_path / "spool").iterdir())


def test_memory_is_bounded_by_a_row_group(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = [rng.bytes(20_000) for _ in range(600)]
    put_parquet(tmp_path / "src" / "a.parquet", hub_table(images, [0] * 600), row_group_size=20)
    del images
    collection = listed(tmp_path / "src")
    pool = pa.default_memory_pool()
    before = pool.bytes_allocated()
    most: list[int] = []
    replace(collection.origin, spool=tmp_path).prepare(lambda count: most.append(pool.bytes_allocated() - before))
    assert max(most) < 6 * 20 * 20_000 < 600 * 20_000


def test_a_plan_of_parquet_measures_decoding_and_counts_the_room_for_the_copies(src: Path, tmp_path: Path) -> None:
    report = estimate(src, tmp_path / "out", size=16, seconds=0.01)
    assert (report.source, report.num_sources, report.images_per_second > 0) == ("parquet", 18, True)
    assert report.spool_nbytes == report.source_nbytes
    needed = report.nbytes + (report.spool_nbytes or 0)
    assert [replace(report, free_nbytes=free).fits for free in (needed - 1, needed)] == [False, True]
    assert "of images out of parquet, until" in called("plan", src, "--size", "16", "--seconds", "0.01")
    assert not list(src.rglob("*.images"))


def test_columns_are_found_again_by_the_keys(tmp_path: Path, picture: bytes) -> None:
    columns = {"kind": list("aabb"), "x": list("ccdd"), "split": ["train", "test"] * 2}
    src = put_parquet(tmp_path / "a.parquet", pa.table({"image": [picture] * 4, **columns}))
    labeled = put_parquet(tmp_path / "labeled.parquet", hub_table([picture] * 2, [0, 1]))
    for table, labels in (
        (Table(src, split_column="none", label_columns=["x"]), None),
        (Table(src, split_column="split"), "none"),
        (Table(src, split_column="none"), "none"),
        (Table(labeled), None),
        (Table(labeled), "none"),
    ):
        made = scan(table, labels=labels)
        assert keys(read_again(table.path, {made.splits["train"][-1].key})) == keys(made)


def test_refused_rows_of_labeled_parquet_are_drawn(tmp_path: Path, picture: bytes) -> None:
    src = put_parquet(tmp_path / "a.parquet", hub_table([picture, picture[:-40]], [0, 1]))
    convert(src, tmp_path / "out", **{**OPTIONS, "max_bad": 1})
    (drawn,) = refused_pictures(src, rejects_of(tmp_path / "out"))
    assert drawn is not None
