"""manifest.json as frozen values that check themselves, and back.

The manifest is the commit record of a shard set: it is written last, and a folder without one holds no set. Its
`digest` names the content: sha256 over the canonical JSON of everything but `digest` itself and `provenance`.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from shardio.errors import ConvertError, FormatError, SetNotFoundError
from shardio.format.layout import (
    FORMAT_NAME,
    FORMAT_VERSION,
    HEADER_NBYTES,
    MANIFEST_NAME,
    MAX_COUNT,
    MAX_KEY_NBYTES,
    MAX_MANIFEST_NBYTES,
    MAX_SIDE,
    WORK_FOLDER,
    IndexColumns,
    SampleShape,
    check_columns,
    check_sample_shape,
    index_dtype,
    index_header,
    index_nbytes,
    is_safe_name,
    shard_header,
    shard_nbytes,
)
from shardio.system.files import write_atomic
from shardio.system.opening import naming, open_regular

# What a shard takes in manifest.json beside its name.
_SHARD_TEXT_NBYTES = 176

_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
# 48 bits: nobody has so many sets that two of them would begin alike.
_PINNED = re.compile(r"[0-9a-f]{12,64}", re.ASCII)
# os.fsdecode makes others of the bytes of names that are not UTF-8. These stand for nothing.
_SURROGATE = re.compile("[\ud800-\udc7f\udd00-\udfff]")
# As many as Python turns into an integer, and as deep as it writes JSON, however it is set and called.
_MAX_DIGITS = 4300
_MAX_DEPTH = 100


@dataclass(frozen=True)
class FileEntry:
    """One published file: its name inside the set's folder, its size, and what `sha256sum` says of it."""

    file: str
    nbytes: int
    sha256: str

    def header(self, sample_shape: SampleShape) -> bytes:
        """Returns the bytes with which the file of a set of such samples begins; empty if it may begin with any."""
        return b""


@dataclass(frozen=True)
class ShardEntry(FileEntry):
    num_samples: int

    def header(self, sample_shape: SampleShape) -> bytes:
        return shard_header(self.num_samples, sample_shape)


@dataclass(frozen=True)
class IndexEntry(FileEntry):
    key_nbytes: int
    columns: IndexColumns = ()
    """What its rows have beyond the fields of every index."""

    @property
    def dtype(self) -> np.dtype[np.void]:
        """Of one row."""
        return index_dtype(self.key_nbytes, self.columns)

    def header(self, sample_shape: SampleShape) -> bytes:
        num_rows = (self.nbytes - HEADER_NBYTES) // self.dtype.itemsize
        return index_header(num_rows, self.key_nbytes, self.columns)

    def _content(self) -> dict[str, Any]:
        content = {**vars(self), "columns": [list(column) for column in self.columns]}
        if not self.columns:
            del content["columns"]  # one text for one content: the key is there only where it says something
        return content


@dataclass(frozen=True)
class RejectsEntry(FileEntry):
    num_rejects: int


@dataclass(frozen=True)
class Split:
    """The shards of one split, in order, and their common index of one row per sample."""

    num_samples: int
    index: IndexEntry
    shards: tuple[ShardEntry, ...]

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """All files of the split, its index first."""
        return (self.index, *self.shards)


@dataclass(frozen=True)
class Manifest:
    """What a set is. FormatError if the parts contradict each other."""

    sample_shape: SampleShape
    classes: tuple[str, ...]
    splits: Mapping[str, Split]
    rejects: RejectsEntry
    provenance: Mapping[str, Any] = field(default_factory=dict)
    class_names: tuple[str, ...] = ()
    """What people call the classes, in their order; empty if the set does not say. Not distinct: cranes are two."""

    def __post_init__(self) -> None:
        check_sample_shape(self.sample_shape)
        if not self.splits:
            raise FormatError("splits: expected at least one, found none")
        if (repeated := first_repeated(self.classes)) is not None:
            raise FormatError(f"classes: expected distinct names, found {_show(repeated)} twice")
        if self.class_names and len(self.class_names) != len(self.classes):
            raise FormatError(
                f"class_names: expected one for each of the {len(self.classes)} classes, found {len(self.class_names)}"
            )
        names: set[str] = {MANIFEST_NAME}
        for entry in self.files:
            # Names that differ only in case are one file on some filesystems.
            if entry.file.lower() in names:
                raise FormatError(f"file {entry.file!r}: expected distinct names, found it twice")
            names.add(entry.file.lower())
        for name, split in self.splits.items():
            self._check_split(name, split)

    @property
    def files(self) -> list[FileEntry]:
        """All files of the set but the manifest itself."""
        return [self.rejects, *chain.from_iterable(split.files for split in self.splits.values())]

    def _check_split(self, name: str, split: Split) -> None:
        total = sum(shard.num_samples for shard in split.shards)
        if total != split.num_samples:
            raise FormatError(f"splits.{name}.num_samples: expected the shards' sum {total}, found {split.num_samples}")
        for shard in split.shards:
            expected = shard_nbytes(shard.num_samples, self.sample_shape)
            if shard.nbytes != expected:
                raise FormatError(
                    f"splits.{name}, {shard.file}: nbytes: expected {expected} for {shard.num_samples} samples of "
                    f"{self.sample_shape}, found {shard.nbytes}"
                )
        expected = index_nbytes(split.num_samples, split.index.key_nbytes, split.index.columns)
        if split.index.nbytes != expected:
            raise FormatError(
                f"splits.{name}, {split.index.file}: nbytes: expected {expected}, found {split.index.nbytes}"
            )

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) of the set's content: equal digests mean equal pixels, labels, keys and order."""
        content = self._content()
        return hashlib.sha256(
            json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")
        ).hexdigest()

    def _content(self) -> dict[str, Any]:
        content = {
            "format": FORMAT_NAME,
            "format_version": FORMAT_VERSION,
            "sample_shape": list(self.sample_shape),
            "classes": list(self.classes),
            "splits": {
                name: {
                    "num_samples": split.num_samples,
                    "index": split.index._content(),
                    "shards": [vars(shard) for shard in split.shards],
                }
                for name, split in self.splits.items()
            },
            "rejects": vars(self.rejects),
        }
        if self.class_names:
            content["class_names"] = list(self.class_names)
        return content

    def dumps(self) -> bytes:
        """The bytes of manifest.json: keys sorted, one entry a line as far as `json` does it, a newline at the end."""
        document = {**self._content(), "provenance": dict(self.provenance), "digest": self.digest}
        return (json.dumps(document, sort_keys=True, indent=1, ensure_ascii=True) + "\n").encode("ascii")

    @property
    def nbytes(self) -> int:
        """Size of all files but the manifest itself."""
        return sum(entry.nbytes for entry in self.files)


# --- reading what somebody else may have written -------------------------------------------------------------------


def _show(value: object) -> str:
    """A value as it may stand in a message, however long it is."""
    text = repr(value)
    return text[:160] + "..." if len(text) > 160 else text


def _fail(where: str, expected: str, found: object) -> FormatError:
    return FormatError(f"{where}: expected {expected}, found {_show(found)}")


def _object(value: object, where: str, keys: Set[str], optional: Set[str] = frozenset()) -> dict[str, Any]:
    if type(value) is not dict:
        raise _fail(where, "an object", value)
    if set(value) - optional != keys:
        missing, unknown = sorted(keys - set(value)), sorted(set(value) - keys - optional)
        parts = [f"without {_show(missing)}"] if missing else []
        parts += [f"with unknown {_show(unknown)}"] if unknown else []
        raise FormatError(f"{where}: expected exactly the keys {sorted(keys)}, found it {' and '.join(parts)}")
    return value


def _list(value: object, where: str) -> list[Any]:
    if type(value) is not list:
        raise _fail(where, "a list", value)
    return value


def _filled_list(value: object, where: str) -> list[Any]:
    """Of a key that is left out rather than empty, so that equal sets have equal manifests."""
    if not _list(value, where):
        raise _fail(where, "at least one, or no such key", value)
    return _list(value, where)


def _strings(values: list[Any], where: str) -> tuple[str, ...]:
    return tuple(_string(value, f"{where}[{i}]") for i, value in enumerate(values))


def _count(value: object, where: str, minimum: int = 0) -> int:
    if type(value) is not int or not minimum <= value <= MAX_COUNT:
        raise _fail(where, f"an integer from {minimum} to 2**53", value)
    return value


def _string(value: object, where: str) -> str:
    if type(value) is not str:
        raise _fail(where, "a string", value)
    if _SURROGATE.search(value):
        raise _fail(where, "text, in which lone surrogates stand for bytes (U+DC80 to U+DCFF)", value)
    return value


def _name(value: object, where: str) -> str:
    if type(value) is not str or not is_safe_name(value):
        raise _fail(where, "a safe name ([A-Za-z0-9][A-Za-z0-9._-]*, at most 200 characters)", value)
    return value


def _sha256(value: object, where: str) -> str:
    if type(value) is not str or not _SHA256.fullmatch(value):
        raise _fail(where, "64 lower-case hexadecimal digits", value)
    return value


def _file_fields(value: dict[str, Any], where: str) -> dict[str, Any]:
    return {
        "file": _name(value["file"], f"{where}.file"),
        "nbytes": _count(value["nbytes"], f"{where}.nbytes"),
        "sha256": _sha256(value["sha256"], f"{where}.sha256"),
    }


_FILE_KEYS = {"file", "nbytes", "sha256"}


def _shard(value: object, where: str) -> ShardEntry:
    fields = _object(value, where, _FILE_KEYS | {"num_samples"})
    num_samples = _count(fields["num_samples"], f"{where}.num_samples", minimum=1)
    return ShardEntry(**_file_fields(fields, where), num_samples=num_samples)


def _index(value: object, where: str) -> IndexEntry:
    fields = _object(value, where, _FILE_KEYS | {"key_nbytes"}, optional={"columns"})
    key_nbytes = _count(fields["key_nbytes"], f"{where}.key_nbytes", minimum=4)
    if key_nbytes % 8 != 4 or key_nbytes > MAX_KEY_NBYTES:
        raise _fail(f"{where}.key_nbytes", f"4 more than a multiple of 8, at most {MAX_KEY_NBYTES}", key_nbytes)
    columns = _columns(fields["columns"], f"{where}.columns") if "columns" in fields else ()
    return IndexEntry(**_file_fields(fields, where), key_nbytes=key_nbytes, columns=columns)


def _columns(value: object, where: str) -> IndexColumns:
    pairs = [_list(pair, f"{where}[{i}]") for i, pair in enumerate(_filled_list(value, where))]
    try:
        return check_columns(pairs)
    except ValueError as error:
        raise FormatError(f"{where}: {error}") from None


def _split(value: object, where: str) -> Split:
    fields = _object(value, where, {"num_samples", "index", "shards"})
    shards = _list(fields["shards"], f"{where}.shards")
    return Split(
        num_samples=_count(fields["num_samples"], f"{where}.num_samples", minimum=1),
        index=_index(fields["index"], f"{where}.index"),
        shards=tuple(_shard(shard, f"{where}.shards[{i}]") for i, shard in enumerate(shards)),
    )


def _rejects(value: object, where: str) -> RejectsEntry:
    fields = _object(value, where, _FILE_KEYS | {"num_rejects"})
    num_rejects = _count(fields["num_rejects"], f"{where}.num_rejects")
    return RejectsEntry(**_file_fields(fields, where), num_rejects=num_rejects)


def _no_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        repeated = first_repeated([key for key, _ in pairs])
        raise FormatError(f"expected distinct keys in each object, found {_show(repeated)} twice")
    return result


def first_repeated(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _no_constant(name: str) -> None:
    raise FormatError(f"expected numbers that JSON has, found {name}")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise FormatError(f"expected numbers that float64 holds, found {_show(text)}")
    return number


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise FormatError(f"expected integers of at most {_MAX_DIGITS} digits, found {_show(text)}")
    return int(text)


def _check_provenance(value: object, depth: int = 0) -> None:
    """It may be anything that can be shown, and written as JSON again."""
    if isinstance(value, str):
        _string(value, "provenance")
    if isinstance(value, (dict, list)):
        if depth == _MAX_DEPTH:
            raise FormatError(f"provenance: expected objects and lists at most {_MAX_DEPTH} deep, found deeper ones")
        for child in chain(value, value.values()) if isinstance(value, dict) else value:
            _check_provenance(child, depth + 1)


def parse_manifest(data: bytes) -> Manifest:
    """The manifest in these bytes. FormatError says what was expected and what was found, for any bytes at all."""
    try:
        document = json.loads(
            data.decode("ascii"),
            object_pairs_hook=_no_repeated_keys,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_integer,
        )
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise FormatError(f"expected a JSON document in ASCII, found a fault: {error}") from None
    # Name and version come first: a set of a later version may have any other keys.
    if type(document) is not dict or document.get("format") != FORMAT_NAME:
        found = document.get("format") if type(document) is dict else document
        raise _fail("format", repr(FORMAT_NAME), found)
    version = document.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise _fail("format_version", f"{FORMAT_VERSION} (a newer set needs a newer shardio)", version)
    keys = {
        "format",
        "format_version",
        "sample_shape",
        "classes",
        "splits",
        "rejects",
        "provenance",
        "digest",
    }
    _object(document, "manifest", keys, optional={"class_names"})
    shape = _list(document["sample_shape"], "sample_shape")
    try:
        sample_shape = check_sample_shape(tuple(shape))
    except ValueError:
        raise _fail("sample_shape", f"[height, width, channels], each from 1 to {MAX_SIDE}", shape) from None
    splits = document["splits"]
    if type(splits) is not dict:
        raise _fail("splits", "an object", splits)
    if type(document["provenance"]) is not dict:
        raise _fail("provenance", "an object", document["provenance"])
    _check_provenance(document["provenance"])
    manifest = Manifest(
        sample_shape=sample_shape,
        classes=_strings(_list(document["classes"], "classes"), "classes"),
        splits={_name(name, "splits"): _split(split, f"splits.{name}") for name, split in splits.items()},
        rejects=_rejects(document["rejects"], "rejects"),
        provenance=document["provenance"],
        class_names=(
            _strings(_filled_list(document["class_names"], "class_names"), "class_names")
            if "class_names" in document
            else ()
        ),
    )
    if document["digest"] != manifest.digest:
        raise _fail("digest", f"{manifest.digest} (computed from the content)", document["digest"])
    return manifest


def check_manifest_nbytes(path: str | Path, nbytes: int) -> None:
    """FormatError if the file is larger than any manifest: before it is read."""
    if nbytes > MAX_MANIFEST_NBYTES:
        raise FormatError(f"{path}: expected at most {MAX_MANIFEST_NBYTES} bytes, found {nbytes}")


def load_manifest(folder: str | os.PathLike[str], digest: str | None = None) -> Manifest:
    """The manifest of the set in `folder`. SetNotFoundError if there is none, FormatError if it is not sound.

    `digest` is what `check_digest` takes.
    """
    path = Path(folder) / MANIFEST_NAME
    if not os.path.lexists(path):
        raise SetNotFoundError(f"{path}: not found: {_what_is_there(Path(folder))}")
    opened, nbytes = open_regular(path)
    with naming(path), io.BufferedReader(opened) as file:
        check_manifest_nbytes(path, nbytes)
        # One byte more than allowed is asked for: the file may have grown since.
        data = file.read(MAX_MANIFEST_NBYTES + 1)
    try:
        manifest = parse_manifest(data)
        check_digest(manifest, digest)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None
    return manifest


def is_digest(text: str) -> bool:
    """Whether this is the digest of a set, whole."""
    return _SHA256.fullmatch(text) is not None


def check_text(names: Sequence[object], where: str) -> None:
    """ValueError or TypeError unless all are strings as a manifest may hold them."""
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{where} must be strings, found {_show(name)}")
        if _SURROGATE.search(name):
            raise ValueError(f"{where} must be text, in which lone surrogates stand for bytes, found {_show(name)}")


def check_digest(manifest: Manifest, digest: str | None) -> None:
    """FormatError unless this is the content that somebody pinned by its digest, whole or by its first 12 digits or
    more. None is any content. ValueError if `digest` is no such thing."""
    if digest is None:
        return
    if not isinstance(digest, str) or not _PINNED.fullmatch(digest):
        raise ValueError(
            "digest must be the 64 lower-case hexadecimal digits that `shardio info` prints, or the first 12 or more "
            f"of them; found {_show(digest)}"
        )
    if not manifest.digest.startswith(digest):
        raise FormatError(
            f"digest: expected {digest}, found {manifest.digest}: this is another set than the one that was pinned; "
            "open the folder that holds that one, or pin the digest that `shardio info` prints of this one"
        )


def _what_is_there(folder: Path) -> str:
    if not folder.exists():
        return f"the folder {folder} does not exist"
    if not folder.is_dir():
        return f"{folder} is not a folder"
    if (folder / WORK_FOLDER).exists():
        return "a conversion into this folder was not finished; the same `shardio convert` command goes on with it"
    return "this folder holds no shard set; `shardio convert SRC OUT` makes one"


def commit_manifest(folder: Path, manifest: Manifest) -> None:
    """Publish the set: after this rename it exists, before it does not. Every file it names must be durable already.

    FormatError, and nothing is published, if no reader would open it; ConvertError if it is too large for them.
    """
    path, data = folder / MANIFEST_NAME, manifest.dumps()
    _check_room(len(data), len(manifest.classes), sum(len(split.shards) for split in manifest.splits.values()))
    try:
        parse_manifest(data)
    except FormatError as error:
        raise FormatError(f"{path}: {error}; nothing is published") from None
    write_atomic(path, data)


def check_names_fit(classes: Sequence[str], class_names: Sequence[str] = (), shards: Sequence[str] = ()) -> None:
    """ConvertError if a set of these classes and shards would have a larger manifest than readers take."""
    names = len(json.dumps([*classes, *class_names])) + 2 * (len(classes) + len(class_names))  # an indent for each
    _check_room(names + sum(map(len, shards)) + _SHARD_TEXT_NBYTES * len(shards), len(classes), len(shards))


def _check_room(nbytes: int, num_classes: int, num_shards: int) -> None:
    if nbytes > MAX_MANIFEST_NBYTES:
        raise ConvertError(
            f"{MANIFEST_NAME}: expected at most {MAX_MANIFEST_NBYTES:,} bytes, found {nbytes:,} for {num_classes:,} "
            f"classes and {num_shards:,} shards: shorten the names of the classes, or make fewer shards by a larger "
            "`--shard-size`, from Python `shard_size=`"
        )
