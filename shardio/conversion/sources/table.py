"""Tables that describe images, and collections whose images a table lists.

An error names all wrong rows, not only the first, so a table can be corrected in one go.
"""

from __future__ import annotations

import os
import posixpath
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import accumulate, repeat
from pathlib import Path
from typing import Any

from shardio.conversion.arrays import Boxes, Label, as_float32
from shardio.conversion.images.headers import SUFFIXES
from shardio.conversion.sources.collection import Collection, Fault, FileOrigin, Source
from shardio.conversion.sources.columns import make_columns, merge_columns
from shardio.conversion.sources.names import (
    DEFAULT_SPLIT,
    are_measures,
    in_split_order,
    number_labels,
    split_name,
)
from shardio.conversion.sources.rows import read_rows
from shardio.errors import SourceError, counted
from shardio.format.layout import is_split_name
from shardio.format.parse import first_repeated

# Names of columns, in any case. The first is taken where it is there; of the others there may be only one.
PATH_COLUMNS = (
    *("path", "filename", "file_name", "filepath", "file_path", "file", "image", "image_path", "img", "img_path"),
    *("image_id", "image_name", "img_id", "id", "name"),
)
LABEL_COLUMNS = ("label", "class", "class_name", "category", "target", "cls")
SPLIT_COLUMNS = ("split", "subset", "set")

_MAX_PATH_NBYTES = 4096  # the longest that Linux takes
_MOST_KEPT, _MOST_SHOWN = 1000, 10
# If none of the first files is there, the paths are relative to another folder.
_PROBED = 20


@dataclass(frozen=True)
class Table:
    """A file with a row for each image: its path, and perhaps a label, a split and numbers.

    - `file`: CSV or TSV with names of columns, JSON lines, parquet; or a list of lines `PATH` or `PATH LABEL`
    - `root`: the folder of relative paths, if the table is SRC; by default the folder of the file
    - `path_column`, `label_columns`, `split_column`: names of columns, by default guessed. Class names or integers are
      classes. Other numbers become float32 labels, and several columns a vector
    - `columns`: columns of numbers to store in the index

    A table is a path, and can be given as SRC.
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
                raise ValueError(f"{name} must be a list of names, found {getattr(self, name)!r}")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        used = [name for name in (self.path_column, *self.label_columns, self.split_column) if name]
        if (repeated := first_repeated(used)) is not None:
            raise ValueError(f"a column must have one meaning, found {repeated!r} twice")

    def __fspath__(self) -> str:
        return os.fspath(self.file)

    @property
    def path(self) -> Path:
        return Path(os.path.abspath(self.file))


class Faults:
    """Collects the mistakes in a table, by line, and raises them all in one error."""

    def __init__(self, path: Path, word: str) -> None:
        self._path = path
        self.word = word
        self._count = 0
        self._kept: list[tuple[int, str]] = []

    def add(self, line: int, expected: str, found: object) -> None:
        self._count += 1
        if self._count <= _MOST_KEPT:
            self._kept.append((line, f"{self.word} {line}: expected {expected}, found {found!r:.200}"))

    def check(self) -> None:
        if self._count:
            shown = [text for _, text in sorted(self._kept)[:_MOST_SHOWN]]
            more = [f"and {self._count - _MOST_SHOWN:,} more"] if self._count > _MOST_SHOWN else []
            raise SourceError(f"{self._path}: correct the list: {self._count:,} {self.word}s are wrong:", *shown, *more)


@dataclass(frozen=True, eq=False)
class Contents:
    """The rows of a table with a valid path and split."""

    table: Table
    faults: Faults
    lines: list[int] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    splits: list[str] = field(default_factory=list)
    """The split of each row; "" without a column of splits."""
    labels: list[list[Any]] = field(default_factory=list)
    """The cells of each column of labels."""
    names: tuple[str, ...] = ()
    """The names of the columns of labels."""
    numbers: Mapping[str, list[Any]] = field(default_factory=dict)
    boxes: list[Boxes] | None = None
    """The boxes of each row; None if the table has none."""
    note: str = ""
    """Which columns are read as what."""

    def of(self, rows: Sequence[int]) -> Contents:
        """Returns some of the rows."""
        if len(rows) == len(self.lines):
            return self
        lines = [self.lines[row] for row in rows]
        paths, splits = ([column[row] for row in rows] for column in (self.paths, self.splits))
        labels = [[cells[row] for row in rows] for cells in self.labels]
        numbers = {name: [cells[row] for row in rows] for name, cells in self.numbers.items()}
        boxes = self.boxes and [self.boxes[row] for row in rows]
        return replace(self, lines=lines, paths=paths, splits=splits, labels=labels, numbers=numbers, boxes=boxes)


def read_table(table: Table, *, unlabelled: bool = False) -> Contents:
    """Returns the rows of a table, without its labels if `unlabelled`.

    Raises SourceError without a column of paths, or a column that is named.
    """
    rows = read_rows(table.path, (*PATH_COLUMNS, *LABEL_COLUMNS))
    faults = Faults(table.path, rows.word)
    path = _column(table, rows.names, "path", table.path_column, PATH_COLUMNS)
    if path is None:
        raise SourceError(
            f"{table.path}: expected a column of paths, found {_listed(rows.names)}. Name it by `--path-column`, from "
            "Python `Table(path_column=...)`, or put the names of columns into the first line"
        )
    split = _column(table, rows.names, "split", table.split_column, SPLIT_COLUMNS)
    labels = [] if unlabelled else _label_columns(table, rows.names, path, split)
    at = [rows.names.index(name) for name in labels]
    stored = {name: _existing(table, rows.names, name) for name in table.columns}
    content = Contents(
        table,
        faults,
        labels=[[] for _ in labels],
        names=tuple(labels),
        numbers={name: [] for name in stored},
        note=_note(table, rows.names, path, labels, split),
    )
    first: dict[str, tuple[str, int]] = {}  # of each split the word for it, and its line
    for row in rows.read(faults.add):
        word = "" if split is None else str(_present(row.cells[split]) or DEFAULT_SPLIT).strip()
        where, name = row.cells[path], split_name(word)
        known, line = first.setdefault(name, (word, row.line))
        text = "" if where is None else os.fsdecode(where) if isinstance(where, bytes) else str(where)
        if not text or "\0" in text or len(os.fsencode(text)) > _MAX_PATH_NBYTES:
            faults.add(row.line, f"a path of 1 to {_MAX_PATH_NBYTES:,} bytes without NUL", where)
        elif word and not is_split_name(name):
            faults.add(row.line, "a split named with letters, digits, '.', '_' and '-'", word)
        elif known.lower() != word.lower():
            faults.add(row.line, f"the split {known!r}, as in {rows.word} {line}", word)
        else:
            content.lines.append(row.line)
            content.paths.append(text)
            content.splits.append(name)
            for cells, number in zip(content.labels, at, strict=True):
                cells.append(_present(row.cells[number]))
            for column, number in stored.items():
                content.numbers[column].append(row.cells[number])
    return content


def _present(cell: Any) -> Any:
    """Returns the value of a cell; None if there is none."""
    if isinstance(cell, str):
        return cell.strip() or None
    return None if isinstance(cell, float) and cell != cell else cell


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))[:200] or "none"


def _existing(table: Table, names: Sequence[str], name: str) -> int:
    if names.count(name) != 1:
        found = f"{names.count(name)} of them" if name in names else _listed(names)
        raise SourceError(f"{table.path}: expected one column {name!r}, found {found}")
    return names.index(name)


def _column(table: Table, names: Sequence[str], what: str, given: str, known: tuple[str, ...]) -> int | None:
    """Returns the place of the column `given`, or else of one with a known name; None if there is none."""
    if given:
        return _existing(table, names, given)
    lower = [name.strip().lower() for name in names]
    found = [name for name in lower if name in known]
    if found.count(known[0]) == 1:
        return lower.index(known[0])
    if len(found) > 1 and known is PATH_COLUMNS:  # an id beside a path
        found = [name for name in found if name in PATH_COLUMNS[:10]] or found
    if len(found) > 1:
        raise SourceError(
            f"{table.path}: expected one column of {what}s, found {', '.join(found)}. Name the right one by "
            f"`--{what}-column`, from Python `Table({what}_column{'s=[...]' if what == 'label' else '=...'})`"
        )
    return lower.index(found[0]) if found else None


def _label_columns(table: Table, names: Sequence[str], path: int, split: int | None) -> list[str]:
    if table.label_columns:
        return [names[_existing(table, names, name)] for name in table.label_columns]
    if (label := _column(table, names, "label", "", LABEL_COLUMNS)) is not None:
        return [names[label]]
    rest = [name for number, name in enumerate(names) if number not in (path, split) and name not in table.columns]
    if table.columns:
        return []
    if len(rest) > 1:
        raise SourceError(
            f"{table.path}: expected one column of labels, found {_listed(rest)}. Name it by `--label-column`, or each "
            "number of a vector; or leave the labels out by `--labels none`"
        )
    return rest if len(rest) == 1 else []


def _note(table: Table, names: Sequence[str], path: int, labels: Sequence[str], split: int | None) -> str:
    parts = [f"paths from {names[path]!r}", f"labels from {_listed(labels)}" if labels else "no labels"]
    return ", ".join([*parts, *([f"splits from {names[split]!r}"] if split is not None else [])])


# --- collections ------------------------------------------------------------------------------------------------------


def scan_table(table: Table, *, unlabelled: bool = False) -> Collection:
    """Returns the images that a table lists, in its order; without its labels if `unlabelled`.

    Paths are absolute, or relative to the table's root. A key is the path, relative if the file is below the root. A
    missing file is a source that will be refused; a mistake in the table itself raises SourceError.
    """
    content = read_table(table, unlabelled=unlabelled)
    folder = Path(os.path.abspath(table.root)) if table.root is not None else table.path.parent
    probed = content.paths[:_PROBED]

    def finds_files(suffix: str) -> bool:
        return any(os.path.lexists(folder / (path + suffix)) for path in probed)

    suffix = next(filter(finds_files, ("", *SUFFIXES, *map(str.upper, SUFFIXES))), None)
    if probed and suffix is None:
        content.faults.check()
        raise _nowhere(table, folder, probed)
    below = os.path.join(folder, "")
    found = []
    for path in content.paths:
        place = path + (suffix or "")
        key = os.path.normpath(os.path.join(below, place))
        key = key[len(below) :] if key.startswith(below) else key if os.path.isabs(place) else os.path.normpath(place)
        same = os.fsencode(key) == os.fsencode(place)
        found.append((DEFAULT_SPLIT, Source(os.fsencode(key), None, None if same else os.fsencode(place))))
    return _collect(Collection(FileOrigin(folder), (), {}, {}, kind="list"), [(content, found)])


def describe(collection: Collection, tables: Mapping[str, Table], contents: Sequence[Contents]) -> Collection:
    """Returns the images of a collection with the labels, splits and numbers in tables.

    `tables` are by split, or one by "". Paths are keys, or files in SRC, and may lack a suffix, or the folder of the
    table's split. Tables list the images, unless the collection has labels and they have none: an image that is in SRC
    alone is left out and counted, and one that is in a table alone is a source that will be refused. Otherwise the
    collection lists the images: each must be in a table, and other rows are counted. Splits without a table stay as
    they are.
    """
    is_labelled = any(sources[0].label is not None for sources in collection.splits.values())
    tables_list = any(content.labels for content in contents) or (not is_labelled and collection.kind != "dataset")
    known = {
        os.fsdecode(name): (split, source)
        for split, sources in collection.splits.items()
        for source in sources
        for name in (source.place, source.key)
        if isinstance(name, bytes)
    }
    stems = {os.path.splitext(name)[0]: name for name in known}
    ignored = Counter(collection.ignored)
    used: set[bytes] = set()
    parts = []
    for given, content in zip(tables, contents, strict=True):
        found: list[tuple[str, Source]] = []
        kept = []
        for row, path in enumerate(content.paths):
            names = [posixpath.normpath(path), *([f"{given}/{path}"] if given else [])]
            name = next((name for name in (*names, *map(stems.get, names)) if name in known), None)
            if name is not None:
                split, source = known[name]
                used.add(source.key)
            elif tables_list:
                missing = Fault(f"expected an image at this path in SRC, as in {content.table.path.name}, found none")
                split, source = DEFAULT_SPLIT, Source(os.fsencode(names[0]), None, missing)
            else:
                ignored["row without an image"] += 1
                continue
            kept.append(row)
            found.append((given or split, source))
        content.faults.check()
        if content.paths and not used:
            raise SourceError(
                f"{content.table.path}: expected paths of images in SRC such as {next(iter(known), '')!r}, found "
                f"{content.paths[0]!r}, and no image at any path. Paths are relative to SRC"
            )
        parts.append((content.of(kept), found))
    left = {
        split: [source for source in sources if source.key not in used]
        for split, sources in collection.splits.items()
        if "" in tables or split in tables or len(collection.splits) == 1
    }
    if (num_left := sum(map(len, left.values()))) and not tables_list:
        first = next(source.key for sources in left.values() for source in sources)
        raise SourceError(
            f"{contents[0].table.path}: expected a row for every image, found none for {num_left:,} of "
            f"{collection.num_sources:,}, such as {os.fsdecode(first)!r}. The first path in it is "
            f"{next(iter(contents[0].paths), '')!r}; paths are relative to SRC"
        )
    if num_left:
        ignored["image in no table"] += num_left
    splits = {split: sources for split, sources in collection.splits.items() if split not in left}
    return _collect(replace(collection, splits=splits, ignored=ignored), parts)


def _nowhere(table: Table, folder: Path, paths: Sequence[str]) -> SourceError:
    """Returns the error for a table whose first paths, `paths`, are all missing."""
    absolute = next(filter(os.path.isabs, paths), None)
    relative = next((path for path in paths if not os.path.isabs(path)), None)
    found, ways = [], []
    if relative is not None:
        found.append(f"{relative!r} is not in {folder}")
        is_url = "://" in relative
        ways.append("copy the images to files here" if is_url else "give the folder of its relative paths by `--root`")
    if absolute is not None:
        there = next(folder for folder in Path(absolute).parents if os.path.lexists(folder))
        found.append(f"of {absolute!r} only {str(there)!r} exists")
        ways.append("correct the absolute paths, or mount the folder that they name")
    return SourceError(
        f"{table.path}: expected images at the paths in the list, found none at the first {len(paths):,}: "
        f"{'; '.join(found)}. The way out: {'; '.join(ways)}"
    )


def _collect(collection: Collection, parts: Sequence[tuple[Contents, Sequence[tuple[str, Source]]]]) -> Collection:
    """Returns the collection with the sources of tables: (split without the table's, source) of each row."""
    splits = [[given or split for given, (split, _) in zip(c.splits, found, strict=True)] for c, found in parts]
    classes, labels = _read_labels([content for content, _ in parts], splits)
    listed: dict[str, list[Source]] = {split: [] for split in in_split_order(name for part in splits for name in part)}
    for (content, found), names, part in zip(parts, splits, labels, strict=True):
        first: dict[bytes, int] = {}
        boxes = content.boxes or repeat(None)
        for line, path, name, label, (_, source), some in zip(
            content.lines, content.paths, names, part, found, boxes, strict=False
        ):
            if first.setdefault(source.key, line) != line:
                expected = f"a path that is not in {content.faults.word} {first[source.key]} already"
                content.faults.add(line, expected, path)
            source = replace(source, label=label) if content.labels else source
            listed[name].append(source if some is None else replace(source, boxes=some))
        content.faults.check()
    if not any(listed.values()):
        raise SourceError(f"{parts[0][0].table.path}: expected rows with paths of images, found none")
    if collection.splits and any(content.numbers for content, _ in parts):
        raise SourceError(
            f"{parts[0][0].table.path}: expected a table for every split, as it has numbers for the index, found none "
            f"for {next(iter(collection.splits))!r}"
        )
    has_labels = any(content.labels for content, _ in parts)
    kind = ""
    if has_labels:
        given = (label for part in labels for label in part if label is not None)
        width = len(first_label) if isinstance(first_label := next(given, None), tuple) else 0
        kind = f" ({counted(len(classes), 'class')})" if not width else f" (float32, {counted(width, 'number')})"
    columns = [
        make_columns(content.table.path, content.faults.word, content.lines, [s.key for _, s in found], content.numbers)
        for content, found in parts
        if content.numbers
    ]
    return replace(
        collection,
        classes=classes if has_labels else collection.classes,
        class_names=() if has_labels else collection.class_names,
        splits={**{split: tuple(sources) for split, sources in listed.items()}, **collection.splits},
        columns=merge_columns(columns) if columns else collection.columns,
        notes=(*collection.notes, *(f"{c.table.path.name}: {c.note}{kind}" for c, _ in parts if c.note)),
    )


# --- labels -----------------------------------------------------------------------------------------------------------


def _read_labels(
    contents: Sequence[Contents], splits: Sequence[Sequence[str]]
) -> tuple[tuple[str, ...], list[list[Label]]]:
    """Returns (classes, label of each row of each table). Adds mistakes to the faults.

    A split without any label has none, and so has a table without a column of labels.
    """
    labelled = [content for content in contents if content.labels]
    if len({len(content.labels) for content in labelled}) > 1:
        raise SourceError(
            f"{labelled[-1].table.path}: expected as many columns of labels as in {labelled[0].table.path}, found "
            f"{len(labelled[-1].labels)} and not {len(labelled[0].labels)}"
        )
    rows = [
        (content, line, split, cell)
        for content, names in zip(contents, splits, strict=True)
        for line, split, cell in zip(content.lines, names, _cells(content), strict=True)
    ]
    full = {split for _, _, split, cell in rows if cell is not None}
    single = all(len(content.labels) <= 1 for content in contents)
    texts = ["" if cell is None else str(int(cell) if isinstance(cell, bool) else cell) for _, _, _, cell in rows]
    if single and not any(isinstance(cell, (list, tuple)) for *_, cell in rows) and not are_measures(texts):
        numbering = number_labels({(row[2], text) for row, text in zip(rows, texts, strict=True) if row[2] in full})
        classes = numbering.classes
        labels: list[Label] = [
            numbering.labels.get(text) if row[2] in full else None for row, text in zip(rows, texts, strict=True)
        ]
        for (content, line, split, _), text in zip(rows, texts, strict=True):
            if split in full and (expected := numbering.expected.get((split, text))) is not None:
                content.faults.add(line, expected, text)
    else:
        classes = labelled[0].names if not single else ()
        labels = list(_numbers(rows, full))
    ends = list(accumulate(len(content.lines) for content in contents))
    return classes, [labels[end - len(content.lines) : end] for content, end in zip(contents, ends, strict=True)]


def _cells(content: Contents) -> Sequence[Any]:
    """Returns the label of each row as it is written: a value; the values of several columns; None if there is none."""
    if len(content.labels) <= 1:
        return content.labels[0] if content.labels else [None] * len(content.lines)
    return [None if set(cells) == {None} else cells for cells in zip(*content.labels, strict=True)]


def _numbers(rows: Iterable[tuple[Contents, int, str, Any]], full: Set[str]) -> Iterator[Label]:
    width = 0
    for content, line, split, cell in rows:
        numbers: tuple[float, ...] = ()
        if split in full:
            cells = cell if isinstance(cell, (list, tuple)) else (cell,)
            try:
                numbers = tuple(map(float, as_float32([float(number) for number in cells])))
            except (TypeError, ValueError):
                content.faults.add(line, "numbers as labels", cell)
            else:
                width = width or len(numbers)
                if len(numbers) != width:
                    content.faults.add(line, f"{width} numbers, as in other rows", cell)
        yield numbers or None
