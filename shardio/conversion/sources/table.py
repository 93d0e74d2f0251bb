"""Reads tables that describe images: a row for each image, with its path and perhaps labels, a split and numbers.

A table is CSV, TSV, JSON lines or parquet, or a list of lines `PATH` or `PATH LABEL`.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from shardio.conversion.images.headers import has_image_suffix
from shardio.conversion.sources.names import DEFAULT_SPLIT, split_name
from shardio.errors import SourceError, counted
from shardio.format.layout import RowType, check_array_name, check_kind, is_split_name
from shardio.format.parse import first_repeated
from shardio.sets.given import open_parquet, read_batches

# Names of columns, in any case. The first is taken where it is there; of the others there may be only one.
PATH_COLUMNS = (
    *("path", "filename", "file_name", "filepath", "file_path", "file", "image", "image_path", "img", "img_path"),
    *("image_id", "image_name", "img_id", "id", "name"),
)
LABEL_COLUMNS = ("label", "class", "class_name", "category", "target", "cls")
SPLIT_COLUMNS = ("split", "subset", "set")

_MAX_PATH_NBYTES = 4096  # the longest that Linux takes
_MAX_LINE_NBYTES = 1 << 16
_MOST_KEPT, _MOST_SHOWN = 1000, 10


@dataclass(frozen=True)
class Table:
    """A file with a row for each image: its path, and perhaps a label, a split and numbers.

    - `file`: CSV or TSV with names of columns, JSON lines, parquet; or a list of lines `PATH` or `PATH LABEL`
    - `root`: if the table is SRC, the folder that paths are relative to; by default the folder of the file
    - `path_column`, `label_columns`, `split_column`: names of columns, by default guessed. Labels that are names or
      integers become classes. Other numbers become float32 labels, and several columns a vector
    - `columns`: names of columns of numbers to store as arrays

    A Table can also be passed as SRC.
    """

    file: str | os.PathLike[str]
    root: str | os.PathLike[str] | None = None
    path_column: str = ""
    label_columns: Sequence[str] = ()
    split_column: str = ""
    columns: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("label_columns", "columns"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be a list of column names, found {getattr(self, name)!r}")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        used = [name for name in (self.path_column, *self.label_columns, self.split_column) if name]
        if (repeated := first_repeated(used)) is not None:
            raise ValueError(f"columns of paths, labels and splits must be distinct, found {repeated!r} twice")

    def __fspath__(self) -> str:
        return os.fspath(self.file)

    @property
    def path(self) -> Path:
        return Path(os.path.abspath(self.file))


Tables = str | os.PathLike[str] | Table | Mapping[str, str | os.PathLike[str] | Table]
"""A table, given as a Table or a path; or a dict with a table for each split."""


class Row(NamedTuple):
    """A row of a table that has a valid path and split."""

    table: Contents
    line: int
    path: str
    split: str
    """"" if the table has no column of splits."""
    label: Any
    """The label as written: a value, a tuple of the values of several columns, or None for empty cells."""
    numbers: tuple[Any, ...]
    """The cells in `columns` of the table."""

    def refuse(self, expected: str, found: object) -> None:
        self.table.faults.add(self.line, expected, found)


@dataclass(frozen=True, eq=False)
class Contents:
    """The valid rows of a table."""

    path: Path
    faults: Faults
    label_names: tuple[str, ...]
    columns: tuple[str, ...]
    note: str
    """Says which columns are read as paths, labels and splits."""
    rows: list[Row] = field(default_factory=list)


def read_table(table: Table, *, unlabeled: bool = False) -> Contents:
    """Returns the valid rows of a table, without labels if `unlabeled`. Notes errors in other rows as `faults`."""
    names, rows, faults = read_rows(table.path, (*PATH_COLUMNS, *LABEL_COLUMNS))
    path = _column(table, names, "path", table.path_column, PATH_COLUMNS)
    if path is None:
        way = "pass `--path-column NAME`, or put the names of columns into the first line"
        raise SourceError(f"{table.path}: expected a column of paths, found the columns {_listed(names)}: {way}")
    split = _column(table, names, "split", table.split_column, SPLIT_COLUMNS)
    labels = {} if unlabeled else _label_columns(table, names, path, split)
    stored = {name: _existing(table, names, name) for name in table.columns}
    for name in stored:
        try:
            check_kind(check_array_name(name), "array", RowType("<f8", ()), None)
        except ValueError as error:
            raise SourceError(f"{table.path}: column {name!r}: {error}") from None
    note = f"paths from {names[path]!r}, {f'labels from {_listed(labels)}' if labels else 'no labels'}"
    if split is not None:
        note += f", splits from {names[split]!r}"
    content = Contents(table.path, faults, tuple(labels), tuple(stored), note)
    first: dict[str, tuple[str, int]] = {}  # of each split the word for it, and its line
    for line, cells in rows:
        given = "" if split is None else _present(cells[split])
        word = DEFAULT_SPLIT if given is None else str(given)
        where, name = cells[path], split_name(word)
        known, there = first.setdefault(name, (word, line))
        text = "" if where is None else os.fsdecode(where) if isinstance(where, bytes) else str(where)
        if not text or "\0" in text or len(os.fsencode(text)) > _MAX_PATH_NBYTES:
            faults.add(line, f"a path of 1 to {_MAX_PATH_NBYTES:,} bytes without NUL", where)
        elif word and not is_split_name(name):
            faults.add(line, "a split named with letters, digits, '.', '_' and '-'", word)
        elif known.lower() != word.lower():
            faults.add(line, f"the split {known!r}, as in {faults.word} {there}", word)
        else:
            values = tuple(_present(cells[number]) for number in labels.values())
            label = None if all(value is None for value in values) else values if len(values) > 1 else values[0]
            content.rows.append(Row(content, line, text, name, label, tuple(cells[at] for at in stored.values())))
    return content


def _present(cell: Any) -> Any:
    """Returns the value of a cell, text without spaces around it; None if the cell is empty or NaN."""
    if isinstance(cell, str):
        return cell.strip() or None
    return None if isinstance(cell, float) and cell != cell else cell


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))[:200] or "none"


def _existing(table: Table, names: Sequence[str], name: str) -> int:
    if names.count(name) != 1:
        found = f"{names.count(name)} columns of this name" if name in names else f"the columns {_listed(names)}"
        raise SourceError(f"{table.path}: expected one column {name!r}, found {found}")
    return names.index(name)


def _column(table: Table, names: Sequence[str], what: str, given: str, known: tuple[str, ...]) -> int | None:
    """Returns the index of the column `given`, or, if that is "", of the column with a name in `known`; or None."""
    if given:
        return _existing(table, names, given)
    lower = [name.strip().lower() for name in names]
    found = [name for name in lower if name in known]
    if found.count(known[0]) == 1:
        return lower.index(known[0])
    if len(found) > 1 and known is PATH_COLUMNS:  # an id beside a path
        found = [name for name in found if name in PATH_COLUMNS[:10]] or found
    if len(found) > 1:
        way = f"pass the right one by `--{what}-column`"
        raise SourceError(f"{table.path}: expected one column of {what}s, found {', '.join(found)}: {way}")
    return lower.index(found[0]) if found else None


def _label_columns(table: Table, names: Sequence[str], path: int, split: int | None) -> dict[str, int]:
    """Returns the index of each column of labels, by the column's name; {} if the table has no labels."""
    if table.label_columns:
        return {name: _existing(table, names, name) for name in table.label_columns}
    if (label := _column(table, names, "label", "", LABEL_COLUMNS)) is not None:
        return {names[label]: label}
    if table.columns:
        return {}
    rest = [number for number in range(len(names)) if number not in (path, split)]
    if len(rest) > 1:
        way = "pass `--label-column` (several columns are a vector of numbers), or `--labels none`"
        found = _listed(names[number] for number in rest)
        raise SourceError(f"{table.path}: expected one column of labels, found {found}: {way}")
    return {names[number]: number for number in rest}


# --- rows -------------------------------------------------------------------------------------------------------------


class Faults:
    """Collects the errors in a file or a folder; `word` is a noun for the parts, such as "line" or "image"."""

    def __init__(self, path: str | Path, word: str) -> None:
        self.path = path
        self.word = word
        self._count = 0
        self._kept: list[tuple[int, str]] = []

    def add(self, where: int | str, expected: str, found: object) -> None:
        """Adds an error. `where` is the number of a line or row, or the name of another part."""
        self._count += 1
        if self._count <= _MOST_KEPT:
            line = where if isinstance(where, int) else 0
            self._kept.append((line, f"{self.word} {where}: expected {expected}, found {found!r:.200}"))

    def check(self) -> None:
        if self._count:
            shown = [text for _, text in sorted(self._kept)[:_MOST_SHOWN]]
            more = [f"and {self._count - _MOST_SHOWN:,} more"] if self._count > _MOST_SHOWN else []
            wrong = f"{counted(self._count, self.word)} {'is' if self._count == 1 else 'are'} wrong"
            raise SourceError(f"{self.path}: {wrong}:", *shown, *more)


Rows = Iterator[tuple[int, list[Any]]]
"""Yields (number, cells) for each row: the number of its line in a text file, or of its row in a parquet file; and its
values, which are texts unless the table is JSON or parquet. None stands for a missing value."""


def read_rows(path: Path, known: tuple[str, ...]) -> tuple[list[str], Rows, Faults]:
    """Returns (the names of a table's columns, an iterator over its rows, the errors in the rows that it has read).

    A text file is CSV or TSV if its suffix says so, or if a column in its first line has a name in `known`; otherwise
    it is a list of lines.
    """
    if not path.is_file():
        raise SourceError(f"{path}: expected a table, found {'no regular file' if path.exists() else 'nothing'}")
    with path.open("rb") as binary:
        if binary.read(4) == b"PAR1":
            with open_parquet(path) as parquet:
                names = list(parquet.schema_arrow.names)
            return names, _parquet_rows(path), Faults(path, "row")
    faults = Faults(path, "line")
    first = next(_lines(path), "")
    if first.lstrip().startswith("{"):
        names = list(_parsed(first) or ())
        return names, _json_rows(path, names, faults), faults
    delimiter = "\t" if "\t" in first else ","
    names = [name.strip() for name in first.split(delimiter)]
    with contextlib.suppress(csv.Error):  # the names are no CSV
        names = [name.strip() for name in next(csv.reader(_lines(path), delimiter=delimiter, strict=True), [])] or names
    if path.suffix.lower() in (".csv", ".tsv") or any(name.lower() in known for name in names):
        return names, _csv_rows(path, delimiter, len(names), faults), faults
    # Lines `PATH`, if the first is one word or ends as images' names do, or else `PATH LABEL`.
    first = next((line for line in _lines(path) if line.strip()), "")
    names = ["path"] if _is_path(first.strip()) else ["path", "label"]
    return names, _listed_rows(path, len(names) - 1, known, faults), faults


def _lines(path: Path) -> Iterator[str]:
    # utf-8-sig, as spreadsheets begin their files with a byte order mark; paths need not be UTF-8.
    try:
        file = path.open(encoding="utf-8-sig", errors="surrogateescape", newline="")
    except OSError as error:
        raise SourceError(f"{path}: cannot read the table: {error.strerror}") from None
    number = 0
    with file:
        while line := file.readline(_MAX_LINE_NBYTES):
            number += 1
            if len(line) == _MAX_LINE_NBYTES:
                most = f"fewer than {_MAX_LINE_NBYTES:,} characters"
                raise SourceError(f"{path}: line {number}: expected {most}, found a longer line")
            yield line


def _csv_rows(path: Path, delimiter: str, width: int, faults: Faults) -> Rows:
    records = csv.reader(_lines(path), delimiter=delimiter, strict=True)
    try:
        next(records)
        for record in records:
            if len(record) == width:
                yield records.line_num, record
            elif record:
                faults.add(records.line_num, f"{width} fields", delimiter.join(record))
    except csv.Error as error:
        faults.add(records.line_num, "valid CSV", str(error))


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
        if "\\u" in line:  # half of a pair is no text, and no file can have it in its name
            json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogateescape")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _json_rows(path: Path, names: list[str], faults: Faults) -> Rows:
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        if (value := _parsed(line)) is None:
            faults.add(number, "a JSON object", line.strip())
        elif unknown := [name for name in value if name not in names]:
            faults.add(number, f"only the names of the first line, {', '.join(names)}", unknown[0])
        else:
            yield number, [value.get(name) for name in names]


def _parquet_rows(path: Path) -> Rows:
    with open_parquet(path) as file:
        number = 0
        for batch in read_batches(path, file):
            for cells in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                yield number, list(cells)
                number += 1


def _listed_rows(path: Path, num_labels: int, known: tuple[str, ...], faults: Faults) -> Rows:
    for number, line in enumerate(_lines(path), start=1):
        text = line.rstrip()
        if not text:
            continue
        if not num_labels:
            if _is_path(text.strip()):
                yield number, [text.strip()]
            else:
                faults.add(number, "the path of an image, as in other lines", text)
            continue
        separator = "\t" if "\t" in text else " "
        where, _, label = (part.strip() for part in text.rpartition(separator))
        if number == 1 and {where.lower(), label.lower()} <= set(known):
            continue  # a header, its names separated by a space
        if where:
            yield number, [where, label]
        else:
            faults.add(number, "`PATH LABEL`, or columns named in the first line", text)


def _is_path(text: str) -> bool:
    return has_image_suffix(text) or len(text.split()) == 1
