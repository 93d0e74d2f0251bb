"""Computes from the manifest where each sample of a split is stored, and opens the split's files."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.errors import FormatError, ShardioError
from shardio.format.entries import ArrayEntry, FileEntry, ShardEntry
from shardio.format.layout import HEADER_NBYTES, RowType, SampleShape
from shardio.format.manifest import Manifest
from shardio.format.manifest_file import check_split
from shardio.format.opening import KnownFiles, open_sound
from shardio.order.orders import as_array
from shardio.system.opening import FolderHandle, OpenFile


@dataclass(frozen=True, eq=False)
class StoredTable:
    """A table of rows of `row_nbytes` bytes, stored in `files`: file k has a header and `num_rows[k]` rows.

    The rows hold the pixels of a split, one of its arrays, its index, an order or checksums. `name` names a row in
    messages. With `order`, a table of row numbers, sample i is in row order[i]; without `order`, in row i.
    """

    name: str
    files: Sequence[FileEntry]
    num_rows: Sequence[int]
    row_nbytes: int
    order: StoredTable | None = None

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """The number of the first row of each file, and at the end the number of all rows, int64."""
        return np.cumsum([0, *self.num_rows])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def locate(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns (files, offsets): the number of each row's file, and the row's byte offset. The rows must exist."""
        files: NDArray[np.int64] = np.searchsorted(self.starts, rows, side="right") - 1
        return files, HEADER_NBYTES + (rows - self.starts[files]) * self.row_nbytes

    def what(self, sample: int) -> str:
        """Returns the words for a sample's row in a message: "the NAME of sample 3", or "sample 3" without a name."""
        return f"the {self.name} of sample {sample}" if self.name else f"sample {sample}"


class SplitLayout:
    """The files of one split of the set in the folder `path`, and where each sample is in them. Any number of threads
    may use a layout. Raises SetNotFoundError if the set has no such split."""

    def __init__(self, path: Path, manifest: Manifest, split: str) -> None:
        check_split(path, manifest, split)
        self.path = path
        self.manifest = manifest
        self.split = split
        self.content = manifest.splits[split]
        """The split's entries in the manifest."""
        self.folder = os.path.abspath(path)  # wherever the process may go
        self._known: KnownFiles = {}
        content, count = self.content, [self.content.num_samples]
        self.index_table = StoredTable("index row", [content.index], count, content.index.dtype.itemsize)
        self.orders = tuple(StoredTable("stored row", [order], count, order.row.nbytes) for order in content.orders)
        nbytes = 0 if manifest.pixels_row is None else manifest.pixels_row.nbytes
        self.pixels = self._table("", content.shards, nbytes, content.order)
        self.arrays = {
            name: self._table(name, array.shards, array.row.nbytes, array.order)
            for name, array in content.arrays.items()
        }
        self.crc32s = {
            name: StoredTable(
                f"crc32 of the {name}", [array.crc32], [array.num_rows], array.crc32.row.nbytes, self.arrays[name].order
            )
            for name, array in content.arrays.items()
        }

    def _table(self, name: str, shards: Sequence[ShardEntry], row_nbytes: int, order: int | None) -> StoredTable:
        counts = [shard.num_samples for shard in shards]
        return StoredTable(name, shards, counts, row_nbytes, None if order is None else self.orders[order])

    def __len__(self) -> int:
        return self.content.num_samples

    @property
    def has_pixels(self) -> bool:
        """Whether samples have pixels. If not, they consist of arrays."""
        return self.manifest.sample_shape is not None

    @property
    def sample_shape(self) -> SampleShape:
        """The shape of an image: (height, width, channels). Raises ShardioError if the set has no pixels."""
        if self.manifest.sample_shape is None:
            arrays = ", ".join(self.content.arrays)
            raise ShardioError(
                f"{self.path}, {self.split}: expected a set with pixels, found a set that has only arrays ({arrays}): "
                "gather_array() reads arrays, and `shardio extract` writes them as NPY files"
            )
        return self.manifest.sample_shape

    @property
    def halved(self) -> tuple[int, int] | None:
        """The height and width of images that are stored as yuv420; None if stored rows are the pixels themselves."""
        return self.sample_shape[:2] if self.manifest.pixels == "yuv420" else None

    @property
    def label_row(self) -> RowType | None:
        """The dtype and shape of a label; None if the split has no labels."""
        return self.content.label_row

    @property
    def main_tables(self) -> tuple[str, ...]:
        """Names of the tables that hold the samples: "" for pixels if the set has any, else all arrays' names."""
        return ("",) if self.has_pixels else tuple(self.arrays)

    @property
    def row_nbytes(self) -> int:
        """The bytes of one sample's pixels. Raises ShardioError if the set has no pixels."""
        return self.table_of("").row_nbytes

    def path_of(self, entry: FileEntry) -> str:
        """Returns the absolute path of one of the set's files. (A string: there may be thousands, and a Path costs as
        much as opening the file.)"""
        return f"{self.folder}/{entry.file}"

    def open_file(self, entry: FileEntry, folder: FolderHandle | None = None) -> OpenFile:
        """Opens a file of the split, and checks it as `open_sound` does. Raises FormatError if it differs from the
        manifest. A file that was changed or replaced since it was opened first is hashed.

        With `folder`, an open folder, the file is opened there first, even if the folder's path now leads elsewhere.
        Without `folder`, or if that fails, the file at its path is opened.
        """
        if folder is not None:
            with contextlib.suppress(FormatError, OSError):  # the folder was emptied, or made anew on its server
                return open_sound(folder / entry.file, entry, self._known)
            del folder  # or a caller that keeps an error would keep the folder open
        return open_sound(self.path_of(entry), entry, self._known)

    def check_indices(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns `indices` as int64. Raises ValueError unless they are one-dimensional integers, and IndexError if a
        sample does not exist."""
        indices = as_array("indices", indices)
        if indices.ndim != 1 or indices.dtype.kind not in "iu":
            raise ValueError(
                f"indices must be one-dimensional integers; found {indices.dtype} of shape {indices.shape}"
            )
        if len(indices) and not (indices.min() >= 0 and indices.max() < len(self)):
            raise IndexError(f"indices must be from 0 to {len(self) - 1}; found {indices.min()} to {indices.max()}")
        return indices.astype(np.int64, copy=False)

    def array(self, name: str) -> ArrayEntry:
        """Returns the manifest's entry of an array. Raises ValueError if the split has no array of this name."""
        if name not in self.content.arrays:
            found = ", ".join(self.content.arrays) or "none"
            raise ValueError(f"{self.path}, {self.split}: expected the name of an array ({found}); found {name!r}")
        return self.content.arrays[name]

    def table_of(self, name: str) -> StoredTable:
        """Returns the table with the values of the array `name`, or with the pixels ("")."""
        if name:
            self.array(name)
            return self.arrays[name]
        _ = self.sample_shape  # raises if there are no pixels
        return self.pixels


def as_rows(out: NDArray[Any]) -> NDArray[np.uint8]:
    """Returns a view of `out`, C-contiguous (n, ...), as the bytes of its rows: uint8 (n, nbytes)."""
    nbytes = math.prod(out.shape[1:]) * out.itemsize
    return out.reshape(-1).view(np.uint8).reshape(len(out), nbytes)
