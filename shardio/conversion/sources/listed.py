"""Collections whose images tables list or describe.

An error names all wrong rows, not only the first, so a table can be corrected in one go.
"""

from __future__ import annotations

import contextlib
import math
import os
import posixpath
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import accumulate, repeat
from pathlib import Path
from typing import Any

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


def scan_table(table: Table, *, unlabelled: bool = False) -> Collection:
    """Returns the images that a table lists, in its order; without its labels if `unlabelled`.

    Paths are absolute, or relative to the table's root. A key is the path, relative if the file is below the root. A
    missing file is a source that will be refused; a mistake in the table itself raises SourceError.
    """
    content = read_table(table, unlabelled=unlabelled)
    folder = Path(os.path.abspath(table.root)) if table.root is not None else table.path.parent
    probed = content.paths[:_PROBED]
    add_suffix = _Suffixes(folder)
    lacks_suffixes = not any(os.path.lexists(folder / path) for path in probed)
    if lacks_suffixes and probed and not any(map(add_suffix.find, probed)):
        content.faults.check()
        raise _nowhere(table, folder, probed)
    below = os.path.join(folder, "")
    found = []
    for line, path in zip(content.lines, content.paths, strict=True):
        names = add_suffix.find(path) if lacks_suffixes else []
        if len(names) > 1:
            content.faults.add(line, f"the path of one image, and not of {names[0]!r} and {names[1]!r}", path)
        place = next(iter(names), path)
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
    images = _Images(collection)
    ignored = Counter(collection.ignored)
    used: set[bytes] = set()
    parts = []
    for given, content in zip(tables, contents, strict=True):
        found: list[tuple[str, Source]] = []
        kept = []
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
                missing = Fault(f"expected an image at this path in SRC, as in {content.table.path.name}, found none")
                split = known_split(names[0].split("/")[0]) or DEFAULT_SPLIT
                source = Source(os.fsencode(names[0]), None, missing)
            else:
                ignored["row without an image"] += 1
                continue
            kept.append(row)
            found.append((given or split, source))
        content.faults.check()
        if content.paths and not used:
            raise SourceError(
                f"{content.table.path}: expected paths of images in SRC such as {images.first!r}, found "
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


class _Suffixes:
    """Finds the images that paths without a suffix mean. Lists each folder once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders: dict[str, dict[str, list[str]]] = {}

    def find(self, path: str) -> list[str]:
        """Returns the paths of images that are `path` and a suffix, sorted."""
        folder, name = os.path.split(path)
        if folder not in self._folders:
            names: dict[str, list[str]] = {}
            with contextlib.suppress(OSError):
                for one in sorted(filter(has_image_suffix, os.listdir(self._root / folder))):
                    names.setdefault(os.path.splitext(one)[0], []).append(os.path.join(folder, one))
            self._folders[folder] = names
        return self._folders[folder].get(name, [])


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
        self._stems: dict[str, str] = {}
        self._twins: dict[str, list[str]] = {}
        """The paths of each stem that has several."""
        for path in self._found:
            stem = os.path.splitext(path)[0]
            if (first := self._stems.setdefault(stem, path)) != path:
                self._twins.setdefault(stem, [first]).append(path)

    @property
    def first(self) -> str:
        return next(iter(self._found), "")

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


def _collect(collection: Collection, parts: Sequence[tuple[Contents, Sequence[tuple[str, Source]]]]) -> Collection:
    """Returns the collection with the sources of tables: (split without the table's, source) of each row."""
    splits = [[given or split for given, (split, _) in zip(c.splits, found, strict=True)] for c, found in parts]
    classes, labels = _read_labels([content for content, _ in parts], splits)
    listed: dict[str, list[Source]] = {split: [] for split in in_split_order(name for part in splits for name in part)}
    first: dict[bytes, tuple[Contents, int]] = {}  # of each image the table and the line
    for (content, found), names, part in zip(parts, splits, labels, strict=True):
        boxes = content.boxes or repeat(None)
        for line, path, name, label, (_, source), some in zip(
            content.lines, content.paths, names, part, found, boxes, strict=False
        ):
            other, there = first.setdefault(source.key, (content, line))
            if (other, there) != (content, line):
                where = "" if other is content else f" of {other.table.path.name}"
                expected = f"a path that is not in {content.faults.word} {there}{where} already"
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
    if len({content.names if len(content.names) > 1 else () for content in labelled}) > 1:
        raise SourceError(
            f"{labelled[-1].table.path}: expected the columns of labels of {labelled[0].table.path}, in its order, "
            f"found {', '.join(labelled[-1].names)} and not {', '.join(labelled[0].names)}"
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
                numbers = tuple(map(float, as_float32([_number(number) for number in cells])))
            except (TypeError, ValueError, OverflowError):
                content.faults.add(line, "numbers as labels", cell)
            else:
                width = width or len(numbers)
                if len(numbers) != width:
                    content.faults.add(line, f"{width} numbers, as in other rows", cell)
        yield numbers or None


def _number(cell: Any) -> float:
    """Returns the number in a cell. Raises ValueError or TypeError if there is none, or it is not finite."""
    if isinstance(cell, str):
        return parse_number(cell)
    if not math.isfinite(number := float(cell)):
        raise ValueError
    return number
