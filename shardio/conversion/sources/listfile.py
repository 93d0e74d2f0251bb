"""A list of images: lines of `PATH LABEL`, or a CSV or TSV whose first line names its columns.

An error lists all wrong lines, not only the first, so a list can be corrected in one go.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, NamedTuple

from shardio.conversion.sources.collection import Collection, FileOrigin, Source
from shardio.conversion.sources.names import DEFAULT_SPLIT, in_split_order, number_labels, split_name
from shardio.errors import SourceError
from shardio.format.layout import is_split_name

# Names of columns, in any case. The first is taken where it is there; of the others there may be only one.
PATH_COLUMNS = ("path", "filename", "file_name", "filepath", "file_path", "file", "image", "image_path", "img")
LABEL_COLUMNS = ("label", "class", "class_name", "category", "target", "cls")
SPLIT_COLUMNS = ("split", "subset", "set")

_MAX_PATH_NBYTES = 4096  # the longest that Linux takes
_MAX_LINE_NBYTES = 1 << 16
_MOST_KEPT, _MOST_SHOWN = 1000, 10
# If none of the first files is there, the paths are relative to another folder.
_PROBED = 20


class _Row(NamedTuple):
    line: int
    path: str
    label: str
    split: str


class _Faults:
    """Collects the mistakes in a list, by line, and raises them all in one error."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._count = 0
        self._kept: list[tuple[int, str]] = []

    def add(self, line: int, expected: str, found: str) -> None:
        self._count += 1
        if self._count <= _MOST_KEPT:
            self._kept.append((line, f"line {line}: expected {expected}, found {found!r:.200}"))

    def check(self) -> None:
        if self._count:
            shown = [text for _, text in sorted(self._kept)[:_MOST_SHOWN]]
            more = [f"and {self._count - _MOST_SHOWN:,} more"] if self._count > _MOST_SHOWN else []
            raise SourceError(f"{self._path}: correct the list: {self._count:,} lines are wrong:", *shown, *more)


def scan_list(src: Path) -> Collection:
    """Returns the images that a list names, in the order of the list.

    Paths are absolute, or relative to the list's folder. A label is an integer or the name of a class. The split is
    train unless a column names another split. A key is the path, relative if the file is below the list's folder. A
    missing file is a source that will be refused; a mistake in the list itself raises SourceError.
    """
    faults = _Faults(src)
    try:
        with open(src, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            rows = list(_read_rows(src, file, faults))
    except OSError as error:
        raise SourceError(f"{src}: expected a readable list, found: {error.strerror}") from None
    keys = _keys(src, rows, faults)
    numbering = number_labels({(row.split, row.label) for row in rows})
    for row in rows:
        if (expected := numbering.expected.get((row.split, row.label))) is not None:
            faults.add(row.line, expected, row.label)
    faults.check()
    if not rows:
        raise SourceError(f"{src}: expected lines of `PATH LABEL`, or a CSV with columns path and label; found none")
    if not any(os.path.lexists(src.parent / row.path) for row in rows[:_PROBED]):
        raise _nowhere(src, [row.path for row in rows[:_PROBED]])
    splits: dict[str, list[Source]] = {split: [] for split in in_split_order(row.split for row in rows)}
    for row, key in zip(rows, keys, strict=True):
        place = os.fsencode(row.path)
        splits[row.split].append(Source(key, numbering.labels[row.label], None if place == key else place))
    found = {split: tuple(sources) for split, sources in splits.items()}
    return Collection(FileOrigin(src.parent), numbering.classes, found, {}, kind="list")


def _nowhere(src: Path, paths: Sequence[str]) -> SourceError:
    """Returns the error for a list whose first paths, `paths`, are all missing."""
    absolute = next(filter(os.path.isabs, paths), None)
    relative = next((path for path in paths if not os.path.isabs(path)), None)
    found, ways = [], []
    if relative is not None:
        found.append(f"{relative!r} is not in {src.parent}, the folder of the list")
        is_url = "://" in relative
        ways.append("copy the images to files here" if is_url else "move the list to the folder of its relative paths")
    if absolute is not None:
        there = next(folder for folder in Path(absolute).parents if os.path.lexists(folder))
        found.append(f"of {absolute!r} only {str(there)!r} exists")
        ways.append("correct the absolute paths, or mount the folder that they name")
    return SourceError(
        f"{src}: expected images at the paths in the list, found none at the first {len(paths):,}: "
        f"{'; '.join(found)}. The way out: {'; '.join(ways)}"
    )


def _keys(src: Path, rows: list[_Row], faults: _Faults) -> list[bytes]:
    folder = os.path.join(src.parent, "")
    first: dict[bytes, int] = {}
    keys = []
    for row in rows:
        path = os.path.normpath(os.path.join(folder, row.path))
        if path.startswith(folder):
            path = path[len(folder) :]
        elif not os.path.isabs(row.path):
            path = os.path.normpath(row.path)
        keys.append(os.fsencode(path))
        if first.setdefault(keys[-1], row.line) != row.line:
            faults.add(row.line, f"a path that is not in line {first[keys[-1]]} already", row.path)
    return keys


# --- lines ------------------------------------------------------------------------------------------------------------


def _read_rows(src: Path, file: IO[str], faults: _Faults) -> Iterator[_Row]:
    """Yields the valid rows. Adds the mistakes in other rows to `faults`."""
    lines = _lines(src, file)
    first = next(lines, "")
    delimiter = "\t" if "\t" in first else ","
    header = [name.strip(' "\r\n').lower() for name in first.split(delimiter)]
    path, label = _column(src, header, PATH_COLUMNS), _column(src, header, LABEL_COLUMNS)
    if path is not None and label is not None:
        split = _column(src, header, SPLIT_COLUMNS)
        rows = _tabular_rows(lines, delimiter, len(header), (path, label, split), faults)
    elif len(header) > 1 and (path is not None or label is not None or src.suffix.lower() in (".csv", ".tsv")):
        raise SourceError(
            f"{src}: line 1: expected the names of columns, path and label among them, found {header!r:.200}. Rename "
            "them, or put such a line before the others"
        )
    else:
        rows = _plain_rows(chain([first], lines), faults)
    for row in rows:
        if not row.path or "\0" in row.path or len(os.fsencode(row.path)) > _MAX_PATH_NBYTES:
            faults.add(row.line, f"a path of 1 to {_MAX_PATH_NBYTES:,} bytes without NUL", row.path)
        elif not is_split_name(row.split):
            faults.add(row.line, "a split named with letters, digits, '.', '_' and '-'", row.split)
        else:
            yield row


def _lines(src: Path, file: IO[str]) -> Iterator[str]:
    number = 0
    while line := file.readline(_MAX_LINE_NBYTES):
        number += 1
        if len(line) == _MAX_LINE_NBYTES:
            raise SourceError(f"{src}: line {number}: expected fewer than {_MAX_LINE_NBYTES:,} characters, found more")
        yield line


def _column(src: Path, header: list[str], names: tuple[str, ...]) -> int | None:
    found = [name for name in header if name in names]
    if found.count(names[0]) == 1:
        return header.index(names[0])
    if len(found) > 1:
        raise SourceError(
            f"{src}: line 1: expected one column of {', '.join(names)}, found {', '.join(found)}. Rename the right one "
            f"to {names[0]!r}"
        )
    return header.index(found[0]) if found else None


def _tabular_rows(
    lines: Iterator[str], delimiter: str, width: int, columns: tuple[int, int, int | None], faults: _Faults
) -> Iterator[_Row]:
    path, label, split = columns
    first: dict[str, tuple[str, int]] = {}  # of each split the word for it, and its line
    records = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        for record in records:
            number = records.line_num + 1  # the header was read before
            if len(record) == width:
                word = DEFAULT_SPLIT if split is None else record[split].strip()
                known, line = first.setdefault(split_name(word), (word, number))
                if known.lower() == word.lower():
                    yield _Row(number, record[path], record[label].strip(), split_name(word))
                else:
                    faults.add(number, f"the split {known!r}, as in line {line}", word)
            elif record:
                faults.add(number, f"{width} fields", delimiter.join(record))
    except csv.Error as error:
        faults.add(records.line_num + 1, "a line of CSV", str(error))


def _plain_rows(lines: Iterator[str], faults: _Faults) -> Iterator[_Row]:
    for number, line in enumerate(lines, start=1):
        text = line.rstrip()
        if not text:
            continue
        separator = "\t" if "\t" in text else " "
        path, _, label = (part.strip() for part in text.rpartition(separator))
        if number == 1 and path.lower() in PATH_COLUMNS and label.lower() in LABEL_COLUMNS:
            continue  # a header, its names separated by a space
        if path:
            yield _Row(number, path, label, DEFAULT_SPLIT)
        else:
            faults.add(number, "`PATH LABEL`, or columns named in the first line", text)
