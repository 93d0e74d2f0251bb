"""Reads tables that describe images: a row for each image, with its path and perhaps labels, a split and numbers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from shardio.conversion.sources.names import DEFAULT_SPLIT, split_name
from shardio.conversion.sources.rows import Faults, read_rows
from shardio.errors import SourceError
from shardio.format.layout import RowType, check_array_name, check_kind, is_split_name
from shardio.format.parse import first_repeated

# Names of columns, in any case. The first is taken where it is there; of the others there may be only one.
PATH_COLUMNS = (
    *("path", "filename", "file_name", "filepath", "file_path", "file", "image", "image_path", "img", "img_path"),
    *("image_id", "image_name", "img_id", "id", "name"),
)
LABEL_COLUMNS = ("label", "class", "class_name", "category", "target", "cls")
SPLIT_COLUMNS = ("split", "subset", "set")

_MAX_PATH_NBYTES = 4096  # the longest that Linux takes


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
