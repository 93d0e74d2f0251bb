"""The indexes of a set as one table, for other programs: CSV, JSON lines or parquet.

A key is bytes. CSV has them as they are; JSON and parquet take text in UTF-8 alone, so that JSON has a lone surrogate
for each byte that is none (`os.fsencode` makes bytes of it), and parquet has a column of bytes if any key needs it.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from shardio.format.layout import columns_of
from shardio.format.manifest import Manifest
from shardio.format.manifest_file import check_split
from shardio.sets.arrow import ParquetType, ParquetWriter, check_installed
from shardio.sets.index import read_index, read_order
from shardio.sets.names import is_url
from shardio.sets.storage import Storage, open_storage
from shardio.system.files import open_output
from shardio.system.opening import naming

Kind = Literal["csv", "jsonl", "parquet"]

# Rows that are in memory as text at a time.
_CHUNK = 1 << 16


@dataclass(frozen=True, eq=False)
class Names:
    """A column of text that has few different values: `names[codes[i]]` is that of row i."""

    names: Sequence[str]
    codes: NDArray[np.int64]


Column = Names | NDArray[Any]
"""Numbers; or keys, of type S, which no array of NumPy's strips of more than the zeros at their ends."""


@dataclass(frozen=True)
class ExportReport:
    num_samples: int
    columns: tuple[str, ...]


def kind_of_name(name: str) -> Kind:
    """Returns the kind of table that a file of this name has. Raises ValueError if the name does not tell."""
    for kind in get_args(Kind):
        if name.lower().endswith(f".{kind}"):
            found: Kind = kind
            return found
    raise ValueError(f"expected a name that ends in .csv, .jsonl or .parquet, found {name!r}: or give the kind")


def export_index(
    place: str | os.PathLike[str], target: Path | IO[bytes], kind: Kind, splits: Sequence[str] = ()
) -> ExportReport:
    """Writes a row for each sample of these splits, or of all, of a set wherever it lies.

    A file appears whole or not at all, and replaces one of its name. `target` may be a stream that is written to
    instead, but for parquet. Raises ValueError for a file among those of the set, SourceError if pyarrow is needed and
    not there, and what `sets.find.read_indexes` raises.
    """
    text = os.fspath(place)
    if kind == "parquet":
        check_installed(Path(text), "write")
    with closing(open_storage(text if is_url(text) else Path(text))) as storage:
        manifest = storage.load_manifest()
        for name in splits:
            check_split(storage.name, manifest, name)
        chosen = [name for name in manifest.splits if not splits or name in splits]
        if not isinstance(target, Path):
            return _write(storage, manifest, chosen, kind, target)
        if not is_url(storage.name) and os.path.realpath(target.parent) == os.path.realpath(storage.name):
            raise ValueError(f"{target}: expected a file outside of the set's folder, found one among its files")
        with open_output(target) as file, naming(target), open(os.dup(file), "wb", buffering=0) as stream:
            return _write(storage, manifest, chosen, kind, stream)


def _write(storage: Storage, manifest: Manifest, splits: Sequence[str], kind: Kind, stream: Any) -> ExportReport:
    # All indexes are read before the first byte is written: a stream has no way to take a row back.
    tables = [_table(storage, manifest, name) for name in splits]
    columns = tuple(dict.fromkeys(name for table in tables for name in table))
    write = {"csv": _write_csv, "jsonl": _write_jsonl, "parquet": _write_parquet}[kind]
    write(tables, columns, stream)
    return ExportReport(sum(manifest.splits[name].num_samples for name in splits), columns)


def _table(storage: Storage, manifest: Manifest, split: str) -> dict[str, Column]:
    """Returns the columns of a split's table by name."""
    content = manifest.splits[split]
    rows, stored = read_index(storage, manifest, split), read_order(storage, manifest, split)
    starts = np.cumsum([0, *(shard.num_samples for shard in content.shards)])
    shards = np.searchsorted(starts, stored, side="right") - 1
    classes = {"class": manifest.classes, "class_name": manifest.class_names}
    return {
        "split": Names([split], np.zeros(len(rows), np.int64)),
        "index": np.arange(len(rows)),
        "key": rows["key"],
        "label": rows["label"],
        **{name: Names(names, rows["label"]) for name, names in classes.items() if names},
        **{name: rows[name] for name in ("source_width", "source_height", "crc32")},
        **{name: rows[name] for name, _ in columns_of(rows.dtype)},
        "shard": Names([shard.file for shard in content.shards], shards),
        "row": stored - starts[shards],
    }


def _chunks(table: dict[str, Column]) -> Iterator[slice]:
    count = len(table["index"])  # type: ignore[arg-type]
    for first in range(0, count, _CHUNK):
        yield slice(first, min(first + _CHUNK, count))


def _texts(column: Column, rows: slice, write: Callable[[str], str]) -> list[str]:
    """Returns these values of a column of text, each as `write` has it."""
    if isinstance(column, Names):
        names = list(map(write, column.names))
        return [names[code] for code in column.codes[rows].tolist()]
    return [write(key.decode("utf-8", "surrogateescape")) for key in column[rows].tolist()]


def _is_text(column: Column) -> bool:
    return isinstance(column, Names) or column.dtype.kind == "S"


def _write_csv(tables: Sequence[dict[str, Column]], columns: Sequence[str], stream: IO[bytes]) -> None:
    """A number that is none (NaN), and a column that a split does not have, is an empty cell."""
    _write_lines(stream, [columns])
    for table in tables:
        for rows in _chunks(table):
            count = rows.stop - rows.start
            cells = (_csv_cells(table[name], rows) if name in table else [""] * count for name in columns)
            _write_lines(stream, zip(*cells, strict=True))


def _csv_cells(column: Column, rows: slice) -> list[Any]:
    if _is_text(column):
        return _texts(column, rows, str)
    assert not isinstance(column, Names)
    numbers: list[Any] = column[rows].tolist()
    return ["" if math.isnan(number) else number for number in numbers] if column.dtype.kind == "f" else numbers


def _write_lines(stream: IO[bytes], lines: Any) -> None:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(lines)
    _write_all(stream, text.getvalue().encode("utf-8", "surrogateescape"))


def _write_jsonl(tables: Sequence[dict[str, Column]], columns: Sequence[str], stream: IO[bytes]) -> None:
    """NaN is null, and a column that a split does not have is left out."""
    for table in tables:
        line = "{" + ", ".join(f"{json.dumps(name)}: %s" for name in table) + "}\n"
        for rows in _chunks(table):
            cells = [_json_cells(column, rows) for column in table.values()]
            _write_all(stream, "".join(line % row for row in zip(*cells, strict=True)).encode("ascii"))


def _json_cells(column: Column, rows: slice) -> list[Any]:
    if _is_text(column):
        return _texts(column, rows, json.dumps)
    assert not isinstance(column, Names)
    numbers: list[Any] = column[rows].tolist()
    return list(map(_json_float, numbers)) if column.dtype.kind == "f" else numbers


def _json_float(number: float) -> str:
    """JSON has no infinity, but readers take a number that is too large for one."""
    if math.isfinite(number):
        return repr(number)
    return "null" if math.isnan(number) else f"{'-' if number < 0 else ''}1e999"


def _write_all(stream: IO[bytes], data: bytes) -> None:
    """Writes every byte: a stream without a buffer may write less than asked."""
    view = memoryview(data)
    while view:
        view = view[stream.write(view) :]


def _write_parquet(tables: Sequence[dict[str, Column]], columns: Sequence[str], stream: IO[bytes]) -> None:
    types = {name: _parquet_type([table[name] for table in tables if name in table]) for name in columns}
    with ParquetWriter(stream, types) as writer:
        for table in tables:
            for rows in _chunks(table):
                writer.write(rows.stop - rows.start, [_parquet_cells(table.get(name), rows) for name in columns])


def _parquet_type(parts: Sequence[Column]) -> ParquetType:
    """Returns the type of a column that has these parts, one of each split."""
    if any(map(_is_text, parts)):
        return "text" if all(map(_is_utf8, parts)) else "bytes"
    return np.result_type(*(part.dtype for part in parts if not isinstance(part, Names)))


def _is_utf8(column: Column) -> bool:
    try:
        if isinstance(column, Names):
            "".join(column.names).encode()
        else:
            b"\n".join(column.tolist()).decode()
    except UnicodeError:
        return False
    return True


def _parquet_cells(column: Column | None, rows: slice) -> Any:
    if isinstance(column, Names):
        names = [name.encode("utf-8", "surrogateescape") for name in column.names]
        return [names[code] for code in column.codes[rows].tolist()]
    return None if column is None else column[rows]
