"""Reads the rows of tables: CSV, TSV, JSON, parquet, MXNet's lists, or lists of lines `PATH` or `PATH LABEL`."""

from __future__ import annotations

import codecs
import contextlib
import csv
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

from shardio.conversion.images.headers import has_image_suffix
from shardio.conversion.sources.names import is_number
from shardio.errors import SourceError, counted, show
from shardio.format.parse import first_repeated
from shardio.sets.given import open_parquet, read_batches

_MAX_LINE_NBYTES = 1 << 16
_MOST_KEPT, _MOST_SHOWN = 1000, 10

_NO_TABLES = {b"PK\3\4": "an Excel file or a zip", b"\x1f\x8b": "a file compressed by gzip"}
_DELIMITERS = ",\t;|"
# JSON can name half of a character. os.fsdecode uses the other surrogates for bytes that are not UTF-8.
_HALF = re.compile("[\ud800-\udc7f\udd00-\udfff]")


class Faults:
    """Collects the errors in a file or a folder, and raises them all at once. `word` is the noun for what is wrong in
    an error: "line", "row", "item" or "image"."""

    def __init__(self, path: str | Path, word: str) -> None:
        self.path = path
        self.word = word
        self.way = ""
        """The last line of the error: what to do."""
        self._wrong: set[int | str] = set()
        self._kept: list[tuple[int, str]] = []

    def add(self, where: int | str, expected: str, found: object) -> None:
        """Adds an error, unless there is one at the same place. `where` is the number of a line or row, or the name of
        an image, for "`word` `where`: ..."."""
        is_first = where not in self._wrong
        self._wrong.add(where)
        if is_first and len(self._wrong) <= _MOST_KEPT:
            line = where if isinstance(where, int) else 0
            self._kept.append((line, f"{self.word} {where}: expected {expected}, found {found!r:.200}"))

    def check(self) -> None:
        if count := len(self._wrong):
            shown = [text for _, text in sorted(self._kept)[:_MOST_SHOWN]]
            more = [f"and {count - _MOST_SHOWN:,} more"] if count > _MOST_SHOWN else []
            wrong = f"{counted(count, self.word)} {'is' if count == 1 else 'are'} wrong"
            raise SourceError(f"{self.path}: {wrong}:", *shown, *more, *filter(None, [self.way]))


Rows = Iterable[tuple[int, list[Any]]]
"""(number, cells) of each row: the number of its line in a text file, or of its row in a parquet file or its item in a
JSON document; and its values, which are texts unless the table is JSON or parquet. None stands for a missing value."""


def read_rows(path: Path, known: Sequence[str], *, unlabeled: bool = False) -> tuple[list[str], Rows, Faults]:
    """Returns (the names of a table's columns, an iterator over its rows, the errors in the rows that it has read). A
    text file is CSV if its suffix says so, or if a column in its first line has a name in `known`; otherwise it is a
    list of lines. `unlabeled` says that labels are not needed: the categories of a COCO file are not read."""
    if not path.is_file():
        raise SourceError(f"{path}: expected a table, found {'no regular file' if path.exists() else 'nothing'}")
    with path.open("rb") as binary:
        start = binary.read(_MAX_LINE_NBYTES)
    if start.startswith(b"PAR1"):
        with open_parquet(path) as parquet:
            names = list(parquet.schema_arrow.names)
        return names, _parquet_rows(path), Faults(path, "row")
    if b"\0" in start and not is_utf16(start):
        kind = next((kind for magic, kind in _NO_TABLES.items() if start.startswith(magic)), "a binary file")
        raise SourceError(f"{path}: expected a table, found {kind}: unpack it, or save it as CSV")
    if (found := _read_json(path, known, unlabeled)) is not None:
        return found
    faults = Faults(path, "line")
    first = next((line for line in _lines(path) if line.strip()), "")
    *numbers, last = first.rstrip().split("\t")
    if len(numbers) > 1 and all(map(is_number, numbers)) and has_image_suffix(last):  # MXNet's list
        labels = ["label"] if len(numbers) == 2 else [f"label_{number}" for number in range(len(numbers) - 1)]
        return ["index", *labels, "path"], _csv_rows(path, "\t", len(numbers) + 1, faults, csv.QUOTE_NONE), faults
    delimiter, names = _sniff(path, known)
    words = first.split()
    is_header = len(words) > 2 and sum(word.lower() in known for word in words) > 1
    if len(names) == 1 and is_header and not any(map(has_image_suffix, words)):
        delimiter, names = " ", words
    if path.suffix.lower() in (".csv", ".tsv") or any(name.lower() in known for name in names):
        return names, _csv_rows(path, delimiter, len(names), faults), faults
    # Lines `PATH`, if the first is one word or ends as images' names do, or else `PATH LABEL`.
    names = ["path"] if _is_path(first.strip()) else ["path", "label"]
    return names, _listed_rows(path, len(names) - 1, known, faults), faults


def is_utf16(start: bytes) -> bool:
    """Whether a file with these first bytes is UTF-16. A path in a list may begin with the same two bytes."""
    return start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and b"\0" in start


@contextlib.contextmanager
def _open(path: Path) -> Iterator[TextIO]:
    # utf-8-sig, as spreadsheets begin their files with a byte order mark; paths need not be UTF-8.
    try:
        with path.open("rb") as binary:
            encoding = "utf-16" if is_utf16(binary.read(_MAX_LINE_NBYTES)) else "utf-8-sig"
        with path.open(encoding=encoding, errors="surrogateescape", newline="") as file:
            yield file
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path}: cannot read the table: {getattr(error, 'strerror', None) or error}") from None


def _lines(path: Path) -> Iterator[str]:
    number = 0
    with _open(path) as file:
        while line := file.readline(_MAX_LINE_NBYTES):
            number += 1
            if len(line) == _MAX_LINE_NBYTES:
                most = f"fewer than {_MAX_LINE_NBYTES:,} characters"
                raise SourceError(f"{path}: line {number}: expected {most}, found a longer line")
            yield line


def _sniff(path: Path, known: Sequence[str]) -> tuple[str, list[str]]:
    """Returns (delimiter, names in the first line) for the delimiter with which a name is in `known`; if there is no
    such delimiter, for the one that gives the most names."""
    found: dict[str, list[str]] = {}
    for delimiter in _DELIMITERS:
        with contextlib.suppress(csv.Error):  # the names are no CSV
            found[delimiter] = [*map(str.strip, next(csv.reader(_lines(path), delimiter=delimiter, strict=True), []))]
    return max(
        found.items(), key=lambda one: (any(name.lower() in known for name in one[1]), len(one[1])), default=(",", [])
    )


def _csv_rows(path: Path, delimiter: str, width: int, faults: Faults, quoting: Any = csv.QUOTE_MINIMAL) -> Rows:
    records = csv.reader(_lines(path), delimiter=delimiter, strict=True, quoting=quoting)
    try:
        if quoting != csv.QUOTE_NONE:
            next(records)  # the names
        for record in records:
            if len(record) != width:
                if record:
                    faults.add(records.line_num, f"{width} fields", delimiter.join(record))
            elif any(_is_torn(cell, delimiter) for cell in record if '"' in cell or "\n" in cell):
                faults.add(records.line_num, "quotes around whole fields", delimiter.join(record))
            else:
                yield records.line_num, record
    except csv.Error as error:
        faults.add(records.line_num, "valid CSV", str(error))


def _is_torn(cell: str, delimiter: str) -> bool:
    """Whether a stray quote has made a cell: it begins with a blank and a quote, or contains other rows."""
    if cell[:1].isspace() and cell.lstrip().startswith('"'):
        return True
    rows = (line.split(delimiter) for line in cell.splitlines()[1:])
    return any(len(row) > 1 and has_image_suffix(part.strip()) for row in rows for part in row)


def _parquet_rows(path: Path) -> Rows:
    with open_parquet(path) as file:
        batches = (batch.columns for batch in read_batches(path, file))
        for number, cells in enumerate(chain.from_iterable(zip(*map(_values, one), strict=True) for one in batches)):
            yield number, list(cells)


def _values(column: Any) -> list[Any]:
    """Returns the values of an Arrow column, with binary values decoded to texts."""
    is_binary = "binary" in str(column.type)
    return [os.fsdecode(one) if is_binary and isinstance(one, bytes) else one for one in column.to_pylist()]


def _listed_rows(path: Path, num_labels: int, known: Sequence[str], faults: Faults) -> Rows:
    start = islice(_lines(path), _MOST_KEPT * num_labels)
    have_suffixes = any(has_image_suffix(word) for line in start for word in line.split()[:-1])
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
        is_odd = separator in where or (number == 1 and not is_number(label))  # or only a name without suffix
        if where and have_suffixes and is_odd and not has_image_suffix(where):
            faults.add(number, "`PATH LABEL` (put a tab before a label with blanks, and leave a header out)", text)
        elif where:
            yield number, [where, label]
        else:
            faults.add(number, "`PATH LABEL`, or columns named in the first line", text)


def _is_path(text: str) -> bool:
    return has_image_suffix(text) or len(text.split()) == 1


# --- JSON -------------------------------------------------------------------------------------------------------------


def _read_json(path: Path, known: Sequence[str], unlabeled: bool) -> tuple[list[str], Rows, Faults] | None:
    """Returns what `read_rows` returns if the file is JSON lines or a JSON document; otherwise None."""
    with _open(path) as file:
        start = file.read(_MAX_LINE_NBYTES).lstrip()
    if not start.startswith(("{", "[")):
        return None
    with contextlib.suppress(ValueError, RecursionError):
        first, _, more = start.partition("\n")
        value = _parsed(first)
        if isinstance(value, dict) and (more.strip() or any(name.lower() in known for name in value)):
            faults = Faults(path, "line")
            return list(value), _object_rows(_json_lines(path, faults), list(value), faults), faults
    faults = Faults(path, "item")
    try:
        with _open(path) as file:
            value = _parsed(file.read())
    except (ValueError, RecursionError) as error:
        if start.startswith("[") and not path.suffix.lower().startswith(".json"):
            return None  # a list whose first path begins so
        raise SourceError(f"{path}: expected JSON, but {error}") from None
    if isinstance(value, dict):
        is_coco = isinstance(value.get("images"), list)
        value = _coco(path, value, unlabeled) if is_coco else [{"path": k, "label": v} for k, v in value.items()]
    if not value or not all(isinstance(one, dict) for one in value):
        raise SourceError(
            f"{path}: expected a JSON object for each image, or one object of labels by path, found {show(value)}"
        )
    return list(value[0]), _object_rows(enumerate(value), list(value[0]), faults), faults


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError(f"{show(found)} has {show(first_repeated(name for name, _ in pairs))} twice: remove one")
    return found


_parsed = json.JSONDecoder(object_pairs_hook=_distinct).decode


def _json_lines(path: Path, faults: Faults) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(_lines(path), start=1):
        try:
            if line.strip():
                yield number, _parsed(line)
        except (ValueError, RecursionError) as error:
            faults.add(number, f"a JSON object ({error})", line.strip())


def _object_rows(objects: Iterable[tuple[int, Any]], names: Sequence[str], faults: Faults) -> Rows:
    for number, value in objects:
        if not isinstance(value, dict) or any(
            isinstance(text, str) and _HALF.search(text) for text in chain(value, value.values())
        ):
            faults.add(number, "a JSON object", value)
        elif unknown := [name for name in value if name not in names]:
            faults.add(number, f"only the names of the first {faults.word}, {', '.join(names)}", unknown[0])
        else:
            yield number, [value.get(name) for name in names]


def _coco(path: Path, document: dict[str, Any], unlabeled: bool) -> list[dict[str, Any]]:
    """Returns {"file_name": ..., "category": ...} of each image in a JSON document as COCO and iNaturalist have it; if
    `unlabeled`, or without annotations, no category."""
    annotations = [] if unlabeled else document.get("annotations") or []
    categories = document.get("categories") or [] if annotations else []
    found: dict[Any, str] = {}
    try:
        files = {one["id"]: one["file_name"] for one in document["images"]}
        names = {one["id"]: one["name"] for one in categories}
        for one in annotations:
            file, name = files[one["image_id"]], names[one["category_id"]]
            if (first := found.setdefault(one["image_id"], name)) != name:
                both = f"{first!r} and {name!r} for {file!r}"
                raise SourceError(f"{path}: expected one category for each image, found {both}: pass `--labels none`")
    except (KeyError, TypeError) as error:
        expected = "images (id, file_name), annotations (image_id, category_id) and categories (id, name)"
        raise SourceError(f"{path}: expected {expected}, found none for {error}") from None
    if len(files) < len(document["images"]) or len({*names.values()}) < len(categories):
        raise SourceError(f"{path}: expected distinct ids of images, ids and names of categories, found equal ones")
    return [
        {"file_name": file, **({"category": found.get(image)} if annotations else {})} for image, file in files.items()
    ]
