"""Opens files of a published set, and checks their type, size and header on the descriptor that is read or mapped."""

from __future__ import annotations

import os
from pathlib import Path

from shardio.errors import FormatError
from shardio.format.entries import FileEntry
from shardio.format.layout import SampleShape
from shardio.system.opening import FileAt, OpenFile, open_regular


def open_sized(path: str | Path | FileAt, entry: FileEntry) -> OpenFile:
    """Opens a file of a set. Raises FormatError unless it is a regular file of the size that the manifest says."""
    file, nbytes = open_regular(path)
    if nbytes != entry.nbytes:
        file.close()
        raise FormatError(
            f"{path}: expected {entry.nbytes} bytes, as the manifest says, found {nbytes}; "
            "copy the file again, or convert again"
        )
    return file


def open_checked(path: str | Path | FileAt, entry: FileEntry, sample_shape: SampleShape) -> OpenFile:
    """Opens a file of a set of such samples as `open_sized` does, and checks its header, byte for byte."""
    file = open_sized(path, entry)
    header = entry.header(sample_shape)
    try:
        found = os.pread(file.fileno(), len(header), 0)
        if found != header:
            at = next((i for i, (a, b) in enumerate(zip(found, header, strict=False)) if a != b), len(found))
            raise FormatError(
                f"{path}: header: expected {header[at : at + 16]!r} at byte {at}, found {found[at : at + 16]!r}; "
                "copy the file again, or convert again"
            )
    except BaseException:
        file.close()
        raise
    return file


def check_not_cut(path: str | Path | FileAt, entry: FileEntry, nbytes: int) -> None:
    """Raises FormatError if a file that was opened has fewer bytes by now."""
    if nbytes < entry.nbytes:
        raise FormatError(
            f"{path}: expected {entry.nbytes} bytes, as when it was opened, found {nbytes}: another process cut it or "
            "is writing to it; a published set must not change. Copy the file again, or convert again"
        )
