"""Reads tables that describe images: a row for each image, with its path and perhaps labels, a split and numbers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from shardio.conversion.sources.doubt import UNLABELED, DoubtError, Reading
from shardio.conversion.sources.names import DEFAULT_SPLIT, known_split, split_name
from shardio.conversion.sources.rows import Faults, read_rows
from shardio.errors import SourceError, counted
from shardio.format.layout import RowType, check_array_name, check_kind, is_split_name
from shardio.format.parse import first_repeated

# Names of columns, in any case. The first is taken where it is there; of the others there may be only one.
PATH_COLUMNS = (
    *("path", "filename", "file_name", "filepath", "file_path", "file", "image", "image_path", "img", "img_path"),
    *("image_id", "image_name", "img_id", "id", "name"),
)
LABEL_COLUMNS = ("label", "class", "class_name", "category", "target", "cls")
LABEL_NAMES = frozenset(
    (*LABEL_COLUMNS, "labels", "targets", "class_id", "category_id", "class_label", "fine_label", "coarse_label")
)
"""The names of labels in parquet files and Python datasets."""
SPLIT_COLUMNS = ("split", "subset", "set")
# Other names that a column of splits may have, without what is no letter.
_SPLIT_LIKE = re.compile("(data)?(set|split)(type|name)?|usage|phase|k?folds?|partition|is(train|val|test).*")
_WORD = re.compile("[A-Z]*[a-z]+|[A-Z]+")
OF_TABLES = ("classes", "numbers")
"""The values of the option `labels` that say what the labels of a table are."""
NO_SPLITS = "none"
"""The `split_column` of a table without splits."""
WITHOUT_SPLITS = Reading("no column has the splits", {"--split-column": NO_SPLITS})
MOST_SPLITS = 20
_FLAGS = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False}
# How programs write that there is no label.
MISSING = frozenset(("nan", "n/a", "#n/a", "<na>", "na", "null"))

_MAX_PATH_NBYTES = 4096  # the longest that Linux takes


@dataclass(frozen=True)
class Table:
    """A file with a row for each image: its path, and perhaps a label, a split and numbers.

    - `file`: CSV or TSV with names of columns, JSON lines, parquet; or a list of lines `PATH` or `PATH LABEL`
    - `root`: if the table is SRC, the folder that paths are relative to; by default the folder of the file. OLD=NEW
      replaces OLD at the beginning of paths by NEW; then NEW is that folder if the table is SRC
    - `path_column`, `label_columns`, `split_column`: names of columns, by default guessed. Labels that are names or
      integers become classes. Other numbers become float32 labels, and several columns a vector
    - `split_column` "none": no column has splits
    - `label_separator`: separates several labels in a cell, which become a vector with a 0 or 1 for each class
    - `group_column`: name of a column; rows of one group are on one side of `val`
    - `columns`: names of columns of numbers to store as arrays

    A Table can also be passed as SRC.
    """

    file: str | os.PathLike[str]
    root: str | os.PathLike[str] | None = None
    path_column: str = ""
    label_columns: Sequence[str] = ()
    split_column: str = ""
    columns: Sequence[str] = ()
    label_separator: str = ""
    group_column: str = ""

    def __post_init__(self) -> None:
        for name in ("label_columns", "columns"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be a list of column names, found {getattr(self, name)!r}")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.label_separator and len(self.label_columns) > 1:
            raise ValueError(f"label_separator is for one column of labels, found {', '.join(self.label_columns)}")
        used = [name for name in (self.path_column, *self.label_columns, self.split_column) if name]
        if (repeated := first_repeated(used)) is not None:
            raise ValueError(f"columns of paths, labels and splits must be distinct, found {repeated!r} twice")

    def __fspath__(self) -> str:
        return os.fspath(self.file)

    __str__ = __fspath__

    def words(self) -> Iterator[str]:
        """Yields the options of the command line that describe the columns."""
        for one in fields(self)[1:]:
            value = getattr(self, one.name)
            for given in (value if isinstance(value, tuple) else (value,)) if value else ():
                yield from (f"--{one.name.replace('_', '-').removesuffix('s')}", str(given))

    @property
    def path(self) -> Path:
        return Path(os.path.abspath(self.file))

    @property
    def prefix(self) -> tuple[str, str]:
        """(OLD, NEW) if `root` is OLD=NEW and not the name of a folder; otherwise ("", the root, if any)."""
        root = os.fspath(self.root or "")
        old, is_pair, new = root.partition("=")
        return (old.rstrip("/\\"), new) if is_pair and not os.path.isdir(root) else ("", root)


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
    group: str
    """"" if the table has no column of groups."""

    def refuse(self, expected: str, found: object) -> None:
        self.table.faults.add(self.line, expected, found)


@dataclass(eq=False)
class Contents:
    """The valid rows of a table."""

    table: Table
    faults: Faults
    label_names: tuple[str, ...]
    columns: tuple[str, ...]
    labels: str | None
    """The option `labels`."""
    is_guessed: bool
    """Whether the column of labels is only the one that is left."""
    notes: list[str] = field(default_factory=list)
    """Which columns are used and how, and how paths are read."""
    rows: list[Row] = field(default_factory=list)
    without_split: set[int] = field(default_factory=set)
    """The lines whose cell in the column of splits is empty."""

    @property
    def path(self) -> Path:
        return self.table.path


def read_table(table: Table, labels: str | None = None, split: str = "") -> Contents:
    """Returns the valid rows of a table, without labels if `labels` is "none". Notes errors in other rows as `faults`.

    `split` is the split that the table is for, or "". Raises DoubtError if a column that is not used may have splits.
    """
    named = (name.lower() for name in (table.path_column, *table.label_columns) if name)
    names, rows, faults = read_rows(table.path, (*PATH_COLUMNS, *LABEL_COLUMNS, *named), unlabeled=labels == "none")
    path = _column(table, names, "path", table.path_column, PATH_COLUMNS)
    if path is None:
        way = "pass `--path-column NAME`, or put the names of columns into the first line"
        raise SourceError(f"{table.path}: expected a column of paths, found the columns {listed(names)}: {way}")
    has_splits = table.split_column != NO_SPLITS
    splits = _column(table, names, "split", table.split_column, SPLIT_COLUMNS) if has_splits else None
    group = _existing(table, names, table.group_column) if table.group_column else None
    stored = {name: _existing(table, names, name) for name in table.columns}
    for name in stored:
        try:
            check_kind(check_array_name(name), "array", RowType("<f8", ()), None)
        except ValueError as error:
            raise SourceError(f"{table.path}: column {name!r}: {error}") from None
    given = {name: _existing(table, names, name) for name in table.label_columns if labels != "none"}
    if not given and labels != "none" and (one := _column(table, names, "label", "", LABEL_COLUMNS)) is not None:
        given = {names[one]: one}
    used = {path, splits, group, *given.values(), *stored.values()}
    unused = {name: number for number, name in enumerate(names) if number not in used and not _is_index(name)}
    guess = list(unused) if labels != "none" and not (given or stored) else []
    found = given or {name: _existing(table, names, name) for name in guess[: len(guess) == 1]}
    content = Contents(table, faults, tuple(found), tuple(stored), labels, is_guessed=bool(guess))
    few: dict[str, set[str]] = {name: set() for name in unused}  # the values of columns that have few
    (old, new), replaced = table.prefix, 0
    first: dict[str, tuple[str, int]] = {}  # of each split the word for it, and its line
    for line, cells in rows:
        for column, seen in list(few.items()):
            if (value := present(cells[unused[column]], MISSING)) is not None:
                seen.add(str(value))
            if len(seen) > MOST_SPLITS:
                del few[column]
        word = cell = ""
        if splits is not None:
            cell = present(cells[splits], MISSING)
            word = split or DEFAULT_SPLIT if cell is None else split_of_flag(names[splits], cell)
        where, name = cells[path], split_name(word)
        known, there = first.setdefault(name, (word, line))
        text = "" if where is None else str(where)
        if old and text.startswith((f"{old}/", f"{old}\\")):
            text, replaced = os.path.join(new, text[len(old) :].lstrip("/\\")), replaced + 1
        if not text or "\0" in text or len(os.fsencode(text)) > _MAX_PATH_NBYTES:
            faults.add(line, f"a path of 1 to {_MAX_PATH_NBYTES:,} bytes without NUL", where)
        elif word and not is_split_name(name):
            faults.add(line, "a split named with letters, digits, '.', '_' and '-'", word)
        elif known.lower() != word.lower():
            faults.add(line, f"the split {known!r}, as in {faults.word} {there}", word)
        elif split and word and name != split_name(split):
            faults.add(line, f"the split {split!r}, for which the table is given", word)
        elif group is not None and present(cells[group]) is None:
            faults.add(line, f"a group in the column {table.group_column!r}", "an empty cell")
        else:
            if cell is None:
                content.without_split.add(line)
            values = tuple(present(cells[number], MISSING) for number in found.values())
            label = None if all(value is None for value in values) else values if len(values) > 1 else values[0]
            numbers = tuple(cells[number] for number in stored.values())
            belongs = "" if group is None else str(present(cells[group]))
            content.rows.append(Row(content, line, text, name, label, numbers, belongs))
    if splits is not None and not table.split_column and first and all(map(str.isdigit, first)):
        raise _doubt(table.path, names[splits], first)  # 0 may be train, or no fold at all
    if has_splits and splits is None:
        doubt_splits(table.path, few, split)
    if len(guess) > 1:
        likely = sorted(guess, key=lambda name: len(few.get(name, ())) < 2)[:3]
        columns = [column_reading(name) for name in likely]
        raise DoubtError(table.path, f"expected one column of labels, found {listed(guess)}", [*columns, UNLABELED])
    note = f"paths from {names[path]!r}, {f'labels from {listed(found)}' if found else 'no labels'}"
    note += "" if splits is None else f", splits from {names[splits]!r}"
    left = [name for name in unused if name not in found]
    content.notes.append(f"{note}, not used: {listed(left)}" if left else note)
    if replaced:
        content.notes.append(f"in {counted(replaced, 'row')}, {old!r} at the beginning of paths is replaced")
    elif old and content.rows:
        first_path = content.rows[0].path
        raise SourceError(f"{table.path}: expected paths that begin with {old!r}, as in `--root`, found {first_path!r}")
    return content


def doubt_splits(src: Path, values: Mapping[str, Set[str]], split: str) -> None:
    """Raises DoubtError if a column has a name of splits, or only words for splits, unless all are `split` or train."""
    for name, seen in values.items():
        plain = re.sub("[^a-z]", "", name.lower())
        is_named = not split and len(seen) > 1 and bool(_SPLIT_LIKE.fullmatch(plain))
        known = [{known_split(part.lower()) for part in _WORD.findall(word)} - {""} for word in seen]
        if is_named or (all(known) and set().union(*known) - {split or DEFAULT_SPLIT}):
            raise _doubt(src, name, seen)


def _doubt(src: Path, name: str, seen: Iterable[str]) -> DoubtError:
    found = f"expected to know whether the column {name!r} has splits, found {listed(sorted(seen))}"
    return DoubtError(src, found, [column_reading(name, "split"), WITHOUT_SPLITS])


def split_of_flag(name: str, cell: object) -> str:
    """Returns the split that a 0 or 1 means in a column such as is_train; other cells as texts."""
    match = re.match("is[-_ ]?(train|val|test)", name.lower())
    flag = _FLAGS.get(str(cell).lower())
    if not match or flag is None:
        return str(cell)
    return match[1] if flag else {"train": "test"}.get(match[1], "train")


def column_reading(name: str, what: str = "label") -> Reading:
    return Reading(f"column {name!r} has the {what}s", {f"--{what}-column": name})


def _is_index(name: str) -> bool:
    """Whether a column is the numbers of rows that pandas writes and reads."""
    return name in ("", "Unnamed: 0")


def present(cell: Any, missing: Set[str] = frozenset()) -> Any:
    """Returns the value of a cell, text without spaces around it; None if it is empty, NaN or a word in `missing`."""
    if isinstance(cell, str):
        text = cell.strip()
        return None if not text or text.lower() in missing else text
    return None if isinstance(cell, float) and cell != cell else cell


def listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))[:200] or "none"


def _existing(table: Table, names: Sequence[str], name: str) -> int:
    if names.count(name) != 1:
        found = f"{names.count(name)} columns of this name" if name in names else f"the columns {listed(names)}"
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
        readings = [column_reading(names[lower.index(name)], what) for name in found[:3]]
        raise DoubtError(table.path, f"expected one column of {what}s, found {', '.join(found)}", readings)
    return lower.index(found[0]) if found else None
