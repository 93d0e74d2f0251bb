"""Lists parquet files in the style of Hugging Face: images as bytes in one column, their labels in another.

Only the columns of labels and of file names are read here, which is cheap. The module `spool` reads the images.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardio.conversion.sources.collection import Collection, Ignored, Item, identify
from shardio.conversion.sources.doubt import UNLABELED, DoubtError
from shardio.conversion.sources.listing import Found, Listing
from shardio.conversion.sources.names import DEFAULT_SPLIT, entries, known_split, sorted_entries, split_name
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
    found = False
    with contextlib.suppress(OSError):
        for entry in entries(folder):
            if entry.is_dir():
                return False
            found = found or entry.name.endswith(_SUFFIX)
    return found


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
    if named != Table(named.file, label_columns=named.label_columns[:1], split_column=named.split_column):
        raise SourceError(f"{src}: images in parquet take one `--label-column`, `--split-column` and nothing else")
    ignored = Ignored(src)
    if not (src.is_dir() or src.is_file()):
        raise SourceError(f"{src}: expected a parquet file or a folder of parquet files, found no file and no folder")
    folder, names = (src, _list(src, ignored)) if src.is_dir() else (src.parent, [src.name])
    if not names:
        raise SourceError(f"{src}: expected parquet files in or below this folder, found none")
    splits = _group(folder, names)
    for group in splits.values() if src.is_dir() else ():
        matches = [_NUMBERED.fullmatch(name.removesuffix(_SUFFIX)) for name in group]
        there = {int(match[2]) for match in matches if match}
        total = int(matches[0][3]) if matches[0] else 0  # all have the same form, and the same total
        if missing := sorted(set(range(total)) - there):
            number = f"found {counted(len(there), 'file')}; number {missing[0]:05d} is missing"
            raise SourceError(f"{src}: expected {total:,} files like {group[0]}, {number}: complete the download")
    shared: dict[tuple[str, ...], tuple[str, ...]] = {}  # every file has the names of all classes
    tables = {
        name: _read_table(src, folder / name, split, named, shared, unlabeled)
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
    origin = ParquetOrigin(folder, tables[names[0]].image, files)
    notes = tuple(dict.fromkeys(f"{src.name}: {table.note}" for table in tables.values() if table.note))
    return Listing(src, rows, Collection(origin, ignored=ignored, kind="parquet", notes=notes), classes or None)


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


def _group(root: Path, names: Sequence[str]) -> dict[str, list[str]]:
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
    return groups


@dataclass(frozen=True, eq=False)
class _Table:
    file: TableFile
    image: str
    classes: tuple[str, ...]
    label: str
    """The name of the column of labels; "" if there is none."""
    note: str
    rows: Sequence[tuple[int | str | None, str | None, bytes | None]]
    """The label, split and path of each image. None: it has none, or no column has splits."""


def _read_table(
    src: Path, path: Path, own: str, named: Table, shared: dict[tuple[str, ...], tuple[str, ...]], unlabeled: bool
) -> _Table:
    identity = identify(path)
    with open_parquet(path) as file:
        schema, metadata = file.schema_arrow, file.metadata
        features = _features(path, schema.metadata or {})
        columns = dict(zip(schema.names, schema.types, strict=True))
        if (repeated := first_repeated(schema.names)) is not None:
            raise SourceError(f"{path}: expected distinct columns, found {repeated[:80]!r} twice")
        kinds = {name: one.get("_type") for name, one in features.items() if isinstance(one, dict)}
        image = _choose_image(path, columns, kinds)
        likely = [name for name, kind in columns.items() if name != image and _may_be_label(kind)]
        seen = _look(path, file, likely)
        split = _choose_split(src, path, own, named, seen)
        label = "" if unlabeled else _choose_label(src, path, named, split, columns, kinds, seen)
        has_paths = is_struct(columns[image]) and "path" in _fields(columns[image])
        wanted = [*filter(None, (label, split)), *([f"{image}.path"] if has_paths else [])]
        rows: list[Any] = [] if wanted else [(0, None, None)] * metadata.num_rows
        texts: dict[Any, Any] = {}
        for batch in read_batches(path, file, wanted) if wanted else ():
            nothing = [None] * len(batch)
            labels = [_label(one, texts) for one in batch.column(label).to_pylist()] if label else [0] * len(batch)
            paths = batch.column(image).flatten()[0].cast("binary").to_pylist() if has_paths else nothing
            paths = [one and one[-MAX_KEY_NBYTES - 1 :] for one in paths]
            words = batch.column(split).to_pylist() if split else nothing
            if split:
                words = [own or DEFAULT_SPLIT if one is None else split_of_flag(split, one) for one in words]
            rows += zip(labels, words, paths, strict=True)
        leaf_name = f"{image}.bytes" if is_struct(columns[image]) else image
        leaf = next(i for i in range(metadata.num_columns) if metadata.schema.column(i).path == leaf_name)
        groups = [metadata.row_group(i).column(leaf) for i in range(metadata.num_row_groups)]
        table_file = TableFile(len(rows), sum(group.total_uncompressed_size for group in groups), identity)
        classes = _class_names(path, features.get(label))
        unused = [name for name in columns if name not in (image, label, split)]
        note = f"labels from {label!r}" if label else "no labels" if unused else ""
        note += f", splits from {split!r}" * bool(split) + f", not used: {listed(unused)}" * bool(unused)
        return _Table(table_file, leaf_name, shared.setdefault(classes, classes), label, note, rows)


def _label(cell: Any, texts: dict[Any, Any]) -> int | str | None:
    """Returns the integer or text in a cell, equal texts as one object; None if there is no label."""
    if isinstance(cell, str):
        cell = texts.setdefault(cell, present(cell, MISSING))
        return cell if cell is None else str(cell)
    return None if cell in (None, _NO_LABEL) else int(cell)


def _features(path: Path, metadata: Mapping[bytes, bytes]) -> Mapping[str, Any]:
    """Returns the features that Hugging Face `datasets` writes: {"label": {"names": [...], "_type": "ClassLabel"}}."""
    if b"huggingface" not in metadata:
        return {}
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
    except (ValueError, KeyError, TypeError, RecursionError):
        features = None
    if not isinstance(features, dict):
        raise SourceError(f"{path}: expected JSON with info.features as the metadata `huggingface`, found other text")
    return features


def _class_names(path: Path, feature: object) -> tuple[str, ...]:
    if not isinstance(feature, dict) or feature.get("_type") != "ClassLabel" or not feature.get("names"):
        return ()
    names = feature["names"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise SourceError(f"{path}: expected a list of class names in the metadata, found {str(names)[:80]}")
    try:
        "".join(names).encode()
    except UnicodeEncodeError as error:
        raise SourceError(f"{path}: a class name in the metadata is not valid text: {error}") from None
    if (repeated := first_repeated(names)) is not None:
        raise SourceError(f"{path}: expected distinct class names in the metadata, found {repeated[:80]!r} twice")
    return tuple(names)


def _fields(kind: Any) -> dict[str, Any]:
    return {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}


def _holds_images(kind: Any) -> bool:
    kind = _fields(kind).get("bytes") if is_struct(kind) else kind
    return str(kind) in ("binary", "large_binary")


def _may_be_label(kind: Any) -> bool:
    return re.fullmatch(r"u?int\d+|bool|(dictionary<values=)?(large_)?string(, .*)?", str(kind)) is not None


def _choose_image(path: Path, types: Mapping[str, Any], kinds: Mapping[str, object]) -> str:
    """Returns the column "image", or the one that the metadata names, or the only one of a suitable type."""
    columns = [column for column, kind in types.items() if _holds_images(kind)]
    described = [column for column in columns if kinds.get(column) == "Image"]
    for candidates in ([c for c in columns if c == "image"], described, columns):
        if len(candidates) == 1:
            return candidates[0]
    found, hint = ", ".join(columns)[:200] or "none", "Rename the column to use to 'image'"
    if "image" in types and "image" not in columns:
        found, hint = f"'image' of type {types['image']}", "Rewrite it as binary, or struct with bytes"
    elif not columns:
        hint = "If its rows have paths of images, give the folder of the paths by `--root`"
    raise SourceError(f"{path}: expected one column of images (binary, or struct with bytes), found {found}. {hint}")


def _look(path: Path, file: Any, names: Sequence[str]) -> Mapping[str, list[Any]]:
    """Returns the values of columns in the first rows, or in all rows for a column that has only one value there."""
    first = next(read_batches(path, file, names), None) if names else None
    seen = {name: [] if first is None else first.column(name).drop_null().to_pylist() for name in names}
    for name in (name for name, values in seen.items() if len(set(values)) == 1):  # rows may be sorted by it
        batches = read_batches(path, file, [name])
        seen[name] = [value for batch in batches for value in batch.column(0).drop_null().to_pylist()]
    return seen


def _choose_split(src: Path, path: Path, own: str, named: Table, seen: Mapping[str, list[Any]]) -> str:
    """Returns the named column of splits, or "". Raises DoubtError if another column may have splits."""
    if named.split_column:
        return "" if named.split_column == NO_SPLITS else _existing(path, named.split_column, seen)
    few = {name: set(map(str, values)) for name, values in seen.items() if len(set(values)) <= MOST_SPLITS}
    known = (*named.label_columns, *LABEL_NAMES)
    doubt_splits(src, {name: words for name, words in few.items() if words and name.lower() not in known}, own)
    return ""


def _choose_label(
    src: Path,
    path: Path,
    named: Table,
    split: str,
    types: Mapping[str, Any],
    kinds: Mapping[str, object],
    seen: Mapping[str, list[Any]],
) -> str:
    """Returns the named column of labels, or the one with a label's name; "" if no column looks like labels."""
    if named.label_columns:
        return _existing(path, named.label_columns[0], seen)
    names = [name for name in types if name.lower() in LABEL_NAMES or kinds.get(name) == "ClassLabel"]
    names = [name for name in names if name == "label"] or names
    if len(names) == 1 and names[0] in seen:
        return names[0]
    if len(names) == 1:
        found = f"{names[0]!r} of type {types[names[0]]}. Rewrite it as integers or texts"
        raise DoubtError(src, f"{path.name}: expected a column of labels, found {found}", [UNLABELED])
    # A text that has every value twice in the mean is no caption.
    names = names or [
        name
        for name, values in seen.items()
        if name != split and not _NO_LABELS.fullmatch(name.lower())
        if not isinstance(next(iter(values), ""), str) or 1 < len(set(values)) <= (len(values) + 1) // 2
    ]
    if names:
        found = f"{path.name}: expected one column with a label's name, found {listed(names)}"
        raise DoubtError(src, found, [*map(column_reading, names[:3]), UNLABELED])
    return ""


def _existing(path: Path, name: str, columns: Iterable[str]) -> str:
    if name not in columns:
        raise SourceError(f"{path}: expected a column {name!r} of integers or texts, found {listed(columns)}")
    return name


def _common_classes(src: Path, root: Path, tables: Mapping[str, _Table]) -> tuple[str, ...]:
    """Returns the classes that the metadata of the files name, or (), after checking columns and labels."""
    (first, table), *others = tables.items()
    for name, other in others:
        if bool(other.label) != bool(table.label):
            raise DoubtError(src, f"{name}: only this file or {first} has labels", [UNLABELED])
        if other.image != table.image:
            expected = f"images in the column {table.image!r}, as in {first}"
            raise SourceError(f"{root / name}: expected {expected}, found the column {other.image!r}")
    named = {name: table.classes for name, table in tables.items() if table.classes}
    classes = next(iter(named.values()), ())
    if wrong := [name for name in named if named[name] != classes]:
        raise SourceError(f"{root / wrong[0]}: expected the same classes as {next(iter(named))}, found other classes")
    most = (len(classes) or MAX_CLASSES) - 1
    kinds = {type(label) for table in tables.values() for label, _, _ in table.rows} - {type(None)}
    for name, table in tables.items():
        labels = [label for label, _, _ in table.rows]
        bad = [row for row, one in enumerate(labels) if isinstance(one, int) and not 0 <= one <= most]
        if bad or len(kinds) > 1:
            row = next(iter(bad), 0)
            why = counted(len(bad), "invalid label") if bad else "other labels are integers or texts"
            expected = f"a label from 0 to {most} or {_NO_LABEL}"
            raise SourceError(f"{root / name}: row {row}: expected {expected}, found {labels[row]!r} ({why})")
    return classes if table.label else ()


def _find(root: Path, split: str, tables: Mapping[str, _Table], classes: Sequence[str]) -> Iterator[tuple[str, Found]]:
    """Yields the split and the image of each row that has a label, or of all rows if there is no column of labels."""
    taken: set[bytes] = set()
    numbers: Counter[str] = Counter()
    for name, table in tables.items():
        where = os.fsencode(name)
        for row, (label, word, path) in enumerate(table.rows):
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
                expected = f"row {row}: expected a key of at most {MAX_KEY_NBYTES:,} bytes"
                raise SourceError(f"{root / name}: {expected}, found {len(key):,} bytes, {key[:80]!r}...")
            taken.add(key)
            yield own, Found(key, label if table.label else None, Item(where, row))
