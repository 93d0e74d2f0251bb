"""Writes files of rows: indexes, orders, and the arrays of a split with their checksums."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.format.entries import ArrayEntry, Crc32Entry, IndexEntry, OrderEntry, ShardEntry
from shardio.format.layout import (
    CRC32_ROW,
    HEADER_NBYTES,
    MAX_COUNT,
    ORDER_ROW,
    ArrayKind,
    RowType,
    array_crc32_name,
    array_shard_name,
    crc32,
    has_label,
    index_header,
    index_name,
    order_name,
)
from shardio.system.files import AtomicFile, write_all, write_atomic
from shardio.system.opening import FileAt, FolderHandle, naming
from shardio.system.pour import pour


def write_index(folder: Path | FolderHandle, split: str, rows: NDArray[np.void]) -> IndexEntry:
    """Writes the index of a split, one row per sample. Returns the file's entry for the manifest."""
    body = np.ascontiguousarray(rows).view(np.uint8).data
    written = _write(folder / index_name(split), index_header(len(rows), rows.dtype), body)
    return IndexEntry(*written, rows.dtype["key"].itemsize, has_label(rows.dtype))


def write_order(folder: Path | FolderHandle, split: str, number: int, rows: NDArray[np.int64]) -> OrderEntry:
    """Writes order `number` of a split: `rows`, the stored row of each sample. Returns its entry for the manifest."""
    return OrderEntry(*_write_numbers(folder / order_name(split, number), ORDER_ROW, rows))


def write_crc32s(folder: Path | FolderHandle, split: str, array: str, crc32s: NDArray[np.uint32]) -> Crc32Entry:
    """Writes the checksums of an array's stored rows. Returns the file's entry for the manifest."""
    return Crc32Entry(*_write_numbers(folder / array_crc32_name(split, array), CRC32_ROW, crc32s))


def _write_numbers(path: Path | FileAt, row: RowType, numbers: NDArray[Any]) -> tuple[str, int, str]:
    content = np.ascontiguousarray(numbers, row.dtype)
    return _write(path, row.file_header(len(content)), content.view(np.uint8).data)


def _write(path: Path | FileAt, header: bytes, body: memoryview) -> tuple[str, int, str]:
    """Writes a file durably. Returns its name, its size in bytes and its sha256."""
    sha256 = hashlib.sha256(header)
    sha256.update(body)
    write_atomic(path, header, body)
    return path.name, len(header) + len(body), sha256.hexdigest()


def _as_bytes(values: NDArray[Any]) -> NDArray[np.uint8]:
    nbytes = values.dtype.itemsize * math.prod(values.shape[1:])
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).reshape(len(values), nbytes)


def crc32s_of(values: NDArray[Any]) -> NDArray[np.uint32]:
    """Returns the crc32 of the bytes of each of the n values in `values`, (n, ...), as uint32 (n,)."""
    return np.fromiter(map(crc32, _as_bytes(values)), np.uint32, len(values))


@dataclass(eq=False)
class ArrayWriter:
    """Writes the array `name`, one value for each sample of a split in order, to files of at most `shard_nbytes` bytes.

    A small array gets a single file, of any size. Each file appears when it is complete. `row` has the shape and dtype
    of a value, `kind` what the values mean. Not thread safe.
    """

    folder: Path | FolderHandle
    split: str
    name: str
    kind: ArrayKind
    row: RowType
    shard_nbytes: int

    def __post_init__(self) -> None:
        nbytes = self.shard_nbytes - HEADER_NBYTES
        self._most = MAX_COUNT if self.row.is_small else max(1, nbytes // self.row.nbytes)
        self._file: RowsFile | None = None
        self._shards: list[ShardEntry] = []
        self._crc32s: list[int] = []

    def append(self, values: NDArray[Any]) -> None:
        """Writes the values of the next n samples, (n, *row.shape), in the dtype of `row`. Does not check them."""
        rows = _as_bytes(values)
        self._crc32s += map(crc32, rows)
        while len(rows):
            if self._file is None:
                name = array_shard_name(self.split, self.name, None if self.row.is_small else len(self._shards))
                self._file = RowsFile(self.folder / name, self.row, self._most)
            some = rows[: self._most - self._file.num_rows]
            self._file.write(some)
            rows = rows[len(some) :]
            if self._file.num_rows == self._most:
                self._finish_file()

    def _finish_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with file:
                self._shards.append(file.seal())
                file.commit()

    def finish(self) -> ArrayEntry:
        """Writes the last values and the checksums. Returns the array's entry for the manifest."""
        self._finish_file()
        entry = write_crc32s(self.folder, self.split, self.name, np.array(self._crc32s, np.uint32))
        return ArrayEntry(self.kind, self.row, tuple(self._shards), entry)

    def discard(self) -> None:
        """Removes the array's files, also finished files. May be called again."""
        if self._file is not None:
            self._file.discard()
        numbers = (None, *range(len(self._shards) + 1))  # the last may have been published by a call that then failed
        shards = (array_shard_name(self.split, self.name, number) for number in numbers)
        for file in (*shards, array_crc32_name(self.split, self.name)):
            with contextlib.suppress(FileNotFoundError):
                (self.folder / file).unlink()


class RowsFile(AtomicFile):
    """A file that is written row by row, in order, and hashed meanwhile.

    Its header is written first, for `expected` rows. If there are more or fewer, `seal` corrects it, and hashes again.
    """

    def __init__(self, path: Path | FileAt, row: RowType, expected: int) -> None:
        super().__init__(path)
        self.num_rows = 0
        self.row = row
        self.expected = expected
        header = row.file_header(expected)
        self.sha256 = hashlib.sha256(header)
        try:
            self._start(header)
        except BaseException:
            self.discard()
            raise

    def _start(self, header: bytes) -> None:
        with naming(self.path):
            write_all(self.descriptor, header)

    def write(self, rows: NDArray[np.uint8]) -> None:
        self.sha256.update(rows.data)
        with naming(self.path):
            write_all(self.descriptor, rows.data)
        self.num_rows += len(rows)

    def seal(self) -> ShardEntry:
        """Completes the content, and returns the file's entry for the manifest. Only `commit` may follow."""
        nbytes, sha256 = self.row.file_nbytes(self.num_rows), self.sha256.hexdigest()
        if self.num_rows != self.expected:
            with naming(self.path):
                os.lseek(self.descriptor, 0, os.SEEK_SET)
                write_all(self.descriptor, self.row.file_header(self.num_rows))
                os.ftruncate(self.descriptor, nbytes)  # space may be reserved for more
                sha256 = pour(lambda offset, buffer: os.preadv(self.descriptor, [buffer], offset), nbytes)
        return ShardEntry(self.path.name, nbytes, sha256, self.num_rows, self.row)
