"""Lists the images in a table, or adds the labels, splits and numbers of tables to the images of another SRC.

An error counts all invalid rows and shows ten, not only the first, so a table can be corrected in one go.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.conversion.arrays import Label, as_float32
from shardio.conversion.images.headers import has_image_suffix
from shardio.conversion.options import EmptyClasses, Labels
from shardio.conversion.sources.collection import Collection, ColumnTable, Fault, FileOrigin, Source
from shardio.conversion.sources.listing import Found, Listing
from shardio.conversion.sources.names import DEFAULT_SPLIT, are_measures, in_split_order, known_split, parse_number
from shardio.conversion.sources.table import Contents, Table, read_table
from shardio.errors import SourceError, counted
from shardio.format.layout import RowType, check_array_name, check_kind

# If none of the first files is there, the paths are relative to another folder.
_PROBED = 20

_INT64 = -(1 << 63), (1 << 63) - 1, "integers that fit in int64"
# float64 holds integers exactly up to here.
_EXACT = -(1 << 53), 1 << 53, "-2**53 to 2**53, as other cells are fractions or empty"
_INTEGER = re.compile(r"[+-]?[0-9]+", re.ASCII)


@dataclass
class _Rows(Listing):
    """The Listing of images that tables describe. The `where` of an image is (its table, the index of its row).

    Images of splits without a table have no `where`.
    """

    tables: Sequence[Contents] = ()

    def refuse(self, one: Found, expected: str, found: object) -> Fault | None:
        content, row = one.where
        content.faults.add(content.lines[row], expected, found)
        return None

    def refuse_repeat(self, one: Found, first: Found) -> None:
        (content, row), (other, line) = one.where, first.where
        file = "" if other is content else f" of {other.path.name}"
        expected = f"a path that is not in {content.faults.word} {other.lines[line]}{file} already"
        self.refuse(one, expected, content.paths[row])

    def check(self) -> None:
        for content in self.tables:
            content.faults.check()

    def collect(self, labels: Labels | None = None, empty_classes: EmptyClasses = "keep") -> Collection:
        collection = super().collect(labels, empty_classes)
        kind = ""
        if any(content.label_names for content in self.tables):
            given = (source.label for sources in collection.splits.values() for source in sources)
            first = next((label for label in given if label is not None), None)
            kind = f" ({counted(len(collection.classes), 'class')})"
            if isinstance(first, tuple):
                kind = f" (float32, {counted(len(first), 'number')})"
        notes = tuple(f"{content.path.name}: {content.note}{kind}" for content in self.tables)
        columns = self._columns() if any(content.numbers for content in self.tables) else None
        return replace(collection, notes=(*collection.notes, *notes), columns=columns)

    def _columns(self) -> ColumnTable:
        keys: list[bytes] = []
        parts = []
        for content in self.tables:
            everything = chain.from_iterable(self.found.values())
            mine = sorted((one.where[1], one.key) for one in everything if one.where[0] is content)
            keys += [key for _, key in mine]
            parts.append({name: _column(content, name, [row for row, _ in mine]) for name in content.numbers})
        types = [{name: numbers.dtype.str for name, numbers in part.items()} for part in parts]
        if others := [one for one in types if one != types[0]]:
            raise SourceError(f"tables: expected the same columns of numbers in all, found {types[0]} and {others[0]}")
        values = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return ColumnTable({key: row for row, key in enumerate(keys)}, values)


def list_table(table: Table, *, unlabeled: bool = False) -> Listing:
    """Returns the images that a table lists, in the order of its rows; without labels if `unlabeled`.

    Paths are absolute, or relative to the table's root, by default its folder. A key is the path of the image, relative
    to the root if the image is below the root. A missing file becomes a source that the conversion refuses. An invalid
    row raises SourceError, here or from `collect`.
    """
    content = read_table(table, unlabeled=unlabeled)
    folder = Path(os.path.abspath(table.root)) if table.root is not None else table.path.parent

    @cache
    def images_in(above: str) -> Mapping[str, list[str]]:
        """Maps each image name without suffix to the sorted paths of the folder's images that have it."""
        found: dict[str, list[str]] = {}
        with contextlib.suppress(OSError):
            for name in sorted(filter(has_image_suffix, os.listdir(folder / above))):
                found.setdefault(os.path.splitext(name)[0], []).append(os.path.join(above, name))
        return found

    def add_suffix(path: str) -> list[str]:
        above, name = os.path.split(path)
        return images_in(above).get(name, [])

    probed = content.paths[:_PROBED]
    lacks_suffixes = not any(os.path.lexists(folder / path) for path in probed)
    if lacks_suffixes and probed and not any(map(add_suffix, probed)):
        content.faults.check()
        raise _nowhere(table, folder, probed)
    below = os.path.join(folder, "")
    rows: list[tuple[str, Found]] = []
    for row, path in enumerate(content.paths):
        names = add_suffix(path) if lacks_suffixes else []
        if len(names) > 1:
            expected = f"the path of one image, and not of {names[0]!r} and {names[1]!r}"
            content.faults.add(content.lines[row], expected, path)
        place = next(iter(names), path)
        key = os.path.normpath(os.path.join(below, place))
        key = key[len(below) :] if key.startswith(below) else key if os.path.isabs(place) else os.path.normpath(place)
        found = Found(os.fsencode(key), None, os.fsencode(place) if key != place else None, (content, row))
        rows.append((content.splits[row] or DEFAULT_SPLIT, found))
    return _listing(Collection(FileOrigin(folder), kind="list"), [content], rows)


def describe(collection: Collection, tables: Mapping[str, Contents]) -> Collection:
    """Returns the collection with the labels, splits and numbers of tables.

    `tables` are by split; a table by "" is for all splits. A path in a table is a key or a path in SRC. It may lack the
    suffix, or the folder of the table's split.

    If tables have labels, or SRC has none and is not a dataset, the tables list the images: an image only in SRC is
    left out and counted, and an image only in a table becomes a source that the conversion refuses. Otherwise, every
    image in SRC needs a row, and rows without an image are counted. Splits without a table stay unchanged.
    """
    contents = list(tables.values())
    is_labeled = any(sources[0].label is not None for sources in collection.splits.values())
    tables_list = any(content.label_names for content in contents) or (not is_labeled and collection.kind != "dataset")
    images = _Images(collection)
    ignored = Counter(collection.ignored)
    used: set[bytes] = set()
    rows: list[tuple[str, Found]] = []
    for given, content in tables.items():
        for row, path in enumerate(content.paths):
            names = [posixpath.normpath(path), *([f"{given}/{path}"] if given else [])]
            fitting = images.find(names)
            where = content, row
            if len(fitting) > 1:
                keys = " and ".join(repr(os.fsdecode(source.key)) for _, source in fitting[:2])
                content.faults.add(content.lines[row], f"the path of one image, and not of {keys}", path)
                continue
            if fitting:
                ((split, source),) = fitting
                used.add(source.key)
                found = Found(source.key, source.label, source.place, where)
            elif tables_list:
                missing = Fault(f"expected an image at this path in SRC, as {content.path.name} lists it, found none")
                split = known_split(names[0].split("/")[0]) or DEFAULT_SPLIT
                found = Found(os.fsencode(names[0]), None, missing, where)
            else:
                ignored["row without an image"] += 1
                continue
            rows.append((content.splits[row] or given or split, found))
        content.faults.check()
        if content.paths and not used:
            raise SourceError(
                f"{content.path}: expected paths of images in SRC, such as {images.first!r}, found only paths without "
                f"an image in SRC, such as {content.paths[0]!r}"
            )
    covers_all = "" in tables or len(collection.splits) == 1
    described = [split for split in collection.splits if covers_all or split in tables]
    left = [source.key for split in described for source in collection.splits[split] if source.key not in used]
    if left and not tables_list:
        raise SourceError(
            f"{contents[0].path}: expected a row for every image in SRC, found no row for {len(left):,} of "
            f"{counted(collection.num_sources, 'image')}, such as {os.fsdecode(left[0])!r}"
        )
    if left:
        ignored["image in no table"] += len(left)
    rest = {split: sources for split, sources in collection.splits.items() if split not in described}
    if rest and any(content.numbers for content in contents):
        found_none = f"found no table for {next(iter(rest))!r}"
        table = next(content.path for content in contents if content.numbers)
        raise SourceError(
            f"{table}: a table with columns of numbers needs a table for every split; {found_none}: add one, or leave "
            "the columns out"
        )
    return _listing(replace(collection, splits=rest, ignored=ignored), contents, rows).collect("folders")


class _Images:
    """Finds the images of a collection by their paths or keys, with or without suffix."""

    def __init__(self, collection: Collection) -> None:
        self._found: dict[str, tuple[str, Source]] = {
            os.fsdecode(name): (split, source)
            for split, sources in collection.splits.items()
            for source in sources
            for name in (source.place, source.key)
            if isinstance(name, bytes)
        }
        self.first = next(iter(self._found), "")
        self._stems: dict[str, str] = {}
        self._twins: dict[str, list[str]] = {}
        """All paths with the same stem (path without suffix), for each stem of several paths."""
        for path in self._found:
            stem = os.path.splitext(path)[0]
            if (first := self._stems.setdefault(stem, path)) != path:
                self._twins.setdefault(stem, [first]).append(path)

    def find(self, names: Sequence[str]) -> list[tuple[str, Source]]:
        """Returns the (split, source) of each image whose path or key is in `names`.

        If there is none, returns the images whose path or key without suffix is in `names`.
        """
        paths = [name for name in names if name in self._found] or [
            path for name in names if name in self._stems for path in self._twins.get(name, [self._stems[name]])
        ]
        return list({self._found[path][1].key: self._found[path] for path in paths}.values())


def _nowhere(table: Table, folder: Path, paths: Sequence[str]) -> SourceError:
    """Returns the error for a table whose first paths, `paths`, are all missing."""
    way = "copy the images to files here" if "://" in paths[0] else "give the folder of the paths by `--root`"
    found = f"{paths[0]!r} is not in {folder}: {way}"
    if os.path.isabs(paths[0]):
        there = next(folder for folder in Path(paths[0]).parents if os.path.lexists(folder))
        found = f"of {paths[0]!r} only {str(there)!r} exists: correct the paths, or mount their folder"
    return SourceError(f"{table.path}: expected images at the first {counted(len(paths), 'path')}, found none: {found}")


def _listing(collection: Collection, contents: Sequence[Contents], rows: Sequence[tuple[str, Found]]) -> Listing:
    """Returns the Listing of `rows` of tables and of the images of `collection`, which have no table.

    If the tables have labels, `rows` get the tables' labels and classes.
    """
    found: dict[str, list[Found]] = {split: [] for split in in_split_order(split for split, _ in rows)}
    has_labels = any(content.label_names for content in contents)
    classes: tuple[str, ...] | None = collection.classes
    labels: Sequence[str | Label] = [one.label for _, one in rows]
    if has_labels:
        classes, labels = _read_labels(contents, rows)
    for (split, one), label in zip(rows, labels, strict=True):
        found[split].append(one._replace(label=label))
    for split, sources in collection.splits.items():
        found.setdefault(split, []).extend(Found(source.key, source.label, source.place) for source in sources)
    names = {} if has_labels else dict(zip(collection.classes, collection.class_names, strict=False))
    return _Rows(contents[0].path, found, collection, classes, names, keeps_order=True, tables=contents)


# --- labels -----------------------------------------------------------------------------------------------------------


def _read_labels(
    contents: Sequence[Contents], rows: Sequence[tuple[str, Found]]
) -> tuple[tuple[str, ...] | None, Sequence[str | tuple[float, ...] | None]]:
    """Returns (classes, label of each row). Adds errors to the faults of the tables.

    For class names and integers, labels are texts, and classes are None, as they are still to be numbered. For other
    numbers, labels are tuples of float32 numbers, and classes name their elements; () for a single column.
    """
    labeled = [content for content in contents if content.label_names]
    if len({content.label_names if len(content.label_names) > 1 else () for content in labeled}) > 1:
        expected, found = (", ".join(one.label_names) for one in (labeled[0], labeled[-1]))
        raise SourceError(f"{labeled[-1].path}: expected labels from {expected}, as in other tables, found {found}")
    cells = []
    for _, one in rows:
        content, row = one.where
        cells.append(cell := content.labels[row])
        if isinstance(cell, dict):  # of JSON lines; its text would be a class name
            content.faults.add(content.lines[row], "a name, a number or a list of numbers as label", cell)
    texts = [None if cell is None else str(int(cell) if isinstance(cell, bool) else cell) for cell in cells]
    single = all(len(content.label_names) <= 1 for content in contents)
    if single and not any(isinstance(cell, (list, tuple)) for cell in cells) and not are_measures(filter(None, texts)):
        return None, texts
    return () if single else labeled[0].label_names, _numbers(rows, cells)


def _numbers(rows: Iterable[tuple[str, Found]], cells: Iterable[Any]) -> list[tuple[float, ...] | None]:
    labels: list[tuple[float, ...] | None] = []
    width = 0
    for (_, one), cell in zip(rows, cells, strict=True):
        content, row = one.where
        labels.append(None)
        if cell is None:
            continue
        values = cell if isinstance(cell, (list, tuple)) else (cell,)
        try:
            found = as_float32([parse_number(value) if isinstance(value, str) else float(value) for value in values])
            if not (len(found) and np.isfinite(found).all()):
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            content.faults.add(content.lines[row], "numbers as labels", cell)
            continue
        labels[-1] = tuple(map(float, found))
        width = width or len(found)
        if len(found) != width:
            content.faults.add(content.lines[row], f"{width} numbers, as in other rows", cell)
    return labels


# --- numbers ----------------------------------------------------------------------------------------------------------


def _column(content: Contents, name: str, rows: Sequence[int]) -> NDArray[np.int64] | NDArray[np.float64]:
    """Returns the numbers of a table's column in `rows`, int64 or float64 (rows,).

    A column of only integers becomes int64. Any other column becomes float64, and its empty cells NaN. Raises
    SourceError, with the row's line, for a cell that is not a number, or an integer that the dtype cannot hold exactly.
    """

    def wrong(row: int, error: object) -> SourceError:
        return SourceError(f"{content.path}, {content.faults.word} {content.lines[row]}: column {name!r}: {error}")

    found: list[int | float] = []
    for row in rows:
        try:
            found.append(_parse(content.numbers[name][row]))
        except ValueError as error:
            raise wrong(row, error) from None
    are_floats = any(isinstance(number, float) for number in found)
    least, most, expected = _EXACT if are_floats else _INT64
    for row, number in zip(rows, found, strict=True):
        if isinstance(number, int) and not least <= number <= most:
            raise wrong(row, f"expected {expected}, found {number}")
    values = np.array(found, "<f8" if are_floats else "<i8")
    if are_floats:
        values[np.isnan(values)] = np.nan  # all with the same bytes
    try:
        check_kind(check_array_name(name), "array", RowType(values.dtype.str, ()), None)
    except ValueError as error:
        raise SourceError(f"{content.path}: column {name!r}: {error}") from None
    return values


def _parse(cell: Any) -> int | float:
    """Returns the number in a cell; NaN for an empty cell. Raises ValueError for other text."""
    text = "" if cell is None else str(int(cell) if isinstance(cell, bool) else cell).strip()
    if _INTEGER.fullmatch(text):
        return int(text)
    try:
        if not text.isascii() or "_" in text:  # which Python's float would take
            raise ValueError
        return float(text or "nan")
    except ValueError:
        raise ValueError(f"expected a number or an empty cell, found {text[:80]!r}") from None
