"""Lists parquet files in the style of Hugging Face: images as bytes in one column, their labels in another.

Only the columns of labels and of file names are read here, which is cheap. The module `spool` reads the images.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from shardio.conversion.sources.collection import Collection, Item, identify
from shardio.conversion.sources.doubt import UNLABELED, DoubtError
from shardio.conversion.sources.listing import Found, Listing
from shardio.conversion.sources.names import DEFAULT_SPLIT, Ignored, entries, known_split, sorted_entries, split_name
from shardio.conversion.sources.spool import ParquetOrigin, TableFile, is_struct
from shardio.conversion.sources.table import (
    LABEL_NAMES,
    MISSING,
    MOST_SPLITS,
    NO_SPLITS,
    Table,
    column_reading,
    doubt_splits,
    listed,
    present,
    split_of_flag,
)
from shardio.errors import SourceError, counted
from shardio.format.layout import MAX_CLASSES, MAX_KEY_NBYTES, is_split_name
from shardio.format.parse import first_repeated
from shardio.sets.given import open_parquet, read_batches

_SUFFIX = ".parquet"
_NO_LABEL = -1
"""The label with which Hugging Face marks rows whose label is not public, as in ImageNet's test split."""
_TYPES_OF_LABELS = re.compile(r"u?int\d+|bool|(dictionary<values=)?(large_)?string(, .*)?")
# Other names of columns, of facts about the files and of captions.
_NO_LABELS = re.compile(
    r"((original|image)_)?(width|height|size|id|idx|index)|__index_level_\d__|.*(captions?|text|url|prompt|description)"
)

# train-00000-of-00294.parquet, also with a hash at its end.
_NUMBERED = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})(?:-[0-9a-f]+)?", re.ASCII)


def is_parquet(src: Path) -> bool:
    """Whether SRC is a parquet file, or a folder of parquet files, which may be in data/ or in folders of splits.

    Parquet files next to folders do not count, because they describe the content of the folders.
    """
    if src.is_file():
        return src.name.endswith(_SUFFIX)
    with contextlib.suppress(OSError):
        return any(_holds_files(src / name) for name in (".", "data", *filter(known_split, os.listdir(src))))
    return False


def _holds_files(folder: Path) -> bool:
    """Whether there are parquet files in a folder, and no folders."""
    with contextlib.suppress(OSError):
        found = list(entries(folder))
        return any(one.name.endswith(_SUFFIX) for one in found) and not any(one.is_dir() for one in found)
    return False


def holds_images(path: Path) -> bool:
    """Whether a parquet file has a column of images."""
    with open_parquet(path) as file:
        return any(map(_holds_images, file.schema_arrow.types))


def list_parquet(src: Path, named: Table | None = None, *, unlabeled: bool = False) -> Listing:
    """Returns the images of a parquet file, or of all parquet files in or below a folder, without reading an image.

    - Images are binary values, or structs with `bytes` and perhaps `path`. A row whose label is null or -1 is left out.
    - Labels are integers or texts. They are in the column that `named` names, or in the only one with a label's name.
      The classes of integers come from the ClassLabel in the files' Hugging Face metadata, or are numbers.
    - A split is named by files and folders, or by the column that `named` names.
    - A key is [SPLIT/]CLASS/NAME. NAME comes from the struct's path. If there is no path, or another image of the class
      has the same name, NAME is the number of the row in its split.
    """
    named = named or Table(src)
    given = Table(named.file, None, "", named.label_columns[:1], named.split_column, group_column=named.group_column)
    if named != given:
        expected = "one `--label-column`, `--split-column`, `--group-column` and nothing else"
        raise SourceError(f"{src}: images in parquet take {expected}")
    ignored = Ignored(src)
    folder, names = (src, _list(src, ignored)) if src.is_dir() else (src.parent, [src.name] if src.is_file() else [])
    if not names:
        raise SourceError(f"{src}: expected a parquet file, or parquet files in or below a folder, found none")
    splits = _group(folder, names, is_whole=src.is_file())
    tables = {
        name: _Reader(src, folder / name, split, named).read(unlabeled)
        for split, group in splits.items()
        for name in group
    }
    classes = _common_classes(src, folder, tables)
    rows: dict[str, list[Found]] = {}
    files: dict[bytes, TableFile] = {}
    for split, group in splits.items():
        mine = {name: tables[name] for name in group}
        found = list(_find(folder, split, mine, classes))
        if lacking := sum(table.file.num_rows for table in mine.values()) - len(found):
            ignored.add("row without a label", f"in {group[0]}", lacking)
        for word, one in found:
            rows.setdefault(word, []).append(one)
        if found:
            files |= {os.fsencode(name): table.file for name, table in mine.items()}
    if not rows:
        raise DoubtError(src, "expected rows with a label, found none", [UNLABELED])
    known = Collection(
        ParquetOrigin(folder, tables[names[0]].image, files),
        ignored=ignored,
        kind="parquet",
        notes=tuple(dict.fromkeys(f"{src.name}: {table.note}" for table in tables.values() if table.note)),
        groups={one.key: one.where for one in chain.from_iterable(rows.values()) if one.where},
    )
    return Listing(src, rows, known, classes or None)


def _list(root: Path, ignored: Ignored) -> list[str]:
    """Returns the paths of the parquet files in or below `root`, relative to `root`, sorted."""
    found, pending = [], [root]
    while pending:
        for entry in sorted_entries(pending.pop(), ignored):
            path = Path(entry.path)
            if os.path.isdir(path):
                pending += [] if entry.is_symlink() else [path]
            elif entry.name.endswith(_SUFFIX) and path.is_file():  # a link, too: that is how downloads are cached
                found.append(str(path.relative_to(root)))
            else:
                ignored.add("not a parquet file", entry.path)
    return sorted(found)


def _split_of(name: str) -> tuple[str, str]:
    """Returns (the split that a file's name or folder names, the pattern of all files of the split); or ("", "")."""
    *folders, file = name.split("/")
    stem = file.removesuffix(_SUFFIX)
    if (match := _NUMBERED.fullmatch(stem)) and is_split_name(match[1]):
        return split_name(match[1].lower()), "/".join([*folders, f"{match[1]}-*-of-{match[3]}"])
    word = re.sub(r"(?:[-_.]?[0-9]+)+$", "", stem)
    if split := known_split(word):
        return split, "/".join([*folders, f"{word}*"])
    for depth in range(len(folders), 0, -1):
        if split := known_split(folders[depth - 1]):
            return split, "/".join([*folders[:depth], "*"])
    return "", ""


def _group(root: Path, names: Sequence[str], is_whole: bool) -> dict[str, list[str]]:
    """Returns the files of each split. Unless `is_whole`, raises SourceError if one of a numbered series is missing."""
    groups: dict[str, list[str]] = {}
    patterns: dict[str, str] = {}
    for name in names:
        split, pattern = _split_of(name)
        if patterns.setdefault(split, pattern) != pattern:
            series = f"{patterns[split]!r} and {pattern!r}: convert a folder with only one of them"
            raise SourceError(f"{root}: expected one series of files for the split {split!r}, found {series}")
        groups.setdefault(split, []).append(name)
    if "" in groups and len(groups) > 1:
        other = next(name for name in names if _split_of(name)[0])
        raise SourceError(f"{root / groups[''][0]}: expected a split in its name or folder, as in {other}; found none")
    for group in [] if is_whole else groups.values():
        numbered = [match for name in group if (match := _NUMBERED.fullmatch(name.removesuffix(_SUFFIX)))]
        total = int(numbered[0][3]) if numbered else 0  # all have the same form, and the same total
        if missing := sorted(set(range(total)) - {int(match[2]) for match in numbered}):
            number = f"found {counted(len(numbered), 'file')}; number {missing[0]:05d} is missing"
            raise SourceError(f"{root}: expected {total:,} files like {group[0]}, {number}: complete the download")
    return groups


_Row = tuple[int | str | None, str | None, bytes | None, str]
"""The label, the word for the split, the path and the group of an image. None: it has none, or no column has splits."""


@dataclass(frozen=True, eq=False)
class _Table:
    file: TableFile
    image: str
    classes: tuple[str, ...]
    label: str
    """The name of the column of labels; "" if there is none."""
    note: str
    rows: Sequence[_Row]


@dataclass
class _Reader:
    """Chooses the columns of a parquet file in SRC, and reads all but the images. `own` is the split of the file."""

    src: Path
    path: Path
    own: str
    named: Table

    def read(self, unlabeled: bool) -> _Table:
        path, identity = self.path, identify(self.path)
        with open_parquet(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
            features = _features(path, schema.metadata or {})
            self.kinds = {name: one.get("_type") for name, one in features.items()}
            self.types: dict[str, Any] = dict(zip(schema.names, schema.types, strict=True))
            if (repeated := first_repeated(schema.names)) is not None:
                raise SourceError(f"{path}: expected distinct columns, found {repeated[:80]!r} twice")
            image = self._choose_image()
            group = self._existing(self.named.group_column, self.types)
            others = {name: kind for name, kind in self.types.items() if name not in (image, group)}
            self._look(file, [name for name, kind in others.items() if _TYPES_OF_LABELS.fullmatch(str(kind))])
            split = self._choose_split()
            label = "" if unlabeled else self._choose_label(split)
            fields = _fields(self.types[image])
            place = f"{image}.path" if "path" in fields else ""
            wanted = list(dict.fromkeys(filter(None, (label, split, group, place))))
            rows: list[_Row] = [] if wanted else [(0, None, None, "")] * metadata.num_rows
            for batch in read_batches(path, file, wanted) if wanted else ():
                rows += self._rows(batch, label, split, group, image if place else "")
            leaf_name = f"{image}.bytes" if fields else image
            leaf = next(i for i in range(metadata.num_columns) if metadata.schema.column(i).path == leaf_name)
            parts = [metadata.row_group(i).column(leaf) for i in range(metadata.num_row_groups)]
        table_file = TableFile(len(rows), sum(part.total_uncompressed_size for part in parts), identity)
        unused = [name for name in self.types if name not in (image, label, split, group)]
        note = f"labels from {label!r}" if label else "no labels" if unused else ""
        note += f", splits from {split!r}" * bool(split) + f", not used: {listed(unused)}" * bool(unused)
        return _Table(table_file, leaf_name, _class_names(path, features.get(label, {})), label, note, rows)

    def _rows(self, batch: Any, label: str, split: str, group: str, image: str) -> Iterator[_Row]:
        def cells(name: str, otherwise: Any) -> list[Any]:
            return batch.column(name).to_pylist() if name else [otherwise] * len(batch)

        paths = batch.column(image).flatten()[0].cast("binary").to_pylist() if image else [None] * len(batch)
        for cell, word, path, one in zip(cells(label, 0), cells(split, None), paths, cells(group, ""), strict=True):
            if split:
                word = self.own or DEFAULT_SPLIT if word is None else split_of_flag(split, word)
            if group and present(one) is None:
                raise SourceError(f"{self.path}: expected a group in the column {group!r}, found an empty cell")
            yield _label(cell), word, path and path[-MAX_KEY_NBYTES - 1 :], str(one)

    def _choose_image(self) -> str:
        """Returns the column "image", or the one that the metadata names, or the only one of a suitable type."""
        columns = [column for column, kind in self.types.items() if _holds_images(kind)]
        described = [column for column in columns if self.kinds.get(column) == "Image"]
        for candidates in ([c for c in columns if c == "image"], described, columns):
            if len(candidates) == 1:
                return candidates[0]
        found, hint = ", ".join(columns)[:200] or "none", "Rename the column to use to 'image'"
        if "image" in self.types and "image" not in columns:
            found, hint = f"'image' of type {self.types['image']}", "Rewrite it as binary, or struct with bytes"
        elif not columns:
            hint = "If its rows have paths of images, give the folder of the paths by `--root`"
        expected = "expected one column of images (binary, or struct with bytes)"
        raise SourceError(f"{self.path}: {expected}, found {found}. {hint}")

    def _look(self, file: Any, names: Sequence[str]) -> None:
        """Reads columns in the first rows, or in all rows if a column has only one value there: rows may be sorted."""
        first = next(read_batches(self.path, file, names), None) if names else None
        self.seen = {name: [] if first is None else first.column(name).drop_null().to_pylist() for name in names}
        for name in (name for name, values in self.seen.items() if len(set(values)) == 1):
            batches = read_batches(self.path, file, [name])
            self.seen[name] = [value for batch in batches for value in batch.column(0).drop_null().to_pylist()]

    def _choose_split(self) -> str:
        """Returns the named column of splits, or "". Raises DoubtError if another column may have splits."""
        if self.named.split_column:
            return "" if self.named.split_column == NO_SPLITS else self._existing(self.named.split_column, self.seen)
        known = (*self.named.label_columns, *LABEL_NAMES)
        asked = {name: set(map(str, values)) for name, values in self.seen.items() if name.lower() not in known}
        doubt_splits(self.src, {one: words for one, words in asked.items() if 0 < len(words) <= MOST_SPLITS}, self.own)
        return ""

    def _choose_label(self, split: str) -> str:
        """Returns the named column of labels, or the one with a label's name; "" if no column looks like labels."""
        if self.named.label_columns:
            return self._existing(self.named.label_columns[0], self.seen)
        names = [name for name in self.types if name.lower() in LABEL_NAMES or self.kinds.get(name) == "ClassLabel"]
        names = [name for name in names if name == "label"] or names
        if len(names) == 1 and names[0] in self.seen:
            return names[0]
        if len(names) == 1:
            found = f"{names[0]!r} of type {self.types[names[0]]}. Rewrite it as integers or texts"
            raise DoubtError(self.src, f"{self.path.name}: expected a column of labels, found {found}", [UNLABELED])
        # A text that has every value twice in the mean is no caption.
        names = names or [
            name
            for name, values in self.seen.items()
            if name != split and not _NO_LABELS.fullmatch(name.lower())
            if not isinstance(next(iter(values), ""), str) or 1 < len(set(values)) <= (len(values) + 1) // 2
        ]
        if names:
            found = f"{self.path.name}: expected one column with a label's name, found {listed(names)}"
            raise DoubtError(self.src, found, [*map(column_reading, names[:3]), UNLABELED])
        return ""

    def _existing(self, name: str, columns: Iterable[str]) -> str:
        if name and name not in columns:
            expected = f"expected a column {name!r} of integers or texts"
            raise SourceError(f"{self.path}: {expected}, found {listed(columns)}")
        return name


def _label(cell: Any) -> int | str | None:
    """Returns the integer or text in a cell, equal texts as one object; None if there is no label."""
    if isinstance(cell, str):
        text = present(cell, MISSING)
        return text and sys.intern(text)
    return None if cell in (None, _NO_LABEL) else int(cell)


def _features(path: Path, metadata: Mapping[bytes, bytes]) -> Mapping[str, Mapping[str, Any]]:
    """Returns the features that Hugging Face `datasets` writes: {"label": {"names": [...], "_type": "ClassLabel"}}."""
    try:
        features = json.loads(metadata.get(b"huggingface", b'{"info": {"features": {}}}'))["info"]["features"]
        return {str(name): one for name, one in features.items() if isinstance(one, dict)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        expected = "expected JSON with info.features as the metadata `huggingface`"
        raise SourceError(f"{path}: {expected}, found other text") from None


def _class_names(path: Path, feature: Mapping[str, Any]) -> tuple[str, ...]:
    names = feature.get("names") or [] if feature.get("_type") == "ClassLabel" else []
    expected = "expected a list of class names of valid text in the metadata"
    try:
        "".join(names).encode()
    except (TypeError, UnicodeEncodeError):
        raise SourceError(f"{path}: {expected}, found {names!r:.80}") from None
    if (repeated := first_repeated(names)) is not None:
        raise SourceError(f"{path}: {expected}, each once, found {repeated[:80]!r} twice")
    return tuple(names)


def _fields(kind: Any) -> dict[str, Any]:
    """Returns the types of the fields of a struct, by name; {} for another type."""
    return {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)} if is_struct(kind) else {}


def _holds_images(kind: Any) -> bool:
    return str(_fields(kind).get("bytes", kind)) in ("binary", "large_binary")


def _common_classes(src: Path, root: Path, tables: Mapping[str, _Table]) -> tuple[str, ...]:
    """Returns the classes that the metadata of the files name, or (), after checking columns and labels."""
    first, table = next(iter(tables.items()))
    named = next((name for name, other in tables.items() if other.classes), first)
    classes = tables[named].classes
    most = (len(classes) or MAX_CLASSES) - 1
    kinds = {type(label) for other in tables.values() for label, *_ in other.rows} - {type(None)}
    for name, other in tables.items():
        labels = [label for label, *_ in other.rows]
        bad = [row for row, one in enumerate(labels) if isinstance(one, int) and not 0 <= one <= most]
        if bool(other.label) != bool(table.label):
            raise DoubtError(src, f"{name}: only this file or {first} has labels", [UNLABELED])
        if other.image != table.image:
            expected = f"images in the column {table.image!r}, as in {first}"
            raise SourceError(f"{root / name}: expected {expected}, found the column {other.image!r}")
        if other.classes not in ((), classes):
            raise SourceError(f"{root / name}: expected the same classes as {named}, found other classes")
        if bad or len(kinds) > 1:
            row = next(iter(bad), 0)
            why = counted(len(bad), "invalid label") if bad else "other labels are integers or texts"
            expected = f"a label from 0 to {most} or {_NO_LABEL}"
            raise SourceError(f"{root / name}: row {row}: expected {expected}, found {labels[row]!r} ({why})")
    return classes if table.label else ()


def _find(root: Path, split: str, tables: Mapping[str, _Table], classes: Sequence[str]) -> Iterator[tuple[str, Found]]:
    """Yields the split and the image of each row that has a label, or of all rows if there is no column of labels.

    `where` of an image is its group.
    """
    taken: set[bytes] = set()
    numbers: Counter[str] = Counter()
    for name, table in tables.items():
        where = os.fsencode(name)
        for number_in_file, (label, word, path, group) in enumerate(table.rows):
            own = split if word is None else split_name(word)
            number, numbers[own] = numbers[own], numbers[own] + 1
            if label is None:
                continue
            folder = f"{own}/".encode() if own else b""
            if table.label:
                folder += f"{classes[label] if classes and isinstance(label, int) else label}/".encode()
            file = (path or b"").rpartition(b"/")[2]
            key = folder + file
            if not file or b"\0" in file or key in taken:
                key = b"%s%08d" % (folder, number)
            if len(key) > MAX_KEY_NBYTES:
                expected = f"row {number_in_file}: expected a key of at most {MAX_KEY_NBYTES:,} bytes"
                raise SourceError(f"{root / name}: {expected}, found {len(key):,} bytes, {key[:80]!r}...")
            taken.add(key)
            yield own, Found(key, label if table.label else None, Item(where, number_in_file), group)
