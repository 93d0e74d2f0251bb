"""Writes the indexes of a set as one table for other programs: CSV, or parquet with pyarrow.

Keys are bytes. CSV gets the bytes unchanged; parquet gets a text column, or a bytes column if a key is not UTF-8. The
names of classes are written in the same way.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from shardio.format.layout import columns_of
from shardio.format.manifest import Manifest
from shardio.sets.arrow import check_installed
from shardio.sets.index import read_index, read_order
from shardio.sets.names import is_url
from shardio.sets.storage import Storage, open_storage
from shardio.system.files import open_output, write_all
from shardio.system.opening import naming

# Rows in memory as text at a time.
_CHUNK = 1 << 16

_NAMES = frozenset({"split", "index", "class", "class_name", "shard", "row"})
"""The table's columns that the index does not have. A set may have columns with these names."""

Table = dict[str, NDArray[Any]]
"""Columns of a split by name: numbers, keys (S), or text (object)."""


def write_index_file(place: str | os.PathLike[str], target: Path) -> int:
    """Writes a row for each sample of a set to a .csv or .parquet file. Returns the number of rows.

    The file appears whole or not at all, and replaces an existing file. Raises ValueError for another file extension,
    a target among the set's files or numbers that parquet cannot hold, SourceError if pyarrow is missing, and the
    errors of `read_indexes`.
    """
    if target.suffix.lower() not in (".csv", ".parquet"):
        raise ValueError(f"expected a name that ends in .csv or .parquet, found {target.name!r}")
    if is_parquet := target.suffix.lower() == ".parquet":
        check_installed(target, "write")
    with closing(open_storage(place)) as storage:
        if not is_url(storage.name) and os.path.realpath(target.parent) == os.path.realpath(storage.name):
            raise ValueError(f"{target}: expected a file outside of the set's folder, found one among its files")
        manifest = storage.load_manifest()
        tables = [_table(storage, manifest, split) for split in manifest.splits]
    columns = list(dict.fromkeys(name for table in tables for name in table))
    with open_output(target) as file, naming(target):
        if is_parquet:
            with open(os.dup(file), "wb", buffering=0) as stream:
                _write_parquet(tables, columns, stream)
        else:
            for text in _csv_texts(tables, columns):
                write_all(file, text.encode("utf-8", "surrogateescape"))
    return sum(len(table["index"]) for table in tables)


def _table(storage: Storage, manifest: Manifest, name: str) -> Table:
    split = manifest.splits[name]
    rows, stored = read_index(storage, manifest, name), read_order(storage, split)
    labels = {"label": rows["label"]} if split.index.has_label else {}
    classes = {"class": manifest.classes, "class_name": manifest.class_names} if labels else {}
    places = {}
    if split.shards:
        starts = np.cumsum([0, *(shard.num_samples for shard in split.shards)])
        shards = np.searchsorted(starts, stored, side="right") - 1
        files = np.array([shard.file for shard in split.shards], object)
        places = {"shard": files[shards], "row": stored - starts[shards]}
    table = {
        "split": np.full(len(rows), name, object),
        "index": np.arange(len(rows)),
        "key": rows["key"],
        **labels,
        **{column: np.array(names, object)[rows["label"]] for column, names in classes.items() if names},
        **{column: rows[column] for column in ("source_width", "source_height", "crc32")},
    }
    # No column of a set can have a colon in its name.
    own = {f"column:{name}" if name in _NAMES else name: rows[name] for name, _ in columns_of(rows.dtype)}
    return {**table, **own, **places}


def _csv_texts(tables: Sequence[Table], columns: Sequence[str]) -> Iterator[str]:
    """Yields the CSV text in pieces. NaN, and a column that the split lacks, become empty cells."""
    yield _csv_text([columns])
    for table in tables:
        for start in range(0, len(table["index"]), _CHUNK):
            count = len(table["index"][start : start + _CHUNK])
            cells = (_cells(table[name][start : start + count]) if name in table else [""] * count for name in columns)
            yield _csv_text(zip(*cells, strict=True))


def _csv_text(lines: Any) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def _cells(values: NDArray[Any]) -> list[Any]:
    cells: list[Any] = values.tolist()
    if values.dtype.kind == "S":
        return [key.decode("utf-8", "surrogateescape") for key in cells]
    return ["" if math.isnan(number) else number for number in cells] if values.dtype.kind == "f" else cells


def _write_parquet(tables: Sequence[Table], columns: Sequence[str], stream: IO[bytes]) -> None:
    import pyarrow
    import pyarrow.parquet

    schema = pyarrow.schema((name, _arrow_type([t[name] for t in tables if name in t])) for name in columns)
    with pyarrow.parquet.ParquetWriter(stream, schema) as writer:
        for table in tables:
            arrays = [
                pyarrow.nulls(len(table["index"]), field.type)
                if field.name not in table
                else pyarrow.array(table[field.name], pyarrow.binary()).cast(field.type)
                if table[field.name].dtype.kind == "S"
                else _cast(table[field.name], field)
                for field in schema
            ]
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema), row_group_size=_CHUNK)


def _cast(values: NDArray[Any], field: Any) -> Any:
    import pyarrow

    if values.dtype.kind == "O" and field.type == pyarrow.binary():
        return pyarrow.array([text.encode("utf-8", "surrogateescape") for text in values.tolist()], field.type)
    try:
        return pyarrow.array(values).cast(field.type)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(
            f"column {field.name!r}: expected integers that a float64 can hold, as another split has floats in this "
            f"column, found: {error}: write a .csv file"
        ) from None


def _arrow_type(parts: Sequence[NDArray[Any]]) -> Any:
    """Returns the arrow type of a column made of `parts`, one for each split."""
    import pyarrow

    if parts[0].dtype.kind in "OS":
        try:
            for text in {text for part in parts for text in part.tolist()}:
                os.fsdecode(text).encode()
        except UnicodeError:
            return pyarrow.binary()
        return pyarrow.string()
    return pyarrow.from_numpy_dtype(np.result_type(*parts))
