"""Where the samples of a split are stored: arithmetic on its manifest, which opens and maps nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.format.entries import ArrayEntry, FileEntry, ShardEntry
from shardio.format.layout import SampleShape, sample_nbytes
from shardio.format.manifest import Manifest
from shardio.format.manifest_file import check_split
from shardio.order.windows import Windows
from shardio.reading.table import Table


class SplitLayout:
    """The files of one split, and the place of each sample in them. Nothing in it changes.

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
        indices = self.check_indices(indices)
        _check_out(out, np.dtype(np.uint8), _shape_of(indices, self.sample_shape, windows))
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
        indices = self.check_indices(indices)
        _check_out(out, np.dtype(row.dtype), _shape_of(indices, row.shape, windows))
        return indices

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


def _shape_of(indices: NDArray[np.int64], shape: tuple[int, ...], windows: Windows | None) -> tuple[int, ...]:
    """Returns the shape of these samples' rows, each of `shape`, or of windows of them. Raises IndexError unless there
    is a window for each, and inside."""
    if windows is None:
        return (len(indices), *shape)
    for name, places, size, most in (
        ("tops", windows.tops, windows.height, shape[0]),
        ("lefts", windows.lefts, windows.width, shape[1]),
    ):
        if not 0 < size <= most:
            raise IndexError(f"expected windows of at most {shape[:2]}; found {(windows.height, windows.width)}")
        last = most - size
        if len(places) != len(indices) or (len(places) and not 0 <= places.min() <= places.max() <= last):
            raise IndexError(f"expected {len(indices)} {name} from 0 to {last}; found {places}")
    return (len(indices), windows.height, windows.width, *shape[2:])


def as_pictures(out: NDArray[Any]) -> NDArray[np.uint8]:
    """Returns windows of pictures of any type, (n, height, width, ...), as bytes: (n, height, width, bytes)."""
    pictures: NDArray[np.uint8] = out.reshape(*out.shape[:3], -1).view(np.uint8)
    return pictures


def _check_out(out: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    if out.shape != shape or out.dtype != dtype or not out.flags.carray:
        what = "read-only" if not out.flags.writeable else f"{out.dtype} of {out.shape}"
        raise ValueError(f"out must be C-contiguous, writeable {dtype} of shape {shape}; found {what}")
