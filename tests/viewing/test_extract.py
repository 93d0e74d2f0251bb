"""`shardio extract`: samples as files that other programs open."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import command
import numpy as np
import pytest
from arrays import change_split, some_arrays
from folders import flip
from halved import make_halved_set
from PIL import Image

from shardio.conversion.convert import convert
from shardio.conversion.writing.set_writer import ShardWriter
from shardio.reading.shardset import open_shards
from shardio.system.files import AtomicFile, target_of
from shardio.viewing.extract import png_of

call = partial(command.call, "extract")


def table(folder: Path) -> list[dict[str, str]]:
    text = (folder / "labels.csv").read_bytes().decode("utf-8", "surrogateescape")
    return list(csv.DictReader(io.StringIO(text, newline="")))


def test_pixels_masks_and_arrays_are_those_of_the_set(make_set: Callable[..., Path], tmp_path: Path) -> None:
    out = make_set(20)
    change_split(out, some_arrays(20, 6, 5))
    shards = open_shards(out)
    result = call(out, "--indices", "17,5", "-o", tmp_path / "some")
    assert result.exit_code == 0, result.output
    assert f"{tmp_path / 'some'}: 2 samples in {1 + 2 * len(shards.arrays)} files" in result.stdout
    rows = table(tmp_path / "some")
    assert [(row["file"], row["key"], row["label"], row["class"]) for row in rows] == [
        ("17-17.png", "c3/17.png", "3", "c3"),
        ("05-5.png", "c5/5.png", "5", "c5"),
    ]
    for row in rows:
        sample = shards[int(row["index"])]
        np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "some" / row["file"])), sample.image)
        for name, value in sample.arrays.items():
            if not value.ndim:  # in the table itself
                assert value == value.dtype.type(row[name])
                continue
            path = tmp_path / "some" / row[name]
            found = np.load(path) if path.suffix == ".npy" else np.asarray(Image.open(path))
            np.testing.assert_array_equal(found, value)
        assert row["mask"].endswith(".mask.png")


def test_pictures_of_yuv420_are_checked_as_stored_and_written_as_training_sees_them(tmp_path: Path) -> None:
    out = make_halved_set(tmp_path / "halved", 12)
    assert call(out, "--indices", "3,11", "-o", tmp_path / "some").exit_code == 0
    for row in table(tmp_path / "some"):
        picture = np.asarray(Image.open(tmp_path / "some" / row["file"]))
        np.testing.assert_array_equal(picture, open_shards(out)[int(row["index"])].image)
    assert command.call("report", out, "-o", tmp_path / "page.html").exit_code == 0
    flip(out / "train-00000.npy")
    error = call(out, "--indices", "0-11", "-o", tmp_path / "all").exception
    assert "train-00000.npy: sample 5: expected pixels with crc32" in str(error)


def test_labels_that_are_numbers_are_in_the_column_that_convert_reads(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "out", (6, 5, 3), labels="float32") as writer:
        for i in range(3):
            writer.append(np.full((6, 5, 3), i, np.uint8), i / 10, key=f"{i}.png")
    assert call(tmp_path / "out", "--where", "labels >= 0", "-o", tmp_path / "some").exit_code == 0
    convert(tmp_path / "some", tmp_path / "again", size=(6, 5), table=tmp_path / "some" / "labels.csv", workers=1)
    again = open_shards(tmp_path / "again")
    assert again.labels.dtype == np.float32
    assert {int(image[0, 0, 0]): label for image, label in again} == {i: np.float32(i / 10) for i in range(3)}


def test_an_array_named_as_another_column_of_the_table_has_a_column_of_its_own(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {"file": ("mask", "uint8", (2, 2)), "class": ("array", "uint8", ())}
    with ShardWriter(tmp_path / "out", (2, 2, 3), classes=["x"], arrays=arrays) as writer:
        writer.append(np.zeros((2, 2, 3), np.uint8), 0, **{"file": np.ones((2, 2), np.uint8), "class": np.uint8(1)})
    assert call(tmp_path / "out", "--indices", "0", "-o", tmp_path / "some").exit_code == 0
    (row,) = table(tmp_path / "some")
    assert (row["file"], row["class"]) == ("0-0.png", "x")
    assert (row["array:file"], row["array:class"]) == ("0-0.file.png", "1")


def test_what_a_killed_call_has_left_is_swept_and_files_of_others_are_not(
    make_set: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "some"
    folder.mkdir()
    for name in ("05-5.png", "05-5.mask.png", "labels.csv", "train-00000.npy"):
        AtomicFile(folder / name)
    (folder / ".05-5.png.tmp").touch()
    assert call(make_set(20), "--indices", "17,5", "-o", folder).exit_code == 0
    hidden = sorted(name for name in os.listdir(folder) if name.startswith("."))
    assert [target_of(name) for name in hidden] == ["", "train-00000.npy"]


def test_a_file_that_extract_has_not_written_is_not_replaced(make_set: Callable[..., Path], tmp_path: Path) -> None:
    out = make_set(20)
    assert call(out, "--indices", "5", "-o", tmp_path / "first").exit_code == 0
    name = next(name for name in os.listdir(tmp_path / "first") if name.endswith(".png"))
    (tmp_path / "first" / "labels.csv").unlink()  # as a killed call leaves it
    assert call(out, "--indices", "5,6", "-o", tmp_path / "first").exit_code == 0
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / name).write_bytes(b"theirs")
    assert f"{name}: expected no such file" in str(call(out, "--indices", "5", "-o", tmp_path / "second").exception)
    assert (tmp_path / "second" / name).read_bytes() == b"theirs"


def test_no_key_leads_out_of_the_folder(tmp_path: Path) -> None:
    keys = [b"../../x.png", b"/etc/passwd", b"..", b"\xff\n\x1b.png", b"a\rb", b"a" * 5000, b"", b"con.png", b".hidden"]
    with ShardWriter(tmp_path / "out", (2, 2, 3), classes=["a"]) as writer:
        for key in keys:
            writer.append(np.zeros((2, 2, 3), np.uint8), 0, key=key)
    before = {path.name for path in tmp_path.iterdir()}
    result = call(tmp_path / "out", "--key", "*", "-o", tmp_path / "some")
    assert result.exit_code == 0, result.output
    assert {path.name for path in tmp_path.iterdir()} - before == {"some"}
    files = sorted(os.listdir(tmp_path / "some"))
    assert len(files) == len(keys) + 1
    assert all(name.isascii() and name.isprintable() and len(name) < 100 for name in files)
    found = [row["key"].encode("utf-8", "surrogateescape") for row in table(tmp_path / "some")]
    assert found == [bytes(key) for key in open_shards(tmp_path / "out").index["key"]]


@pytest.mark.parametrize(
    ("file", "error"),
    [
        ("train-00000.npy", "sample 9: expected pixels with crc32"),
        ("train-mask-00000.npy", "train-mask-00000.npy: sample 6: expected mask with crc32"),
    ],
)
def test_a_damaged_sample_or_value_is_an_error_and_there_is_no_table(
    file: str, error: str, make_set: Callable[..., Path], tmp_path: Path
) -> None:
    out = make_set(20)
    change_split(out, some_arrays(20, 6, 5))
    flip(out / file)
    assert error in str(call(out, "--indices", "0-19", "-o", tmp_path / "some").exception)
    assert not (tmp_path / "some" / "labels.csv").exists()


def test_what_cannot_be_extracted_is_refused(make_set: Callable[..., Path], tmp_path: Path) -> None:
    out = make_set(5)
    for words, part in (
        ([], "choose samples"),
        (["--indices", "1", "--class", "c1"], "leave the others out"),
        (["--key", "x"], "no key matches 'x'"),
    ):
        result = call(out, *words, "-o", tmp_path / "some")
        assert part in result.output + str(result.exception)
    assert not (tmp_path / "some").exists()
    assert "inside the set" in str(call(out, "--indices", "1", "-o", out / "inside").exception)
    assert call(out, "--indices", "1", "-o", tmp_path / "some").exit_code == 0
    assert "already has a labels.csv" in str(call(out, "--indices", "2", "-o", tmp_path / "some").exception)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3, 4), "u1"), ((3, 4), "u2"), ((3, 4), "?"), *(((3, 4, n), "u1") for n in (1, 2, 3, 4)), ((3, 4, 1), "u2")],
)
def test_a_png_has_the_very_same_numbers(shape: tuple[int, ...], dtype: str) -> None:
    picture: Any = np.random.default_rng(0).integers(0, 2 if dtype == "?" else 60_000, shape).astype(dtype)
    found = np.asarray(Image.open(io.BytesIO(png_of(picture) or b"")))
    np.testing.assert_array_equal(found.reshape(shape), picture)


def test_what_png_does_not_have_is_no_png() -> None:
    for shape, dtype in (((3, 4, 5), "u1"), ((3, 4, 3), "u2"), ((3, 4), "i4"), ((3, 4), "f4")):
        assert png_of(np.zeros(shape, dtype)) is None
