"""Lists the members of an uncompressed tar with their offsets. Reads only the headers, not the members' content.

tarfile parses the headers. But TarFile.next mistakes a damaged header for the end of the archive, so images would be
lost without an error, and it keeps every member in memory. This module reads an archive up to its end mark, or raises.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import stat
import tarfile
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeVar

from shardio.conversion.sources.collection import Extent
from shardio.conversion.sources.names import Ignored, clutter
from shardio.errors import SourceError
from shardio.system.opening import open_file

BLOCK_NBYTES = tarfile.BLOCKSIZE
_ZEROS = bytes(BLOCK_NBYTES)
# The next header often follows a small member: one read gets both. A disk reads whole pages anyway.
_READ_NBYTES = 4096
# The longest path on Linux.
_MAX_NAME_NBYTES = 4096
# An extended header holds the name of a member and little else.
_MAX_EXTENSION_NBYTES = 1 << 20
# Zeros fill up the archive's last record, which has 10 KiB, seldom more.
_MAX_PADDING_NBYTES = 1 << 20
# Reading headers is waiting for a disk or a network.
_THREADS = 16

GZIP_MAGIC = b"\x1f\x8b"
_COMPRESSED = {
    GZIP_MAGIC: "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"PK\x03\x04": "zip",
}

_LONG_NAMES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_EXTENDED = (tarfile.XHDTYPE, tarfile.XGLTYPE)
_SUPPORTED = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE, tarfile.DIRTYPE)
_REFUSED = {
    tarfile.LNKTYPE: "the hard link",
    tarfile.SYMTYPE: "the symbolic link",
    tarfile.CHRTYPE: "the device",
    tarfile.BLKTYPE: "the device",
    tarfile.FIFOTYPE: "the FIFO",
    tarfile.GNUTYPE_SPARSE: "the sparse file",
}

T = TypeVar("T")


class Archive:
    """A tar in the bytes from `start` to `stop` of a seekable file. Errors begin with `name`. Not thread safe."""

    def __init__(self, name: str, file: IO[bytes] | io.BufferedReader, start: int, stop: int) -> None:
        self.name = name
        self.start = start
        self.stop = stop
        self._file = file
        self.tell: Callable[[], int] = file.tell
        self.seek: Callable[[int], int] = file.seek
        self.seek(start)

    def read(self, nbytes: int) -> bytes:
        """Returns the next `nbytes` bytes. Raises SourceError if fewer bytes are left in the archive."""
        offset = self.tell()
        data = self._file.read(nbytes) if 0 <= nbytes <= self.stop - offset else b""
        if len(data) != nbytes:
            raise self.error(offset, f"{nbytes:,} bytes", f"the end of the tar at byte {self.stop:,}: it is truncated")
        return data

    def read_at(self, offset: int, nbytes: int) -> bytes:
        self.seek(offset)
        return self.read(nbytes)

    def error(self, offset: int, expected: str, found: str) -> SourceError:
        return SourceError(f"{self.name}: expected {expected} at byte {offset:,}, found {found}")


@contextlib.contextmanager
def open_archive(path: Path, start: int = 0, stop: int | None = None, name: str | None = None) -> Iterator[Archive]:
    """Opens the tar in a file, or in its bytes from `start` to `stop` (a tar inside a tar), and yields an Archive.

    Raises SourceError, whose message begins with `name`, if the tar is unreadable or compressed.
    """
    try:
        opened = open_file(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with io.BufferedReader(opened, _READ_NBYTES) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise SourceError(f"{path}: expected a regular file, found the mode {stat.filemode(status.st_mode)}")
            archive = Archive(name or str(path), file, start, status.st_size if stop is None else stop)
            check_plain(archive.name, os.pread(file.fileno(), BLOCK_NBYTES, start))
            yield archive
    except OSError as error:
        raise SourceError(f"{path}: cannot read the tar: {error.strerror}") from None


def check_plain(name: str, first_bytes: bytes) -> None:
    """Raises SourceError if a file that begins with these bytes is compressed."""
    for magic, method in _COMPRESSED.items():
        if first_bytes.startswith(magic):
            raise SourceError(
                f"{name}: expected an uncompressed tar, whose images are read in place, found a file compressed with "
                f"{method}. Decompress it to a tar, which need not be unpacked"
            )


def is_header(block: bytes) -> bool:
    """Whether a block of 512 bytes is a member's header, by its checksum."""
    try:
        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def members(archive: Archive, file: bytes = b"", ignored: Ignored | None = None) -> Iterator[tuple[str, Extent]]:
    """Yields (name, place) of each regular file of an archive, in order. Names are without `./` and double slashes. A
    place is an Extent whose `file` is the argument `file`. Skips folders and, if `ignored` is given, clutter, which is
    counted there. Raises SourceError for links, devices, sparse files, absolute names, "..", damage, or no end mark."""
    walk = _Walk(archive)
    while (member := walk.next()) is not None:
        if member.isdir() or member.name.endswith("/"):
            continue
        if not 0 <= member.size <= archive.stop - member.offset_data:
            end = f"the end of the tar at byte {archive.stop:,}: it is truncated"
            raise archive.error(member.offset, f"{member.name!r} of {member.size:,} bytes", end)
        name = member.name.encode("utf-8", "surrogateescape")
        parts = [part for part in name.split(b"/") if part not in (b"", b".")]
        if not parts or name.startswith(b"/") or b".." in parts or b"\0" in name or len(name) > _MAX_NAME_NBYTES:
            expected = f"a relative name without '..', of at most {_MAX_NAME_NBYTES:,} bytes,"
            raise archive.error(member.offset, expected, f"{member.name!r:.80}")
        path = os.fsdecode(b"/".join(parts))
        if ignored is not None and (kind := clutter(path)):
            ignored.add(kind, name)
        else:
            yield path, Extent(file, member.offset_data, member.size)
    _check_end(archive, walk.offset)


def drain(walks: Iterable[Generator[T, None, None]]) -> list[list[T]]:
    """Runs generators in threads, and returns the items of each. An error or Ctrl-C stops all at their next item."""
    stopped: list[None] = []

    def run(walk: Generator[T, None, None]) -> list[T]:
        found = []
        with contextlib.closing(walk):
            for item in walk:
                if stopped:
                    break
                found.append(item)
        return found

    with ThreadPoolExecutor(_THREADS, "shardio-scan") as pool:
        try:
            return list(pool.map(run, walks))
        except BaseException:
            stopped.append(None)
            raise


class _Walk(tarfile.TarFile):
    """A TarFile whose `next` raises SourceError for damage, and which keeps no members in memory."""

    _archive: Archive | None = None

    def __init__(self, archive: Archive) -> None:
        # Its constructor reads a first member, of nothing yet.
        super().__init__(fileobj=io.BytesIO(), encoding="utf-8", errors="surrogateescape")
        self.fileobj: Any = archive
        self._archive, self.offset = archive, archive.start

    def next(self) -> tarfile.TarInfo | None:
        archive = self._archive
        if archive is None:
            return None
        self.pax_headers = {}  # which tarfile would gather from all global headers
        archive.seek(self.offset)
        try:
            return _Header.fromtarfile(self)
        except (tarfile.HeaderError, UnicodeError, RecursionError) as error:
            if archive.read_at(self.offset, BLOCK_NBYTES) == _ZEROS:
                return None
            found = "other bytes: it is not a tar" if self.offset == archive.start else f"damaged bytes: {error}"
            raise archive.error(self.offset, "the header of a member", found) from None


class _Header(tarfile.TarInfo):
    """A header that is checked before tarfile uses it to find the next header."""

    def _proc_member(self, walk: Any) -> tarfile.TarInfo:  # which tarfile has for subclasses to override
        archive: Archive = walk.fileobj
        if self.type in _LONG_NAMES + _EXTENDED:
            if not 0 <= self.size <= _MAX_EXTENSION_NBYTES:
                expected = f"an extended header of at most {_MAX_EXTENSION_NBYTES:,} bytes"
                raise archive.error(self.offset, expected, f"an extended header of {self.size:,} bytes")
            if self.type in _EXTENDED:
                _check_records(archive, self.offset, archive.read(self.size), self.type == tarfile.XGLTYPE)
                archive.seek(self.offset + BLOCK_NBYTES)
        elif self.type not in _SUPPORTED:
            what = _REFUSED.get(self.type, f"a member of type {self.type!r},")
            raise _no_file(archive, self.offset, f"{what} {self.name!r}")
        header: tarfile.TarInfo = super()._proc_member(walk)  # type: ignore[misc]
        return header


def _check_records(archive: Archive, offset: int, content: bytes, is_global: bool) -> None:
    """Raises SourceError for a damaged or unsupported record of an extended header, which tarfile would ignore.

    A record in `content` is "LENGTH KEY=VALUE\\n". `offset` is the position of the header in the archive, for errors.
    """
    while content:
        match = re.match(rb"([1-9]\d{0,6}) ([^=]+)=", content)
        length = int(match[1]) if match else 0
        if match is None or not match.end() < length <= len(content) or content[length - 1 : length] != b"\n":
            raise archive.error(offset, "an extended header of valid records", "a damaged record")
        key, value = match[2], content[match.end() : length - 1]
        if key.startswith(b"GNU.sparse."):
            raise _no_file(archive, offset, "the header of a sparse file")
        if is_global and key in (b"path", b"size"):
            raise archive.error(offset, "a global header without path and size", f"{key.decode()}={value!r:.80}")
        if key == b"size" and not re.fullmatch(rb"\d{1,18}", value):
            raise archive.error(offset, "the size of a member in decimal digits", f"{value!r:.80}")
        content = content[length:]


def _no_file(archive: Archive, offset: int, found: str) -> SourceError:
    return archive.error(offset, "a regular file or a folder", f"{found}. Unpack the archive and convert the folder")


def _check_end(archive: Archive, offset: int) -> None:
    """Raises SourceError if another archive follows the end mark at `offset`, as its members would not be listed."""
    last = min(archive.stop - BLOCK_NBYTES, offset + _MAX_PADDING_NBYTES)
    for place in range(offset, last + 1, BLOCK_NBYTES):
        block = archive.read_at(place, BLOCK_NBYTES)
        if block != _ZEROS:
            if is_header(block):
                found = "another member: several tars were joined. Keep them apart, or unpack with `tar --ignore-zeros`"
                raise archive.error(place, "nothing after the end mark", found)
            return  # garbage in the last record, which tar skips, too
