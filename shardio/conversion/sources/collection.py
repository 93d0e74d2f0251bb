"""What a conversion starts from: sources, the collection that they make up, and the origin that reads them.

A key names a source for good: the path of the image in a folder tree of classes, relative to SRC, as bytes (file names
need not be UTF-8). It does not depend on the storage, so the same images give the same set from any kind of storage.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from numpy.typing import NDArray

from shardio.conversion.images.headers import MAX_SOURCE_NBYTES
from shardio.errors import DecodeError
from shardio.system.opening import open_file

# Asking a filesystem for sizes is waiting, on a network.
_STAT_THREADS = 16

UNREADABLE: Final = "unreadable"
"""The reason class of a source that could not be read: it may be sound, and readable at the next try."""


class Extent(NamedTuple):
    """Part of a larger file: an image in an archive."""

    file: bytes
    """Relative to the origin's folder."""
    offset: int
    nbytes: int


class Fault(NamedTuple):
    """The place of a source that cannot be read: it is refused with this detail, so it is listed and counted."""

    detail: str


class Item(NamedTuple):
    """An image with a number: a row of a table, an item of a dataset."""

    where: bytes
    """A file relative to the origin's folder, or the name of a dataset."""
    number: int


class Given(NamedTuple):
    """An image from a dataset, with a label that was not known before."""

    image: object
    """An object that `decode_image` takes."""
    label: int
    arrays: Mapping[str, NDArray[Any]] = MappingProxyType({})
    """Its values of the set's arrays."""


@dataclass(frozen=True, slots=True)
class Source:
    """One image to convert."""

    key: bytes
    label: int
    place: bytes | Extent | Item | Fault | None = None
    """A file relative to the origin's folder, or an extent or item of one. None: the file `key`."""


class Origin(ABC):
    """Reads the images of a collection. Thread safe, and picklable, because tasks carry it to other processes."""

    @abstractmethod
    def read(self, source: Source) -> bytes | Given:
        """Returns one encoded image, or an item of a dataset, whose label replaces the source's.

        Raises DecodeError if it cannot be read, is not a regular file, or is too large to be an image; OSError if this
        process lacks descriptors or memory, which is not the source's fault.
        """

    @abstractmethod
    def fingerprints(self, sources: Sequence[Source]) -> list[str]:
        """Returns a text for each source that changes when the source is replaced, rewritten, mended or lost."""

    def nbytes(self, sources: Sequence[Source]) -> int | None:
        """Returns the size of these encoded images; None if it is unknown without reading them."""
        return None

    def with_copies_in(self, folder: Path) -> Origin:
        """Returns the origin that keeps its copies of images, if it makes any, in this folder."""
        return self

    def copies_nbytes(self) -> int:
        """Returns about how many bytes `prepare` has to write; 0 if reading an image costs only its bytes."""
        return 0

    def prepare(self, report: Callable[[int], None]) -> None:  # noqa: B027 - most origins copy nothing
        """Copies the images that cannot be read quickly in place, unless that is done.

        Calls `report` with the number of images copied since the last call. Raises SourceError if their file is damaged
        or has changed since the scan, and OSError.
        """

    def check_sendable(self) -> None:  # noqa: B027 - most origins can be sent
        """Raises TypeError unless tasks can carry the origin to other processes."""


@dataclass(frozen=True)
class Collection:
    """The result of a scan. `ignored` counts, by kind, files and folders in SRC that are no images to convert."""

    origin: Origin
    classes: tuple[str, ...]
    """Empty if classes are numbers, up to the largest label that an image turns out to have."""
    splits: Mapping[str, tuple[Source, ...]]
    ignored: Mapping[str, int]
    class_names: tuple[str, ...] = ()
    """Readable names of the classes, in their order, if the collection has them: "tench" for n01440764."""
    kind: str = "tree"
    """The kind of storage in SRC."""
    identity: str = ""
    """Differs between collections with the same keys and labels, if these do not name the images."""
    doubts: tuple[str, ...] = ()
    """What looks like a mistake in the layout of SRC, each in words that end in how it was understood."""

    @property
    def num_sources(self) -> int:
        return sum(map(len, self.splits.values()))


@dataclass(frozen=True)
class FileOrigin(Origin):
    """Files below one folder, or parts of such files."""

    folder: Path
    """Absolute: tasks run in processes with other current folders."""

    def _find(self, source: Source) -> tuple[str, Extent | None]:
        """Returns the path of a file, and the extent in it unless the whole file is meant. DecodeError for a fault."""
        place = source.key if source.place is None else source.place
        if isinstance(place, Fault):
            raise DecodeError("incomplete", place.detail)
        assert not isinstance(place, Item)
        file, extent = (place.file, place) if isinstance(place, Extent) else (place, None)
        return os.path.join(self.folder, os.fsdecode(file)), extent

    def read(self, source: Source) -> bytes:
        return read_file(*self._find(source))

    def nbytes(self, sources: Sequence[Source]) -> int:
        """Missing images count as empty. At most one stat per image."""

        def nbytes_of(source: Source) -> int:
            try:
                path, extent = self._find(source)
                return os.stat(path).st_size if extent is None else extent.nbytes
            except (DecodeError, OSError):
                return 0

        def total(start: int) -> int:
            return sum(map(nbytes_of, sources[start::_STAT_THREADS]))

        with ThreadPoolExecutor(_STAT_THREADS, "shardio-stat") as pool:
            return sum(pool.map(total, range(_STAT_THREADS)))

    def fingerprints(self, sources: Sequence[Source]) -> list[str]:
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
    """Returns a hash that changes when one of the fingerprints does."""
    return hashlib.sha256("".join(f"{one}\0" for one in fingerprints).encode("utf-8", "surrogateescape")).hexdigest()


def in_tree_order(sources: Iterable[Source]) -> tuple[Source, ...]:
    """Returns the sources in the order of a folder tree of their keys: by class, by folder, by name."""

    def listed(source: Source) -> tuple[int, str, str]:
        folder, _, name = os.fsdecode(source.key).rpartition("/")
        return source.label, folder, name

    return tuple(sorted(sources, key=listed))


def identify(path: str | os.PathLike[str]) -> str:
    """Returns the size and modification time, which change when a file is replaced, rewritten or lost."""
    try:
        status = os.stat(path)
    except OSError:
        return UNREADABLE
    return f"{status.st_size}:{status.st_mtime_ns}"


def is_want(error: BaseException) -> bool:
    """Whether this process lacks descriptors or memory, which is not the fault of the source."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def check_source_nbytes(nbytes: int) -> None:
    """Raises DecodeError if no image that can be decoded is so large."""
    if nbytes > MAX_SOURCE_NBYTES:
        raise DecodeError("too large", f"expected at most {MAX_SOURCE_NBYTES} bytes, found {nbytes}")


def read_file(path: str | os.PathLike[str], extent: Extent | None = None) -> bytes:
    """Reads a file, or an extent of it. Raises DecodeError and OSError as Origin.read does."""
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
