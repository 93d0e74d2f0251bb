"""Tars, and single blocks of them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable

from shardio.conversion.sources.tar import BLOCK_NBYTES

Files = Iterable[tuple[str, bytes]]


def tar_of(files: Files, kind: int = tarfile.GNU_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=kind) as tar:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(content), 1_300_000_000
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def header(name: bytes = b"a", nbytes: int = 0, kind: bytes = b"0", **changes: bytes) -> bytes:
    """One header with the right checksum, whatever else is in it."""
    fields = {
        "name": name.ljust(100, b"\0"),
        "mode": b"0000644\0" + b"0000000\0" * 2,
        "size": b"%011o\0" % nbytes,
        "time": b"00000000000\0",
        "checksum": b" " * 8,
        "kind": kind,
        "link": bytes(100),
        "magic": b"ustar  \0",
        "rest": bytes(247),
    } | changes
    block = b"".join(fields.values())
    assert len(block) == BLOCK_NBYTES
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


END = bytes(2 * BLOCK_NBYTES)
