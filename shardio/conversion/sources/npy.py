"""Lists and reads samples that are arrays: a tree of NPY files, one NPY file, or an NPZ archive.

Each file of a tree is one sample. In a single NPY file or an archive, each row (an index of the first axis) is one
sample, read in place. Compressed arrays of an archive are first copied into OUT/.convert. Nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.conversion.arrays import ARRAY, ArraySpec, as_float32, declare, label_name
from shardio.conversion.images.headers import MAX_SOURCE_NBYTES
from shardio.conversion.options import Labels
from shardio.conversion.sources.archives import offset_in
from shardio.conversion.sources.collection import (
    Collection,
    DatasetItem,
    Extent,
    FileOrigin,
    Item,
    Origin,
    Source,
    check_unchanged,
    digest,
    identify,
    read_file,
)
from shardio.conversion.sources.containers import RECIPE
from shardio.conversion.sources.datasets import some_of
from shardio.conversion.sources.listing import Found, Listing
from shardio.conversion.sources.names import known_split
from shardio.conversion.sources.tree import list_tree
from shardio.errors import DecodeError, SourceError, SpaceError, counted
from shardio.format.layout import LABELS_NAME, MAX_ARRAYS, RowType, find_wrong_bool
from shardio.sets.given import HEADER_MOST, ArrayHeader, parse_header, refusing
from shardio.sets.names import looks_like_a_set
from shardio.system.files import AtomicFile, write_all
from shardio.system.machine import memory_left
from shardio.system.opening import check_unpacked, naming, open_untrusted

# As in MedMNIST and in Keras' MNIST.
_PICTURES = re.compile("(.*_)?images?|x_(train|val|valid|test)")
_BLOCK_NBYTES = 8 << 20
# Files of a tree that are read to find the first sound one.
_MOST_TRIED = 1000
# What a plan and its tasks keep of a sample. A small file may claim to hold billions.
_SOURCE_NBYTES = 300


def list_arrays(src: Path, labels: Labels | None = None, told: Set[str] | None = None) -> Listing:
    """Returns the samples in a tree of NPY files, in an NPY file, or in an NPZ archive.

    The samples of a tree or an NPY file have one array called `array`. Arrays of an archive have the names of its
    members; the member `label` or `labels` has the labels. Raises SourceError if the arrays cannot be samples. `told`:
    see `list_tree`.
    """
    if not src.is_file():
        return _list_tree(src, labels, told)
    with open(src, "rb") as file:
        first, nbytes = file.read(HEADER_MOST), os.fstat(file.fileno()).st_size
    if first.startswith(b"PK"):
        return _list_rows(src, _read_archive(src), "npz", has_labels=labels != "none" and not told)
    with refusing(src):
        header = parse_header(first)
    return _list_rows(src, {ARRAY: _Member(header, _check_rows(src, header, nbytes), 0, None)}, "npy")


def _check_values(values: NDArray[Any]) -> NDArray[Any]:
    """Returns the values in little-endian byte order. Raises DecodeError for a bool that is neither 0 nor 1."""
    if wrong := find_wrong_bool(values):
        raise DecodeError("damaged", wrong)
    return values.astype(values.dtype.newbyteorder("<"), copy=False)


# --- a tree of files --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TreeOrigin(FileOrigin):
    """Reads a tree of NPY files. Each file is one sample; all have the same dtype and shape."""

    row: RowType | None = None
    """The dtype and shape of every array. None: any dtype and shape."""
    first: str = ""
    """The key of the file from which `row` was read, for error messages."""

    def read(self, source: Source) -> DatasetItem:
        data = read_file(*self._find(source))
        if not data:
            raise DecodeError("empty", "expected an array, found an empty file")
        try:
            with refusing("the file"):
                header = parse_header(data[:HEADER_MOST])
            row = RowType(header.dtype.newbyteorder("<").str, header.shape)
        except SourceError as error:
            raise DecodeError("damaged", str(error)) from None
        except ValueError as error:
            raise DecodeError("unsupported", str(error)) from None
        if self.row is not None and self.row != row:
            expected = f"dtype {self.row.dtype} and shape {self.row.shape}, as in {self.first}"
            raise DecodeError("unsupported", f"expected {expected}, found {row.dtype} and {row.shape}")
        if len(data) != header.nbytes:
            raise DecodeError("damaged", f"expected {header.nbytes:,} bytes, found a file of {len(data):,} bytes")
        values = np.frombuffer(data, header.dtype, offset=header.start)
        values = values.reshape(header.shape, order="F" if header.by_columns else "C")
        return DatasetItem(None, source.indexed, {ARRAY: _check_values(values)})


def _list_tree(src: Path, labels: Labels | None, told: Set[str] | None) -> Listing:
    if looks_like_a_set(src):
        raise SourceError(f"{src}: expected arrays, found a shard set")
    tree = list_tree(src, labels, "arrays", told)
    found = list(chain.from_iterable(tree.found.values()))
    if len(found) > 1 and all(known_split(os.fsdecode(one.key).removesuffix(".npy")) for one in found):
        way = 'shardio.convert({"train": np.load("train.npy", mmap_mode="r"), ...}, OUT)'
        raise SourceError(f"{src}: expected a file for each sample, found a file for each split: convert by `{way}`")
    origin, failed = TreeOrigin(src), ""
    for one in islice(found, _MOST_TRIED):
        try:
            values = origin.read(Source(one.key, None, one.place)).arrays[ARRAY]
        except DecodeError as error:
            failed = failed or f"{os.fsdecode(one.key)}: {error}"
            continue
        row = RowType(values.dtype.str, values.shape)
        origin = TreeOrigin(src, row, os.fsdecode(one.key))
        specs = (ArraySpec(ARRAY, "array", row),)
        known = replace(tree.known, origin=origin, kind="arrays", arrays=specs, has_pixels=False)
        return replace(tree, known=known)
    raise SourceError(f"{src}: expected NPY files that can be stored, found none; the first: {failed}")


# --- one file ---------------------------------------------------------------------------------------------------------


class _Member(NamedTuple):
    """An array in an NPY file or an archive. Its first axis is the samples."""

    header: ArrayHeader
    row: RowType
    offset: int | None
    """The position of the array's NPY header in the file, in bytes; None if the array is compressed."""
    crc32: int | None
    """The checksum that the archive gives for the member; None for an NPY file."""


@dataclass(frozen=True)
class RowsOrigin(Origin):
    """Reads rows of the arrays in one file: `members`, by name. Rows of compressed arrays come from the copies that
    `prepare` makes. Thread safe."""

    path: Path
    identity: str
    """The file's size and modification time at the time of the scan, from `identify`."""
    members: Mapping[str, _Member]
    label: str = ""
    """The name of the member with the labels, if they are stored as float32; otherwise ""."""

    def read(self, source: Source) -> DatasetItem:
        number = source.item().number
        values = {name: self._read_row(name, number) for name in self.members}
        if self.label:
            try:
                values[LABELS_NAME] = as_float32(values.pop(self.label))
            except ValueError as error:
                raise DecodeError("unsupported", str(error)) from None
        return DatasetItem(None, source.indexed, values)

    def _read_row(self, name: str, number: int) -> NDArray[Any]:
        header, row, offset, _ = self.members[name]
        start = header.start + number * row.nbytes
        if offset is not None:
            data = read_file(self.path, Extent(b"", offset + start, row.nbytes))
            if identify(self.path) != self.identity:
                raise DecodeError("unreadable", "the file has changed since it was scanned: run the command again")
        elif self.spool is not None:
            copy = self._copy_of(name)
            with naming(copy), open_untrusted(copy) as file:
                data = os.pread(file.fileno(), row.nbytes, start)
        else:
            data = next(self._blocks(name, start, row.nbytes), b"")
        if len(data) != row.nbytes:
            found = f"found {len(data):,} bytes"
            raise DecodeError("damaged", f"{name}: expected {row.nbytes:,} bytes at byte {start:,}, {found}")
        return _check_values(np.frombuffer(data, header.dtype).reshape(row.shape))

    def _blocks(self, name: str, start: int = 0, nbytes: int = _BLOCK_NBYTES) -> Iterator[bytes]:
        """Yields the NPY file of the array `name` in the archive, from byte `start` on, in blocks of `nbytes` bytes.
        Raises SourceError if the file is damaged, perhaps only at its end."""
        with (
            naming(self.path),
            refusing(self.path),
            zipfile.ZipFile(self.path) as archive,
            archive.open(f"{name}.npy") as file,
        ):
            file.seek(start)
            while block := file.read(nbytes):
                yield block

    def read_all(self, name: str) -> NDArray[Any]:
        header = self.members[name].header
        return np.frombuffer(b"".join(self._blocks(name)), header.dtype, offset=header.start).reshape(header.shape)

    def _fingerprints(self, sources: Sequence[Source]) -> list[str]:
        return [identify(self.path)] * len(sources)

    def nbytes(self, sources: Sequence[Source]) -> int:
        return self.path.stat().st_size

    # --- copies of compressed arrays ---

    def _copy_of(self, name: str) -> Path:
        assert self.spool is not None
        return self.spool / f"{digest((name, self.identity))[:32]}.rows"

    def _is_missing(self, name: str) -> bool:
        return self.members[name].offset is None and (self.spool is None or not self._copy_of(name).exists())

    def _crc32_of_copy(self, name: str) -> int:
        crc32 = 0
        with naming(self._copy_of(name)), open_untrusted(self._copy_of(name)) as file:
            while block := file.read(_BLOCK_NBYTES):
                crc32 = zlib.crc32(block, crc32)
        return crc32

    def copies_nbytes(self) -> int:
        return sum(member.header.nbytes for name, member in self.members.items() if self._is_missing(name))

    def prepare(self, report: Callable[[int], None]) -> None:
        """Copies the compressed arrays of an archive, and verifies its checksums. See `Origin.prepare`."""
        check_unchanged(self.path, self.identity)
        for name, member in self.members.items():
            is_copied = member.offset is None and not self._is_missing(name)
            if member.crc32 is None or (is_copied and self._crc32_of_copy(name) == member.crc32):
                continue
            target = self._copy_of(name)
            with naming(target), AtomicFile(target) if member.offset is None else contextlib.nullcontext() as copy:
                count, done = member.header.shape[0], 0
                for block in self._blocks(name):
                    if copy is not None:
                        write_all(copy.descriptor, block)
                    before, done = done, done + len(block)
                    report(count * done // member.header.nbytes - count * before // member.header.nbytes)
                if copy is not None:
                    copy.commit()


def _check_rows(where: object, header: ArrayHeader, nbytes: int) -> RowType:
    """Returns the type of an array's rows. Raises SourceError, whose message begins with `where`, if the rows cannot be
    samples. `nbytes` is the size of the array's NPY file in bytes."""
    if not header.shape:
        raise SourceError(f"{where}: expected an array whose first axis is the samples, found a single value")
    try:
        row = RowType(header.dtype.newbyteorder("<").str, header.shape[1:])
    except ValueError as error:
        raise SourceError(f"{where}: {error}") from None
    if header.nbytes != nbytes:
        raise SourceError(f"{where}: expected {header.nbytes:,} bytes, as its header says, found {nbytes:,} bytes")
    if not header.shape[0]:
        raise SourceError(f"{where}: expected at least one sample, found an array of shape {header.shape}")
    if header.by_columns and len(header.shape) > 1:
        raise SourceError(
            f"{where}: expected C order, found an array in Fortran order: save np.ascontiguousarray(array)"
        )
    if row.nbytes > MAX_SOURCE_NBYTES:
        raise SourceError(f"{where}: expected samples up to {MAX_SOURCE_NBYTES:,} bytes, found {row.nbytes:,} bytes")
    return row


def _read_archive(path: Path) -> dict[str, _Member]:
    members: dict[str, _Member] = {}
    with refusing(path), zipfile.ZipFile(path) as archive:
        found = archive.infolist()
        if len(found) > MAX_ARRAYS + 1:
            raise SourceError(f"{path}: expected at most {MAX_ARRAYS} arrays and labels, found {len(found):,} members")
        check_unpacked(path, sum(one.file_size for one in found))
        for one in found:
            where, name = f"{path}: {one.filename!r}", one.filename.removesuffix(".npy")
            if name == one.filename or name in members:
                raise SourceError(f"{where}: expected members with distinct names NAME.npy, as `np.savez` writes them")
            if one.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                method = f"the compression method {one.compress_type}: use `np.savez_compressed`"
                raise SourceError(f"{where}: expected a stored or deflated array, found {method}")
            with archive.open(one) as file, refusing(where):
                header = parse_header(file.read(HEADER_MOST))
                row = _check_rows(where, header, one.file_size)
            offset = offset_in(archive, one) if one.compress_type == zipfile.ZIP_STORED else None
            members[name] = _Member(header, row, offset, one.CRC)
    return members


def _list_rows(src: Path, members: dict[str, _Member], kind: str, has_labels: bool = False) -> Listing:
    """Returns the samples in the rows of arrays. `has_labels` is false if a table has labels, or none are wanted."""
    if pictures := [
        name for name, one in members.items() if _PICTURES.fullmatch(name) and one.header.dtype == np.uint8
    ]:
        raise SourceError(f"{src}: expected arrays that are no pictures, found pictures in {pictures[0]!r}: {RECIPE}")
    counts = {name: member.header.shape[0] for name, member in members.items()}
    if len(set(counts.values())) != 1:
        sizes = ", ".join(f"{counted(count, 'row')} of {name}" for name, count in counts.items()) or "no array"
        raise SourceError(f"{src}: expected arrays with the same number of rows, one for each sample, found {sizes}")
    try:
        label = label_name(members)
        rows = {name: one.row for name, one in members.items() if name != label}
        specs = declare({name: ("array", row.dtype, row.shape) for name, row in rows.items()}, None)
    except ValueError as error:
        raise SourceError(f"{src}: {error}") from None
    if not specs:
        raise SourceError(f"{src}: expected an array as well as labels, found labels alone")
    origin = RowsOrigin(src, identify(src), members, label)
    count, left = next(iter(counts.values())), memory_left()
    if left is not None and count * _SOURCE_NBYTES > left:
        raise SpaceError(
            f"{src}: expected {count * _SOURCE_NBYTES:,} bytes of free memory for the list of {count:,} samples, found "
            f"{left:,} bytes. Convert parts of the file, and join the sets by `shardio merge`"
        )
    labels: list[int | None] = [None] * count
    notes: tuple[str, ...] = ()
    if label and (members[label].header.dtype.kind not in "iu" or members[label].row.shape):
        row = members[label].row
        if len(row.shape) > 1 or row.shape == (1,):
            raise SourceError(
                f"{src}: {label}: expected numbers, or vectors of at least two numbers, found rows of shape {row.shape}"
            )
        if has_labels:
            specs += (ArraySpec(LABELS_NAME, "array", RowType("<f4", row.shape)),)
            notes = (f"{src.name}: labels are float32, {counted(math.prod(row.shape), 'number')} each",)
    elif label:
        labels = origin.read_all(label).tolist()
        if (most := max(filter(None, labels), default=0)) >= 1 << 63:
            raise SourceError(f"{src}: {label}: expected integers that fit in int64, found {most}")
        origin = replace(origin, members={name: members[name] for name in rows}, label="")
    file = os.fsencode(src.name)
    found = [Found(b"%d" % number, one, Item(file, number)) for number, one in enumerate(labels)]
    identity = _hash(origin, count)
    known = Collection(origin, kind=kind, identity=identity, notes=notes, arrays=specs, has_pixels=False)
    return Listing(src, {"": found}, known)


def _hash(origin: RowsOrigin, count: int) -> str:
    """Returns a sha256 (hex) that tells the file from others: of the checksums in the file if it is an archive; of a
    few of its `count` rows if it is an NPY file."""
    sha256 = hashlib.sha256()
    for name, member in origin.members.items():
        sha256.update(f"{name}\0{member.row}\0{member.header.shape[0]}\0{member.crc32}\0".encode())
    if ARRAY in origin.members and origin.members[ARRAY].crc32 is None:
        for number in some_of(count):
            with contextlib.suppress(DecodeError):
                sha256.update(origin.read(Source(b"", None, Item(b"", number))).arrays[ARRAY].tobytes())
    return sha256.hexdigest()
