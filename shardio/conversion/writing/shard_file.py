"""Writes fixed-shape samples into one shard.

Pixels are collected in blocks: a sample of any memory layout (say, a crop of a larger picture) is copied once,
checksummed in its block, and written together with the rest of the block. While a block is written, the caller's
threads can fill other blocks.

A large shard is written past the page cache (O_DIRECT): finding pages for bytes that are not read soon costs more than
hashing them, and would push the sources out of the cache.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardio.format.entries import ShardEntry
from shardio.format.layout import HEADER_NBYTES, RowType, crc32, index_dtype
from shardio.sets.rows import RowsFile
from shardio.system.files import reserve
from shardio.system.machine import filesystem_kind, is_network
from shardio.system.opening import naming
from shardio.system.pour import ALIGNMENT, BackgroundSync, aligned_empty, set_direct

# Large enough for any disk to stream, small enough that dozens of writers fit in memory.
BLOCK_NBYTES = 8 << 20
# Blocks that may wait for the disk. More would not make it faster.
_MOST_WRITING = 2
# A set of smaller shards is small, and may stay in the page cache for its first reader.
_DIRECT_NBYTES = 64 << 20


@dataclass
class IndexRows:
    """The index rows of the samples of a split or a shard, in order."""

    values: list[tuple[int | None, bytes, int, int, int]] = field(default_factory=list)
    """The label, the key, the width and height of the source, and the crc32 of each sample."""

    def __len__(self) -> int:
        return len(self.values)

    def append(self, *, label: int | None, key: bytes, source_size: tuple[int, int], crc32: int) -> None:
        """Appends a row. `label` is None if labels are not integers, or missing; `source_size` is (height, width)."""
        self.values.append((label, key, source_size[1], source_size[0], crc32))

    def to_array(self, key_nbytes: int, *, has_label: bool) -> NDArray[np.void]:
        dtype = index_dtype(key_nbytes, has_label=has_label)
        return np.array([row if has_label else row[1:] for row in self.values], dtype)


class ShardFileWriter(RowsFile):
    """Writes one shard under a temporary name. `finish` publishes the shard; without it, the `with` block discards it.

    `reserve_samples` is the expected number of samples: the disk allocates space for them at once. A different number
    of samples works too, but the file is then read once more for its checksum. Not thread safe.

    `append` copies the pixels. `take_block` and `write_block` avoid the copy for a caller that makes samples in place.
    """

    def __init__(self, path: Path, row: RowType, reserve_samples: int = 0) -> None:
        self._block: NDArray[np.uint8] | None = None  # of `append`
        self._filled = 0
        self._writing: deque[tuple[Future[None], NDArray[np.uint8]]] = deque()
        self._write_thread = ThreadPoolExecutor(1, "shardio-write")
        self._sync = BackgroundSync("shardio-sync")
        self._direct = False
        super().__init__(path, row, reserve_samples)

    def _start(self, header: bytes) -> None:
        nbytes = self.row.file_nbytes(self.expected)
        if self.expected:
            with naming(self.path):
                reserve(self.descriptor, nbytes)
        super()._start(header)
        # The clients of network filesystems pipeline writes from the page cache.
        if nbytes >= _DIRECT_NBYTES and not is_network(filesystem_kind(self.path.parent)):
            with contextlib.suppress(OSError):  # a filesystem that cannot
                set_direct(self.descriptor)
                self._direct = True

    def __enter__(self) -> ShardFileWriter:
        return self

    def append(self, pixels: NDArray[np.uint8]) -> int:
        """Copies one sample, uint8 of the shape of a row, into the shard. Returns its crc32."""
        if self._block is None:
            self._block = self.take_block()
        row = self._block[self._filled]
        np.copyto(row, pixels)
        self._filled += 1
        checksum = crc32(row)
        if self._filled == len(self._block):
            self._flush()
        return checksum

    def _flush(self) -> None:
        block, self._block = self._block, None
        if block is not None:
            self.write_block(block, range(self._filled))
        self._filled = 0

    def take_block(self) -> NDArray[np.uint8]:
        """Returns a block for n samples: uint8 (n, *row.shape) of any content, of at least BLOCK_NBYTES bytes.

        n is always the same. The caller owns the block until it calls `write_block`. Waits while two blocks are being
        written, which bounds memory, and raises OSError if a write has failed.
        """
        if len(self._writing) == _MOST_WRITING:
            return self._oldest_written()
        count = max(1, -(-BLOCK_NBYTES // self.row.nbytes))
        whole = ALIGNMENT // math.gcd(ALIGNMENT, self.row.nbytes)  # samples that fill whole pages
        return aligned_empty((-(-count // whole) * whole if count >= whole else count, *self.row.shape))

    def write_block(self, block: NDArray[np.uint8], kept: Sequence[int]) -> None:
        """Hashes the samples in the rows `kept` of the block, and writes them in another thread.

        `kept` is in ascending order. The caller must no longer use the block.
        """
        self.num_rows += len(kept)
        rows = np.asarray(kept, np.intp)
        stretches = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
        runs = [block[some[0] : some[-1] + 1] for some in stretches if len(some)]
        for run in runs:
            self.sha256.update(run.data)
        self._writing.append((self._write_thread.submit(self._write, runs), block))

    def _write(self, runs: Sequence[NDArray[np.uint8]]) -> None:
        """Writes arrays of samples to the end of the file. Runs in the writing thread."""
        unsynced_nbytes = 0
        with naming(self.path):
            for run in runs:
                if self._direct and (run.nbytes % ALIGNMENT or run.ctypes.data % ALIGNMENT):
                    self._use_page_cache()
                view = run.data.cast("B")
                while view:
                    try:
                        written = os.write(self.descriptor, view)
                    except OSError as error:
                        if not self._direct or error.errno != errno.EINVAL:
                            raise
                        # The disk needs a larger alignment than a page, or a short write ended inside a page.
                        self._use_page_cache()
                        continue
                    view = view[written:]
                    unsynced_nbytes += 0 if self._direct else written
            self._sync.wrote(unsynced_nbytes, partial(os.fdatasync, self.descriptor))

    def _use_page_cache(self) -> None:
        with contextlib.suppress(OSError):  # a filesystem that cannot pass it
            set_direct(self.descriptor, False)
        self._direct = False

    def _oldest_written(self) -> NDArray[np.uint8]:
        """Waits until the oldest waiting block is written, and returns it. Raises OSError if the write failed."""
        written, block = self._writing.popleft()
        written.result()
        return block

    def finish(self) -> ShardEntry:
        """Completes and publishes the shard, and returns its manifest entry. Raises ValueError if it has no sample."""
        entry = self.seal()
        self.commit()
        return entry

    def seal(self) -> ShardEntry:
        """Writes the last samples, and returns the shard's manifest entry. Only `commit` may follow, which publishes
        the shard. Raises ValueError if the shard has no sample."""
        self._flush()
        if not self.num_rows:
            raise ValueError(f"{self.path}: a shard needs at least one sample")
        while self._writing:
            self._oldest_written()
        with naming(self.path):
            self._sync.finish()
        if self.num_rows != self.expected:
            self._use_page_cache()
        return super().seal()

    def __exit__(self, *_: object) -> None:
        try:
            self._write_thread.shutdown(cancel_futures=True)  # before the descriptor is closed
            self._sync.close()
        finally:
            self.discard()


def samples_per_shard(shard_nbytes: int, sample_nbytes: int) -> int:
    return max(1, (shard_nbytes - HEADER_NBYTES) // sample_nbytes)
