"""Parquet files in the style of Hugging Face: images as bytes in one column, their labels in another.

Labels and names are columns of their own, and cheap to scan. But nothing in a parquet file can be reached at random:
one image costs its whole row group, and a conversion reads its sources in an order of its own. So the images are first
copied out of the files, row group by row group in the order of storage, as plain bytes into OUT/.convert: the spool. It
needs room for all images as they are encoded, until the set is published.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.conversion.images.decode import MAX_SOURCE_NBYTES
from shardio.conversion.sources.arrow import open_parquet
from shardio.conversion.sources.clutter import clutter
from shardio.conversion.sources.collection import MAX_CLASSES, Collection, Item, Source, identify
from shardio.conversion.sources.labels import NO_VECTORS
from shardio.conversion.sources.splits import DEFAULT_SPLIT, in_split_order, known_split, split_name
from shardio.errors import DecodeError, SourceError
from shardio.format.layout import MAX_KEY_NBYTES, is_safe_name, shard_name
from shardio.format.manifest import first_repeated
from shardio.system.files import AtomicFile, write_all
from shardio.system.opening import naming, open_untrusted

SUFFIX = ".parquet"

_NO_LABEL = -1
"""What Hugging Face writes where the label is not given away, as in ImageNet's test split."""

# train-00000-of-00294.parquet, also with a hash at its end.
_NUMBERED = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})(?:-[0-9a-f]+)?", re.ASCII)

# So few images at a time, as each may be MAX_SOURCE_NBYTES long; labels and names are read in longer stretches.
_IMAGES_AT_ONCE = 16
_ROWS_AT_ONCE = 1 << 16

# At the end of a spool file, for each row: the first byte of its image and how many it has, or _NO_IMAGE.
_ENTRY = struct.Struct("<qq")
_NO_IMAGE = -1


@dataclass(frozen=True)
class TableFile:
    """What a scan has learnt of one parquet file."""

    num_rows: int
    nbytes: int
    """Of its images, by and large."""
    identity: str


@dataclass(frozen=True)
class ParquetOrigin:
    """Images in a column of parquet files. Thread safe.

    `spool` is a folder for the copies, which `fill_spool` makes. Without one every read is right, too, and costs a row
    group.
    """

    folder: Path
    image: str
    """The column: "image.bytes" of a struct."""
    files: Mapping[bytes, TableFile]
    spool: Path | None = None

    def read(self, source: Source) -> bytes:
        """As Origin.read; FileNotFoundError if the spool was removed, as by a process that published the same set."""
        where, number = _place(source)
        image = self._read_row_group(where, number) if self.spool is None else self._read_spool(where, number)
        if image is None:
            raise DecodeError("empty", "the row has no image: expected its bytes, found null")
        return image

    def fingerprints(self, sources: Sequence[Source]) -> list[str]:
        files = {_place(source).where for source in sources}
        seen = {where: identify(self._path(where)) for where in files}
        return [seen[_place(source).where] for source in sources]

    def _path(self, where: bytes) -> Path:
        return self.folder / os.fsdecode(where)

    def _read_row_group(self, where: bytes, number: int) -> bytes | None:
        path, group = self._path(where), 0
        if identify(path) != self.files[where].identity:
            raise _changed(path)
        with open_parquet(path) as file:
            while number >= (num_rows := file.metadata.row_group(group).num_rows):
                number, group = number - num_rows, group + 1
            image = next(islice(_images(file, self.image, [group]), number, None))
            if image is not None and len(image) > MAX_SOURCE_NBYTES:
                raise _too_large(len(image))
            return image if image is None else bytes(image)

    # --- the spool ---

    def _spool_path(self, where: bytes) -> Path:
        """Named after the state of the parquet file, so that the copies of another state are never taken for it."""
        assert self.spool is not None
        name = hashlib.sha256(b"%s\0%s" % (where, self.files[where].identity.encode())).hexdigest()
        return self.spool / f"{name[:32]}.images"

    def _missing(self) -> list[bytes]:
        if self.spool is None:
            return list(self.files)
        return [where for where in self.files if not self._spool_path(where).exists()]

    def missing_nbytes(self) -> int:
        """What `fill_spool` has left to write, by and large; without a spool, what it would write."""
        return sum(self.files[where].nbytes for where in self._missing())

    def fill_spool(self, report: Callable[[int], None]) -> None:
        """Copy out what is not there yet. `report` is called with how many images were copied since the last call.

        Every file's copy is whole or absent, so that a call that was interrupted is followed by one that does the rest.
        Calls at the same time do the same work, and do not disturb each other. Memory is bounded by a row group's
        images, or a page's where row groups have many. SourceError if a file is damaged or has changed since the scan;
        OSError.
        """
        for where in self._missing():
            self._copy_out(where, report)

    def _copy_out(self, where: bytes, report: Callable[[int], None]) -> None:
        path, target = self._path(where), self._spool_path(where)
        entries = bytearray()
        offset = reported = 0
        with AtomicFile(target) as out, open_parquet(path) as file:
            for image in _images(file, self.image):
                nbytes = _NO_IMAGE if image is None else len(image)
                entries += _ENTRY.pack(offset, nbytes)
                if image is not None and nbytes <= MAX_SOURCE_NBYTES:
                    with naming(target):
                        write_all(out.descriptor, image)
                    offset += nbytes
                count = len(entries) // _ENTRY.size
                if count - reported == _IMAGES_AT_ONCE:
                    report(count - reported)
                    reported = count
            report(len(entries) // _ENTRY.size - reported)
            if len(entries) != self.files[where].num_rows * _ENTRY.size or identify(path) != self.files[where].identity:
                raise _changed(path)
            with naming(target):
                write_all(out.descriptor, bytes(entries))
            out.commit()

    def _read_spool(self, where: bytes, number: int) -> bytes | None:
        path = self._spool_path(where)
        with naming(path), open_untrusted(path) as file:
            start = os.fstat(file.fileno()).st_size - _ENTRY.size * (self.files[where].num_rows - number)
            offset, nbytes = _ENTRY.unpack(os.pread(file.fileno(), _ENTRY.size, start))
            if nbytes == _NO_IMAGE:
                return None
            if nbytes > MAX_SOURCE_NBYTES:
                raise _too_large(nbytes)
            return os.pread(file.fileno(), nbytes, offset)


def _place(source: Source) -> Item:
    assert isinstance(source.place, Item)
    return source.place


def _changed(path: Path) -> SourceError:
    return SourceError(f"{path}: expected the file as it was scanned, found it changed: run the command again")


def _too_large(nbytes: int) -> DecodeError:
    return DecodeError("too large", f"expected at most {MAX_SOURCE_NBYTES} bytes, found {nbytes}")


def _images(file: Any, column: str, row_groups: Sequence[int] | None = None) -> Iterator[memoryview | None]:
    """The bytes of all rows, or of those of some row groups, in order: views that are valid until the next one."""
    batches = file.iter_batches(_IMAGES_AT_ONCE, row_groups=row_groups, columns=[column], use_threads=False)
    for batch in batches:
        array = batch.column(0)
        if _is_struct(array.type):
            (array,) = array.flatten()  # where the struct is null, so are its bytes
        for value in array:
            yield memoryview(value.as_buffer()) if value.is_valid else None


# --- scanning --------------------------------------------------------------------------------------------------------


def is_parquet(src: Path) -> bool:
    """Whether SRC is a parquet file, or a folder with some in it, in data/ or in a folder named like a split.

    Files that lie beside folders do not count: they describe what is in these.
    """
    if src.is_file():
        return src.name.endswith(SUFFIX)
    with contextlib.suppress(OSError):
        return any(
            _holds_files(src / name) for name in (".", *os.listdir(src)) if name in (".", "data") or known_split(name)
        )
    return False


def _holds_files(folder: Path) -> bool:
    found = False
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not clutter(entry.name):
                if entry.is_dir():
                    return False
                found = found or entry.name.endswith(SUFFIX)
    return found


def scan_parquet(src: Path) -> Collection:
    """The images of a parquet file, or of all parquet files at or below a folder, without reading an image.

    The images are a column of binaries or of structs with `bytes` and perhaps `path`; the labels a column of integers.
    If there are several, those named `image` and `label` count. Classes are those of the ClassLabel that the files'
    Hugging Face metadata describe, else numbers. Rows whose label is null or -1 are ignored, and counted.

    The split is what stands before "-00000-of-" in the file's name, else a file or folder named train, validation,
    test or the like; `validation` becomes `val`. Files that say nothing of it are all `train`. A key is
    SPLIT/CLASS/NAME, without SPLIT if no file says it; NAME is that of the struct's path or, if there is none or it
    came before in that class, the number of the row in its split.

    SourceError if a file is damaged or not of this form, if files contradict each other, or if one of a numbered series
    is missing.
    """
    src = Path(os.path.abspath(src))
    ignored: Counter[str] = Counter()
    if not (src.is_dir() or src.is_file()):
        found = "something else" if src.exists() else "nothing"
        raise SourceError(f"{src}: expected a parquet file, or a folder of them, found {found}")
    folder, names = (src, _list(src, ignored)) if src.is_dir() else (src.parent, [src.name])
    if not names:
        raise SourceError(f"{src}: expected a parquet file, or a folder of them, found none in it")
    splits = _group(folder, names)
    if src.is_dir():
        for group in splits.values():
            _check_complete(src, group)
    shared: dict[tuple[str, ...], tuple[str, ...]] = {}  # every file has the names of all classes
    tables = {name: _read_table(folder / name, shared) for group in splits.values() for name in group}
    classes = _common_classes(folder, tables)
    for name, table in tables.items():
        _check_labels(folder / name, table.labels, len(classes))
    sources: dict[str, tuple[Source, ...]] = {}
    files: dict[bytes, TableFile] = {}
    for split, group in splits.items():
        mine = {name: tables[name] for name in group}
        labelled = tuple(_sources(split, mine, classes))
        ignored["row without a label"] += sum(len(table.labels) for table in mine.values()) - len(labelled)
        if labelled:
            sources[split or DEFAULT_SPLIT] = labelled
            files |= {os.fsencode(name): table.file for name, table in mine.items()}
    if not sources:
        raise SourceError(f"{src}: expected rows with a label, found none")
    origin = ParquetOrigin(folder, tables[names[0]].image, files)
    return Collection(origin, classes, sources, +ignored, kind="parquet")


def _list(root: Path, ignored: Counter[str]) -> list[str]:
    """The parquet files at or below `root`, relative to it, sorted."""

    def refuse(error: OSError) -> None:
        raise SourceError(f"{error.filename}: expected a readable folder, found: {error.strerror}")

    found = []
    for folder, folders, files in os.walk(root, onerror=refuse):
        ignored.update(filter(None, map(clutter, folders)))
        folders[:] = [name for name in folders if not clutter(name)]
        for name in files:
            path = Path(folder, name)
            if kind := clutter(name):
                ignored[kind] += 1
            elif name.endswith(SUFFIX) and path.is_file():  # a link, too: that is how downloads are cached
                found.append(str(path.relative_to(root)))
            else:
                ignored["not a parquet file"] += 1
    return sorted(found)


def _split_of(name: str) -> tuple[str, str]:
    """The split that a file's name or folder says, and what all files of the split must have in common. "" if none."""
    *folders, file = name.split("/")
    stem = file.removesuffix(SUFFIX)
    if (match := _NUMBERED.fullmatch(stem)) and is_safe_name(shard_name(match[1], 999_999)):
        return split_name(match[1].lower()), "/".join([*folders, f"{match[1]}-*-of-{match[3]}"])
    word = re.sub(r"(?:[-_.]?[0-9]+)+$", "", stem)
    if split := known_split(word):
        return split, "/".join([*folders, f"{word}*"])
    for depth in range(len(folders), 0, -1):
        if split := known_split(folders[depth - 1]):
            return split, "/".join([*folders[:depth], "*"])
    return "", ""


def _group(root: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """The files of each split: train, val and test first."""
    groups: dict[str, list[str]] = {}
    patterns: dict[str, str] = {}
    for name in names:
        split, pattern = _split_of(name)
        if patterns.setdefault(split, pattern) != pattern:
            raise SourceError(
                f"{root}: expected one series of files for the split {split!r}, found {patterns[split]!r} and "
                f"{pattern!r}. Convert a folder that holds one of them"
            )
        groups.setdefault(split, []).append(name)
    if "" in groups and len(groups) > 1:
        raise SourceError(
            f"{root / groups[''][0]}: expected a name or a folder that says which split it is, as those of "
            f"{next(name for name in names if _split_of(name)[0])} do; found neither"
        )
    return {split: groups[split] for split in in_split_order(groups)}


def _check_complete(root: Path, group: Sequence[str]) -> None:
    matches = [_NUMBERED.fullmatch(name.removesuffix(SUFFIX)) for name in group]
    there = {int(match[2]) for match in matches if match}
    total = int(matches[0][3]) if matches[0] else 0  # all have the same form, and the same total
    if missing := sorted(set(range(total)) - there):
        raise SourceError(
            f"{root}: expected {total} files like {group[0]}, found {len(there)}: number {missing[0]:05d} is the first "
            "that is missing. Download the rest, or rename those that are there"
        )


@dataclass(frozen=True, eq=False)
class _Table:
    file: TableFile
    image: str
    classes: tuple[str, ...]
    labels: NDArray[np.int64]
    paths: Sequence[bytes | None]


def _read_table(path: Path, shared: dict[tuple[str, ...], tuple[str, ...]]) -> _Table:
    identity = identify(path)
    with open_parquet(path) as file:
        schema, metadata = file.schema_arrow, file.metadata
        features = _features(path, schema.metadata or {})
        columns = dict(zip(schema.names, schema.types, strict=True))
        if (repeated := first_repeated(schema.names)) is not None:
            raise SourceError(f"{path}: expected distinct columns, found {repeated[:80]!r} twice")
        image = _choose(path, "image", columns, _holds_images, features)
        label = _choose(path, "label", columns, _is_integer, features)
        wanted = [label]
        if _is_struct(columns[image]):
            if "path" in _fields(columns[image]):
                wanted.append(f"{image}.path")
            image = f"{image}.bytes"
        labels, paths = [], []
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=wanted, use_threads=False):
            given = batch.column(batch.schema.get_field_index(label)).cast("int64")
            labels.append(given.fill_null(_NO_LABEL).to_numpy(zero_copy_only=False))
            if len(wanted) == 2:
                (names,) = batch.column(1 - batch.schema.get_field_index(label)).flatten()
                paths += names.cast("binary").to_pylist()
        leaf = next(i for i in range(metadata.num_columns) if metadata.schema.column(i).path == image)
        groups = [metadata.row_group(i).column(leaf) for i in range(metadata.num_row_groups)]
        found = np.concatenate(labels) if labels else np.empty(0, np.int64)
        table_file = TableFile(len(found), sum(group.total_uncompressed_size for group in groups), identity)
        classes = _class_names(path, features.get(label))
        return _Table(table_file, image, shared.setdefault(classes, classes), found, paths or [None] * len(found))


def _features(path: Path, metadata: Mapping[bytes, bytes]) -> Mapping[str, Any]:
    """What the library `datasets` writes of each column: {"label": {"names": [...], "_type": "ClassLabel"}}."""
    if b"huggingface" not in metadata:
        return {}
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
    except (ValueError, KeyError, TypeError, RecursionError):
        features = None
    if not isinstance(features, dict):
        raise SourceError(f"{path}: expected Hugging Face metadata with info.features, found another kind of JSON")
    return features


def _class_names(path: Path, feature: object) -> tuple[str, ...]:
    if not isinstance(feature, dict) or feature.get("_type") != "ClassLabel" or not feature.get("names"):
        return ()
    names = feature["names"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise SourceError(f"{path}: expected the names of classes as strings, found {str(names)[:80]}")
    try:
        "".join(names).encode()
    except UnicodeEncodeError as error:
        raise SourceError(f"{path}: expected the names of classes as text, found: {error}") from None
    if (repeated := first_repeated(names)) is not None:
        raise SourceError(f"{path}: expected distinct names of classes, found {repeated[:80]!r} twice")
    return tuple(names)


def _is_struct(kind: Any) -> bool:
    return str(kind).startswith("struct<")


def _fields(kind: Any) -> dict[str, Any]:
    return {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}


def _holds_images(kind: Any) -> bool:
    kind = _fields(kind).get("bytes") if _is_struct(kind) else kind
    return str(kind) in ("binary", "large_binary")


def _is_integer(kind: Any) -> bool:
    return re.fullmatch(r"u?int(8|16|32|64)", str(kind)) is not None


def _choose(
    path: Path, name: str, types: Mapping[str, Any], fits: Callable[[Any], bool], features: Mapping[str, Any]
) -> str:
    """The one column that can be it; of several the one so named, or that the metadata say to be it."""
    columns = [column for column, kind in types.items() if fits(kind)]
    described = {"image": "Image", "label": "ClassLabel"}[name]
    of_type = [c for c in columns if isinstance(features.get(c), dict) and features[c].get("_type") == described]
    for candidates in ([c for c in columns if c == name], of_type, columns):
        if len(candidates) == 1:
            return candidates[0]
    what = {"image": "binary, or struct with bytes", "label": "integers"}[name]
    if name in types and name not in columns:
        found = f"{name!r} of type {types[name]}"
        hint = f": {NO_VECTORS}" if "list<" in str(types[name]) else f". Write it anew as {what}"
    else:
        found = ", ".join(columns)[:200] or "none"
        hint = f". Of several, the one that counts must be named {name!r}"
    raise SourceError(f"{path}: expected one column of {name}s ({what}), found {found}{hint}")


def _common_classes(root: Path, tables: Mapping[str, _Table]) -> tuple[str, ...]:
    """Of all files: those that they name, or else the numbers up to the largest label."""
    (first, table), *others = tables.items()
    for name, other in others:
        if other.image != table.image:
            raise SourceError(
                f"{root / name}: expected the images in {table.image!r} as {first}, found {other.image!r}"
            )
    named = {name: table.classes for name, table in tables.items() if table.classes}
    if len(set(named.values())) > 1:
        first = next(iter(named))
        second = next(name for name in named if named[name] != named[first])
        raise SourceError(f"{root / second}: expected the same classes as {first}, found others")
    if named:
        return next(iter(named.values()))
    largest = max((int(table.labels.max()) for table in tables.values() if len(table.labels)), default=_NO_LABEL)
    return tuple(map(str, range(min(largest + 1, MAX_CLASSES))))


def _check_labels(path: Path, labels: NDArray[np.int64], num_classes: int) -> None:
    wrong = np.flatnonzero((labels < _NO_LABEL) | (labels >= num_classes))
    if len(wrong):
        raise SourceError(
            f"{path}: row {wrong[0]}: label: expected 0 to {num_classes - 1}, or {_NO_LABEL} for none, found "
            f"{labels[wrong[0]]} ({len(wrong):,} such rows)"
        )


def _sources(split: str, tables: Mapping[str, _Table], classes: Sequence[str]) -> Iterator[Source]:
    above = f"{split}/".encode() if split else b""
    folders = [b"%s%s/" % (above, name.encode()) for name in classes]
    taken: set[bytes] = set()
    number = 0
    for name, table in tables.items():
        where = os.fsencode(name)
        for row, (label, path) in enumerate(zip(table.labels.tolist(), table.paths, strict=True)):
            if label != _NO_LABEL:
                file = (path or b"").rpartition(b"/")[2]
                key = folders[label] + file
                if not file or b"\0" in file or key in taken:
                    key = b"%s%08d" % (folders[label], number)
                if len(key) > MAX_KEY_NBYTES:
                    raise SourceError(f"{name}: row {row}: expected at most {MAX_KEY_NBYTES} bytes for {key[:80]!r}...")
                taken.add(key)
                yield Source(key, label, Item(where, row))
            number += 1
