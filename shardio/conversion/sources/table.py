"""Reads tables that describe images: a row for each image, with its path and perhaps labels, a split and numbers."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from shardio.conversion.images.headers import has_image_suffix
from shardio.conversion.sources.doubt import UNLABELED, DoubtError, Reading
from shardio.conversion.sources.names import DEFAULT_SPLIT, by_split, is_number, known_split, split_name
from shardio.conversion.sources.rows import Faults, Rows, read_rows
from shardio.errors import SourceError, counted, did_you_mean
from shardio.format.layout import RowType, check_array_name, check_kind, is_split_name
from shardio.format.parse import first_repeated

Groups = Sequence[Collection[str]]
"""Groups of columns' names, in lower case. The first group with a name that the table has decides which column is used:
the table must not have two names of that group."""
_PATHS = (
    ("path",),
    ("filename", "file_name", "filepath", "file_path", "file", "image", "image_path", "img", "img_path"),
    ("image_id", "image_name", "img_id", "id", "name"),
)
_LABELS = (("label",), ("class", "class_name", "category", "target", "cls"))
_SPLITS = (("split",), ("subset", "set"))
LABEL_NAMES = frozenset(
    (
        *chain(*_LABELS),
        "labels",
        "targets",
        "class_id",
        "category_id",
        "class_label",
        "fine_label",
        "coarse_label",
    )
)
"""The names of labels in parquet files and Python datasets."""
_SPLIT_LIKE = re.compile("(data|sub)?(set|split)(type|name)?|usage|phase|k?folds?|partition|is(train|val|test).*")
_WORD = re.compile("[A-Z]*[a-z]+|[A-Z]+")
OF_TABLES = ("classes", "numbers")
"""The values of the option `labels` that say what the labels of a table are."""
NO_SPLITS = "none"
"""The `split_column` of a table without splits."""
A_SPLIT = "a split named with letters, digits, '.', '_' and '-'"
WITHOUT_SPLITS = Reading("no column has the splits", {"--split-column": NO_SPLITS})
_MOST_SPLITS = 20
_FLAGS = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False}
# How programs write that there is no label.
MISSING = frozenset(("nan", "n/a", "#n/a", "<na>", "na", "null"))

_INDEX = ("", "Unnamed: 0")
"""The names that pandas gives to a column of the numbers of rows."""
_MAX_PATH_NBYTES = 4096  # the longest that Linux takes


@dataclass(frozen=True)
class Table:
    """A file with a row for each image: its path, and perhaps a label, a split and numbers. It may be SRC, too.

    - `file`: CSV or TSV with names of columns, JSON lines, parquet; or a list of lines `PATH` or `PATH LABEL`
    - `root`: if the table is SRC, the folder that paths are relative to; by default the folder of the file. OLD=NEW
      replaces OLD at the beginning of paths by NEW; then NEW is that folder if the table is SRC
    - `path_column`, `label_columns`, `split_column` ("none": no splits): names of columns, by default guessed. Labels
      that are names or integers become classes. Other numbers become float32 labels, and several columns a vector
    - `label_separator`: separates several labels in a cell, which become a vector with a 0 or 1 for each class
    - `group_column`: name of a column of groups; the option `val` puts all rows of a group into the same split
    - `columns`: names of columns of numbers to store as arrays
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
            raise ValueError(f"label_separator is for one column of labels; found {', '.join(self.label_columns)}")
        used = [name for name in (self.path_column, *self.label_columns, self.split_column) if name]
        if (repeated := first_repeated(used)) is not None:
            raise ValueError(f"columns of paths, labels and splits must be distinct, found {repeated!r} twice")

    def __fspath__(self) -> str:
        return os.fspath(self.file)

    __str__ = __fspath__

    def words(self) -> Iterator[str]:
        """Yields the command line's options for all but the file, as "--label-column", "class", ..."""
        for one in fields(self)[1:]:
            value = getattr(self, one.name)
            for given in (value if isinstance(value, tuple) else (value,)) if value else ():
                yield from (f"--{one.name.replace('_', '-').removesuffix('s')}", str(given))

    @property
    def path(self) -> Path:
        return Path(os.path.abspath(self.file))

    @property
    def prefix(self) -> tuple[str, str]:
        """(OLD, NEW) if `root` is OLD=NEW and not the name of a folder; otherwise ("", `root`), with "" for None."""
        root = os.fspath(self.root or "")
        old, is_pair, new = root.partition("=")
        return (old.rstrip("/\\"), new) if is_pair and not os.path.isdir(root) else ("", root)


Tables = str | os.PathLike[str] | Table | Mapping[str, str | os.PathLike[str] | Table]
"""A table, given as a Table or a path; or a dict with a table for each split."""


class Row(NamedTuple):
    """A row of a table that has a valid path and split."""

    contents: Contents
    line: int
    path: str
    split: str | None
    """The table's word for the split; None for an empty cell, and "" if the table has no column of splits."""
    label: Any
    """The label as written: a value, a tuple of the values of several columns, or None for empty cells."""
    numbers: tuple[Any, ...]
    """The values of the table's `columns`, in the same order."""
    group: str
    """The name of the row's group; "" if the table has no column of groups."""

    def refuse(self, expected: str, found: object) -> None:
        self.contents.faults.add(self.line, expected, found)


class Contents:
    """The columns of a table, what they are used for, and the valid rows."""

    def __init__(
        self, table: Table, names: Sequence[str], faults: Faults, labels: str | None, of_images: Groups = ()
    ) -> None:
        """Decides what each column is used for. `names` are the names of all columns; `labels` is the option.

        `of_images`: the names that columns of labels may have, if `table.path_column` has images instead of paths. A
        column of splits is then used only if the table names it. () for a column of paths.
        """
        self.table, self.path, self.names, self.faults, self.labels = table, table.path, names, faults, labels
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self._path = self._find("path", table.path_column, _PATHS)
        if not self._path:
            way = "put the names of columns into the first line; `--path-column` says which column has the paths"
            found = f"found the columns {listed(names)} ({way})"
            may_be = [name for name in names if name and name not in table.label_columns]
            readings = [column_reading(name, "path") for name in may_be if not any(map(has_image_suffix, names))]
            raise DoubtError(self.path, f"expected a column of paths, {found}", readings[:3])
        splits = () if of_images else _SPLITS
        self.of_splits = "" if table.split_column == NO_SPLITS else self._find("split", table.split_column, splits)
        self.of_groups = self._find("group", table.group_column, ())
        for name in table.columns:
            self._check(name)
            try:
                check_kind(check_array_name(name), "array", RowType("<f8", ()), None)
            except ValueError as error:
                raise SourceError(f"{self.path}: column {name!r}: {error}") from None
        given = table.label_columns if labels != "none" else ()
        if not given and labels != "none" and (label := self._find("label", "", of_images or _LABELS)):
            given = [label]
        used = {self._path, self.of_splits, self.of_groups, *given, *table.columns, *_INDEX}
        self.unused = [name for name in dict.fromkeys(names) if name not in used]
        self.guess = [] if of_images or labels == "none" or given or table.columns else self.unused
        """The columns that may have the labels, if neither the caller nor a name says which. A single one has them."""
        self._first = f"{'images' if of_images else 'paths'} from {self._path!r}"
        self.label_from(tuple(given or self.guess[: len(self.guess) == 1]))

    def label_from(self, names: tuple[str, ...]) -> None:
        """Makes `names` the columns of labels, and says so in `use` and in the first of `notes`."""
        self.label_names = names
        for name in names:
            self._check(name)
        uses = {"labels": names, "splits": [self.of_splits], "groups": [self.of_groups], "arrays": self.table.columns}
        some = ", ".join(f"{what} from {listed(columns)}" for what, columns in uses.items() if any(columns))
        self.use = f"{self._first}, {'' if names else 'no labels, '}{some}".removesuffix(", ")
        left = [name for name in self.unused if name not in names]
        self.notes[:1] = [f"{self.use}, not used: {listed(left)}" if left else self.use]

    def texts(self) -> set[str]:
        return {str(row.label) for row in self.rows if row.label is not None}

    def _check(self, name: str) -> None:
        """Raises SourceError unless exactly one column has the name."""
        if (count := self.names.count(name)) != 1:
            meant = f"the columns {listed(self.names)}{did_you_mean(name, self.names)}"
            found = f"{count} columns of this name: rename one" if count else meant
            raise SourceError(f"{self.path}: expected one column {name!r}, found {found}")

    def _find(self, what: str, given: str, known: Groups) -> str:
        """Returns the column `given`; if that is "", the column with a name in `known`, or "" if there is none. Raises
        SourceError if `given` is no column, DoubtError if several fit. Errors call it a column of `what`s."""
        groups = ([name for name in self.names if name.strip().lower() in group] for group in known)
        found = [given] if given else next(filter(None, groups), [])
        for name in found:
            self._check(name)
        if len(found) > 1:
            readings = [*(column_reading(name, what) for name in found[:3]), *[UNLABELED] * (what == "label")]
            raise DoubtError(self.path, f"expected one column of {what}s, found {listed(found)}", readings)
        return "".join(found)

    def add(self, line: int, cells: Mapping[str, Any], split: str) -> None:
        """Adds the row with the number `line` to `rows`, or an error in the row to `faults`. `cells` has the row's
        values by name of the column. `split` is the split that the table is for, or ""."""
        where, word, group = cells[self._path], "", present(cells[self.of_groups]) if self.of_groups else ""
        if self.of_splits and (word := present(cells[self.of_splits], MISSING)) is not None:
            word = split_of_flag(self.of_splits, word)
            word = word.lower() if known_split(word) else word
        values = tuple(present(cells[name], MISSING) for name in self.label_names)
        label = None if all(value is None for value in values) else values if len(values) > 1 else values[0]
        numbers = tuple(cells[name] for name in self.table.columns)
        path = "" if where is None else str(where)
        row = Row(self, line, path, word, label, numbers, "" if group is None else str(group))
        if not row.path or "\0" in row.path or len(os.fsencode(row.path)) > _MAX_PATH_NBYTES:
            row.refuse(f"a path of 1 to {_MAX_PATH_NBYTES:,} bytes without NUL", where)
        elif word and not is_split_name(split_name(word)):
            row.refuse(A_SPLIT, word)
        elif split and word and split_name(word) != split:
            row.refuse(f"the split {split!r}, for which the table is given (or `--split-column none`)", word)
        elif group is None:
            row.refuse(f"a group in the column {self.table.group_column!r}", "an empty cell: name a group of its own")
        else:
            self.rows.append(row)

    def check_splits(self, seen: Mapping[str, Set[str]], split: str) -> None:
        """Raises SourceError if rows have two words for one split, DoubtError if all words are numbers, if words in a
        column `set` or `subset` are unknown, or if an unused column may have splits. `seen` has the values of each
        unused column by name; `split` is the split that the table is for, or ""."""
        words = sorted({row.split for row in self.rows if row.split})
        by_split(self.path, dict.fromkeys(words))
        if self.table.split_column:
            return
        if not self.of_splits:
            tags = {str(tag).lower() for row in self.rows if len(self.label_names) > 1 for tag in row.label or ()}
            doubt_splits(self.path, seen, split, are_tags=bool(tags) and tags <= _FLAGS.keys())
        elif words and (
            all(map(str.isdigit, words))  # 0 may be train, or no fold at all
            or (self.of_splits.strip().lower() != "split" and not all(map(known_split, words)))
        ):
            raise _doubt(self.path, words, self.of_splits)

    def replace_root(self) -> None:
        """Replaces the beginning of paths if the root is OLD=NEW. Raises SourceError if no path begins with OLD."""
        old, new = self.table.prefix
        found = [number for number, row in enumerate(self.rows) if row.path.startswith((f"{old}/", f"{old}\\"))]
        for number in found if old else ():
            path = self.rows[number].path[len(old) :].lstrip("/\\")
            self.rows[number] = self.rows[number]._replace(path=os.path.join(new, path))
        if old and found:
            self.notes.append(f"in {counted(len(found), 'row')}, {old!r} at the beginning of paths is replaced")
        elif old and self.rows:
            expected = f"paths that begin with {old!r}, as in `--root`"
            raise SourceError(f"{self.path}: expected {expected}, found {self.rows[0].path!r}")


def read_tables(tables: Mapping[str, Table], labels: str | None = None) -> Mapping[str, Contents]:
    """Returns what `_read` returns for each of `tables`, by the split that it is for. If a column of labels is named in
    one table, no column is guessed in the others, unless its texts are labels of that table. Raises DoubtError if
    several columns may have the labels."""
    contents = {split: _read(table, labels, split, tables.values()) for split, table in tables.items()}
    named = [one for one in contents.values() if one.label_names and not one.guess]
    for one in (one for one in contents.values() if one.guess and named):
        texts = one.texts()  # ages may be among labels that are numbers
        if all(map(is_number, texts)) or not texts <= set().union(*(other.texts() for other in named)):
            one.guess, one.rows = [], [row._replace(label=None) for row in one.rows]
            one.label_from(())
    labeled: dict[str, Contents] = {}
    for one in contents.values():
        if len(one.guess) > 1:
            readings = [*map(column_reading, one.guess[:3]), UNLABELED]
            raise DoubtError(one.path, f"expected one column of labels, found {listed(one.guess)}", readings)
        if len(one.label_names) == 1:
            labeled[one.label_names[0].strip().lower()] = last = one
    if len(labeled) > 1 and not all(one.table.label_columns for one in labeled.values()):
        found = "expected one name for the columns of labels, found "
        found += " and ".join(f"{one.label_names[0]!r} in {one.path.name}" for one in labeled.values())
        names = (one.label_names[0] for one in labeled.values())
        readings = [column_reading(name) for name in names if all(name in one.names for one in labeled.values())]
        shared = set.intersection(*(one.texts() for one in labeled.values()))
        if readings or not shared or not labeled.keys() <= LABEL_NAMES:
            raise DoubtError(last.path, f"{found}: rename one, or remove one without labels", [*readings, UNLABELED])
    return contents


def read_table(table: Table, labels: str | None = None) -> Contents:
    return read_tables({"": table}, labels)[""]


def _open(table: Table, labels: str | None) -> tuple[list[str], Rows, Faults]:
    named = (name.lower() for name in (table.path_column, *table.label_columns) if name)
    return read_rows(table.path, (*chain(*_PATHS, *_LABELS), *named), unlabeled=labels == "none")


def _read(table: Table, labels: str | None, split: str, tables: Iterable[Table]) -> Contents:
    """Returns the Contents of a table: its valid rows, without labels if `labels` is "none", and the errors in other
    rows. `split` is the split that the table is for, or "". Raises DoubtError if an unused column may have splits."""
    names, rows, faults = _open(table, labels)
    gone = [name for name in table.label_columns if name not in names]
    if gone and labels != "none" and any(gone[0] in _open(other, labels)[0] for other in tables):
        way = "leave this table out if its images have no labels"
        raise SourceError(f"{table.path}: expected one column {gone[0]!r}, found {listed(names)}: {way}")
    content = Contents(table, names, faults, labels)
    seen: dict[str, set[str]] = {name: set() for name in content.unused}
    few = list(seen)
    for line, values in rows:
        cells = dict(zip(names, values, strict=True))
        for name in tuple(few):
            if (value := present(cells[name], MISSING)) is not None:
                seen[name].add(str(value))
            if len(seen[name]) > _MOST_SPLITS:
                few.remove(name)
        content.add(line, cells, split)
    content.check_splits(seen, split)
    content.replace_root()
    return content


def doubt_splits(src: Path, values: Mapping[str, Set[str]], split: str, are_tags: bool = False) -> None:
    """Raises DoubtError if a column with at most 20 different values may have splits. `values` has each column's
    values, by its name; `split` is the split that all rows have otherwise, or "". `are_tags`: the labels are flags, so
    flags in a column such as train are no splits.

    A column may have splits if its name says so and `split` is "", or if each value names a split, and one of them
    names a split other than `split` (other than train if that is "").
    """
    may_be: dict[str, Set[str]] = {}
    for name, seen in ((name, seen) for name, seen in values.items() if len(seen) <= _MOST_SPLITS):
        is_flag = not are_tags and bool(known_split(name.strip())) and set(map(str.lower, seen)) <= _FLAGS.keys()
        is_named = not split and len(seen) > 1 and (is_flag or is_split_like(name))
        known = [{known_split(part.lower()) for part in _WORD.findall(word)} - {""} for word in seen]
        if is_named or (all(known) and set().union(*known) - {split or DEFAULT_SPLIT}):
            may_be[name] = seen
    if may_be:
        raise _doubt(src, next(iter(may_be.values())), *may_be)


def is_split_like(name: str) -> bool:
    """Whether a column may have splits by its name. So may flags in a column that is named as a split, such as test."""
    return bool(_SPLIT_LIKE.fullmatch(re.sub("[^a-z]", "", name.lower())))


def _doubt(src: Path, seen: Iterable[str], *names: str) -> DoubtError:
    found = f"expected to know whether the column {names[0]!r} has splits, found {listed(sorted(seen))}"
    return DoubtError(src, found, [*(column_reading(name, "split") for name in names[:3]), WITHOUT_SPLITS])


def split_of_flag(name: str, cell: object) -> str:
    """Returns the split that 0, 1, true or false means in a column `name` such as is_train or test. Returns the text
    of other cells, and of cells in other columns."""
    match = re.match("is[-_ ]?(train|val|test)", name.lower())
    split, flag = match[1] if match else known_split(name.strip()), _FLAGS.get(str(cell).lower())
    if not split or flag is None:
        return str(cell)
    return split if flag else {"train": "test"}.get(split, "train")


def column_reading(name: str, what: str = "label") -> Reading:
    return Reading(f"column {name!r} has the {what}s", {f"--{what}-column": name})


def present(cell: Any, missing: Set[str] = frozenset()) -> Any:
    """Returns the value of a cell, text without spaces around it; None if it is empty, NaN or a word in `missing`."""
    if isinstance(cell, str):
        text = cell.strip()
        return None if not text or text.lower() in missing else text
    return None if isinstance(cell, float) and cell != cell else cell


def listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))[:200] or "none"
