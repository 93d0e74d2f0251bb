"""Where the samples of a split are stored: arithmetic on its manifest; and how its files are opened."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.format.entries import ArrayEntry, FileEntry, ShardEntry
from shardio.format.layout import RowType, SampleShape, sample_nbytes
from shardio.format.manifest import Manifest
from shardio.format.manifest_file import check_split
from shardio.format.opening import SoundFiles, open_sound
from shardio.kernels.rowcopy import Windows
from shardio.reading.table import Table
from shardio.system.opening import OpenFile


class SplitLayout:
    """The files of one split, and the place of each sample in them. Any number of threads may use it.

    Raises SetNotFoundError if the set has no such split.
    """

    def __init__(self, path: Path, manifest: Manifest, split: str) -> None:
        check_split(path, manifest, split)
        self.path = path
        self.manifest = manifest
        self.split = split
        self.content = manifest.splits[split]
        """The split's entries in the manifest."""
        self.folder = os.path.abspath(path)  # wherever the process may go
        self._sound: SoundFiles = {}
        content, count = self.content, [self.content.num_samples]
        self.index_table = Table("index row", [content.index], count, content.index.dtype.itemsize)
        self.orders = tuple(Table("stored row", [order], count, order.row.nbytes) for order in content.orders)
        nbytes = sample_nbytes(manifest.sample_shape)
        self.pixels = Table("", content.shards, _counts(content.shards), nbytes, self._order(content.order))
        self.arrays = {
            name: Table(name, array.shards, _counts(array.shards), array.row.nbytes, self._order(array.order))
            for name, array in content.arrays.items()
        }
        self.crc32s = {
            name: Table(f"crc32 of the {name}", [array.crc32], [array.num_rows], array.crc32.row.nbytes, table.order)
            for (name, array), table in zip(self.content.arrays.items(), self.arrays.values(), strict=True)
        }

    def _order(self, number: int | None) -> Table | None:
        return None if number is None else self.orders[number]

    def __len__(self) -> int:
        return self.content.num_samples

    @property
    def sample_shape(self) -> SampleShape:
        """(height, width, channels)"""
        return self.manifest.sample_shape

    @property
    def row_nbytes(self) -> int:
        """The bytes of one sample's pixels."""
        return self.pixels.row_nbytes

    def path_of(self, entry: FileEntry) -> str:
        """Returns the absolute path of one of the set's files. (A string: there may be thousands, and a Path costs as
        much as opening the file.)"""
        return f"{self.folder}/{entry.file}"

    def open_file(self, entry: FileEntry) -> OpenFile:
        """Opens a file of the split, checked: of index, orders and checksums, every byte. A reader that opens a file
        anew costs no second read of it, unless the file was changed or replaced."""
        return open_sound(self.path_of(entry), entry, self.sample_shape, self._sound)

    def check_indices(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns them as int64. Raises ValueError if they are no integers, IndexError if one is of no sample."""
        indices = np.asarray(indices)
        if indices.ndim != 1 or indices.dtype.kind not in "iu":
            raise ValueError(
                f"indices must be one-dimensional integers; found {indices.dtype} of shape {indices.shape}"
            )
        if len(indices) and not (indices.min() >= 0 and indices.max() < len(self)):
            raise IndexError(f"indices must be from 0 to {len(self) - 1}; found {indices.min()} to {indices.max()}")
        return indices.astype(np.int64, copy=False)

    def check_request(
        self, indices: NDArray[np.int64], out: NDArray[np.uint8], windows: Windows | None = None
    ) -> NDArray[np.int64]:
        """Returns the indices as int64. Raises ValueError or IndexError unless `out` can hold these samples, or these
        windows of them: `ShardSet.gather` says when."""
        return self._checked(RowType("|u1", self.sample_shape), indices, out, windows)

    def _checked(
        self, row: RowType, indices: NDArray[np.int64], out: NDArray[Any], windows: Windows | None
    ) -> NDArray[np.int64]:
        indices = self.check_indices(indices)
        if windows is None:
            _check_out(out, np.dtype(row.dtype), (len(indices), *row.shape))
        else:
            _check_windows(out, row, len(indices), windows)
        return indices

    def array(self, name: str) -> ArrayEntry:
        """Returns what the manifest says of an array. Raises ValueError if the split has none of this name."""
        if name not in self.content.arrays:
            found = ", ".join(self.content.arrays) or "none"
            raise ValueError(f"{self.path}, {self.split}: expected an array of the split ({found}); found {name!r}")
        return self.content.arrays[name]

    def check_array_request(
        self, name: str, indices: NDArray[np.int64], out: NDArray[Any], windows: Windows | None = None
    ) -> NDArray[np.int64]:
        """Returns the indices as int64. Raises ValueError or IndexError unless `out` can hold the array's values of
        these samples, or these windows of them: `ShardSet.gather_array` says when."""
        row = self.array(name).row
        if windows is not None and not self.has_windows(name):
            raise ValueError(f"expected an array of masks or images, of which windows are read; found {name!r}")
        return self._checked(row, indices, out, windows)

    def has_windows(self, name: str) -> bool:
        """Returns whether the values of an array, or the pixels ("") are pictures, of which windows can be read."""
        return not name or self.array(name).kind in ("mask", "image")

    def table_of(self, name: str) -> Table:
        """Returns the table of an array, or of the pixels ("")."""
        if name:
            self.array(name)
            return self.arrays[name]
        return self.pixels

    def picture_shape(self, name: str) -> SampleShape:
        """Returns (height, width, bytes per pixel) of an array that has windows, or of the pixels ("")."""
        height, width = self.array(name).row.shape[:2] if name else self.sample_shape[:2]
        return height, width, self.table_of(name).row_nbytes // (height * width)


def _counts(shards: Sequence[ShardEntry]) -> list[int]:
    return [shard.num_samples for shard in shards]


def _check_windows(out: NDArray[Any], row: RowType, count: int, windows: Windows) -> None:
    """Raises ValueError or IndexError unless there is a window for each of `count` pictures, rows of this type, and
    `out` can hold them."""
    windows.check_inside(*row.shape[:2])
    if len(windows) != count:
        raise IndexError(f"expected {count} windows; found {len(windows)}")
    pixel = row.shape[2:]
    shape: tuple[int, ...] = (int(windows.num_pixels.sum()) * math.prod(pixel),)
    if out.ndim != 1 and count:  # windows of one size may have an axis each
        shape = (count, int(windows.heights[0]), int(windows.widths[0]), *pixel)
        if (windows.heights != shape[1]).any() or (windows.widths != shape[2]).any():
            raise ValueError(f"expected out of one dimension, for windows of several sizes; found {out.shape}")
    _check_out(out, np.dtype(row.dtype), shape if count else out.shape)


def as_bytes(out: NDArray[Any]) -> NDArray[np.uint8]:
    """Returns C-contiguous memory as its bytes, (n,)."""
    memory: NDArray[np.uint8] = out.reshape(-1).view(np.uint8)
    return memory


def _check_out(out: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    if out.shape != shape or out.dtype != dtype or not out.flags.carray:
        what = "read-only" if not out.flags.writeable else f"{out.dtype} of {out.shape}"
        raise ValueError(f"out must be C-contiguous, writeable {dtype} of shape {shape}; found {what}")
