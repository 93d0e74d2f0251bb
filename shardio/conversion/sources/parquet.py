"""Lists parquet files in the style of Hugging Face: images as bytes in one column, their labels in another.

Only the columns of labels and of file names are read here, which is cheap. The module `spool` reads the images.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.conversion.sources.collection import Collection, Ignored, Item, identify
from shardio.conversion.sources.listing import Found, Listing
from shardio.conversion.sources.names import entries, known_split, sorted_entries, split_name
from shardio.conversion.sources.spool import ParquetOrigin, TableFile, is_struct
from shardio.errors import SourceError, counted
from shardio.format.layout import MAX_CLASSES, MAX_KEY_NBYTES, is_split_name
from shardio.format.parse import first_repeated
from shardio.sets.given import open_parquet, read_batches

_SUFFIX = ".parquet"

_NO_LABEL = -1
"""The label with which Hugging Face marks rows whose label is not public, as in ImageNet's test split."""

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


def list_parquet(src: Path, *, unlabeled: bool = False) -> Listing:
    """Returns the images of a parquet file, or of all parquet files in or below a folder, without reading an image.

    - Images are binary values, or structs with `bytes` and perhaps `path`. A row whose label is null or -1 is left out.
    - Classes come from the ClassLabel in the files' Hugging Face metadata. Without metadata, classes are numbers.
    - A key is [SPLIT/]CLASS/NAME. NAME comes from the struct's path. If there is no path, or another image of the class
      has the same name, NAME is the number of the row in its split.
    """
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
    tables = {name: _read_table(folder / name, shared, unlabeled) for name in names}
    classes = _common_classes(folder, tables)
    rows: dict[str, list[Found]] = {}
    files: dict[bytes, TableFile] = {}
    for split, group in splits.items():
        mine = {name: tables[name] for name in group}
        found = list(_find(folder, split, mine, classes))
        if lacking := sum(len(table.labels) for table in mine.values()) - len(found):
            ignored.add("row without a label", f"in {group[0]}", lacking)
        if found:
            rows[split] = found
            files |= {os.fsencode(name): table.file for name, table in mine.items()}
    if not rows:
        raise SourceError(f"{src}: expected rows with a label, found none: pass `--labels none`")
    origin = ParquetOrigin(folder, tables[names[0]].image, files)
    guessed = {table.label for table in tables.values()} - {"", "label"}
    notes = tuple(f"{src.name}: labels from {label!r}" for label in sorted(guessed))
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
    labels: NDArray[np.int64]
    paths: Sequence[bytes | None]
    label: str
    """The name of the column of labels; "" if there is none."""


def _read_table(path: Path, shared: dict[tuple[str, ...], tuple[str, ...]], unlabeled: bool) -> _Table:
    identity = identify(path)
    with open_parquet(path) as file:
        schema, metadata = file.schema_arrow, file.metadata
        features = _features(path, schema.metadata or {})
        columns = dict(zip(schema.names, schema.types, strict=True))
        if (repeated := first_repeated(schema.names)) is not None:
            raise SourceError(f"{path}: expected distinct columns, found {repeated[:80]!r} twice")
        image = _choose(path, "image", columns, _holds_images, features)
        has_labels = not unlabeled and ("label" in columns or any(map(_is_integer, columns.values())))
        label = _choose(path, "label", columns, _is_integer, features) if has_labels else ""
        wanted = [label] if label else []
        if is_struct(columns[image]):
            if "path" in _fields(columns[image]):
                wanted.append(f"{image}.path")
            image = f"{image}.bytes"
        labels, paths = [], []
        for batch in read_batches(path, file, wanted) if wanted else ():
            if label:
                given = batch.column(batch.schema.get_field_index(label)).cast("int64")
                labels.append(given.fill_null(_NO_LABEL).to_numpy(zero_copy_only=False))
            if wanted[-1] != label:
                (names,) = batch.column(batch.schema.get_field_index(image.removesuffix(".bytes"))).flatten()
                paths += [path and path[-MAX_KEY_NBYTES - 1 :] for path in names.cast("binary").to_pylist()]
        leaf = next(i for i in range(metadata.num_columns) if metadata.schema.column(i).path == image)
        groups = [metadata.row_group(i).column(leaf) for i in range(metadata.num_row_groups)]
        found = np.concatenate(labels) if labels else np.zeros(0 if label else metadata.num_rows, np.int64)
        table_file = TableFile(len(found), sum(group.total_uncompressed_size for group in groups), identity)
        classes = _class_names(path, features.get(label))
        names = paths or [None] * len(found)
        return _Table(table_file, image, shared.setdefault(classes, classes), found, names, label)


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


def _is_integer(kind: Any) -> bool:
    return re.fullmatch(r"u?int(8|16|32|64)", str(kind)) is not None


def _choose(
    path: Path, name: str, types: Mapping[str, Any], fits: Callable[[Any], bool], features: Mapping[str, Any]
) -> str:
    """Returns the column of images or labels: the column called `name`, or the one that the metadata names, or the only
    column of a suitable type. Raises SourceError if there is no such column."""
    described, what = {"image": ("Image", "binary, or struct with bytes"), "label": ("ClassLabel", "integers")}[name]
    columns = [column for column, kind in types.items() if fits(kind)]
    of_type = [c for c in columns if isinstance(features.get(c), dict) and features[c].get("_type") == described]
    for candidates in ([c for c in columns if c == name], of_type, columns):
        if len(candidates) == 1:
            return candidates[0]
    found, hint = ", ".join(columns)[:200] or "none", f". Rename the column to use to {name!r}"
    if name in types and name not in columns:
        found, hint = f"{name!r} of type {types[name]}", f". Rewrite it as {what}"
    elif name == "image" and not columns:
        hint = ". If its rows have paths of images, give the folder of the paths by `--root`"
    if name == "label":
        hint += ", or leave the labels out by `--labels none`"
    raise SourceError(f"{path}: expected one column of {name}s ({what}), found {found}{hint}")


def _common_classes(root: Path, tables: Mapping[str, _Table]) -> tuple[str, ...]:
    """Returns the classes that the metadata of the files name, or (), after checking columns and labels."""
    (first, table), *others = tables.items()
    for name, other in others:
        if bool(other.label) != bool(table.label):
            raise SourceError(f"{root / name}: only this file or {first} has labels: pass `--labels none`")
        if other.image != table.image:
            expected = f"images in the column {table.image!r}, as in {first}"
            raise SourceError(f"{root / name}: expected {expected}, found the column {other.image!r}")
    named = {name: table.classes for name, table in tables.items() if table.classes}
    classes = next(iter(named.values()), ())
    if wrong := [name for name in named if named[name] != classes]:
        raise SourceError(f"{root / wrong[0]}: expected the same classes as {next(iter(named))}, found other classes")
    most = (len(classes) or MAX_CLASSES) - 1
    for name, table in tables.items():
        bad = np.flatnonzero((table.labels < _NO_LABEL) | (table.labels > most))
        if table.label and len(bad):
            found = f"found {table.labels[bad[0]]} ({counted(len(bad), 'invalid label')})"
            raise SourceError(f"{root / name}: row {bad[0]}: expected a label from 0 to {most} or {_NO_LABEL}, {found}")
    return classes if table.label else ()


def _find(root: Path, split: str, tables: Mapping[str, _Table], classes: Sequence[str]) -> Iterator[Found]:
    above = f"{split}/".encode() if split else b""
    taken: set[bytes] = set()
    number = 0
    for name, table in tables.items():
        where = os.fsencode(name)
        for row, (label, path) in enumerate(zip(table.labels.tolist(), table.paths, strict=True)):
            if label != _NO_LABEL:
                folder = above + (f"{classes[label] if classes else label}/".encode() if table.label else b"")
                file = (path or b"").rpartition(b"/")[2]
                key = folder + file
                if not file or b"\0" in file or key in taken:
                    key = b"%s%08d" % (folder, number)
                if len(key) > MAX_KEY_NBYTES:
                    expected = f"a key of at most {MAX_KEY_NBYTES:,} bytes"
                    found = f"{len(key):,} bytes, {key[:80]!r}..."
                    raise SourceError(f"{root / name}: row {row}: expected {expected}, found {found}")
                taken.add(key)
                yield Found(key, label if table.label else None, Item(where, row))
            number += 1
