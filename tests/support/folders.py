"""Folders: filling them, and telling whether what is in them has changed."""

from __future__ import annotations

import hashlib
import os
from os import fsync  # the one that does sync
from pathlib import Path


def put(root: Path, *names: str | bytes, content: bytes = b"x") -> None:
    """Writes files at these paths below `root`; a path that ends in / becomes an empty folder."""
    for name in names:
        path = os.path.join(os.fsencode(root), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if not path.endswith(b"/"):
            with open(path, "wb") as file:
                file.write(content)


def hashes(folder: Path) -> dict[str, str]:
    """Returns sha256 of every file at or below `folder`, hidden ones included."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Returns inode and time of modification of every shard: both change when one is made again."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("*-[0-9]*.npy")}


def everything(folder: Path) -> dict[str, tuple[int, int]]:
    """Returns inode and time of every file at or below `folder`: one changes when a file is replaced or written."""
    files = [path for path in folder.rglob("*") if not path.is_dir()]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


def used_nbytes(cache: Path) -> int:
    """Returns the size of the files of all copies in a cache, each once."""
    files = {path.stat().st_ino: path.stat().st_size for path in cache.glob("*/*")}
    return sum(files.values())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


ODD_NAMES = [b"a", b"a-b", b"a.b", b"a b", b"B", b"b", b"10", b"9", b"\xc3\xa9t\xc3\xa9", b"\xff\xfe", b"new\nline"]
ODD_NAMES += [b'quo"te', b"it's", b"-rf", b"*", b"$(x)", b"%s", b"a\\b", b"~"]


def flip(path: Path, offset: int = -1, bit: int = 0) -> None:
    """Flips one bit of a file, as a disk would: its times stay. Offsets below 0 count from its end."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1 << bit]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def drop(path: Path) -> None:
    """Drops the shards and indexes of a set from the page cache."""
    for file in path.glob("*.npy"):
        with file.open("rb") as opened:
            fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
