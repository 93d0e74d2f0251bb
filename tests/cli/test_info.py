"""`shardio info`: what matters of a set on one screen, and the rest on request."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import change_split
from click.testing import CliRunner
from pictures import random_picture, write_jpeg

import shardio.cli.info as info_module
from shardio.changes.change import change
from shardio.changes.merge import merge
from shardio.cli.main import cli
from shardio.conversion.convert import convert
from shardio.conversion.writing.set_writer import ShardWriter
from shardio.loading.loader import ShardLoader
from shardio.reading.shardset import open_shards
from shardio.sets import index_file
from shardio.sets.index import count_classes, spread_of
from shardio.sets.selection import Selection
from shardio.sets.storage import FolderStorage


def called(*words: object) -> str:
    result = CliRunner().invoke(cli, list(map(str, words)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_info_fits_a_screen_and_ends_with_what_to_type_next(
    image_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(image_tree, tmp_path / "out", size=16)
    monkeypatch.chdir(tmp_path)
    lines = called("info", "out").splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("out: 18 samples, ")
    assert lines[0].endswith(" classes, published")
    assert any(line.startswith("  made by `shardio convert`: crop, bicubic, exact, shuffled, seed 0") for line in lines)
    assert lines[-1] == "next: shardio view out"


def test_the_line_to_copy_makes_a_loader(make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    out = make_set(23)
    monkeypatch.chdir(out.parent)
    (line,) = (line for line in called("info", out.name).splitlines() if line.startswith("  use "))
    with eval(line.removeprefix("  use "), {"ShardLoader": ShardLoader}) as loader:
        assert len(loader) == 1


@pytest.fixture
def counted(tmp_path: Path) -> Path:
    """train and val with 4, 3, 2, 1 and 0 samples of five classes, with sizes and columns; one cell is empty."""
    classes = [f"c{label}" for label in range(5)]
    columns = {"year": int, "score": float}
    with ShardWriter(tmp_path / "out", (2, 2, 3), classes=classes, columns=columns) as writer:
        for split in ("train", "val"):
            for i, label in enumerate([0, 0, 0, 0, 1, 1, 1, 2, 2, 3]):
                numbers = {"year": -i, "score": np.nan if i == 5 else i}
                pixels = np.full((2, 2, 3), i, np.uint8)
                writer.append(pixels, label, split=split, key=f"{split}/{i}", source_size=(i + 1, 7), columns=numbers)
    return tmp_path / "out"


def test_info_counts_the_classes_and_columns_of_the_main_split(counted: Path) -> None:
    lines = called("info", counted).splitlines()
    at = lines.index("  classes train has 5 classes, 1 of them without a sample")
    assert [line.split() for line in lines[at + 1 : at + 9]] == [
        ["rarest", "c4", "0,", "c3", "1"],
        ["most", "frequent", "c0", "4,", "c1", "3"],
        ["minimum", "median", "maximum", "missing"],
        ["samples", "per", "class", "0", "2", "4"],
        ["source_width", "7", "7", "7"],
        ["source_height", "1", "5.5", "10"],
        ["width", "/", "height", "0.7", "1.283", "7"],
        ["year", "-9", "-4.5", "0"],
    ]
    assert lines[at + 9].split() == ["score", "0", "4", "9", "1"]
    facts = json.loads(called("info", counted, "--json"))
    assert facts["splits"]["val"]["samples_of_labels"] == {"0": 4, "1": 3, "2": 2, "3": 1, "4": 0}
    spread = {"minimum": 0.0, "median": 4.0, "maximum": 9.0, "num_missing": 1}
    assert facts["splits"]["val"]["spreads"]["score"] == spread
    assert "next" not in facts


def test_labels_without_classes_are_counted_as_they_are() -> None:
    assert count_classes(np.array([-7, 9, 9]), 0) == [(-7, 1), (9, 2)]
    assert spread_of(np.array([np.nan])) is None


def test_infinities_are_text_in_json(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "out", (2, 2, 3), columns={"score": float}) as writer:
        for score in (-math.inf, math.inf):
            writer.append(np.zeros((2, 2, 3), np.uint8), 0, columns={"score": score})
    text = called("info", tmp_path / "out", "--json")
    facts = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    found = facts["splits"]["train"]["spreads"]["score"]
    assert found == {"minimum": "-inf", "median": "nan", "maximum": "inf", "num_missing": 0}


def test_verbose_info_tells_values_inside_of_lists_one_by_one(image_tree: Path, tmp_path: Path) -> None:
    convert(image_tree, tmp_path / "out", size=16)
    change(tmp_path / "out", tmp_path / "new", keep=Selection(random=0.5))
    text = called("info", tmp_path / "new", "-v")
    assert "  conversions.0.conversion.fit: crop\n" in text
    assert "  conversions.0.conversion.size: 16, 16\n" in text
    assert "{" not in text


def test_long_texts_of_a_set_are_cut(tmp_path: Path) -> None:
    names = ["a" * 10_000, "b"]
    with ShardWriter(tmp_path / "out", (2, 2, 3), classes=names, class_names=["\x1b[2J" * 99, "b"]) as writer:
        for label in range(2):
            writer.append(np.zeros((2, 2, 3), np.uint8), label)
    assert max(map(len, called("info", tmp_path / "out").splitlines()[1:-2])) <= 80


def test_an_index_that_is_no_more_what_was_published_is_told(make_set: Callable[..., Path]) -> None:
    out = make_set(5)
    data = bytearray((out / "train-index.npy").read_bytes())
    data[-1] ^= 1
    (out / "train-index.npy").write_bytes(data)
    assert "  classes not counted: " in called("info", out)


def test_a_large_index_is_not_fetched_from_a_server(
    make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = FolderStorage(make_set(5))
    manifest = storage.load_manifest()
    storage.name = "s3://bucket/set"
    monkeypatch.setattr(info_module, "_MOST_FETCHED_NBYTES", 100)
    assert info_module._count(storage, manifest, "train", False).reason.endswith("--verbose reads the index, 4.26 kB")
    assert info_module._count(storage, manifest, "train", True).classes
    storage.close()


@pytest.mark.parametrize(("num_each", "said"), [(1, "1 of each class"), (2, "2 of each class")])
def test_counts_of_one_are_singular_and_equal_counts_are_one(num_each: int, said: str, tmp_path: Path) -> None:
    for number in range(num_each):
        write_jpeg(tmp_path / "src" / "cat" / f"{number}.jpg", random_picture(np.random.default_rng(number), 8, 8))
    source = (tmp_path / "src", "--size", "8", "--labels", "folders")
    plan = called("plan", *source)
    assert said in plan
    convert(source[0], tmp_path / "out", size=8, labels="folders")
    info = called("info", tmp_path / "out")
    for text in (plan, info):
        assert re.search(r"\b1 class\b", text)
        assert re.search(r"\b1 shard\b", text)
        assert not re.search(r"\b1 (samples|images|shards|classes|workers)\b", text)


# --- --against -------------------------------------------------------------------------------------------------------


def differences(a: Path, b: Path) -> dict[str, Any]:
    result = CliRunner().invoke(cli, ["info", str(a), "--against", str(b), "--json"], catch_exceptions=False)
    facts = json.loads(result.stdout)
    assert (result.exit_code, facts["equal"]) == (bool(facts["differences"]), not facts["differences"])
    return facts["differences"]  # type: ignore[no-any-return]


def test_differences_are_told_by_key(counted: Path, tmp_path: Path) -> None:
    assert differences(counted, counted) == {}
    changed, values = tmp_path / "changed", np.arange(8)
    change(
        counted,
        changed,
        drop=Selection(indices=[0, 1]),
        labels={"train/5": "new", "train/6": "c0"},
        classes="new",
        arrays={"clip": values},
        split="train",
    )
    assert differences(counted, changed) == {
        "classes added": ["new"],
        "train: removed": ["train/0", "train/1"],
        "train: relabelled": ["train/5 from c1 to new", "train/6 from c1 to c0"],
        "train: arrays added": ["clip"],
    }
    back = differences(changed, counted)
    assert (back["train: added"], back["train: arrays removed"]) == (["train/0", "train/1"], ["clip"])
    change(changed, tmp_path / "other", arrays={"clip": values // 2 * 2}, split="train")
    assert differences(changed, tmp_path / "other") == {
        "train: with other values of clip": ["train/3", "train/5", "train/7", "train/9"]
    }
    change(counted, tmp_path / "turned", keep=Selection(indices=[0, 1, 2, 3, 4, 5, 6, 7, 9, 8]), split="val")
    change(tmp_path / "turned", tmp_path / "alone", drop=Selection(), split="train")
    assert differences(counted, tmp_path / "turned") == {"val: in another order": ["val/9"]}
    assert differences(counted, tmp_path / "alone")["splits removed"] == ["train"]
    text = CliRunner().invoke(cli, ["info", str(counted), "--against", str(changed)]).stdout
    assert "train: relabelled: 2: train/5 from c1 to new, train/6 from c1 to c0\n" in text


def test_classes_are_compared_by_name_and_pixels_and_columns_by_value(tmp_path: Path) -> None:
    def write(name: str, classes: list[str], second: int, shape: tuple[int, int, int] = (2, 2, 3), **more: Any) -> Path:
        with ShardWriter(tmp_path / name, shape, classes=classes, columns={"year": float}, **more) as writer:
            for i, label in ((0, "cat"), (second, "dog"), (1, "dog")):
                pixels = np.full(shape, i, np.uint8)
                writer.append(pixels, classes.index(label), key=label, columns={"year": np.nan if i == 0 else i})
        return tmp_path / name

    a = write("a", ["cat", "dog"], 5)
    assert differences(a, write("b", ["dog", "cat"], 5)) == {"classes with another number": ["cat", "dog"]}
    assert differences(a, write("c", ["cat", "dog"], 7)) == {
        "train: with other pixels": ["dog"],
        "train: with another year": ["dog"],
    }
    assert differences(a, write("d", ["cat", "dog"], 5, squashed=True)) == {"train: squashed in one set only": ["B"]}
    more = differences(a, write("m", ["bee", "cat", "dog"], 5))
    assert more == {"classes added": ["bee"], "classes with another number": ["cat", "dog"]}
    fewer = differences(tmp_path / "m", a)
    assert fewer == {"classes removed": ["bee"], "classes with another number": ["cat", "dog"]}
    named = write("n", ["cat", "dog"], 5, class_names=["cat", "hound"])
    assert differences(a, named) == {"classes with another readable name": ["dog"]}
    found = differences(a, write("e", ["cat", "dog"], 5, (2, 3, 3)))
    assert found["sample shape"] == ["(2, 2, 3) -> (2, 3, 3)"]


def test_arrays_and_columns_of_equal_bytes_and_another_type_differ(tmp_path: Path) -> None:
    def write(name: str, dtype: str, shape: tuple[int, ...], column: type) -> Path:
        arrays: dict[str, Any] = {"v": ("array", dtype, shape)}
        with ShardWriter(tmp_path / name, (2, 2, 3), columns={"year": column}, arrays=arrays) as writer:
            writer.append(np.zeros((2, 2, 3), np.uint8), 0, columns={"year": 0}, v=np.zeros(shape, dtype))
        return tmp_path / name

    a = write("a", "float32", (2,), int)
    assert differences(a, write("b", "int32", (2,), int)) == {"train: arrays of another type": ["v"]}
    assert differences(a, write("c", "float32", (2, 1), int)) == {"train: arrays of another type": ["v"]}
    assert differences(a, write("d", "float32", (2,), float)) == {"train: columns of another type": ["year"]}


# --- --write-index ---------------------------------------------------------------------------------------------------

KEYS = [b"a/1.png", os.fsencode('a/\u00fc,"x"\n.png'), b"b/\xff\xfe.png", b"=1+1", b"\xed\xa0\x80"]
NUMBERS = [0.1, math.nan, math.inf, -math.inf, 1e300]


def write_set(out: Path, keys: list[bytes]) -> Path:
    columns: dict[str, type] = {"year": int, "score": float}
    with ShardWriter(out, (2, 2, 3), classes=["x", "y,"], class_names=["an x", 'a "y"'], columns=columns) as writer:
        for split in ("train", "val"):
            for i, key in enumerate(keys):
                numbers = {"year": -i, "score": NUMBERS[i]}
                pixels = np.full((2, 2, 3), i, np.uint8)
                writer.append(pixels, i % 2, split=split, key=key, source_size=(i + 1, 7), columns=numbers)
    return out


def read_table(path: Path) -> list[dict[str, Any]]:
    """Reads a table as a stranger does, but for keys: as bytes."""
    if path.suffix == ".csv":
        text = io.StringIO(path.read_bytes().decode("utf-8", "surrogateescape"), newline="")
        return [{**row, "key": row["key"].encode("utf-8", "surrogateescape")} for row in csv.DictReader(text)]
    rows = pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()
    return [{**row, "key": row["key"] if isinstance(row["key"], bytes) else row["key"].encode()} for row in rows]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_every_sample_and_its_exact_key_can_be_read_back(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_file, "_CHUNK", 2)
    out = write_set(tmp_path / "out", KEYS)
    assert called("info", out, "--write-index", tmp_path / f"i.{kind}").endswith(": 10 samples\n")
    rows = read_table(tmp_path / f"i.{kind}")
    assert len(rows) == 10
    for place, row in enumerate(rows):
        split, i = ("train", "val")[place // 5], place % 5
        index = open_shards(out, split).index[i]
        assert row["key"] == KEYS[i]
        assert (row["split"], row["class"], row["class_name"]) == (split, ["x", "y,"][i % 2], ["an x", 'a "y"'][i % 2])
        for name in ("label", "source_width", "source_height", "crc32", "year"):
            assert int(row[name]) == index[name]
        assert (int(row["index"]), row["shard"], int(row["row"])) == (i, f"{split}-00000.npy", i)
        score = math.nan if row["score"] in ("", None) else float(row["score"])
        assert score == NUMBERS[i] or (math.isnan(score) and math.isnan(NUMBERS[i]))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_column_named_as_another_of_the_table_loses_no_number(kind: str, tmp_path: Path) -> None:
    names = ("split", "index", "class", "class_name", "shard", "row")
    with ShardWriter(tmp_path / "out", (2, 2, 3), classes=["x"], columns=dict.fromkeys(names, int)) as writer:
        writer.append(np.zeros((2, 2, 3), np.uint8), 0, columns={name: 7 + i for i, name in enumerate(names)})
    called("info", tmp_path / "out", "--write-index", tmp_path / f"i.{kind}")
    (row,) = read_table(tmp_path / f"i.{kind}")
    assert (row["split"], row["class"], row["shard"], int(row["row"])) == ("train", "x", "train-00000.npy", 0)
    assert [int(row[f"column:{name}"]) for name in names] == [7, 8, 9, 10, 11, 12]


def test_parquet_has_bytes_where_the_name_of_a_class_is_no_text(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with ShardWriter(tmp_path / "out", (2, 2, 3), classes=[os.fsdecode(b"\xff"), "b"]) as writer:
        for label in range(2):
            writer.append(np.full((2, 2, 3), label, np.uint8), label)
    index_file.write_index_file(tmp_path / "out", tmp_path / "i.parquet")
    rows = read_table(tmp_path / "i.parquet")
    assert [(row["class"], row["split"]) for row in rows] == [(b"\xff", "train"), (b"b", "train")]


def test_parquet_refuses_integers_that_floats_of_another_split_would_round(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    for split, kind, time in (("train", int, 2**60 + 1), ("val", float, 0.5)):
        with ShardWriter(tmp_path / split, (2, 2, 3), columns={"time": kind}) as writer:
            writer.append(np.full((2, 2, 3), len(split), np.uint8), 0, split=split, columns={"time": time})
    merge([tmp_path / "train", tmp_path / "val"], tmp_path / "out")
    with pytest.raises(ValueError, match=r"'time'.*\.csv"):
        index_file.write_index_file(tmp_path / "out", tmp_path / "i.parquet")
    index_file.write_index_file(tmp_path / "out", tmp_path / "i.csv")
    assert [row["time"] for row in read_table(tmp_path / "i.csv")] == [str(2**60 + 1), "0.5"]


def test_parquet_has_text_where_all_keys_are_text(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    for number, (keys, kind) in enumerate(((KEYS[:2], "string"), (KEYS, "binary"))):
        called("info", write_set(tmp_path / str(number), keys), "--write-index", tmp_path / "i.parquet")
        assert str(parquet.read_schema(tmp_path / "i.parquet").field("key").type) == kind


def test_the_table_of_a_changed_set_names_stored_rows_and_assigns_labels(
    make_set: Callable[..., Path], tmp_path: Path
) -> None:
    out = make_set(20)
    change_split(out, {}, np.array([5, 19, 6, 0]))
    called("info", out, "--write-index", tmp_path / "i.csv")
    for row, sample in zip(read_table(tmp_path / "i.csv"), open_shards(out), strict=True):
        stored = np.load(out / row["shard"])[int(row["row"])]
        np.testing.assert_array_equal(stored, sample.image)
    assert change(out, tmp_path / "new", labels=tmp_path / "i.csv").notes["num_relabelled"] == {"train": 0}


def test_a_table_that_cannot_be_written_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, target = write_set(tmp_path / "out", KEYS), tmp_path / "i.csv"
    target.write_text("before")
    for wrong, told in ((out / "i.csv", "outside of the set's folder"), (tmp_path / "x", r"\.csv or \.parquet")):
        with pytest.raises(ValueError, match=told):
            index_file.write_index_file(out, wrong)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(index_file, "_cells", fail)
    with pytest.raises(OSError, match=r"No space left on device: .*i\.csv"):
        index_file.write_index_file(out, target)
    assert target.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["i.csv"]
