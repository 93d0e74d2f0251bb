"""The index of a set as a table, and in numbers."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import change_split
from click.testing import CliRunner

from shardio.changes.change import change
from shardio.cli.main import cli
from shardio.conversion.writing.set_writer import ShardWriter
from shardio.reading.shardset import open_shards
from shardio.sets import export
from shardio.sets.export import export_index
from shardio.sets.statistics import count_classes, range_of, statistics_of

KEYS = [b"a/1.png", os.fsencode('a/\u00fc,"x"\n.png'), b"b/\xff\xfe.png", b"=1+1", b"\xed\xa0\x80"]
NUMBERS = [0.1, math.nan, math.inf, -math.inf, 1e300]


def write_set(out: Path, keys: list[bytes]) -> Path:
    with ShardWriter(
        *(out, (2, 2, 3)), classes=["x", "y,"], class_names=["an x", 'a "y"'], columns={"year": int, "score": float}
    ) as writer:
        for split in ("train", "val"):
            for i, key in enumerate(keys):
                columns = {"year": -i, "score": NUMBERS[i]}
                pixels = np.full((2, 2, 3), i, np.uint8)
                writer.append(pixels, i % 2, split=split, key=key, source_size=(i + 1, 7), columns=columns)
    return out


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return write_set(tmp_path / "out", KEYS)


def read(path: Path) -> list[dict[str, Any]]:
    """Reads a table as a stranger does, but for keys: as bytes."""
    if path.suffix == ".csv":
        text = io.StringIO(path.read_bytes().decode("utf-8", "surrogateescape"), newline="")
        return [{**row, "key": row["key"].encode("utf-8", "surrogateescape")} for row in csv.DictReader(text)]
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_bytes().splitlines()]
        return [{**row, "key": os.fsencode(row["key"])} for row in rows]
    rows = pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()
    return [{**row, "key": row["key"] if isinstance(row["key"], bytes) else row["key"].encode()} for row in rows]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_every_sample_and_its_exact_key_can_be_read_back(
    out: Path, tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "_CHUNK", 2)
    report = export_index(out, tmp_path / f"i.{kind}", kind)
    rows = read(tmp_path / f"i.{kind}")
    assert report.num_samples == len(rows) == 10
    assert tuple(rows[0]) == report.columns
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


def test_parquet_has_text_where_all_keys_are_text(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    for number, (keys, kind) in enumerate(((KEYS[:2], "string"), (KEYS, "binary"))):
        export_index(write_set(tmp_path / str(number), keys), tmp_path / "i.parquet", "parquet")
        assert str(parquet.read_schema(tmp_path / "i.parquet").field("key").type) == kind


def test_shard_and_row_say_where_the_pixels_of_a_changed_set_are(make_set: Callable[..., Path], tmp_path: Path) -> None:
    out = make_set(20)
    change_split(out, {}, np.array([5, 19, 5, 0]))
    export_index(out, tmp_path / "i.jsonl", "jsonl")
    for row, sample in zip(read(tmp_path / "i.jsonl"), open_shards(out), strict=True):
        stored = np.load(out / row["shard"], mmap_mode="r")[row["row"]]
        np.testing.assert_array_equal(stored, sample.image)


def test_relabel_reads_the_keys_of_an_exported_csv(out: Path, tmp_path: Path) -> None:
    export_index(out, tmp_path / "i.csv", "csv", ["train"])
    report = change(out, tmp_path / "new", labels=tmp_path / "i.csv", split="train")
    assert report.num_samples["train"] == 5


def test_a_failed_export_leaves_what_was_there(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "i.csv"
    target.write_text("before")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "_csv_cells", fail)
    with pytest.raises(OSError, match=r"No space left on device: .*i\.csv"):
        export_index(out, target, "csv")
    assert target.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["i.csv"]


def test_no_file_of_the_set_is_replaced(out: Path) -> None:
    with pytest.raises(ValueError, match="expected a file outside of the set's folder"):
        export_index(out, out / "rejects.jsonl", "jsonl")


def test_the_command_writes_to_the_standard_output(out: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["export-index", str(out), "-", "--format", "csv"])
    assert CliRunner().invoke(cli, ["export-index", str(out), str(tmp_path / "i.csv")]).exit_code == 0
    assert result.stdout_bytes == (tmp_path / "i.csv").read_bytes()
    assert CliRunner().invoke(cli, ["export-index", str(out), "-"]).exit_code == 2
    assert "ends in .csv, .jsonl or .parquet" in str(CliRunner().invoke(cli, ["export-index", str(out), "x"]).exception)


# --- in numbers -------------------------------------------------------------------------------------------------------


def test_counts_include_classes_without_samples_and_labels_without_classes() -> None:
    counts = count_classes(np.array([2, 2, 0, 3]), 5)
    assert (counts.range.least, counts.range.median, counts.range.most, counts.num_empty) == (0, 1, 2, 2)
    assert counts.rarest(2) == [(1, 0), (4, 0)]
    assert counts.most_frequent(2) == [(2, 2), (0, 1)]
    assert count_classes(np.array([-7, 9, 9]), 0).first(5) == [(-7, 1), (9, 2)]


def test_ranges_leave_out_what_is_no_number() -> None:
    assert range_of(np.array([])) is None
    assert range_of(np.array([math.nan])) is None
    found = range_of(np.array([3.0, math.nan, 1.0]))
    assert found is not None
    assert (found.least, found.median, found.most, found.num_missing) == (1, 2, 3, 1)


def test_statistics_of_a_split_are_those_of_its_index(out: Path) -> None:
    found = statistics_of(open_shards(out).index, 2)
    assert found.heights is not None
    assert found.widths is not None
    assert (found.heights.least, found.heights.most, found.widths.median) == (1, 5, 7)
    year = found.columns["year"]
    assert year is not None
    assert (year.least, year.median, year.most) == (-4, -2, 0)


def test_the_command_tells_statistics_as_text_and_as_json(out: Path) -> None:
    text = CliRunner().invoke(cli, ["stats", str(out)]).stdout
    assert all(len(line) <= 80 for line in text.splitlines()[1:] if not line.startswith((str(out), "next")))
    assert ["samples", "per", "class", "2", "2.5", "3"] in [line.split() for line in text.splitlines()]
    assert text.splitlines()[-1].startswith("next: shardio report ")
    facts = json.loads(CliRunner().invoke(cli, ["stats", str(out), "--json"]).stdout)
    assert facts["splits"]["val"]["rarest"][0] == {"label": 1, "class": "y,", "class_name": 'a "y"', "num_samples": 2}
    assert facts["splits"]["train"]["columns"]["score"]["num_missing"] == 1
