"""Defines Source (an image to convert), Collection (all sources in SRC) and Origin (which reads the images).

A key is the permanent name of a source: the path that the image has, or would have, in a folder tree of classes,
relative to SRC, as bytes (file names need not be UTF-8). A key does not depend on the kind of storage, so the same
images give the same set from any storage.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.conversion.arrays import ArraySpec, Label
from shardio.conversion.images.headers import MAX_SOURCE_NBYTES
from shardio.conversion.sources.names import Ignored
from shardio.errors import DecodeError, SourceError
from shardio.format.layout import RowType
from shardio.system.opening import open_file

# Asking a filesystem for sizes is waiting, on a network.
_STAT_THREADS = 16

# JPEGs are found, too, and refused by name.
_MASK_SUFFIXES = (".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".jpg", ".jpeg")

UNREADABLE: Final = "unreadable"
"""The reason for refusing a source that could not be read. The source may be intact, and readable at the next try."""


class Zipped(NamedTuple):
    """A zip archive's entry for a file: the size and checksum of its content, and whether the content is compressed."""

    nbytes: int
    crc32: int
    is_deflated: bool

    def unpack(self, data: bytes) -> bytes:
        """Returns the content of the file. `data` are its bytes in the archive, perhaps compressed. Raises DecodeError
        if the content is damaged or too large."""
        check_source_nbytes(self.nbytes)
        with contextlib.suppress(zlib.error):
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, self.nbytes + 1) if self.is_deflated else data
            if (len(data), zlib.crc32(data)) == (self.nbytes, self.crc32):
                return data
        raise DecodeError("damaged", f"expected {self.nbytes:,} bytes with the archive's checksum, found other bytes")


class Extent(NamedTuple):
    """The `nbytes` bytes from byte `offset` of a file, such as an image in an archive. `zipped` is for zip archives."""

    file: bytes
    """The path of the file, relative to the origin's folder."""
    offset: int
    nbytes: int
    zipped: Zipped | None = None


class Fault(NamedTuple):
    """The `place` of a source that the scan has found unusable. The conversion refuses this source, with `detail`."""

    detail: str


class Item(NamedTuple):
    """The place of a sample that is a row of a file or an item of a dataset: `number` is its index, from 0."""

    where: bytes
    """The path of the file, relative to the origin's folder; or the split of the dataset."""
    number: int


class DatasetItem(NamedTuple):
    """A sample that is read from a dataset or a file of arrays: its image, its label and its arrays."""

    image: object
    """An image in a form that `decode_image` accepts; None if samples have no pixels."""
    label: int | None
    arrays: Mapping[str, NDArray[Any]] = MappingProxyType({})
    """The sample's value for each array of the set, by the array's name."""


def cut(stem: str, where: str) -> re.Match[str] | None:
    """Returns the match of `where` (ENDING, FOLDER/ENDING or FOLDER/) in `stem`, a path without suffix; or None. Group
    1 is the path above FOLDER (or above the file's name), or None; group 2 is the path between FOLDER and ENDING."""
    folder, ending = os.path.split(where)
    return re.fullmatch(rf"(.*/)?{re.escape(os.path.join(folder, ''))}(.*){re.escape(ending)}", stem, re.DOTALL)


Place = bytes | Extent | Item | Fault | None
"""Where a source is: the path of a file, relative to the origin's folder; an extent of a file; an item; or a Fault if
the source cannot be used. None: the key is the path of the file."""


@dataclass(frozen=True, slots=True)
class Source:
    """An image, or a sample without pixels, to convert."""

    key: bytes
    label: Label
    """An int, a tuple of float32 numbers, or None. All labels of a split have the same type."""
    place: Place = None

    @property
    def indexed(self) -> int | None:
        """The label if it is an integer, which the index stores; otherwise None."""
        return self.label if isinstance(self.label, int) else None

    def usable_place(self) -> bytes | Extent | Item:
        """Returns `place`, or the key if `place` is None. Raises DecodeError if `place` is a Fault."""
        if isinstance(self.place, Fault):
            raise DecodeError("incomplete", self.place.detail)
        return self.key if self.place is None else self.place

    def item(self) -> Item:
        """Returns `usable_place`, which must be an Item."""
        place = self.usable_place()
        assert isinstance(place, Item)
        return place


@dataclass(frozen=True, eq=False)
class Origin(ABC):
    """Reads the images of a collection. Thread safe and picklable, for tasks in other threads and processes."""

    masks: Path | None = field(default=None, kw_only=True)
    """The absolute path of a folder with a mask for each image; None if the set gets no masks."""
    mask_suffix: str = field(default="", kw_only=True)  # the option
    spool: Path | None = field(default=None, kw_only=True)
    """The folder for the copies that `prepare` writes. None: images are read in place, which may be slow."""

    @abstractmethod
    def read(self, source: Source) -> bytes | DatasetItem:
        """Returns the source's encoded image, or a DatasetItem, whose label replaces the source's label. Raises
        DecodeError, which refuses the source, if the image cannot be read, is not in a regular file, or has more than
        MAX_SOURCE_NBYTES bytes. Raises OSError if the process has no file descriptors or memory left."""

    def read_mask(self, source: Source) -> bytes:
        """Returns the encoded mask of the source's image. Raises DecodeError and OSError like `read`."""
        if (path := self._find_mask(source)) is None:
            stem = next(self._mask_stems(source), "")
            expected = f"{stem}.png" if stem else "a path below SRC that names the mask"
            raise DecodeError("incomplete", f"the image has no mask: expected {expected}, found none")
        return read_file(path)

    def _find_mask(self, source: Source) -> str | None:
        assert self.masks is not None
        for stem in self._mask_stems(source):
            for suffix in (*_MASK_SUFFIXES, *map(str.upper, _MASK_SUFFIXES)):
                path = os.path.join(self.masks, stem + suffix)
                try:
                    os.stat(path)
                except (FileNotFoundError, NotADirectoryError):
                    continue
                except OSError:
                    pass  # reading it will tell
                return path
        return None

    def _mask_stems(self, source: Source) -> Iterator[str]:
        """Yields the paths, without suffix, that the source's mask may have in the folder of masks."""
        old, _, new = self.mask_suffix.rpartition("=")
        folder, ending = os.path.split(new)
        for path in (source.key, source.place):  # the key says `train` even where the folder is called otherwise
            if isinstance(path, bytes):
                stem = os.path.splitext(os.fsdecode(path))[0]
                is_inside = "\0" not in stem and not os.path.isabs(stem) and os.pardir not in stem.split("/")
                if is_inside and (found := cut(stem, old)):
                    yield os.path.join(found[1] or "", folder, found[2] + ending)

    def fingerprints(self, sources: Sequence[Source]) -> list[str]:
        """Returns a text for each source. The text changes if the image or its mask is replaced, rewritten or lost."""
        found = self._fingerprints(sources)
        if self.masks is None:
            return found
        return [
            f"{picture}\0{'no mask' if path is None else f'{os.path.basename(path)} {identify(path)}'}"
            for picture, path in zip(found, map(self._find_mask, sources), strict=True)
        ]

    @abstractmethod
    def _fingerprints(self, sources: Sequence[Source]) -> list[str]:
        """Returns a text for each source, as `fingerprints` does, that does not depend on masks."""

    def nbytes(self, sources: Sequence[Source]) -> int | None:
        """Returns the total number of bytes of the encoded images; None if it is unknown without reading them."""
        return None

    def copies_nbytes(self) -> int:
        """Returns the approximate number of bytes that `prepare` will write; 0 if nothing has to be copied."""
        return 0

    def prepare(self, report: Callable[[int], None]) -> None:  # noqa: B027 - most origins copy nothing
        """Copies images that are slow to read in place into `spool`, unless they have been copied already.

        Calls `report` repeatedly with the number of images copied since the previous call. Raises SourceError if a file
        of images is damaged or has changed since the scan, and OSError if a copy cannot be written.
        """

    def check_sendable(self) -> None:  # noqa: B027 - most origins can be sent
        """Raises TypeError if the origin cannot be pickled and sent to other processes."""


@dataclass(frozen=True, eq=False)
class ColumnTable:
    """Columns of numbers from tables. Each column has one number for every source, and becomes an array of the set."""

    rows: Mapping[bytes, int]
    """The index of each source's numbers in the arrays of `values`, by the source's key."""
    values: Mapping[str, NDArray[np.int64] | NDArray[np.float64]]
    """The numbers of each column, by the column's name."""

    @property
    def specs(self) -> tuple[ArraySpec, ...]:
        rows = ((name, RowType(numbers.dtype.str, ())) for name, numbers in self.values.items())
        return tuple(ArraySpec(name, "array", row, "column") for name, row in rows)

    def sha256(self, splits: Iterable[Sequence[bytes]]) -> str:
        """Returns a sha256 (hex) of the columns' names and dtypes, and of their numbers for the sources with the keys
        in `splits`, in this order. `splits` has the keys of each split; keys are not hashed."""
        sha256 = hashlib.sha256(repr({name: numbers.dtype.str for name, numbers in self.values.items()}).encode())
        for keys in splits:
            for numbers in self.of(keys).values():
                sha256.update(numbers.tobytes())
        return sha256.hexdigest()

    def of(self, keys: Sequence[bytes]) -> dict[str, NDArray[np.int64] | NDArray[np.float64]]:
        """Returns the numbers of the sources with these keys, in the order of `keys`, by the column's name."""
        found = [self.rows[key] for key in keys]
        return {name: numbers[found] for name, numbers in self.values.items()}


@dataclass(frozen=True)
class Collection:
    """The result of a scan of SRC: the sources, their classes, and the origin that reads them."""

    origin: Origin
    classes: tuple[str, ...] = ()
    """The classes in the order of their numbers. Empty if sources have no classes, or if integer labels become known
    only when the images are read: the classes are then the numbers from 0 to the largest label."""
    splits: Mapping[str, tuple[Source, ...]] = field(default_factory=dict)
    ignored: Ignored = field(default_factory=Ignored)
    class_names: tuple[str, ...] = ()
    """A readable name of each class, in the order of `classes`, such as "tench" for n01440764; or empty."""
    kind: str = "tree"
    """The kind of storage in SRC, such as "tree" or "parquet"."""
    identity: str = ""
    """A hash (hex) of the content of SRC if keys are only numbers, which any other SRC may have, too; otherwise ""."""
    columns: ColumnTable | None = None
    notes: tuple[str, ...] = ()
    """What shardio guessed about SRC, for the report: for example, which column has the labels."""
    arrays: tuple[ArraySpec, ...] = ()
    """The arrays of the samples. Labels that are not integers are among them if only `Origin.read` returns them."""
    tables: tuple[str, ...] = ()
    """In words, what the columns of each table are used for, such as "paths from 'file', labels from 'class'"."""
    groups: Mapping[bytes, str] = field(default_factory=dict)
    """The name of each source's group, by key: the option `val` keeps a group in one split. Empty without groups."""
    is_held_out: bool = False
    """Whether the split val was taken out of train, by the option `val`."""
    has_pixels: bool = True
    """False if samples are arrays without images."""

    @property
    def num_sources(self) -> int:
        return sum(map(len, self.splits.values()))


@dataclass(frozen=True)
class FileOrigin(Origin):
    """Reads images that are files below one folder, or extents of such files."""

    folder: Path
    """An absolute path, because tasks run in processes with other current folders."""

    def _find(self, source: Source) -> tuple[str, Extent | None]:
        """Returns (the path of the source's file, the source's Extent in the file; None if it is the whole file)."""
        place = source.usable_place()
        extent = place if isinstance(place, Extent) else None
        return os.path.join(self.folder, os.fsdecode(place[0] if isinstance(place, tuple) else place)), extent

    def read(self, source: Source) -> bytes | DatasetItem:
        return read_file(*self._find(source))

    def nbytes(self, sources: Sequence[Source]) -> int:
        # A missing image counts as 0 bytes.
        def total(start: int) -> int:
            found = 0
            for source in sources[start::_STAT_THREADS]:
                with contextlib.suppress(DecodeError, OSError):
                    path, extent = self._find(source)
                    found += os.stat(path).st_size if extent is None else extent.nbytes
            return found

        with ThreadPoolExecutor(_STAT_THREADS, "shardio-stat") as pool:
            return sum(pool.map(total, range(_STAT_THREADS)))

    def _fingerprints(self, sources: Sequence[Source]) -> list[str]:
        found = []
        state = cache(identify)  # an archive holds many sources
        for source in sources:
            if isinstance(source.place, Fault):
                found.append(source.place.detail)
                continue
            path, extent = self._find(source)
            found.append(state(path) if extent is None else f"{state(path)}\0{extent.offset} {extent.nbytes}")
        return found


def digest(fingerprints: Iterable[str]) -> str:
    return hashlib.sha256("".join(f"{one}\0" for one in fingerprints).encode("utf-8", "surrogateescape")).hexdigest()


def identify(path: str | os.PathLike[str]) -> str:
    """Returns "SIZE:MTIME" of a file, in bytes and nanoseconds; UNREADABLE if the file cannot be examined."""
    try:
        status = os.stat(path)
    except OSError:
        return UNREADABLE
    return f"{status.st_size}:{status.st_mtime_ns}"


def check_unchanged(path: Path, identity: str) -> None:
    """Raises SourceError if a file has changed since the scan, when `identify` returned `identity` for it."""
    if identify(path) != identity:
        raise SourceError(f"{path}: the file has changed since it was scanned: run the command again")


def is_want(error: BaseException) -> bool:
    """Whether an error says that the process has no file descriptors or memory left: the source may be intact."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def check_source_nbytes(nbytes: int) -> None:
    if nbytes > MAX_SOURCE_NBYTES:
        raise DecodeError("too large", f"expected at most {MAX_SOURCE_NBYTES:,} bytes, found {nbytes:,} bytes")


def read_file(path: str | os.PathLike[str], extent: Extent | None = None) -> bytes:
    """Returns the bytes of a file, or of an extent of a file. Raises DecodeError and OSError like `Origin.read`."""
    try:
        # Non-blocking, so that a FIFO that took the place of a file since the scan does not stop us for ever.
        with open_file(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DecodeError(UNREADABLE, "expected a regular file, found a folder or a special file")
            nbytes = status.st_size if extent is None else extent.nbytes
            check_source_nbytes(nbytes)
            if extent is None:
                # One byte more than there are: if it does not come, that was the end, and no second call need ask.
                data = file.read(nbytes + 1)
                return data if len(data) == nbytes else data + file.read()
            data = os.pread(file.fileno(), nbytes, extent.offset)
            if len(data) < nbytes:
                found = f"found {len(data):,} bytes: the file is truncated"
                raise DecodeError(UNREADABLE, f"expected {nbytes:,} bytes at byte {extent.offset:,}, {found}")
            return extent.zipped.unpack(data) if extent.zipped else data
    except OSError as error:
        if is_want(error):
            raise
        raise DecodeError(UNREADABLE, error.strerror or str(error)) from None
