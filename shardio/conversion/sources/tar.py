"""Where the members of a plain tar lie, told from its headers alone: what is between them is never read.

Python's tarfile would do for sound archives. But it takes a damaged header for the end of the archive, so that the rest
would be missing without a word, and it keeps every member in memory. Here an archive is walked to its end mark, or it
is refused.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from shardio.errors import SourceError
from shardio.system.opening import open_file
from shardio.system.threads import ThreadPool

BLOCK_NBYTES = 512
_ZEROS = bytes(BLOCK_NBYTES)
# Beside a header often lie small members and the next header: one read for all. A disk gives whole pages anyway.
_READ_NBYTES = 4096
# The longest path that Linux takes.
_MAX_NAME_NBYTES = 4096
# An extended header holds the name of a member and little else.
_MAX_EXTENSION_NBYTES = 1 << 20
# Zeros fill up the archive's last record, which has 10 KiB, seldom more.
_MAX_PADDING_NBYTES = 1 << 20
# Walking headers is waiting for a disk or a network.
_THREADS = 16

_ADLER_MODULUS = 65521

GZIP_MAGIC = b"\x1f\x8b"
_COMPRESSED = {
    GZIP_MAGIC: "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"PK\x03\x04": "zip",
}
_MAGIC_NBYTES = max(map(len, _COMPRESSED))

# The kinds of members, by the byte in their headers.
_REGULAR = b"0\x007"
_FOLDER = b"5"
_LONG_NAME, _LONG_LINK = b"L", b"K"
_EXTENDED, _GLOBAL = b"x", b"g"
_REFUSED = {
    b"1": "the hard link",
    b"2": "the symbolic link",
    b"3": "the device",
    b"4": "the device",
    b"6": "the FIFO",
    b"S": "the sparse file",
}

T = TypeVar("T")


class Member(NamedTuple):
    """A regular file in an archive. Its name is as stored, but for `./` and doubled slashes."""

    name: bytes
    offset: int
    """The offset of its first byte in the file that holds the archive."""
    nbytes: int


class Archive:
    """The bytes from `start` to `stop` of something that can be read anywhere, taken for a tar. Not thread safe.

    `read_at(nbytes, offset)` gives fewer bytes at the end alone. `name` is for errors.
    """

    def __init__(self, name: str, read_at: Callable[[int, int], bytes], start: int, stop: int) -> None:
        self.name = name
        self.start = start
        self.stop = stop
        self._read_at = read_at
        self._window = b""
        self._window_start = start

    def read(self, offset: int, nbytes: int) -> bytes:
        """Raises SourceError if the archive ends before."""
        if offset + nbytes > self.stop:
            raise self.error(offset, f"{nbytes:,} bytes", f"its end at byte {self.stop:,}: it was cut short")
        at = offset - self._window_start
        if not 0 <= at <= len(self._window) - nbytes:
            self._window = self._read_at(min(max(nbytes, _READ_NBYTES), self.stop - offset), offset)
            self._window_start, at = offset, 0
            if len(self._window) < nbytes:
                raise self.error(offset, f"{nbytes:,} bytes", f"{len(self._window):,}: it was cut short")
        return self._window[at : at + nbytes]

    def error(self, offset: int, expected: str, found: str) -> SourceError:
        return SourceError(f"{self.name}: expected {expected} at byte {offset:,}, found {found}")


@contextlib.contextmanager
def open_archive(path: Path, start: int = 0, stop: int | None = None, name: str | None = None) -> Iterator[Archive]:
    """Opens a tar file, or a tar that is a member of one. Raises SourceError if it cannot be read or is compressed."""
    try:
        with open_file(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC) as file:
            descriptor = file.fileno()
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise SourceError(f"{path}: expected a tar, found {stat.filemode(status.st_mode)}")
            archive = Archive(
                str(path) if name is None else name,
                partial(os.pread, descriptor),
                start,
                status.st_size if stop is None else stop,
            )
            check_plain(archive.name, os.pread(descriptor, _MAGIC_NBYTES, start))
            yield archive
    except OSError as error:
        raise SourceError(f"{path}: expected a readable tar, found: {error.strerror}") from None


def check_plain(name: str, first_bytes: bytes) -> None:
    """Raises SourceError if a file that begins so is compressed."""
    for magic, method in _COMPRESSED.items():
        if first_bytes.startswith(magic):
            raise SourceError(
                f"{name}: expected a plain tar, whose images are read where they lie, found one compressed by "
                f"{method}. Decompress it; it need not be unpacked"
            )


def is_header(block: bytes) -> bool:
    """Whether a block of a tar begins a member, as its checksum tells."""
    if len(block) != BLOCK_NBYTES or block == _ZEROS or (stored := _number(block[148:156])) is None:
        return False
    # The checksum is the sum of all bytes, its own counted as spaces. The low half of Adler-32 is that sum plus one,
    # modulo a prime, and takes a tenth of the time of sum().
    low = zlib.adler32(block[156:], zlib.adler32(b" " * 8, zlib.adler32(block[:148]))) & 0xFFFF
    return (low - 1 - stored) % _ADLER_MODULUS == 0


def members(archive: Archive) -> Iterator[Member]:
    """Yields the regular files of an archive, in its order; folders are skipped.

    Raises SourceError for anything else that it holds (links, devices, sparse files), for names that lead out of a
    folder, for damage, and if the end mark is missing.
    """
    offset = archive.start
    said: dict[bytes, bytes] = {}  # by extended headers, of the member to come
    while (header := _read_header(archive, offset)) is not None:
        kind, name, nbytes = header
        if kind in (_LONG_NAME, _LONG_LINK, _EXTENDED, _GLOBAL):
            said |= _read_extension(archive, offset, kind, nbytes)
            offset += BLOCK_NBYTES + _padded(nbytes)
            continue
        name = said.get(b"path", name)
        if b"size" in said:
            nbytes = int(said[b"size"])
        said = {}
        is_folder = kind == _FOLDER or (kind in _REGULAR and name.endswith(b"/"))
        if not is_folder:
            if kind not in _REGULAR:
                what = _REFUSED.get(kind, f"a member of kind {kind!r},")
                raise _no_file(archive, offset, f"{what} {os.fsdecode(name)!r}")
            if offset + BLOCK_NBYTES + nbytes > archive.stop:
                found = f"its end at byte {archive.stop:,}: it was cut short"
                raise archive.error(offset, f"{os.fsdecode(name)!r} of {nbytes:,} bytes", found)
            yield Member(_checked_name(archive, offset, name), offset + BLOCK_NBYTES, nbytes)
        offset += BLOCK_NBYTES + (0 if kind == _FOLDER else _padded(nbytes))
    if said:
        raise archive.error(offset, "the member that an extended header announced", "the end mark")
    _check_end(archive, offset)


def drain(walks: Iterable[Generator[T, None, None]]) -> list[list[T]]:
    """Runs generators to their ends, each on a thread. After an error or Ctrl-C all stop at their next item."""
    stopped: list[None] = []

    def run(walk: Generator[T, None, None]) -> list[T]:
        found = []
        with contextlib.closing(walk):
            for item in walk:
                if stopped:
                    break
                found.append(item)
        return found

    with ThreadPool(_THREADS, "shardio-scan") as pool:
        try:
            return list(pool.map(run, walks))
        except BaseException:
            stopped.append(None)
            raise


# --- headers ----------------------------------------------------------------------------------------------------------


def _read_header(archive: Archive, offset: int) -> tuple[bytes, bytes, int] | None:
    """Returns (kind, name, nbytes); None for the end mark."""
    block = archive.read(offset, BLOCK_NBYTES)
    if block == _ZEROS:
        return None
    if not is_header(block):
        what = "other bytes: it is no tar" if offset == archive.start else "damage"
        raise archive.error(offset, "the header of a member", what)
    nbytes = _number(block[124:136])
    if nbytes is None:
        raise archive.error(offset, "a header with a size", repr(block[124:136]))
    name = _text(block[:100])
    if block[257:263] == b"ustar\0" and (prefix := _text(block[345:500])):  # GNU's magic differs, and has no prefix
        name = prefix + b"/" + name
    return block[156:157], name, nbytes


def _read_extension(archive: Archive, offset: int, kind: bytes, nbytes: int) -> dict[bytes, bytes]:
    """Returns what an extended header says of the path and size of the member that follows."""
    if nbytes > _MAX_EXTENSION_NBYTES:
        raise archive.error(offset, f"an extended header of at most {_MAX_EXTENSION_NBYTES:,} bytes", f"{nbytes:,}")
    content = archive.read(offset + BLOCK_NBYTES, nbytes)
    if kind == _LONG_LINK:
        return {}
    if kind == _LONG_NAME:
        return {b"path": _text(content)}
    said: dict[bytes, bytes] = {}
    while content:  # records: "LENGTH KEY=VALUE\n", where the length is that of the whole record
        match = re.match(rb"([1-9]\d{0,6}) ([^=]+)=", content)
        length = int(match[1]) if match else 0
        if match is None or not match.end() < length <= len(content) or content[length - 1 : length] != b"\n":
            raise archive.error(offset, "an extended header", "a damaged one")
        if match[2].startswith(b"GNU.sparse."):
            raise _no_file(archive, offset, "the header of a sparse file")
        if match[2] in (b"path", b"size"):
            said[match[2]] = content[match.end() : length - 1]
        content = content[length:]
    if said and kind == _GLOBAL:
        raise archive.error(offset, "a global header of neither path nor size", f"{said!r:.80}")
    if not re.fullmatch(rb"\d{1,18}", said.get(b"size", b"0")):
        raise archive.error(offset, "a size in decimal", f"{said[b'size']!r:.80}")
    return said


def _number(field: bytes) -> int | None:
    """Returns a number of a header: octal digits, or, as GNU writes larger ones, base 256."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = _text(field).strip(b" ")
    return int(digits or b"0", 8) if re.fullmatch(rb"[0-7]*", digits) else None


def _text(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _padded(nbytes: int) -> int:
    return -(-nbytes // BLOCK_NBYTES) * BLOCK_NBYTES


def _checked_name(archive: Archive, offset: int, name: bytes) -> bytes:
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if not parts or name.startswith(b"/") or b".." in parts or b"\0" in name or len(name) > _MAX_NAME_NBYTES:
        expected = f"a relative name without '..', of at most {_MAX_NAME_NBYTES:,} bytes,"
        raise archive.error(offset, expected, f"{os.fsdecode(name)!r:.80}")
    return b"/".join(parts)


def _no_file(archive: Archive, offset: int, found: str) -> SourceError:
    return archive.error(offset, "a regular file or a folder", f"{found}. Unpack the archive and convert the folder")


def _check_end(archive: Archive, offset: int) -> None:
    """Raises SourceError if another archive follows the end mark at `offset`: tar would not see it, nor would we."""
    last = min(archive.stop - BLOCK_NBYTES, offset + _MAX_PADDING_NBYTES)
    for place in range(offset, last + 1, BLOCK_NBYTES):
        block = archive.read(place, BLOCK_NBYTES)
        if block != _ZEROS:
            if is_header(block):
                found = "another member: tars were joined. Unpack them with `tar --ignore-zeros`, or keep them apart"
                raise archive.error(place, "nothing after the end mark", found)
            return  # garbage in the last record, which tar passes over, too
