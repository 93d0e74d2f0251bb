"""Fixed-shape samples -> one finished shard.

Pixels are collected in one block and written from it, so that a sample of any layout (a crop of a larger picture, say)
is copied once, checksummed where it lies, and reaches the disk in large writes.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from shardio.files import AtomicFile, naming, reserve, write_all
from shardio.format import (
    IndexColumns,
    SampleShape,
    check_sample_shape,
    index_dtype,
    sample_nbytes,
    shard_header,
    shard_nbytes,
)
from shardio.manifest import ShardEntry

# Large enough for any disk to stream, small enough that dozens of writers fit in memory.
BLOCK_NBYTES = 8 << 20
# The disk is set to work after so much, beside the writing: what a final fsync would have to wait for stays small.
_SYNC_NBYTES = 128 << 20


@dataclass
class IndexRows:
    """The index columns of the samples written so far, in order."""

    labels: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    source_widths: list[int] = field(default_factory=list)
    source_heights: list[int] = field(default_factory=list)
    crc32s: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.labels)

    def to_array(self, key_nbytes: int) -> NDArray[np.void]:
        """As rows of `index_dtype(key_nbytes)`."""
        rows = np.zeros(len(self), index_dtype(key_nbytes))
        rows["label"] = self.labels
        rows["key"] = self.keys
        rows["source_width"] = self.source_widths
        rows["source_height"] = self.source_heights
        rows["crc32"] = self.crc32s
        return rows


def with_columns(
    rows: NDArray[np.void], columns: IndexColumns, values: Mapping[str, NDArray[np.generic]]
) -> NDArray[np.void]:
    """Index rows with these columns added to their fields: a copy. `values` has one value per row for each."""
    fields = rows.dtype.names or ()
    extended = np.empty(len(rows), index_dtype(rows.dtype["key"].itemsize, columns))
    for name in fields:
        extended[name] = rows[name]
    for name, _ in columns:
        extended[name] = values[name]
    return extended


class ShardFileWriter:
    """Writes one shard under a temporary name; `finish` publishes it, leaving the `with` block without it discards it.

    `reserve_samples` is how many samples are expected: so much is allocated on the disk at once. Any other number of
    samples is right too, and costs reading the file once more for its checksum. Not thread safe.

        with ShardFileWriter(path, (256, 256, 3), reserve_samples=1000) as shard:
            shard.append(pixels, label=3, key=b"n01440764/x.JPEG", source_size=(375, 500))
            entry = shard.finish()
    """

    def __init__(self, path: Path, sample_shape: SampleShape, reserve_samples: int = 0) -> None:
        self.path = path
        self.sample_shape = check_sample_shape(sample_shape)
        self.rows = IndexRows()
        self._reserve_samples = reserve_samples
        block_samples = max(1, BLOCK_NBYTES // sample_nbytes(sample_shape))
        self._block = np.empty((block_samples, *sample_shape), np.uint8)
        self._filled = 0
        self._unsynced_nbytes = 0
        self._sync_thread = ThreadPoolExecutor(1, thread_name_prefix="shardio-sync")
        self._sync: Future[None] | None = None
        self._file = AtomicFile(path)
        try:
            header = shard_header(reserve_samples, sample_shape)
            # The usual case is hashed on the way: that all expected samples come.
            self._sha256 = hashlib.sha256(header)
            with naming(path):
                if reserve_samples:
                    reserve(self._file.descriptor, shard_nbytes(reserve_samples, sample_shape))
                write_all(self._file.descriptor, header)
        except BaseException:
            self._file.discard()
            raise

    def __enter__(self) -> ShardFileWriter:
        return self

    def append(self, pixels: NDArray[np.uint8], *, label: int, key: bytes, source_size: tuple[int, int]) -> None:
        """Copy one sample in. `pixels` has the shard's sample shape; `source_size` is (height, width) in pixels."""
        if pixels.shape != self.sample_shape or pixels.dtype != np.uint8:
            raise ValueError(
                f"expected uint8 pixels of shape {self.sample_shape}, found {pixels.dtype} of shape {pixels.shape}"
            )
        if self._filled == len(self._block):
            self._flush()
        row = self._block[self._filled]
        np.copyto(row, pixels)
        self._filled += 1
        rows = self.rows
        rows.labels.append(label)
        rows.keys.append(key)
        rows.source_heights.append(source_size[0])
        rows.source_widths.append(source_size[1])
        rows.crc32s.append(zlib.crc32(row))

    def _flush(self) -> None:
        block = self._block[: self._filled].data.cast("B")
        self._sha256.update(block)
        with naming(self.path):
            write_all(self._file.descriptor, block)
        self._filled = 0
        self._unsynced_nbytes += block.nbytes
        if self._unsynced_nbytes >= _SYNC_NBYTES and (self._sync is None or self._sync.done()):
            self._end_sync()  # raises what the last one met
            self._sync = self._sync_thread.submit(os.fdatasync, self._file.descriptor)
            self._unsynced_nbytes = 0

    def _end_sync(self) -> None:
        if self._sync is not None:
            with naming(self.path):
                self._sync.result()
            self._sync = None

    def finish(self) -> ShardEntry:
        """Publish the shard, durably, and return its manifest entry. ValueError if it has no sample."""
        num_samples = len(self.rows)
        if not num_samples:
            raise ValueError(f"{self.path}: a shard needs at least one sample")
        if self._filled:
            self._flush()
        self._end_sync()
        nbytes = shard_nbytes(num_samples, self.sample_shape)
        if num_samples != self._reserve_samples:
            with naming(self.path):
                os.lseek(self._file.descriptor, 0, os.SEEK_SET)
                write_all(self._file.descriptor, shard_header(num_samples, self.sample_shape))
                os.ftruncate(self._file.descriptor, nbytes)
                self._sha256 = _hash_file(self._file.descriptor)
        self._file.commit()
        return ShardEntry(self.path.name, nbytes, self._sha256.hexdigest(), num_samples)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sync_thread.shutdown()  # before the descriptor is closed
        self._file.discard()


def _hash_file(descriptor: int) -> hashlib._Hash:
    sha256 = hashlib.sha256()
    offset = 0
    while block := os.pread(descriptor, BLOCK_NBYTES, offset):
        sha256.update(block)
        offset += len(block)
    return sha256
