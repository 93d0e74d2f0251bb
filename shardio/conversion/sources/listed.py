"""Collections whose images tables list or describe.

An error names all wrong rows, not only the first, so a table can be corrected in one go.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from shardio.conversion.arrays import Label, as_float32
from shardio.conversion.images.headers import has_image_suffix
from shardio.conversion.sources.collection import Collection, Fault, FileOrigin, Source
from shardio.conversion.sources.columns import make_columns, merge_columns
from shardio.conversion.sources.names import (
    DEFAULT_SPLIT,
    are_measures,
    in_split_order,
    known_split,
    number_labels,
    parse_number,
)
from shardio.conversion.sources.table import Contents, Table, read_table
from shardio.errors import SourceError, counted

# If none of the first files is there, the paths are relative to another folder.
_PROBED = 20


_Row = tuple[Contents, int, str, Source]
"""A table, the number of a row among those of the table, and the split and the source of the row."""


def scan_table(table: Table, *, unlabeled: bool = False) -> Collection:
    """Returns the images that a table lists, in its order; without its labels if `unlabeled`.

    Paths are absolute, or relative to the table's root. A key is the path, relative if the file is below the root. A
    missing file is a source that will be refused; a mistake in the table itself raises SourceError.
    """
    content = read_table(table, unlabeled=unlabeled)
    folder = Path(os.path.abspath(table.root)) if table.root is not None else table.path.parent

    @cache
    def images_in(above: str) -> Mapping[str, list[str]]:
        """Returns the paths of the images in a folder, sorted, by their names without suffix."""
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
    rows: list[_Row] = []
    for row, path in enumerate(content.paths):
        names = add_suffix(path) if lacks_suffixes else []
        if len(names) > 1:
            expected = f"the path of one image, and not of {names[0]!r} and {names[1]!r}"
            content.faults.add(content.lines[row], expected, path)
        place = next(iter(names), path)
        key = os.path.normpath(os.path.join(below, place))
        key = key[len(below) :] if key.startswith(below) else key if os.path.isabs(place) else os.path.normpath(place)
        same = os.fsencode(key) == os.fsencode(place)
        source = Source(os.fsencode(key), None, None if same else os.fsencode(place))
        rows.append((content, row, content.splits[row] or DEFAULT_SPLIT, source))
    return _collect(Collection(FileOrigin(folder), (), {}, {}, kind="list"), [content], rows)


def describe(collection: Collection, tables: Mapping[str, Contents]) -> Collection:
    """Returns the images of a collection with the labels, splits and numbers in tables.

    `tables` are by split, or one by "". Paths are keys, or files in SRC, and may lack a suffix, or the folder of the
    table's split. Tables list the images, unless the collection has labels and they have none: an image that is in SRC
    alone is left out and counted, and one that is in a table alone is a source that will be refused. Otherwise the
    collection lists the images: each must be in a table, and other rows are counted. Splits without a table stay as
    they are.
    """
    contents = list(tables.values())
    is_labeled = any(sources[0].label is not None for sources in collection.splits.values())
    tables_list = any(content.labels for content in contents) or (not is_labeled and collection.kind != "dataset")
    images = _Images(collection)
    ignored = Counter(collection.ignored)
    used: set[bytes] = set()
    rows: list[_Row] = []
    for given, content in tables.items():
        for row, path in enumerate(content.paths):
            names = [posixpath.normpath(path), *([f"{given}/{path}"] if given else [])]
            fitting = images.find(names)
            if len(fitting) > 1:
                keys = " and ".join(repr(os.fsdecode(source.key)) for _, source in fitting[:2])
                content.faults.add(content.lines[row], f"the path of one image, and not of {keys}", path)
                continue
            if fitting:
                ((split, source),) = fitting
                used.add(source.key)
            elif tables_list:
                missing = Fault(f"expected an image at this path in SRC, as in {content.faults.path.name}, found none")
                split = known_split(names[0].split("/")[0]) or DEFAULT_SPLIT
                source = Source(os.fsencode(names[0]), None, missing)
            else:
                ignored["row without an image"] += 1
                continue
            rows.append((content, row, content.splits[row] or given or split, source))
        content.faults.check()
        if content.paths and not used:
            raise SourceError(
                f"{content.faults.path}: expected paths of images in SRC such as {images.first!r}, found "
                f"{content.paths[0]!r}, and no image at any path. Paths are relative to SRC"
            )
    covers_all = "" in tables or len(collection.splits) == 1
    described = [split for split in collection.splits if covers_all or split in tables]
    left = [source.key for split in described for source in collection.splits[split] if source.key not in used]
    if left and not tables_list:
        raise SourceError(
            f"{contents[0].faults.path}: expected a row for every image, found none for {len(left):,} of "
            f"{collection.num_sources:,}, such as {os.fsdecode(left[0])!r}. The first path in it is "
            f"{next(iter(contents[0].paths), '')!r}; paths are relative to SRC"
        )
    if left:
        ignored["image in no table"] += len(left)
    splits = {split: sources for split, sources in collection.splits.items() if split not in described}
    return _collect(replace(collection, splits=splits, ignored=ignored), contents, rows)


class _Images:
    """The images of a collection by path, with suffix and without."""

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
        """The paths of each stem that has several."""
        for path in self._found:
            stem = os.path.splitext(path)[0]
            if (first := self._stems.setdefault(stem, path)) != path:
                self._twins.setdefault(stem, [first]).append(path)

    def find(self, names: Sequence[str]) -> list[tuple[str, Source]]:
        """Returns (split, source) of each image with one of these names; without suffixes, if none has such a name."""
        paths = [name for name in names if name in self._found] or [
            path for name in names if name in self._stems for path in self._twins.get(name, [self._stems[name]])
        ]
        return list({self._found[path][1].key: self._found[path] for path in paths}.values())


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


def _collect(collection: Collection, contents: Sequence[Contents], rows: Sequence[_Row]) -> Collection:
    """Returns the collection with the sources of tables."""
    classes, labels = _read_labels(contents, rows)
    listed: dict[str, list[Source]] = {split: [] for split in in_split_order(split for _, _, split, _ in rows)}
    first: dict[bytes, tuple[Contents, int]] = {}  # of each image the table and the row
    for (content, row, split, source), label in zip(rows, labels, strict=True):
        other, there = first.setdefault(source.key, (content, row))
        if (other, there) != (content, row):
            where = "" if other is content else f" of {other.faults.path.name}"
            expected = f"a path that is not in {content.faults.word} {other.lines[there]}{where} already"
            content.faults.add(content.lines[row], expected, content.paths[row])
        if content.labels:
            source = replace(source, label=label)
        listed[split].append(source)
    for content in contents:
        content.faults.check()
    if not rows:
        raise SourceError(f"{contents[0].faults.path}: expected rows with paths of images, found none")
    if collection.splits and any(content.numbers for content in contents):
        raise SourceError(
            f"{contents[0].faults.path}: expected a table for every split, as it has numbers for the index, found none "
            f"for {next(iter(collection.splits))!r}"
        )
    has_labels = any(content.labels for content in contents)
    kind = ""
    if has_labels:
        given = next((label for label in labels if label is not None), None)
        kind = f" ({counted(len(classes), 'class')})"
        if isinstance(given, tuple):
            kind = f" (float32, {counted(len(given), 'number')})"
    columns = []
    for content in (content for content in contents if content.numbers):
        mine = [(row, source.key) for other, row, _, source in rows if other is content]
        lines, keys = [content.lines[row] for row, _ in mine], [key for _, key in mine]
        numbers = {name: [cells[row] for row, _ in mine] for name, cells in content.numbers.items()}
        columns.append(make_columns(content.faults.path, content.faults.word, lines, keys, numbers))
    return replace(
        collection,
        classes=classes if has_labels else collection.classes,
        class_names=() if has_labels else collection.class_names,
        splits={**{split: tuple(sources) for split, sources in listed.items()}, **collection.splits},
        columns=merge_columns(columns) if columns else collection.columns,
        notes=(*collection.notes, *(f"{c.faults.path.name}: {c.note}{kind}" for c in contents)),
    )


# --- labels -----------------------------------------------------------------------------------------------------------


def _read_labels(contents: Sequence[Contents], rows: Sequence[_Row]) -> tuple[tuple[str, ...], Sequence[Label]]:
    """Returns (classes, label of each row). Adds mistakes to the faults.

    A split without any label has none, and so has a table without a column of labels.
    """
    labeled = [content for content in contents if content.labels]
    if len({tuple(content.labels) if len(content.labels) > 1 else () for content in labeled}) > 1:
        raise SourceError(
            f"{labeled[-1].faults.path}: expected the columns of labels of {labeled[0].faults.path}, in its order, "
            f"found {', '.join(labeled[-1].labels)} and not {', '.join(labeled[0].labels)}"
        )
    cells = [_cell(content, row) for content, row, _, _ in rows]
    for (content, row, _, _), cell in zip(rows, cells, strict=True):
        if isinstance(cell, dict):  # of JSON lines; its text would be a class name
            content.faults.add(content.lines[row], "a name, a number or a list of numbers as label", cell)
    full = {split for (_, _, split, _), cell in zip(rows, cells, strict=True) if cell is not None}
    single = all(len(content.labels) <= 1 for content in contents)
    texts = ["" if cell is None else str(int(cell) if isinstance(cell, bool) else cell) for cell in cells]
    if not single or any(isinstance(cell, (list, tuple)) for cell in cells) or are_measures(texts):
        return tuple(labeled[0].labels) if not single else (), list(_numbers(rows, cells, full))
    splits = [split for _, _, split, _ in rows]
    numbering = number_labels({(split, text) for split, text in zip(splits, texts, strict=True) if split in full})
    for (content, row, split, _), text in zip(rows, texts, strict=True):
        if split in full and (expected := numbering.expected.get((split, text))) is not None:
            content.faults.add(content.lines[row], expected, text)
    return numbering.classes, [
        numbering.labels.get(text) if split in full else None for split, text in zip(splits, texts, strict=True)
    ]


def _cell(content: Contents, row: int) -> Any:
    """Returns a row's label as it is written: a value; the values of several columns; None if there is none."""
    cells = tuple(column[row] for column in content.labels.values())
    return None if all(cell is None for cell in cells) else cells[0] if len(cells) == 1 else cells


def _numbers(rows: Iterable[_Row], written: Iterable[Any], full: Set[str]) -> Iterator[Label]:
    width = 0
    for (content, row, split, _), cell in zip(rows, written, strict=True):
        numbers: tuple[float, ...] = ()
        if split in full:
            cells = cell if isinstance(cell, (list, tuple)) else (cell,)
            try:
                found = as_float32([parse_number(one) if isinstance(one, str) else float(one) for one in cells])
                if not (len(found) and np.isfinite(found).all()):
                    raise ValueError
            except (TypeError, ValueError, OverflowError):
                content.faults.add(content.lines[row], "numbers as labels", cell)
            else:
                numbers = tuple(map(float, found))
                width = width or len(numbers)
                if len(numbers) != width:
                    content.faults.add(content.lines[row], f"{width} numbers, as in other rows", cell)
        yield numbers or None
