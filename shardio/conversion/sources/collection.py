"""Sources (the images to convert), the collection of all sources, and the origin that reads them.

A key is the permanent name of a source: the path of the image in a folder tree of classes, relative to SRC, as bytes
(file names need not be UTF-8). A key does not depend on the kind of storage, so the same images give the same set from
any storage.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
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
from shardio.errors import DecodeError
from shardio.format.layout import RowType
from shardio.system.opening import open_file

# Asking a filesystem for sizes is waiting, on a network.
_STAT_THREADS = 16

_MASK_SUFFIXES = (".png", ".webp", ".PNG", ".WEBP")

UNREADABLE: Final = "unreadable"
"""The reason for refusing a source that could not be read. The source may be sound, and readable at the next try."""


class Extent(NamedTuple):
    """Part of a larger file: an image in an archive."""

    file: bytes
    """Relative to the origin's folder."""
    offset: int
    nbytes: int


class Fault(NamedTuple):
    """Takes the place of a source that is known to be unreadable. The source is refused with this detail, so it is
    listed and counted."""

    detail: str


class Item(NamedTuple):
    """The place of an image that is a row of a table or an item of a dataset."""

    where: bytes
    """A file relative to the origin's folder, or the name of a dataset."""
    number: int


class DatasetItem(NamedTuple):
    """An image from a dataset with its label, which the scan did not know."""

    image: object
    """An object that `decode_image` takes; None if samples have no pixels."""
    label: int | None
    arrays: Mapping[str, NDArray[Any]] = MappingProxyType({})
    """The item's values for the arrays of the set, by name."""


Place = bytes | Extent | Item | Fault | None
"""Where a source is: a file relative to the origin's folder, or an extent or an item of a file. None: the file with the
name of the key."""


@dataclass(frozen=True, slots=True)
class Source:
    """One image to convert."""

    key: bytes
    label: Label
    """All labels of a split are of one kind."""
    place: Place = None

    @property
    def indexed(self) -> int | None:
        """The label for the index; None if labels are no integers."""
        return self.label if isinstance(self.label, int) else None

    def item(self) -> Item:
        """Returns the place of a row or an item. Raises DecodeError for a Fault."""
        if isinstance(self.place, Fault):
            raise DecodeError("incomplete", self.place.detail)
        assert isinstance(self.place, Item)
        return self.place


@dataclass(frozen=True, eq=False)
class Origin(ABC):
    """Reads the images of a collection. Thread safe, and picklable, because tasks carry it to other processes."""

    masks: Path | None = field(default=None, kw_only=True)
    """The absolute path of a folder with a mask for each picture; None without masks."""
    spool: Path | None = field(default=None, kw_only=True)
    """The folder for the copies that `prepare` makes. If it is None, nothing is copied, and reading may be slow."""

    @abstractmethod
    def read(self, source: Source) -> bytes | DatasetItem:
        """Returns an encoded image, or an item of a dataset, whose label replaces the source's label.

        Raises DecodeError if the source cannot be read, is not a regular file, or is too large to be an image. Raises
        OSError if this process lacks file descriptors or memory, so a sound source is not refused.
        """

    def read_mask(self, source: Source) -> bytes:
        """Returns the encoded mask. Raises DecodeError if the mask is missing or unreadable; OSError like `read`."""
        if (path := self._find_mask(source)) is None:
            name = next(_stems_of(source), None)
            missing = f"{name}.png or {name}.webp" if name else "a picture below SRC, as its path names the mask"
            raise DecodeError("incomplete", f"expected {missing}, found none")
        return read_file(path)

    def _find_mask(self, source: Source) -> str | None:
        """Returns the file in the folder of masks at the source's path, with the first suffix that is there."""
        assert self.masks is not None
        for stem in _stems_of(source):
            for suffix in _MASK_SUFFIXES:
                path = os.path.join(self.masks, stem + suffix)
                try:
                    os.stat(path)
                except (FileNotFoundError, NotADirectoryError):
                    continue
                except OSError:
                    pass  # reading it will tell
                return path
        return None

    def fingerprints(self, sources: Sequence[Source]) -> list[str]:
        """Returns a string for each source, which changes when the source or its mask is replaced, rewritten, repaired
        or lost."""
        found = self._fingerprints(sources)
        if self.masks is None:
            return found
        return [
            f"{picture}\0{'no mask' if path is None else f'{os.path.splitext(path)[1]} {identify(path)}'}"
            for picture, path in zip(found, map(self._find_mask, sources), strict=True)
        ]

    @abstractmethod
    def _fingerprints(self, sources: Sequence[Source]) -> list[str]:
        """Returns the fingerprints without those of masks."""

    def nbytes(self, sources: Sequence[Source]) -> int | None:
        """Returns the total size of the encoded images; None if it is unknown without reading them."""
        return None

    def copies_nbytes(self) -> int:
        """Returns about how many bytes `prepare` writes; 0 for an origin that needs no copies."""
        return 0

    def prepare(self, report: Callable[[int], None]) -> None:  # noqa: B027 - most origins copy nothing
        """Copies images that cannot be read quickly from their files, unless they are copied already.

        Calls `report` with the number of images copied since the last call. Raises SourceError if a file of images is
        damaged or has changed since the scan, and OSError.
        """

    def check_sendable(self) -> None:  # noqa: B027 - most origins can be sent
        """Raises TypeError unless tasks can carry the origin to other processes."""


@dataclass(frozen=True, eq=False)
class ColumnTable:
    """Numbers for every source of a collection, which become arrays of shape () when the set is published."""

    rows: Mapping[bytes, int]
    """The place of each source's numbers, by its key."""
    values: Mapping[str, NDArray[np.int64] | NDArray[np.float64]]
    """The numbers of each column."""

    @property
    def types(self) -> dict[str, str]:
        """The type of each column by its name."""
        return {name: numbers.dtype.str for name, numbers in self.values.items()}

    @property
    def specs(self) -> tuple[ArraySpec, ...]:
        """The arrays that the columns become."""
        return tuple(ArraySpec(name, "array", RowType(dtype, ()), "column") for name, dtype in self.types.items())

    def sha256(self, splits: Iterable[Sequence[bytes]]) -> str:
        """Returns a hash of the names, types and numbers of the columns, for the keys of each split."""
        sha256 = hashlib.sha256(repr(self.types).encode())
        for keys in splits:
            for numbers in self.of(keys).values():
                sha256.update(numbers.tobytes())
        return sha256.hexdigest()

    def of(self, keys: Sequence[bytes]) -> dict[str, NDArray[np.int64] | NDArray[np.float64]]:
        """Returns the numbers of the sources with these keys, in their order."""
        found = [self.rows[key] for key in keys]
        return {name: numbers[found] for name, numbers in self.values.items()}


@dataclass(frozen=True)
class Collection:
    """The result of a scan."""

    origin: Origin
    classes: tuple[str, ...] = ()
    """The classes in the order of their labels. Empty if no image has a label, or if classes are numbers from 0 to the
    largest label, which is known only after the images were read."""
    splits: Mapping[str, tuple[Source, ...]] = field(default_factory=dict)
    ignored: Mapping[str, int] = field(default_factory=dict)
    """Counts, by kind, files and folders in SRC that are not images to convert."""
    class_names: tuple[str, ...] = ()
    """Readable names of the classes, in the order of the classes, such as "tench" for n01440764; or empty."""
    kind: str = "tree"
    """The kind of storage in SRC."""
    identity: str = ""
    """Distinguishes collections with equal keys and labels but different images, where keys are only numbers."""
    columns: ColumnTable | None = None
    notes: tuple[str, ...] = ()
    """How SRC was understood, where that was guessed."""
    arrays: tuple[ArraySpec, ...] = ()
    """The arrays that the sources have, other than labels that the scan has read."""
    has_pixels: bool = True
    """False for arrays without images."""

    @property
    def num_sources(self) -> int:
        return sum(map(len, self.splits.values()))


@dataclass(frozen=True)
class FileOrigin(Origin):
    """Files below one folder, or extents of such files. Other origins read rows of files."""

    folder: Path
    """Absolute: tasks run in processes with other current folders."""

    def _find(self, source: Source) -> tuple[str, Extent | None]:
        """Returns (path of a file, the source's extent in the file, if known). Raises DecodeError for a Fault."""
        place = source.key if source.place is None else source.place
        if isinstance(place, Fault):
            raise DecodeError("incomplete", place.detail)
        file = place if isinstance(place, bytes) else place[0]
        return os.path.join(self.folder, os.fsdecode(file)), place if isinstance(place, Extent) else None

    def read(self, source: Source) -> bytes | DatasetItem:
        return read_file(*self._find(source))

    def nbytes(self, sources: Sequence[Source]) -> int:
        """Returns the total size of the images; missing images count as empty. At most one stat per image."""

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
            try:
                path, extent = self._find(source)
            except DecodeError as error:
                found.append(error.detail)
                continue
            found.append(state(path) if extent is None else f"{state(path)}\0{extent.offset} {extent.nbytes}")
        return found


def digest(fingerprints: Iterable[str]) -> str:
    """Returns a hash of the fingerprints, which changes when a fingerprint changes."""
    return hashlib.sha256("".join(f"{one}\0" for one in fingerprints).encode("utf-8", "surrogateescape")).hexdigest()


def identify(path: str | os.PathLike[str]) -> str:
    """Returns a text of a file's size and modification time. It changes if the file is replaced, rewritten or lost."""
    try:
        status = os.stat(path)
    except OSError:
        return UNREADABLE
    return f"{status.st_size}:{status.st_mtime_ns}"


def _stems_of(source: Source) -> Iterator[str]:
    """Yields the paths, without suffix, at which the source's mask may be in the folder of masks."""
    for path in (source.key, source.place):  # the key says `train` even where the folder is called otherwise
        if isinstance(path, bytes):
            stem = os.path.splitext(os.fsdecode(path))[0]
            if "\0" not in stem and not os.path.isabs(stem) and os.pardir not in stem.split("/"):
                yield stem


def is_want(error: BaseException) -> bool:
    """Whether the error means that this process lacks file descriptors or memory, so the source may be sound."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def check_source_nbytes(nbytes: int) -> None:
    """Raises DecodeError if a file of this size is too large to be an image."""
    if nbytes > MAX_SOURCE_NBYTES:
        raise DecodeError("too large", f"expected at most {MAX_SOURCE_NBYTES} bytes, found {nbytes}")


def read_file(path: str | os.PathLike[str], extent: Extent | None = None) -> bytes:
    """Returns the bytes of a file, or of an extent of a file. Raises DecodeError and OSError as Origin.read does."""
    try:
        # Non-blocking, so that a FIFO that took the place of a file since the scan does not stop us for ever.
        with open_file(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DecodeError(UNREADABLE, "not a regular file")
            nbytes = status.st_size if extent is None else extent.nbytes
            check_source_nbytes(nbytes)
            if extent is None:
                # One byte more than there are: if it does not come, that was the end, and no second call need ask.
                data = file.read(nbytes + 1)
                return data if len(data) == nbytes else data + file.read()
            data = os.pread(file.fileno(), nbytes, extent.offset)
            if len(data) < nbytes:
                raise DecodeError(UNREADABLE, f"expected {nbytes} bytes at {extent.offset}, found {len(data)}")
            return data
    except OSError as error:
        if is_want(error):
            raise
        raise DecodeError(UNREADABLE, error.strerror or str(error)) from None
