"""`convert --table FILE --column NAME`: numbers of a table become arrays of shape (), or the table is refused."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command import call
from conversions import OPTIONS, interrupted
from folders import everything, flip, hashes, put
from storages import rows, scan_tree

from shardio.conversion.collect import collect
from shardio.conversion.convert import convert
from shardio.conversion.options import ConvertOptions
from shardio.conversion.repair import repair
from shardio.conversion.sources.collection import Collection, ColumnTable, FileOrigin, Source
from shardio.conversion.sources.listed import describe
from shardio.conversion.sources.table import Table, read_table
from shardio.errors import ConvertError, SourceError
from shardio.reading.shardset import open_shards
from shardio.sets.verify import verify

SPLITS = {"train": (Source(b"n01/a.jpg", 0), Source(b"n01/b.jpg", 0)), "val": (Source(b"n02/c.jpg", 1),)}
PATHS = ["n01/a.jpg", "n01/b.jpg", "n02/c.jpg"]


def read(path: Path, *names: str) -> ColumnTable:
    """Returns the columns x, or those with the given names, of the sources in SPLITS."""
    table = Table(path, columns=names or ("x",))
    tree = Collection(FileOrigin(path.parent), ("n01", "n02"), SPLITS)
    columns = describe(tree, {"": read_table(table)}).columns
    assert columns is not None
    return columns


def digest(columns: ColumnTable) -> str:
    return columns.sha256([[source.key for source in sources] for sources in SPLITS.values()])


def write_csv(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", errors="surrogateescape")
    return path


def column(tmp_path: Path, *cells: str) -> np.ndarray[Any, Any]:
    """Returns the numbers that three cells of a CSV column become."""
    path = write_csv(tmp_path / "m.csv", "path,x", *(f"{name},{cell}" for name, cell in zip(PATHS, cells, strict=True)))
    return read(path).values["x"]


NAN = math.nan


@pytest.mark.parametrize(
    ("cells", "expected", "dtype"),
    [
        (("1", "-2", "+3"), [1, -2, 3], "<i8"),
        (("0", "007", " 4 "), [0, 7, 4], "<i8"),
        ((str((1 << 63) - 1), str(-(1 << 63)), "0"), [(1 << 63) - 1, -(1 << 63), 0], "<i8"),
        (("1", "2", "3.0"), [1.0, 2.0, 3.0], "<f8"),
        (("1", "", "3"), [1.0, NAN, 3.0], "<f8"),
        (("", " ", ""), [NAN, NAN, NAN], "<f8"),
        (("", "2", "3"), [NAN, 2.0, 3.0], "<f8"),
        (("1e3", "-.5", "5."), [1000.0, -0.5, 5.0], "<f8"),
        (("nan", "inf", "-Infinity"), [NAN, math.inf, -math.inf], "<f8"),
        ((str(1 << 53), str(-(1 << 53)), ""), [2.0**53, -(2.0**53), NAN], "<f8"),
        (("0.1", "1e-300", "123456789012345678.5"), [0.1, 1e-300, 123456789012345678.5], "<f8"),
    ],
)
def test_a_column_of_integers_alone_is_int64_and_any_other_float64(
    tmp_path: Path, cells: Sequence[str], expected: Sequence[float], dtype: str
) -> None:
    found = column(tmp_path, *cells)
    assert found.dtype.str == dtype
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("cells", "line", "message"),
    [
        (("1", "two", "3"), 3, "expected a number or an empty cell, found 'two'"),
        (("1", "1_000", "3"), 3, "expected a number or an empty cell, found '1_000'"),
        (("1.5", "٣", "3"), 3, "expected a number or an empty cell, found '٣'"),
        (("1", "0x10", "3"), 3, "expected a number or an empty cell, found '0x10'"),
        (("1", "2", "yes"), 4, "expected a number or an empty cell, found 'yes'"),
        (("1", "2", "NULL"), 4, "expected a number or an empty cell, found 'NULL'"),
        (("1", str(1 << 63), "3"), 3, "expected integers that fit in int64, found 9223372036854775808"),
        # Neither of these is a float64: they would silently come out as their neighbors.
        ((str((1 << 53) + 1), "", "3"), 2, "as other cells are fractions or empty, found 9007199254740993"),
        (("", "2", str(-(1 << 53) - 1)), 4, "as other cells are fractions or empty, found -9007199254740993"),
    ],
)
def test_a_cell_that_is_no_number_is_refused_with_its_line(
    tmp_path: Path, cells: Sequence[str], line: int, message: str
) -> None:
    with pytest.raises(SourceError) as caught:
        column(tmp_path, *cells)
    assert str(caught.value).startswith(f"{tmp_path / 'm.csv'}, line {line}: column 'x': ")
    assert message in str(caught.value)


PARQUET: dict[str, tuple[Any, list[Any], str]] = {
    "int8": (pa.array([1, -2, 3], pa.int8()), [1, -2, 3], "<i8"),
    "uint64": (pa.array([1, 2, (1 << 63) - 1], pa.uint64()), [1, 2, (1 << 63) - 1], "<i8"),
    "int64": (pa.array([-(1 << 63), 0, 1]), [-(1 << 63), 0, 1], "<i8"),
    "bool": (pa.array([True, False, True]), [1, 0, 1], "<i8"),
    "nullable": (pa.array([1, None, 3], pa.int32()), [1.0, NAN, 3.0], "<f8"),
    "no row": (pa.array([None, None, None], pa.int64()), [NAN, NAN, NAN], "<f8"),
    "nullable bool": (pa.array([True, None, False]), [1.0, NAN, 0.0], "<f8"),
    "half": (pa.array(np.array([0.5, 1, 2], np.float16)), [0.5, 1.0, 2.0], "<f8"),
    "float": (pa.array([0.25, None, math.inf], pa.float32()), [0.25, NAN, math.inf], "<f8"),
    "double": (pa.array([0.1, 0.2, NAN]), [0.1, 0.2, NAN], "<f8"),
}


def test_parquet_columns_have_the_types_of_csv_columns(tmp_path: Path) -> None:
    names = [f"c{number}" for number in range(len(PARQUET))]
    arrays = {name: array for name, (array, _, _) in zip(names, PARQUET.values(), strict=True)}
    pq.write_table(pa.table({**arrays, "path": PATHS}), tmp_path / "m")  # told by its content, not its name
    found = read(tmp_path / "m", *names).values
    for name, (kind, (_, expected, dtype)) in zip(names, PARQUET.items(), strict=True):
        assert found[name].dtype.str == dtype, kind
        np.testing.assert_array_equal(found[name], expected)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()], ids=str)
def test_texts_in_parquet_may_be_bytes(tmp_path: Path, kind: Any) -> None:
    put(tmp_path, *PATHS)
    columns = {"path": PATHS, "label": ["x", "y", "x"], "split": ["train", None, "val"]}
    table = pa.table({name: pa.array(cells).cast(pa.binary()).cast(kind) for name, cells in columns.items()})
    pq.write_table(table, tmp_path / "t.parquet")
    found = collect(tmp_path, ConvertOptions(table=tmp_path / "t.parquet"))
    assert rows(found) == [(b"n01/a.jpg", 0), (b"n01/b.jpg", 1)]
    assert rows(found, "val") == [(b"n02/c.jpg", 0)]


ROWS = [f"{path},1" for path in PATHS]
BAD: dict[str, tuple[Any, str]] = {
    "lists": (
        {"path": PATHS, "x": [[1], [2], [3]]},
        "row 0: column 'x': expected a number or an empty cell, found '[1]'",
    ),
    "paths of another type": ({"path": [1, 2, 3], "x": [1, 2, 3]}, "without an image in SRC, such as '1'"),
    "a missing path": ({"path": [*PATHS[:2], None], "x": [1, 2, 3]}, "row 2: expected a path of 1 to"),
}


def test_names_that_an_array_cannot_have_and_tables_that_are_no_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="expected a table, found nothing"):
        read(tmp_path / "m.csv")
    for name, message in (
        ("label", "column 'label': an array's name must not be"),
        ("labels", "column 'labels': labels must be"),
        ("my score", "found 'my score'"),
    ):
        with pytest.raises(SourceError, match=message):
            read(write_csv(tmp_path / "m.csv", f"path,{name}", *ROWS), name)


@pytest.mark.parametrize("name", BAD)
def test_parquet_of_other_types_is_refused_with_what_was_found(tmp_path: Path, name: str) -> None:
    content, message = BAD[name]
    pq.write_table(pa.table(content), tmp_path / "m")
    with pytest.raises(SourceError) as caught:
        read(tmp_path / "m")
    assert str(caught.value).startswith(str(tmp_path / "m"))
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500


def test_any_number_and_any_name_changes_the_digest(tmp_path: Path) -> None:
    texts = [["path,x", *ROWS], ["path,x", *(f"{row}.0" for row in ROWS)]]
    texts += [["path,x", *(f"{path},{2 if i == j else 1}" for j, path in enumerate(PATHS))] for i in range(3)]
    texts += [["path,x", f"{PATHS[0]},", *(f"{path},1" for path in PATHS[1:])]]
    found = {digest(read(write_csv(tmp_path / "m.csv", *text))) for text in texts}
    found.add(digest(read(write_csv(tmp_path / "m.csv", "path,y", *ROWS), "y")))
    assert len(found) == len(texts) + 1


def number_of(key: bytes) -> int:
    return sum(key) * 7919


def described(path: Path, *names: str) -> Table:
    return Table(path, columns=names or ("n", "share"))


def columns_for(image_tree: Path, path: Path, *more: str) -> Path:
    keys = [source.key for sources in scan_tree(image_tree).splits.values() for source in sources]
    rows = [f"{key.decode()},{number_of(key)},{'' if number_of(key) % 3 else 0.5}" for key in keys]
    return write_csv(path, "path,n,share", *rows, *more)


def test_every_sample_has_the_numbers_of_its_path(image_tree: Path, tmp_path: Path) -> None:
    (image_tree / "train" / "n02" / "n02_1.JPEG").write_bytes(b"")  # a row that is left out
    meta = columns_for(image_tree, tmp_path / "m.csv", "train/n09/z.JPEG,1,2")
    out = tmp_path / "out"
    for part in (1, 2):
        report = convert(image_tree, out, **OPTIONS, table=described(meta), max_bad=1, part=(part, 2))
    assert report.ignored == {"row without an image": 1}
    for split, count in (("train", 11), ("val", 6)):
        shards = open_shards(out, split)
        keys = shards.index["key"].tolist()
        assert len(keys) == count
        numbers, shares = (shards.values_of(name, np.arange(count)) for name in ("n", "share"))
        np.testing.assert_array_equal(numbers, np.array([number_of(key) for key in keys]), strict=True)
        np.testing.assert_array_equal(shares, np.array([NAN if number_of(key) % 3 else 0.5 for key in keys]))
    assert verify(out).ok
    convert(image_tree, tmp_path / "plain", **OPTIONS, max_bad=1)
    with_columns, plain = hashes(out), hashes(tmp_path / "plain")
    arrays = [f"{split}-{name}" for split in ("train", "val") for name in ("n", "share")]
    assert with_columns.keys() - plain.keys() == {f"{array}{end}.npy" for array in arrays for end in ("", "-crc32")}
    assert {name for name in plain if plain[name] != with_columns[name]} == {"manifest.json"}


@pytest.mark.parametrize(
    ("state", "change"), [("finished set", "another number"), ("unfinished conversion", "no columns")]
)
def test_going_on_with_other_columns_is_refused(image_tree: Path, tmp_path: Path, state: str, change: str) -> None:
    meta, out = columns_for(image_tree, tmp_path / "m.csv"), tmp_path / "out"
    if state == "finished set":
        convert(image_tree, out, **OPTIONS, table=described(meta))
    else:
        interrupted(image_tree, out, 10, table=described(meta))
    before = everything(out)
    other = write_csv(tmp_path / "other.csv", meta.read_text().replace("0.5", "0.25", 1).rstrip())
    with pytest.raises(ConvertError, match=rf"holds an? {state} .*\(the columns changed"):
        convert(image_tree, out, **OPTIONS, table=described(other) if change == "another number" else None)
    assert everything(out) == before
    shutil.copyfile(meta, other)  # the same numbers in another file are the same columns
    convert(image_tree, out, **OPTIONS, table=described(other))


def called(*words: object, code: int = 0) -> Any:
    """Returns what a command prints as JSON."""
    result = call(*words, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def test_a_column_is_an_array_from_end_to_end(image_tree: Path, tmp_path: Path) -> None:
    out, meta = tmp_path / "out", columns_for(image_tree, tmp_path / "m.csv")
    columns = ("--table", meta, "--column", "n", "--column", "share")
    options = ("--size", "16", "--workers", "1", *columns)
    assert called("plan", image_tree, *options)["nbytes"] == called("convert", image_tree, out, *options)["nbytes"]
    whole = hashes(out)
    arrays = called("info", out)["splits"]["val"]["arrays"]
    assert {name: (array["dtype"], array["shape"]) for name, array in arrays.items()} == {
        "n": ("<i8", []),
        "share": ("<f8", []),
    }

    flip(out / "train-n.npy", 4096)
    (problem,) = called("verify", out, code=1)["problems"]
    assert (problem["file"], problem["samples"]) == ("train-n.npy", [0])
    flip(out / "val-share-crc32.npy", 4096)
    (out / "train-00000.npy").unlink()
    with pytest.raises(ConvertError, match=r"train-n.npy, val-share-crc32.npy cannot be made again without .*--table"):
        repair(out, image_tree, workers=1)
    damaged = ["train-n.npy", "val-share-crc32.npy"]
    assert [name for name, sha256 in sorted(whole.items()) if hashes(out)[name] != sha256] == damaged
    assert called("repair", out, image_tree, *columns)["repaired"] == damaged
    assert hashes(out) == whole


def test_other_columns_than_those_of_the_set_are_not_repaired(image_tree: Path, tmp_path: Path) -> None:
    out, meta = tmp_path / "out", columns_for(image_tree, tmp_path / "m.csv")
    convert(image_tree, out, **OPTIONS, table=described(meta))
    other = write_csv(tmp_path / "other.csv", meta.read_text().replace(",n,", ",z,").rstrip())
    with pytest.raises(ConvertError, match=r"(?s)cannot be made again from .*'n'.*'z'.*--table"):
        repair(out, image_tree, table=described(other, "z", "share"))
    convert(image_tree, tmp_path / "plain", **OPTIONS)
    with pytest.raises(ConvertError, match=r"the columns changed"):
        repair(tmp_path / "plain", image_tree, table=described(meta))


def test_names_of_arrays_differ_in_more_than_case(image_tree: Path, tmp_path: Path) -> None:
    meta = columns_for(image_tree, tmp_path / "m.csv")
    meta.write_text(meta.read_text().replace(",share", ",N"))
    with pytest.raises(ValueError, match="'n' twice"):
        convert(image_tree, tmp_path / "out", **OPTIONS, table=described(meta, "n", "N"))
