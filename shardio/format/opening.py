"""Opens files of a published set, and checks them on the descriptor that is then read or mapped."""

from __future__ import annotations

import os
from pathlib import Path

from shardio.errors import FormatError
from shardio.format.entries import FileEntry, TableEntry
from shardio.system.opening import FileAt, OpenFile, naming, open_regular
from shardio.system.pour import TRANSIENT, Attempts, pour, reading_failed

KnownFiles = dict[str, tuple[int, ...]]
"""The state of each file of a set, by name, when it was opened first or was last found to have the right sha256."""
# A key in KnownFiles once an equal file had another device or inode, as with FUSE: from then on, only size and time
# are compared, as hashing each file again would take long.
_NUMBERS_CHANGE = ""


def state_of(path: str | int) -> tuple[int, ...]:
    """Returns (size, mtime, device, inode); () if there is no file. Not ctime, which changes with each hard link."""
    try:
        status = os.lstat(path) if isinstance(path, str) else os.fstat(path)
    except FileNotFoundError:
        return ()
    return status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino


def open_sized(path: str | Path | FileAt, entry: FileEntry) -> OpenFile:
    """Opens a file of a set. Raises FormatError unless it is a regular file with the size in its entry."""
    file, nbytes = open_regular(path)
    if nbytes != entry.nbytes:
        file.close()
        raise wrong_size(path, entry, nbytes)
    return file


def wrong_size(path: object, entry: FileEntry, nbytes: int) -> FormatError:
    """Returns the FormatError for a file that has `nbytes` bytes instead of the size in its entry."""
    return FormatError(
        f"{path}: expected {entry.nbytes} bytes, as the manifest says, found {nbytes} bytes; copy the file "
        "again, or repair the set (`shardio repair`)"
    )


def open_checked(path: str | Path | FileAt, entry: FileEntry) -> OpenFile:
    """Opens a file of a set. Raises FormatError if its size or its header differs from its entry."""
    file = open_sized(path, entry)
    header = entry.header()
    try:
        check_header(path, header, os.pread(file.fileno(), len(header), 0))
    except BaseException:
        file.close()
        raise
    return file


def check_header(path: str | Path | FileAt, header: bytes, found: bytes) -> None:
    """Raises FormatError unless `found`, the first bytes of a file, equals the expected `header`."""
    if found != header:
        at = next((i for i, (a, b) in enumerate(zip(found, header, strict=False)) if a != b), len(found))
        raise FormatError(
            f"{path}: header: expected {header[at : at + 16]!r} at byte {at}, found {found[at : at + 16]!r}; "
            "copy the file again, or repair the set (`shardio repair`)"
        )


def open_sound(path: str | Path | FileAt, entry: FileEntry, known: KnownFiles | None = None) -> OpenFile:
    """Opens a file by `open_checked`, and hashes it if it is an index, an order or checksums.

    `known` has the state of each file that was opened before, by file name, and gets the state of this file. If a file
    in `known` has another state now, it is hashed, whatever it is; otherwise it is not. Raises FormatError if the
    sha256 is wrong, OSError if bytes cannot be read after several attempts.
    """
    file = open_checked(path, entry)
    known = {} if known is None else known
    try:
        with naming(path):
            state = state_of(file.fileno())
        seen = known.get(entry.file, () if isinstance(entry, TableEntry) else state)
        if seen != state and not (_NUMBERS_CHANGE in known and seen[:2] == state[:2]):
            found = _sha256(file, path, entry)
            if found != entry.sha256 and entry.file in known:
                raise FormatError(
                    f"{path}: sha256: expected {entry.sha256}, found {found}: the file was changed or replaced after "
                    "the set was opened; open the set again, or put the file back"
                )
            check_sha256(path, entry, found)
            if seen[:2] == state[:2]:
                known[_NUMBERS_CHANGE] = ()
        known[entry.file] = state
    except BaseException:
        file.close()
        raise
    return file


def _sha256(file: OpenFile, path: str | Path | FileAt, entry: FileEntry) -> str:
    attempts = Attempts()

    def read(offset: int, buffer: memoryview) -> int:
        while True:
            try:
                return os.preadv(file.fileno(), [buffer], offset)
            except OSError as error:
                if not attempts.again(error.errno in TRANSIENT):
                    raise reading_failed(error, str(path), f"{len(buffer):,} bytes", offset, attempts.failed) from None

    return pour(read, entry.nbytes)


def check_sha256(path: str | Path | FileAt, entry: FileEntry, found: str) -> None:
    """Raises FormatError unless `found`, the sha256 (hex) of the file's bytes, equals the sha256 in its entry."""
    if found != entry.sha256:
        raise FormatError(
            f"{path}: sha256: expected {entry.sha256}, found {found}; `shardio verify` lists what else is "
            "damaged, and how to repair it"
        )


def check_not_cut(path: str | Path | FileAt, entry: FileEntry, nbytes: int) -> None:
    """Raises FormatError if `nbytes`, the size of an open file now, is less than the size in its entry."""
    if nbytes < entry.nbytes:
        raise FormatError(
            f"{path}: expected {entry.nbytes} bytes, as when it was opened, found {nbytes} bytes: "
            "another process truncated it or is writing to it; a published set must not change. Copy the file again, "
            "or repair the set (`shardio repair`)"
        )
