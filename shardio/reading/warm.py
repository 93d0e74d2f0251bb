"""`warm`: brings a set into the page cache by long sequential reads, before a job reads it at random.

It reads files and does not map them: a failing disk or a file that shrinks is an error and not a signal.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from shardio.errors import FormatError, SpaceError
from shardio.format.entries import FileEntry
from shardio.format.layout import SampleShape
from shardio.format.manifest_file import load_manifest
from shardio.format.opening import open_checked
from shardio.reading.shardset import ShardSet
from shardio.system.machine import memory_left
from shardio.system.opening import naming

# Long enough for the streaming rate of disks and servers, short enough for a progress bar.
_PIECE_NBYTES = 8 << 20
_MOST_LOOKED_AT = 1 << 14


@dataclass(frozen=True)
class WarmReport:
    path: str
    splits: tuple[str, ...]
    num_files: int
    nbytes: int
    resident_before: float | None
    """The share of the bytes that was in the page cache before; None if the kernel does not report it."""
    resident_after: float | None
    seconds: float


def warm(
    path: str | os.PathLike[str],
    *,
    split: str | None = None,
    workers: int = 4,
    force: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> WarmReport:
    """Reads the set in the folder `path`, or one split of it, into the page cache.

    Raises SetNotFoundError, FormatError or OSError as when it is opened; SpaceError if it is larger than the memory
    that is left, unless `force` is given. `on_progress` is called in the `workers` threads with (bytes read since the
    last call, bytes in all).
    """
    start = time.perf_counter()
    folder = Path(path)
    manifest = load_manifest(folder)
    names = tuple(manifest.splits) if split is None else (split,)
    sets = [ShardSet(folder, manifest, name) for name in names]
    files = [entry for shards in sets for entry in shards.content.files]
    total = sum(entry.nbytes for entry in files)
    left = memory_left()
    if not force and left is not None and total > left:
        raise SpaceError(
            f"{folder}: expected at most the {left:,} bytes of memory that are left to this process, found {total:,} "
            "bytes to read: the first would be gone from the page cache when the last come. Give the process more "
            "memory, warm one split by `--split`, or warm all by `--force`"
        )
    before = _resident_share(sets)

    def progress(nbytes: int) -> None:
        if on_progress is not None:
            on_progress(nbytes, total)

    def read(piece: tuple[FileEntry, int]) -> None:
        entry, offset = piece
        _read_piece(folder / entry.file, entry, manifest.sample_shape, offset, progress)

    pieces = [(entry, offset) for entry in files for offset in range(0, entry.nbytes, _PIECE_NBYTES)]
    with ThreadPoolExecutor(workers, "shardio-warm") as pool:
        for _ in pool.map(read, pieces):  # which cancels the rest after an error or Ctrl-C
            pass
    seconds = time.perf_counter() - start
    return WarmReport(str(folder), names, len(files), total, before, _resident_share(sets), seconds)


def _read_piece(
    path: Path, entry: FileEntry, sample_shape: SampleShape | None, offset: int, progress: Callable[[int], None]
) -> None:
    stop = min(offset + _PIECE_NBYTES, entry.nbytes)
    # A mapping of its own: given back at once, where malloc might keep it.
    with (
        open_checked(path, entry, sample_shape) as file,
        naming(path),
        mmap.mmap(-1, _PIECE_NBYTES) as scratch,
        memoryview(scratch) as view,
    ):
        while offset < stop:
            with view[: stop - offset] as rest:
                count = os.preadv(file.fileno(), [rest], offset)
            if not count:
                raise FormatError(
                    f"{path}: expected {entry.nbytes} bytes, found {offset}; copy the file again, or convert again"
                )
            progress(count)
            offset += count


def _resident_share(sets: list[ShardSet]) -> float | None:
    """Returns the share of all samples of the sets together, each set looked at as closely as the others."""
    weighted = [
        (shards.resident_share(most=_MOST_LOOKED_AT, name=name), len(shards))
        for shards in sets
        for name in shards.main_tables
    ]
    total = sum(count for _, count in weighted)
    if any(share is None for share, _ in weighted):
        return None
    return sum((share or 0.0) * count for share, count in weighted) / total
