"""Class names and columns of a set's own: their bytes, their checks, and every way of reading a set that has them."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from pictures import sample_pixels
from places import DATA

from shardio.cli.main import cli
from shardio.conversion.writing.set_writer import ShardWriter
from shardio.errors import FormatError
from shardio.format.layout import (
    MAX_COLUMNS,
    check_columns,
    columns_of,
    index_dtype,
    index_header,
    index_nbytes,
    key_field_nbytes,
)
from shardio.format.manifest_file import load_manifest
from shardio.loading.dataset import ShardDataset
from shardio.loading.loader import ShardLoader
from shardio.reading.file_reader import FileReader
from shardio.reading.shardset import open_shards
from shardio.sets.verify import verify

GOLDEN = DATA / "golden-columns"
"""Two samples, published once with class names and columns. No test writes here."""
GOLDEN_DIGEST = "7071cecd69a41c69d94927495c2b72d03490050262329406c21ce5a42a3c45de"
GOLDEN_SHA256 = {
    "manifest.json": "7f99684dcef52a7904d9c3d2395c52dbca36bea64dabac56c0122ae8076d90b1",
    "rejects.jsonl": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "train-00000.npy": "2e4687c0088ddcaedca680c63dce0cb9f2e1bda4a96baac8f08c048d905f6e89",
    "train-index.npy": "a1a3d67d311f96c3aa4620b3010ed4b2a9e3cee296ddb05b3dfba9df5a8e2fe4",
}
GOLDEN_COLUMNS = (("year", "<i8"), ("score", "<f8"))
CLASSES, CLASS_NAMES = ("n02124075", "n02099601"), ("Egyptian cat", "golden retriever")
SHAPE = (6, 5, 3)

# --- the bytes -------------------------------------------------------------------------------------------------------


def test_golden_files_are_the_published_ones() -> None:
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in GOLDEN.iterdir()} == GOLDEN_SHA256


def test_golden_index_is_a_header_and_two_rows_of_fifty_six_bytes() -> None:
    header = (
        b"\x93NUMPY\x01\x00\xf6\x0f{'descr': [('label', '<i8'), ('key', '|S20'), ('source_width', '<u4'), "
        b"('source_height', '<u4'), ('crc32', '<u4'), ('year', '<i8'), ('score', '<f8')], 'fortran_order': False, "
        b"'shape': (2,), }"
    )
    rows = (
        b"\0\0\0\0\0\0\0\0" b"n02124075/tom.png\0\0\0" b"\xf4\x01\0\0" b"\x77\x01\0\0" b"\x85\x7f\xf5\xdc"
        b"\xd9\x07\0\0\0\0\0\0" b"\0\0\0\0\0\0\xe8\x3f"
        b"\x01\0\0\0\0\0\0\0" b"n02099601/rex.png\0\0\0" b"\xf3\x01\0\0" b"\x4d\x01\0\0" b"\xc6\x83\x99\x98"
        b"\xff\xff\xff\xff\xff\xff\xff\xff" b"\0\0\0\0\0\0\xf8\x7f"
    )  # fmt: skip
    assert (GOLDEN / "train-index.npy").read_bytes() == header + b" " * (4095 - len(header)) + b"\n" + rows
    assert index_header(2, 20, GOLDEN_COLUMNS) == header + b" " * (4095 - len(header)) + b"\n"


def write_golden(out: Path) -> None:
    numbers: list[dict[str, int | float]] = [{"year": 2009, "score": 0.75}, {"score": math.nan, "year": -1}]
    columns: dict[str, Any] = {"year": int, "score": float}
    pixels = np.load(GOLDEN / "train-00000.npy")
    with ShardWriter(out, (2, 3, 3), classes=CLASSES, class_names=CLASS_NAMES, columns=columns) as writer:
        for i, (name, size) in enumerate([("tom", (375, 500)), ("rex", (333, 499))]):
            key = f"{CLASSES[i]}/{name}.png"
            writer.append(pixels[i], i, key=key, source_size=size, columns=numbers[i])


def test_the_same_samples_give_the_golden_bytes_again(tmp_path: Path) -> None:
    write_golden(tmp_path / "out")
    for name in set(GOLDEN_SHA256) - {"manifest.json"}:
        assert (tmp_path / "out" / name).read_bytes() == (GOLDEN / name).read_bytes(), name
    assert load_manifest(tmp_path / "out").digest == load_manifest(GOLDEN).digest == GOLDEN_DIGEST


@pytest.mark.parametrize("count", [0, 1, 7, MAX_COLUMNS])
def test_every_field_is_aligned_without_padding(count: int) -> None:
    columns = tuple((f"c{i}", "<f8" if i % 3 else "<i8") for i in range(count))
    for longest in range(1, 40):
        dtype = index_dtype(key_field_nbytes(longest), columns)
        assert dtype.fields is not None
        assert dtype.itemsize == 8 + key_field_nbytes(longest) + 12 + 8 * count
        assert dtype.itemsize % 8 == 0
        assert all(dtype.fields[name][1] % dtype[name].alignment == 0 for name in dtype.names or ())
        assert index_nbytes(3, key_field_nbytes(longest), columns) == 4096 + 3 * dtype.itemsize
        assert columns_of(dtype) == columns


def test_the_longest_header_is_one_page() -> None:
    columns = check_columns([("x" * 62 + f"{i:02}", "<f8") for i in range(MAX_COLUMNS)])
    header = index_header(1 << 53, 65532, columns)
    assert len(header) == 4096
    assert header.endswith(b" \n")


# --- what is refused -------------------------------------------------------------------------------------------------

BAD_COLUMNS: dict[str, list[Any]] = {
    "no pair": [["score"]],
    "a triple": [["score", "<f8", 3]],
    "a name of another type": [[1, "<f8"]],
    "an empty name": [["", "<f8"]],
    "a name that begins with a digit": [["1st", "<f8"]],
    "a name with a space": [["a b", "<f8"]],
    "a name with a line feed": [["a\n", "<f8"]],
    "a name that closes the quotes": [["a', '<f8'), ('b", "<f8"]],
    "a name with another alphabet": [["größe", "<f8"]],
    "a long name": [["x" * 65, "<f8"]],
    "the same name twice": [["a", "<f8"], ["a", "<i8"]],
    "a field's name": [["crc32", "<i8"]],
    "another type": [["a", "<f4"]],
    "an object": [["a", "|O"]],
    "another byte order": [["a", ">f8"]],
    "a type of another type": [["a", 8]],
    "a nested type": [["a", [["b", "<f8"]]]],
    "too many": [[f"c{i}", "<f8"] for i in range(MAX_COLUMNS + 1)],
}


@pytest.mark.parametrize("name", BAD_COLUMNS)
def test_other_columns_are_refused_with_what_was_found(name: str) -> None:
    with pytest.raises(ValueError, match=r"must .*; found") as caught:
        check_columns(BAD_COLUMNS[name])
    assert len(str(caught.value)) < 300


# --- sets that have them ---------------------------------------------------------------------------------------------


def numbers(i: int) -> dict[str, int | float]:
    return {"count": i * i - 50, "share": math.nan if i % 4 == 0 else i / 7}


@pytest.fixture
def with_columns(tmp_path: Path) -> Path:
    """23 samples in three shards, and 5 in another split: sample i has sample_pixels(i), label i % 7, numbers(i)."""
    out = tmp_path / "set"
    classes = [f"c{i}" for i in range(7)]
    columns: dict[str, Any] = {"count": int, "share": float}
    with ShardWriter(out, SHAPE, classes=classes, columns=columns, shard_nbytes=4096 + 10 * 90) as writer:
        for i in range(28):
            split = "train" if i < 23 else "val"
            writer.append(sample_pixels(i, SHAPE), i % 7, key=f"k/{i}.png", split=split, columns=numbers(i))
    return out


def test_the_index_has_the_columns_as_fields(with_columns: Path) -> None:
    for split, wanted in (("train", range(23)), ("val", range(23, 28))):
        shards = open_shards(with_columns, split)
        index = shards.index
        assert index.dtype.names == ("label", "key", "source_width", "source_height", "crc32", "count", "share")
        assert index["count"].dtype == np.int64
        assert index["count"].tolist() == [numbers(i)["count"] for i in wanted]
        np.testing.assert_array_equal(index["share"], [numbers(i)["share"] for i in wanted], strict=True)
        assert index["key"].tolist() == [b"k/%d.png" % i for i in wanted]
        assert index.flags.aligned
        assert index["share"].flags.aligned
        np.testing.assert_array_equal(shards[3].image, sample_pixels(wanted[3], SHAPE))


def test_every_reader_finds_the_labels_among_the_columns(with_columns: Path) -> None:
    labels = [i % 7 for i in range(23)]
    assert open_shards(with_columns).labels.tolist() == labels
    reader = FileReader(open_shards(with_columns))
    assert reader.column_of("label", np.arange(23)).tolist() == labels
    reader.close()
    assert [label for _, label in ShardDataset(with_columns)] == labels
    for io in ("mmap", "pread"):
        with ShardLoader(with_columns, 5, shuffle=False, tail="short", io=io, device="cpu") as loader:
            assert [label for _, batch in loader for label in batch.tolist()] == labels


def test_verify_takes_a_set_with_columns(with_columns: Path) -> None:
    assert verify(with_columns).ok
    index = with_columns / "train-index.npy"
    data = bytearray(index.read_bytes())
    row = open_shards(with_columns).index.dtype.itemsize
    data[4096 + 7 * row : 4096 + 7 * row + 8] = struct.pack("<q", 99)
    index.write_bytes(data)
    report = verify(with_columns)
    assert [problem.file for problem in report.problems] == ["train-index.npy"]


def test_a_damaged_sample_is_named_by_its_key_among_the_columns(with_columns: Path) -> None:
    shard = with_columns / "train-00001.npy"
    data = bytearray(shard.read_bytes())
    data[4096 + 3 * 90] ^= 1
    shard.write_bytes(data)
    (problem,) = verify(with_columns).problems
    assert problem.samples == (13,)
    assert "13 (k/13.png)" in problem.detail


def test_a_header_without_the_columns_is_refused(with_columns: Path) -> None:
    index = with_columns / "train-index.npy"
    data = index.read_bytes()
    index.write_bytes(data.replace(b"'share'", b"'shore'", 1))
    with pytest.raises(FormatError, match=r"header: expected b\"are"):
        open_shards(with_columns)


def test_class_names_are_the_classes_where_the_set_says_nothing_else(make_set: Callable[..., Path]) -> None:
    assert open_shards(GOLDEN).class_names == CLASS_NAMES
    assert open_shards(GOLDEN).classes == CLASSES
    plain = open_shards(make_set(7))
    assert plain.class_names == plain.classes
    assert plain.manifest.class_names == ()


def test_info_shows_names_and_columns(make_set: Callable[..., Path]) -> None:
    def info(*words: str | Path) -> str:
        return CliRunner().invoke(cli, ["info", *map(str, words)], catch_exceptions=False).stdout

    text = info(GOLDEN)
    assert "columns year, score\n" in text
    facts = json.loads(info(GOLDEN, "--json"))
    assert facts["class_names"] == list(CLASS_NAMES)
    assert facts["columns"] == {"train": {"year": "<i8", "score": "<f8"}}
    plain = json.loads(info(make_set(7), "--json"))
    assert (plain["class_names"], plain["columns"]) == ([], {"train": {}})
    assert "columns" not in info(make_set(7))


# --- ShardWriter -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": ["a"], "class_names": ["x", "y"]}, "class_names must be one for each of the 1 classes, found 2"),
        ({"class_names": ["x"]}, "class_names must be one for each of the 0 classes, found 1"),
        ({"columns": {"a": str}}, "columns must be int or float, found <class 'str'> for 'a'"),
        ({"columns": {"a": "<f8"}}, "columns must be int or float, found '<f8' for 'a'"),
        ({"columns": {"label": int}}, "a column must have a name of its own; found 'label', a field of every index"),
        ({"columns": {"a b": int}}, "a column's name must be"),
    ],
)
def test_a_set_that_no_reader_would_take_is_refused_at_once(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ShardWriter(tmp_path / "out", SHAPE, **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ({}, ValueError, r"expected the columns of the set \(n, x\), found none"),
        ({"n": 1}, ValueError, r"expected the columns of the set \(n, x\), found n"),
        ({"n": 1, "x": 2.0, "y": 3}, ValueError, r"expected the columns of the set \(n, x\), found n, x, y"),
        ({"n": 1.0, "x": 2.0}, TypeError, "float"),
        ({"n": 1 << 63, "x": 2.0}, ValueError, r"column 'n' must fit in int64, found 9223372036854775808"),
        ({"n": 1, "x": "two"}, ValueError, "two"),
    ],
)
def test_numbers_that_are_missing_or_do_not_fit_leave_no_trace(
    tmp_path: Path, columns: dict[str, Any], error: type[Exception], message: str
) -> None:
    kinds: dict[str, Any] = {"n": int, "x": float}
    with ShardWriter(tmp_path / "out", SHAPE, columns=kinds) as writer:
        writer.append(sample_pixels(0, SHAPE), 0, columns={"n": np.int32(-3), "x": np.float32(0.5)})  # type: ignore[dict-item]
        with pytest.raises(error, match=message):
            writer.append(sample_pixels(1, SHAPE), 0, columns=columns)
        with pytest.raises(ValueError, match="expected uint8 pixels"):
            writer.append(np.zeros((1, 1, 1), np.uint8), 0, columns={"n": 7, "x": 7})
        writer.append(sample_pixels(2, SHAPE), 0, columns={"x": 4, "n": (1 << 63) - 1})
    index = open_shards(tmp_path / "out").index
    assert index["n"].tolist() == [-3, (1 << 63) - 1]
    assert index["x"].tolist() == [0.5, 4.0]


def test_columns_for_a_set_without_any_are_refused(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "out", SHAPE) as writer:
        writer.append(sample_pixels(0, SHAPE), 0)
        with pytest.raises(ValueError, match=r"expected the columns of the set \(none\), found x"):
            writer.append(sample_pixels(0, SHAPE), 0, columns={"x": 1})
