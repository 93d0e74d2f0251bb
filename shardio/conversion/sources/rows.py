"""Reads the rows of tables: CSV, TSV, JSON lines, parquet, or lists of lines `PATH` or `PATH LABEL`."""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardio.conversion.images.headers import has_image_suffix
from shardio.errors import SourceError, counted
from shardio.sets.given import open_parquet, read_batches

_MAX_LINE_NBYTES = 1 << 16
_MOST_KEPT, _MOST_SHOWN = 1000, 10


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
