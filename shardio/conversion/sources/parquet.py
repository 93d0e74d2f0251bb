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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from shardio.conversion.options import Labels
from shardio.conversion.sources.collection import Collection, Item, identify
from shardio.conversion.sources.doubt import UNLABELED, DoubtError
from shardio.conversion.sources.listing import Found, Listing
from shardio.conversion.sources.names import DEFAULT_SPLIT, Ignored, entries, known_split, sorted_entries, split_name
from shardio.conversion.sources.rows import Faults
from shardio.conversion.sources.spool import ParquetOrigin, TableFile, is_struct
from shardio.conversion.sources.table import (
    A_SPLIT,
    LABEL_NAMES,
    MISSING,
    WITHOUT_SPLITS,
    Contents,
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


def list_parquet(table: Table, labels: Labels | None = None) -> Listing:
    """Returns the images of a parquet file, or of all in or below a folder, without labels if `labels` is "none".

    - Images are binary values, or structs with `bytes` and perhaps `path`. A row whose label is null or -1 is left out.
    - Labels are integers or texts. They are in the column that `table` names, or in the only one with a label's name.
      The classes of integers come from the ClassLabel in the files' Hugging Face metadata, or are numbers.
    - A split is named by files and folders, or by the column that `table` names.
    - A key is [SPLIT/]CLASS/NAME. NAME comes from the struct's path. If there is no path, or another image of the class
      has the same name, NAME is the number of the row in its split.
    """
    src = table.path
    given = Table(table.file, None, "", table.label_columns[:1], table.split_column, group_column=table.group_column)
    if table != given:
        expected = "at most one `--label-column`, `--split-column` and `--group-column`, and no other option of tables"
        raise SourceError(f"{src}: images in parquet files take {expected}: leave the others out")
    ignored = Ignored(src)
    folder, names = (src, _list(src, ignored)) if src.is_dir() else (src.parent, [src.name] if src.is_file() else [])
    if not names:
        raise SourceError(f"{src}: expected a parquet file, or parquet files in or below a folder, found none")
    splits = _group(folder, names, is_whole=src.is_file())
    files = {
        os.fsencode(name): _File(folder / name, split, table, labels)
        for split, group in splits.items()
        for name in group
    }
    classes = _common_classes(src, list(files.values()))
    rows: dict[str, list[Found]] = {}
    tables: dict[bytes, TableFile] = {}
    numbers, taken = Counter[str](), set[bytes]()
    for name, file in files.items():
        found = list(file.images(name, classes, numbers, taken))
        if lacking := file.table.num_rows - len(found):
            ignored.add("row without a label", name, lacking)
        for word, one in found:
            rows.setdefault(word, []).append(one)
        if found:
            tables[name] = file.table
    if not rows:
        raise DoubtError(src, "expected rows with a label, found none", [UNLABELED])
    known = Collection(
        ParquetOrigin(folder, next(iter(files.values())).image, tables),
        ignored=ignored,
        kind="parquet",
        notes=tuple(dict.fromkeys(f"{src.name}: {note}" for file in files.values() for note in file.columns.notes)),
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
    """Returns (split, pattern of the files of the split) from the path of a file; ("", "") if the path names no split.
    For data/train-00000-of-00294.parquet, returns ("train", "data/train-*-of-00294")."""
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
    """Returns the files `names`, relative to `root`, by split. Raises SourceError if a split has two series of files,
    or if a number is missing from a series, unless `is_whole` says that SRC is one file."""
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


class _File:
    """A parquet file, and its columns that are used. Reads no image. `split` is the split in the file's path, or ""."""

    def __init__(self, path: Path, split: str, table: Table, labels: Labels | None) -> None:
        self.path, self.split = path, split
        identity = identify(path)
        with open_parquet(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
            types: dict[str, Any] = dict(zip(schema.names, schema.types, strict=True))
            if (repeated := first_repeated(schema.names)) is not None:
                raise SourceError(f"{path}: expected distinct columns, found {repeated[:80]!r} twice: rename one")
            features = _features(path, schema.metadata or {})
            kinds = {name: one.get("_type") for name, one in features.items()}
            image = _choose_image(path, types, kinds)
            if image in (*table.label_columns, table.split_column, table.group_column):
                raise SourceError(
                    f"{path}: the column {image!r} has the images: choose others for labels, splits and groups"
                )
            described = {name.lower() for name, kind in kinds.items() if kind == "ClassLabel"}
            known = ({"label"}, LABEL_NAMES | described)
            columns = replace(table, file=path, path_column=image)
            self.columns = Contents(columns, schema.names, Faults(path, "row"), labels, known)
            self.label = "".join(self.columns.label_names)
            self._check_columns(file, types)
            fields = _fields(types[image])
            self.image = f"{image}.bytes" if fields else image
            """The name of the column with the bytes of images."""
            self._struct = image if "path" in fields else ""
            leaf = next(i for i in range(metadata.num_columns) if metadata.schema.column(i).path == self.image)
            chunks = [metadata.row_group(i).column(leaf) for i in range(metadata.num_row_groups)]
        self.table = TableFile(metadata.num_rows, sum(one.total_uncompressed_size for one in chunks), identity)
        self.classes = _class_names(path, features.get(self.label, {}))

    def _check_columns(self, file: Any, types: Mapping[str, Any]) -> None:
        """Raises DoubtError if a column of labels or splits has a wrong type, or if a column that is not used may have
        labels or splits. `types` has the Arrow type of each column."""
        unused, own = self.columns.unused, [*self.columns.label_names, *filter(None, [self.columns.of_splits])]
        seen = self._look(file, [name for name in (*own, *unused) if _TYPES_OF_LABELS.fullmatch(str(types[name]))])
        if wrong := [name for name in own if name not in seen]:
            found = f"{wrong[0]!r} of type {types[wrong[0]]}. Rewrite it as integers or texts"
            reading = UNLABELED if wrong[0] in self.columns.label_names else WITHOUT_SPLITS
            raise DoubtError(self.path, f"expected a column of integers or texts, found {found}", [reading])
        asked = {name: set(map(str, seen[name])) for name in unused if name in seen}
        if not self.columns.table.split_column:
            may_be = {name: values for name, values in asked.items() if name.lower() not in LABEL_NAMES}
            doubt_splits(self.path, may_be, self.split)
        # A text that has every value twice in the mean is no caption.
        names = [
            name
            for name in asked
            if not _NO_LABELS.fullmatch(name.lower())
            if not isinstance(next(iter(seen[name]), ""), str) or 1 < len(asked[name]) <= (len(seen[name]) + 1) // 2
        ]
        if names and self.columns.labels is None and not self.label:
            readings = [*map(column_reading, names[:3]), UNLABELED]
            raise DoubtError(self.path, f"expected one column with a label's name, found {listed(names)}", readings)

    def _look(self, file: Any, names: Sequence[str]) -> dict[str, list[Any]]:
        """Returns the values of the columns `names` in the first rows, without nulls, by name. A column with only one
        value there is read to its end, because rows may be sorted by it."""
        first = next(read_batches(self.path, file, names), None) if names else None
        seen = {name: [] if first is None else first.column(name).drop_null().to_pylist() for name in names}
        for name in (name for name, values in seen.items() if len(set(values)) == 1):
            batches = read_batches(self.path, file, [name])
            seen[name] = [value for batch in batches for value in batch.column(0).drop_null().to_pylist()]
        return seen

    def images(
        self, name: bytes, classes: Sequence[str], numbers: Counter[str], taken: set[bytes]
    ) -> Iterator[tuple[str, Found]]:
        """Yields (SRC's word for the split, image) of each row with a label; of every row if no column has labels.

        `where` of an image is its group, or "". `name` is the file's path in SRC, and `classes` are the names of
        integer labels. `numbers` has the number of rows of each split in the files before this one, and `taken` the
        keys there: both are updated. Raises SourceError for invalid rows.
        """
        columns, faults, most = self.columns, self.columns.faults, (len(classes) or MAX_CLASSES) - 1
        for row, (label, word, group, path) in enumerate(self._cells()):
            if not columns.of_splits:
                word = self.split
            elif (word := present(word, MISSING)) is None:
                word = self.split or DEFAULT_SPLIT
            elif not is_split_name(split_name(word := split_of_flag(columns.of_splits, word))):
                faults.add(row, A_SPLIT, word)
            split = split_name(word)
            word = split if split == self.split else word.lower() if known_split(word) else word
            number, numbers[split] = numbers[split], numbers[split] + 1
            if isinstance(label, str):
                label = present(label)  # "NA" is a text like others: parquet has nulls
            elif label == _NO_LABEL:
                label = None
            elif label is not None and not 0 <= label <= most:
                faults.add(row, f"a label from 0 to {most} or {_NO_LABEL}", label)
                continue
            elif label is not None:
                label = classes[label] if classes else str(int(label))
            if self.label and label is None:
                continue
            if columns.of_groups and present(group) is None:
                faults.add(row, f"a group in the column {columns.of_groups!r}", "an empty cell")
            where = str(group) if columns.of_groups else ""
            folder = "".join(f"{part}/" for part in (split, label) if part).encode()
            file = (path or b"").rpartition(b"/")[2]
            key = folder + file
            if not file or b"\0" in file or key in taken:
                key = b"%s%08d" % (folder, number)
                while key in taken:  # a number may be a name, too
                    key += b"_"
            if len(key) > MAX_KEY_NBYTES:
                faults.add(row, f"a key of at most {MAX_KEY_NBYTES:,} bytes", f"{os.fsdecode(key)[:80]}...")
            taken.add(key)
            yield word, Found(key, label and sys.intern(label), Item(name, row), where)
        faults.check()

    def _cells(self) -> Iterator[tuple[Any, Any, Any, bytes | None]]:
        """Yields (label, split, group, path of the image) of each row, with None for a missing cell or column."""
        names = (self.label, self.columns.of_splits, self.columns.of_groups)
        wanted = list(dict.fromkeys(filter(None, (*names, self._struct and f"{self._struct}.path"))))
        if not wanted:
            yield from repeat((None, None, None, None), self.table.num_rows)
            return
        with open_parquet(self.path) as file:
            for batch in read_batches(self.path, file, wanted):
                nothing = [None] * len(batch)
                cells = (batch.column(name).to_pylist() if name else nothing for name in names)
                paths = batch.column(self._struct).flatten()[0].cast("binary").to_pylist() if self._struct else nothing
                yield from zip(*cells, paths, strict=True)


def _choose_image(path: Path, types: Mapping[str, Any], kinds: Mapping[str, Any]) -> str:
    """Returns the name of the column of images: "image", or else the one with the kind "Image", or else the only one of
    a suitable type. `types` has the Arrow type, and `kinds` the kind in the metadata, of each column by name."""
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
    expected = "expected one column of images (binary, or struct with bytes)"
    raise SourceError(f"{path}: {expected}, found {found}. {hint}")


def _features(path: Path, metadata: Mapping[bytes, bytes]) -> Mapping[str, Mapping[str, Any]]:
    """Returns the features that Hugging Face `datasets` writes: {"label": {"names": [...], "_type": "ClassLabel"}}."""
    try:
        features = json.loads(metadata.get(b"huggingface", b'{"info": {"features": {}}}'))["info"]["features"]
        return {str(name): one for name, one in features.items() if isinstance(one, dict)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        expected = "expected JSON with info.features in the file's metadata `huggingface`, found something else"
        raise SourceError(f"{path}: {expected}: write the file again without that metadata") from None


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


def _common_classes(src: Path, files: Sequence[_File]) -> tuple[str, ...]:
    """Returns the classes that the metadata of the files name, or (). Raises SourceError or DoubtError if files have
    other classes, or another column of images or labels."""
    first = files[0]
    named = next((one for one in files if one.classes), first)
    for one in files:
        if bool(one.label) != bool(first.label):
            labeled, other = (one, first) if one.label else (first, one)
            found = f"found one in {labeled.path.name} ({labeled.label!r}), and none in {other.path.name}"
            raise DoubtError(src, f"expected a column of labels in every file, {found}", [UNLABELED])
        if one.image != first.image:
            expected = f"images in the column {first.image!r}, as in {first.path.name}"
            raise SourceError(f"{one.path}: expected {expected}, found the column {one.image!r}: rename one")
        if one.classes not in ((), named.classes):
            pairs = zip(one.classes, named.classes, strict=False)
            unlike = next((f", {name!r} instead of {other!r}" for name, other in pairs if name != other), "")
            found = f"found {len(one.classes):,} classes{unlike}: convert the files separately"
            raise SourceError(f"{one.path}: expected the {len(named.classes):,} classes of {named.path.name}, {found}")
    return named.classes if first.label else ()
